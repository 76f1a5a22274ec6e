"""One rank of a rollout cell: its model, its engine, and the commands that the step loop executes on it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.device import release_cached_memory
from megatron_rollout.engine.architecture import Architecture, read_architecture
from megatron_rollout.engine.checkpoint import load_hf
from megatron_rollout.engine.engine import Engine
from megatron_rollout.engine.model import build_model, randomize, transformer_config
from megatron_rollout.engine.weights import WeightMap
from megatron_rollout.weight_sync.commands import WireUpdates
from megatron_rollout.weight_sync.member import RefitMember
from megatron_rollout.weight_sync.order import WeightUpdates
from megatron_rollout.weight_sync.transport import Shard


class RolloutRank(WireUpdates):
    """Model and engine of one rank. Inside an initialised cell (world and megatron-core groups).

    model: share this model (colocated, same layout) instead of building one. trainer: colocated with another layout: the
    trainer's part in this process, from which refits come. cell_group: the cell's ranks, default the whole world; CPU
    tensors must work on it.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        *,
        model: torch.nn.Module | None = None,
        pg_collection: Any = None,
        cell_group: dist.ProcessGroup | None = None,
        trainer: Shard | None = None,
        tokenizer: Any = None,
    ) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        self.spec = spec
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.architecture: Architecture = read_architecture(spec.hf_checkpoint)
        self.paused = False
        landed = model is not None or spec.load_weights
        self.shares_model = model is not None
        if self.shares_model and spec.engine.inference_cuda_graph_scope == "layer":
            raise ValueError("inference_cuda_graph_scope 'layer' would capture training too; a shared model takes 'block'")
        if model is None:
            config = transformer_config(
                self.architecture,
                tp=spec.tp,
                pp=spec.pp,
                sequence_parallel=spec.sequence_parallel,
                dtype=getattr(torch, spec.dtype),
                **spec.model_overrides,
            )
            model = build_model(
                self.architecture,
                config,
                max_sequence_length=spec.engine.max_sequence_length + 1,
                pg_collection=pg_collection,
            )
        self.model = model
        self.weight_map = WeightMap(
            self.architecture,
            tp=spec.tp,
            tp_rank=self.groups.tp.rank(),
            layer_offset=get_transformer_layer_offset(model.config, pp_rank=self.groups.pp.rank()),
        )
        if spec.load_weights and not self.shares_model:
            load_hf(model, self.weight_map, spec.hf_checkpoint)
        self.engine = Engine(
            model,
            spec.engine,
            vocab_size=self.architecture.vocab_size,
            eos_token_ids=self.architecture.eos_token_ids,
            tokenizer=tokenizer,
            pg_collection=pg_collection,
            version=spec.initial_version,
        )
        self.cell_group: dist.ProcessGroup = cell_group or dist.group.WORLD
        self.cell_rank = self.cell_group.rank()
        self.trainer = trainer
        self.refit_member = RefitMember()
        self.updates = WeightUpdates(self.engine, model, landed=landed, agree=self._worst_of_cell)
        self._start_wire()

    @property
    def weights_landed(self) -> bool:
        """Whether the weights are of a version now: False before the first and in the middle of a refit, and torn."""
        return self.updates.landed

    def _worst_of_cell(self, code: int) -> int:
        """The largest `code` of the cell's ranks. Collective over the cell."""
        if self.cell_group.size() == 1:
            return code
        worst = torch.tensor([code])
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.cell_group)
        return int(worst)

    def handle(self, name: str, arguments: dict[str, Any]) -> Any:
        """Execute one command of the step loop. Raises ValueError for an unknown one."""
        method = getattr(self, f"do_{name}", None)
        if method is None:
            raise ValueError(f"unknown command {name!r}")
        return method(**arguments)

    # -- commands -----------------------------------------------------------------------------------------------

    def do_ping(self) -> None:
        """The loop turns."""

    def do_pause(self, mode: str = "in_place") -> None:
        """Take no step until `resume`; requests wait. retract: their KV cache is given up and recomputed."""
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause mode must be abort, retract or in_place, got {mode!r}")
        self.paused = True

    def do_resume(self) -> None:
        self._after_update()
        self.paused = False

    def do_flush_cache(self) -> bool:
        if self.engine.in_flight:
            return False
        self.engine.drop_prefix_cache()
        return True

    def do_suspend(self) -> None:
        self.engine.suspend()

    def do_resume_engine(self) -> None:
        self.engine.resume()

    def do_release_memory(self, tags: tuple[str, ...] | None = None) -> None:
        self.engine.suspend()
        release_cached_memory()

    def do_resume_memory(self, tags: tuple[str, ...] | None = None) -> None:
        self.engine.resume()

    def do_randomize_weights(self, version: int, seed: int = 0, std: float = 0.02) -> None:
        """Draw the weights instead of receiving them: for load tests with a checkpoint that is only a config.json."""
        seed += self.groups.tp.rank()
        self.updates.refit(version, lambda: None, lambda: randomize(self.model, seed=seed, std=std))

    def do_checksum(self) -> dict[str, str]:
        """Checksum of every Hugging Face tensor, from all ranks of the cell."""
        from megatron_rollout.weight_sync.checksum import hf_checksums

        return hf_checksums(self.model, self.weight_map, tp_group=self.groups.tp, pp_group=self.groups.pp)

    # -- weights ------------------------------------------------------------------------------------------------

    def do_refit_shared(self, version: int) -> dict[str, float]:
        """Colocated with equal layouts: the weights are the trainer's own tensors; nothing moves."""
        if not self.shares_model:
            raise ValueError("refit_shared: this rank has a model of its own; its weights have to be moved")
        return self.updates.refit(version, lambda: None, lambda: None)

    def do_refit_colocated(self, version: int, name: str, within_s: float = 120.0) -> dict[str, float]:
        """Take over the weights of the trainer in the same processes: shared tensors where the layouts are equal, else
        resharded between the two models. Collective over the trainer cell's ranks.

        name: of the group that they form for it, once; a new one after a failure. Returns and raises as `refit` does.
        """
        if self.shares_model:
            return self.do_refit_shared(version)
        if self.trainer is None:
            raise ValueError("refit_colocated: no trainer lives in this process")
        if self.refit_member.names != (name,):
            world = dict(rank=dist.get_rank(), world_size=dist.get_world_size(), source_ranks=0, destination_offset=0)
            store = dist.distributed_c10d._get_default_store()
            self.refit_member.join([dict(name=name, store=store, timeout_s=within_s, **world)])
        return self._refit(self.trainer, version, within_s)

    def do_join_refit_group(self, destination_offset: int, transport: str = "reshard", **arguments: Any) -> None:
        """Become a destination of a refit group (see `weight_sync.member`); this cell's first rank in it is
        `destination_offset`."""
        rank = destination_offset + self.cell_rank
        place = dict(rank=rank, destination_offset=destination_offset)
        self.refit_member.join([{**place, **arguments}], transport=transport)

    def do_refit(self, version: int, within_s: float | None = None) -> dict[str, float]:
        """Receive the trainer cell's weights over the groups joined last, within `within_s` seconds.

        Returns the seconds of each part and the bytes that this rank received. What fails, and what that leaves behind:
        see `weight_sync.order`; the groups are left then.
        """
        return self._refit(None, version, within_s)

    def _refit(self, source: Shard | None, version: int, within_s: float | None) -> dict[str, float]:
        member = self.refit_member
        try:
            seconds = self.updates.refit(
                version, lambda: member.prepare(source, self, version=version, within_s=within_s), member.move
            )
        except BaseException:
            member.leave()
            raise
        return {**seconds, "bytes": member.bytes_received}

    def do_leave_refit_group(self) -> None:
        self.refit_member.leave()
