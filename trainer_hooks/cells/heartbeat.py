"""The thread that watches cells: asks every rank for a beat, looks at processes of this host, and reports deaths.

A process of this host that is gone is seen at the next turn (`heartbeat_s`) whatever Ray knows by then; everything else
(a stopped process, a hang, another host) is the `Watchdog`'s judgement of the beats.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_hooks.cells.deaths import death_of
from trainer_hooks.cells.state import DeathCause, DeathKind
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.cells.watchdog import Activity, Beat, Finding, Verdict, Watchdog

logger = logging.getLogger(__name__)

#: (host name, process id)
Identity = tuple[str, int]
_KINDS = {
    Finding.NEVER_STARTED: DeathKind.NEVER_STARTED,
    Finding.NO_HEARTBEAT: DeathKind.NO_HEARTBEAT,
    Finding.HANG: DeathKind.HANG,
}


@dataclass
class _Target:
    cell: int
    incarnation: int
    actors: list[Any]
    identities: list[Identity]
    pending: list[Any] = field(default_factory=list)


class Heartbeats:
    """Watches cells of one side. on_dead(cell, incarnation, cause) is called once a death, from this thread, without a
    lock held. each_turn: called after every turn, too."""

    def __init__(
        self,
        timeouts: CellTimeouts,
        on_dead: Callable[[int, int, DeathCause], None],
        *,
        name: str,
        each_turn: Callable[[], None] | None = None,
        phase_deadlines: Mapping[str, float] | None = None,
    ) -> None:
        self._timeouts = timeouts
        self._on_dead = on_dead
        self._each_turn = each_turn
        self._watchdog = Watchdog(timeouts, phase_deadlines=phase_deadlines)
        self._lock = threading.Lock()
        self._targets: dict[int, _Target] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeats-{name}", daemon=True)
        self._thread.start()

    def watch(self, cell: int, incarnation: int, actors: Sequence[Any], identities: Sequence[Identity]) -> None:
        """From now on; the cell's processes have answered once."""
        with self._lock:
            self._targets[cell] = _Target(cell, incarnation, list(actors), list(identities))
            self._watchdog.watch(cell, incarnation)

    def forget(self, cell: int, incarnation: int) -> None:
        """Its death is known, or it was stopped on purpose."""
        with self._lock:
            target = self._targets.get(cell)
            if target is not None and target.incarnation == incarnation:
                del self._targets[cell]
                self._watchdog.forget(cell)

    def close(self, timeout_s: float = 10.0) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(self._timeouts.heartbeat_s):
            try:
                self._turn()
            except Exception:  # the watch must go on; what went wrong is in the log
                if self._stop.is_set():
                    return
                logger.exception("a turn of the heartbeats failed")

    def _turn(self) -> None:
        with self._lock:
            targets = list(self._targets.values())
        for target in targets:
            cause = _gone(target) or self._listen(target)
            if cause is not None:
                self._dead(target.cell, target.incarnation, cause)
        with self._lock:
            verdicts = self._watchdog.check()
        for verdict in verdicts:
            if verdict.fatal:
                self._dead(verdict.cell, verdict.incarnation, _cause(verdict))
        if self._each_turn is not None:
            self._each_turn()

    def _dead(self, cell: int, incarnation: int, cause: DeathCause) -> None:
        self.forget(cell, incarnation)
        if not self._stop.is_set():
            self._on_dead(cell, incarnation, cause)

    def _listen(self, target: _Target) -> DeathCause | None:
        """Take the ranks' last answers, ask again."""
        import ray

        if target.pending:
            done, waiting = ray.wait(target.pending, num_returns=len(target.pending), timeout=0)
            try:
                answers = [ray.get(one, timeout=self._timeouts.heartbeat_s) for one in done]
            except Exception as error:
                cause = death_of(error)
                if cause is not None and cause.kind is not DeathKind.HANG:
                    return cause
                if cause is None:
                    logger.warning("cell %d answers a heartbeat with %s", target.cell, error)
                return None
            if waiting:
                return None
            with self._lock:
                self._watchdog.beat(_beat(target, answers))
        target.pending = [actor.beat.remote() for actor in target.actors]
        return None


def _gone(target: _Target) -> DeathCause | None:
    here = socket.gethostname()
    missing = [pid for host, pid in target.identities if host == here and not _running(pid)]
    if not missing:
        return None
    return _told_by_ray(target) or DeathCause(DeathKind.EXIT, f"process {', '.join(map(str, missing))} is gone")


def _told_by_ray(target: _Target) -> DeathCause | None:
    """Ray may know why (its memory monitor kills, too)."""
    import ray

    for one in target.pending:
        try:
            ray.get(one, timeout=0.2)
        except ray.exceptions.GetTimeoutError:
            continue
        except Exception as error:
            if (cause := death_of(error)) is not None:
                return cause
    return None


def _beat(target: _Target, answers: Sequence[tuple[int, str, str]]) -> Beat:
    """The cell's beat: it works if a rank works, and it moved if a rank moved."""
    activities = {activity for _, activity, _ in answers}
    activity = next((a for a in (Activity.WORKING, Activity.WAITING) if a.value in activities), Activity.IDLE)
    return Beat(target.cell, target.incarnation, sum(n for n, _, _ in answers), activity, answers[0][2])


def _cause(verdict: Verdict) -> DeathCause:
    return DeathCause(_KINDS[verdict.finding], verdict.detail)


def _running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False
