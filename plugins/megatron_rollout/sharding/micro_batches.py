"""Micro-batches of one cell: which samples go through the model together, and on which of its ranks.

Ranks of one cell meet in collectives within a micro-batch, so they all run the same number of them. An *empty*
micro-batch (no samples) fills up where samples don't suffice. Whoever runs it feeds one padding sequence with an
all-zero loss mask: the collectives take place, loss and gradient are zero.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rollout.sharding.partitions import check_parts, seqlen_balanced_partitions, strided_partitions

#: Positions of the samples of a micro-batch, ascending.
MicroBatch = list[int]


@dataclass(frozen=True)
class MicroBatchOptions:
    """How samples are packed and how counts are aligned inside one cell.

    micro_batch_size: samples per micro-batch, if max_tokens is None. max_tokens: tokens per micro-batch
    (--max-tokens-per-gpu times the context-parallel size, with --use-dynamic-batch-size). ranks: data-parallel ranks of
    one cell. group: a rank's count is a multiple of it (--microbatch-group-size-per-vp-stage with virtual pipelining).
    """

    micro_batch_size: int = 1
    max_tokens: int | None = None
    ranks: int = 1
    group: int = 1

    @classmethod
    def from_args(cls, args: Any, train_parallel_config: Mapping[str, Any] | None = None) -> MicroBatchOptions:
        """From the host's options and its train_parallel_config (dp_size: ranks inside one cell, cp_size, vpp_size,
        microbatch_group_size_per_vp_stage; each 1 if absent). Raises one ValueError with all that is wrong."""
        config = dict(train_parallel_config or {})
        problems: list[str] = []

        def positive(name: str, value: Any) -> int:
            try:
                return check_parts(1 if value is None else value, name)
            except ValueError as error:
                problems.append(str(error))
                return 1

        ranks = positive("dp_size", config.get("dp_size"))
        context = positive("cp_size", config.get("cp_size"))
        virtual = positive("vpp_size", config.get("vpp_size"))
        group = positive("microbatch_group_size_per_vp_stage", config.get("microbatch_group_size_per_vp_stage"))
        size, max_tokens = 1, None
        if getattr(args, "use_dynamic_batch_size", False):
            cap = getattr(args, "max_tokens_per_gpu", None)
            if cap is None:
                problems.append("--use-dynamic-batch-size needs --max-tokens-per-gpu")
            else:
                max_tokens = positive("max_tokens_per_gpu", cap) * context
        else:
            size = positive("micro_batch_size", getattr(args, "micro_batch_size", None))
        if problems:
            raise ValueError("; ".join(problems))
        return cls(size, max_tokens, ranks, group if virtual > 1 else 1)


def pack_micro_batches(lengths: Sequence[int], options: MicroBatchOptions) -> list[MicroBatch]:
    """Pack samples into as few micro-batches as a linear pass finds.

    lengths: [n] tokens. Fixed size: consecutive `micro_batch_size` samples, the last may hold fewer. Token cap:
    best-fit decreasing (at most 11/9 of the fewest possible, and a constant; Johnson et al. 1974).

    Invariants: each position is in exactly one micro-batch, none is empty; with a cap no micro-batch is above it but
    that of a single sample that is itself above it, and such a sample is alone. Deterministic.
    """
    n = len(lengths)
    if options.max_tokens is None:
        size = options.micro_batch_size
        return [list(range(at, min(at + size, n))) for at in range(0, n, size)]
    packed: list[MicroBatch] = []
    space: list[tuple[int, int]] = []  # (free tokens, micro-batch), ascending
    for i in sorted(range(n), key=lambda i: (-lengths[i], i)):
        at = bisect_left(space, (lengths[i], -1))
        if lengths[i] > options.max_tokens or at == len(space):
            free, target = options.max_tokens, len(packed)
            packed.append([])
        else:
            free, target = space.pop(at)
        packed[target].append(i)
        if lengths[i] <= options.max_tokens:
            insort(space, (free - lengths[i], target))
    return sorted(sorted(micro_batch) for micro_batch in packed)


def split_to_multiple(
    packed: list[MicroBatch], lengths: Sequence[int], options: MicroBatchOptions, multiple: int
) -> list[MicroBatch]:
    """With a token cap: halve the largest micro-batches until their number is a multiple of `multiple`, as far as they
    hold two samples. Smaller pieces balance better than empty ones, and no piece is above the cap. Of a fixed size they
    stay as they are."""
    if options.max_tokens is None:
        return packed
    missing = -len(packed) % multiple
    heap = [(-sum(lengths[i] for i in micro_batch), micro_batch) for micro_batch in packed if len(micro_batch) > 1]
    whole = [micro_batch for micro_batch in packed if len(micro_batch) == 1]
    heapq.heapify(heap)
    while missing and heap:
        _, largest = heapq.heappop(heap)
        for half in seqlen_balanced_partitions([lengths[i] for i in largest], 2):
            piece = [largest[at] for at in half]
            if len(piece) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in piece), piece))
            else:
                whole.append(piece)
        missing -= 1
    return sorted(whole + [micro_batch for _, micro_batch in heap])


def distribute(
    packed: list[MicroBatch], costs: Sequence[float], k: int, *, balance: bool, sizes: str
) -> list[list[MicroBatch]]:
    """Whole micro-batches over k parts: balanced by the sums of their samples' costs, or dealt out in turn."""
    if balance:
        weights = [sum(costs[i] for i in micro_batch) for micro_batch in packed]
        parts = seqlen_balanced_partitions(weights, k, sizes=sizes)
    else:
        parts = strided_partitions(len(packed), k)
    return [[packed[at] for at in part] for part in parts]


def align(by_rank: list[list[MicroBatch]], options: MicroBatchOptions) -> list[list[MicroBatch]]:
    """Empty micro-batches at the end of each rank, until all have the same number: at least one, a multiple of
    `options.group`."""
    count = max(1, *map(len, by_rank)) if by_rank else 1
    count = -(-count // options.group) * options.group
    return [rank + [[] for _ in range(count - len(rank))] for rank in by_rank]


def schedule_packed(
    packed: list[MicroBatch],
    lengths: Sequence[int],
    options: MicroBatchOptions,
    *,
    costs: Sequence[float],
    balance: bool,
) -> list[list[MicroBatch]]:
    """Micro-batches of one cell distributed over its ranks, in even numbers: [ranks][count]."""
    packed = split_to_multiple(packed, lengths, options, options.ranks * options.group)
    return align(distribute(packed, costs, options.ranks, balance=balance, sizes="equal"), options)


def schedule_cell(
    lengths: Sequence[int],
    options: MicroBatchOptions,
    *,
    costs: Sequence[float] | None = None,
    balance: bool = True,
) -> list[list[MicroBatch]]:
    """Micro-batches of one cell in one step, packed over the whole cell, then distributed: [ranks][count][positions].

    lengths: [n] tokens of the cell's samples (none: a cell that got no sample still takes part in the step).
    costs: [n], what ranks are balanced by (default: lengths); balance False: micro-batches are dealt out in turn.

    Invariants: each position is in exactly one micro-batch; every rank has the same number of micro-batches, at least
    one and a multiple of `options.group`; empty ones come last; the cap of `pack_micro_batches` holds.
    """
    packed = pack_micro_batches(lengths, options)
    return schedule_packed(packed, lengths, options, costs=lengths if costs is None else costs, balance=balance)


def schedule_ranks(
    parts: Sequence[Sequence[int]], lengths: Sequence[int], options: MicroBatchOptions
) -> list[list[MicroBatch]]:
    """The same where it is decided already which rank has which samples (parts[rank]: positions)."""
    by_rank = []
    for part in parts:
        packed = pack_micro_batches([lengths[i] for i in part], options)
        by_rank.append([[part[at] for at in micro_batch] for micro_batch in packed])
    return align(by_rank, options)
