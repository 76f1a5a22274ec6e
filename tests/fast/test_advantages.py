"""Group-relative rewards, returns, GAE, whitening: against plain loops, and on the inputs that usually break them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.training.advantages import (
    compute_advantages,
    discounted_returns,
    explained_variance,
    explained_variance_sums,
    gae,
    group_ids,
    group_statistics,
    grpo_rewards,
    token_rewards,
    whiten,
)

UNIT = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def random_samples(lengths: list[int], seed: int, masked: float = 0.3):
    g = torch.Generator().manual_seed(seed)
    masks = [(torch.rand(n, generator=g) >= masked).long() for n in lengths]
    rewards = [torch.randn(n, generator=g, dtype=torch.float64) for n in lengths]
    values = [torch.randn(n, generator=g, dtype=torch.float64) for n in lengths]
    return masks, rewards, values


def plain_gae(rewards, values, mask, gamma, lambd):
    """One token after the other, from the end."""
    advantages, following, next_value = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = float(rewards[t]) + gamma * next_value - float(values[t])
            following = delta + gamma * lambd * following
            advantages[t], next_value = following, float(values[t])
    return torch.tensor(advantages, dtype=torch.float64)


# --- groups ----------------------------------------------------------------------------------------------------------


def test_s09_a_rollout_of_several_segments_counts_once():
    rewards, rollouts = [1.0, 0.0, 0.0, 0.0], ["A", "B", "B", "B"]
    got = grpo_rewards(rewards, rollouts, group_ids([4], 4), std_normalization=False)
    assert got.tolist() == [0.5, -0.5, -0.5, -0.5]  # the mean is 0.5 (two rollouts), not 0.25
    normalised = grpo_rewards(rewards, rollouts, [0] * 4)
    torch.testing.assert_close(normalised, torch.tensor([0.5, -0.5, -0.5, -0.5]).double() / (math.sqrt(0.5) + 1e-6))
    with pytest.raises(ValueError, match=r"unequal rewards inside rollout B: \[0.0, 0.0, 1.0\]"):
        grpo_rewards([1.0, 0.0, 0.0, 1.0], rollouts, [0] * 4)


@pytest.mark.parametrize("std_normalization", [True, False])
@pytest.mark.parametrize("rewards", [[0.1], [0.1, 0.1, 0.1], [0.3] * 7, [1e9] * 3])
def test_group_without_signal_gives_exact_zeros(rewards, std_normalization):
    got = grpo_rewards(rewards, range(len(rewards)), [0] * len(rewards), std_normalization=std_normalization)
    assert got.tolist() == [0.0] * len(rewards)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), max_size=5), st.booleans(), st.integers(0, 1000))
def test_groups_equal_the_formula_and_do_not_depend_on_order(group_rewards, std_normalization, seed):
    rewards = [r for group in group_rewards for r in group]
    groups = group_ids([len(group) for group in group_rewards], len(rewards))
    got = grpo_rewards(rewards, range(len(rewards)), groups, std_normalization=std_normalization)
    expected = []
    for group in group_rewards:
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (len(group) - 1)) if len(group) > 1 else 0.0
        expected += [(r - mean) / (std + 1e-6 if std_normalization else 1.0) for r in group]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-8)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = grpo_rewards(
        [rewards[i] for i in order], order, [groups[i] for i in order], std_normalization=std_normalization
    )
    torch.testing.assert_close(shuffled, got[order], rtol=1e-9, atol=1e-9)


def test_group_statistics_count_what_carries_no_signal():
    stats = group_statistics([1, 0, 0, 1, 1, 0.5], ["a", "b", "b", "c", "d", "e"], [0, 0, 0, 1, 1, 2])
    assert stats == {"groups": 3, "groups_of_one": 1, "groups_without_signal": 1, "rollouts": 5, "reward_sum": 3.5}


def test_bad_rewards_and_groups_come_in_one_error():
    with pytest.raises(ValueError) as error:
        grpo_rewards([math.nan, 1.0, 2.0, 0.0, 0.0], ["a", "b", "b", "c", "c"], [0, 0, 0, 0, 1])
    for part in (
        "reward of sample 0 is nan",
        "unequal rewards inside rollout b: [1.0, 2.0]",
        "rollout c is in several",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="rewards 1, rollout_ids 2, groups 2"):
        grpo_rewards([1.0], [0, 1], [0, 0])
    with pytest.raises(ValueError, match=r"\[2, 3\] add up to 5, the batch has 4 samples"):
        group_ids([2, 3], 4)


# --- per-token -------------------------------------------------------------------------------------------------------


def test_terminal_reward_stands_at_the_last_token_that_counts():
    masks = [torch.tensor(m) for m in ([1, 1, 0, 0, 1], [1, 1, 0], [0, 0], [])]
    got = token_rewards([5.0, 6.0, 7.0, 8.0], masks)
    assert [r.tolist() for r in got] == [[0, 0, 0, 0, 5], [0, 6, 0], [0, 0], []]


def test_kl_in_the_reward():
    masks = [torch.tensor([1, 0, 1])]
    (got,) = token_rewards([1.0], masks, kl=[torch.tensor([0.5, math.nan, 0.25])], kl_coef=0.1)
    torch.testing.assert_close(got, torch.tensor([-0.05, 0.0, 0.975]))
    with pytest.raises(ValueError, match="--kl-coef 0.1 needs the per-token KL"):
        token_rewards([1.0], masks, kl_coef=0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=5), UNIT, UNIT, st.integers(0, 10**6))
def test_gae_and_returns_equal_a_plain_loop(lengths, gamma, lambd, seed):
    masks, rewards, values = random_samples(lengths, seed)
    advantages, returns = gae(rewards, values, masks, gamma=gamma, lambd=lambd)
    discounted = discounted_returns(rewards, masks, gamma)
    for i, mask in enumerate(masks):
        expected = plain_gae(rewards[i], values[i], mask, gamma, lambd)
        torch.testing.assert_close(advantages[i], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(returns[i], expected + values[i], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            discounted[i], plain_gae(rewards[i], torch.zeros(len(mask)), mask, gamma, 1.0), rtol=1e-9, atol=1e-9
        )


def test_tool_tokens_are_skipped():
    """Mask [1,1,0,0,1]: the result is that of the three tokens alone; the tool tokens get nothing."""
    values = torch.tensor([0.1, 0.2, 9.0, -9.0, 0.3], dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 0, 1])
    (reward,) = token_rewards([1.0], [mask])
    (a,), (r,) = gae([reward], [values], [mask], gamma=0.9, lambd=0.8)
    (short,), _ = gae([torch.tensor([0.0, 0, 1])], [values[mask.bool()]], [torch.ones(3)], gamma=0.9, lambd=0.8)
    torch.testing.assert_close(a[mask.bool()], short)
    assert a[2:4].tolist() == [0, 0] and torch.equal(r, a + values)


def test_nothing_but_masked_tokens_and_no_tokens_at_all():
    masks = [torch.zeros(3, dtype=torch.long), torch.zeros(0)]
    values = [torch.ones(3), torch.zeros(0)]
    advantages, returns = gae(token_rewards([1.0, 1.0], masks), values, masks, gamma=0.9, lambd=0.9)
    assert [a.tolist() for a in advantages] == [[0, 0, 0], []] and [r.tolist() for r in returns] == [[1, 1, 1], []]
    assert gae([], [], []) == ([], []) and discounted_returns([], []) == []


def test_gae_ignores_values_under_the_mask_and_gradients_of_the_critic():
    mask = torch.tensor([1, 0, 1])
    values = torch.tensor([0.5, math.nan, 0.25], requires_grad=True)
    (a,), (r,) = gae([torch.tensor([0.0, math.nan, 1.0])], [values], [mask])
    assert a.isfinite().all() and r[[0, 2]].isfinite().all() and not a.requires_grad and not r.requires_grad


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"])
def test_estimators(estimator):
    masks, _, values = random_samples([4, 0, 300], seed=1)
    kl = [torch.full((len(m),), 0.5) for m in masks]
    coef = 0.0 if estimator == "grpo" else 0.2
    options: dict[str, Any] = dict(kl=kl, kl_coef=coef, values=values, gamma=0.9, lambd=0.8)
    advantages, returns = compute_advantages(estimator, [1.0, 2.0, -1.0], masks, **options)
    assert [len(a) for a in advantages] == [len(r) for r in returns] == [4, 0, 300]
    last = int(masks[0].nonzero()[-1])
    expected = {
        "grpo": 1.0,
        "reinforce_plus_plus": 0.9,
        "reinforce_plus_plus_baseline": 0.9,
        "ppo": 0.9 - float(values[0][last]),
    }
    assert float(advantages[0][last]) == pytest.approx(expected[estimator])


def test_estimator_errors():
    masks = [torch.ones(2)]
    with pytest.raises(ValueError, match="ppo needs the critic's values"):
        compute_advantages("ppo", [1.0], masks)
    with pytest.raises(ValueError, match="must be one of grpo, .*got 'a2c'"):
        compute_advantages("a2c", [1.0], masks)
    with pytest.raises(ValueError, match="--kl-coef 0.1 has no effect with --advantage-estimator grpo"):
        compute_advantages("grpo", [1.0], masks, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"--gamma must be in \[0, 1\], got 1.5"):
        compute_advantages("ppo", [1.0], masks, values=[torch.ones(2)], gamma=1.5)
    with pytest.raises(ValueError, match=r"sample 0: values of \(3,\) for a loss mask of \(2,\)"):
        compute_advantages("ppo", [1.0], masks, values=[torch.ones(3)])


# --- over the batch --------------------------------------------------------------------------------------------------


class Lockstep:
    """Stands for an all-reduce over parts that run one after another: `sums` holds what the first calls add up to.

    A call beyond those gives zeros; what each call was given is kept in `seen`.
    """

    def __init__(self, sums: list[torch.Tensor]) -> None:
        self.sums = sums
        self.seen: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.clone())
        call = len(self.seen) - 1
        return self.sums[call].clone() if call < len(self.sums) else torch.zeros_like(x)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 10**6))
def test_whitening_over_parts_equals_whitening_of_the_whole(lengths, num_parts, seed):
    masks, xs, _ = random_samples(lengths, seed)
    whole = whiten(xs, masks)
    live = torch.cat(xs)[torch.cat(masks) != 0]
    if len(live) > 1:
        expected = (live - live.mean()) / (live.var() + 1e-8).sqrt()
        torch.testing.assert_close(torch.cat(whole)[torch.cat(masks) != 0], expected)
    assert all(torch.isfinite(x).all() and not x[m == 0].any() for x, m in zip(whole, masks, strict=True))

    rows = [list(range(len(xs)))[p::num_parts] for p in range(num_parts)]
    sums: list[torch.Tensor] = []
    for call in range(2):  # the second reduction needs the result of the first
        probes = []
        for part in rows:
            probe = Lockstep(sums)
            whiten([xs[i] for i in part], [masks[i] for i in part], reduce=probe)
            probes.append(probe)
        sums.append(torch.stack([p.seen[call] for p in probes]).sum(0))
    for part in rows:
        reduce = Lockstep(sums)
        got = whiten([xs[i] for i in part], [masks[i] for i in part], reduce=reduce)
        assert [tuple(x.shape) for x in reduce.seen] == [(2,), (1,)]
        for i, x in zip(part, got, strict=True):
            torch.testing.assert_close(x, whole[i], rtol=1e-9, atol=1e-9)


def test_whitening_of_one_token_and_of_equal_values():
    assert whiten([torch.tensor([3.0])], [torch.ones(1)])[0].tolist() == [0.0]
    assert whiten([torch.full((4,), 0.5)], [torch.ones(4)])[0].tolist() == [0.0] * 4
    assert whiten([torch.tensor([math.nan, 1.0])], [torch.tensor([0, 1])])[0].tolist() == [0.0, 0.0]


def test_explained_variance_adds_up_over_parts():
    masks, returns, noise = random_samples([40, 0, 25], seed=4)
    values = [r + 0.3 * n for r, n in zip(returns, noise, strict=True)]
    whole = explained_variance(explained_variance_sums(values, returns, masks))
    parts = sum(explained_variance_sums([v], [r], [m]) for v, r, m in zip(values, returns, masks, strict=True))
    live = torch.cat(masks) != 0
    r, e = torch.cat(returns)[live], (torch.cat(returns) - torch.cat(values))[live]
    assert whole == pytest.approx(float(1 - e.var() / r.var())) and explained_variance(parts) == pytest.approx(whole)
    assert explained_variance(explained_variance_sums(returns, returns, masks)) == pytest.approx(1.0)


def test_explained_variance_of_nothing_and_of_constant_returns_is_undefined():
    assert explained_variance(explained_variance_sums([], [], [])) is None
    ones = [torch.full((5,), 0.1)]
    assert explained_variance(explained_variance_sums([torch.randn(5)], ones, [torch.ones(5)])) is None
