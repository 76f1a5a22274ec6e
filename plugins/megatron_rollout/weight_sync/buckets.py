"""A sharded model as buckets of whole Hugging Face tensors, for transports that speak those names.

Whole tensors exist one bucket at a time, on one rank of each pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_rollout.engine.checkpoint import gather_shards
from megatron_rollout.weight_sync.transport import Shard

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One Hugging Face tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def entries(shard: Shard) -> list[Entry]:
    """The tensors of this rank's pipeline stage, in the order in which `whole_tensors` makes them."""
    found = []
    for name, parameter in _own(shard):
        mapping = shard.weight_map.mapping(name)
        shapes = shard.weight_map.shapes(mapping, parameter.shape)
        found += [Entry(n, parameter.dtype, tuple(s)) for n, s in zip(mapping.names, shapes, strict=True)]
    return found


def whole_tensors(shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor), contiguous. Collective over the stage's tensor-parallel ranks; each gets the tensors."""
    for name, parameter in _own(shard):
        for hf_name, dim, part in shard.weight_map.hf_parts(name, parameter.detach()):
            yield hf_name, gather_shards(part, dim, shard.groups.tp).contiguous()


def _own(shard: Shard) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters without the tied output layer, which is the embedding once more."""
    tied = shard.weight_map.architecture.tied_embeddings
    return ((n, p) for n, p in shard.model.named_parameters() if not (tied and n == "output_layer.weight"))


def cut(items: Sequence[Entry], bucket_bytes: int = BUCKET_BYTES) -> list[list[Entry]]:
    """Buckets of at most `bucket_bytes`, in order; a larger tensor has one of its own. No bucket is empty."""
    buckets: list[list[Entry]] = []
    size = 0
    for item in items:
        if not buckets or size + item.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(item)
        size += item.nbytes
    return buckets


def places(bucket: Sequence[Entry]) -> list[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
    """(name, dtype, shape, first byte, end) of each tensor in a flat bucket: end to end, without padding."""
    found, at = [], 0
    for entry in bucket:
        found.append((entry.name, entry.dtype, entry.shape, at, at + entry.nbytes))
        at += entry.nbytes
    return found
