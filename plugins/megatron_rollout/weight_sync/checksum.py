"""Checksums of weights by Hugging Face name, equal for equal weights whatever the layout that holds them."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from megatron_rollout.engine.checkpoint import gather_shards
from megatron_rollout.engine.weights import WeightMap


def tensor_checksum(tensor: torch.Tensor) -> str:
    """SHA-256 (first 16 hex digits) of dtype, shape and bytes."""
    flat = tensor.detach().contiguous().cpu()
    digest = hashlib.sha256(f"{flat.dtype}{tuple(flat.shape)}".encode())
    digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def hf_checksums(
    model: torch.nn.Module, weights: WeightMap, *, tp_group: dist.ProcessGroup, pp_group: dist.ProcessGroup
) -> dict[str, str]:
    """Checksum of every Hugging Face tensor of the model, on all ranks. Collective over the cell's TP and PP ranks."""
    mine: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and weights.architecture.tied_embeddings:
            continue
        for hf_name, dim, part in weights.hf_parts(name, parameter.detach()):
            mine[hf_name] = tensor_checksum(gather_shards(part, dim, tp_group))
    stages: list[dict[str, str]] = [{} for _ in range(pp_group.size())]
    dist.all_gather_object(stages, mine, group=pp_group)
    return {name: checksum for stage in stages for name, checksum in stage.items()}


def combined(checksums: dict[str, str]) -> str:
    """One checksum over all of them."""
    return hashlib.sha256("".join(f"{k}={checksums[k]};" for k in sorted(checksums)).encode()).hexdigest()[:16]
