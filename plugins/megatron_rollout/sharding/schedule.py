"""The schedule of a whole batch: micro-batches per step, cell and rank.

Pack first, then distribute: the samples of a step are packed into micro-batches, and whole micro-batches go to cells
and, inside a cell, to its data-parallel ranks. Cells share no collective within a micro-batch: each has its own count.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_rollout.sharding.costs import BalanceOptions
from megatron_rollout.sharding.micro_batches import (
    MicroBatch,
    MicroBatchOptions,
    distribute,
    pack_micro_batches,
    schedule_packed,
    schedule_ranks,
    split_to_multiple,
)
from megatron_rollout.sharding.partitions import check_parts
from megatron_rollout.sharding.steps import StepPlan, plan_steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSchedule:
    """One optimizer step. micro_batches[cell][rank][m]: global sample indices; [] is an empty micro-batch."""

    num_rollouts: int
    micro_batches: list[list[list[MicroBatch]]]

    @property
    def num_microbatches(self) -> list[int]:
        """[cells]: micro-batches that every rank of the cell runs."""
        return [len(cell[0]) for cell in self.micro_batches]


@dataclass(frozen=True)
class DpSchedule:
    """All steps of a batch. dropped: samples of a trimmed partial step. oversized: (sample, tokens) above the cap, each
    alone in its micro-batch. notes: what a user should be told (dropped, kept partial, oversized); logged already.

    The hosts' flat form, over parts (cell-major: part = cell * ranks + rank): `partitions`, `micro_batch_indices`.
    """

    steps: list[StepSchedule]
    dropped: tuple[int, ...] = ()
    oversized: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def global_batch_sizes(self) -> list[int]:
        """[steps]: rollouts in each step."""
        return [step.num_rollouts for step in self.steps]

    @property
    def num_microbatches(self) -> list[list[int]]:
        """[steps][cells]."""
        return [step.num_microbatches for step in self.steps]

    @property
    def partitions(self) -> list[list[int]]:
        """[parts]: global sample indices in the order in which the part runs them, all steps."""
        return [[i for micro_batch in part for i in micro_batch] for part in self._parts()]

    @property
    def micro_batch_indices(self) -> list[list[list[int]]]:
        """[parts][micro-batches of all steps]: rows of the part; flattened, they count from 0 up."""
        indices = []
        for part in self._parts():
            start, rows = 0, []
            for micro_batch in part:
                rows.append(list(range(start, start + len(micro_batch))))
                start += len(micro_batch)
            indices.append(rows)
        return indices

    def _parts(self) -> list[list[MicroBatch]]:
        cells, ranks = len(self.steps[0].micro_batches), len(self.steps[0].micro_batches[0])
        return [
            [micro_batch for step in self.steps for micro_batch in step.micro_batches[cell][rank]]
            for cell in range(cells)
            for rank in range(ranks)
        ]


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any] | None,
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[Hashable] | None = None,
    num_cells: int | None = None,
    partitions: Sequence[Sequence[int]] | None = None,
) -> DpSchedule:
    """Steps, cells, ranks and micro-batches of a whole batch.

    args: the host's options (micro_batch_size, or use_dynamic_batch_size with max_tokens_per_gpu; balance_data,
    balance_by, balance_sizes; disable_rollout_trim_samples and use_dynamic_global_batch_size keep a trailing partial
    step, else it is trimmed). train_parallel_config: `MicroBatchOptions.from_args`, and `num_cells` unless given.
    total_lengths: [n] tokens. global_batch_size: rollouts per step. rollout_indices: [n] rollout of each sample
    (default: each its own). partitions: who has which sample, if that is decided already (`split_train_data_by_dp`):
    one list of global indices per cell, or per rank in cell-major order.

    Invariants, for the result `s`:
    - each sample is in exactly one micro-batch of one step, or in `s.dropped`;
    - samples of one rollout are in one step; a step has `global_batch_size` rollouts, but for a kept partial one;
    - the ranks of a cell run the same number of micro-batches, at least one, a multiple of the virtual-pipeline group;
      numbers of different cells are independent;
    - a micro-batch holds at most max_tokens_per_gpu * cp_size tokens, but for a sample of `s.oversized`, alone in its;
    - `s.micro_batch_indices[part]`, flattened, is range(len(`s.partitions[part]`));
    - with `partitions`, no sample leaves its part.

    Raises ValueError: a negative length; columns of different lengths; an option below 1; no step (names the rollouts
    there are and those needed); partitions that aren't a partition of the samples.
    """
    options = MicroBatchOptions.from_args(args, train_parallel_config)
    balance = BalanceOptions.from_args(args)
    config = train_parallel_config or {}
    cells = check_parts(config.get("num_cells", 1) if num_cells is None else num_cells, "num_cells")
    lengths = _checked_lengths(total_lengths)
    n = len(lengths)
    if rollout_indices is not None and len(rollout_indices) != n:
        raise ValueError(f"columns of different lengths: {len(rollout_indices)} rollout_indices, {n} total_lengths")
    placed = None if partitions is None else _placed(partitions, n, cells, options.ranks)
    plan = plan_steps(
        range(n) if rollout_indices is None else rollout_indices,
        global_batch_size,
        keep_partial=bool(
            getattr(args, "disable_rollout_trim_samples", False)
            or getattr(args, "use_dynamic_global_batch_size", False)
        ),
    )
    costs = balance.costs(args, lengths) if balance.data else lengths
    steps = []
    for samples, num_rollouts in zip(plan.steps, plan.num_rollouts, strict=True):
        if placed is None:
            micro_batches = _pack_then_distribute(samples, lengths, costs, options, balance, cells)
        else:
            micro_batches = _pack_in_place(samples, lengths, costs, options, balance, placed)
        steps.append(StepSchedule(num_rollouts, micro_batches))
    return _reported(steps, plan, lengths, options)


def _pack_then_distribute(
    samples: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    options: MicroBatchOptions,
    balance: BalanceOptions,
    cells: int,
) -> list[list[list[MicroBatch]]]:
    packed = _globally(pack_micro_batches([lengths[i] for i in samples], options), samples)
    packed = split_to_multiple(packed, lengths, options, cells * options.ranks)
    by_cell = distribute(packed, costs, cells, balance=balance.data, sizes=balance.sizes)
    return [schedule_packed(cell, lengths, options, costs=costs, balance=balance.data) for cell in by_cell]


def _pack_in_place(
    samples: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    options: MicroBatchOptions,
    balance: BalanceOptions,
    placed: list[list[set[int]]],
) -> list[list[list[MicroBatch]]]:
    """placed[cell]: the samples of each rank, or one set for the whole cell."""
    schedules = []
    for cell in placed:
        parts = [[i for i in samples if i in part] for part in cell]
        if len(parts) == options.ranks > 1:
            schedules.append(schedule_ranks(parts, lengths, options))
            continue
        packed = _globally(pack_micro_batches([lengths[i] for i in parts[0]], options), parts[0])
        schedules.append(schedule_packed(packed, lengths, options, costs=costs, balance=balance.data))
    return schedules


def _globally(packed: list[MicroBatch], samples: Sequence[int]) -> list[MicroBatch]:
    return [[samples[at] for at in micro_batch] for micro_batch in packed]


def _checked_lengths(total_lengths: Sequence[int]) -> list[int]:
    lengths = [int(length) for length in total_lengths]
    negative = [f"sample {i}: {length}" for i, length in enumerate(lengths) if length < 0]
    if negative:
        raise ValueError(f"column 'total_lengths' has negative lengths: {', '.join(negative[:8])}")
    return lengths


def _placed(partitions: Sequence[Sequence[int]], n: int, cells: int, ranks: int) -> list[list[set[int]]]:
    """Samples per cell and rank (or per cell), checked to be each of the n samples once."""
    if len(partitions) not in (cells, cells * ranks):
        raise ValueError(
            f"{len(partitions)} partitions given, {cells} (one per cell) or {cells * ranks} (one per rank) expected"
        )
    owner: dict[int, int] = {}
    for part, members in enumerate(partitions):
        for i in members:
            if not 0 <= i < n:
                raise ValueError(f"partition {part} holds sample {i}, the batch has {n}")
            if i in owner:
                raise ValueError(f"sample {i} is in partition {owner[i]} and in partition {part}")
            owner[i] = part
    missing = [i for i in range(n) if i not in owner]
    if missing:
        raise ValueError(f"samples {missing[:8]} are in no partition")
    per_cell = len(partitions) // cells
    sets = [set(members) for members in partitions]
    return [sets[cell * per_cell : (cell + 1) * per_cell] for cell in range(cells)]


def _reported(
    steps: list[StepSchedule], plan: StepPlan, lengths: Sequence[int], options: MicroBatchOptions
) -> DpSchedule:
    notes = [plan.note] if plan.note else []
    oversized: tuple[tuple[int, int], ...] = ()
    if options.max_tokens is not None:
        cap = options.max_tokens
        oversized = tuple((i, lengths[i]) for i in sorted(chain.from_iterable(plan.steps)) if lengths[i] > cap)
    if oversized:
        told = ", ".join(f"sample {i} of {length}" for i, length in oversized[:8])
        more = f" and {len(oversized) - 8} more" if len(oversized) > 8 else ""
        note = f"above the cap of {options.max_tokens} tokens, each alone in a micro-batch: {told}{more}"
        logger.warning("%s", note)
        notes.append(note)
    return DpSchedule(steps, plan.dropped, oversized, tuple(notes))
