"""The losses: their formulas, and that no cut into micro-batches, context-parallel ranks and cells changes them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rollout.packing import first_fit_decreasing, pack_sequences
from trainer_hooks.training.logprobs import token_logprobs_and_entropy
from trainer_hooks.training.losses import (
    KL_LOSS_TYPES,
    PolicyLossConfig,
    approx_kl,
    logprob_difference,
    loss_weights,
    policy_loss,
    undo_schedule_scaling,
    value_loss,
)

VOCAB, HIDDEN = 7, 5
CONFIG = PolicyLossConfig(
    eps_clip=0.1,
    eps_clip_high=0.2,
    eps_clip_c=1.5,
    kl_loss_coef=0.3,
    kl_loss_type="low_var_kl",
    entropy_coef=0.05,
    use_tis=True,
    tis_clip=1.2,
)


@dataclass
class Batch:
    """Samples with given hidden states; the "model" is one matrix to logits and one vector to values (float64)."""

    tokens: list[Tensor]
    hidden: list[Tensor]
    loss_masks: list[Tensor]
    rollout_ids: list[int]
    columns: dict[str, list[Tensor]]

    @property
    def counts(self) -> dict[str, Any]:
        totals: dict[int, float] = {}
        for rollout, mask in zip(self.rollout_ids, self.loss_masks, strict=True):
            totals[rollout] = totals.get(rollout, 0.0) + float(mask.sum())
        return {
            "global_tokens": sum(totals.values()),
            "global_rollouts": len(totals),
            "rollout_mask_sums": [totals[r] for r in self.rollout_ids],
        }


def make_batch(num_samples: int, seed: int = 0) -> Batch:
    """Rollouts of one to three segments, tool tokens, an all-zero mask and an empty response among them."""
    g = torch.Generator().manual_seed(seed)
    tokens, hidden, masks, rollout_ids = [], [], [], []
    columns: dict[str, list[Tensor]] = {
        name: [] for name in ("old", "advantages", "ref", "rollout", "old_values", "returns")
    }
    for i in range(num_samples):
        prompt, response = (int(torch.randint(1, 9, (), generator=g)) for _ in range(2))
        response = 0 if i == 5 else response
        tokens.append(torch.randint(0, VOCAB, (prompt + response,), generator=g))
        hidden.append(torch.randn(prompt + response, HIDDEN, generator=g, dtype=torch.float64))
        mask = (torch.rand(response, generator=g) < 0.8).long()
        masks.append(mask * (i != 7))
        rollout_ids.append(i - i % 3 if i > 6 else i)
        for name, column in columns.items():
            shift = -2.0 if name in ("old", "ref", "rollout") else 0.0
            column.append(torch.randn(response, generator=g, dtype=torch.float64) * 0.4 + shift)
    return Batch(tokens, hidden, masks, rollout_ids, columns)


def parameters() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(99)
    policy = torch.randn(HIDDEN, VOCAB, generator=g, dtype=torch.float64) * 0.2
    value = torch.randn(HIDDEN, generator=g, dtype=torch.float64) * 0.2
    return policy.requires_grad_(), value.requires_grad_()


def trained(batch: Batch, shards: list[list[list[int]]], per_token: bool, cp: int = 1) -> dict[str, Tensor]:
    """Losses, summed metrics and gradients over cells → micro-batches (lists of rows) → context-parallel ranks."""
    policy, value = parameters()
    weights = loss_weights(batch.loss_masks, calculate_per_token_loss=per_token, dtype=torch.float64, **batch.counts)
    totals: dict[str, Tensor] = {}
    for bins in shards:
        for pack in pack_sequences(batch.tokens, bins, multiple_of=2 * cp if cp > 1 else 1):
            hidden = pack.pack_tokens(batch.hidden, fill=math.nan)
            hidden = torch.where(hidden.isnan(), 1e3, hidden)  # padding may be anything finite
            columns = {name: pack.pack_response(column, fill=math.nan) for name, column in batch.columns.items()}
            packed_weights, targets = pack.pack_response(weights), pack.next_tokens()
            for rank in range(cp):
                local = {name: pack.local(column, cp, rank) for name, column in columns.items()}
                w, x = pack.local(packed_weights, cp, rank), pack.local(hidden, cp, rank)
                logprobs, entropy = token_logprobs_and_entropy(
                    x @ policy, pack.local(targets, cp, rank), temperature=0.6, chunk_size=3
                )
                loss, metrics = policy_loss(
                    logprobs,
                    local["old"],
                    local["advantages"],
                    w,
                    CONFIG,
                    ref_logprobs=local["ref"],
                    entropy=entropy,
                    rollout_logprobs=local["rollout"],
                )
                critic_loss, critic_metrics = value_loss(x @ value, local["old_values"], local["returns"], w)
                (loss + critic_loss).backward()
                for name, number in (metrics | critic_metrics).items():
                    assert number.dim() == 0 and not number.requires_grad
                    totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + number
    assert policy.grad is not None and value.grad is not None
    return totals | {"policy_grad": policy.grad, "value_grad": value.grad}


def by_hand(batch: Batch, per_token: bool) -> dict[str, Tensor]:
    """The same step from the formulas, sample by sample and token by token, with torch's log_softmax."""
    policy, value = parameters()
    counts = batch.counts
    loss = torch.zeros((), dtype=torch.float64)
    critic = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(batch.loss_masks):
        scale = counts["global_tokens"] if per_token else counts["rollout_mask_sums"][i] * counts["global_rollouts"]
        for t in range(len(mask)):
            if not mask[t]:
                continue
            position = len(batch.tokens[i]) - len(mask) + t
            state = batch.hidden[i][position - 1]
            log_p = torch.log_softmax(state @ policy / 0.6, -1)
            lp = log_p[batch.tokens[i][position]]
            old, adv, ref, rollout, old_v, ret = (batch.columns[name][i][t] for name in batch.columns)
            ratio = (lp - old).exp()
            pg = max(-ratio * adv, -ratio.clamp(1 - 0.1, 1 + 0.2) * adv)
            if adv < 0:
                pg = min(pg, -1.5 * adv)
            pg = pg * (old - rollout).exp().clamp(max=1.2)
            kl = (ref - lp).exp() - 1 - (ref - lp)
            entropy = -(log_p.exp() * log_p).sum()
            loss = loss + (pg + 0.3 * kl - 0.05 * entropy) / scale
            v = state @ value
            clipped = old_v + (v - old_v).clamp(-0.2, 0.2)
            critic = critic + 0.5 * max((v - ret) ** 2, (clipped - ret) ** 2) / scale
    policy_grad, value_grad = torch.autograd.grad(loss, policy)[0], torch.autograd.grad(critic, value)[0]
    return {"loss": loss, "value_loss": critic, "policy_grad": policy_grad, "value_grad": value_grad}


def cells(num_samples: int, num_cells: int, cut) -> list[list[list[int]]]:
    rows = [list(range(num_samples))[c::num_cells] for c in range(num_cells)]
    return [[[mine[i] for i in members] for members in cut(mine)] for mine in rows]


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, number in expected.items():
        scale = float(torch.as_tensor(number).abs().max())
        assert float((got[name] - number).abs().max()) <= 1e-6 * scale + 1e-15, name


@pytest.mark.parametrize("per_token", [True, False], ids=["token_mean", "rollout_mean"])
def test_s14_any_cut_gives_the_loss_and_gradient_of_the_formulas(per_token):
    """13 samples over 1-4 cells × micro-batch sizes 1, 2, 4 × token caps, fp64 to 1e-6 relative."""
    batch = make_batch(13)
    expected = by_hand(batch, per_token)
    assert expected["policy_grad"].norm() > 0.01 and expected["value_grad"].norm() > 0.01
    whole = trained(batch, [[list(range(13))]], per_token)
    assert_same(whole, expected)
    assert float(whole["pg_clipfrac"]) > 0 and float(whole["value_clipfrac"]) > 0 and float(whole["tis_clipfrac"]) > 0
    lengths = [len(t) for t in batch.tokens]
    for num_cells in (1, 2, 3, 4):
        for size in (1, 2, 4):
            shards = cells(
                13, num_cells, lambda mine, n=size: [range(len(mine))[i : i + n] for i in range(0, len(mine), n)]
            )
            assert_same(trained(batch, shards, per_token), whole)
        for cap in (16, 40):
            shards = cells(13, num_cells, lambda mine, n=cap: first_fit_decreasing([lengths[i] for i in mine], n))
            assert_same(trained(batch, shards, per_token), whole)


@pytest.mark.parametrize("per_token", [True, False], ids=["token_mean", "rollout_mean"])
def test_context_parallel_parts_sum_to_the_whole(per_token):
    batch = make_batch(5, seed=3)
    whole = trained(batch, [[[0, 1, 2, 3, 4]]], per_token)
    for cp in (2, 4):  # with CP 4 a short sequence leaves some rank with padding only
        assert_same(trained(batch, [[[0, 1], [2, 3, 4]]], per_token, cp=cp), whole)


def test_s02_s03_cells_without_samples():
    for num_samples in (5, 3):
        batch = make_batch(num_samples, seed=num_samples)
        whole = trained(batch, [[list(range(num_samples))]], True)
        shards = cells(num_samples, 4, lambda mine: [[i] for i in range(len(mine))])
        assert_same(trained(batch, shards, True), whole)
        assert_same(trained(batch, [[list(range(num_samples)), [], []], [[]], []], True), whole)


def test_cells_of_padding_only_add_exact_zeros():
    got = trained(make_batch(3), [[[]], []], True)
    assert all(not number.any() and number.isfinite().all() for number in got.values())


def test_s10_token_mean():
    """One token with loss 1 in one micro-batch, nine with loss 0 in another: 0.1."""
    masks = [torch.ones(1), torch.ones(9)]
    weights = loss_weights(masks, calculate_per_token_loss=True, global_tokens=10)
    config = PolicyLossConfig()
    for cut in ([[0], [1]], [[0, 1]]):
        total = 0.0
        for rows in cut:
            advantages = torch.cat([torch.full((len(masks[r]),), -1.0 if r == 0 else 0.0) for r in rows])
            logprobs = torch.zeros_like(advantages, requires_grad=True)
            loss, _ = policy_loss(
                logprobs, torch.zeros_like(advantages), advantages, torch.cat([weights[r] for r in rows]), config
            )
            total += float(loss)
        assert total == pytest.approx(0.1)


def test_rollout_mean_counts_segments_of_one_rollout_together():
    weights = loss_weights(
        [[1, 1, 0], [1], [1, 1]], calculate_per_token_loss=False, global_rollouts=2, rollout_mask_sums=[3, 3, 2]
    )
    torch.testing.assert_close(torch.cat(weights), torch.tensor([1 / 6, 1 / 6, 0, 1 / 6, 1 / 4, 1 / 4]))


def test_weights_without_tokens_need_no_counts_and_wrong_counts_are_named():
    assert loss_weights([[0, 0], []], calculate_per_token_loss=True)[0].tolist() == [0, 0]
    with pytest.raises(ValueError, match="sample 1: its loss mask counts 3 tokens, the step's global_tokens is 2"):
        loss_weights([[1], [1, 1, 1]], calculate_per_token_loss=True, global_tokens=2)
    with pytest.raises(ValueError, match="sample 0: its loss mask counts 1 tokens, the step's global_rollouts is None"):
        loss_weights([[1]], calculate_per_token_loss=False)
    with pytest.raises(
        ValueError, match="sample 0: its loss mask counts 2 tokens, its rollout's rollout_mask_sums is 1"
    ):
        loss_weights([[1, 1]], calculate_per_token_loss=False, global_rollouts=1, rollout_mask_sums=[1])


def test_masked_positions_are_never_looked_at():
    """NaN and inf where the weight is 0 reach neither the loss, nor a metric, nor a gradient."""
    bad = torch.tensor([0.1, math.nan, math.inf, -0.2])
    weights = torch.tensor([0.5, 0.0, 0.0, 0.5])
    lp, entropy, values = (bad.clone().requires_grad_() for _ in range(3))
    loss, metrics = policy_loss(
        lp, bad - 0.01, bad + 1, weights, CONFIG, ref_logprobs=bad, entropy=entropy, rollout_logprobs=bad
    )
    critic, critic_metrics = value_loss(values, bad, bad, weights)
    (loss + critic).backward()
    numbers = [loss, critic, *metrics.values(), *critic_metrics.values(), lp.grad, entropy.grad, values.grad]
    assert all(torch.isfinite(x).all() for x in numbers)
    assert not lp.grad[1:3].any() and lp.grad[0] != 0


@pytest.mark.parametrize("kl_loss_type", KL_LOSS_TYPES)
def test_far_apart_policies_stay_finite(kl_loss_type):
    lp = torch.tensor([-900.0, 0.0], requires_grad=True)
    other = torch.tensor([0.0, -900.0])
    config = PolicyLossConfig(kl_loss_coef=0.1, kl_loss_type=kl_loss_type, use_tis=True)
    loss, metrics = policy_loss(
        lp, other, torch.tensor([1.0, -1.0]), torch.ones(2), config, ref_logprobs=other, rollout_logprobs=lp.detach()
    )
    loss.backward()
    assert loss.isfinite() and lp.grad.isfinite().all() and all(x.isfinite() for x in metrics.values())


def test_kl_estimators():
    lp, base = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-1.5, -1.0], dtype=torch.float64)
    d = lp - base
    torch.testing.assert_close(approx_kl(lp, base, "k1"), d)
    torch.testing.assert_close(approx_kl(lp, base, "k2"), d * d / 2)
    torch.testing.assert_close(approx_kl(lp, base, "k3"), (-d).exp() - 1 + d)
    torch.testing.assert_close(approx_kl(lp, base, "low_var_kl"), (-d).exp() - 1 + d)
    assert approx_kl(torch.tensor(-30.0), torch.tensor(0.0), "low_var_kl") == 10
    with pytest.raises(ValueError, match="--kl-loss-type must be one of k1, k2, k3, low_var_kl, got 'k4'"):
        approx_kl(lp, base, "k4")


def test_k3_estimates_the_kl_of_two_distributions():
    """Expectation over the policy's own tokens: the estimators must agree with the exact divergence."""
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3", "low_var_kl"):
        torch.testing.assert_close((p * approx_kl(p.log(), q.log(), kind)).sum(), exact)


def test_clipping_cuts_the_gradient_and_dual_clip_bounds_the_loss():
    old, ones = torch.zeros(4), torch.ones(4)
    lp = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, metrics = policy_loss(lp, old, advantages, ones, PolicyLossConfig(eps_clip=0.2))
    loss.backward()
    assert (lp.grad != 0).tolist() == [False, True, True, False]
    assert metrics["pg_clipfrac"] == 2
    bounded, _ = policy_loss(
        torch.tensor([3.0]), old[:1], torch.tensor([-2.0]), ones[:1], PolicyLossConfig(eps_clip_c=3.0)
    )
    assert bounded == 6


def test_value_loss_takes_the_larger_error_and_may_be_unclipped():
    values = torch.tensor([1.0, 0.1, -1.0], requires_grad=True)
    loss, metrics = value_loss(values, torch.zeros(3), torch.tensor([2.0, 0.0, -0.1]), torch.ones(3) / 3)
    errors = [(0.2 - 2.0) ** 2, 0.1**2, 0.9**2]
    assert float(loss) == pytest.approx(0.5 * sum(errors) / 3)
    loss.backward()
    assert values.grad[0] == 0 and values.grad[1] == pytest.approx(0.1 / 3)
    assert float(metrics["value_clipfrac"]) == pytest.approx(1 / 3)
    unclipped, _ = value_loss(
        values, torch.zeros(3), torch.tensor([2.0, 0.0, -0.1]), torch.ones(3) / 3, value_clip=None
    )
    assert float(unclipped) == pytest.approx(0.5 * (1 + 0.01 + 0.81) / 3)
    with pytest.raises(ValueError, match="--value-clip must be a finite number >= 0, got -1"):
        value_loss(values, values, values, values, value_clip=-1)


def test_logprob_difference():
    got = logprob_difference(torch.tensor([-1.0, 5.0]), torch.tensor([-1.25, 9.0]), torch.tensor([1.0, 0.0]))
    assert got["train_rollout_logprob_abs_diff"] == 0.25
    assert float(got["train_rollout_kl"]) == pytest.approx(math.exp(0.25) - 1 - 0.25)


@pytest.mark.parametrize(("num_microbatches", "cp_size", "averaging_ranks"), [(1, 1, 1), (4, 2, 2), (3, 2, 4)])
def test_schedule_scaling_is_undone(num_microbatches, cp_size, averaging_ranks):
    """Through megatron-core's own loss step; DDP's average over ranks is the mean here."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    losses = torch.rand(averaging_ranks, num_microbatches, dtype=torch.float64)
    options = dict(num_microbatches=num_microbatches, cp_size=cp_size, averaging_ranks=averaging_ranks)
    arrived = torch.zeros_like(losses)
    reported: list[dict[str, Tensor]] = []
    for rank, micro_batch in itertools.product(range(averaging_ranks), range(num_microbatches)):
        loss = losses[rank, micro_batch].clone()
        arrived[rank, micro_batch], _ = forward_step_calc_loss(
            model=None,
            output_tensor=loss,
            loss_func=lambda x: (undo_schedule_scaling(x, **options), {"loss": x}),
            config=SimpleNamespace(timers=None, calculate_per_token_loss=False),
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=num_microbatches,
            forward_data_store=reported,
            cp_group_size=cp_size,
            is_last_stage=True,
        )
    torch.testing.assert_close(arrived.sum(1).mean(), losses.sum())
    torch.testing.assert_close(
        torch.stack([r["loss"] for r in reported]), losses.flatten()
    )  # what is logged is untouched


def test_configuration_errors_come_together_and_args_are_read():
    with pytest.raises(ValueError) as error:
        PolicyLossConfig(eps_clip=-1, eps_clip_c=1.0, kl_loss_type="k9", tis_clip=1, tis_clip_low=2)
    for part in ("--eps-clip must", "--eps-clip-c must be > 1, got 1.0", "got 'k9'", "--tis-clip-low 2 is above"):
        assert part in str(error.value)
    config = PolicyLossConfig.from_args(SimpleNamespace(eps_clip=0.3, use_tis=True, unrelated=1))
    assert config == PolicyLossConfig(eps_clip=0.3, use_tis=True)


def test_missing_and_misshapen_inputs_are_named():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="needs ref_logprobs .*kl-loss-coef.*entropy .*rollout_logprobs"):
        policy_loss(x, x, x, x, PolicyLossConfig(kl_loss_coef=0.1, entropy_coef=0.1, use_tis=True))
    with pytest.raises(ValueError, match=r"differ in shape: .*old_logprobs \(3,\)"):
        policy_loss(x, torch.zeros(3), x, x, PolicyLossConfig())
