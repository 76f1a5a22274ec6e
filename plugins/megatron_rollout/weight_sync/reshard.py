"""Native refit: trainer cell → its rollout cells, shard to shard, by megatron-core's resharding.

One extra process group spans the two worlds (the trainer cell's ranks first, then the rollout cells' in order). Each rank
sends or receives exactly the slices that the other side's layout needs; nobody holds a gathered tensor.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rollout.device import on_gpu
from megatron_rollout.engine.parallel import cross_world_group


class ReshardGroup:
    """This rank's end of one refit group.

    host, port: a TCP store outside both cells. name: unique for this membership (it prefixes the store's keys). rank,
    world_size: place in the group. source_ranks: how many trainer ranks lead it. destination_offset: first rank of
    *this* rollout cell (for a trainer rank: of the first one). Every transfer fails after `timeout_s`.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        name: str,
        rank: int,
        world_size: int,
        source_ranks: int,
        destination_offset: int | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        from megatron.core.resharding.refit import clear_plan_cache

        # plans are cached by layout only; with other members the same layout needs another plan
        clear_plan_cache()
        self.source_ranks = source_ranks
        self.destination_offset = source_ranks if destination_offset is None else destination_offset
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        backend = "cpu:gloo,cuda:nccl" if on_gpu() else "gloo"
        self.group = cross_world_group(backend, store, name=name, rank=rank, world_size=world_size, timeout_s=timeout_s)
        self._service = self._copy_service()

    def _copy_service(self) -> Any:
        if on_gpu():
            from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

            return NCCLCopyService(group=self.group)
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

        return GlooCopyService(group=self.group)

    def send(self, model: torch.nn.Module) -> None:
        """Trainer side: give every rollout cell its slices of `model`. Collective over the group."""
        self._swap(model, None)

    def receive(self, model: torch.nn.Module) -> None:
        """Rollout side: overwrite `model`'s weights and persistent buffers. Collective over the group."""
        self._swap(None, model)

    def _swap(self, source: torch.nn.Module | None, destination: torch.nn.Module | None) -> None:
        from megatron.core.resharding import swap_model_weights

        swap_model_weights(
            source,
            destination,
            self._service,
            group=self.group,
            src_rank_offset=0,
            dst_rank_offset=self.destination_offset,
        )

    def close(self) -> None:
        """Leave the group; safe after a failed transfer."""
        from megatron.core.resharding.refit import clear_plan_cache

        clear_plan_cache()
        if self.group is not None:
            self.group.abort() if hasattr(self.group, "abort") else None
        self.group = None
