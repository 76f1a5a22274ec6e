"""Balanced partitions: the invariants of their docstrings on generated input, and the figures they must reach."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rollout.sharding import FlopsCost, seqlen_balanced_partitions, strided_partitions
from megatron_rollout.sharding.costs import BalanceOptions
from megatron_rollout.sharding.exchange import find_exchange, find_pair_exchange
from megatron_rollout.sharding.partitions import integer_costs

COSTS = st.lists(st.integers(0, 40_000), max_size=80)
SIZES = st.sampled_from(["free", "equal"])


def loads(costs: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(costs[i] for i in part) for part in parts]


def karmarkar_karp_equal(costs: list[int], k: int) -> list[list[int]]:
    """Plain largest differencing on blocks of k, the reference that equal sizes must never be worse than."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    states = []
    for number, start in enumerate(range(0, len(order), k)):
        groups = [(costs[i], [i]) for i in order[start : start + k]]
        groups += [(0, [])] * (k - len(groups))
        states.append((groups[-1][0] - groups[0][0], number, groups))
    heapq.heapify(states)
    number = len(states)
    while len(states) > 1:
        first, second = heapq.heappop(states)[2], heapq.heappop(states)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda group: -group[0])
        heapq.heappush(states, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [items for _, items in states[0][2]]


@given(COSTS, st.integers(1, 12), SIZES)
@settings(deadline=None)
def test_every_sample_is_in_one_part_and_the_order_is_canonical(costs: list[int], k: int, sizes: str) -> None:
    parts = seqlen_balanced_partitions(costs, k, sizes=sizes)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    assert sum(not part for part in parts) == max(0, k - len(costs))
    keys = [(-len(part), part[0] if part else len(costs)) for part in parts]
    assert keys == sorted(keys)
    if sizes == "equal":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(COSTS, st.integers(1, 12), SIZES)
@settings(deadline=None)
def test_the_same_costs_give_the_same_parts_in_every_container(costs: list[int], k: int, sizes: str) -> None:
    parts = seqlen_balanced_partitions(costs, k, sizes=sizes)
    assert seqlen_balanced_partitions(np.array(costs, dtype=np.int64), k, sizes=sizes) == parts
    assert seqlen_balanced_partitions([float(cost) for cost in costs], k, sizes=sizes) == parts


@given(COSTS.filter(bool), st.integers(2, 12))
@settings(deadline=None)
def test_equal_sizes_are_never_worse_than_karmarkar_karp(costs: list[int], k: int) -> None:
    ours = max(loads(costs, seqlen_balanced_partitions(costs, k, sizes="equal")))
    assert ours <= max(loads(costs, karmarkar_karp_equal(costs, k)))


@given(COSTS.filter(bool), st.integers(1, 12), SIZES)
@settings(deadline=None)
def test_the_largest_load_keeps_its_guarantee(costs: list[int], k: int, sizes: str) -> None:
    largest = max(loads(costs, seqlen_balanced_partitions(costs, k, sizes=sizes)))
    assert largest >= max(sum(costs) / k, max(costs))
    if sizes == "free":  # Graham 1969: list scheduling is within longest * (1 - 1 / k) of the mean
        assert largest <= sum(costs) / k + max(costs) * (1 - 1 / k) + 1e-9


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(2, 3))
@settings(deadline=None, max_examples=30)
def test_small_inputs_are_within_a_sixth_of_the_optimum(costs: list[int], k: int) -> None:
    # Michiels et al. 2003: differencing is within 4/3 - 1/(3 (k - 1)) of the optimum, 7/6 for two and three parts.
    best = min(
        max(sum(cost for i, cost in enumerate(costs) if code // k**i % k == part) for part in range(k))
        for code in range(k ** len(costs))
    )
    ours = max(loads(costs, seqlen_balanced_partitions(costs, k)))
    assert best <= ours <= best * 7 / 6 + 1e-9


@pytest.mark.parametrize("distribution", ["lognormal", "uniform", "one long"])
@pytest.mark.parametrize(("n", "k", "limit"), [(64, 4, 5e-4), (256, 8, 5e-4), (256, 32, 2.5e-3), (2048, 64, 5e-4)])
def test_mean_excess_over_the_lower_bound(distribution: str, n: int, k: int, limit: float) -> None:
    excess = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        if distribution == "lognormal":
            costs = np.minimum(rng.lognormal(7, 1, n) + 50, 16_384).astype(int)
        elif distribution == "uniform":
            costs = rng.integers(1, 16_385, n)
        else:
            costs = rng.integers(50, 513, n)
            costs[rng.integers(n)] = 32_768
        parts = seqlen_balanced_partitions(costs, k)
        excess.append(max(loads(costs.tolist(), parts)) / max(costs.sum() / k, costs.max()) - 1)
    assert np.mean(excess) <= limit


def test_many_samples_per_part_are_poured_and_still_balanced() -> None:
    rng = np.random.default_rng(0)
    costs = np.concatenate([rng.integers(1, 100, 3_000), [90_000, 50_000, 40_000]])
    parts = seqlen_balanced_partitions(costs, 5)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert max(loads(costs.tolist(), parts)) == costs.max()  # the longest alone sets the load
    even = rng.integers(1, 1_000, 3_000)
    assert max(loads(even.tolist(), seqlen_balanced_partitions(even, 5))) <= even.sum() / 5 * 1.0001 + 1


def test_samples_without_cost_spread_out() -> None:
    assert [len(part) for part in seqlen_balanced_partitions([0] * 10, 4)] == [3, 3, 2, 2]
    assert [len(part) for part in seqlen_balanced_partitions([0.0] * 10, 4, sizes="equal")] == [3, 3, 2, 2]
    assert all(seqlen_balanced_partitions([7, 7, 0, 0, 0], 4))


def test_a_large_sum_of_flops_neither_overflows_nor_loses_balance() -> None:
    random.seed(0)
    costs = [random.randint(10**17, 10**18) for _ in range(200)]
    for typed in (costs, [float(cost) for cost in costs]):
        parts = seqlen_balanced_partitions(typed, 5)
        assert max(loads(costs, parts)) <= sum(costs) / 5 * 1.001


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1.0, float("nan"), 3.0], "sample 1: nan"),
        ([1, 2, -3], "sample 2: -3"),
        ([1.0, float("inf")], "sample 1: inf"),
        ([[1, 2], [3, 4]], "one number per sample"),
        (["a", "b"], "one number per sample"),
    ],
)
def test_bad_costs_are_refused_by_name(costs: list, message: str) -> None:
    for sizes in ("free", "equal"):
        with pytest.raises(ValueError, match=message):
            seqlen_balanced_partitions(costs, 2, sizes=sizes)


def test_bad_part_counts_and_sizes_are_refused() -> None:
    cases: list[tuple[Any, str]] = [(0, ">= 1, got 0"), (-2, ">= 1, got -2"), (1.5, "got 1.5"), (True, "got True")]
    for k, message in cases:
        with pytest.raises(ValueError, match=message):
            seqlen_balanced_partitions([1, 2], k)
        with pytest.raises(ValueError, match=message):
            strided_partitions(2, k)
    with pytest.raises(ValueError, match="free, equal, got 'even'"):
        seqlen_balanced_partitions([1, 2], 2, sizes="even")


@given(st.integers(0, 100), st.integers(1, 12))
@settings(deadline=None)
def test_strided_parts_are_the_static_assignment_by_index(n: int, k: int) -> None:
    parts = strided_partitions(n, k)
    assert all(i % k == part for part, members in enumerate(parts) for i in members)
    assert sum(map(len, parts)) == n


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.lists(st.integers(1, 500), max_size=12), st.data())
@settings(deadline=None)
def test_an_exchange_lowers_the_heavier_part_and_matches_what_it_names(
    heavy: list[int], light: list[int], data: st.DataObject
) -> None:
    heavy, light = sorted(heavy), sorted(light)
    gap = data.draw(st.integers(2, 1_000))
    target = data.draw(st.integers(1, max(gap // 2, 1)))
    _, found = find_exchange(heavy, light, target=target, gap=gap, may_move=True, slack=0)
    amounts = [a - b for a in heavy for b in light] + heavy
    possible = [amount for amount in amounts if 0 < amount < gap]
    # What is further from the target than the whole gap isn't worth an exchange.
    if not [amount for amount in possible if abs(amount - target) < gap]:
        assert found is None
        return
    assert found is not None
    assert abs(found.amount - target) == min(abs(amount - target) for amount in possible)
    assert found.amount == sum(heavy[i] for i in found.give) - sum(light[i] for i in found.take)


@given(st.lists(st.integers(1, 500), max_size=10), st.lists(st.integers(1, 500), max_size=10), st.integers(2, 800))
@settings(deadline=None)
def test_two_for_two_is_the_nearest_of_all_pairs(heavy: list[int], light: list[int], gap: int) -> None:
    heavy, light = sorted(heavy), sorted(light)
    found = find_pair_exchange(heavy, light, target=gap // 2, gap=gap)
    amounts = [sum(a) - sum(b) for a in itertools.combinations(heavy, 2) for b in itertools.combinations(light, 2)]
    possible = [abs(amount - gap // 2) for amount in amounts if 0 < amount < gap]
    if not possible:
        assert found is None
        return
    assert found is not None and abs(found.amount - gap // 2) == min(possible)
    assert len(set(found.give)) == len(set(found.take)) == 2
    assert found.amount == sum(heavy[i] for i in found.give) - sum(light[i] for i in found.take)


def test_integer_costs_keep_integers_and_proportions() -> None:
    assert integer_costs([3, 0, 5]).tolist() == [3, 0, 5]
    scaled = integer_costs([0.5, 0.25, 1.0])
    assert (scaled / scaled[2]).tolist() == [0.5, 0.25, 1.0]


def test_flops_follow_the_published_count() -> None:
    class Model:
        hidden_size, num_layers, num_attention_heads, padded_vocab_size = 512, 4, 8, 1000

    length = 128
    # Narayanan et al. 2021: 24 s h^2 + 4 s^2 h per layer (half the latter if causal), 2 s h V for the logits.
    expected = 4 * (24 * length * 512**2 + 2 * length**2 * 512) + 2 * length * 512 * 1000
    assert FlopsCost.from_args(Model)([length])[0] == expected
    with pytest.raises(ValueError, match="missing: --hidden-size, --num-layers, --num-attention-heads"):
        FlopsCost.from_args(object())


def test_balance_options_name_every_wrong_one() -> None:
    class Args:
        balance_by, balance_sizes = "words", "even"

    with pytest.raises(ValueError, match="--balance-by .*'words'; --balance-sizes .*'even'"):
        BalanceOptions.from_args(Args)
    assert BalanceOptions.from_args(object()) == BalanceOptions(data=False, by="tokens", sizes="free")

    class Host:
        balance_by_flops = True

    assert BalanceOptions.from_args(Host).by == "flops"
