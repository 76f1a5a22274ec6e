"""Groups that trainers of other projects make through the SGLang wire: their rank 0 serves the store and broadcasts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from megatron_rollout.device import device, on_gpu
from megatron_rollout.weight_sync import wire
from megatron_rollout.weight_sync.buckets import Entry, places
from megatron_rollout.weight_sync.group import RefitGroup, TransferFailed
from megatron_rollout.weight_sync.loader import BadWeights


class WireGroups:
    """The groups that this rank is in, by name."""

    def __init__(self) -> None:
        self._links: dict[str, RefitGroup] = {}

    def init(
        self,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join; a group of the same name is left first (its trainer may have died).

        Raises ValueError, TransferFailed.
        """
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be gloo or nccl, got {backend!r}")
        if backend == "nccl" and not on_gpu():
            raise ValueError("backend nccl needs GPUs, and this engine runs on the CPU: use gloo")
        if rank >= world_size:
            raise ValueError(f"group {group_name}: this rank would be {rank} of {world_size}")
        with contextlib.suppress(KeyError):
            self.destroy(group_name)
        link = RefitGroup(
            host=master_address,
            port=master_port,
            name=group_name,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            backend=backend,
            meets=False,
        )
        try:
            link.join()
        except BaseException:
            link.close()
            raise
        self._links[group_name] = link

    def destroy(self, group_name: str) -> None:
        """Raises KeyError for a group that was not joined."""
        if group_name not in self._links:
            raise KeyError(f"group {group_name!r} was not joined; joined are {sorted(self._links)}")
        self._links.pop(group_name).close()

    def receive(
        self,
        group_name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        load_format: str | None,
        timeout_s: float,
    ) -> list[wire.Named]:
        """Take part in the broadcasts of these tensors: one each, or one for all of them as a flattened bucket.

        Raises ValueError before anything is received (the group is aborted, so that the trainer does not wait), or
        TransferFailed; the group has been left then.
        """
        link = self._links.get(group_name)
        if link is None:
            raise ValueError(f"group {group_name!r} was not joined; joined are {sorted(self._links)}")
        link.within(timeout_s)
        try:
            if load_format not in (None, "flattened_bucket"):
                raise BadWeights(f"load_format {load_format!r} is not supported; known are None and 'flattened_bucket'")
            bucket = [Entry(n, wire.dtype_of(d), tuple(s)) for n, d, s in zip(names, dtypes, shapes, strict=True)]
            if load_format == "flattened_bucket" and bucket:
                flat = torch.empty(sum(e.nbytes for e in bucket), dtype=torch.uint8, device=device())
                link.wait(link.post_broadcast([flat]))
                found = wire.unflatten(flat, places(bucket))
            else:
                found = [(e.name, torch.empty(e.shape, dtype=e.dtype, device=device())) for e in bucket]
                link.wait(link.post_broadcast([tensor for _, tensor in found]))
            link.settle()
        except (ValueError, TransferFailed) as error:
            link.abort(f"receiving weights failed: {error}")
            self.destroy(group_name)
            raise
        return found

    def abort(self, reason: str) -> None:
        for link in list(self._links.values()):
            link.abort(reason)
