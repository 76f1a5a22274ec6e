"""Steps, micro-batches and global batch sizes: the invariants of their docstrings and the listed inputs."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rollout.sharding import (
    DpSchedule,
    MicroBatchOptions,
    build_dp_schedule,
    check_global_batch_size,
    dynamic_global_batch_size,
    normalisation,
    pack_micro_batches,
    plan_steps,
    schedule_cell,
    seqlen_balanced_partitions,
    split_train_data_by_dp,
)

LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=40)


def dynamic(cap: int, **options: Any) -> Namespace:
    return Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=cap, **options)


def check_schedule(
    schedule: DpSchedule, lengths: list[int], rollouts: list[int], *, size: int, cells: int, ranks: int, group: int
) -> None:
    """Every invariant that the docstring of build_dp_schedule states, but for the cap."""
    seen = [i for step in schedule.steps for cell in step.micro_batches for rank in cell for mb in rank for i in mb]
    assert sorted([*seen, *schedule.dropped]) == list(range(len(lengths)))
    for number, step in enumerate(schedule.steps):
        members = {i for cell in step.micro_batches for rank in cell for mb in rank for i in mb}
        kinds = {rollouts[i] for i in members}
        assert len(kinds) == step.num_rollouts
        assert members == {i for i, rollout in enumerate(rollouts) if rollout in kinds}
        assert step.num_rollouts == size or (number == len(schedule.steps) - 1 and 0 < step.num_rollouts < size)
        assert len(step.micro_batches) == cells
        for cell, count in zip(step.micro_batches, step.num_microbatches, strict=True):
            assert len(cell) == ranks and count >= 1 and count % group == 0
            for rank in cell:
                assert len(rank) == count
                filled = [bool(mb) for mb in rank]
                assert filled == sorted(filled, reverse=True)  # empty ones last
    assert schedule.num_microbatches == [step.num_microbatches for step in schedule.steps]
    assert schedule.global_batch_sizes == [step.num_rollouts for step in schedule.steps]
    assert len(schedule.partitions) == cells * ranks
    assert sorted(i for part in schedule.partitions for i in part) == sorted(seen)
    for rows, part in zip(schedule.micro_batch_indices, schedule.partitions, strict=True):
        assert [row for mb in rows for row in mb] == list(range(len(part)))


def check_cap(schedule: DpSchedule, lengths: list[int], cap: int) -> None:
    above = {i for i, length in enumerate(lengths) if length > cap} - set(schedule.dropped)
    assert schedule.oversized == tuple((i, lengths[i]) for i in sorted(above))
    for part, rows in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        for mb in rows:
            if sum(lengths[part[row]] for row in mb) > cap:
                assert len(mb) == 1 and part[mb[0]] in above


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(LENGTHS)
    rollouts = draw(st.lists(st.integers(0, 15), min_size=len(lengths), max_size=len(lengths)))
    return lengths, rollouts


@given(
    batch=batches(),
    size=st.integers(1, 6),
    cells=st.integers(1, 4),
    ranks=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    cap=st.one_of(st.none(), st.integers(1, 150)),
    cp_size=st.integers(1, 2),
    balance=st.sampled_from([{}, {"balance_data": True}, {"balance_data": True, "balance_sizes": "equal"}]),
    keep=st.booleans(),
    fixed=st.sampled_from(["no", "per cell", "per rank"]),
)
@settings(deadline=None, max_examples=200)
def test_schedule_keeps_its_invariants(
    batch: tuple[list[int], list[int]],
    size: int,
    cells: int,
    ranks: int,
    group: int,
    cap: int | None,
    cp_size: int,
    balance: dict,
    keep: bool,
    fixed: str,
) -> None:
    lengths, rollouts = batch
    sizes = {"micro_batch_size": 2} if cap is None else {"use_dynamic_batch_size": True, "max_tokens_per_gpu": cap}
    args = Namespace(**sizes, **balance, disable_rollout_trim_samples=keep)
    config = {"dp_size": ranks, "cp_size": cp_size, "vpp_size": 2, "microbatch_group_size_per_vp_stage": group}
    parts = (
        None if fixed == "no" else seqlen_balanced_partitions(lengths, cells * (ranks if fixed == "per rank" else 1))
    )

    def build() -> DpSchedule:
        return build_dp_schedule(
            args,
            config,
            lengths,
            global_batch_size=size,
            rollout_indices=rollouts,
            num_cells=cells,
            partitions=parts,
        )

    if len(set(rollouts)) < size and not keep:
        with pytest.raises(ValueError, match=f"{len(set(rollouts))} rollouts .* needs {size}"):
            build()
        return
    schedule = build()
    check_schedule(schedule, lengths, rollouts, size=size, cells=cells, ranks=ranks, group=group)
    assert not (keep and schedule.dropped)
    if cap is not None:
        check_cap(schedule, lengths, cap * cp_size)
    if parts is not None:
        per_part = 1 if fixed == "per rank" else ranks
        for part, members in enumerate(schedule.partitions):
            assert set(members) <= set(parts[part // per_part])
    assert build() == schedule


@given(LENGTHS, st.one_of(st.none(), st.integers(1, 150)), st.integers(1, 5))
@settings(deadline=None)
def test_packing_keeps_its_invariants(lengths: list[int], cap: int | None, size: int) -> None:
    packed = pack_micro_batches(lengths, MicroBatchOptions(micro_batch_size=size, max_tokens=cap))
    assert sorted(i for mb in packed for i in mb) == list(range(len(lengths)))
    assert all(packed) and all(mb == sorted(mb) for mb in packed)
    if cap is None:
        assert [len(mb) for mb in packed[:-1]] == [size] * (len(packed) - 1)
        return
    for mb in packed:
        assert sum(lengths[i] for i in mb) <= cap or len(mb) == 1
    fitting = [length for length in lengths if length <= cap]
    # Best fit leaves no two micro-batches that would fit into one.
    assert len(packed) <= len(lengths) - len(fitting) + max(1, -(-2 * sum(fitting) // cap))


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_a_cell_gives_all_its_ranks_the_same_count(lengths: list[int], ranks: int, group: int, balance: bool) -> None:
    options = MicroBatchOptions(max_tokens=150, ranks=ranks, group=group)
    by_rank = schedule_cell(lengths, options, balance=balance)
    assert sorted(i for rank in by_rank for mb in rank for i in mb) == list(range(len(lengths)))
    counts = {len(rank) for rank in by_rank}
    assert len(by_rank) == ranks and len(counts) == 1
    count = counts.pop()
    assert count >= 1 and count % group == 0
    # An empty micro-batch only where no sample is left to split off.
    if any(not mb for rank in by_rank for mb in rank):
        assert all(len(mb) <= 1 for rank in by_rank for mb in rank)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_steps_keep_their_invariants(rollouts: list[int], size: int, keep: bool) -> None:
    distinct = len(set(rollouts))
    if not distinct or (distinct < size and not keep):
        with pytest.raises(ValueError, match=f"it has {distinct} rollouts .{len(rollouts)} samples., .* needs {size}"):
            plan_steps(rollouts, size, keep_partial=keep)
        return
    plan = plan_steps(rollouts, size, keep_partial=keep)
    assert sorted([i for step in plan.steps for i in step] + list(plan.dropped)) == list(range(len(rollouts)))
    groups = [{rollouts[i] for i in step} for step in plan.steps]
    assert sum(map(len, groups)) == len(set().union(*groups))  # no rollout in two steps
    assert [len(group) for group in groups] == list(plan.num_rollouts)
    assert all(count == size for count in plan.num_rollouts[:-1]) and 1 <= plan.num_rollouts[-1] <= size
    assert bool(plan.note) == bool(distinct % size)
    assert not (keep and plan.dropped)


def test_s04_cells_have_their_own_counts_and_ranks_of_one_cell_do_not() -> None:
    lengths, parts = [8000] + [4000] * 6, [[0], [1, 2, 3, 4, 5, 6]]
    cells = build_dp_schedule(dynamic(8192), {}, lengths, global_batch_size=7, num_cells=2, partitions=parts)
    assert cells.num_microbatches == [[1, 3]]
    ranks = build_dp_schedule(dynamic(8192), {"dp_size": 2}, lengths, global_batch_size=7, partitions=parts)
    assert ranks.num_microbatches == [[3]]
    assert ranks.steps[0].micro_batches[0][0] == [[0], [], []]
    assert ranks.partitions == parts


def test_s05_counts_for_virtual_pipelining_are_filled_with_empty_micro_batches() -> None:
    config = {"vpp_size": 2, "microbatch_group_size_per_vp_stage": 4}
    schedule = build_dp_schedule(dynamic(100), config, [51, 60, 70, 80, 90], global_batch_size=5)
    assert schedule.num_microbatches == [[8]]
    assert [len(mb) for mb in schedule.steps[0].micro_batches[0][0]] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_s06_the_cap_is_exceeded_by_a_single_sample_only_and_said(caplog: pytest.LogCaptureFixture) -> None:
    schedule = build_dp_schedule(dynamic(8), {}, [7] * 8, global_batch_size=8)
    assert schedule.num_microbatches == [[8]] and not schedule.oversized and not schedule.notes
    with caplog.at_level(logging.WARNING):
        schedule = build_dp_schedule(dynamic(8), {}, [7] * 8 + [9], global_batch_size=9)
    assert [8] in schedule.steps[0].micro_batches[0][0] and schedule.num_microbatches == [[9]]
    assert schedule.oversized == ((8, 9),)
    assert schedule.notes == ("above the cap of 8 tokens, each alone in a micro-batch: sample 8 of 9",)
    assert schedule.notes[0] in caplog.text


def test_s07_a_fixed_size_that_does_not_divide_leaves_a_smaller_micro_batch() -> None:
    schedule = build_dp_schedule(Namespace(micro_batch_size=2), {}, [10] * 249, global_batch_size=249)
    assert schedule.num_microbatches == [[125]]
    assert [len(mb) for mb in schedule.steps[0].micro_batches[0][0]] == [2] * 124 + [1]


def test_s08_a_batch_without_a_step_names_what_is_there_and_what_is_needed() -> None:
    rollouts = [rollout for rollout in range(16) for _ in range(8)]
    message = "16 rollouts .128 samples., global_batch_size needs 256; 240 are missing"
    with pytest.raises(ValueError, match=message):
        build_dp_schedule(dynamic(100), {}, [10] * 128, global_batch_size=256, rollout_indices=rollouts)


def test_s12_cells_that_divide_by_different_numbers_refuse_the_step() -> None:
    shards = split_train_data_by_dp(Namespace(), {"tokens": [[1]] * 6, "dynamic_global_batch_size": 48}, dp_size=3)
    assert check_global_batch_size([shard["dynamic_global_batch_size"] for shard in shards]) == 48
    shards[2]["dynamic_global_batch_size"] = 64
    with pytest.raises(ValueError, match="48 on cells 0, 1; 64 on cell 2"):
        check_global_batch_size([shard["dynamic_global_batch_size"] for shard in shards])
    with pytest.raises(ValueError, match="48 on cell 3; none on cell 5"):
        check_global_batch_size({3: 48, 5: None})
    assert check_global_batch_size([None, None]) is None and check_global_batch_size([]) is None


@pytest.mark.parametrize("balance", [True, False])
def test_s13_no_sample_is_dropped_for_divisibility(balance: bool) -> None:
    args = Namespace(micro_batch_size=2, balance_data=balance)
    schedule = build_dp_schedule(args, {}, [10, 20, 30, 40, 50], global_batch_size=5, num_cells=2)
    assert sorted(i for part in schedule.partitions for i in part) == [0, 1, 2, 3, 4]
    assert schedule.global_batch_sizes == [5] and not schedule.dropped
    assert normalisation({"tokens": [[1]] * 5, "response_lengths": [1] * 5}).num_rollouts == 5


def test_a_trailing_partial_step_is_trimmed_or_kept_as_asked_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [0, 0, 1, 2, 2, 3, 4]
    for options, kept in [
        ({}, False),
        ({"disable_rollout_trim_samples": True}, True),
        ({"use_dynamic_global_batch_size": True}, True),
    ]:
        caplog.clear()
        args = Namespace(micro_batch_size=1, **options)
        with caplog.at_level(logging.WARNING):
            schedule = build_dp_schedule(args, {}, [5] * 7, global_batch_size=2, rollout_indices=rollouts)
        assert schedule.global_batch_sizes == ([2, 2, 1] if kept else [2, 2])
        assert schedule.dropped == (() if kept else (6,))
        note = "the last 1 of 5 rollouts (1 samples) don't fill a step of 2: "
        assert schedule.notes == (note + ("kept as a partial step" if kept else "dropped"),)
        assert schedule.notes[0] in caplog.text


def test_micro_batches_are_split_rather_than_run_empty() -> None:
    schedule = build_dp_schedule(dynamic(100, balance_data=True), {"dp_size": 4}, [10] * 8, global_batch_size=8)
    assert [[len(mb) for mb in rank] for rank in schedule.steps[0].micro_batches[0]] == [[2]] * 4


def test_balanced_cells_get_even_work() -> None:
    lengths = [int(50 + 37 * (i * i % 101)) for i in range(200)]
    schedule = build_dp_schedule(dynamic(8192, balance_data=True), {}, lengths, global_batch_size=200, num_cells=3)
    loads = [sum(lengths[i] for i in part) for part in schedule.partitions]
    assert max(loads) <= sum(lengths) / 3 * 1.02


@given(st.lists(st.integers(0, 20), min_size=1, max_size=50), st.integers(1, 8))
@settings(deadline=None)
def test_dynamic_global_batch_size_makes_no_more_steps_than_asked(rollouts: list[int], steps: int) -> None:
    args = Namespace(num_steps_per_rollout=steps)
    size = dynamic_global_batch_size(args, rollouts)
    plan = plan_steps(rollouts, size, keep_partial=True)
    assert not plan.dropped and 1 <= len(plan.steps) <= steps
    assert dynamic_global_batch_size(Namespace(), rollouts) == len(set(rollouts))


def test_dynamic_global_batch_size_of_nothing_and_bad_steps() -> None:
    assert dynamic_global_batch_size(Namespace(), []) == 0
    with pytest.raises(ValueError, match="num_steps_per_rollout must be >= 1, got 0"):
        dynamic_global_batch_size(Namespace(num_steps_per_rollout=0), [1])


def test_bad_options_are_all_named_at_once() -> None:
    with pytest.raises(
        ValueError, match="dp_size must be >= 1, got 0; cp_size must be >= 1, got -1; max_tokens.* got 0"
    ):
        MicroBatchOptions.from_args(dynamic(0), {"dp_size": 0, "cp_size": -1})
    with pytest.raises(ValueError, match="--use-dynamic-batch-size needs --max-tokens-per-gpu"):
        MicroBatchOptions.from_args(Namespace(use_dynamic_batch_size=True))
    with pytest.raises(ValueError, match="micro_batch_size must be >= 1, got 0"):
        MicroBatchOptions.from_args(Namespace(micro_batch_size=0))
    assert MicroBatchOptions.from_args(object()) == MicroBatchOptions()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_lengths": [1, -2, 3]}, "sample 1: -2"),
        ({"rollout_indices": [0, 1]}, "2 rollout_indices, 3 total_lengths"),
        ({"global_batch_size": 0}, "global_batch_size must be >= 1, got 0"),
        ({"num_cells": 0}, "num_cells must be >= 1, got 0"),
        ({"partitions": [[0], [1], [2]]}, "3 partitions given, 2 .one per cell. or 4"),
        ({"partitions": [[0, 1], [1, 2]]}, "sample 1 is in partition 0 and in partition 1"),
        ({"partitions": [[0, 1], []]}, r"samples \[2\] are in no partition"),
        ({"partitions": [[0, 1], [2, 3]]}, "partition 1 holds sample 3, the batch has 3"),
        ({"total_lengths": []}, "0 rollouts .0 samples., global_batch_size needs 3"),
    ],
)
def test_bad_schedules_are_refused_by_name(change: dict, message: str) -> None:
    given = {"total_lengths": [1, 2, 3], "global_batch_size": 3, "num_cells": 2, **change}
    with pytest.raises(ValueError, match=message):
        build_dp_schedule(Namespace(), {"dp_size": 2}, given.pop("total_lengths"), **given)


def test_normalisation_counts_whole_rollouts_of_the_step() -> None:
    data = {
        "tokens": [[1] * 4] * 5,
        "loss_masks": [[1, 1], [1, 0], [0, 0], [1, 1], [0, 1]],
        "rollout_ids": ["a", "b", "c", "a", "b"],
    }
    counts = normalisation(data)
    assert counts.mask_sums == (2, 1, 0, 2, 1)
    assert counts.rollout_mask_sums == (4, 2, 0, 4, 2)
    assert (counts.num_tokens, counts.num_rollouts) == (6, 3)
    step = normalisation(data, samples=[1, 2, 4])
    assert (step.rollout_mask_sums, step.num_tokens, step.num_rollouts) == ((2, 0, 2), 2, 2)
    with pytest.raises(ValueError, match=r"rollout a is only partly in the step: samples \[3\] are not"):
        normalisation(data, samples=[0, 1, 2, 4])
    assert normalisation({"response_lengths": [3, 4]}).num_tokens == 7
    with pytest.raises(ValueError, match="neither column 'loss_masks' nor 'response_lengths'"):
        normalisation({"tokens": [[1]]})
