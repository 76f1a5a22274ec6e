"""A nested state as JSON metadata plus raw storages: what a healing cell is sent. No pickle anywhere.

A state is dicts (keys: str, int, bool, None), lists and tuples of tensors, numpy arrays and scalars, plain Python
values, bytes and BytesIO. Each storage appears once however many tensors view it, and only the range that they cover:
parameters that are views into one flat buffer cost that buffer, and share it again on the other side. An OrderedDict
arrives as dict, a Parameter as a plain tensor, an empty tensor on the CPU.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Ranges begin at multiples of this, so that every dtype can view them.
_ALIGN = 16


class StateError(TypeError):
    """Something in a state cannot travel, or does not fit where it shall go; the message names its path."""


@dataclass(frozen=True)
class PackedState:
    """header: JSON-able. storages: 1-D uint8 tensors that alias the state, in the order of header["storages"]."""

    header: dict[str, Any]
    storages: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(storage.numel() for storage in self.storages)


@dataclass
class _Storage:
    base: Tensor
    begin: int
    end: int


class _Packer:
    def __init__(self) -> None:
        self._index: dict[tuple[str, int], int] = {}
        self.storages: list[_Storage] = []
        self.leaves: list[dict[str, Any]] = []

    def node(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        if isinstance(value, Mapping):
            return {"t": "dict", "v": [[self._key(k, path), self.node(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, torch.Size):
            return {"t": "size", "v": list(value)}
        if kind in (list, tuple):
            return {"t": kind.__name__, "v": [self.node(v, f"{path}[{i}]") for i, v in enumerate(value)]}
        if isinstance(value, torch.dtype):
            return {"t": "dtype", "v": _dtype_name(value)}
        if kind is bytes:
            return {"t": "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, io.BytesIO):
            return {"t": "bytesio", "v": base64.b64encode(value.getvalue()).decode()}
        raise StateError(f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be sent to another cell")

    @staticmethod
    def _key(key: Any, path: str) -> Any:
        if key is None or type(key) in (str, int, bool):
            return key
        raise StateError(f"{path}: dict key {key!r} ({type(key).__name__}) cannot be sent to another cell")

    def _array(self, value: Any, path: str) -> dict[str, Any]:
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise StateError(f"{path}: a numpy array of Python objects cannot be sent to another cell")
        data = torch.tensor(bytearray(array.tobytes()), dtype=torch.uint8)
        return {
            "t": "array",
            "d": array.dtype.str,
            "shape": list(np.shape(value)),
            "scalar": isinstance(value, np.generic),
            "v": self._tensor(data, path),
        }

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise StateError(f"{path}: a {type(value).__name__} ({value.layout}) cannot be sent to another cell")
        if value.is_quantized or value.is_conj() or value.is_neg() or value.device.type not in ("cpu", "cuda"):
            raise StateError(f"{path}: a quantized, lazily conjugated or {value.device.type} tensor cannot be sent")
        leaf: dict[str, Any] = {
            "t": "tensor",
            "d": _dtype_name(value.dtype),
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
        self.leaves.append({"path": path, "leaf": leaf})
        if value.numel() == 0:
            leaf["s"] = None
            return leaf
        size = value.element_size()
        begin = int(value.storage_offset()) * size
        reach = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
        number = self._storage(value, begin, begin + (reach + 1) * size)
        # Offsets are made relative to the range once its beginning is known.
        leaf["s"], leaf["o"] = number, begin
        return leaf

    def _storage(self, value: Tensor, begin: int, end: int) -> int:
        storage = value.untyped_storage()
        key = (str(value.device), storage.data_ptr())
        begin = begin // _ALIGN * _ALIGN
        number = self._index.setdefault(key, len(self.storages))
        if number == len(self.storages):
            self.storages.append(_Storage(value.detach(), begin, end))
        else:
            known = self.storages[number]
            known.begin, known.end = min(known.begin, begin), max(known.end, end)
        return number


def pack(state: Any) -> PackedState:
    """Describes `state`; copies nothing but numpy arrays.

    Raises:
        StateError: naming the path of what cannot travel.
    """
    packer = _Packer()
    tree = packer.node(state, "state")
    for entry in packer.leaves:
        leaf = entry["leaf"]
        if leaf["s"] is not None:
            leaf["o"] -= packer.storages[leaf["s"]].begin
    described = [{"bytes": one.end - one.begin, "device": one.base.device.type} for one in packer.storages]
    return PackedState({"tree": tree, "storages": described}, [_bytes_of(one) for one in packer.storages])


def allocate(header: Mapping[str, Any], device: torch.device) -> list[Tensor]:
    """Fresh storages for a header; what lay on a GPU goes to `device`."""
    return [
        torch.empty(one["bytes"], dtype=torch.uint8, device=device if one["device"] == "cuda" else "cpu")
        for one in header["storages"]
    ]


def unpack(header: Mapping[str, Any], storages: Sequence[Tensor]) -> Any:
    """The state whose tensors view `storages` (as `allocate` makes them or `PackedState` holds them)."""
    return _decode(header["tree"], storages)


def check_fits(incoming: Mapping[str, Any], into: PackedState) -> None:
    """Whether the incoming tensors can be written over those of `into`: same places, shapes, dtypes and sharing.

    Raises:
        StateError: naming the first tensor that differs.
    """
    theirs, ours = list(_tensors(incoming["tree"], "state")), list(_tensors(into.header["tree"], "state"))
    for (their_path, their_leaf), (our_path, our_leaf) in zip(theirs, ours, strict=False):
        if their_path != our_path:
            raise StateError(f"{their_path} arrives where {our_path} is expected")
        if their_leaf != our_leaf:
            raise StateError(f"{our_path}: {_describe(their_leaf)} arrives, here it is {_describe(our_leaf)}")
    if len(theirs) != len(ours):
        first = (theirs if len(theirs) > len(ours) else ours)[min(len(theirs), len(ours))][0]
        raise StateError(f"{len(theirs)} tensors arrive where {len(ours)} are expected; the first in doubt is {first}")
    sizes = [one["bytes"] for one in incoming["storages"]]
    if sizes != [storage.numel() for storage in into.storages]:
        raise StateError(
            f"the storages that arrive ({sum(sizes)} bytes) are not cut as those here ({into.nbytes} bytes)"
        )


def _bytes_of(storage: _Storage) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.base.device)
    return view.set_(storage.base.untyped_storage(), storage.begin, (storage.end - storage.begin,), (1,))


def _decode(node: Any, storages: Sequence[Tensor]) -> Any:
    if not isinstance(node, Mapping):
        return node
    kind: str = node["t"]
    value: Any = node.get("v")
    if kind == "dict":
        return {key: _decode(one, storages) for key, one in value}
    if kind in ("list", "tuple"):
        items = [_decode(one, storages) for one in value]
        return items if kind == "list" else tuple(items)
    if kind == "tensor":
        return _view(node, storages)
    if kind == "array":
        data = np.frombuffer(_view(value, storages).numpy().tobytes(), dtype=np.dtype(node["d"]))
        array = data.reshape(node["shape"]).copy()
        return array[()] if node["scalar"] else array
    if kind == "size":
        return torch.Size(value)
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "bytesio":
        return io.BytesIO(base64.b64decode(value))
    raise StateError(f"unknown kind of node {kind!r} in a received header")


def _view(leaf: Mapping[str, Any], storages: Sequence[Tensor]) -> Tensor:
    dtype = getattr(torch, leaf["d"])
    if leaf["s"] is None:
        return torch.empty(leaf["shape"], dtype=dtype)
    storage = storages[leaf["s"]]
    # `storage` may itself begin inside of a larger storage (a state that is received in place).
    offset = (storage.storage_offset() + leaf["o"]) // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage.untyped_storage(), offset, leaf["shape"], leaf["stride"])


def _tensors(node: Any, path: str) -> Any:
    if not isinstance(node, Mapping):
        return
    if node["t"] == "tensor":
        yield path, node
    elif node["t"] == "array":
        yield path, node["v"]
    elif node["t"] == "dict":
        for key, one in node["v"]:
            yield from _tensors(one, f"{path}[{key!r}]")
    elif node["t"] in ("list", "tuple"):
        for index, one in enumerate(node["v"]):
            yield from _tensors(one, f"{path}[{index}]")


def _describe(leaf: Mapping[str, Any]) -> str:
    where = "empty" if leaf["s"] is None else f"storage {leaf['s']} at byte {leaf['o']}"
    return f"{leaf['d']} {leaf['shape']} with strides {leaf['stride']}, {where}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
