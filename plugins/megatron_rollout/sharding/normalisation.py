"""What a loss is divided by: global counts of the step, the same whatever the cells and micro-batches.

Each cell sums its samples' weighted losses; the cells' sums are added up. With the weights below that is

- token mean: sum over tokens of mask * loss, divided by the mask total of the whole step;
- rollout mean: the mean over rollouts of each rollout's token mean, where a rollout may consist of several samples, in
  different micro-batches, ranks and cells.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rollout.sharding.checks import as_list, unequal_rewards
from megatron_rollout.sharding.schema import DEFAULT_SCHEMA, ColumnSchema, count_samples
from megatron_rollout.sharding.steps import samples_by_rollout

REDUCTIONS = ("token-mean", "rollout-mean")


@dataclass(frozen=True)
class Normalisation:
    """Global counts of one step.

    samples: positions in the batch. mask_sums: [len(samples)] loss-mask total of each. rollout_mask_sums:
    [len(samples)] loss-mask total of the whole rollout that the sample belongs to (the hosts' column of that name).
    num_tokens: mask total of the step. num_rollouts: rollouts of the step, those without a trained token included.
    """

    samples: tuple[int, ...]
    mask_sums: tuple[float, ...]
    rollout_mask_sums: tuple[float, ...]
    num_tokens: float
    num_rollouts: int

    def weights(self, reduction: str) -> list[float]:
        """[len(samples)]: what a sample's sum of mask * loss is multiplied by. 0 where there is nothing to train.

        Invariant: the sum of weight * mask_sum is 1 for a token mean (0 without any token), and for a rollout mean the
        share of rollouts that have a token. Raises ValueError: an unknown reduction.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        if reduction == "token-mean":
            return [1.0 / self.num_tokens if self.num_tokens else 0.0] * len(self.samples)
        return [1.0 / (self.num_rollouts * total) if total else 0.0 for total in self.rollout_mask_sums]


def normalisation(
    data: Mapping[str, Any], *, samples: Sequence[int] | None = None, schema: ColumnSchema = DEFAULT_SCHEMA
) -> Normalisation:
    """Counts over the given samples (one step; default: the whole batch), which must hold their rollouts completely.

    Without `loss_masks` every token of a response counts; without `rollout_ids` each sample is its own rollout.
    Raises ValueError: neither `loss_masks` nor `response_lengths`; a rollout that is only partly among the samples.
    """
    num_samples = count_samples(data, schema)
    rollouts = as_list(data["rollout_ids"]) if data.get("rollout_ids") is not None else list(range(num_samples))
    if data.get("loss_masks") is not None:
        sums = [_total(mask) for mask in data["loss_masks"]]
    elif data.get("response_lengths") is not None:
        sums = [int(length) for length in as_list(data["response_lengths"])]
    else:
        raise ValueError("the batch has neither column 'loss_masks' nor 'response_lengths': nothing to normalise by")
    chosen = tuple(range(num_samples)) if samples is None else tuple(samples)
    members = samples_by_rollout(rollouts)
    inside = set(chosen)
    of_step = {rollouts[i]: None for i in chosen}  # a dict keeps the order
    for rollout in of_step:
        outside = [i for i in members[rollout] if i not in inside]
        if outside:
            raise ValueError(f"rollout {rollout} is only partly in the step: samples {outside[:8]} are not")
    totals = {rollout: sum(sums[i] for i in members[rollout]) for rollout in of_step}
    return Normalisation(
        samples=chosen,
        mask_sums=tuple(sums[i] for i in chosen),
        rollout_mask_sums=tuple(totals[rollouts[i]] for i in chosen),
        num_tokens=sum(totals.values()),
        num_rollouts=len(of_step),
    )


def rewards_by_group(
    rewards: Sequence[float], rollout_ids: Sequence[Hashable], group_ids: Sequence[Hashable]
) -> dict[Hashable, dict[Hashable, float]]:
    """{group: {rollout: reward}}, one reward per rollout: a rollout in three segments counts once in its group's mean.

    All [n], one entry per sample. Raises ValueError: columns of different lengths; different rewards inside one
    rollout; a rollout in two groups.
    """
    if not len(rewards) == len(rollout_ids) == len(group_ids):
        raise ValueError(
            f"columns of different lengths: {len(rewards)} rewards, {len(rollout_ids)} rollout_ids, "
            f"{len(group_ids)} group_ids"
        )
    problems = list(unequal_rewards(rewards, rollout_ids))
    group_of: dict[Hashable, Hashable] = {}
    for rollout, group in zip(rollout_ids, group_ids, strict=True):
        if group_of.setdefault(rollout, group) != group:
            problems.append(f"rollout {rollout} is in group {group_of[rollout]} and in group {group}")
    if problems:
        raise ValueError("; ".join(problems))
    groups: dict[Hashable, dict[Hashable, float]] = {}
    for reward, rollout, group in zip(rewards, rollout_ids, group_ids, strict=True):
        groups.setdefault(group, {})[rollout] = reward
    return groups


def _total(mask: Any) -> float:
    total = mask.sum().item() if hasattr(mask, "sum") else sum(mask)
    return int(total) if total == int(total) else float(total)
