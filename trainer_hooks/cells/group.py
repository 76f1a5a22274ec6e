"""Collectives over trainer cells, whose members may die at any moment.

`CrossCellGroup` wraps torchft's reconfigurable process groups. One exists for each Megatron rank of a cell; it connects
that rank with the same rank of the other cells of the quorum.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed import Store
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, ProcessGroupWrapper

from trainer_hooks.cells import buckets
from trainer_hooks.cells.lane import Aborted, DeadlinePassed, GroupError, GroupUnusable, Job, Lane, PeerLost
from trainer_hooks.cells.timeouts import CellTimeouts

__all__ = [
    "Aborted",
    "CrossCellGroup",
    "DeadlinePassed",
    "Disagreement",
    "GroupError",
    "GroupUnusable",
    "PeerLost",
    "StaleConfiguration",
]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
_OPERATIONS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
#: Buckets in flight: one is reduced while the caller fills the next.
_IN_FLIGHT = 2
#: The backend's own timeout comes this much later than ours, so that ours decides what is reported.
_GRACE_S = 5.0


class StaleConfiguration(GroupError):
    """`configure` for a quorum that is not newer than the present one, or that was aborted already."""


class Disagreement(GroupError):
    """A value that must be equal on all cells is not. The group stays usable."""


class _BoundGloo(ProcessGroupGloo):
    """torchft's gloo group on one given address; gloo's default is whatever the host's name resolves to."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._host = host

    def _create_pg(self, store: Store, rank: int, world_size: int) -> Any:
        options = TorchGloo._Options()  # type: ignore[attr-defined]
        options._devices = [TorchGloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        options._threads = 1
        group = torch.distributed.ProcessGroup(store, rank, world_size)
        group._set_default_backend(torch.distributed.ProcessGroup.BackendType.GLOO)
        backend = TorchGloo(store, rank, world_size, options)  # type: ignore[arg-type]
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device("cpu"), torch.distributed.ProcessGroup.BackendType.GLOO, backend)
        return group


class CrossCellGroup:
    """The same Megatron rank of every cell in the quorum.

    role: train group, e.g. "actor"; groups with different roles never meet. megatron_rank: rank within the cell.
    backend: "gloo" (buckets on the CPU) or "nccl" (buckets on `device`, the CUDA device of this rank). Tensors may lie
        anywhere; they are copied into and out of the buckets.
    host: address that gloo listens on for the other cells.
    bucket_bytes: size of a bucket. Two exist once the group was used; a failed group keeps its own two until its last
        operation has timed out.
    progress: called after each bucket, for a heartbeat's progress counter.

    Threads: one thread configures and reduces; `abort` may come from any thread at any time.
    A quorum of one cell needs no group: every operation is then a no-op.
    """

    def __init__(
        self,
        role: str,
        megatron_rank: int = 0,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
        host: str = "127.0.0.1",
        timeouts: CellTimeouts | None = None,
        bucket_bytes: int = 16 << 20,
        progress: Callable[[], None] | None = None,
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be 'gloo' or 'nccl', got {backend!r}")
        if (backend == "nccl") != (device is not None and device.type == "cuda"):
            raise ValueError(
                f"backend {backend!r} does not go with device {device}: nccl needs a CUDA device, gloo none"
            )
        if bucket_bytes < 64:
            raise ValueError(f"bucket_bytes must be at least 64, got {bucket_bytes}")
        self.role = role
        self.megatron_rank = megatron_rank
        self.timeouts = timeouts or CellTimeouts()
        self.device = device or torch.device("cpu")
        self.backend = backend
        self._host = host
        self._bucket_bytes = bucket_bytes // 16 * 16
        self._progress = progress
        self._lock = threading.Lock()
        self._lane: Lane | None = None
        self._group: ProcessGroupWrapper | None = None
        self._key: tuple[int, int] = (-1, 0)
        self._aborted_through = -1
        self._alone_error: GroupError | None = None
        self._buckets: list[Tensor] = []
        self._seen: set[tuple[Any, ...]] = set()
        self.rank = 0
        self.world = 0
        self.waiting = False

    @property
    def quorum_id(self) -> int:
        """Quorum of the last `configure`, -1 before the first."""
        return self._key[0]

    @property
    def error(self) -> GroupError | None:
        """What made the group unusable, None while it is usable (or not configured yet)."""
        return self._lane.error if self._lane is not None else self._alone_error

    def configure(self, store_address: str, quorum_id: int, rank: int, world: int, *, attempt: int = 0) -> None:
        """Joins the other `world` - 1 cells of the quorum. Every member calls it; it returns when all have.

        store_address: "host:port" of the driver's store. rank: this cell's rank in the quorum. attempt: grows when the
        same quorum is formed again (its first forming failed although nobody died).

        Raises:
            StaleConfiguration: (quorum_id, attempt) is not newer than the last, or was aborted.
            Aborted, PeerLost, DeadlinePassed (`timeouts.configure_s`): a member did not come.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside of world {world}")
        with self._lock:
            if (quorum_id, attempt) <= self._key:
                raise StaleConfiguration(
                    f"{self.role}: quorum {quorum_id} (attempt {attempt}) is not newer than {self._key}"
                )
            if quorum_id <= self._aborted_through:
                raise StaleConfiguration(f"{self.role}: quorum {quorum_id} was aborted before it was formed")
            old = self._lane
            self._leave("reconfigured")
            self._key, self.rank, self.world = (quorum_id, attempt), rank, world
            self._seen.clear()
            if world == 1:
                return
            group = self._new_group()
            name = f"{self.role} rank {self.megatron_rank}, quorum {quorum_id}, cell rank {rank} of {world}"
            interrupt = group.abort if self.backend == "nccl" else None
            lane = self._lane = Lane(name, group.shutdown, interrupt)
            self._group = group
        prefix = f"{store_address}/{self.role}/q{quorum_id}.{attempt}/r{self.megatron_rank}"

        def form() -> None:
            if self.backend == "nccl":
                torch.cuda.set_device(self.device)
                # NCCL takes down one communicator and sets up another on the same device only in turn.
                if old is not None:
                    old.join(_GRACE_S)
            group.configure(prefix, f"{self.role}-{rank}", rank, world, quorum_id)

        self._wait(lane, lane.submit("forming the group", form), self.timeouts.configure_s)

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", *, deadline_s: float | None = None) -> None:
        """Reduces every tensor over all cells, in place. All members pass the same shapes and dtypes in the same order.

        The result is bitwise the same on all cells. deadline_s: for one bucket, default `timeouts.collective_s`.

        Raises:
            Aborted, PeerLost, DeadlinePassed (also when the group failed before, and until its next quorum),
                GroupUnusable: some of `tensors` may hold sums and some not: recompute
                them all.
            Disagreement: the members' shapes, dtypes or op differ (checked when a combination is first seen).
            TypeError: a dtype or layout that cannot be reduced. ValueError: unknown op.
        """
        if op not in _OPERATIONS:
            raise ValueError(f"op must be one of {', '.join(_OPERATIONS)}, got {op!r}")
        for number, tensor in enumerate(tensors):
            if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
                raise TypeError(f"tensor {number} ({tensor.dtype}, {tensor.layout}) cannot be reduced")
        lane = self._ready()
        if lane is None:
            return
        seconds = deadline_s or self.timeouts.collective_s
        self._check_alike(lane, tensors, op, seconds)
        # reshape copies only what is not contiguous; those are copied back at the end.
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        flying: deque[tuple[Job, Tensor, list[buckets.Piece]]] = deque()
        for turn, pieces in enumerate(buckets.plan(tensors, self._bucket_bytes)):
            if len(flying) == _IN_FLIGHT:
                self._land(lane, *flying.popleft(), flat, seconds)
            bucket = buckets.fill(self._bucket(turn % _IN_FLIGHT), pieces, flat)
            flying.append((self._post_reduce(lane, bucket, op, seconds), bucket, pieces))
        while flying:
            self._land(lane, *flying.popleft(), flat, seconds)
        for tensor, view in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.detach().copy_(view.view(tensor.shape))

    def check_equal(self, values: Mapping[str, int], *, deadline_s: float | None = None) -> None:
        """Makes sure that all cells hold the same integers (64 bits), under the same names in the same order.

        Raises:
            Disagreement: names each value that differs, with the smallest and the largest.
            Aborted, PeerLost, DeadlinePassed, GroupUnusable
        """
        lane = self._ready()
        if lane is None or not values:
            return
        numbers = [_fingerprint("\0".join(values)), *values.values()]
        (low, high), *ranges = self._ranges(lane, numbers, deadline_s or self.timeouts.collective_s)
        if low != high:
            raise Disagreement(f"{self.role}: the cells compare different things; here: {', '.join(values)}")
        differing = [
            f"{name} is {values[name]} here and {low} to {high} over all cells"
            for name, (low, high) in zip(values, ranges, strict=True)
            if low != high
        ]
        if differing:
            raise Disagreement(f"{self.role}, quorum {self.quorum_id}: " + "; ".join(differing))

    def post_send(self, tensor: Tensor, peer: int, tag: int = 0) -> Job:
        """Queues a send to cell rank `peer`. `tensor` (contiguous, on `device`) must not be changed before `finish`;
        what a failed operation still reads nobody uses."""
        lane, group = self._point_to_point(peer)
        limit = timedelta(seconds=self.timeouts.transfer_stall_s + _GRACE_S)
        return lane.submit(f"sending to cell rank {peer}", lambda: group.send([tensor], peer, tag).wait(limit))

    def post_recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Job:
        """Queues a receive into `tensor`. After a failure it must be thrown away: it may still be written to."""
        lane, group = self._point_to_point(peer)
        limit = timedelta(seconds=self.timeouts.transfer_stall_s + _GRACE_S)
        return lane.submit(f"receiving from cell rank {peer}", lambda: group.recv([tensor], peer, tag).wait(limit))

    def finish(self, job: Job, deadline_s: float) -> None:
        """Waits for a posted send or receive. Raises Aborted, PeerLost, DeadlinePassed, GroupUnusable."""
        lane = self._ready()
        if lane is None:
            raise GroupUnusable(f"{self.role}: a quorum of one cell has nobody to exchange with")
        self._wait(lane, job, deadline_s)
        self._tick()

    def abort(self, reason: str, *, through: int | None = None) -> None:
        """Ends whatever is in flight, from any thread; returns at once. The group is unusable until it is configured
        for a later quorum.

        through: newest quorum that is to be aborted. A group of a later quorum is not touched, and a `configure` for
        `through` or older that has not begun yet will fail. None: the present quorum.
        """
        with self._lock:
            limit = self._key[0] if through is None else through
            self._aborted_through = max(self._aborted_through, limit)
            if self._key[0] <= limit:
                error = Aborted(f"{self.role}, quorum {self._key[0]}: aborted: {reason}")
                if self._lane is not None:
                    self._lane.fail(error)
                elif self.world == 1 and self._alone_error is None:
                    self._alone_error = error

    def close(self) -> None:
        """Leaves the group for good. Safe to call again."""
        with self._lock:
            self._leave("closed")
            self.world = 0

    def _leave(self, why: str) -> None:
        if self._lane is not None:
            self._lane.fail(GroupUnusable(f"{self.role}, quorum {self._key[0]}: {why}"))
        self._lane, self._group, self._alone_error = None, None, None
        # An operation that was left behind may still write to the old buckets.
        self._buckets = []

    def _new_group(self) -> ProcessGroupWrapper:
        limit = timedelta(seconds=self.timeouts.configure_s)
        return ProcessGroupNCCL(limit) if self.backend == "nccl" else _BoundGloo(self._host, limit)

    def _ready(self) -> Lane | None:
        """The lane, or None for a quorum of one."""
        if self.world == 0:
            raise GroupUnusable(f"{self.role} rank {self.megatron_rank}: no quorum was configured")
        if self._lane is not None:
            self._lane.check()
        elif self._alone_error is not None:
            raise type(self._alone_error)(str(self._alone_error)) from self._alone_error
        return self._lane

    def _point_to_point(self, peer: int) -> tuple[Lane, ProcessGroupWrapper]:
        lane = self._ready()
        if lane is None or self._group is None or not 0 <= peer < self.world or peer == self.rank:
            raise ValueError(f"cell rank {peer} is no peer of rank {self.rank} in a quorum of {self.world}")
        return lane, self._group

    def _bucket(self, which: int) -> Tensor:
        if len(self._buckets) <= which:
            self._buckets.append(torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self.device))
        return self._buckets[which]

    def _post_reduce(self, lane: Lane, bucket: Tensor, op: str, seconds: float) -> Job:
        group = self._group
        options = AllreduceOptions()
        options.reduceOp = _OPERATIONS[op]  # type: ignore[assignment]
        options.timeout = limit = timedelta(seconds=seconds + _GRACE_S)

        def reduce() -> None:
            assert group is not None
            group.allreduce([bucket], options).wait(limit)
            if (error := group.errored()) is not None:
                raise error

        return lane.submit(f"all-reduce ({op}) of {bucket.numel()} elements", reduce)

    def _land(
        self,
        lane: Lane,
        job: Job,
        bucket: Tensor,
        pieces: list[buckets.Piece],
        flat: Sequence[Tensor],
        seconds: float,
    ) -> None:
        self._wait(lane, job, seconds)
        buckets.empty(bucket, pieces, flat)
        self._tick()

    def _check_alike(self, lane: Lane, tensors: Sequence[Tensor], op: str, seconds: float) -> None:
        signature = (op, *((tensor.dtype, tuple(tensor.shape)) for tensor in tensors))
        if signature in self._seen:
            return
        ((low, high),) = self._ranges(lane, [_fingerprint(repr(signature))], seconds)
        if low != high:
            shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors[:8])
            more = f", … ({len(tensors)} tensors)" if len(tensors) > 8 else ""
            raise Disagreement(f"{self.role}: the cells reduce different tensors; here {op} of {shapes}{more}")
        self._seen.add(signature)

    def _ranges(self, lane: Lane, numbers: Sequence[int], seconds: float) -> list[tuple[int, int]]:
        """(smallest, largest) of each number over all cells."""
        # The maxima of x and of -1 - x (which, unlike -x, cannot overflow) tell both in one collective.
        both = torch.tensor([*numbers, *(-1 - number for number in numbers)], dtype=torch.int64, device=self.device)
        self._wait(lane, self._post_reduce(lane, both, "max", seconds), seconds)
        found = both.tolist()
        return [(-1 - low, high) for high, low in zip(found[: len(numbers)], found[len(numbers) :], strict=True)]

    def _wait(self, lane: Lane, job: Job, seconds: float) -> Any:
        self.waiting = True
        try:
            return lane.wait(job, seconds)
        finally:
            self.waiting = False

    def _tick(self) -> None:
        if self._progress is not None:
            self._progress()


def _fingerprint(text: str) -> int:
    """63 bits that are the same in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
