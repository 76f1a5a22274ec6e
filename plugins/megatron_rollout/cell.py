"""One rollout cell as its owner sees it: a few Ray actors, one of which (the leader) takes the requests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rollout.cell_types import CellFailed, CellStatus, RolloutSpec
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta


class CellDead(RuntimeError):
    """The cell's leader is gone or does not answer; the message names the cell and why."""


class RolloutCell:
    """`index`: among the rollout cells. `actors`: one handle a rank, rank 0 the leader."""

    def __init__(self, index: int, actors: Sequence[Any]) -> None:
        self.index = index
        self.actors = list(actors)
        self.pids: list[int] = []

    @property
    def leader(self) -> Any:
        return self.actors[0]

    def start(self, spec: RolloutSpec, *, timeout_s: float, seed: int = 1) -> None:
        """Build the cell's world, models and engines.

        Raises TimeoutError after `timeout_s`, else what a rank raised.
        """
        start_cell(self.actors, timeout_s=timeout_s)
        self.pids = local_pids(get([a.identity.remote() for a in self.actors], timeout_s))
        get(
            [a.start_rollout.remote(spec, cell=self.index, timeout_s=timeout_s, seed=seed) for a in self.actors],
            timeout_s,
        )

    def submit(self, requests: list[GenerationRequest], *, stream: bool = False) -> None:
        """Hand samples to the leader; does not wait."""
        self.leader.submit.remote(requests, stream)

    def collect(self, max_wait_s: float, timeout_s: float) -> list[GenerationOutput | TokenDelta | CellFailed]:
        """What came since the last call. Raises CellDead if the leader is gone or silent for `timeout_s`."""
        return self._ask(self.leader.collect.remote(max_wait_s), timeout_s)

    def call(self, command: str, /, *, deadline_s: float, **arguments: Any) -> Any:
        """Execute a command on every rank; returns the leader's result."""
        return self._ask(self.leader.call.remote(command, deadline_s, **arguments), deadline_s + 5)

    def call_async(self, command: str, /, *, deadline_s: float, **arguments: Any) -> Any:
        """As `call`, as a Ray reference: the way to have several cells at it at once."""
        return self.leader.call.remote(command, deadline_s, **arguments)

    def abort(self, request_ids: list[str] | None = None) -> None:
        self.leader.abort.remote(request_ids)

    def status(self, timeout_s: float = 10.0) -> CellStatus:
        return self._ask(self.leader.status.remote(), timeout_s)

    def _ask(self, reference: Any, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise CellDead(f"rollout cell {self.index} did not answer within {timeout_s} s") from error
        except ray.exceptions.RayActorError as error:
            raise CellDead(f"rollout cell {self.index} died: {_cause(error)}") from error

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL every rank and wait until they are gone (a process that was only stopped is gone too, then)."""
        kill_actors(self.actors, self.pids, timeout_s)


def _cause(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def get(references: list[Any], timeout_s: float) -> list[Any]:
    """`ray.get` with a deadline and the remote error itself, not Ray's wrapping of it."""
    import ray

    try:
        return ray.get(references, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"{len(references)} actors did not answer within {timeout_s} s") from error
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from error


def start_cell(actors: Sequence[Any], *, timeout_s: float) -> None:
    """Let the actors of one cell meet in a world of their own; rank 0 serves its store."""
    host, port = get([actors[0].serve_world_store.remote(timeout_s)], timeout_s)[0]
    get([a.join_world.remote(host, port, i, len(actors), timeout_s) for i, a in enumerate(actors)], timeout_s)


def local_pids(identities: Sequence[tuple[str, int]]) -> list[int]:
    """The process ids among (host name, process id) that are of this host."""
    here = socket.gethostname()
    return [pid for host, pid in identities if host == here]


def kill_actors(actors: Sequence[Any], pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """End actors for good, with the processes that they started. pids: of those on this host; they are gone before this
    returns. Elsewhere Ray kills them. Raises TimeoutError with what is left after `timeout_s`."""
    import ray

    for actor in actors:
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + timeout_s
    while left := [one for pid in pids for one in _family(pid)]:
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} are still there {timeout_s} s after SIGKILL")
        time.sleep(0.02)


def _family(worker: int) -> list[int]:
    """Live processes of the group that a worker leads (see `RolloutWorker`), whether or not it lives itself."""
    leader = _stat(worker)
    if leader is not None and not _is_worker(worker):
        return []  # the number was given to somebody else since
    members = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in members if (stat := _stat(pid)) is not None and (pid == worker or stat[1] == worker)]


def _is_worker(pid: int) -> bool:
    """Whether the process is a Ray worker."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"ray::")
    except OSError:
        return False


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, process group) of a process, None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else (fields[0], int(fields[2]))


MakeActors = Callable[[int], Sequence[Any]]
