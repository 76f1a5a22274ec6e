"""Samples to one batch of columns, named as in slime and Miles, and what is frozen before a rollout's first step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_rollout.sharding import dynamic_global_batch_size, normalisation, plan_steps
from trainer_hooks.cells.train_group import TrainGroup
from trainer_hooks.trainer.sample import Sample
from trainer_hooks.training.advantages import compute_advantages, group_ids, group_statistics, grpo_rewards
from trainer_hooks.training.losses import loss_weights

Batch = dict[str, Any]


def convert_samples_to_train_data(args: argparse.Namespace, samples: Sequence[Sample]) -> Batch:
    """One column a field; samples of one prompt are contiguous. `rewards` are group-relative for GRPO."""
    sizes: list[int] = []
    last: Any = object()
    for sample in samples:
        if sample.group_index != last:
            sizes.append(0)
            last = sample.group_index
        sizes[-1] += 1
    raw = [float(s.reward or 0.0) for s in samples]
    rollout_ids = [s.index for s in samples]
    masks = [list(s.loss_mask if s.loss_mask is not None else [1] * s.response_length) for s in samples]
    data: Batch = {
        "tokens": [list(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": _shaped_rewards(args, raw, rollout_ids, sizes),
        "raw_reward": raw,
        "truncated": [int(s.status == Sample.Status.TRUNCATED) for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_ids": rollout_ids,
        "rollout_mask_sums": [float(sum(m)) for m in masks],
        "loss_masks": masks,
        "rollout_log_probs": [list(s.rollout_log_probs or []) for s in samples],
        "weight_versions": [s.weight_versions for s in samples],
        "prompt_group_sizes": sizes,
        "total_lengths": [len(s.tokens) for s in samples],
    }
    return data


def _shaped_rewards(
    args: argparse.Namespace, raw: list[float], rollout_ids: Sequence[int], sizes: Sequence[int]
) -> list[float]:
    if args.advantage_estimator not in ("grpo", "reinforce_plus_plus_baseline"):
        return raw
    std = args.advantage_estimator == "grpo" and not args.disable_grpo_std_normalization
    return grpo_rewards(raw, rollout_ids, group_ids(sizes, len(raw)), std_normalization=std).tolist()


def rollout_metrics(data: Batch) -> dict[str, float]:
    """Counts of the batch for the log: rewards, groups without signal, truncated and empty responses."""
    groups = group_ids(data["prompt_group_sizes"], len(data["tokens"]))
    counts = group_statistics(data["raw_reward"], data["rollout_ids"], groups)
    lengths = data["response_lengths"]
    n = max(1, len(lengths))
    return {
        "rollout/reward": counts["reward_sum"] / max(1, counts["rollouts"]),
        "rollout/response_length": sum(lengths) / n,
        "rollout/truncated": sum(data["truncated"]) / n,
        "rollout/empty_responses": float(sum(length == 0 for length in lengths)),
        "rollout/groups_without_signal": float(counts["groups_without_signal"]),
        "rollout/groups_of_one": float(counts["groups_of_one"]),
    }


def freeze(args: argparse.Namespace, group: TrainGroup, data: Batch) -> Batch:
    """Old and reference logprobs, advantages and returns: once a rollout, so that no later step recomputes them."""
    data = dict(data)
    data["log_probs"] = [x.tolist() for x in group.logprobs(data)]
    if args.kl_loss_coef > 0:
        data["ref_log_probs"] = [x.tolist() for x in group.logprobs(data, reference=True)]
    masks = [torch.tensor(m, dtype=torch.float32) for m in data["loss_masks"]]
    advantages, returns = compute_advantages(args.advantage_estimator, data["rewards"], masks)
    data["advantages"] = [x.tolist() for x in advantages]
    data["returns"] = [x.tolist() for x in returns]
    return data


def optimizer_steps(args: argparse.Namespace, data: Batch) -> Iterator[Batch]:
    """The batch of each optimizer step of a rollout, with the per-token weights that normalise its loss globally."""
    if args.use_dynamic_global_batch_size or args.global_batch_size is None:
        size = max(1, dynamic_global_batch_size(args, data["rollout_ids"]))
    else:
        size = args.global_batch_size
    plan = plan_steps(data["rollout_ids"], size, keep_partial=True)
    for rows, rollouts in zip(plan.steps, plan.num_rollouts, strict=True):
        counts = normalisation(data, samples=rows)
        step = {name: _rows(column, rows, len(data["tokens"])) for name, column in data.items()}
        step["dynamic_global_batch_size"] = rollouts
        step["weights"] = [
            w.tolist()
            for w in loss_weights(
                step["loss_masks"],
                calculate_per_token_loss=args.calculate_per_token_loss,
                global_tokens=counts.num_tokens,
                global_rollouts=counts.num_rollouts,
                rollout_mask_sums=counts.rollout_mask_sums,
            )
        ]
        yield step


def _rows(column: Any, rows: Sequence[int], size: int) -> Any:
    if isinstance(column, list) and len(column) == size:
        return [column[i] for i in rows]
    return column
