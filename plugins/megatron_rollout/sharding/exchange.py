"""Local search on a partition: exchange single samples between the heaviest part and lighter ones.

Works on plain sorted lists with `bisect`: the parts are short, and one search touches a few entries of two of them, so
that this is faster than array operations whose fixed cost is paid at every call.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Work allowed for one call of `refine`, in list entries looked at (about 0.3 microseconds each): counted, never timed,
#: so that every process stops at the same point.
WORK_LIMIT = 1 << 16

#: Partners tried without a satisfying exchange before the best one seen is taken.
MAX_PARTNERS = 8

MOVE = -1


@dataclass(frozen=True)
class Exchange:
    """Give `heavy[give]`, take `light[take]` (`MOVE`: take nothing); `amount` is what the heavy part loses by it."""

    give: int
    take: int
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
                error, best = target - amount, Exchange(give, above, amount)
        if above > 0:
            amount = cost - light[above - 1]
            if amount < gap and amount - target < error:
                error, best = amount - target, Exchange(give, above - 1, amount)
        elif may_move and 0 < cost < gap and abs(cost - target) < error:
            error, best = abs(cost - target), Exchange(give, MOVE, cost)
        if error <= slack:
            break
    return error, best


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
    k = len(costs)
    # load * k + part in ascending order: ties go to the lower part.
    ranked = sorted(load * k + part for part, load in enumerate(loads))
    while work_limit > 0:
        load, heaviest = divmod(ranked[-1], k)
        if load <= goal:
            break
        heavy = costs[heaviest]
        chosen: tuple[int, int, Exchange] | None = None
        chosen_load = load
        partners = 0
        for key in ranked:
            other_load, other = divmod(key, k)
            gap = load - other_load
            if gap <= 1:
                break
            # Halfway is best for the two; but a light part that would pass the goal needs yet another exchange.
            target = min(gap // 2, max(goal - other_load, 1))
            slack = max(gap >> 3, unit)
            light = costs[other]
            may_move = sizes_free or len(heavy) == len(light) + 1
            error, found = find_exchange(heavy, light, target=target, gap=gap, may_move=may_move, slack=slack)
            work_limit -= 32 if error <= slack else 16 + len(heavy)
            if found is not None:
                larger = max(load - found.amount, other_load + found.amount)
                if larger < chosen_load:
                    chosen, chosen_load = (other, other_load, found), larger
                partners += 1
                if error <= slack or partners == MAX_PARTNERS:
                    break
            if work_limit <= 0:
                break
        if chosen is None:
            break
        other, other_load, found = chosen
        _apply(found, costs, ids, owner, heaviest, other)
        ranked.pop()
        ranked.remove(other_load * k + other)
        insort(ranked, (load - found.amount) * k + heaviest)
        insort(ranked, (other_load + found.amount) * k + other)
    return ranked[-1] // k


def _apply(
    exchange: Exchange, costs: list[list[int]], ids: list[list[int]], owner: NDArray[np.int64], heavy: int, light: int
) -> None:
    given, given_id = costs[heavy].pop(exchange.give), ids[heavy].pop(exchange.give)
    if exchange.take != MOVE:
        taken, taken_id = costs[light].pop(exchange.take), ids[light].pop(exchange.take)
        _insert(taken, taken_id, costs[heavy], ids[heavy])
        owner[taken_id] = heavy
    _insert(given, given_id, costs[light], ids[light])
    owner[given_id] = light


def _insert(cost: int, sample: int, costs: list[int], ids: list[int]) -> None:
    at = bisect_left(costs, cost)
    costs.insert(at, cost)
    ids.insert(at, sample)
