"""Finds dead and hanging cells. Pure: beats come in, verdicts come out, the clock is injected.

Two things are watched, because neither is enough: *liveness* (a beat in time; a stopped process sends none) and
*progress* (a cell that beats but whose step counter does not move while it says it is working hangs, and a hang is
treated as a death: one of its ranks may have been stopped, or its collective may never end).

A cell that waits for other cells (in a cross-cell collective, or for the arbiter) is not blamed for standing still: the
one it waits for is. The watcher's own pauses are not held against the cells either: a check counts one miss at most and
at most two beat intervals of standing still, however long ago the check before it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from trainer_hooks.cells.timeouts import CellTimeouts


class Activity(Enum):
    IDLE = "idle"
    WORKING = "working"
    WAITING = "waiting"


@dataclass(frozen=True)
class Beat:
    """What a cell says each `heartbeat_s`. counter: moves with every piece of work done (micro-batch, bucket, chunk).
    phase: names what it is doing, for messages and for deadlines of its own."""

    cell: int
    incarnation: int
    counter: int
    activity: Activity = Activity.WORKING
    phase: str = ""


class Finding(Enum):
    SUSPECT = "suspect"
    RECOVERED = "recovered"
    NEVER_STARTED = "never_started"
    NO_HEARTBEAT = "no_heartbeat"
    HANG = "hang"


@dataclass(frozen=True)
class Verdict:
    cell: int
    incarnation: int
    finding: Finding
    detail: str

    @property
    def fatal(self) -> bool:
        return self.finding not in (Finding.SUSPECT, Finding.RECOVERED)


@dataclass
class _Watched:
    incarnation: int
    last: Beat | None = None
    beats: int = 0
    beats_at_check: int = 0
    misses: int = 0
    silent_s: float = 0.0
    still_s: float = 0.0
    suspect: bool = False


class Watchdog:
    """Call `beat` for every heartbeat and `check` each `heartbeat_s` seconds (more often does no harm).

    phase_deadlines: seconds for phases that may take longer (or must be faster) than `timeouts.progress_s`.
    """

    def __init__(
        self,
        timeouts: CellTimeouts,
        *,
        phase_deadlines: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeouts = timeouts
        self._deadlines = dict(phase_deadlines or {})
        self._clock = clock
        self._watched: dict[int, _Watched] = {}
        self._checked = clock()

    def watch(self, cell: int, incarnation: int) -> None:
        """A process was started. Watching the same incarnation again changes nothing: no second grace period."""
        watched = self._watched.get(cell)
        if watched is None or incarnation > watched.incarnation:
            self._watched[cell] = _Watched(incarnation)

    def forget(self, cell: int) -> None:
        """Its death is known, or it was stopped on purpose."""
        self._watched.pop(cell, None)

    def beat(self, beat: Beat) -> bool:
        """False (and nothing changes) for a cell or an incarnation that is not watched."""
        watched = self._watched.get(beat.cell)
        if watched is None or beat.incarnation != watched.incarnation:
            return False
        last = watched.last
        moved = last is None or (beat.counter, beat.phase) != (last.counter, last.phase)
        if moved or beat.activity is not Activity.WORKING or last is None or last.activity is not Activity.WORKING:
            watched.still_s = 0.0
        watched.last = beat
        watched.beats += 1
        return True

    def check(self) -> list[Verdict]:
        """What became of the watched cells since the last check. Cells with a fatal verdict are not watched any more.

        Less than one `heartbeat_s` after the check before it, it does nothing.
        """
        interval = self._timeouts.heartbeat_s
        now = self._clock()
        elapsed = now - self._checked
        if elapsed < interval:
            return []
        self._checked = now
        counted = min(elapsed, 2 * interval)
        verdicts = []
        for cell, watched in sorted(self._watched.items()):
            verdict = self._judge(cell, watched, counted)
            if verdict is not None:
                verdicts.append(verdict)
                if verdict.fatal:
                    del self._watched[cell]
        return verdicts

    def _judge(self, cell: int, watched: _Watched, counted: float) -> Verdict | None:
        def verdict(finding: Finding, detail: str) -> Verdict:
            return Verdict(cell, watched.incarnation, finding, f"cell {cell}: {detail}")

        heard = watched.beats != watched.beats_at_check
        watched.beats_at_check = watched.beats
        last = watched.last
        if last is None:
            watched.silent_s += counted
            if watched.silent_s > self._timeouts.start_s:
                return verdict(Finding.NEVER_STARTED, f"no heartbeat within {self._timeouts.start_s:g} s of its start")
            return None
        if last.activity is Activity.WORKING:
            watched.still_s += counted
            limit = self._deadlines.get(last.phase, self._timeouts.progress_s)
            if watched.still_s > limit:
                where = f" in phase {last.phase!r}" if last.phase else ""
                return verdict(Finding.HANG, f"no progress{where} beyond {last.counter} within {limit:g} s")
        if not heard:
            watched.misses += 1
            if watched.misses >= self._timeouts.heartbeat_misses:
                return verdict(Finding.NO_HEARTBEAT, f"{watched.misses} heartbeats in a row were missed")
            if not watched.suspect:
                watched.suspect = True
                return verdict(Finding.SUSPECT, f"{watched.misses} heartbeat missed")
            return None
        watched.misses = 0
        if watched.suspect:
            watched.suspect = False
            return verdict(Finding.RECOVERED, "heartbeats again")
        return None
