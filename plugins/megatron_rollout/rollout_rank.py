"""One rank of a rollout cell: its model, its engine, and the commands that the step loop executes on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.device import release_cached_memory
from megatron_rollout.engine.architecture import Architecture, read_architecture
from megatron_rollout.engine.checkpoint import load_hf
from megatron_rollout.engine.engine import Engine
from megatron_rollout.engine.model import build_model, randomize, transformer_config
from megatron_rollout.engine.weights import WeightMap

if TYPE_CHECKING:
    from megatron_rollout.weight_sync.reshard import ReshardGroup


class RolloutRank:
    """Model and engine of one rank. Inside an initialised cell (world and megatron-core groups).

    model: share this model (colocated, same layout) instead of building one.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        *,
        model: torch.nn.Module | None = None,
        pg_collection: Any = None,
        tokenizer: Any = None,
    ) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        self.spec = spec
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.architecture: Architecture = read_architecture(spec.hf_checkpoint)
        self.paused = False
        self.weights_landed = model is not None or spec.load_weights
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
        self._reshard: ReshardGroup | None = None
        self.cell_rank = dist.get_rank()

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

    def do_set_weight_version(self, version: int) -> None:
        self.engine.set_version(version)

    def do_randomize_weights(self, version: int, seed: int = 0, std: float = 0.02) -> None:
        """Draw the weights instead of receiving them: for load tests with a checkpoint that is only a config.json."""
        self.refit(version, lambda: randomize(self.model, seed=seed + self.groups.tp.rank(), std=std))

    def do_checksum(self) -> dict[str, str]:
        """Checksum of every Hugging Face tensor, from all ranks of the cell."""
        from megatron_rollout.weight_sync.checksum import hf_checksums

        return hf_checksums(self.model, self.weight_map, tp_group=self.groups.tp, pp_group=self.groups.pp)

    def refit(self, version: int, transfer: Callable[[], None]) -> None:
        """The order of every refit: suspend → transfer → drop what old weights left → stamp → resume.

        Whatever `transfer` raises is raised after the engine serves nothing any more: with weights that may be torn the
        cell stays suspended and without landed weights until a later refit succeeds.
        """
        self.engine.suspend()
        self.weights_landed = False
        with torch.no_grad():
            transfer()
        self.engine.drop_prefix_cache()
        self.engine.set_version(version)
        self.weights_landed = True
        self.engine.resume()

    def do_refit_shared(self, version: int) -> None:
        """Colocated with equal layouts: the weights are the trainer's own tensors; nothing moves."""
        self.refit(version, lambda: None)

    def do_join_refit_group(self, destination_offset: int, **arguments: Any) -> None:
        """Become a destination of a refit group; this cell's first rank in it is `destination_offset`."""
        from megatron_rollout.weight_sync.reshard import ReshardGroup

        self.leave_refit_group()
        self._reshard = ReshardGroup(
            rank=destination_offset + self.cell_rank, destination_offset=destination_offset, **arguments
        )

    def do_refit_reshard(self, version: int) -> None:
        """Receive the trainer cell's weights, shard to shard, over the group joined last."""
        group = self._reshard
        if group is None:
            raise ValueError("refit_reshard before join_refit_group")
        try:
            self.refit(version, lambda: group.receive(self.model))
        except BaseException:
            self.leave_refit_group()
            raise

    def do_leave_refit_group(self) -> None:
        self.leave_refit_group()

    def leave_refit_group(self) -> None:
        if self._reshard is not None:
            self._reshard.close()
        self._reshard = None
