"""The value model: a policy's trunk with one number an output, as a rank of a critic cell.

The head is part of the model, put in before DDP wraps it: one optimizer and one schedule train it with the trunk, and
it is reduced, checked, healed and saved with it. Embeddings are not tied: there is no output embedding to tie them to,
and the first and the last pipeline stage would wait for each other's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rollout.device import device
from megatron_rollout.engine.architecture import Architecture, read_architecture
from megatron_rollout.engine.model import build_model
from trainer_hooks.training.context_parallel import pad_values
from trainer_hooks.training.forward import forward_only
from trainer_hooks.training.objectives import read_values
from trainer_hooks.training.rank import TrainerRank
from trainer_hooks.training.spec import TrainSpec

Shard = Mapping[str, Any]

#: Standard deviation of the first values. The trunk ends in a norm, so hidden states have about unit variance: values
#: begin near zero whatever the model's width, small against a reward of 1.
_INITIAL_STD = 0.1


class ValueHead(torch.nn.Module):
    """hidden [S, B, H] (S/TP under sequence parallelism) → values [S, B, 1] in float32, equal on all TP ranks.

    Takes the place of megatron-core's output layer. The one row is replicated over TP. Under sequence parallelism each
    rank applies it to its own positions and the values, not the hidden states, are gathered; the row's gradient is then
    a part, which megatron-core sums because the parameter says so.
    """

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup, seed: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.group = group
        generator = torch.Generator().manual_seed(seed)  # the same head on every rank of every cell
        std = _INITIAL_STD / math.sqrt(config.hidden_size)
        row = torch.empty(1, config.hidden_size).normal_(0.0, std, generator=generator)
        self.weight = torch.nn.Parameter(row.to(config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # every rank computes the whole loss from what it gets: the backward only cuts, it does not sum
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.group)
        return values, None


def build_value_model(
    architecture: Architecture, config: TransformerConfig, *, max_sequence_length: int, seed: int
) -> GPTModel:
    """The part of a value model that this rank holds; the trunk is uninitialised, the head initialised.

    architecture: without tied embeddings. Raises ValueError for tied ones, and for virtual pipeline stages (the head
    would be in one of several models of a rank).
    """
    virtual = config.virtual_pipeline_model_parallel_size
    problems = []
    if virtual is not None and virtual > 1:
        problems.append(f"--critic-virtual-pipeline-model-parallel-size {virtual}: a value model takes 1 only")
    if architecture.tied_embeddings:
        problems.append("a value model's embeddings must not be tied to its output layer")
    if problems:
        raise ValueError("; ".join(problems))
    model = build_model(architecture, config, max_sequence_length=max_sequence_length)
    if model.post_process:
        model.output_layer = ValueHead(config, model.pg_collection.tp, seed).to(device())
    return model


class ValueRank(TrainerRank):
    """Value model of one rank, inside an initialised cell. The objective of its steps is "value"."""

    value_head = True

    def read_architecture(self) -> Architecture:
        return replace(read_architecture(self.spec.hf_checkpoint), tied_embeddings=False)

    def build(self, config: TransformerConfig) -> GPTModel:
        spec = self.spec
        return build_value_model(
            self.architecture, config, max_sequence_length=spec.max_sequence_length, seed=spec.seed
        )

    def values(self, shard: Shard) -> list[Tensor]:
        """Values [R] of each sample's response, in row order, float32, on the CPU; value[t] = V(state before token t).

        Not divided by the rollout's temperature: that is the policy's. Collective over the cell; every rank of it
        returns all of the cell's samples.
        """
        lengths = [int(n) for n in shard["response_lengths"]]
        return [v[len(v) - n :] for v, n in zip(self._sequence_values(shard), lengths, strict=True)]

    def get_values(self, batch: Mapping[str, Any]) -> Tensor:
        """Values [B, S] float32 of whole sequences, zero where padded, the first of each sequence 0.

        batch: `input_ids` [B, S], padded on the right, with `input_lengths` [B]; or `tokens`, one list a sample, S then
        being the longest. Raises ValueError for a length outside [1, S]. Collective over the cell.
        """
        width = None
        tokens = batch.get("tokens")
        if tokens is None:
            width = batch["input_ids"].shape[1]
            lengths = [int(n) for n in batch["input_lengths"]]
            if wrong := [f"row {i}: {n}" for i, n in enumerate(lengths) if not 1 <= n <= width]:
                raise ValueError(f"input_lengths must be in [1, {width}], the width of input_ids: {', '.join(wrong)}")
            tokens = [row[:n] for row, n in zip(batch["input_ids"], lengths, strict=True)]
        shard = {"tokens": tokens, "response_lengths": [0] * len(tokens)}
        return pad_values(self._sequence_values(shard), width)

    def _sequence_values(self, shard: Shard) -> list[Tensor]:
        batches = self.micro_batches(shard)
        return forward_only(self.ddp, batches, read_values(batches, self.groups), self.groups)


def build_rank(spec: TrainSpec) -> TrainerRank:
    """The rank of a cell of `spec.role`: "actor" or "critic". Raises ValueError for another role."""
    ranks: dict[str, type[TrainerRank]] = {"actor": TrainerRank, "critic": ValueRank}
    if spec.role not in ranks:
        raise ValueError(f"a trainer cell's role is one of {', '.join(ranks)}, got {spec.role!r}")
    return ranks[spec.role](spec)
