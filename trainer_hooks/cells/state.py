"""The states of one trainer cell: a frozen class each, and one pure function that makes the transitions.

    Pending --Launch--> Starting --Started--> Healing --Healed--> Alive <--BeatOk-- Suspect
       ^                    |                    |                  |  --BeatMissed-->  |
       |                    +---------- Died ----+------- Died -----+------ Died -------+
       |                                         v
       +----------- Reaped (budget left) ----- Dead --Reaped (budget spent)--> GivenUp
       |                                         |
       +---------------- Resume -------------- Stopped (Suspend, then Reaped)

The transition that does not exist: only `Healed` leads into {Alive, Suspect}. A heartbeat or a probe never makes a Dead
cell alive again, nor a Starting one: only a completed heal proves that it holds the state that the others hold. (The
first start is a heal too; its source is the initial weights or a checkpoint, `source=None`.) And a cell leaves Dead by
`Reaped` alone: until the kernel has confirmed the death, the process may merely be stopped.

Events carry the incarnation they speak of. One that speaks of another process than the present one changes nothing:
late news of a fenced process is not news.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from megatron_rollout.health import IllegalTransition, RestartLedger, RestartPolicy

__all__ = ["CellState", "IllegalTransition", "RestartLedger", "RestartPolicy", "TrainerCell", "transition"]


class DeathKind(Enum):
    EXIT = "exit"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    EXCEPTION = "exception"
    NO_HEARTBEAT = "no_heartbeat"
    HANG = "hang"
    NEVER_STARTED = "never_started"
    NODE_LOST = "node_lost"
    FAILED_HEAL = "failed_heal"
    FAILED_COMMIT = "failed_commit"


@dataclass(frozen=True)
class DeathCause:
    kind: DeathKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}" if self.detail else self.kind.value


@dataclass(frozen=True)
class Pending:
    """No process. It may be launched from `not_before` (seconds of the caller's clock) on."""

    not_before: float = 0.0


@dataclass(frozen=True)
class Starting:
    """The process starts: imports, model construction. It holds no state of the run."""


@dataclass(frozen=True)
class Healing:
    """It receives its state from cell `source` (None: initial weights or a checkpoint)."""

    source: int | None = None


@dataclass(frozen=True)
class Alive:
    """It holds the run's state and is a member of the next quorum."""


@dataclass(frozen=True)
class Suspect:
    """As Alive, but `misses` heartbeats in a row are missing."""

    misses: int = 1


@dataclass(frozen=True)
class Dead:
    """Declared dead and killed, the death not confirmed yet. suspended: on purpose, by an operator."""

    cause: DeathCause | None
    suspended: bool = False


@dataclass(frozen=True)
class Stopped:
    """Suspended by an operator; no process."""


@dataclass(frozen=True)
class GivenUp:
    """Its restart budget is spent; no process. The run goes on without it."""

    cause: DeathCause | None


CellState = Pending | Starting | Healing | Alive | Suspect | Dead | Stopped | GivenUp


@dataclass(frozen=True)
class TrainerCell:
    """One cell: its state, the incarnation of its present (or last) process, and its restarts."""

    index: int
    state: CellState = Pending()
    incarnation: int = 0
    ledger: RestartLedger = RestartLedger()

    @property
    def trains(self) -> bool:
        """Whether it belongs in the next quorum."""
        return isinstance(self.state, Alive | Suspect)

    @property
    def has_process(self) -> bool:
        return isinstance(self.state, Starting | Healing | Alive | Suspect | Dead)


# Events.


@dataclass(frozen=True)
class Launch:
    """A process is started. The resulting cell's `incarnation` is the one that the process must report under."""


@dataclass(frozen=True)
class Started:
    incarnation: int
    source: int | None = None


@dataclass(frozen=True)
class SourceLost:
    """The peer that served the heal died; another one takes over."""

    incarnation: int
    source: int | None


@dataclass(frozen=True)
class Healed:
    incarnation: int


@dataclass(frozen=True)
class BeatMissed:
    incarnation: int


@dataclass(frozen=True)
class BeatOk:
    incarnation: int


@dataclass(frozen=True)
class Stepped:
    """It finished an optimizer step: its restarts so far were worth it."""

    incarnation: int


@dataclass(frozen=True)
class Died:
    incarnation: int
    cause: DeathCause


@dataclass(frozen=True)
class Suspend:
    """An operator takes the cell out. Its process is killed like a dead one's, without a mark on its budget."""


@dataclass(frozen=True)
class Reaped:
    """The process is gone for certain. step: present rollout step; now: present time, for the backoff."""

    incarnation: int
    step: int
    now: float


@dataclass(frozen=True)
class Resume:
    """An operator puts a Stopped or GivenUp cell back, with a fresh budget."""

    now: float


CellEvent = Launch | Started | SourceLost | Healed | BeatMissed | BeatOk | Stepped | Died | Suspend | Reaped | Resume


def transition(cell: TrainerCell, event: CellEvent, policy: RestartPolicy) -> TrainerCell:
    """The cell after `event`. Returns `cell` itself where the event is old news (see the module docstring).

    Raises:
        IllegalTransition: an order that this state does not allow; names cell, state and event.
    """
    if getattr(event, "incarnation", cell.incarnation) != cell.incarnation:
        return cell
    match cell.state, event:
        case Pending(), Launch():
            return replace(cell, state=Starting(), incarnation=cell.incarnation + 1)
        case Starting(), Started(source=source):
            return replace(cell, state=Healing(source))
        case Healing(), SourceLost(source=source):
            return replace(cell, state=Healing(source))
        case Healing(), Healed():
            return replace(cell, state=Alive())
        case Alive(), BeatMissed():
            return replace(cell, state=Suspect(1))
        case Suspect(misses), BeatMissed():
            return replace(cell, state=Suspect(misses + 1))
        case Suspect(), BeatOk():
            return replace(cell, state=Alive())
        case ((Alive() | Suspect()), Stepped()):
            return replace(cell, ledger=cell.ledger.succeeded())
        case ((Starting() | Healing() | Alive() | Suspect()), Died(cause=cause)):
            return replace(cell, state=Dead(cause))
        case ((Starting() | Healing() | Alive() | Suspect()), Suspend()):
            return replace(cell, state=Dead(None, suspended=True))
        case Dead(cause, suspended=False), Suspend():
            return replace(cell, state=Dead(cause, suspended=True))
        case Pending(), Suspend():
            return replace(cell, state=Stopped())
        case Dead(suspended=True), Reaped():
            return replace(cell, state=Stopped())
        case Dead(cause), Reaped(step=step, now=now):
            if not cell.ledger.allows(policy, step):
                return replace(cell, state=GivenUp(cause))
            state = Pending(not_before=now + cell.ledger.delay_s(policy))
            return replace(cell, state=state, ledger=cell.ledger.restarted(policy, step))
        case ((Stopped() | GivenUp()), Resume(now=now)):
            return replace(cell, state=Pending(not_before=now), ledger=RestartLedger())
        # What a process may still say at any moment, and what may be said of it twice.
        case _, BeatMissed() | BeatOk() | Stepped() | Died() | Reaped():
            return cell
    name = type(cell.state).__name__
    raise IllegalTransition(f"trainer cell {cell.index} is {name}: {event} is not possible")
