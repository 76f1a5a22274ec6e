"""Hugging Face safetensors in and out of a sharded model.

Reading: every rank opens the files and reads its own slices only. Writing: layer by layer, one file a layer, so that no
rank ever holds more than one layer in full.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rollout.engine.weights import WeightMap

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HFReader:
    """Slices of the tensors of a Hugging Face checkpoint directory, read lazily.

    Raises FileNotFoundError without safetensors files, KeyError for a missing tensor; both name the directory.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if (self.directory / INDEX).is_file():
            self.files: dict[str, str] = json.loads((self.directory / INDEX).read_text())["weight_map"]
        elif (self.directory / SINGLE).is_file():
            with safe_open(self.directory / SINGLE, "pt") as file:
                self.files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise FileNotFoundError(f"{self.directory}: neither {SINGLE} nor {INDEX} is there")
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __call__(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        tensor = self._slice(name)
        return tensor[start:stop] if dim == 0 else tensor[:, start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def open_all(self) -> None:
        """Open every file now: what is open can be read to the end whatever becomes of the directory."""
        for file in sorted(set(self.files.values())):
            self._opened(file)

    def _slice(self, name: str) -> Any:
        if name not in self.files:
            raise KeyError(f"{self.directory}: no tensor {name!r}")
        return self._opened(self.files[name]).get_slice(name)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(self.directory / file, "pt")
        return self._open[file]


def load_hf(model: torch.nn.Module, weights: WeightMap, directory: str | Path) -> None:
    """Load this rank's shard of `model` (the bare megatron-core model) from a Hugging Face checkpoint."""
    read = HFReader(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights.may_lack(name) and not all(n in read for n in weights.mapping(name).names):
                continue
            parameter.copy_(weights.local(name, parameter.shape, read))


def _layer_key(hf_name: str) -> str:
    """File of a tensor: one a layer, one each for what is outside the layers."""
    parts = hf_name.split(".")
    return f"layer-{int(parts[2]):05d}" if hf_name.startswith("model.layers.") else parts[-2]


def save_hf(
    model: torch.nn.Module,
    weights: WeightMap,
    directory: str | Path,
    *,
    tp_group: dist.ProcessGroup,
    pp_group: dist.ProcessGroup,
    source: str | Path,
    writes: bool = True,
) -> None:
    """Write `model` as a Hugging Face checkpoint: collective over the cell's TP and PP ranks.

    The directory is written beside its place and renamed when whole, so that a reader never sees half of one; an
    existing one is replaced. source: the checkpoint it began as, whose config and tokenizer files are copied.
    writes: False on data-parallel replicas, which only take part in the collectives.
    """
    directory = Path(directory)
    partial = directory.with_name(directory.name + ".partial")
    tp_rank, pp_rank = tp_group.rank(), pp_group.rank()
    leads = writes and tp_rank == 0
    if leads and pp_rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group=pp_group)
    dist.barrier(group=tp_group)
    files: dict[str, str] = {}
    buffer: dict[str, torch.Tensor] = {}
    current = ""

    def flush() -> None:
        if buffer:
            save_file(buffer, partial / f"{current}.safetensors", metadata={"format": "pt"})
            buffer.clear()

    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and weights.architecture.tied_embeddings:
            continue  # the embedding, once more
        for hf_name, dim, part in weights.hf_parts(name, parameter.detach()):
            full = gather_shards(part, dim, tp_group)
            if not leads:
                continue
            if _layer_key(hf_name) != current:
                flush()
                current = _layer_key(hf_name)
            buffer[hf_name] = full.cpu().contiguous()
            files[hf_name] = f"{current}.safetensors"
    if leads:
        flush()
    everyone: list[dict[str, str]] = [{} for _ in range(pp_group.size())]
    dist.all_gather_object(everyone, files, group=pp_group)
    if leads and pp_rank == 0:
        weight_map = {k: v for stage in everyone for k, v in stage.items()}
        (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1, sort_keys=True))
        for file in Path(source).iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
                shutil.copy(file, partial / file.name)
        replaced = directory.with_name(directory.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():
            os.rename(directory, replaced)
        os.rename(partial, directory)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier(group=pp_group)
    dist.barrier(group=tp_group)


def gather_shards(part: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The full tensor of which each rank of `group` holds a slice along `dim` (None: it is replicated)."""
    if dim is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)
