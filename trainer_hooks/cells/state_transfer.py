"""Sends a cell's state to another member of a configured `CrossCellGroup`: how a cell heals.

Metadata travels as JSON, every storage once, as raw bytes in chunks. Memory beside the state itself: two chunks and
the metadata on either side; the receiver also allocates the state, unless it is received into one that it has. Each
chunk is checksummed from the sender's memory to the receiver's, and the receiver confirms before the sender goes on.

A failure on either side is a `GroupError`. For the receiver it means: throw away what came, take another source. For
the sender it says nothing about its own state, which was only read: it goes on as before.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_hooks.cells import buckets, state_tree
from trainer_hooks.cells.group import CrossCellGroup
from trainer_hooks.cells.lane import DeadlinePassed, GroupError, Job

_FORMAT = 1
_GREETING, _HEADER, _DATA, _SUMS, _ANSWER = range(1, 6)
_IN_FLIGHT = 2
CHUNK_BYTES = 8 << 20


class TransferCorrupt(GroupError):
    """What arrived is not what was sent, or not what was expected."""


@dataclass(frozen=True)
class Transfer:
    """nbytes: of tensors. seconds: the whole transfer, confirmation included."""

    nbytes: int
    chunks: int
    seconds: float


def send_state(
    group: CrossCellGroup,
    peer: int,
    state: Any,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    deadline_s: float | None = None,
) -> Transfer:
    """Sends `state` to cell rank `peer`, which calls `receive_state`. Returns when the peer has confirmed.

    deadline_s: for the whole, default `group.timeouts.heal_s`; a silence of `transfer_stall_s` ends it too.

    Raises:
        StateError: `state` holds something that cannot travel (nothing was sent).
        GroupError: the peer died, stalled, or refused what it got.
        ValueError: chunk_bytes < 1.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
    line = _Line(group, peer, group.timeouts.heal_s if deadline_s is None else deadline_s)
    packed = state_tree.pack(state)
    header = _to_tensor(json.dumps(packed.header).encode(), group.device)
    line.send(_numbers([_FORMAT, header.numel(), chunk_bytes], group.device), _GREETING)
    line.send(header, _HEADER)
    rooms = _Rooms(min(chunk_bytes, packed.nbytes), group.device)
    flying: deque[Job] = deque()
    sums: list[int] = []
    for turn, pieces in enumerate(buckets.plan(packed.storages, chunk_bytes)):
        if len(flying) == _IN_FLIGHT:
            line.finish(flying.popleft())
        chunk = _in_place(pieces, packed.storages, group.device)
        if chunk is None:
            chunk = buckets.fill(rooms[turn], pieces, packed.storages)
        sums.append(checksum(chunk))
        flying.append(group.post_send(chunk, peer, _DATA))
    while flying:
        line.finish(flying.popleft())
    line.send(_numbers([len(sums), *sums], group.device), _SUMS)
    answer = _numbers([0], group.device)
    line.recv(answer, _ANSWER)
    if answer.item() != 1:
        raise TransferCorrupt(f"cell rank {peer} did not accept the state that it was sent")
    return Transfer(packed.nbytes, len(sums), line.elapsed)


def receive_state(
    group: CrossCellGroup,
    peer: int,
    *,
    into: Any = None,
    deadline_s: float | None = None,
) -> tuple[Any, Transfer]:
    """Receives what cell rank `peer` sends with `send_state`.

    into: a state with the same tensors (places, shapes, dtypes, sharing) to receive over. Its contents are undefined
        until this returns. None: new tensors, on `group.device` for what lay on the sender's GPU, else on the CPU.

    Raises:
        GroupError: the peer died or stalled, or what came is damaged: use another source.
        StateError: what comes does not fit `into`; the group is left, so that the peer gets a GroupError.
    """
    line = _Line(group, peer, group.timeouts.heal_s if deadline_s is None else deadline_s)
    greeting = _numbers([0, 0, 0], group.device)
    line.recv(greeting, _GREETING)
    version, length, chunk_bytes = greeting.tolist()
    if version != _FORMAT:
        raise TransferCorrupt(f"cell rank {peer} sends format {version}, this cell reads {_FORMAT}")
    blob = torch.empty(length, dtype=torch.uint8, device=group.device)
    line.recv(blob, _HEADER)
    header = json.loads(bytes(blob.cpu().numpy()))
    if into is None:
        storages = state_tree.allocate(header, group.device)
    else:
        target = state_tree.pack(into)
        try:
            state_tree.check_fits(header, target)
        except state_tree.StateError as misfit:
            # The peer waits for us to take its chunks: ending the group is how it learns.
            group.abort(f"the state of cell rank {peer} does not fit: {misfit}")
            raise
        storages = target.storages
    # After a failure the group may still write to what it was given: to new storages, which are then thrown away, or to
    # chunks of our own, but not to a state that somebody has.
    sums = _receive_chunks(line, storages, chunk_bytes, direct=into is None)
    expected = _numbers([0] * (len(sums) + 1), group.device)
    line.recv(expected, _SUMS)
    count, *wanted = expected.tolist()
    damaged = [i for i, (ours, theirs) in enumerate(zip(sums, wanted, strict=True)) if ours != theirs]
    good = count == len(sums) and not damaged
    line.send(_numbers([int(good)], group.device), _ANSWER)
    if not good:
        raise TransferCorrupt(f"from cell rank {peer}: checksums differ in chunks {damaged[:8]} of {count}")
    nbytes = sum(storage.numel() for storage in storages)
    return state_tree.unpack(header, storages), Transfer(nbytes, len(sums), line.elapsed)


def checksum(chunk: Tensor) -> int:
    """63 bits of a uint8 tensor: CRC-32 on the CPU, a position-weighted sum on a GPU (both sides use the same)."""
    return positional_sum(chunk) if chunk.is_cuda else zlib.crc32(chunk.numpy())


def positional_sum(chunk: Tensor) -> int:
    """sum over 8-byte words of word * (2 * position + 1), modulo 2^63; what is left over is weighted bytewise."""
    whole = chunk.numel() // 8 * 8
    # A fresh copy where the bytes do not begin at a word.
    words = chunk[:whole].clone().view(torch.int64)
    weights = 2 * torch.arange(words.numel(), device=chunk.device) + 1
    rest = chunk[whole:].to(torch.int64) * torch.arange(3, 3 + chunk.numel() - whole, device=chunk.device)
    return int(((words * weights).sum() + rest.sum()).item()) & ((1 << 63) - 1)


def _receive_chunks(line: _Line, storages: list[Tensor], chunk_bytes: int, *, direct: bool) -> list[int]:
    group = line.group
    plan = list(buckets.plan(storages, chunk_bytes))
    rooms = _Rooms(min(chunk_bytes, sum(storage.numel() for storage in storages)), group.device)
    flying: deque[tuple[Job, Tensor, bool]] = deque()

    def post(turn: int) -> None:
        if turn < len(plan):
            there = _in_place(plan[turn], storages, group.device) if direct else None
            chunk = rooms[turn][: plan[turn][-1].until] if there is None else there
            flying.append((group.post_recv(chunk, line.peer, _DATA), chunk, there is None))

    for turn in range(_IN_FLIGHT):
        post(turn)
    sums = []
    for turn, pieces in enumerate(plan):
        job, chunk, staged = flying.popleft()
        line.finish(job)
        sums.append(checksum(chunk))
        if staged:
            buckets.empty(chunk, pieces, storages)
            if chunk.is_cuda:
                torch.cuda.current_stream(chunk.device).synchronize()
        post(turn + _IN_FLIGHT)
    return sums


def _in_place(pieces: list[buckets.Piece], storages: list[Tensor], device: torch.device) -> Tensor | None:
    """The chunk where it lies, if it lies in one storage on the group's device: most of a large state does."""
    only = pieces[0]
    if len(pieces) > 1 or storages[only.tensor].device != device:
        return None
    return storages[only.tensor][only.begin : only.end]


class _Rooms:
    """Chunks of our own, allocated when first needed."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._rooms: dict[int, Tensor] = {}

    def __getitem__(self, turn: int) -> Tensor:
        which = turn % _IN_FLIGHT
        if which not in self._rooms:
            self._rooms[which] = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        return self._rooms[which]


class _Line:
    """One transfer's end of the connection, with its deadline."""

    def __init__(self, group: CrossCellGroup, peer: int, seconds: float) -> None:
        self.group = group
        self.peer = peer
        self._seconds = seconds
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def finish(self, job: Job) -> None:
        left = self._seconds - self.elapsed
        if left <= 0:
            late = DeadlinePassed(f"the transfer with cell rank {self.peer} was not done after {self._seconds:g} s")
            self.group.abort(str(late))
            raise late
        self.group.finish(job, min(left, self.group.timeouts.transfer_stall_s))

    def send(self, tensor: Tensor, tag: int) -> None:
        self.finish(self.group.post_send(tensor, self.peer, tag))

    def recv(self, tensor: Tensor, tag: int) -> None:
        self.finish(self.group.post_recv(tensor, self.peer, tag))


def _numbers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _to_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
