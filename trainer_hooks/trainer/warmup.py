"""A short supervised warm-up before the first rollout, through the same cells, votes and optimizer as the RL steps."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

from trainer_hooks.cells.quorum import Step
from trainer_hooks.trainer.data import read_pairs
from trainer_hooks.trainer.report import Report
from trainer_hooks.trainer.runtime import Runtime


def supervised_warmup(args: argparse.Namespace, runtime: Runtime, tokenizer: Any, report: Report) -> None:
    """`--warmup-steps` optimizer steps of cross entropy on the answers in `--warmup-data`; nothing without either."""
    if not args.warmup_data or not args.warmup_steps:
        return
    pairs = read_pairs(args.warmup_data, input_key=args.input_key, label_key=args.label_key)
    examples = [_example(tokenizer, prompt, answer) for prompt, answer in pairs]
    order = random.Random(args.seed)
    size = args.warmup_batch_size or len(examples)
    report.note(f"supervised warm-up: {args.warmup_steps} steps on {len(examples)} examples (not counted as learning)")
    rl = runtime.train_spec().optimizer
    lr = args.warmup_lr if args.warmup_lr is not None else args.lr
    runtime.group.use_optimizer(replace(rl, lr=lr, min_lr=0.0, lr_decay_style="constant", lr_warmup_steps=0))
    with report.phase("warm-up"):
        for step in range(args.warmup_steps):
            chosen = order.sample(examples, min(size, len(examples)))
            tokens = sum(len(answer) for _, answer in chosen)
            data = {
                "tokens": [[*prompt, *answer] for prompt, answer in chosen],
                "response_lengths": [len(answer) for _, answer in chosen],
                "loss_masks": [[1] * len(answer) for _, answer in chosen],
                "weights": [[1 / tokens] * len(answer) for _, answer in chosen],
                "dynamic_global_batch_size": len(chosen),
            }
            # negative rollout ids: before the first rollout
            metrics = runtime.group.train_step(Step("actor", -1, step), data, objective="supervised")
    report.note(f"supervised warm-up done: cross entropy {metrics['loss']:.3f}")
    runtime.group.use_optimizer(rl)


def _example(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids, [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
