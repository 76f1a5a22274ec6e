"""Rollout cells that may die: found by beats, replaced in the background, brought up to date by a refit.

The states are `megatron_rollout.health.FleetHealth`'s. What changes them comes from several threads (a collector, the
heartbeats, the thread that starts a replacement, the loop), so one lock guards them. A replacement is STALE, and gets
no request, until the loop has refitted it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rollout.cell import get, kill_actors, local_pids, start_cell
from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.generation import MegatronGeneration
from megatron_rollout.health import FleetHealth, HealthPolicy, Refit, RolloutState
from trainer_hooks.cells.deaths import first_line
from trainer_hooks.cells.event_log import EventLog
from trainer_hooks.cells.heartbeat import Heartbeats
from trainer_hooks.cells.state import DeathCause
from trainer_hooks.cells.timeouts import CellTimeouts

logger = logging.getLogger(__name__)


class RolloutFleet:
    """make_actors(cell): new actors of a rollout cell; None where the trainer cells generate (colocated): then the
    train group restarts them and says so with `replaced`. step(): the present rollout."""

    def __init__(
        self,
        generation: MegatronGeneration,
        make_actors: Callable[[int], Sequence[Any]] | None,
        *,
        spec: RolloutSpec,
        seed: int,
        policy: HealthPolicy,
        timeouts: CellTimeouts,
        step: Callable[[], int],
        log: EventLog,
    ) -> None:
        self.generation = generation
        self._make_actors = make_actors
        self._spec = spec
        self._seed = seed
        self._timeouts = timeouts
        self._step = step
        self._log = log
        self._lock = threading.RLock()
        self._closed = False
        self._suspended: set[int] = set()
        self.health = FleetHealth(generation.cells, policy)
        self._replaces = policy.restarts.max_restarts > 0
        self._heartbeats = Heartbeats(timeouts, self._silent, name="rollout", each_turn=self.launch_due)
        if make_actors is not None:
            for cell in generation.cells.values():
                identities = get([a.identity.remote() for a in cell.actors], timeouts.start_s)
                self._heartbeats.watch(cell.index, 0, cell.actors, identities)

    # -- deaths --------------------------------------------------------------------------------------------------

    def may_recover(self) -> bool:
        """Whether a cell that serves nothing now may serve again. (A cell that just died may still be called healthy
        here; if it is given up, what waits for it fails then.)"""
        with self._lock:
            return self._replaces and any(
                c.state is not RolloutState.GIVEN_UP and c.index not in self._suspended for c in self.health.snapshot()
            )

    def _silent(self, index: int, incarnation: int, cause: DeathCause) -> None:
        if self.health.cell(index).incarnation == incarnation:
            cell = self.generation.cells.get(index)
            if cell is not None:
                self.generation.dispatcher.cell_died(cell, str(cause))  # comes back as `died`

    def died(self, index: int, cause: str) -> None:
        """A rollout cell is dead and its requests are handed out again: fence it. From any thread, once a death."""
        with self._lock:
            incarnation = self.health.cell(index).incarnation
            if self._closed or not self.health.died(index, incarnation, cause):
                return
            self._log.append("cell_dead", side="rollout", cell=index, incarnation=incarnation, cause=cause)
            self._heartbeats.forget(index, incarnation)
            cell = self.generation.remove(index)
        logger.warning("rollout cell %d is dead: %s", index, cause)
        if cell is not None and self._make_actors is not None:
            kill_actors(cell.actors, cell.pids, self._timeouts.kill_s)

    # -- replacements --------------------------------------------------------------------------------------------

    def launch_due(self) -> None:
        """Start what is due, each in a thread of its own."""
        if self._make_actors is None or not self._replaces:
            return
        with self._lock:
            if self._closed:
                return
            for index in self.health.due_for_restart():
                if index in self._suspended:
                    continue
                incarnation = self.health.restarting(index, self._step())
                if incarnation is None:
                    cause = self.health.cell(index).cause
                    gone = self.health.cell(index).incarnation
                    self._log.append("cell_given_up", side="rollout", cell=index, incarnation=gone, cause=cause)
                    self._settle_given_up(index)
                    continue
                self._log.append("cell_restarted", side="rollout", cell=index, incarnation=incarnation)
                threading.Thread(
                    target=self._replace, args=(index, incarnation), name=f"start-rollout-{index}", daemon=True
                ).start()

    def _settle_given_up(self, index: int) -> None:
        """It will not come back: what waits for it goes elsewhere, or fails where nobody is left."""
        give_up = getattr(self.generation.dispatcher.router, "give_up", None)
        left = self.may_recover()
        if give_up is not None and left:
            give_up(index)
            self.generation.dispatcher.pump()
        if not left:
            self.generation.dispatcher.fail_all(f"every rollout cell is given up; the last: cell {index}")

    def _replace(self, index: int, incarnation: int) -> None:
        assert self._make_actors is not None
        actors: list[Any] = []
        pids: list[int] = []
        limit = self._timeouts.start_s
        try:
            actors = list(self._make_actors(index))
            identities = get([a.identity.remote() for a in actors], limit)
            pids = local_pids(identities)
            start_cell(actors, timeout_s=limit)
            get(
                [
                    a.start_rollout.remote(self._spec, cell=index, timeout_s=limit, seed=self._seed + index)
                    for a in actors
                ],
                limit,
            )
        except Exception as error:  # judged by the policy: another start, or given up
            kill_actors(actors, pids, self._timeouts.kill_s)
            with self._lock:
                if self._closed:
                    return
                cause = f"it did not start: {first_line(error)}"
                self.health.died(index, incarnation, cause)
                self._log.append("cell_dead", side="rollout", cell=index, incarnation=incarnation, cause=cause)
            logger.warning("the replacement of rollout cell %d failed: %s", index, cause)
            return
        with self._lock:
            if self._closed or not self.health.restarted(index, incarnation):
                kill_actors(actors, pids, self._timeouts.kill_s)
                return
            self.generation.replace(index, actors, pids=pids)
            self._heartbeats.watch(index, incarnation, actors, identities)

    def replaced(self, index: int, actors: Sequence[Any], pids: Sequence[int]) -> None:
        """Colocated: the pair's replacement holds the trainer's state; it generates after its refit."""
        with self._lock:
            incarnation = self.health.restarting(index, self._step())
            if incarnation is None:  # its budget is the train group's affair
                self._settle_given_up(index)
                return
            self.health.restarted(index, incarnation)
            self.generation.replace(index, actors, pids=pids)

    # -- refit ---------------------------------------------------------------------------------------------------

    def begin_refit(self, version: int) -> Refit:
        with self._lock:
            return self.health.begin_refit(version)

    def end_refit(self, refit: Refit, refitted: Sequence[int]) -> None:
        with self._lock:
            for index in refitted:
                self.health.refitted(refit, index)
            self.health.end_refit(refit)

    def stale(self) -> list[int]:
        """Cells that are up and serve nothing until their refit."""
        with self._lock:
            return [c.index for c in self.health.snapshot() if c.state is RolloutState.STALE]

    # -- by an operator ------------------------------------------------------------------------------------------

    def suspend(self, index: int) -> None:
        """Take a cell out until `resume`. Raises KeyError."""
        with self._lock:
            self.health.cell(index)
            self._suspended.add(index)
        cell = self.generation.cells.get(index)
        if cell is not None:
            self.generation.dispatcher.cell_died(cell, "suspended by an operator")

    def resume(self, index: int) -> None:
        with self._lock:
            self.health.cell(index)
            self._suspended.discard(index)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._heartbeats.close()
