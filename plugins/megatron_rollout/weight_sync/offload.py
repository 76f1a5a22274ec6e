"""Weights of a model out of device memory and back: for a trainer whose processes generate with a second model.

Storages are emptied and filled again in place, so whatever views them (parameters, flat buffers of an optimizer) stays
valid; nothing may read them in between.
"""

from __future__ import annotations

import torch

from megatron_rollout.device import on_gpu, release_cached_memory


class OffloadedWeights:
    """The parameters of `model`, from construction until `restore` in host memory only."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        for storage in storages.values():
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu())
            self._kept.append((storage, host.copy_(view)))
            storage.resize_(0)
        release_cached_memory()

    @property
    def nbytes(self) -> int:
        """Bytes that were freed on the device."""
        return sum(host.numel() for _, host in self._kept)

    def restore(self) -> None:
        """Bring everything back. Safe to call again."""
        for storage, host in self._kept:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)  # type: ignore[call-overload]
        self._kept.clear()
