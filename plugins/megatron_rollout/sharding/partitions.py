"""Which part does which sample belong to: balanced and strided partitions of n costs over k parts. Pure NumPy.

Everything below works on integers, so that the result depends on the input alone: not on the order of floating-point
sums, the processor's vector width or a hash seed. Every process that computes a partition gets the same one.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rollout.sharding.exchange import refine

IntArray = NDArray[np.int64]

SIZES = ("free", "equal")

#: With free sizes the search ends once the largest load is within this fraction of the lower bound: far below what the
#: time of a step can show. With equal sizes it goes on: there the result must not be above Karmarkar-Karp's.
TOLERANCE = 1e-5

#: Integers stay below 2 ** this, so that sums of them fit int64.
_BITS = 61

#: Up to this many samples Karmarkar-Karp is tried with free sizes too (n - 1 merges of k loads each); beyond it the
#: exchanges leave nothing to gain.
_DIFFERENCING_MAX = 128

#: With free sizes about this many samples of a part, spread over its lengths, take part in exchanges: two parts then
#: offer 4,096 different amounts, and long lists needn't be turned into Python objects.
_CANDIDATES = 64

#: Samples per part that are placed one at a time, at the large and at the small end, before and after the middle is
#: poured; below _POURING_MIN samples per part all are placed one at a time.
_HEAD, _TAIL, _POURING_MIN = 8, 16, 32


def strided_partitions(n: int, k: int) -> list[list[int]]:
    """Part p gets samples p, p + k, p + 2k, ...: the static assignment by index. Sizes differ by at most one."""
    k = check_parts(k)
    return [list(range(p, n, k)) for p in range(k)]


def seqlen_balanced_partitions(costs: Sequence[float] | Any, k: int, *, sizes: str = "free") -> list[list[int]]:
    """Split n samples into k parts whose largest load (sum of costs) is as small as we can make it.

    costs: [n] integers or floats, finite and >= 0 (a sequence, an array or a tensor). sizes: "free", or "equal": sizes
    differ by at most one. Returns k lists of sample positions.

    Method: the best of Karmarkar-Karp (largest differencing, Karmarkar & Karp 1982; with equal sizes its balanced form
    on blocks of k, Yakir 1996) and longest-first onto the lightest part (Graham 1969; with a capacity for equal sizes),
    each then refined by exchanges; a candidate at the lower bound (free sizes: within TOLERANCE of it) ends the search.
    Lower bounds on the largest load: max(mean, longest); with equal sizes also longest + the n // k - 1 shortest.

    Invariants: every sample is in exactly one part; each part is in ascending order; parts are ordered by falling size,
    then by first sample, so empty ones come last; exactly max(0, k - n) parts are empty; with "equal" the largest load
    is never above that of Karmarkar-Karp with equal sizes; the same input gives the same output everywhere.

    Raises ValueError: k < 1; an unknown `sizes`; a negative, NaN or infinite cost (names the samples).
    """
    k = check_parts(k)
    if sizes not in SIZES:
        raise ValueError(f"sizes must be one of {', '.join(SIZES)}, got {sizes!r}")
    values = integer_costs(costs)
    n = len(values)
    if n <= k:
        return [[i] for i in range(n)] + [[] for _ in range(k - n)]
    if k == 1:
        return [list(range(n))]
    owner = _free_sizes(values, k) if sizes == "free" else _equal_sizes(values, k)
    by_part, cuts = _by_part(owner, k)
    parts = [part.tolist() for part in np.split(by_part, cuts)]
    return sorted(parts, key=lambda part: (-len(part), part[0]))


def check_parts(k: int, name: str = "number of parts") -> int:
    """`k` as an int; ValueError unless it is an integer >= 1."""
    try:
        if isinstance(k, bool):
            raise TypeError
        value = operator.index(k)
    except TypeError:
        raise ValueError(f"{name} must be an integer >= 1, got {k!r}") from None
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")
    return value


def integer_costs(costs: Sequence[float] | Any) -> IntArray:
    """Costs as int64 in the same proportions, their sum times n + 1 below 2 ** 61.

    Integers that fit stay as they are, also those given as floats; all else is rounded to a grid of 2 ** -45 of the sum
    for 16 k samples, finer for fewer. Raises ValueError: not one number per sample, negative, NaN, infinite.
    """
    array = np.asarray(costs)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iufO":
        raise ValueError(f"costs must be one number per sample, got shape {array.shape} of {array.dtype}")
    n = len(array)
    limit = 1 << (_BITS - (n + 1).bit_length())
    if array.dtype.kind in "iu" and array.min() >= 0 and int(array.max()) * n < limit:
        return array.astype(np.int64)
    try:
        values = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"costs must be numbers: {error}") from error
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        named = ", ".join(f"sample {i}: {array[i]}" for i in bad[:8])
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise ValueError(f"costs must be finite and >= 0, got {named}{more}")
    if values.max() * n < limit and np.array_equal(values, np.rint(values)):
        return values.astype(np.int64)
    # fsum is exact whatever the order, so the grid is the same everywhere.
    exponent = limit.bit_length() - 2 - math.frexp(math.fsum(values.tolist()))[1]
    return np.rint(np.ldexp(values, exponent)).astype(np.int64)


def _free_sizes(costs: IntArray, k: int) -> IntArray:
    n = len(costs)
    # One unit per sample breaks ties of the loads by size: samples without cost spread out, and no part stays empty.
    unit = n + 1
    bound = max(-(-int(costs.sum()) // k), int(costs.max()))
    goal = (bound + int(bound * TOLERANCE)) * unit + n
    desc, order = _descending(costs * unit + 1)

    def refined(owner: IntArray) -> tuple[int, IntArray]:
        return _refined(desc, order, owner, k, goal=goal, unit=unit, sizes_free=True)

    load, best = refined(_longest_first(desc, k))
    if load > goal and n <= _DIFFERENCING_MAX:
        singles = np.zeros((n, k), np.int64)
        singles[:, 0] = desc
        other_load, other = refined(_karmarkar_karp(singles)[:, 0])
        if other_load < load:
            best = other
    return best


def _equal_sizes(costs: IntArray, k: int) -> IntArray:
    n = len(costs)
    desc, order = _descending(costs)
    per_part = n // k
    # The part with the longest sample holds at least per_part - 1 others.
    goal = max(-(-int(costs.sum()) // k), int(desc[0]) + int(desc[n - per_part + 1 :].sum()))

    def refined(owner: IntArray) -> tuple[int, IntArray]:
        return _refined(desc, order, owner, k, goal=goal, unit=1, sizes_free=False)

    load, best = refined(np.array(_place_equally(desc.tolist(), k)))
    if load > goal:
        # Samples of no cost fill the last block; every part gets one sample of each block of k.
        blocks = np.concatenate([desc, np.zeros(-n % k, np.int64)]).reshape(-1, k)
        other_load, other = refined(_karmarkar_karp(blocks).ravel()[:n])
        if other_load < load:
            best = other
    return best


def _descending(costs: IntArray) -> tuple[IntArray, IntArray]:
    """(costs in falling order, their positions); equal costs in order of position."""
    n = len(costs)
    if int(costs.max()) >= (1 << _BITS) // n:
        order = np.argsort(-costs, kind="stable")
        return costs[order], order
    # Cost and position in one number: every key differs, so the fastest sort is also a stable one.
    keys = np.sort(costs * n + (n - 1 - np.arange(n)))[::-1]
    desc, rest = np.divmod(keys, n)
    return desc, n - 1 - rest


def _by_part(owner: IntArray, k: int) -> tuple[IntArray, IntArray]:
    """(positions ordered by part, in ascending order inside a part; where parts 1, 2, ... begin)."""
    keys = owner.astype(np.uint16) if k <= 1 << 16 else owner  # NumPy's stable sort of 16 bits is a radix sort
    return np.argsort(keys, kind="stable"), np.cumsum(np.bincount(owner, minlength=k))[:-1]


def _refined(
    desc: IntArray, order: IntArray, owner: IntArray, k: int, *, goal: int, unit: int, sizes_free: bool
) -> tuple[int, IntArray]:
    """Refine a start given in falling order of cost; returns (largest load, part of each sample by position)."""
    loads = np.zeros(k, np.int64)
    np.add.at(loads, owner, desc)
    by_position = np.empty_like(owner)
    by_position[order] = owner
    by_part, cuts = _by_part(owner[::-1], k)  # ascending costs inside a part
    if sizes_free:
        step = max(len(desc) // (k * _CANDIDATES), 1)
        by_part, cuts = by_part[::step], -(-cuts // step)
    costs = [part.tolist() for part in np.split(desc[::-1][by_part], cuts)]
    ids = [part.tolist() for part in np.split(order[::-1][by_part], cuts)]
    load = refine(costs, ids, loads.tolist(), by_position, goal=goal, unit=unit, sizes_free=sizes_free)
    return load, by_position


def _place(costs: list[int], loads: list[int]) -> list[int]:
    """Put each cost, in the given order, onto the lightest part (ties: the lowest)."""
    k = len(loads)
    heap = [load * k + part for part, load in enumerate(loads)]
    heapq.heapify(heap)
    owner = []
    for cost in costs:
        key = heap[0]
        owner.append(key % k)
        heapq.heapreplace(heap, key + cost * k)
    return owner


def _place_equally(costs: list[int], k: int) -> list[int]:
    """The same, into k parts of n // k samples and, for n % k of them, one more."""
    size, larger = divmod(len(costs), k)
    heap = list(range(k))  # load * k + part
    held = [0] * k
    owner = []
    for cost in costs:
        while held[heap[0] % k] == size and not larger:
            heapq.heappop(heap)
        key = heap[0]
        part = key % k
        owner.append(part)
        held[part] += 1
        if held[part] > size:
            larger -= 1
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, key + cost * k)
    return owner


def _longest_first(desc: IntArray, k: int) -> IntArray:
    """Longest first onto the lightest part; where parts hold many samples, only the largest and the smallest of them
    are placed one at a time, and the middle is poured: each part is filled up to one common level in a single pass."""
    n = len(desc)
    if n < _POURING_MIN * k:
        return np.array(_place(desc.tolist(), [0] * k))
    rows = n // k - _HEAD - _TAIL
    head, tail = _HEAD * k, _HEAD * k + rows * k
    owner = np.empty(n, np.int64)
    owner[:head] = _place(desc[:head].tolist(), [0] * k)
    loads = np.zeros(k, np.int64)
    np.add.at(loads, owner[:head], desc[:head])
    # Column by column, so that each part's run spans all lengths instead of getting long or short ones only; a column
    # goes up and down again, so that it is short samples that straddle two parts.
    up_and_down = np.concatenate([np.arange(rows)[::2][::-1], np.arange(rows)[1::2]])
    middle = np.arange(head, tail).reshape(rows, k)[up_and_down].T.ravel()
    poured = np.cumsum(desc[middle])
    owner[middle] = np.searchsorted(np.cumsum(_room(loads, int(poured[-1]))), poured)
    np.add.at(loads, owner[middle], desc[middle])
    owner[tail:] = _place(desc[tail:].tolist(), loads.tolist())
    return owner


def _room(loads: IntArray, amount: int) -> IntArray:
    """How much each part takes when `amount` is poured in and finds one level. Sums to at least `amount`."""
    k = len(loads)
    rising = np.sort(loads)
    below = np.cumsum(rising)
    to_reach = rising * np.arange(1, k + 1) - below
    wet = int(np.searchsorted(to_reach, amount, side="right"))
    level = -(-(amount + int(below[wet - 1])) // wet)
    return np.maximum(level - loads, 0)


def _karmarkar_karp(rows: IntArray) -> IntArray:
    """Largest differencing: owner[r, j] is the part of entry j of row r; a row's entries go to k different parts.

    rows: [m, k], each row in falling order. The two states with the largest spread are merged, the heaviest part of one
    with the lightest of the other, until one is left. Only loads are kept on the way; the parts are read off the tree
    of merges afterwards, so that a merge costs O(k log k) whatever it holds.
    """
    m, k = rows.shape
    states: list[IntArray | None] = list(rows)
    merged: list[tuple[int, int, IntArray]] = []
    heap = [(int(row[-1] - row[0]), state) for state, row in enumerate(rows)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        a, b = states[first], states[second]
        assert a is not None and b is not None  # a state is merged once
        loads = a + b[::-1]
        rank = np.argsort(-loads, kind="stable")
        loads = loads[rank]
        states[first] = states[second] = None
        heapq.heappush(heap, (int(loads[-1] - loads[0]), len(states)))
        states.append(loads)
        merged.append((first, second, rank))
    owner = np.empty((m, k), np.int64)
    pending = [(heap[0][1], np.arange(k))]
    while pending:
        state, parts = pending.pop()
        if state < m:
            owner[state] = parts
            continue
        first, second, rank = merged[state - m]
        before = np.empty(k, np.int64)
        before[rank] = parts
        pending += [(first, before), (second, before[::-1])]
    return owner
