"""What PPO freezes before a rollout's first step: values, returns and advantages of every sample. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_hooks.training.advantages import compute_advantages, explained_variance, explained_variance_sums, whiten
from trainer_hooks.training.losses import approx_kl

#: The columns that are frozen, [R] a sample.
FROZEN = ("values", "returns", "advantages")


@dataclass(frozen=True)
class PpoOptions:
    """As the trainers' options of these names."""

    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0
    kl_loss_type: str = "k1"
    normalize_advantages: bool = True


def freeze_columns(
    data: Mapping[str, Any], values: Sequence[Any], options: PpoOptions
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Columns FROZEN of each sample as float32 arrays, in the order of `data`, and metrics of the rollout.

    data: `rewards`, `loss_masks`, and with kl_coef `log_probs` and `ref_log_probs`, of all samples of the rollout, on
    whichever cells they will be. values: [R] of each. The reward stands at a response's last token that counts; GAE
    runs over the whole response and skips masked tokens; advantages are whitened over all tokens that count.

    Metrics: explained_variance (of the returns by the values; absent where returns do not vary), value_mean,
    return_mean. Raises ValueError naming the sample for lengths that disagree.
    """
    masks = [torch.as_tensor(m, dtype=torch.float32) for m in data["loss_masks"]]
    old = [torch.tensor(v, dtype=torch.float32) for v in values]
    advantages, returns = compute_advantages(
        "ppo",
        data["rewards"],
        masks,
        kl=_kl(data, options),
        kl_coef=options.kl_coef,
        values=old,
        gamma=options.gamma,
        lambd=options.lambd,
    )
    metrics = _metrics(old, returns, masks)
    if options.normalize_advantages:
        advantages = whiten(advantages, masks)
    rows = zip(old, returns, advantages, strict=True)
    return [dict(zip(FROZEN, (x.numpy() for x in row), strict=True)) for row in rows], metrics


def _kl(data: Mapping[str, Any], options: PpoOptions) -> list[Tensor] | None:
    if options.kl_coef == 0:
        return None
    pairs = zip(data["log_probs"], data["ref_log_probs"], strict=True)
    return [approx_kl(torch.as_tensor(a), torch.as_tensor(b), options.kl_loss_type) for a, b in pairs]


def _metrics(values: Sequence[Tensor], returns: Sequence[Tensor], masks: Sequence[Tensor]) -> dict[str, float]:
    sums = explained_variance_sums(values, returns, masks)
    tokens, returned, _, error, _ = sums.tolist()
    explained = explained_variance(sums)
    metrics = {} if explained is None else {"explained_variance": explained}
    if tokens:
        metrics |= {"return_mean": returned / tokens, "value_mean": (returned - error) / tokens}
    return metrics
