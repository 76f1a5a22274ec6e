"""Micro-batches of one cell through megatron-core's schedule: packed or padded, context-parallel, with or without
gradient.

Whatever the model sees, everything else works on packs [1, T]: a padded micro-batch [B, S] is a pack whose sequences
all have the padded length S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import is_pp_last_stage

from megatron_rollout.device import device
from megatron_rollout.packing import PackedBatch, length_sorted_bins, pack_sequences, pad_length
from megatron_rollout.sharding import MicroBatchOptions, schedule_cell
from megatron_rollout.sharding.micro_batches import schedule_packed
from trainer_hooks.training.spec import TrainSpec

#: (micro-batch, output [1, T/CP, ...] of the model) → (loss of this rank's tokens, additive metrics)
Objective = Callable[[int, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
#: (micro-batch, output [1, T/CP, ...] of the model) → a tensor for each sequence of the pack, in the order of its rows
Reader = Callable[[int, torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class MicroBatches:
    """This rank's micro-batches of one shard. `packs[m].rows` are rows of the shard, as in `columns`.

    tokens: per row, int64. columns: per-row response columns as tensors. response_lengths: per row. padded: the model
    gets [B, S] instead of packed sequences.
    """

    packs: list[PackedBatch]
    tokens: list[torch.Tensor]
    response_lengths: list[int]
    columns: dict[str, list[torch.Tensor]]
    cp_size: int
    cp_rank: int
    padded: bool = False

    @classmethod
    def of_shard(cls, shard: Mapping[str, Any], spec: TrainSpec, groups: Any) -> MicroBatches:
        """Schedule a shard's samples over the data-parallel ranks of the cell and pack this rank's micro-batches."""
        where = device()
        tokens = [torch.as_tensor(t, dtype=torch.long, device=where) for t in shard["tokens"]]
        mine = _schedule_shard([len(t) for t in tokens], spec, groups.dp.size())[groups.dp.rank()]
        padded = spec.qkv_format == "bshd"
        packs = pack_sequences(tokens, mine, multiple_of=spec.multiple_of, pad_sequences_alike=padded)
        columns = {
            name: [torch.as_tensor(x, dtype=torch.float32, device=where) for x in shard[name]]
            for name in (
                "weights",
                "advantages",
                "log_probs",
                "ref_log_probs",
                "rollout_log_probs",
                "returns",
                "values",
            )
            if shard.get(name) is not None
        }
        return cls(
            packs=[p.to(where) for p in packs],
            tokens=tokens,
            response_lengths=[int(n) for n in shard["response_lengths"]],
            columns=columns,
            cp_size=spec.cp,
            cp_rank=groups.cp.rank(),
            padded=padded,
        )

    def local(self, packed: torch.Tensor, m: int) -> torch.Tensor:
        """This context-parallel rank's part of a whole pack's tensor [1, T, ...]."""
        return self.packs[m].local(packed, self.cp_size, self.cp_rank)

    def targets(self, m: int) -> torch.Tensor:
        """[1, T/CP]: the token that each local position predicts, negative where none."""
        return self.local(self.packs[m].next_tokens(), m)

    def response(self, name: str, m: int) -> torch.Tensor | None:
        """[1, T/CP]: a response column at its predictor positions, 0 elsewhere; None if the shard lacks it."""
        if name not in self.columns:
            return None
        return self.local(self.packs[m].pack_response(self.columns[name]), m)

    def run(self, model: torch.nn.Module, m: int) -> torch.Tensor:
        """The model's output for micro-batch m: [1, T/CP, ...], or [B, S, ...] where padded."""
        pack = self.packs[m]
        if self.padded:
            return model(pack.as_rows(pack.input_ids), pack.as_rows(pack.position_ids), None)
        params = PackedSeqParams(**pack.attention_kwargs())
        return model(self.local(pack.input_ids, m), self.local(pack.position_ids, m), None, packed_seq_params=params)


def _schedule_shard(lengths: Sequence[int], spec: TrainSpec, ranks: int) -> list[list[list[int]]]:
    """Micro-batches of each data-parallel rank of the cell; the token cap counts what padding adds."""
    costs = [pad_length(n, spec.multiple_of) for n in lengths]
    cap = (spec.max_tokens_per_gpu or 0) * spec.cp if spec.use_dynamic_batch_size else None
    options = MicroBatchOptions(micro_batch_size=spec.micro_batch_size, max_tokens=cap, ranks=ranks)
    if cap is not None and spec.qkv_format == "bshd":
        return schedule_packed(length_sorted_bins(costs, cap), costs, options, costs=costs, balance=True)
    return schedule_cell(costs, options)


def _forward_step(batches: MicroBatches, use: Callable[[int, torch.Tensor], Any], *, forward_only: bool) -> Any:
    def step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        m = next(iterator)

        def loss(output: torch.Tensor, non_loss_data: bool = False) -> Any:
            flat = output.flatten(0, 1)[None]  # rows of a padded micro-batch one after the other, as in its pack
            if forward_only:
                return use(m, flat)
            value, metrics = use(m, flat)
            # the schedule in its per-token mode scales nothing; the count it asks for is not used
            return value, torch.zeros((), dtype=torch.int, device=value.device), metrics

        return batches.run(model, m), loss

    return step


def _schedule(model: torch.nn.Module, batches: MicroBatches, step: Any, *, forward_only: bool) -> list[Any]:
    # Stages exchange shapes (`variable_seq_lengths`), so these two are not relied upon; they are what is there anyway.
    sequences = max(len(p.padded_lengths) for p in batches.packs) if batches.padded else 1
    longest = max(p.max_seqlen if batches.padded else p.total_length for p in batches.packs) // batches.cp_size
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(len(batches.packs))),
        model=[model],
        num_microbatches=len(batches.packs),
        seq_length=longest,
        micro_batch_size=sequences,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def run_schedule(model: torch.nn.Module, batches: MicroBatches, objective: Objective, groups: Any) -> dict[str, float]:
    """Forward and backward of all micro-batches; gradients end up summed over the cell's ranks.

    Returns the additive metrics of the whole cell, equal on all of its ranks.
    """
    results = _schedule(model, batches, _forward_step(batches, objective, forward_only=False), forward_only=False)
    totals: dict[str, torch.Tensor] = {}
    for metrics in results:
        for name, value in metrics.items():
            totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().cpu().double()
    return _sum_over_cell(totals, groups)


def _sum_over_cell(totals: dict[str, torch.Tensor], groups: Any) -> dict[str, float]:
    """Sum over data- and context-parallel ranks of the last stage, then to the other stages. Keys are equal there."""
    names: list[list[str]] = [sorted(totals)]
    if groups.pp.size() > 1:
        last = dist.get_global_rank(groups.pp, groups.pp.size() - 1)
        dist.broadcast_object_list(names, src=last, group=groups.pp)
    values = torch.stack([totals.get(n, torch.zeros((), dtype=torch.float64)) for n in names[0]] or [torch.zeros(())])
    values = values.to(device())
    dist.all_reduce(values, group=groups.dp_cp)
    if groups.pp.size() > 1:
        dist.broadcast(values, src=last, group=groups.pp)
    return dict(zip(names[0], values.tolist(), strict=False))


@torch.no_grad()
def forward_only(model: torch.nn.Module, batches: MicroBatches, read: Reader, groups: Any) -> list[torch.Tensor]:
    """What `read` makes of every sample of the cell, in row order, on the CPU of every rank, at least float32."""
    was_training = model.training
    model.eval()

    def rows(m: int, output: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        pairs = zip(batches.packs[m].rows, read(m, output), strict=True)
        return [(row, part.float().cpu()) for row, part in pairs]

    results = _schedule(model, batches, _forward_step(batches, rows, forward_only=True), forward_only=True)
    model.train(was_training)
    mine = [pair for result in results for pair in result] if is_pp_last_stage(groups.pp) else []
    return _of_all_ranks(mine, len(batches.tokens), groups)


def _of_all_ranks(mine: Sequence[tuple[int, torch.Tensor]], rows: int, groups: Any) -> list[torch.Tensor]:
    """Every row from the rank that had it: gathered over data-parallel ranks, then given to the other stages."""
    found = dict(mine)
    if groups.dp.size() > 1:
        parts: list[Any] = [None] * groups.dp.size()
        dist.all_gather_object(parts, found, group=groups.dp)
        found = {row: value for part in parts for row, value in part.items()}
    if groups.pp.size() > 1:
        box = [found]
        dist.broadcast_object_list(box, src=dist.get_global_rank(groups.pp, groups.pp.size() - 1), group=groups.pp)
        found = box[0]
    return [found[row] for row in range(rows)]


def tp_group(groups: Any) -> Any:
    """The tensor-parallel group, None where it is one rank."""
    return groups.tp if groups.tp.size() > 1 else None


def cp_group(groups: Any) -> Any:
    """The context-parallel group, None where it is one rank."""
    return groups.cp if groups.cp.size() > 1 else None
