"""Proves that a refit writes every weight: remember, destroy, refit, compare."""

from __future__ import annotations

import torch
from megatron.core.resharding.utils import named_refit_tensors

from megatron_rollout.weight_sync.checksum import tensor_checksum
from megatron_rollout.weight_sync.names import listed


class WeightsDiffer(ValueError):
    """Weights are not those of the snapshot; the message names them."""


class WeightChecker:
    """Of one rank's shard."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._snapshot: dict[str, str] | None = None

    def _checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in named_refit_tensors(self._model)}

    def snapshot(self) -> int:
        """Remember the weights' checksums; returns how many."""
        self._snapshot = self._checksums()
        return len(self._snapshot)

    def reset(self) -> int:
        """Overwrite every weight with a value that no model has; returns how many tensors there are."""
        count = 0
        with torch.no_grad():
            for _, tensor in named_refit_tensors(self._model):
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
                count += 1
        return count

    def compare(self) -> int:
        """How many tensors are as in the snapshot: all. Raises WeightsDiffer otherwise, or ValueError without one."""
        if self._snapshot is None:
            raise ValueError("compare needs a snapshot first")
        now = self._checksums()
        if differing := sorted(name for name, found in now.items() if found != self._snapshot.get(name)):
            raise WeightsDiffer(f"{len(differing)} of {len(now)} tensors differ from the snapshot: {listed(differing)}")
        return len(now)
