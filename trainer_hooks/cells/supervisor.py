"""The states of one train group's cells while the run lasts: who trains, who is being replaced, and by what.

Deaths come from any thread; replacements are started by threads of their own. One lock guards the states; `changed`
tells whoever waits for a replacement. What a replacement needs beyond its start (a heal) is the loop's affair.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from trainer_hooks.cells.deaths import first_line
from trainer_hooks.cells.event_log import EventLog
from trainer_hooks.cells.state import (
    Alive,
    CellEvent,
    Dead,
    DeathCause,
    DeathKind,
    Died,
    GivenUp,
    Healed,
    Healing,
    Launch,
    Pending,
    Reaped,
    RestartPolicy,
    Resume,
    SourceLost,
    Started,
    Starting,
    Stepped,
    Stopped,
    Suspect,
    Suspend,
    TrainerCell,
    transition,
)

logger = logging.getLogger(__name__)


class Supervisor:
    """start(cell, incarnation): makes the cell's processes and builds what they train; it returns when they wait for
    their state, or cleans up and raises. policy: of restarts; None: a dead cell stays dead. step(): the present
    rollout, for the restart budget."""

    def __init__(
        self,
        role: str,
        cells: Iterable[int],
        start: Callable[[int, int], None],
        *,
        policy: RestartPolicy | None,
        step: Callable[[], int],
        log: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._start = start
        self._replaces = policy is not None
        self._policy = policy or RestartPolicy(max_restarts=0)
        self._step = step
        self._log = log
        self._clock = clock
        self._closed = False
        self._cells = {index: TrainerCell(index) for index in cells}

    # -- what is -------------------------------------------------------------------------------------------------

    def cell(self, index: int) -> TrainerCell:
        """Raises KeyError for a cell that is not configured."""
        with self.lock:
            if index not in self._cells:
                raise KeyError(f"{self.role} has no cell {index}; its cells are {sorted(self._cells)}")
            return self._cells[index]

    def snapshot(self) -> list[TrainerCell]:
        with self.lock:
            return list(self._cells.values())

    def training(self) -> list[int]:
        """Cells that belong in the next quorum."""
        return [c.index for c in self.snapshot() if c.trains]

    def waiting_for_state(self) -> list[int]:
        """Replacements that are up and hold no state of the run yet."""
        return [c.index for c in self.snapshot() if isinstance(c.state, Healing)]

    def coming(self) -> list[int]:
        """Cells that will be up again without anybody's help: dead, pending or starting."""
        if not self._replaces:
            return []
        return [c.index for c in self.snapshot() if isinstance(c.state, Dead | Pending | Starting)]

    # -- what happens --------------------------------------------------------------------------------------------

    def apply(self, index: int, event: CellEvent) -> TrainerCell:
        """The cell after `event`. Raises IllegalTransition."""
        with self.lock:
            before = self.cell(index)
            after = self._cells[index] = transition(before, event, self._policy)
            if after is not before:
                self.changed.notify_all()
                if isinstance(after.state, GivenUp):
                    logger.warning("%s cell %d is given up: %s", self.role, index, after.state.cause)
                    cause = str(after.state.cause)
                    self._note("cell_given_up", after, cause=cause)
            return after

    def died(self, index: int, incarnation: int, cause: DeathCause) -> bool:
        """Declare a cell dead. False if that is old news; else the caller fences it and then calls `reaped`."""
        with self.lock:
            before = self.cell(index)
            if not before.has_process or isinstance(before.state, Dead) or before.incarnation != incarnation:
                return False
            self.apply(index, Died(incarnation, cause))
            self._note("cell_dead", before, cause=cause.kind.value, detail=cause.detail)
            return True

    def suspend(self, index: int) -> bool:
        """An operator takes the cell out. True: it has processes, which the caller fences before it calls `reaped`."""
        with self.lock:
            before = self.cell(index)
            after = self.apply(index, Suspend())
            self._note("cell_suspended", after)
            return before.has_process and not isinstance(before.state, Dead)

    def resume(self, index: int) -> None:
        with self.lock:
            self._note("cell_resumed", self.apply(index, Resume(self._clock())))
        self.launch_due()

    def reaped(self, index: int, incarnation: int) -> None:
        """Its processes are gone for certain."""
        self.apply(index, Reaped(incarnation, self._step(), self._clock()))

    def healed(self, index: int, incarnation: int) -> None:
        self.apply(index, Healed(incarnation))

    def source_lost(self, index: int, incarnation: int) -> None:
        self.apply(index, SourceLost(incarnation, None))

    def stepped(self, index: int, incarnation: int) -> None:
        self.apply(index, Stepped(incarnation))

    # -- starting ------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """The first start, side by side. Raises the first failure, after all have ended."""
        errors: list[BaseException] = []

        def one(index: int, incarnation: int) -> None:
            try:
                self._bring_up(index, incarnation)
            except BaseException as error:  # raised below, in the caller's thread
                errors.append(error)

        threads = []
        for cell in self.snapshot():
            incarnation = self.apply(cell.index, Launch()).incarnation
            threads.append(threading.Thread(target=one, args=(cell.index, incarnation), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def launch_due(self) -> None:
        """Start a replacement, in a thread of its own, for every cell whose backoff is over."""
        with self.lock:
            if self._closed or not self._replaces:
                return
            now = self._clock()
            due = [c for c in self._cells.values() if isinstance(c.state, Pending) and c.state.not_before <= now]
            for cell in due:
                launched = self.apply(cell.index, Launch())
                self._note("cell_restarted", launched)
                threading.Thread(
                    target=self._replace,
                    args=(launched.index, launched.incarnation),
                    name=f"start-{self.role}-{launched.index}",
                    daemon=True,
                ).start()

    def _replace(self, index: int, incarnation: int) -> None:
        try:
            self._bring_up(index, incarnation)
        except Exception as error:  # its processes are gone; the policy decides what comes next
            if self._closed:
                return
            logger.warning("the replacement of %s cell %d did not start: %s", self.role, index, first_line(error))
            if self.died(index, incarnation, DeathCause(DeathKind.NEVER_STARTED, first_line(error))):
                self.reaped(index, incarnation)

    def _bring_up(self, index: int, incarnation: int) -> None:
        self._start(index, incarnation)
        self.apply(index, Started(incarnation))

    def close(self) -> None:
        """No replacement is started any more."""
        with self.lock:
            self._closed = True
            self.changed.notify_all()

    def _note(self, kind: str, cell: TrainerCell, **fields: Any) -> None:
        if self._log is not None:
            self._log.append(
                kind, side="trainer", cell=cell.index, incarnation=cell.incarnation, role=self.role, **fields
            )


def describe(cell: TrainerCell) -> str:
    """The state's name for people: "alive", "given up", …"""
    names = {Alive: "alive", Suspect: "suspect", GivenUp: "given up", Stopped: "suspended"}
    return names.get(type(cell.state), type(cell.state).__name__.lower())
