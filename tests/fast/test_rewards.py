"""Rewards: the built-in ones, a user's own function in slime's form, and what is said when either fails."""

from __future__ import annotations

import argparse
import asyncio
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_hooks.trainer.data import Prompt
from trainer_hooks.trainer.rewards import (
    RewardError,
    exact_match,
    load_reward,
    position_match,
    reward_samples,
)
from trainer_hooks.trainer.sample import Sample


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"rm_type": None, "custom_rm_path": None, "reward_key": None, **values})


def answered(response: str, label: Any = "abc", **values: Any) -> Sample:
    return Sample(response=response, label=label, **values)


def rewarded(reward: Any, *samples: Sample, args: argparse.Namespace | None = None, **more: Any) -> list[Any]:
    asyncio.run(reward_samples(reward, args or options(), samples, **more))
    return [sample.reward for sample in samples]


@pytest.mark.parametrize(
    ("response", "label", "exact", "position"),
    [
        ("abc", "abc", 1, 1),
        (" abc\n", "abc", 1, 1),
        ("12", 12, 1, 1),
        ("abd", "abc", 0, 2 / 3),
        ("ab", "abc", 0, 2 / 3),
        ("abcx", "abc", 0, 3 / 4),
        ("", "abc", 0, 0),
        ("cab", "abc", 0, 0),
        ("", "", 1, 0),
    ],
)
def test_built_in_rewards(response: str, label: Any, exact: float, position: float) -> None:
    sample = answered(response, label)
    assert exact_match(options(), sample) == exact
    assert position_match(options(), sample) == pytest.approx(position)


@given(st.text("ab ", max_size=6), st.text("ab ", max_size=6))
def test_built_in_rewards_are_shares(response: str, label: str) -> None:
    sample = answered(response, label)
    assert 0 <= position_match(options(), sample) <= 1
    if label.strip():
        assert (position_match(options(), sample) == 1) == (exact_match(options(), sample) == 1)


def test_rm_type_and_its_override_in_metadata() -> None:
    args = options(rm_type="exact_match")
    prompts = [Prompt("p", "abc", {}), Prompt("q", "abc", {"rm_type": "position_match"})]
    samples = [answered("abd", metadata=p.metadata) for p in prompts]
    assert rewarded(load_reward(args, prompts), *samples, args=args) == [0, pytest.approx(2 / 3)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "--rm-type or --custom-rm-path is needed"),
        ({"rm_type": "exactmatch"}, "--rm-type 'exactmatch' is unknown; known are exact_match, position_match"),
        ({"custom_rm_path": "fn"}, "--custom-rm-path 'fn' must be module.function"),
        ({"custom_rm_path": "no_such_module.fn"}, "--custom-rm-path no_such_module.fn: importing no_such_module"),
        ({"custom_rm_path": "own_rewards.missing"}, "module own_rewards has no function 'missing'"),
        ({"custom_rm_path": "own_rewards.number"}, "module own_rewards has no function 'number'"),
        ({"custom_rm_path": "own_rewards.one_argument"}, "it must take \\(args, sample\\): too many positional"),
        ({"custom_rm_path": "broken_rewards.fn"}, "importing broken_rewards: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_loaded_is_named(own_module: None, values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as error:
        load_reward(options(**values))
    assert "\n" not in str(error.value)


def test_an_unknown_type_in_metadata_is_found_before_the_run() -> None:
    with pytest.raises(ValueError, match="--prompt-data, prompt 2: rm_type 'magic' in its metadata"):
        load_reward(options(rm_type="exact_match"), [Prompt("p", 1, {}), Prompt("q", 1, {"rm_type": "magic"})])


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(
        textwrap.dedent(
            """
            import asyncio

            number = 1

            def plain(args, sample):
                return len(sample.response) / args.scale

            async def slow(args, sample, **kwargs):
                await asyncio.sleep(0.2)
                return float(sample.response == sample.label)

            def one_argument(sample):
                return 1
            """
        )
    )
    (tmp_path / "broken_rewards.py").write_text("fn = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_own_function_plain_and_asynchronous(own_module: None) -> None:
    args = options(custom_rm_path="own_rewards.plain", scale=10)
    assert rewarded(load_reward(args), answered("abcde"), args=args) == [0.5]
    args = options(custom_rm_path="own_rewards.slow", rm_type="exact_match")
    samples = [answered("abc"), answered("x")] * 20
    start = time.monotonic()
    assert rewarded(load_reward(args), *samples, args=args) == [1.0, 0.0] * 20
    assert time.monotonic() - start < 0.2 * len(samples) / 2, "rewards wait for one another"


def test_mappings_need_their_key() -> None:
    def both(args: argparse.Namespace, sample: Sample) -> dict[str, Any]:
        return {"score": 0.5, "format": True}

    sample = answered("x", metadata={"level": 1})
    assert rewarded(both, sample, args=options(reward_key="score")) == [0.5]
    assert sample.metadata == {"level": 1, "reward": {"score": 0.5, "format": True}}
    with pytest.raises(RewardError, match="mapping of score, format; --reward-key is None"):
        rewarded(both, answered("x"))


def constant(value: Any) -> Callable[..., Any]:
    return lambda args, sample: value


def test_numbers_of_any_kind() -> None:
    assert rewarded(constant(True), answered("x")) == [1.0]
    assert rewarded(constant(np.float32(0.5)), answered("x")) == [0.5]


@pytest.mark.parametrize("value", [None, "0.5", float("nan"), float("inf"), [1.0, 2.0]])
def test_what_is_no_reward_is_refused(value: Any) -> None:
    with pytest.raises(RewardError, match="of sample 7 is .*; a finite number is needed"):
        rewarded(constant(value), answered("x", index=7))


def test_a_failing_function_is_named_with_its_cause() -> None:
    def picky(args: argparse.Namespace, sample: Sample) -> float:
        return 1.0 / len(sample.response)

    with pytest.raises(RewardError, match="reward picky of sample 1: ZeroDivisionError: ") as error:
        rewarded(picky, answered("x", index=0), answered("", index=1))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_reward_that_never_comes_ends_at_its_deadline() -> None:
    async def never(args: argparse.Namespace, sample: Sample) -> float:
        await asyncio.Event().wait()
        return 1.0

    async def its_own_timeout(args: argparse.Namespace, sample: Sample) -> float:
        raise TimeoutError("judge")

    with pytest.raises(RewardError, match="reward never of sample 5 took more than 0.05 s"):
        rewarded(never, answered("x", index=5), timeout_s=0.05)
    with pytest.raises(RewardError, match="its_own_timeout of sample 0: TimeoutError: judge"):
        rewarded(its_own_timeout, answered("x"), timeout_s=30)
