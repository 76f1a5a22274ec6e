"""The states of rollout cells, without I/O: what a probe, a death, a restart and a refit make of them.

                  bad probes        more bad probes, or a death
        HEALTHY ------------> SUSPECT ------------------------> DEAD --(backoff)--> RESTARTING
           ^  <--good probe--                                    |                      |  process up
           |                                                     | budget spent         v
           +----------------- refit completed ------------------ | ------------------ STALE
                                                                 v
                                                             GIVEN_UP

The transition that does not exist: a probe never makes a DEAD, RESTARTING or STALE cell HEALTHY. A cell that answers is
alive; only a completed refit proves that it holds the weights that the others hold. Failures count when they are
consecutive: any good probe, and any replacement, starts from zero.

Everything a cell reports carries the *incarnation* it reports for. It grows with each restart, so that what a process
that was declared dead still says is ignored. Nothing here locks: the owner calls from one thread or holds its own lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum


class RolloutState(Enum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    GIVEN_UP = "given_up"


class IllegalTransition(RuntimeError):
    """Something was reported that this cell's state does not allow; the message names cell, state and report."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often and how fast a cell is restarted.

    max_restarts: restarts allowed within the last `window_steps` rollout steps (`--max-cell-restarts`); one more
        failure and the cell is given up. 0 never restarts.
    backoff_s, backoff_factor, backoff_max_s: the first restart after a success is immediate, the second waits
        `backoff_s` seconds, each further one `backoff_factor` times as long, `backoff_max_s` at most.
    """

    max_restarts: int = 5
    window_steps: int = 100
    backoff_s: float = 1.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 60.0

    def __post_init__(self) -> None:
        problems = []
        if self.max_restarts < 0:
            problems.append(f"max_restarts must be >= 0, got {self.max_restarts}")
        if self.window_steps < 1:
            problems.append(f"window_steps must be >= 1, got {self.window_steps}")
        if not (math.isfinite(self.backoff_s) and self.backoff_s >= 0):
            problems.append(f"backoff_s must be finite and >= 0, got {self.backoff_s}")
        if not self.backoff_factor >= 1:
            problems.append(f"backoff_factor must be >= 1, got {self.backoff_factor}")
        if not self.backoff_max_s >= self.backoff_s:
            problems.append(f"backoff_max_s ({self.backoff_max_s}) is below backoff_s ({self.backoff_s})")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class RestartLedger:
    """One cell's restarts: at which steps, and how many since it last did useful work."""

    at_steps: tuple[int, ...] = ()
    consecutive: int = 0

    def allows(self, policy: RestartPolicy, step: int) -> bool:
        return len(self._within(policy, step)) < policy.max_restarts

    def delay_s(self, policy: RestartPolicy) -> float:
        """Seconds to wait before the next restart."""
        if self.consecutive == 0:
            return 0.0
        # A bound on the exponent keeps a long series of failures from overflowing the power.
        grown = policy.backoff_s * policy.backoff_factor ** min(self.consecutive - 1, 64)
        return min(grown, policy.backoff_max_s)

    def restarted(self, policy: RestartPolicy, step: int) -> RestartLedger:
        return RestartLedger((*self._within(policy, step), step), self.consecutive + 1)

    def succeeded(self) -> RestartLedger:
        """The cell did useful work again. Restarts of the window still count against the budget."""
        return self if self.consecutive == 0 else replace(self, consecutive=0)

    def _within(self, policy: RestartPolicy, step: int) -> tuple[int, ...]:
        return tuple(at for at in self.at_steps if at > step - policy.window_steps)


@dataclass(frozen=True)
class HealthPolicy:
    """suspect_after, dead_after: consecutive failed probes until a cell is SUSPECT (gets nothing new) and DEAD."""

    suspect_after: int = 2
    dead_after: int = 3
    restarts: RestartPolicy = field(default_factory=RestartPolicy)

    def __post_init__(self) -> None:
        if not 1 <= self.suspect_after <= self.dead_after:
            raise ValueError(
                f"need 1 <= suspect_after <= dead_after, got suspect_after={self.suspect_after}, "
                f"dead_after={self.dead_after}"
            )


@dataclass(frozen=True)
class RolloutCell:
    """What is known of one cell. version: of the weights it holds, None before the first refit."""

    index: int
    state: RolloutState
    incarnation: int = 0
    failures: int = 0
    version: int | None = None
    ledger: RestartLedger = RestartLedger()
    cause: str = ""
    restart_at: float = 0.0


@dataclass(frozen=True)
class Refit:
    """One refit and who takes part: fixed when it begins, as (cell, incarnation)."""

    number: int
    version: int
    members: tuple[tuple[int, int], ...]

    @property
    def cells(self) -> tuple[int, ...]:
        return tuple(cell for cell, _ in self.members)


class FleetHealth:
    """All rollout cells of a run.

    cells: their indices. initial: HEALTHY where every cell loaded the run's first weights before it was announced,
    STALE where the first refit brings them. clock: seconds, monotonic.

    Raises:
        ValueError: no cell, or one index twice.
        KeyError: a method got a cell that is not configured.
    """

    def __init__(
        self,
        cells: Iterable[int],
        policy: HealthPolicy | None = None,
        *,
        initial: RolloutState = RolloutState.HEALTHY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        indices = list(cells)
        if not indices or len(set(indices)) != len(indices):
            raise ValueError(f"rollout cells must be distinct and at least one, got {indices}")
        if initial not in (RolloutState.HEALTHY, RolloutState.STALE):
            raise ValueError(f"a fleet starts HEALTHY or STALE, not {initial.name}")
        self.policy = policy or HealthPolicy()
        self._clock = clock
        self._cells = {index: RolloutCell(index, initial) for index in sorted(indices)}
        self._refits = 0
        self._version: int | None = None

    def cell(self, index: int) -> RolloutCell:
        if index not in self._cells:
            raise KeyError(f"rollout cell {index} is not configured; cells are {sorted(self._cells)}")
        return self._cells[index]

    def snapshot(self) -> tuple[RolloutCell, ...]:
        return tuple(self._cells.values())

    def serving(self) -> tuple[int, ...]:
        """Cells that may be given new requests. A SUSPECT cell keeps what it has and gets nothing new."""
        return tuple(i for i, cell in self._cells.items() if cell.state is RolloutState.HEALTHY)

    def probe(self, index: int, incarnation: int, *, ok: bool, cause: str = "probe failed") -> RolloutState:
        """One health probe was answered or not. Probes of another incarnation change nothing."""
        cell = self.cell(index)
        probed = (RolloutState.HEALTHY, RolloutState.SUSPECT, RolloutState.STALE)
        if incarnation != cell.incarnation or cell.state not in probed:
            return cell.state
        if ok:
            state = RolloutState.HEALTHY if cell.state is RolloutState.SUSPECT else cell.state
            return self._set(cell, state=state, failures=0).state
        failures = cell.failures + 1
        if failures >= self.policy.dead_after:
            return self._bury(cell, f"{failures} consecutive failures: {cause}")
        suspect = cell.state is not RolloutState.STALE and failures >= self.policy.suspect_after
        return self._set(cell, state=RolloutState.SUSPECT if suspect else cell.state, failures=failures).state

    def died(self, index: int, incarnation: int, cause: str) -> bool:
        """The process is known to be gone. False if it is old news (another incarnation, or dead already)."""
        cell = self.cell(index)
        if incarnation != cell.incarnation or cell.state in (RolloutState.DEAD, RolloutState.GIVEN_UP):
            return False
        self._bury(cell, cause)
        return True

    def due_for_restart(self) -> tuple[int, ...]:
        """DEAD cells whose backoff is over."""
        now = self._clock()
        return tuple(i for i, cell in self._cells.items() if cell.state is RolloutState.DEAD and now >= cell.restart_at)

    def restarting(self, index: int, step: int) -> int | None:
        """A replacement is about to be started at rollout step `step`.

        Returns the incarnation that the replacement reports under, or None: the budget is spent, the cell GIVEN_UP.

        Raises:
            IllegalTransition: the cell is not DEAD.
        """
        cell = self.cell(index)
        if cell.state is not RolloutState.DEAD:
            raise IllegalTransition(f"rollout cell {index} is {cell.state.name}: only a DEAD cell is restarted")
        restarts = self.policy.restarts
        if not cell.ledger.allows(restarts, step):
            self._set(cell, state=RolloutState.GIVEN_UP)
            return None
        replacement = RolloutCell(
            index,
            RolloutState.RESTARTING,
            incarnation=cell.incarnation + 1,
            ledger=cell.ledger.restarted(restarts, step),
        )
        self._cells[index] = replacement
        return replacement.incarnation

    def restarted(self, index: int, incarnation: int) -> bool:
        """The replacement is up, without the run's weights. False if that incarnation was given up meanwhile."""
        cell = self.cell(index)
        if incarnation != cell.incarnation or cell.state is not RolloutState.RESTARTING:
            return False
        self._set(cell, state=RolloutState.STALE, failures=0)
        return True

    def begin_refit(self, version: int) -> Refit:
        """Fixes who takes part in the refit to `version`: every cell that is up now. One that comes up later is
        STALE until the next refit.

        Raises:
            ValueError: `version` is older than that of an earlier refit.
        """
        if self._version is not None and version < self._version:
            raise ValueError(f"weight version {version} is older than {self._version}, which was already sent")
        self._version = version
        self._refits += 1
        up = (RolloutState.HEALTHY, RolloutState.SUSPECT, RolloutState.STALE)
        members = tuple((i, cell.incarnation) for i, cell in self._cells.items() if cell.state in up)
        return Refit(self._refits, version, members)

    def refitted(self, refit: Refit, index: int) -> bool:
        """The cell holds the weights of `refit`: HEALTHY. False (nothing changes) if this process was no member, died
        meanwhile, or a later refit has begun."""
        cell = self.cell(index)
        up = (RolloutState.HEALTHY, RolloutState.SUSPECT, RolloutState.STALE)
        if refit.number != self._refits or (index, cell.incarnation) not in refit.members or cell.state not in up:
            return False
        self._set(
            cell,
            state=RolloutState.HEALTHY,
            failures=0,
            version=refit.version,
            ledger=cell.ledger.succeeded(),
            cause="",
        )
        return True

    def end_refit(self, refit: Refit) -> tuple[int, ...]:
        """Every member that is up and was not `refitted` becomes STALE; returns those cells."""
        if refit.number != self._refits:
            return ()
        missed = []
        for index, incarnation in refit.members:
            cell = self._cells[index]
            up = cell.state in (RolloutState.HEALTHY, RolloutState.SUSPECT, RolloutState.STALE)
            if up and cell.incarnation == incarnation and cell.version != refit.version:
                self._set(cell, state=RolloutState.STALE, cause=f"missed the refit to version {refit.version}")
                missed.append(index)
        return tuple(missed)

    def _bury(self, cell: RolloutCell, cause: str) -> RolloutState:
        restart_at = self._clock() + cell.ledger.delay_s(self.policy.restarts)
        return self._set(cell, state=RolloutState.DEAD, failures=0, cause=cause, restart_at=restart_at).state

    def _set(self, cell: RolloutCell, **changes: object) -> RolloutCell:
        changed = replace(cell, **changes)  # type: ignore[arg-type]
        self._cells[cell.index] = changed
        return changed
