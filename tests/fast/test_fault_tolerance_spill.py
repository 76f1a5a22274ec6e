"""Finished rollouts survive on disk, exactly, and only for the run that they were made for."""

from __future__ import annotations

import argparse
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.trainer.sample import Sample
from trainer_hooks.trainer.spill import Spill


def args(**changed: object) -> argparse.Namespace:
    plain = dict(rollout_batch_size=2, n_samples_per_prompt=2, rollout_seed=42, prompt_data="train.jsonl")
    return argparse.Namespace(**{**plain, **changed})


def sample(index: int, logprob: float = -0.1) -> Sample:
    return Sample(
        index=index,
        prompt="ab",
        tokens=[1, 2, 3],
        response="c",
        response_length=1,
        reward=0.3,
        loss_mask=[1],
        rollout_log_probs=[logprob],
        weight_versions=[[0, 4]],
        status=Sample.Status.COMPLETED,
    )


@settings(deadline=None, max_examples=30)
@given(st.floats(allow_nan=False, allow_infinity=False, max_value=0.0))
def test_what_comes_back_is_what_went_in_to_the_last_bit(tmp_path_factory: object, logprob: float) -> None:
    spill = Spill(Path(tmp_path_factory.mktemp("spill")), args())  # type: ignore[attr-defined]
    samples = [sample(0, logprob), sample(1)]
    assert spill.write(3, samples)
    assert spill.read(3) == samples
    assert spill.read(4) is None


def test_it_is_not_taken_up_by_a_run_with_other_options(tmp_path: Path) -> None:
    Spill(tmp_path, args()).write(0, [sample(0)])
    assert Spill(tmp_path, args(rollout_batch_size=4)).read(0) is None
    assert Spill(tmp_path, args()).read(0) == [sample(0)]


def test_what_json_cannot_hold_is_generated_again(tmp_path: Path) -> None:
    spill, odd = Spill(tmp_path, args()), sample(0)
    odd.metadata = {"tool": object()}
    assert not spill.write(0, [odd])
    assert spill.read(0) is None


def test_a_checkpoint_ends_it(tmp_path: Path) -> None:
    spill = Spill(tmp_path, args())
    for rollout_id in range(4):
        spill.write(rollout_id, [sample(rollout_id)])
    spill.forget_through(2)
    assert [spill.read(i) is not None for i in range(4)] == [False, False, False, True]
    spill.forget_all()
    assert spill.read(3) is None
