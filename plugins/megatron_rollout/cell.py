"""One rollout cell as its owner sees it: a few Ray actors, one of which (the leader) takes the requests."""

from __future__ import annotations

import contextlib
import os
import signal
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
        self.pids = get([a.pid.remote() for a in self.actors], timeout_s)
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


def kill_actors(actors: Sequence[Any], pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """End actors for good. On this node the processes are reaped before this returns; elsewhere Ray kills them."""
    import ray

    for actor in actors:
        ray.kill(actor, no_restart=True)
    wait_until_gone([p for p in pids if _is_worker(p)], timeout_s)


def _is_worker(pid: int) -> bool:
    """Whether the process on this node with that id is a Ray worker (the actor may live on another node)."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"ray::")
    except OSError:
        return False


def wait_until_gone(pids: Sequence[int], timeout_s: float) -> None:
    """SIGKILL the processes and wait. Raises TimeoutError with those that are left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = [pid for pid in left if _running(pid)]
        if left and time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} are still there {timeout_s} s after SIGKILL")
        if left:
            time.sleep(0.02)


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


MakeActors = Callable[[int], Sequence[Any]]
