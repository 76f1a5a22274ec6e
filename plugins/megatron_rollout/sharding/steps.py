"""Which samples make which optimizer step: decided on the whole batch, before any split, so that it doesn't depend on
how many cells do the work."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rollout.sharding.partitions import check_parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPlan:
    """steps[s]: positions of the samples of step s, ascending; num_rollouts[s]: rollouts in it; dropped: positions of
    samples in no step; note: what became of a trailing partial step ("" if there was none)."""

    steps: tuple[tuple[int, ...], ...]
    num_rollouts: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    note: str = ""


def samples_by_rollout(rollout_ids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Positions of each rollout's samples; rollouts in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for position, rollout in enumerate(rollout_ids):
        members.setdefault(rollout, []).append(position)
    return members


def plan_steps(rollout_ids: Sequence[Hashable], global_batch_size: int, *, keep_partial: bool = False) -> StepPlan:
    """Steps of `global_batch_size` rollouts each, in order of first appearance.

    rollout_ids: [n], one per sample; a rollout with several samples (segments) stays in one step. keep_partial:
    trailing rollouts that don't fill a step make a smaller one; otherwise they are dropped. Either is logged and put in
    `note`.

    Invariants: each sample is in exactly one step or in `dropped`; every step has `global_batch_size` rollouts, but for
    a kept trailing one, which has fewer and at least one; at least one step.

    Raises ValueError: global_batch_size < 1; no step (names the rollouts that there are and the ones needed).
    """
    size = check_parts(global_batch_size, "global_batch_size")
    members = list(samples_by_rollout(rollout_ids).values())
    full = len(members) // size
    if not members or (full == 0 and not keep_partial):
        raise ValueError(
            f"the batch makes no step: it has {len(members)} rollouts ({len(rollout_ids)} samples), "
            f"global_batch_size needs {size}; {size - len(members)} are missing"
        )
    chunks = [members[at : at + size] for at in range(0, full * size, size)]
    rest = members[full * size :]
    note = ""
    dropped: tuple[int, ...] = ()
    if rest:
        count = sum(map(len, rest))
        note = f"the last {len(rest)} of {len(members)} rollouts ({count} samples) don't fill a step of {size}: "
        note += "kept as a partial step" if keep_partial else "dropped"
        logger.warning("%s", note)
        if keep_partial:
            chunks.append(rest)
        else:
            dropped = _flat(rest)
    return StepPlan(tuple(map(_flat, chunks)), tuple(map(len, chunks)), dropped, note)


def dynamic_global_batch_size(args: Any, rollout_ids: Sequence[Hashable]) -> int:
    """Rollouts per step when the batch decides (`--use-dynamic-global-batch-size`): all that there are, spread over
    `--num-steps-per-rollout` (default 1) steps, rounded up so that there are never more steps than asked for.

    It is a property of the batch, not of the cells: decided once, before the split, and carried in each shard. No
    sample is lost to divisibility. 0 for an empty batch. Raises ValueError: num_steps_per_rollout < 1.
    """
    asked = getattr(args, "num_steps_per_rollout", None)
    steps = 1 if asked is None else check_parts(asked, "num_steps_per_rollout")
    return -(-len(set(rollout_ids)) // steps)


def check_global_batch_size(values: Mapping[int, int | None] | Sequence[int | None]) -> int | None:
    """The dynamic global batch size that all cells of a step agree on (None if none carries one).

    values: by cell (a sequence: by position). Every cell calls it before its first collective: a step whose cells
    divide by different numbers must not begin. Raises ValueError that names the values and the cells that hold them.
    """
    by_cell = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    holders: dict[int | None, list[int]] = {}
    for cell, value in by_cell.items():
        holders.setdefault(value, []).append(cell)
    if len(holders) > 1:
        told = "; ".join(
            f"{'none' if value is None else value} on cell{'s' if len(cells) > 1 else ''} {', '.join(map(str, cells))}"
            for value, cells in holders.items()
        )
        raise ValueError(f"dynamic_global_batch_size differs between cells, the step is refused: {told}")
    return next(iter(holders), None)


def _flat(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted(position for group in groups for position in group))
