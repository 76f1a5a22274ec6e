"""Native refit: trainer cell → its rollout cells, shard to shard.

One extra process group spans the two worlds (the trainer cell's ranks first, then the rollout cells' in order). Each
rank sends or receives exactly the slices that the other side's layout needs (`schedule.py`); nobody holds a gathered
tensor. Slices that are contiguous are sent from, and received into, the parameters themselves; small ones travel
together.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.resharding.utils import named_persistent_buffers, named_refit_tensors

from megatron_rollout.device import synchronize
from megatron_rollout.faults import fault_point
from megatron_rollout.weight_sync.group import RefitGroup, TransferFailed
from megatron_rollout.weight_sync.schedule import WINDOW_BYTES, Piece, Schedule, describe, schedule
from megatron_rollout.weight_sync.transport import Progress, Shard

#: Pieces below this share one message with the others between the same two ranks in the same window.
PACK_BELOW = 256 << 10
#: Windows under way: one is filled or emptied while the other one moves.
_IN_FLIGHT = 2
_ALIGNMENT = 16


class ReshardGroup:
    """This rank's end of one refit group (`Transport`). Nothing happens before `join`.

    host, port: a TCP store outside both cells, or `store` itself. name: used once. rank, world_size: place in the group.
    source_ranks: how many trainer ranks lead it. destination_offset: first rank of *this* rollout cell (a trainer rank
    needs none; 0 where both models share one world). sends: False on a trainer rank that only repeats another one's
    weights (data or context parallel replica). partial: the sources hold one pipeline stage. window_bytes: that a rank
    sends or receives in one go. timeout_s: of forming the group, and of a transfer unless it says less.
    """

    def __init__(
        self,
        *,
        host: str = "",
        port: int = 0,
        store: dist.Store | None = None,
        name: str,
        rank: int,
        world_size: int,
        source_ranks: int,
        destination_offset: int | None = None,
        sends: bool = True,
        partial: bool = False,
        window_bytes: int = WINDOW_BYTES,
        timeout_s: float = 120.0,
    ) -> None:
        self.link = RefitGroup(
            host=host, port=port, store=store, name=name, rank=rank, world_size=world_size, timeout_s=timeout_s
        )
        self.name = name
        self.bytes_sent = self.bytes_received = 0
        self.destination_offset = source_ranks if destination_offset is None else destination_offset
        self._sends = sends
        self._partial = partial
        self._window_bytes = window_bytes
        self._plan: tuple[tuple[torch.nn.Module | None, torch.nn.Module | None], Schedule] | None = None

    def join(self) -> None:
        """Meet the other ranks. Raises TransferFailed (or its kinds)."""
        self.link.join()

    def prepare(
        self, source: Shard | None, destination: Shard | None, *, version: int, within_s: float | None = None
    ) -> None:
        """Plan, once, and make sure that every peer is there and means the same version. Collective over the group.

        Writes no weight. Raises RefitMismatch for models that differ, TransferFailed otherwise.
        """
        self.link.within(self.link.timeout_s if within_s is None else within_s)
        models = source.model if source is not None and self._sends else None, destination and destination.model
        if self._plan is None or self._plan[0] != models:
            mine = describe(*models, rank=self.link.rank, source_offset=0, offset=self.destination_offset)
            plan = schedule(
                self.link.exchange(mine),
                rank=self.link.rank,
                partial=self._partial,
                window_bytes=self._window_bytes,
            )
            _adopt_buffer_dtypes(models[1], plan.buffer_dtypes)
            self._plan = models, plan
            self.bytes_sent, self.bytes_received = plan.bytes_sent, plan.bytes_received
        fault_point("refit_planned")
        _greet(self.link, self.schedule.peers, version)

    @property
    def schedule(self) -> Schedule:
        """Raises TransferFailed before `prepare`."""
        if self._plan is None:
            raise TransferFailed(f"{self.link}: nothing was prepared")
        return self._plan[1]

    def move(self, progress: Progress | None = None) -> None:
        """Send what is prepared, or overwrite the destination's weights with it. progress: after each window.

        Raises TransferFailed: the destination's weights are torn then, and the group is of no use any more.
        """
        if self._plan is None:
            raise TransferFailed(f"{self.link}: nothing was prepared")
        (source, destination), plan = self._plan
        synchronize()  # whoever wrote the source's weights may have done so on another stream
        move(self.link, plan, _tensors(source), _tensors(destination), progress)

    def abort(self, reason: str) -> None:
        self.link.abort(reason)

    def close(self) -> None:
        """Leave the group; safe after a failed transfer."""
        self._plan = None
        self.link.close()


def _greet(link: RefitGroup, peers: Sequence[int], version: int) -> None:
    """Tell every peer which version this is about. A peer that comes late, for an older sync, is found here."""
    mine = torch.tensor([version])
    theirs = {peer: torch.full((1,), -1) for peer in peers}
    link.wait(link.post([(mine, peer) for peer in peers], [(theirs[peer], peer) for peer in peers]))
    if others := {peer: int(v) for peer, v in theirs.items() if int(v) != version}:
        reason = f"{link}: this rank refits version {version}, ranks {others} (rank: version) another one"
        link.abort(reason)
        raise TransferFailed(reason)


def _tensors(model: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    return {} if model is None else {name: tensor.detach() for name, tensor in named_refit_tensors(model)}


def _adopt_buffer_dtypes(model: torch.nn.Module | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """Training may have raised a buffer to another dtype; the rollout model follows."""
    if model is not None:
        for full_name, owner, name, buffer in list(named_persistent_buffers(model)):
            if full_name in dtypes and buffer.dtype != dtypes[full_name]:
                owner._buffers[name] = buffer.to(dtypes[full_name])


def move(
    link: RefitGroup,
    plan: Schedule,
    sources: Mapping[str, torch.Tensor],
    destinations: Mapping[str, torch.Tensor],
    progress: Progress | None = None,
) -> None:
    """Execute this rank's schedule. Raises TransferFailed."""
    flying: deque[tuple[list[Any], list[Callable[[], None]], list[torch.Tensor]]] = deque()

    def land() -> None:
        posted, after, _ = flying.popleft()
        link.wait(posted)
        for step in after:
            step()

    with torch.no_grad():
        for number, window in enumerate(plan.windows):
            if len(flying) == _IN_FLIGHT:
                land()
            sends: list[tuple[torch.Tensor, int]] = []
            receives: list[tuple[torch.Tensor, int]] = []
            after: list[Callable[[], None]] = []
            for piece in window:
                if piece.sender == piece.receiver:
                    target = destinations[piece.destination][piece.destination_slice]
                    target.copy_(sources[piece.source][piece.source_slice])
            for peer, pieces in _by(window, lambda p: p.sender, only=plan.rank, of=lambda p: p.receiver):
                for message in _messages(pieces):
                    receives.append((_landing(message, destinations, after), peer))
            for peer, pieces in _by(window, lambda p: p.receiver, only=plan.rank, of=lambda p: p.sender):
                for message in _messages(pieces):
                    sends.append((_parcel(message, sources), peer))
            flying.append((link.post(sends, receives), after, [t for t, _ in (*sends, *receives)]))
            fault_point("refit_first_window" if number == 0 else "refit_middle")
            if progress is not None:
                progress(number)
        while flying:
            land()
        link.settle()


def _by(
    window: Iterable[Piece], peer: Callable[[Piece], int], *, only: int, of: Callable[[Piece], int]
) -> list[tuple[int, list[Piece]]]:
    """Pieces whose `of` end is this rank, by the rank at the other end."""
    mine = [piece for piece in window if of(piece) == only != peer(piece)]
    return [(r, list(group)) for r, group in itertools.groupby(sorted(mine, key=peer), key=peer)]


def _messages(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """What travels together, the same at both ends: all small pieces in one message, then every large one alone."""
    small = [piece for piece in pieces if piece.nbytes < PACK_BELOW]
    large = [[piece] for piece in pieces if piece.nbytes >= PACK_BELOW]
    return ([small] if small else []) + large


def _places(message: Sequence[Piece]) -> tuple[list[int], int]:
    """Where each piece begins in the message, and the message's length in bytes."""
    ends = list(itertools.accumulate(-(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in message))
    return [0, *ends[:-1]], ends[-1]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _parcel(message: Sequence[Piece], sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a message: of the parameter itself where they lie in one stretch."""
    slices = [sources[piece.source][piece.source_slice] for piece in message]
    if len(message) == 1:
        return _bytes(slices[0].to(message[0].dtype).contiguous())
    places, length = _places(message)
    parcel = torch.empty(length, dtype=torch.uint8, device=slices[0].device)
    for piece, place, part in zip(message, places, slices, strict=True):
        parcel[place : place + piece.nbytes].view(piece.dtype).view(piece.shape).copy_(part)
    return parcel


def _landing(
    message: Sequence[Piece], destinations: Mapping[str, torch.Tensor], after: list[Callable[[], None]]
) -> torch.Tensor:
    """Where a message is received: the parameter itself if it can be, else memory that `after` copies from."""
    targets = [destinations[piece.destination][piece.destination_slice] for piece in message]
    if len(message) == 1 and targets[0].is_contiguous() and targets[0].dtype == message[0].dtype:
        return _bytes(targets[0])
    places, length = _places(message)
    parcel = torch.empty(length, dtype=torch.uint8, device=targets[0].device)

    def unpack() -> None:
        for piece, place, target in zip(message, places, targets, strict=True):
            target.copy_(parcel[place : place + piece.nbytes].view(piece.dtype).view(piece.shape))

    after.append(unpack)
    return parcel
