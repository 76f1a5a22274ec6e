"""From checked options to a job that can start: the default task's files, tokenizer, data, reward."""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hooks.trainer.data import PromptData
from trainer_hooks.trainer.rewards import load_reward


@dataclass
class Job:
    """A run with everything that can be wrong about its input already read."""

    args: argparse.Namespace
    tokenizer: Any
    reward: Any
    prompts: PromptData
    held_out: PromptData | None

    def run(self) -> int:
        """Run it; the exit status."""
        from trainer_hooks.trainer.loop import train
        from trainer_hooks.trainer.report import Report
        from trainer_hooks.trainer.rollout import Rollouts
        from trainer_hooks.trainer.runtime import Runtime

        args = self.args
        with Report(args.output_dir, args.num_rollout, append=args.load is not None) as report:
            report.note(f"{args.num_trainer_cells} trainer cells, {args.num_rollout_cells} rollout cells; starting")
            try:
                with Runtime(args) as runtime:
                    rollouts = Rollouts(
                        args,
                        runtime.generation,
                        self.reward,
                        self.tokenizer,
                        context_length=runtime.context_length,
                        sampling=runtime.sampling(),
                    )
                    train(args, runtime, rollouts, self.prompts, self.held_out, report)
            except KeyboardInterrupt:
                print("interrupted; everything was ended", file=sys.stderr)
                return 130
            except Exception as error:  # the run is over whatever it was; the whole story goes to a file
                log = Path(args.output_dir) / "error.log"
                log.write_text("".join(traceback.format_exception(error)))
                first = str(error).strip().splitlines()[0] if str(error).strip() else ""
                print(f"error: {type(error).__name__}: {first} (details: {log})", file=sys.stderr)
                return 1
        report.summary()
        return 0


def prepare(args: argparse.Namespace) -> Job:
    """Fill in defaults and read every input. Raises OSError or ValueError naming option, file and line."""
    from transformers import AutoTokenizer

    if args.hf_checkpoint is None:
        from trainer_hooks.trainer.task import DefaultRecipe, make_task

        task = make_task(Path(args.output_dir) / "task", seed=args.seed)
        args.hf_checkpoint, args.prompt_data = str(task.checkpoint), str(task.train)
        args.eval_prompt_data = args.eval_prompt_data or str(task.evaluation)
        args.warmup_data = args.warmup_data or str(task.warmup)
        args.input_key, args.label_key = task.input_key, task.label_key
        args.rm_type = args.rm_type or (None if args.custom_rm_path else task.rm_type)
        DefaultRecipe().fill(args)
    else:
        fallback(args)
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    keys = dict(
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tokenizer=tokenizer,
        apply_chat_template=args.apply_chat_template,
        n_samples_per_prompt=args.n_samples_per_prompt,
    )
    prompts = PromptData(args.prompt_data, shuffle=args.rollout_shuffle, seed=args.rollout_seed, **keys)
    held_out = None
    if args.eval_prompt_data:
        held_out = PromptData(args.eval_prompt_data, option="--eval-prompt-data", **{**keys, "n_samples_per_prompt": 1})
    return Job(args, tokenizer, load_reward(args, prompts.prompts), prompts, held_out)


#: What a run on the user's own model and data takes where an option is not given.
_FALLBACK = {
    "num_rollout": 100,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 1024,
    "lr": 1e-6,
    "lr_warmup_iters": 0,
    "micro_batch_size": 4,
}


def fallback(args: argparse.Namespace) -> None:
    for name, value in _FALLBACK.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    counts(args)


def counts(args: argparse.Namespace) -> None:
    """How many cells: from the GPUs where they are given, else as many rollout cells as trainer cells."""
    size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    ranks = args.trainer_cell_size or size
    if args.num_trainer_cells is None:
        args.num_trainer_cells = args.actor_num_gpus // ranks if args.actor_num_gpus else 1
    if args.num_rollout_cells is None:
        tp = args.rollout_tensor_model_parallel_size or args.tensor_model_parallel_size
        pp = args.rollout_pipeline_model_parallel_size or args.pipeline_model_parallel_size
        args.num_rollout_cells = args.rollout_num_gpus // (tp * pp) if args.rollout_num_gpus else args.num_trainer_cells
