"""Rewards to advantages and returns: GRPO, REINFORCE++, GAE, and whitening over the whole batch.

Pure. Lists have one entry per sample (row of the batch); per-token entries are response columns [R] in token positions.
A sample is one segment of a rollout: several samples may share a rollout id, and a rollout counts once in its group.
Tokens whose loss mask is 0 (tool output) are skipped as if they were not there: credit passes over them undiscounted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

#: Sums a tensor over all ranks and cells that hold a part of the batch, and returns it (its argument may be reused).
Reduce = Callable[[Tensor], Tensor]

ADVANTAGE_ESTIMATORS = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")

_SCAN_CHUNK = 128


# --- rewards of a group ----------------------------------------------------------------------------------------------


def group_ids(prompt_group_sizes: Sequence[int], num_samples: int) -> list[int]:
    """Group of each sample, from the number of samples of each prompt (samples of a prompt are contiguous).

    Raises ValueError where the sizes do not add up to `num_samples`.
    """
    if any(size < 0 for size in prompt_group_sizes) or sum(prompt_group_sizes) != num_samples:
        raise ValueError(
            f"prompt_group_sizes {list(prompt_group_sizes)} add up to {sum(prompt_group_sizes)}, "
            f"the batch has {num_samples} samples"
        )
    return [group for group, size in enumerate(prompt_group_sizes) for _ in range(size)]


def _groups(
    rewards: Sequence[float], rollout_ids: Sequence[Hashable], groups: Sequence[Hashable]
) -> dict[Hashable, dict[Hashable, float]]:
    """group → rollout → reward; every rollout once. Raises ValueError on what contradicts itself, all of it at once."""
    if not len(rewards) == len(rollout_ids) == len(groups):
        raise ValueError(
            f"columns differ in length: rewards {len(rewards)}, rollout_ids {len(rollout_ids)}, groups {len(groups)}"
        )
    by_rollout: dict[Hashable, list[int]] = {}
    for i, rollout in enumerate(rollout_ids):
        by_rollout.setdefault(rollout, []).append(i)
    problems = [f"reward of sample {i} is {r}" for i, r in enumerate(rewards) if not math.isfinite(r)]
    out: dict[Hashable, dict[Hashable, float]] = {}
    for rollout, members in by_rollout.items():
        segment_rewards = [float(rewards[i]) for i in members]
        if all(map(math.isfinite, segment_rewards)) and len(set(segment_rewards)) > 1:
            problems.append(f"unequal rewards inside rollout {rollout}: {segment_rewards} (samples {members})")
        owners = list(dict.fromkeys(groups[i] for i in members))
        if len(owners) > 1:
            problems.append(f"rollout {rollout} is in several groups: {owners} (samples {members})")
        out.setdefault(owners[0], {})[rollout] = segment_rewards[0]
    if problems:
        raise ValueError("; ".join(problems))
    return out


def grpo_rewards(
    rewards: Sequence[float],
    rollout_ids: Sequence[Hashable],
    groups: Sequence[Hashable],
    *,
    std_normalization: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative reward of each sample (Shao et al. 2024, DeepSeekMath): float64 [samples].

    (reward - mean) / (std + eps) over the rollouts of the group, std unbiased; without std_normalization
    (`--disable-grpo-std-normalization`, Dr. GRPO) the mean is only subtracted. All samples of a rollout get its
    value. A group of one rollout and a group of equal rewards give exact zeros. Raises ValueError on unequal rewards
    inside a rollout, naming it and them; a rollout in two groups; a reward that is not finite.
    """
    relative: dict[Hashable, float] = {}
    for members in _groups(rewards, rollout_ids, groups).values():
        x = torch.tensor(list(members.values()), dtype=torch.float64)
        if bool((x == x[0]).all()):  # also a group of one: no std, and no rounding residue to blow up by 1 / eps
            centred = torch.zeros_like(x)
        else:
            centred = x - x.mean()
            if std_normalization:
                centred = centred / (x.std() + eps)
        relative.update(zip(members, centred.tolist(), strict=True))
    return torch.tensor([relative[rollout] for rollout in rollout_ids], dtype=torch.float64)


def group_statistics(
    rewards: Sequence[float], rollout_ids: Sequence[Hashable], groups: Sequence[Hashable]
) -> dict[str, float]:
    """Counts for the metrics: groups, groups_of_one, groups_without_signal (equal rewards, more than one rollout),
    rollouts, reward_sum (over rollouts)."""
    found = [list(members.values()) for members in _groups(rewards, rollout_ids, groups).values()]
    return {
        "groups": len(found),
        "groups_of_one": sum(len(x) == 1 for x in found),
        "groups_without_signal": sum(len(x) > 1 and len(set(x)) == 1 for x in found),
        "rollouts": sum(len(x) for x in found),
        "reward_sum": math.fsum(r for x in found for r in x),
    }


# --- per-token rewards, returns, advantages --------------------------------------------------------------------------


def token_rewards(
    rewards: Sequence[float] | Tensor,
    loss_masks: Sequence[Tensor],
    *,
    kl: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
) -> list[Tensor]:
    """Per-token rewards [R]: the sample's reward at its last token that counts, minus kl_coef · kl at each that counts.

    kl: per-token KL estimate to the reference, needed if kl_coef > 0. A sample without a token that counts gets zeros.
    """
    if kl_coef != 0 and kl is None:
        raise ValueError(f"--kl-coef {kl_coef} needs the per-token KL to the reference")
    out = []
    for i, mask in enumerate(loss_masks):
        live = mask != 0
        r = torch.zeros(live.shape, dtype=_float_of(kl[i] if kl is not None else mask), device=mask.device)
        if kl is not None and kl_coef != 0:
            r = torch.where(live, -kl_coef * _same_length(i, "kl", kl[i], mask), r)
        position = live.nonzero()
        if len(position):
            r[position[-1, 0]] += float(rewards[i])
        out.append(r)
    return out


def discounted_returns(rewards: Sequence[Tensor], loss_masks: Sequence[Tensor], gamma: float = 1.0) -> list[Tensor]:
    """Sum of gamma^k · reward over the k-th later token that counts (REINFORCE++, Hu 2025): [R], 0 where masked."""
    _check_unit("--gamma", gamma)
    index = [_live_index(mask) for mask in loss_masks]
    compact = [
        _same_length(i, "rewards", r, loss_masks[i])[at] for i, (r, at) in enumerate(zip(rewards, index, strict=True))
    ]
    return _expand(_suffix_sums(compact, gamma), index, [torch.zeros_like(r) for r in rewards])


def gae(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over the whole response of each sample.

    rewards, values, loss_masks: [R] each; values[t] = V(state before token t); nothing follows the last token (V = 0).
    Returns (advantages, returns), returns = advantages + values. Tokens whose mask is 0 are skipped: the token before
    such a stretch sees the value after it. There the advantage is 0 and the return is the value itself. No gradient.
    """
    _check_unit("--gamma", gamma)
    _check_unit("--lambd", lambd)
    index = [_live_index(mask) for mask in loss_masks]
    deltas = []
    for i, at in enumerate(index):
        r = _same_length(i, "rewards", rewards[i], loss_masks[i])[at].double()
        v = _same_length(i, "values", values[i], loss_masks[i]).detach()[at].double()
        deltas.append(r + gamma * torch.cat([v[1:], v.new_zeros(min(len(v), 1))]) - v)
    zeros = [torch.zeros(v.shape, dtype=_float_of(v), device=v.device) for v in values]
    advantages = _expand(_suffix_sums(deltas, gamma * lambd), index, zeros)
    return advantages, [a + v.detach().to(a.dtype) for a, v in zip(advantages, values, strict=True)]


def compute_advantages(
    estimator: str,
    rewards: Sequence[float] | Tensor,
    loss_masks: Sequence[Tensor],
    *,
    kl: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
    values: Sequence[Tensor] | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) of each sample, [R] each, by `--advantage-estimator`.

    rewards: per sample; for grpo and reinforce_plus_plus_baseline the group-relative ones (`grpo_rewards`, the latter
    without std). grpo: the reward at every token (its KL belongs into the loss). reinforce_plus_plus: discounted
    returns of reward and KL; …_baseline: the reward minus the token's own KL. ppo: `gae`, needs values.
    """
    if estimator == "grpo":
        if kl_coef != 0:
            raise ValueError(f"--kl-coef {kl_coef} has no effect with --advantage-estimator grpo: use --kl-loss-coef")
        out = [
            torch.full(m.shape, float(r), dtype=_float_of(m), device=m.device)
            for m, r in zip(loss_masks, rewards, strict=True)
        ]
        return out, [x.clone() for x in out]
    per_token = token_rewards(rewards, loss_masks, kl=kl, kl_coef=kl_coef)
    if estimator == "reinforce_plus_plus":
        out = discounted_returns(per_token, loss_masks, gamma)
        return out, [x.clone() for x in out]
    if estimator == "reinforce_plus_plus_baseline":
        penalty = token_rewards([0.0] * len(loss_masks), loss_masks, kl=kl, kl_coef=kl_coef)
        out = [p + float(r) for p, r in zip(penalty, rewards, strict=True)]
        return out, [x.clone() for x in out]
    if estimator == "ppo":
        if values is None:
            raise ValueError("--advantage-estimator ppo needs the critic's values")
        return gae(per_token, values, loss_masks, gamma=gamma, lambd=lambd)
    raise ValueError(f"--advantage-estimator must be one of {', '.join(ADVANTAGE_ESTIMATORS)}, got {estimator!r}")


# --- over the whole batch --------------------------------------------------------------------------------------------


def whiten(
    xs: Sequence[Tensor], loss_masks: Sequence[Tensor], *, reduce: Reduce | None = None, eps: float = 1e-8
) -> list[Tensor]:
    """(x - mean) / sqrt(var + eps) over all tokens of the batch whose mask is not 0; zeros where it is.

    reduce: sums over the parts of the batch (cells, context-parallel ranks). It is called exactly twice, with a float64
    tensor [2] and then [1], whether or not this part holds a token. Variance unbiased; a batch of one token gives 0.
    """
    total = _identity if reduce is None else reduce
    device = xs[0].device if len(xs) else None
    live = [
        _same_length(i, "values to whiten", x, loss_masks[i])[loss_masks[i] != 0].double() for i, x in enumerate(xs)
    ]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.tensor(float(sum(len(x) for x in live)), dtype=torch.float64, device=device)
    count, summed = total(torch.stack([count, sum((x.sum() for x in live), zero)])).unbind()
    mean = summed / count.clamp(min=1)
    (squares,) = total(torch.stack([sum(((x - mean).square().sum() for x in live), zero)])).unbind()
    scale = (squares / (count - 1).clamp(min=1) + eps).rsqrt()
    return [
        torch.where(m != 0, (x.double() - mean) * scale, zero).to(_float_of(x))
        for x, m in zip(xs, loss_masks, strict=True)
    ]


def explained_variance_sums(
    values: Sequence[Tensor], returns: Sequence[Tensor], loss_masks: Sequence[Tensor]
) -> Tensor:
    """Additive float64 [5]: tokens, sum and sum of squares of the returns, the same of the errors (return - value)."""
    sums = torch.zeros(5, dtype=torch.float64, device=values[0].device if len(values) else None)
    for i, (value, ret) in enumerate(zip(values, returns, strict=True)):
        live = loss_masks[i] != 0
        r = _same_length(i, "returns", ret, live).detach()[live].double()
        e = r - _same_length(i, "values", value, live).detach()[live].double()
        sums += torch.stack([live.sum().double(), r.sum(), r.square().sum(), e.sum(), e.square().sum()])
    return sums


def explained_variance(sums: Tensor) -> float | None:
    """1 - Var(return - value) / Var(return) from summed `explained_variance_sums`; None if the returns do not vary."""
    n, r, rr, e, ee = sums.tolist()
    if n == 0:
        return None
    variance = rr / n - (r / n) ** 2
    if variance <= 1e-12 * max(rr / n, 1e-300):
        return None
    return 1 - (ee / n - (e / n) ** 2) / variance


# --- helpers ---------------------------------------------------------------------------------------------------------


def _suffix_sums(xs: Sequence[Tensor], decay: float) -> list[Tensor]:
    """y[t] = x[t] + decay · y[t+1] per sequence [n], in float64: a scan over chunks, each one triangular product."""
    if not len(xs):
        return []
    padded = pad_sequence([x.double() for x in xs], batch_first=True)  # zeros behind the end change no suffix sum
    steps = torch.arange(_SCAN_CHUNK, dtype=torch.float64, device=padded.device)
    powers = torch.tril(
        torch.pow(decay, (steps[:, None] - steps[None, :]).clamp(min=0))
    )  # [from, to]: decay^(from - to)
    to_carry = torch.pow(decay, _SCAN_CHUNK - steps)
    carry = padded.new_zeros(len(xs), 1)
    chunks = []
    width = -(-padded.shape[1] // _SCAN_CHUNK) * _SCAN_CHUNK
    for chunk in reversed(torch.nn.functional.pad(padded, (0, width - padded.shape[1])).split(_SCAN_CHUNK, dim=1)):
        if chunk.shape[1]:
            chunks.append(chunk @ powers + carry * to_carry)
            carry = chunks[-1][:, :1]
    scanned = torch.cat(chunks[::-1], dim=1) if chunks else padded
    return [row[: len(x)] for row, x in zip(scanned, xs, strict=True)]


def _expand(compact: list[Tensor], index: list[Tensor], outs: list[Tensor]) -> list[Tensor]:
    """Write each compact row back to the positions it came from."""
    for x, at, out in zip(compact, index, outs, strict=True):
        out[at] = x.to(out.dtype)
    return outs


def _live_index(mask: Tensor) -> Tensor:
    return (mask != 0).nonzero().squeeze(-1)


def _same_length(i: int, name: str, x: Tensor, mask: Tensor) -> Tensor:
    if x.shape != mask.shape:
        raise ValueError(f"sample {i}: {name} of {tuple(x.shape)} for a loss mask of {tuple(mask.shape)}")
    return x


def _float_of(x: Tensor) -> torch.dtype:
    """At least float32: advantages are not kept in the model's precision."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_unit(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def _identity(x: Tensor) -> Tensor:
    return x
