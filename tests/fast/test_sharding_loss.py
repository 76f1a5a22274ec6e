"""The same step over any number of cells, ranks and micro-batches has the same loss and gradient: split, schedule and
normalisation together with the project's losses, in fp64, against a plain autograd formula over the whole batch.

Cases of the list: S02, S03, S04, S10, S13, S14 (as far as no Megatron is needed).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rollout.sharding import (
    MicroBatchOptions,
    build_dp_schedule,
    merge_shards,
    normalisation,
    schedule_cell,
    split_train_data_by_dp,
)
from trainer_hooks.training.advantages import grpo_rewards
from trainer_hooks.training.losses import PolicyLossConfig, loss_weights, policy_loss, value_loss

VOCABULARY = 11
CLIP = 0.2
MEANS = ["token-mean", "rollout-mean"]

Step = tuple[float, Tensor, Tensor, float]  # policy loss, gradients of logits and values, value loss


class Model:
    """Logits and values of a token are rows of two tables: the gradient reaches every entry, and nothing is hidden."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (VOCABULARY, VOCABULARY)
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.values = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()

    def gradients(self) -> tuple[Tensor, Tensor]:
        assert self.logits.grad is not None and self.values.grad is not None
        return self.logits.grad, self.values.grad

    def response(self, tokens: Tensor, response_length: int) -> tuple[Tensor, Tensor]:
        """([R] logprobs of the response's tokens, [R] values before each)."""
        before = tokens[-response_length - 1 : -1] if response_length else tokens[:0]
        target = tokens[len(tokens) - response_length :]
        logprobs = self.logits[before].log_softmax(-1).gather(-1, target[:, None])[:, 0]
        return logprobs, self.values[before]


def batch_of(num_samples: int) -> dict[str, Any]:
    """Samples of different lengths; rollouts of one and of several segments; masks with holes, one all zero."""
    generator = torch.Generator().manual_seed(num_samples)

    def draw(high: int, size: int) -> Tensor:
        return torch.randint(high, (size,), generator=generator)

    lengths = [5 + 7 * i % 23 for i in range(num_samples)]
    responses = [max(length // 2, 1) for length in lengths]
    rollouts = [max(i - i % 3, 0) if i > 5 else i for i in range(num_samples)]  # from sample 6 on, three segments each
    masks = [draw(2, size).double() for size in responses]
    if num_samples > 3:
        masks[3] = torch.zeros(responses[3], dtype=torch.float64)
    rewards = [float(rollout % 2) for rollout in rollouts]
    relative = grpo_rewards(rewards, rollouts, [0] * num_samples)
    return {
        "tokens": [draw(VOCABULARY, length) for length in lengths],
        "response_lengths": responses,
        "loss_masks": masks,
        "rewards": rewards,
        "rollout_ids": rollouts,
        "log_probs": [torch.rand(size, generator=generator, dtype=torch.float64) - 3 for size in responses],
        "values": [torch.randn(size, generator=generator, dtype=torch.float64) for size in responses],
        "advantages": [value.expand(size) for value, size in zip(relative, responses, strict=True)],
        "returns": [torch.randn(size, generator=generator, dtype=torch.float64) for size in responses],
    }


def plain_step(data: dict[str, Any], mean: str) -> Step:
    """The formulas of the two losses, token by token, over the whole batch at once."""
    model = Model()
    policy, value = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    rollouts = set(data["rollout_ids"])
    total = sum(float(mask.sum()) for mask in data["loss_masks"])
    for i, tokens in enumerate(data["tokens"]):
        logprobs, values = model.response(tokens, data["response_lengths"][i])
        of_rollout = sum(
            float(mask.sum())
            for mask, rollout in zip(data["loss_masks"], data["rollout_ids"], strict=True)
            if rollout == data["rollout_ids"][i]
        )
        divisor = total if mean == "token-mean" else of_rollout * len(rollouts)
        for t, mask in enumerate(data["loss_masks"][i].tolist()):
            if not mask:
                continue
            ratio, advantage = (logprobs[t] - data["log_probs"][i][t]).exp(), data["advantages"][i][t]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            old, target = data["values"][i][t], data["returns"][i][t]
            clipped = old + (values[t] - old).clamp(-CLIP, CLIP)
            unclipped_error, clipped_error = (values[t] - target) ** 2, (clipped - target) ** 2
            error = clipped_error if clipped_error > unclipped_error else unclipped_error
            policy, value = policy - surrogate / divisor, value + 0.5 * error / divisor
    (policy + value).backward()
    return float(policy.detach()), *model.gradients(), float(value.detach())


def cell_step(shard: dict[str, Any], micro_batches: Iterable[Sequence[int]], counts: dict[str, Any]) -> Step:
    """One rank's forward and backward: micro-batch by micro-batch, an empty one with a padding sequence of weight 0."""
    model = Model()
    policy_sum = value_sum = 0.0
    for rows in micro_batches:
        policy_columns, value_columns = [], []
        weights = loss_weights(
            [shard["loss_masks"][row] for row in rows],
            calculate_per_token_loss=counts["mean"] == "token-mean",
            global_tokens=counts["tokens"],
            global_rollouts=counts["rollouts"],
            rollout_mask_sums=[shard["rollout_mask_sums"][row] for row in rows],
            dtype=torch.float64,
        )
        for row, weight in zip(rows, weights, strict=True):
            logprobs, values = model.response(shard["tokens"][row], shard["response_lengths"][row])
            policy_columns.append((logprobs, shard["log_probs"][row], shard["advantages"][row], weight))
            value_columns.append((values, shard["values"][row], shard["returns"][row], weight))
        if not rows:
            logprobs, values = model.response(torch.zeros(2, dtype=torch.long), 1)
            nothing = torch.zeros(1, dtype=torch.float64)
            policy_columns.append((logprobs, nothing, nothing, nothing))
            value_columns.append((values, nothing, nothing, nothing))
        logprobs, old_logprobs, advantages, flat = map(torch.cat, zip(*policy_columns, strict=True))
        policy, _ = policy_loss(logprobs, old_logprobs, advantages, flat, PolicyLossConfig(eps_clip=CLIP))
        values, old_values, returns, flat = map(torch.cat, zip(*value_columns, strict=True))
        value, _ = value_loss(values, old_values, returns, flat, value_clip=CLIP)
        (policy + value).backward()
        policy_sum, value_sum = policy_sum + float(policy.detach()), value_sum + float(value.detach())
    return policy_sum, *model.gradients(), value_sum


def cut_step(data: dict[str, Any], mean: str, args: Namespace, *, cells: int, ranks: int = 1) -> Step:
    """The step as cells do it: split, each cell schedules its shard over its ranks, everything is summed."""
    counted = normalisation(data)
    data = {**data, "rollout_mask_sums": list(counted.rollout_mask_sums)}
    counts = {"mean": mean, "tokens": counted.num_tokens, "rollouts": counted.num_rollouts}
    options = MicroBatchOptions.from_args(args, {"dp_size": ranks})
    results = []
    for shard in split_train_data_by_dp(args, data, dp_size=cells):
        lengths = [len(tokens) for tokens in shard["tokens"]]
        for micro_batches in schedule_cell(lengths, options):
            results.append(cell_step(shard, micro_batches, counts))
    return total_of(results)


def total_of(results: Sequence[Step]) -> Step:
    policies, logits, heads, values = zip(*results, strict=True)
    return sum(policies), torch.stack(logits).sum(0), torch.stack(heads).sum(0), sum(values)


def assert_equal(ours: Step, plain: Step) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs), rtol=1e-9, atol=1e-12)
    assert plain[1].norm() > 0 and plain[2].norm() > 0


@cache
def plain_of_13(mean: str) -> Step:
    return plain_step(batch_of(13), mean)


SIZES = [{"micro_batch_size": size} for size in (1, 2, 4)] + [
    {"use_dynamic_batch_size": True, "max_tokens_per_gpu": cap} for cap in (8, 30, 1_000)
]


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "-".join(map(str, size.values())))
@pytest.mark.parametrize("cells", [1, 2, 3, 4])
def test_13_samples_over_any_cells_and_micro_batches(cells: int, size: dict, mean: str) -> None:
    for balance in (False, True) if cells > 1 else (False,):
        args = Namespace(**size, balance_data=balance)
        assert_equal(cut_step(batch_of(13), mean, args, cells=cells), plain_of_13(mean))


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_one_cell_with_empty_micro_batches(ranks: int, mean: str) -> None:
    data = batch_of(5)
    args = Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=30, balance_data=True)
    assert_equal(cut_step(data, mean, args, cells=2, ranks=ranks), plain_step(data, mean))


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("num_samples", [5, 3], ids=["s02", "s03"])
def test_s02_s03_few_samples_over_4_cells_equal_the_one_cell_step(num_samples: int, balance: bool, mean: str) -> None:
    data = batch_of(num_samples)
    args = Namespace(micro_batch_size=2, balance_data=balance)
    assert_equal(cut_step(data, mean, args, cells=4), cut_step(data, mean, args, cells=1))
    assert_equal(cut_step(data, mean, args, cells=4), plain_step(data, mean))


def test_s03_the_empty_shard_takes_part_with_zero_loss_and_gradient() -> None:
    data = batch_of(3)
    counted = normalisation(data)
    data["rollout_mask_sums"] = list(counted.rollout_mask_sums)
    empty = split_train_data_by_dp(Namespace(), data, dp_size=4)[3]
    micro_batches = schedule_cell([], MicroBatchOptions())
    assert micro_batches == [[[]]]
    counts = {"mean": "token-mean", "tokens": counted.num_tokens, "rollouts": counted.num_rollouts}
    policy, logits, head, value = cell_step(empty, micro_batches[0], counts)
    assert policy == value == 0
    assert not logits.any() and not head.any()


@pytest.mark.parametrize("mean", MEANS)
def test_s04_parts_as_cells_and_as_ranks_equal_the_one_cell_run(mean: str) -> None:
    data = batch_of(7)
    data["tokens"] = [torch.randint(VOCABULARY, (80 if i == 0 else 40,)) for i in range(7)]
    counted = normalisation(data)
    data["rollout_mask_sums"] = list(counted.rollout_mask_sums)
    counts = {"mean": mean, "tokens": counted.num_tokens, "rollouts": counted.num_rollouts}
    args = Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=82)
    plain = plain_step(data, mean)
    parts = [[0], [1, 2, 3, 4, 5, 6]]
    for config, cells, expected in (({}, 2, [[1, 3]]), ({"dp_size": 2}, 1, [[3]])):
        schedule = build_dp_schedule(
            args, config, [80] + [40] * 6, global_batch_size=7, num_cells=cells, partitions=parts
        )
        assert schedule.num_microbatches == expected
        results = [cell_step(data, rank, counts) for cell in schedule.steps[0].micro_batches for rank in cell]
        assert_equal(total_of(results), plain)


@pytest.mark.parametrize("micro_batches", [[[0], [1]], [[0, 1]]])
def test_s10_a_token_mean_does_not_depend_on_the_micro_batching(micro_batches: list[list[int]]) -> None:
    masks = [[1.0], [1.0] * 9]
    losses = [torch.ones(1), torch.zeros(9)]
    counted = normalisation({"loss_masks": masks})
    total = 0.0
    for rows in micro_batches:
        chosen = [masks[row] for row in rows]
        weights = loss_weights(chosen, calculate_per_token_loss=True, global_tokens=counted.num_tokens)
        total += sum(float((weight * losses[row]).sum()) for row, weight in zip(rows, weights, strict=True))
    assert total == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("mean", MEANS)
def test_s13_all_five_samples_are_trained_and_divided_by_five(mean: str) -> None:
    data = batch_of(5)
    args = Namespace(micro_batch_size=2)
    shards = split_train_data_by_dp(args, data, dp_size=2)
    assert len(merge_shards(shards)["tokens"]) == 5
    assert normalisation(data).num_rollouts == 5
    assert_equal(cut_step(data, mean, args, cells=2), plain_step(data, mean))


@pytest.mark.parametrize("mean", MEANS)
def test_s14_one_micro_batch_or_four_give_the_same_gradients(mean: str) -> None:
    data = batch_of(8)
    counted = normalisation(data)
    data["rollout_mask_sums"] = list(counted.rollout_mask_sums)
    counts = {"mean": mean, "tokens": counted.num_tokens, "rollouts": counted.num_rollouts}
    one = cell_step(data, [range(8)], counts)
    four = cell_step(data, [range(at, at + 2) for at in range(0, 8, 2)], counts)
    assert_equal(four, one)
    assert_equal(one, plain_step(data, mean))
