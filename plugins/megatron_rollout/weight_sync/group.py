"""A process group over ranks of several worlds, for refits: every operation has a deadline, and any thread can end it.

Neither gloo nor NCCL returns from a wait because somebody wants it to, and a peer that was stopped instead of killed
closes no connection. gloo has one thing that does: a wait whose own time is up closes every connection of its group,
which ends the waits of all other threads here and of all peers. `abort` makes such a wait. NCCL is aborted as usual.
What was received into before is undefined afterwards, but nothing is written to it any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rollout.device import on_gpu
from megatron_rollout.engine.parallel import cross_world_group

#: Tag of the receive that nobody answers, see `RefitGroup.abort`.
_ABORT_TAG = 0x5EF1
_POLL_S = 0.002


class TransferFailed(RuntimeError):
    """A refit's transfer did not complete. What it was to fill is undefined."""


class TransferAborted(TransferFailed):
    """Another thread called `abort`."""


class TransferTimeout(TransferFailed, TimeoutError):
    """It was not done in time."""


class _WithDeadline:
    """gloo's work on a CPU tensor, whose wait takes a deadline. NCCL's only orders streams; see `settle`."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, seconds: float) -> None:
        self._work.wait(timedelta(seconds=seconds))


class RefitGroup:
    """This rank's end of a group of `world_size` ranks. Nothing happens before `join`.

    host, port: of a TCP store that outlives every member, or `store` itself. name: used once; the store's keys are named
    after it.
    timeout_s: for forming the group and for each operation after it, unless `within` says less. meets: whether the
    members make sure first that all are there; not where a member knows nothing of it (a trainer of another project).
    """

    def __init__(
        self,
        *,
        host: str = "",
        port: int = 0,
        name: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        store: dist.Store | None = None,
        backend: str | None = None,
        meets: bool = True,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"refit group {name}: rank {rank} is outside of {world_size} ranks")
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._where = (host, port)
        self._store = store
        self._meets = meets
        self._backend = backend or ("cpu:gloo,cuda:nccl" if on_gpu() else "gloo")
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._closed = False
        self.group: Any = None

    # -- life ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Meet the other ranks. Raises TransferTimeout, TransferAborted or TransferFailed."""
        self.within(self.timeout_s)
        host, port = self._where
        with self._explained("meeting the other ranks"):
            store = self._store or dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
            if self._meets:
                self._wait_for_all(dist.PrefixStore(self.name, store))
            group = cross_world_group(
                self._backend,
                store,
                name=self.name,
                rank=self.rank,
                world_size=self.world_size,
                timeout_s=max(1.0, self.left_s()),
            )
        with self._lock:
            self.group = group
            aborted = self._reason is not None
        if aborted:
            self._interrupt()
            self.check()

    def _wait_for_all(self, store: dist.Store) -> None:
        """Until every rank has come. gloo's own rendezvous cannot be interrupted, so nobody enters it alone."""
        store.set(f"here-{self.rank}", "1")
        keys = [f"here-{rank}" for rank in range(self.world_size)]
        while not store.check(keys):
            self.check()
            if self.left_s() <= 0:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise TransferTimeout(f"{self}: ranks {missing} did not come within {self.timeout_s:g} s")
            time.sleep(_POLL_S)

    def abort(self, reason: str) -> None:
        """End whatever is in flight, from any thread; peers get an error too. Does not wait. The first reason stays."""
        with self._lock:
            if self._reason is not None or self._closed:
                return
            self._reason = reason
            formed = self.group is not None
        if formed:
            self._interrupt()

    def _interrupt(self) -> None:
        group = self.group
        if self.world_size > 1:
            with contextlib.suppress(RuntimeError, ValueError):  # the time-out that this is for, or closed already
                peer = (self.rank + 1) % self.world_size
                group.recv([torch.zeros(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        if on_gpu():
            with contextlib.suppress(RuntimeError, AttributeError):  # no NCCL communicator was made yet
                group._get_backend(torch.device("cuda")).abort()

    def close(self) -> None:
        """Leave the group. Safe after a failure, and to call again; a group that failed is aborted first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            group, self.group = self.group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                dist.destroy_process_group(group)

    @property
    def usable(self) -> bool:
        return self.group is not None and self._reason is None

    def check(self) -> None:
        """Raises TransferAborted if it was."""
        if self._reason is not None:
            raise TransferAborted(f"{self}: aborted: {self._reason}")

    # -- time ---------------------------------------------------------------------------------------------------

    def within(self, seconds: float) -> None:
        """What follows has to be done within `seconds` from now."""
        self._deadline = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Any:
        """Turns the backend's error into one of ours; afterwards the group is of no use."""
        try:
            self.check()
            yield
        except TransferFailed as error:
            self.abort(str(error))
            raise
        except (RuntimeError, ValueError) as error:  # what c10d and gloo raise
            reason = self._reason
            late = self.left_s() <= 0
            self.abort(f"{what} failed")
            if reason is not None:
                raise TransferAborted(f"{self}: aborted while {what}: {reason}") from error
            kind = TransferTimeout if late else TransferFailed
            how = "not done in time" if late else "lost a peer"
            raise kind(f"{self}: {what}: {how}: {_first_line(error)}") from error

    # -- operations ---------------------------------------------------------------------------------------------

    def exchange(self, mine: Any) -> list[Any]:
        """Every rank's object, in rank order. Collective."""
        everyone: list[Any] = [None] * self.world_size
        with self._explained("exchanging what each rank has"):
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def post_broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> list[Any]:
        """Post the broadcast of contiguous tensors, one after the other. Collective; the result goes to `wait`."""
        with self._explained("posting"):
            works = [dist.broadcast(t, src=root, group=self.group, async_op=True) for t in tensors]
            return [work if t.is_cuda else _WithDeadline(work) for work, t in zip(works, tensors, strict=True)]

    def post(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[Any]:
        """Post (contiguous tensor, peer) both ways; what is returned goes to `wait`. Order counts, peer by peer."""
        with self._explained("posting"):
            if not any(tensor.is_cuda for tensor, _ in (*sends, *receives)):
                posted = [self.group.recv([tensor], peer, 0) for tensor, peer in receives]
                posted += [self.group.send([tensor], peer, 0) for tensor, peer in sends]
                return [_WithDeadline(work) for work in posted]
            # group ranks: there is no world in which these peers have a global one
            operations = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=peer) for t, peer in receives]
            operations += [dist.P2POp(dist.isend, t, group=self.group, group_peer=peer) for t, peer in sends]
            return dist.batch_isend_irecv(operations)

    def wait(self, posted: Sequence[Any]) -> None:
        """Until it is done; on CUDA until the current stream will see it as done (see `settle`)."""
        with self._explained("moving weights"):
            for work in posted:
                if isinstance(work, _WithDeadline):
                    work.wait(max(0.001, self.left_s()))
                else:
                    work.wait()

    def settle(self) -> None:
        """On CUDA: until everything posted has really happened. `wait` has done so on the CPU."""
        if not on_gpu():
            return
        with self._explained("moving weights"):
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                self.check()
                if self.left_s() <= 0:
                    raise TransferTimeout(f"{self}: weights were not there in time")
                time.sleep(_POLL_S / 4)

    def __str__(self) -> str:
        return f"refit group {self.name}, rank {self.rank} of {self.world_size}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
