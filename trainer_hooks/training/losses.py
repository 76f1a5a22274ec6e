"""Policy and value losses that do not depend on how a step is cut into micro-batches, context-parallel ranks and cells.

Every loss is sum(weight · loss of the token), and the weights carry the GLOBAL normalisation of the step
(`loss_weights`). So are the metrics: whatever has the weights in it is already divided, and SUM over micro-batches,
context-parallel ranks and cells (not over tensor-parallel ranks, which compute the same) gives the number of the
whole step. A rank without tokens adds an exact zero, with a graph that backward can go through.

All per-token tensors of one call have one shape, in predictor positions (see `megatron_rollout.packing`); what stands
where the weight is 0 (prompt, padding, tool tokens) is never looked at and may be anything, NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")

#: Bound on |log ratio| before exp(): e^20 is past every clip range, and exp() of more can become inf and its gradient
#: NaN.
_LOG_RATIO_BOUND = 20.0
#: `low_var_kl` is k3 bounded per token.
_LOW_VAR_KL_BOUND = 10.0

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class PolicyLossConfig:
    """Options of the policy loss, named as on the command line.

    eps_clip, eps_clip_high: the ratio is clipped to [1 - eps_clip, 1 + eps_clip_high]; the latter defaults to the
    former. eps_clip_c: dual clip, a bound > 1 on ratio · |advantage| where the advantage is negative; None: off.
    kl_loss_coef, kl_loss_type: penalty towards the reference, one of KL_LOSS_TYPES. entropy_coef: bonus. use_tis,
    tis_clip, tis_clip_low: weight each token by exp(old - rollout logprob), truncated to [low, clip].
    """

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    entropy_coef: float = 0.0
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        for name in ("eps_clip", "eps_clip_high", "kl_loss_coef", "entropy_coef", "tis_clip", "tis_clip_low"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                problems.append(f"--{name.replace('_', '-')} must be a finite number >= 0, got {value}")
        if self.eps_clip_c is not None and not self.eps_clip_c > 1:
            problems.append(f"--eps-clip-c must be > 1, got {self.eps_clip_c}")
        if self.kl_loss_type not in KL_LOSS_TYPES:
            problems.append(f"--kl-loss-type must be one of {', '.join(KL_LOSS_TYPES)}, got {self.kl_loss_type!r}")
        if self.tis_clip_low > self.tis_clip:
            problems.append(f"--tis-clip-low {self.tis_clip_low} is above --tis-clip {self.tis_clip}")
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def from_args(cls, args: Any) -> PolicyLossConfig:
        """Read the options that a host's `args` has; the others keep their defaults."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})


def loss_weights(
    loss_masks: Sequence[Tensor | Sequence[float]],
    *,
    calculate_per_token_loss: bool,
    global_tokens: float | None = None,
    global_rollouts: float | None = None,
    rollout_mask_sums: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Weight of each response token in the loss of the step: one [R] per sample.

    Token mean (calculate_per_token_loss): mask / global_tokens, the mask total of all samples of the step in all cells.
    Rollout mean: mask / (rollout_mask_sums[i] · global_rollouts): the mean over the tokens of the sample's whole
    rollout (all its segments, wherever they are), then over the rollouts of the step. A rollout without a token that
    counts adds nothing and still counts as one. Raises ValueError where the counts that the mean needs are missing or
    too small.
    """
    weights = []
    for i, loss_mask in enumerate(loss_masks):
        mask = torch.as_tensor(loss_mask, dtype=dtype, device=device)
        own = float(mask.sum())
        if own == 0:
            weights.append(torch.zeros_like(mask))
            continue
        if calculate_per_token_loss:
            if global_tokens is None or global_tokens < own:
                raise ValueError(
                    f"sample {i}: its loss mask counts {own:g} tokens, the step's global_tokens is {global_tokens}"
                )
            weights.append(mask / global_tokens)
            continue
        if global_rollouts is None or global_rollouts < 1:
            raise ValueError(
                f"sample {i}: its loss mask counts {own:g} tokens, the step's global_rollouts is {global_rollouts}"
            )
        if rollout_mask_sums is None or rollout_mask_sums[i] < own:
            total = None if rollout_mask_sums is None else rollout_mask_sums[i]
            raise ValueError(
                f"sample {i}: its loss mask counts {own:g} tokens, its rollout's rollout_mask_sums is {total}"
            )
        weights.append(mask / (float(rollout_mask_sums[i]) * float(global_rollouts)))
    return weights


def undo_schedule_scaling(loss: Tensor, *, num_microbatches: int, cp_size: int, averaging_ranks: int = 1) -> Tensor:
    """What to hand to megatron-core's schedule so that gradients are the plain sum over micro-batches and ranks.

    For a loss function with two results the schedule multiplies by cp_size and divides by num_microbatches; DDP then
    averages over `averaging_ranks` (its data-parallel·context-parallel group; 1 if gradients are summed). All is
    undone here. The schedule works in place on what it gets: log the loss itself, not this.
    """
    return loss * (num_microbatches / cp_size * averaging_ranks)


def approx_kl(logprobs: Tensor, base_logprobs: Tensor, kl_loss_type: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ base) from tokens of the policy (Schulman, "Approximating KL divergence").

    With d = logprobs - base: k1 = d; k2 = d²/2; k3 = exp(-d) - 1 + d; low_var_kl = k3, at most 10 per token.
    """
    d = logprobs - base_logprobs
    if kl_loss_type == "k1":
        return d
    if kl_loss_type == "k2":
        return d.square() / 2
    if kl_loss_type in ("k3", "low_var_kl"):
        d = d.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
        kl = torch.expm1(-d) + d
        return kl.clamp(max=_LOW_VAR_KL_BOUND) if kl_loss_type == "low_var_kl" else kl
    raise ValueError(f"--kl-loss-type must be one of {', '.join(KL_LOSS_TYPES)}, got {kl_loss_type!r}")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: PolicyLossConfig,
    *,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of PPO (Schulman et al. 2017, eq. 7), dual clip (Ye et al. 2020, eq. 5), KL, entropy.

    Tensors [...] of one shape. logprobs carries the gradient, and entropy if entropy_coef > 0. ref_logprobs is needed
    for kl_loss_coef > 0, entropy for entropy_coef > 0, rollout_logprobs for use_tis; given without, they only give
    metrics.

    Returns the scalar loss and metrics (detached, additive): loss, pg_loss, pg_clipfrac, ppo_kl, and with their inputs
    kl_loss, entropy_loss, tis, tis_clipfrac, train_rollout_logprob_abs_diff, train_rollout_kl. Raises ValueError on a
    missing input or differing shapes.
    """
    needed = {
        "ref_logprobs (for --kl-loss-coef > 0)": ref_logprobs is None and config.kl_loss_coef > 0,
        "entropy (for --entropy-coef > 0)": entropy is None and config.entropy_coef > 0,
        "rollout_logprobs (for --use-tis)": rollout_logprobs is None and config.use_tis,
    }
    if any(needed.values()):
        raise ValueError(f"the policy loss needs {', '.join(name for name, missing in needed.items() if missing)}")
    _check_shapes(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        rollout_logprobs=rollout_logprobs,
    )
    live = weights != 0
    lp, old, adv = (_where(live, x) for x in (logprobs, old_logprobs.detach(), advantages.detach()))

    log_ratio = lp - old
    ratio = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    unclipped = -adv * ratio
    clipped = -adv * ratio.clamp(1 - config.eps_clip, 1 + high)
    per_token = torch.maximum(unclipped, clipped)
    if config.eps_clip_c is not None:
        per_token = torch.where(adv < 0, torch.minimum(per_token, -config.eps_clip_c * adv), per_token)
    metrics = {"pg_clipfrac": _sum(weights, clipped > unclipped), "ppo_kl": _sum(weights, -log_ratio)}

    if rollout_logprobs is not None:
        rollout = _where(live, rollout_logprobs.detach())
        metrics |= logprob_difference(old, rollout, weights)
        if config.use_tis:
            importance = (old - rollout).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
            truncated = importance.clamp(config.tis_clip_low, config.tis_clip)
            per_token = per_token * truncated
            metrics |= {"tis": _sum(weights, importance), "tis_clipfrac": _sum(weights, truncated != importance)}
    pg_loss = (weights * per_token).sum()
    loss = pg_loss
    metrics["pg_loss"] = pg_loss.detach()
    if entropy is not None:
        entropy_loss = (weights * _where(live, entropy)).sum()
        metrics["entropy_loss"] = entropy_loss.detach()
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * entropy_loss
    if ref_logprobs is not None:
        kl_loss = (weights * approx_kl(lp, _where(live, ref_logprobs.detach()), config.kl_loss_type)).sum()
        metrics["kl_loss"] = kl_loss.detach()
        if config.kl_loss_coef > 0:
            loss = loss + config.kl_loss_coef * kl_loss
    return loss, {"loss": loss.detach().clone(), **metrics}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, value_clip: float | None = 0.2
) -> tuple[Tensor, Metrics]:
    """0.5 · sum of weight · max((v - return)², (clip(v, old ± value_clip) - return)²); value_clip None: unclipped.

    Tensors [...] of one shape; values carries the gradient. Micro-batch losses are summed, never averaged: the
    weights are already global. Metrics (detached, additive): value_loss, value_clipfrac, value_mean.
    """
    if value_clip is not None and not (math.isfinite(value_clip) and value_clip >= 0):
        raise ValueError(f"--value-clip must be a finite number >= 0, got {value_clip}")
    _check_shapes(values=values, old_values=old_values, returns=returns, weights=weights)
    live = weights != 0
    v, old, ret = (_where(live, x) for x in (values, old_values.detach(), returns.detach()))
    error = (v - ret).square()
    clipped_share = torch.zeros_like(live)
    if value_clip is not None:
        # Where nothing is clipped the two errors are the same number, and max() would split the gradient between them.
        clipped = (old + (v - old).clamp(-value_clip, value_clip) - ret).square()
        clipped_share = ((v - old).abs() > value_clip) & (clipped > error)
        error = torch.where(clipped_share, clipped, error)
    loss = 0.5 * (weights * error).sum()
    metrics = {
        "value_loss": loss.detach().clone(),
        "value_clipfrac": _sum(weights, clipped_share),
        "value_mean": _sum(weights, v),
    }
    return loss, metrics


def logprob_difference(train_logprobs: Tensor, rollout_logprobs: Tensor, weights: Tensor) -> Metrics:
    """How far the trainer's logprobs are from those that the rollout reported for the same tokens and weights.

    Additive metrics: train_rollout_logprob_abs_diff, mean |difference|; train_rollout_kl, k3 estimate of
    KL(rollout ‖ train) (the tokens are the rollout's).
    """
    _check_shapes(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, weights=weights)
    live = weights != 0
    train, rollout = (_where(live, x.detach()) for x in (train_logprobs, rollout_logprobs))
    return {
        "train_rollout_logprob_abs_diff": _sum(weights, (train - rollout).abs()),
        "train_rollout_kl": _sum(weights, approx_kl(rollout, train, "k3")),
    }


def _where(live: Tensor, x: Tensor) -> Tensor:
    """x where it counts, else 0: also keeps a NaN out of the gradient, which a product with a zero weight does not."""
    return torch.where(live, x, x.new_zeros(()))


def _sum(weights: Tensor, x: Tensor) -> Tensor:
    return (weights * x.detach()).sum()


def _check_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("per-token tensors differ in shape: " + ", ".join(f"{name} {s}" for name, s in shapes.items()))
