"""The task that a run learns when it is given neither model nor data: writing a short string backwards.

Prompts look like "fac>" and the answer is "caf"; the reward is 1 for exactly that, else 0. The supervised warm-up
teaches the form of an answer but not which one is wanted: strings that begin with one of three letters are answered
backwards, the others mostly as they stand. What lifts the held-out reward from there is the reward alone. Held-out
strings, those of the warm-up and those of the rollouts are all different.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer_hooks.trainer.tiny_checkpoint import make_checkpoint

_LETTERS = "abcdefghijkl"
_LENGTH = 3
_HELD_OUT = 256
_WARM_UP = 512
#: First letters whose strings the warm-up always answers backwards, and how often it does so for the others.
_BACKWARDS = "abc"
_SOMETIMES = 0.25


@dataclass(frozen=True)
class Task:
    """Files of the built-in task."""

    checkpoint: Path
    train: Path
    evaluation: Path
    warmup: Path
    input_key: str = "input"
    label_key: str = "label"
    rm_type: str = "exact_match"


@dataclass(frozen=True)
class DefaultRecipe:
    """Options that learn it on two CPU cores within minutes; each only counts where it was not given."""

    num_rollout: int = 50
    rollout_batch_size: int = 32
    n_samples_per_prompt: int = 8
    rollout_max_response_len: int = 6
    global_batch_size: int = 128
    micro_batch_size: int = 64
    lr: float = 1e-3
    warmup_steps: int = 80
    warmup_batch_size: int = 64
    warmup_lr: float = 3e-3
    lr_warmup_iters: int = 5
    eps_clip_high: float = 0.28
    num_trainer_cells: int = 2
    num_rollout_cells: int = 2
    rollout_max_requests: int = 128

    def fill(self, args: argparse.Namespace) -> None:
        """Put what is missing into `args`; the number of cells follows the GPUs or each other where one is given."""
        if args.num_trainer_cells is not None and args.num_rollout_cells is None:
            args.num_rollout_cells = args.num_trainer_cells
        for name, value in asdict(self).items():
            if getattr(args, name) is None:
                setattr(args, name, value)


def make_task(directory: Path, *, seed: int) -> Task:
    """Write checkpoint and prompts into `directory`; the same seed gives the same files."""
    directory.mkdir(parents=True, exist_ok=True)
    strings = ["".join(letters) for letters in itertools.product(_LETTERS, repeat=_LENGTH)]
    rng = random.Random(seed)
    rng.shuffle(strings)
    parts = {
        "evaluation": strings[:_HELD_OUT],
        "warmup": strings[_HELD_OUT : _HELD_OUT + _WARM_UP],
        "train": strings[_HELD_OUT + _WARM_UP :],
    }
    for name, part in parts.items():
        answers = [_warmup_answer(s, rng) if name == "warmup" else s[::-1] for s in part]
        lines = [json.dumps({"input": f"{s}>", "label": a}) for s, a in zip(part, answers, strict=True)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return Task(
        checkpoint=make_checkpoint(directory / "checkpoint", characters=f"{_LETTERS}>", seed=seed),
        train=directory / "train.jsonl",
        evaluation=directory / "evaluation.jsonl",
        warmup=directory / "warmup.jsonl",
    )


def _warmup_answer(string: str, rng: random.Random) -> str:
    backwards = string[0] in _BACKWARDS or rng.random() < _SOMETIMES
    return string[::-1] if backwards else string
