"""The refit groups that a rank is in, on either side: joined, used and left by one thread, aborted from any other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rollout.weight_sync.broadcast import BroadcastGroup
from megatron_rollout.weight_sync.disk import DiskTransfer
from megatron_rollout.weight_sync.group import TransferAborted, TransferFailed
from megatron_rollout.weight_sync.reshard import ReshardGroup
from megatron_rollout.weight_sync.schedule import RefitMismatch
from megatron_rollout.weight_sync.transport import Progress, Shard, Transport

#: What moves weights between cells of separate processes, by the name of the option.
TRANSPORTS = {"reshard": ReshardGroup, "broadcast": BroadcastGroup, "disk": DiskTransfer}

#: Aborts that came before their group was joined are remembered for so many groups.
_REMEMBERED = 64


def make(transport: str, **arguments: Any) -> Transport:
    """Raises ValueError for an unknown name."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    return TRANSPORTS[transport](**arguments)


def as_source(shard: Any, transport: str) -> dict[str, Any]:
    """What a trainer rank adds to the arguments of a transport: only one of equal replicas sends.

    shard: with `groups.dp_cp` besides tp and pp.
    """
    groups = shard.groups
    place: dict[str, Any] = {"sends": groups.dp_cp.rank() == 0}
    if transport == "broadcast":
        place |= {"stage": groups.pp.rank(), "tp_rank": groups.tp.rank()}
    return place


class RefitMember:
    """At most one set of transports at a time: one, or one for each pipeline stage of the trainer, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[Transport] = []
        self._aborted: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)

    def join(self, groups: Sequence[Mapping[str, Any]], *, transport: str = "reshard") -> None:
        """Leave what was joined before and join groups of these arguments, one after the other.

        transport: see TRANSPORTS; arguments: of its class. Raises TransferFailed; nothing is joined then.
        """
        self.leave()
        joined = [make(transport, **arguments) for arguments in groups]
        with self._lock:
            self._groups = joined
            early = dict(self._aborted)
        try:
            for group in joined:
                if (name := group.name) in early:
                    raise TransferAborted(f"refit group {name}: aborted before it was joined: {early[name]}")
                group.join()
        except BaseException:
            self.leave()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is joined now."""
        return tuple(group.name for group in self._groups)

    def prepare(
        self,
        source: Shard | None,
        destination: Shard | None,
        *,
        version: int,
        within_s: float | None = None,
    ) -> None:
        """Plan and meet the peers of every group; writes nothing. Raises TransferFailed or RefitMismatch."""
        if not self._groups:
            raise TransferFailed("this rank has joined no refit group")
        deadline = None if within_s is None else time.monotonic() + within_s
        for group in self._groups:
            left = None if deadline is None else deadline - time.monotonic()
            group.prepare(source, destination, version=version, within_s=left)
        if destination is not None and len(self._groups) > 1:
            names = {name for name, _ in destination.model.named_parameters()}
            stages = [group for group in self._groups if isinstance(group, ReshardGroup)]
            covered = {piece.destination for group in stages for piece in group.schedule.pieces}
            if missing := sorted(names - covered):
                raise RefitMismatch(f"no stage of the trainer has {', '.join(missing)}")

    def move(self, progress: Progress | None = None) -> None:
        """Move what is prepared, group by group. Raises TransferFailed; everything is left then."""
        try:
            for group in self._groups:
                group.move(progress)
        except BaseException:
            self.leave()
            raise

    @property
    def bytes_sent(self) -> int:
        return sum(group.bytes_sent for group in self._groups)

    @property
    def bytes_received(self) -> int:
        return sum(group.bytes_received for group in self._groups)

    def abort(self, name: str, reason: str) -> None:
        """Make whatever this rank does in group `name` raise now, also if it joins it only later. From any thread."""
        with self._lock:
            self._aborted.append((name, reason))
            chosen = [group for group in self._groups if group.name == name]
        for group in chosen:
            group.abort(reason)

    def leave(self) -> None:
        """Leave all groups; safe after a failure."""
        with self._lock:
            groups, self._groups = self._groups, []
        for group in groups:
            group.close()
