"""Rewards: the user's own function (`--custom-rm-path`), or one of a few that need no model (`--rm-type`)."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from trainer_hooks.trainer.sample import Sample

#: (args, sample) → reward or an awaitable of it
Reward = Callable[[argparse.Namespace, Sample], Any]


def exact_match(args: argparse.Namespace, sample: Sample) -> float:
    """1 if the response is the label, white space at both ends aside, else 0."""
    return float(sample.response.strip() == str(sample.label).strip())


def position_match(args: argparse.Namespace, sample: Sample) -> float:
    """Share of the places that hold the right character; a response that is too long or short loses for each place."""
    response, label = sample.response.strip(), str(sample.label).strip()
    right = sum(a == b for a, b in zip(response, label, strict=False))
    return right / max(len(response), len(label), 1)


REWARDS: dict[str, Reward] = {"exact_match": exact_match, "position_match": position_match}


def load_reward(args: argparse.Namespace) -> Reward:
    """The reward that the options name. Raises ValueError naming the option, ImportError for a module that is not there."""
    if args.custom_rm_path:
        return _import(args.custom_rm_path)
    if args.rm_type is None:
        raise ValueError("--rm-type or --custom-rm-path is needed: nothing says how to reward a response")
    if args.rm_type not in REWARDS:
        raise ValueError(f"--rm-type {args.rm_type!r} is unknown; known are {', '.join(sorted(REWARDS))}")
    return REWARDS[args.rm_type]


def _import(path: str) -> Reward:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"--custom-rm-path {path!r} must be module.function")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ImportError(f"--custom-rm-path {path}: {error}") from error
    if not callable(function):
        raise ValueError(f"--custom-rm-path {path}: module {module} has no function {name!r}")
    return function  # type: ignore[no-any-return]
