"""What every way of moving weights between cells has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_rollout.engine.weights import WeightMap

#: Called after each part of a transfer with its number.
Progress = Callable[[int], None]


class Shard(Protocol):
    """One rank's part of a model, on either side: a `TrainerRank` and a `RolloutRank` are ones.

    groups: process groups of the cell (`tp`, `pp`).
    """

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def weight_map(self) -> WeightMap: ...

    @property
    def groups(self) -> Any: ...


class Transport(Protocol):
    """One rank's end of the transfers of one pair. Everything is collective over the pair's ranks, except `abort`,
    which any thread may call, and `close`. After an exception only `close` is of use.

    name: of this incarnation of the pair, used once. bytes_sent, bytes_received: of one transfer, on this rank.
    """

    name: str
    bytes_sent: int
    bytes_received: int

    def join(self) -> None:
        """Meet the other ranks. Raises TransferFailed."""
        ...

    def prepare(
        self, source: Shard | None, destination: Shard | None, *, version: int, within_s: float | None = None
    ) -> None:
        """Everything up to the first write into `destination`: both sides match, and mean the same version.

        within_s: for this and the following `move`. Raises TransferFailed, or a ValueError that lists what disagrees.
        """
        ...

    def move(self, progress: Progress | None = None) -> None:
        """Overwrite the destination's weights. Raises TransferFailed: they are torn then."""
        ...

    def abort(self, reason: str) -> None:
        """Make whatever this rank does in it raise now."""
        ...

    def close(self) -> None:
        """Leave; safe after a failure and to call again."""
        ...
