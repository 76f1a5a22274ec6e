"""What a loss is divided by: global counts of the step, the same whatever the cells and micro-batches.

Each cell sums its samples' losses over their masks, divided by these counts, and the cells' sums are added up. So

- a token mean is the sum of mask * loss over all tokens, divided by `num_tokens`;
- a rollout mean is the sum over samples of (sum of mask * loss) / `rollout_mask_sums`, divided by `num_rollouts`: the
  mean over rollouts of each rollout's token mean, though its samples may be in different micro-batches and cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rollout.sharding.checks import as_list
from megatron_rollout.sharding.schema import DEFAULT_SCHEMA, ColumnSchema, count_samples
from megatron_rollout.sharding.steps import samples_by_rollout


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


def _total(mask: Any) -> float:
    total = mask.sum().item() if hasattr(mask, "sum") else sum(mask)
    return int(total) if total == int(total) else float(total)
