"""Faults injected on purpose, each a line `MOMENT:HOW:SIDE:CELL@ROLLOUT`, and whether the run noticed them.

A fault of a worker's moment is armed in the cell's processes when its rollout begins and breaks them when they come to
that moment; one of the driver's moments breaks them while the driver stands there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rollout.faults import HOWS
from trainer_hooks.cells.event_log import Event, EventLog
from trainer_hooks.cells.events import SIDES

#: Moments of a trainer cell's ranks, in the order of an iteration.
TRAINER_MOMENTS = (
    "forward",
    "backward",
    "before_reduce",
    "in_reduce",
    "after_reduce",
    "before_vote",
    "before_step",
    "after_step",
    "refit",
    "checkpoint",
    "heal_source",
    "heal_destination",
)
#: Moments of a rollout cell's leader.
ROLLOUT_MOMENTS = ("generate", "refit_reshard", "refit_shared")
#: Moments at which the driver breaks a cell of either side.
DRIVER_MOMENTS = ("idle", "convert", "split")
#: An exception there is the vote 'discard': nobody dies of it.
_VOTED = ("forward", "backward", "before_reduce", "in_reduce", "after_reduce", "before_vote")
#: An exception there fails one refit, heal or checkpoint: nobody dies of it.
_REPORTED = ("refit", "refit_reshard", "refit_shared", "heal_source", "heal_destination")
_LINE = re.compile(r"(?P<moment>\w+):(?P<how>\w+):(?P<side>trainer|rollout):(?P<cell>\d+)@(?P<rollout>-?\d+)")


@dataclass(frozen=True)
class Fault:
    """rollout: the one in which it happens. A heal_destination breaks the cell's next replacement."""

    moment: str
    how: str
    side: str
    cell: int
    rollout: int

    @property
    def kills(self) -> bool:
        return self.how != "exception" or self.moment not in (*_VOTED, *_REPORTED)

    def __str__(self) -> str:
        return f"{self.moment}:{self.how}:{self.side}:{self.cell}@{self.rollout}"


def parse_fault(text: str) -> Fault:
    """Raises ValueError saying what a fault looks like and what is wrong with this one."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no fault: MOMENT:HOW:SIDE:CELL@ROLLOUT, as before_vote:SIGKILL:trainer:0@1")
    fault = Fault(match["moment"], match["how"], match["side"], int(match["cell"]), int(match["rollout"]))
    moments = (*(TRAINER_MOMENTS if fault.side == SIDES[0] else ROLLOUT_MOMENTS), *DRIVER_MOMENTS)
    problems = []
    if fault.moment not in moments:
        problems.append(f"moments of a {fault.side} cell are {', '.join(moments)}, not {fault.moment}")
    if fault.how not in HOWS:
        problems.append(f"how is one of {', '.join(HOWS)}, not {fault.how}")
    if fault.how == "exception" and fault.moment in DRIVER_MOMENTS:
        problems.append(f"nothing can raise an exception in a cell at {fault.moment}")
    if problems:
        raise ValueError(f"fault {text!r}: {'; '.join(problems)}")
    return fault


class FaultPlan:
    """actors(side, cell): the processes of a cell that is there, [] if none. log: gets fault_injected and, when the
    run's own events show that it noticed, fault_observed."""

    def __init__(self, faults: Sequence[Fault], actors: Callable[[str, int], Sequence[Any]], log: EventLog) -> None:
        self.faults = list(faults)
        self._actors = actors
        self._log = log
        self._rollout = 0
        self._injected: dict[str, tuple[Fault, float]] = {}
        self._observed: set[str] = set()
        log.listeners.append(self.observe)

    def begin(self, rollout_id: int) -> None:
        """Arm what is to happen in this rollout."""
        self._rollout = rollout_id
        for fault in self._due():
            if fault.moment not in (*DRIVER_MOMENTS, "heal_destination"):
                self.inject(fault)

    def point(self, moment: str) -> None:
        """The driver is at `moment`."""
        for fault in self._due():
            if fault.moment == moment:
                self.inject(fault, "now")

    def started(self, cell: int) -> None:
        """A replacement of a trainer cell is up and waits for its state."""
        for fault in self._due():
            if fault.moment == "heal_destination" and fault.cell == cell:
                self.inject(fault)

    def _due(self) -> list[Fault]:
        return [f for f in self.faults if f.rollout == self._rollout and str(f) not in self._injected]

    def inject(self, fault: Fault, moment: str | None = None) -> None:
        """Break the cell now or, armed, at the fault's own moment.

        A cell that is down already cannot be broken: nothing is written, and who expects the fault misses it."""
        actors = self._actors(fault.side, fault.cell)
        if not actors:
            return
        event = self._log.append(
            "fault_injected",
            fault=str(fault),
            side=fault.side,
            cell=fault.cell,
            how=fault.how,
            kills=fault.kills,
            moment=fault.moment,
        )
        self._injected[str(fault)] = (fault, event.time)
        # one rank is enough: the cell is one failure unit; a rollout cell's moments are its leader's
        target = actors[-1] if fault.side == SIDES[0] else actors[0]
        target.arm_fault.remote(moment or fault.moment, fault.how)

    def observe(self, event: Event) -> None:
        """An event of the run: does it show that a fault was noticed?"""
        for name, (fault, when) in list(self._injected.items()):
            if name not in self._observed and _shows(event, fault):
                self._observed.add(name)
                self._log.append("fault_observed", fault=name, seconds=event.time - when)


def _shows(event: Event, fault: Fault) -> bool:
    if fault.kills:
        return event.kind == "cell_dead" and (event["side"], event["cell"]) == (fault.side, fault.cell)
    if event.kind not in ("vote", "refit", "heal_failed"):
        return False
    return "InjectedFault" in str(event.get("cause", ""))
