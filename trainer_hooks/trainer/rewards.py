"""Rewards: the user's own function (`--custom-rm-path module.fn`), or one that needs no model (`--rm-type`).

The function is slime's and Miles': `async def fn(args, sample)`; a plain `def` works too. It returns a number, or a
mapping of which `--reward-key` names the one that counts.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer_hooks.trainer.data import Prompt
from trainer_hooks.trainer.sample import Sample

#: (args, sample) → reward, or an awaitable of it
Reward = Callable[[argparse.Namespace, Sample], Any]


class RewardError(RuntimeError):
    """A reward function failed or returned what is no reward; the message names function and sample."""


def exact_match(args: argparse.Namespace, sample: Sample) -> float:
    """1 if the response is the label, white space at both ends aside, else 0."""
    return float(sample.response.strip() == str(sample.label).strip())


def position_match(args: argparse.Namespace, sample: Sample) -> float:
    """Share of the places that hold the right character; a response that is too long or short loses for each place."""
    response, label = sample.response.strip(), str(sample.label).strip()
    right = sum(a == b for a, b in zip(response, label, strict=False))
    return right / max(len(response), len(label), 1)


REWARDS: dict[str, Reward] = {"exact_match": exact_match, "position_match": position_match}


def load_reward(args: argparse.Namespace, prompts: Iterable[Prompt] = ()) -> Reward:
    """The reward that the options name; as in slime, `rm_type` in a prompt's metadata goes before `--rm-type`.

    Raises ValueError naming the option: nothing chosen, an unknown type (in `prompts` too), a path that leads to no
    function of two arguments, or a module that cannot be imported (with its own error).
    """
    if args.custom_rm_path:
        return _import(args.custom_rm_path)
    if args.rm_type is None:
        raise ValueError("--rm-type or --custom-rm-path is needed: nothing says how to reward a response")
    known = ", ".join(sorted(REWARDS))
    if args.rm_type not in REWARDS:
        raise ValueError(f"--rm-type {args.rm_type!r} is unknown; known are {known}")
    for number, prompt in enumerate(prompts, 1):
        if (name := prompt.metadata.get("rm_type", args.rm_type)) not in REWARDS:
            raise ValueError(f"--prompt-data, prompt {number}: rm_type {name!r} in its metadata is none of {known}")
    return by_type


def by_type(args: argparse.Namespace, sample: Sample) -> Any:
    """The built-in reward named by the sample's metadata or else by `--rm-type`."""
    return REWARDS[sample.metadata.get("rm_type", args.rm_type)](args, sample)


async def reward_samples(
    reward: Reward, args: argparse.Namespace, samples: Sequence[Sample], *, timeout_s: float = 600.0
) -> None:
    """Set `sample.reward` of all samples, a finite float; a mapping's other keys go to `sample.metadata["reward"]`.

    Asynchronous rewards are awaited together, each at most `timeout_s` seconds; a plain function is not interrupted.
    Raises RewardError for the first sample whose reward raised, is no finite number, or did not come in time.
    """
    tasks = [asyncio.ensure_future(_reward_one(reward, args, sample, timeout_s)) for sample in samples]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _reward_one(reward: Reward, args: argparse.Namespace, sample: Sample, timeout_s: float) -> None:
    name = f"reward {getattr(reward, '__name__', repr(reward))} of sample {sample.index}"
    deadline = None
    try:
        value = reward(args, sample)
        if inspect.isawaitable(value):
            deadline = asyncio.timeout(timeout_s)
            async with deadline:
                value = await value
    except Exception as error:
        if deadline is not None and deadline.expired():
            raise RewardError(f"{name} took more than {timeout_s:g} s") from error
        raise RewardError(f"{name}: {type(error).__name__}: {error}") from error
    sample.reward = _number(value, args, sample, name)


def _number(value: Any, args: argparse.Namespace, sample: Sample, name: str) -> float:
    if isinstance(value, Mapping):
        key = getattr(args, "reward_key", None)
        if key not in value:
            raise RewardError(f"{name} is a mapping of {', '.join(map(str, value))}; --reward-key is {key!r}")
        sample.metadata = {**sample.metadata, "reward": dict(value)}
        value = value[key]
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{name} is {value!r}; a finite number is needed")
    return number


def _import(path: str) -> Reward:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"--custom-rm-path {path!r} must be module.function")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise ValueError(f"--custom-rm-path {path}: importing {module}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"--custom-rm-path {path}: module {module} has no function {name!r}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(f"--custom-rm-path {path}: it must take (args, sample): {error}") from error
    return function  # type: ignore[no-any-return]
