"""Local search on a partition: exchange samples between the heaviest part and lighter ones.

One for one (or one for nothing) first, on plain sorted lists with `bisect`: such a search looks at a few entries of two
short lists, where the fixed cost of array operations would dominate. Two for two only where that is stuck: there are so
many pairs that one of them nearly always has the amount that is missing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Work allowed for one call of `refine`, in list entries looked at (about 0.3 microseconds each): counted, never timed,
#: so that every process stops at the same point.
WORK_LIMIT = 1 << 16

#: Partners tried without a satisfying exchange before the best one seen is taken.
MAX_PARTNERS = 8

#: Samples of a part whose pairs are searched; of longer parts an even selection.
MAX_PAIRED = 64


@dataclass(frozen=True)
class Exchange:
    """Give the entries `give` of the heavy part for the entries `take` of the light one (none: a move); `amount` is
    what the heavy part loses by it."""

    give: tuple[int, ...]
    take: tuple[int, ...]
    amount: int


def find_exchange(
    heavy: list[int], light: list[int], *, target: int, gap: int, may_move: bool, slack: int
) -> tuple[int, Exchange | None]:
    """The exchange whose amount is nearest to `target` among those with 0 < amount < gap, and its distance from it.

    heavy, light: costs in ascending order. gap: difference of the two loads; any amount strictly inside (0, gap) leaves
    both parts below the heavier one's load. Ends at the first exchange within `slack` of the target.
    """
    best: Exchange | None = None
    error = gap
    smallest = 0 if may_move or not light else light[0]
    # Samples below target + smallest can't reach the target; the largest of them comes closest.
    first = max(bisect_left(heavy, target + smallest) - 1, 0)
    for give in range(first, len(heavy)):
        cost = heavy[give]
        above = bisect_left(light, cost - target)
        if above < len(light):
            amount = cost - light[above]
            if amount > 0 and target - amount < error:
                error, best = target - amount, Exchange((give,), (above,), amount)
        if above > 0:
            amount = cost - light[above - 1]
            if amount < gap and amount - target < error:
                error, best = amount - target, Exchange((give,), (above - 1,), amount)
        elif may_move and 0 < cost < gap and abs(cost - target) < error:
            error, best = abs(cost - target), Exchange((give,), (), cost)
        if error <= slack:
            break
    return error, best


def find_pair_exchange(heavy: list[int], light: list[int], *, target: int, gap: int) -> Exchange | None:
    """Two for two: the exchange whose amount is nearest to `target` among those with 0 < amount < gap."""
    given, taken = _pairs(heavy), _pairs(light)
    if not len(given.sums) or not len(taken.sums):
        return None
    above = np.searchsorted(taken.sums, given.sums - target)
    best: Exchange | None = None
    error = gap
    for at in (np.minimum(above, len(taken.sums) - 1), np.maximum(above - 1, 0)):
        amounts = given.sums - taken.sums[at]
        errors = np.where((amounts > 0) & (amounts < gap), np.abs(amounts - target), gap)
        i = int(errors.argmin())
        if errors[i] < error:
            error = int(errors[i])
            best = Exchange(given.entries(i), taken.entries(int(at[i])), int(amounts[i]))
    return best


@dataclass(frozen=True)
class _Pairs:
    """Sums of two entries of a list, ascending, and which entries those are."""

    sums: NDArray[np.int64]
    first: NDArray[np.int64]
    second: NDArray[np.int64]

    def entries(self, pair: int) -> tuple[int, int]:
        return int(self.first[pair]), int(self.second[pair])


def _pairs(costs: list[int]) -> _Pairs:
    chosen = np.arange(0, len(costs), -(-len(costs) // MAX_PAIRED) or 1)
    values = np.array(costs, dtype=np.int64)[chosen]
    first, second = np.triu_indices(len(chosen), 1)
    sums = values[first] + values[second]
    order = np.argsort(sums, kind="stable")
    return _Pairs(sums[order], chosen[first[order]], chosen[second[order]])


def refine(
    costs: list[list[int]],
    ids: list[list[int]],
    loads: list[int],
    owner: NDArray[np.int64],
    *,
    goal: int,
    unit: int,
    sizes_free: bool,
    work_limit: int = WORK_LIMIT,
) -> int:
    """Lower the largest load by exchanges until it is <= goal, no exchange helps, or the work limit is reached.

    costs[p]: costs of the samples in part p that may be exchanged (all or some), ascending; ids[p]: which samples those
    are; loads[p]: the sum over all samples in part p. costs, ids and `owner` (sample -> part) are changed in place.
    unit: the smallest difference worth looking for. sizes_free: parts may change their sizes; otherwise a sample moves
    without return only from a part that holds one more than the other (all samples must be in `costs` then), which
    keeps the set of sizes. Returns the largest load.

    Invariants: the largest load never grows; no part with a load becomes empty (giving away an only sample never
    helps); the result depends on the arguments alone.
    """
    search = _Search(costs, loads, goal, unit, sizes_free, work_limit)
    while search.heaviest_load > goal and search.work > 0:
        found = search.single() or search.pairs()
        if found is None:
            break
        light, exchange = found
        heavy = search.heaviest
        given = _take_out(costs[heavy], ids[heavy], exchange.give)
        taken = _take_out(costs[light], ids[light], exchange.take)
        _put_in(costs[light], ids[light], owner, light, given)
        _put_in(costs[heavy], ids[heavy], owner, heavy, taken)
        search.moved(light, exchange.amount)
    return search.heaviest_load


class _Search:
    """Parts ranked by load, and what the heaviest of them can do about it."""

    def __init__(
        self, costs: list[list[int]], loads: list[int], goal: int, unit: int, sizes_free: bool, work: int
    ) -> None:
        self.costs, self.goal, self.unit, self.sizes_free, self.work = costs, goal, unit, sizes_free, work
        self.k = len(costs)
        # load * k + part in ascending order: ties go to the lower part.
        self.ranked = sorted(load * self.k + part for part, load in enumerate(loads))

    @property
    def heaviest_load(self) -> int:
        return self.ranked[-1] // self.k

    @property
    def heaviest(self) -> int:
        return self.ranked[-1] % self.k

    def partners(self) -> Iterator[tuple[int, int, int]]:
        """(part, difference of loads, amount to aim at), lightest first, while an exchange can help and work is
        left."""
        load = self.heaviest_load
        for key in self.ranked:
            other_load, other = divmod(key, self.k)
            gap = load - other_load
            if gap <= 1 or self.work <= 0:
                return
            # Halfway is best for the two; but a light part that would pass the goal needs yet another exchange.
            yield other, gap, min(gap // 2, max(self.goal - other_load, 1))

    def single(self) -> tuple[int, Exchange] | None:
        heavy = self.costs[self.heaviest]
        chosen: tuple[int, Exchange] | None = None
        most = 0
        tried = 0
        for other, gap, target in self.partners():
            light = self.costs[other]
            slack = max(gap >> 3, self.unit)
            may_move = self.sizes_free or len(heavy) == len(light) + 1
            error, found = find_exchange(heavy, light, target=target, gap=gap, may_move=may_move, slack=slack)
            self.work -= 32 if error <= slack else 16 + len(heavy)
            if found is None:
                continue
            gain = min(found.amount, gap - found.amount)  # how far both stay below the heavy part's load
            if gain > most:
                chosen, most = (other, found), gain
            tried += 1
            if error <= slack or tried == MAX_PARTNERS:
                break
        return chosen

    def pairs(self) -> tuple[int, Exchange] | None:
        heavy = self.costs[self.heaviest]
        for other, gap, target in self.partners():
            found = find_pair_exchange(heavy, self.costs[other], target=target, gap=gap)
            self.work -= 512
            if found is not None:
                return other, found
        return None

    def moved(self, light: int, amount: int) -> None:
        heavy_load, heavy = divmod(self.ranked.pop(), self.k)
        at = next(i for i, key in enumerate(self.ranked) if key % self.k == light)
        light_load = self.ranked.pop(at) // self.k
        insort(self.ranked, (heavy_load - amount) * self.k + heavy)
        insort(self.ranked, (light_load + amount) * self.k + light)


def _take_out(costs: list[int], ids: list[int], entries: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(costs.pop(at), ids.pop(at)) for at in sorted(entries, reverse=True)]


def _put_in(
    costs: list[int], ids: list[int], owner: NDArray[np.int64], part: int, samples: list[tuple[int, int]]
) -> None:
    for cost, sample in samples:
        at = bisect_left(costs, cost)
        costs.insert(at, cost)
        ids.insert(at, sample)
        owner[sample] = part
