"""Tensors as trainers of the SGLang wire send them: flat buckets and pickled payloads, read without trusting them.

`update_weights_from_tensor` carries one pickle a rank, made by torch's multiprocessing pickler: either [(name,
tensor)], where a tensor may be wrapped once more for each rank, or {"flattened_tensor": bytes of all tensors end to
end, "metadata": [objects with name, shape, dtype, start_idx, end_idx]}. Tensors in it are handles (CUDA IPC, shared
memory) or values. A pickle can call anything, so only the functions that rebuild tensors are ever looked up.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_rollout.weight_sync.loader import BadWeights

Named = tuple[str, torch.Tensor]

#: Everything that a payload may name: what torch and multiprocessing use to rebuild tensors, and plain containers.
_ALLOWED = {
    "collections": {"OrderedDict"},
    "torch": {"Size", "device", "Tensor", "UntypedStorage", "FloatStorage", "HalfStorage", "BFloat16Storage"},
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch.nn.parameter": {"Parameter"},
    "torch.storage": {"UntypedStorage", "TypedStorage", "_load_from_bytes"},
    "torch.multiprocessing.reductions": {
        "rebuild_tensor",
        "rebuild_cuda_tensor",
        "rebuild_storage_fd",
        "rebuild_storage_filename",
        "rebuild_storage_empty",
        "rebuild_typed_storage",
    },
    "multiprocessing.resource_sharer": {"DupFd"},
    "multiprocessing.reduction": {"DupFd", "rebuild_ctx", "rebuild_dup"},
}
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
#: Position of the device among the arguments of torch's `rebuild_cuda_tensor`.
_CUDA_DEVICE = 6


class _Metadata:
    """A bucket's entry, whatever class the sender had for it."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    start_idx: int
    end_idx: int

    def __setstate__(self, state: Any) -> None:
        fields = state[1] if isinstance(state, tuple) else state
        self.__dict__.update(fields or {})


class _PerRank:
    """A tensor wrapped once for each rank of the engine: `values`, one pickle a rank."""

    values: Sequence[bytes]

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """SGLang's senders name the device by its UUID, since its number may differ between processes."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = arguments[_CUDA_DEVICE]
    if isinstance(device, str):
        uuids = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        if device not in uuids:
            raise BadWeights(f"the payload's tensor lies on device {device}, this process sees {sorted(uuids)}")
        arguments = (*arguments[:_CUDA_DEVICE], uuids[device], *arguments[_CUDA_DEVICE + 1 :])
    return rebuild_cuda_tensor(*arguments)


def _load_storage(data: bytes) -> Any:
    """torch's own `_load_from_bytes` would unpickle `data` without any limit."""
    return torch.load(io.BytesIO(data), weights_only=True)


#: By name alone, from whatever module: the sender's own classes and patched functions.
_OURS = {
    "FlattenedTensorMetadata": _Metadata,
    "LocalSerializedTensor": _PerRank,
    "_rebuild_cuda_tensor_modified": _rebuild_cuda_tensor,
    "rebuild_cuda_tensor": _rebuild_cuda_tensor,
    "_load_from_bytes": _load_storage,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _OURS:
            return _OURS[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise BadWeights(f"the payload names {module}.{name}, which is not needed to rebuild tensors: refused")


def unpickle(data: bytes) -> Any:
    """Raises BadWeights for anything that is not a payload of tensors."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except BadWeights:
        raise
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError, KeyError) as error:
        raise BadWeights(f"the payload cannot be read: {type(error).__name__}: {error}") from error


def named_tensors(payloads: Sequence[bytes], load_format: str | None, *, rank: int, world: int, tp: int) -> list[Named]:
    """The tensors for rank `rank` of a cell of `world` ranks, of which `tp` make up one pipeline stage.

    payloads: one for the whole cell, one a rank, or one a tensor-parallel rank. An empty bucket gives no tensors.
    Raises BadWeights.
    """
    if load_format not in (None, "flattened_bucket"):
        raise BadWeights(f"load_format {load_format!r} is not supported; known are None and 'flattened_bucket'")
    if len(payloads) not in (1, tp, world):
        raise BadWeights(f"{len(payloads)} payloads for a cell of {world} ranks (tensor parallel {tp})")
    found = unpickle(payloads[rank % len(payloads)])
    if load_format == "flattened_bucket":
        if not isinstance(found, dict) or not {"flattened_tensor", "metadata"} <= set(found):
            raise BadWeights("a flattened bucket is a mapping with flattened_tensor and metadata")
        entries = [(m.name, m.dtype, m.shape, m.start_idx, m.end_idx) for m in found["metadata"]]
        return unflatten(found["flattened_tensor"], entries)
    if not isinstance(found, list | tuple):
        raise BadWeights(f"the payload is a {type(found).__name__}, not a list of (name, tensor)")
    return [(name, _unwrapped(name, tensor, rank)) for name, tensor in found]


def _unwrapped(name: str, tensor: Any, rank: int) -> torch.Tensor:
    if isinstance(tensor, _PerRank):
        tensor = unpickle(tensor.values[rank % len(tensor.values)])
    if not isinstance(tensor, torch.Tensor):
        raise BadWeights(f"{name} is a {type(tensor).__name__}, not a tensor")
    return tensor


def unflatten(flat: torch.Tensor, entries: Iterable[tuple[str, torch.dtype, Sequence[int], int, int]]) -> list[Named]:
    """(name, dtype, shape, first byte, end) → tensors, views of `flat` where alignment allows it. Raises BadWeights."""
    data = flat.reshape(-1).view(torch.uint8)
    tensors = []
    for name, dtype, shape, start, end in entries:
        wanted = math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= data.numel() or end - start != wanted:
            raise BadWeights(
                f"{name}: bytes {start} to {end} of a bucket of {data.numel()} for a tensor of {wanted} bytes"
            )
        part = data[start:end]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        tensors.append((name, part.view(dtype).view(tuple(shape))))
    return tensors


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """A dtype by its name, with or without "torch.". Raises BadWeights."""
    if isinstance(name, torch.dtype):
        return name
    known = _DTYPES.get(str(name).removeprefix("torch."))
    if known is None:
        raise BadWeights(f"unknown dtype {name!r}")
    return known
