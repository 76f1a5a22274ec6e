"""The driver's handle on all trainer cells of one role: quorum, split, attempt, vote, decision.

The driver collects the cells' votes as the answers to `train` and gives them to the arbiter, which decides once and
durably; the cells act on that decision only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_rollout.cell import get, kill_actors, local_pids, start_cell
from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.sharding import check_global_batch_size, merge_shards, split_train_data_by_dp
from trainer_hooks.cells.arbiter import COMMIT, DISCARD, Arbiter
from trainer_hooks.cells.deaths import death_of, first_line
from trainer_hooks.cells.event_log import EventLog
from trainer_hooks.cells.healing import Heal, Healer
from trainer_hooks.cells.heartbeat import Heartbeats, Identity
from trainer_hooks.cells.quorum import Attempt, GroupShape, Member, NoLiveCells, Quorum, Step, check_connect
from trainer_hooks.cells.state import DeathCause, DeathKind, RestartPolicy
from trainer_hooks.cells.supervisor import Supervisor
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.training.spec import OptimizerSpec, TrainSpec

logger = logging.getLogger(__name__)


#: Formings of one quorum, nobody having died, after which its members that fail are declared dead.
_FORMINGS = 3


@dataclass
class TrainerCellHandle:
    """The processes of one trainer cell's incarnation: an actor a rank. alive: not declared dead."""

    index: int
    actors: list[Any]
    incarnation: int = 0
    identities: list[Identity] = field(default_factory=list)
    alive: bool = True
    start_seconds: float = 0.0

    @property
    def pids(self) -> list[int]:
        """Of the ranks on this host."""
        return local_pids(self.identities)


class StepFailed(RuntimeError):
    """A step was not committed within the allowed attempts; the message holds the last cause."""


class TrainGroup:
    """All trainer cells of `spec.role`. make_actors(cell) → new actors of the cell; store: "host:port" of a store
    outside every cell; arbiter: decides.

    restarts: how dead cells are replaced, None: not at all. wait: an interrupted step is redone when every cell that
    can come back is back in its position, instead of by the survivors. on_started(cell), on_up(cell), on_down(cell):
    called when a replacement waits for the run's state, when it holds it, and after a dead cell was fenced (a colocated
    cell also generates). moment(name): called at named moments of a step.
    """

    def __init__(
        self,
        spec: TrainSpec,
        make_actors: Callable[[int], Sequence[Any]],
        *,
        num_cells: int,
        args: Any,
        arbiter: Arbiter,
        store: str,
        timeouts: CellTimeouts,
        max_attempts: int = 30,
        checksums: bool = False,
        log: EventLog | None = None,
        restarts: RestartPolicy | None = None,
        wait: bool = False,
    ) -> None:
        self.spec = spec
        self.args = args
        self.arbiter = arbiter
        self.store = store
        self.timeouts = timeouts
        self.max_attempts = max_attempts
        self.checksums = checksums
        self.log = log
        self.wait = wait
        self.version = 0
        self.last_step: tuple[int, int] | None = None
        self.critic: TrainGroup | None = None
        self.on_up: Callable[[TrainerCellHandle], None] | None = None
        self.on_started: Callable[[TrainerCellHandle], None] | None = None
        self.moment: Callable[[str], None] = lambda name: None
        self.on_down: Callable[[TrainerCellHandle, str], None] | None = None
        self.quorum = Quorum(arbiter.last_quorum_id(spec.role))
        self.cells: dict[int, TrainerCellHandle] = {}
        self._make_actors = make_actors
        self._members: list[TrainerCellHandle] = []
        self._configured: Quorum | None = None
        self._formings = 0
        self._colocated: RolloutSpec | None = None
        self._fencing = threading.RLock()
        self.supervisor = Supervisor(
            spec.role,
            range(num_cells),
            self._start,
            policy=restarts,
            step=lambda: max(0, self.last_step[0]) if self.last_step else 0,
            log=log,
        )
        self._healer = Healer(store, timeouts, self._bury_incarnation)
        self._heartbeats = Heartbeats(
            timeouts,
            lambda cell, incarnation, cause: self._bury_incarnation(cell, cause, incarnation),
            name=spec.role,
            each_turn=self.supervisor.launch_due,
            phase_deadlines={"start": timeouts.start_s, "checkpoint": timeouts.checkpoint_s},
        )
        try:
            self.supervisor.start_all()
        except BaseException:
            self.shutdown()
            raise
        for index in self.supervisor.waiting_for_state():
            self._holds_state(self.cells[index], None)

    def _start(self, index: int, incarnation: int) -> None:
        cell = TrainerCellHandle(index, list(self._make_actors(index)), incarnation)
        limit = self.timeouts.start_s
        began = time.monotonic()
        try:
            cell.identities = get([a.identity.remote() for a in cell.actors], limit)
            start_cell(cell.actors, timeout_s=limit)
            get([a.start_trainer.remote(self.spec, cell=index, timeouts=self.timeouts) for a in cell.actors], limit)
            if self._colocated is not None:
                get([a.start_colocated_rollout.remote(self._colocated, cell=index) for a in cell.actors], limit)
        except BaseException:
            kill_actors(cell.actors, cell.pids, self.timeouts.kill_s)
            raise
        cell.start_seconds = time.monotonic() - began
        self.cells[index] = cell
        self._heartbeats.watch(index, incarnation, cell.actors, cell.identities)
        if self.on_started is not None:
            self.on_started(cell)

    def _holds_state(self, cell: TrainerCellHandle, heal: Heal | None) -> None:
        """The cell is one of those that train from now on."""
        extra = {} if heal is None else {"seconds": heal.seconds, "bytes": heal.nbytes}
        self.supervisor.healed(cell.index, cell.incarnation)
        self._note(
            "heal",
            role=self.spec.role,
            cell=cell.index,
            incarnation=cell.incarnation,
            source=None if heal is None else heal.source,
            version=self.version,
            start_seconds=cell.start_seconds,
            **extra,
        )

    def start_colocated(self, spec: RolloutSpec) -> None:
        """Let every cell generate with its own weights, in its own processes."""
        self._colocated = spec
        get(
            [a.start_colocated_rollout.remote(spec, cell=c.index) for c in self.live for a in c.actors],
            self.timeouts.start_s,
        )

    def connect(self, critic: TrainGroup) -> None:
        """Let `critic` give this group's samples their values. Checked once, over the configured cells of both.

        Raises ConnectError naming every cell that does not fit.
        """
        check_connect(self.shape, critic.shape)
        self.critic = critic

    @property
    def shape(self) -> GroupShape:
        """The configured cells, alive or not."""
        return GroupShape(self.spec.role, tuple(len(self.cells[i].actors) for i in sorted(self.cells)))

    # -- membership ---------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[TrainerCellHandle]:
        """Cells that hold the run's state, by index."""
        return [self.cells[i] for i in self.supervisor.training()]

    def mark_dead(self, index: int, cause: DeathCause, incarnation: int | None = None) -> None:
        """Fence and forget a cell: its processes are gone before the quorum changes. From any thread; old news (of an
        earlier incarnation, or a second time) changes nothing."""
        with self._fencing:
            cell = self.cells[index]
            if not cell.alive or incarnation not in (None, cell.incarnation):
                return
            if self.supervisor.died(index, cell.incarnation, cause):
                logger.warning("%s cell %d is dead: %s", self.spec.role, index, cause)
                self._fence(cell, str(cause))

    def _bury_incarnation(self, index: int, cause: DeathCause, incarnation: int) -> None:
        self.mark_dead(index, cause, incarnation)

    def _fence(self, cell: TrainerCellHandle, cause: str) -> None:
        cell.alive = False
        self._heartbeats.forget(cell.index, cell.incarnation)
        self.arbiter.lose(cell.index, cause, self.spec.role)
        for other in self.live:
            for actor in other.actors:
                actor.abort_cross_cell.remote(f"cell {cell.index} is dead: {cause}", self.quorum.quorum_id)
        self._healer.lost(cell.index, cause)
        kill_actors(cell.actors, cell.pids, self.timeouts.kill_s)
        if self.on_down is not None:
            self.on_down(cell, cause)
        self.supervisor.reaped(cell.index, cell.incarnation)

    def suspend(self, index: int) -> None:
        """Take a cell out until `resume`. Raises KeyError, IllegalTransition."""
        with self._fencing:
            if self.supervisor.suspend(index):
                self._fence(self.cells[index], "suspended by an operator")

    def resume(self, index: int) -> None:
        """Put a suspended or given-up cell back. Raises KeyError, IllegalTransition."""
        self.supervisor.resume(index)

    def tend(self) -> None:
        """Between two pieces of work: heal the replacements that wait for it."""
        while (waiting := self.supervisor.waiting_for_state()) and (sources := self.live):
            cells = [self.cells[i] for i in waiting]
            self._healer.heal(cells, sources, self._healed)

    def _healed(self, heal: Heal) -> None:
        cell = self.cells[heal.cell]
        with self._fencing:
            if cell.incarnation != heal.incarnation or not cell.alive:
                return
            self._holds_state(cell, heal)
        logger.warning(
            "%s cell %d healed from cell %d: %d bytes in %.1f s",
            self.spec.role, heal.cell, heal.source, heal.nbytes, heal.seconds,
        )  # fmt: skip
        if self.on_up is not None:
            self.on_up(cell)

    def gather(self) -> None:
        """Wait for those that are to take part, and heal them. Every start has its own deadline and budget, so this
        ends. Raises NoLiveCells: nobody is left who holds the run's state."""
        supervisor = self.supervisor
        while True:
            self.tend()
            with self._fencing:  # a death that is being dealt with comes first
                training, coming = supervisor.training(), supervisor.coming()
            if not training:
                raise NoLiveCells(
                    f"no {self.spec.role} cell holds the run's state any more (quorum {self.quorum.quorum_id})"
                )
            if not (coming and self.wait):
                return
            with supervisor.changed:
                supervisor.changed.wait(0.5)

    def form_quorum(self) -> Quorum:
        """The quorum of the cells alive now, its cross-cell groups configured. Raises NoLiveCells."""
        failures = 0
        while True:
            self.gather()
            with self._fencing:
                members = self.live
                quorum = self.quorum.next(Member(c.index, c.incarnation) for c in members)
                if quorum != self.quorum:
                    self.quorum = quorum
                    self._formings = 0
                    self._configured = None
                    self._note("quorum", role=self.spec.role, **quorum.to_dict())
                self._members = members
            if self._configured == self.quorum:
                return self.quorum
            attempt, self._formings = self._formings, self._formings + 1
            failed = self._on_cells(
                lambda c, n=attempt: [a.configure.remote(self.store, self.quorum, n) for a in c.actors],  # type: ignore[misc]
                self.timeouts.configure_s + self.timeouts.heartbeat_s,
            )[1]
            if not failed:
                self._configured = self.quorum
                return self.quorum
            self._deaths(failed)
            failures += 1
            if failures >= _FORMINGS and all(self._member(i).alive for i in failed):
                for index, error in failed.items():
                    self.mark_dead(index, DeathCause(DeathKind.EXCEPTION, f"forming a quorum: {first_line(error)}"))

    def _on_cells(
        self, call: Callable[[TrainerCellHandle], list[Any]], timeout_s: float
    ) -> tuple[dict[int, list[Any]], dict[int, Exception]]:
        """Call every member of the quorum at once: (results by cell, errors of those that failed)."""
        results: dict[int, list[Any]] = {}
        failed: dict[int, Exception] = {}

        def one(cell: TrainerCellHandle) -> None:
            try:
                results[cell.index] = get(call(cell), timeout_s)
            except Exception as error:  # the cell's failure, whatever it is, is the caller's to judge
                failed[cell.index] = error

        members = self._members
        with ThreadPoolExecutor(max(1, len(members))) as pool:
            list(pool.map(one, members))
        return results, failed

    def _deaths(self, failed: Mapping[int, Exception]) -> dict[int, Exception]:
        """Mark the dead among those that failed; returns the others, which are alive.

        Where one rank of a cell dies, another may be the first to complain: such a cell gets the time in which the
        heartbeats find a death.
        """
        living = {}
        for index, error in failed.items():
            cause = death_of(error)
            if cause is not None:
                self.mark_dead(index, cause, self._member(index).incarnation)
            elif not self._died_within(self._member(index), self.timeouts.detection_s):
                living[index] = error
        return living

    def _died_within(self, cell: TrainerCellHandle, seconds: float) -> bool:
        end = time.monotonic() + (seconds if len(cell.actors) > 1 else 0.0)
        while cell.alive and time.monotonic() < end:
            time.sleep(0.05)
        with self._fencing:
            return not cell.alive

    def _member(self, index: int) -> TrainerCellHandle:
        return next(c for c in self._members if c.index == index)

    def _bury(self, failed: Mapping[int, Exception]) -> None:
        """Mark the dead; raise what is no death: it would happen again on every cell."""
        for error in self._deaths(failed).values():
            raise error

    # -- work ---------------------------------------------------------------------------------------------------

    def split(self, data: Mapping[str, Any]) -> dict[int, tuple[Any, Any]]:
        """Shards of `data` for the quorum's cells: {cell: (shard, its reference in the object store)}."""
        import ray

        shards = split_train_data_by_dp(self.args, data, dp_size=self.quorum.world)
        by_cell = dict(zip(self.quorum.cells, shards, strict=True))
        check_global_batch_size({c: s.get("dynamic_global_batch_size") for c, s in by_cell.items()})
        return {cell: (shard, ray.put(shard)) for cell, shard in by_cell.items()}

    def logprobs(self, data: Mapping[str, Any], *, reference: bool = False) -> list[Any]:
        """Logprobs of each sample's response, in the order of `data`; re-split and done again if a cell dies."""
        while True:
            self.form_quorum()
            shards = self.split(data)
            results, failed = self._on_cells(
                partial(_logprobs, shards=shards, reference=reference), self.timeouts.progress_s
            )
            if not failed:
                for cell, (shard, _) in shards.items():
                    shard["log_probs"] = results[cell][0]
                return merge_shards([shard for shard, _ in shards.values()])["log_probs"]
            self._bury(failed)

    def values(self, data: Mapping[str, Any]) -> list[Any]:
        """A critic's values of all responses: references to {sample index: values [R]}, one a cell, put into the object
        store by the cells. Done again if a cell dies meanwhile; one that dies later takes its objects with it."""
        while True:
            self.form_quorum()
            shards = self.split(data)
            results, failed = self._on_cells(
                lambda c, s=shards: [a.values.remote(s[c.index][1]) for a in c.actors],  # type: ignore[misc]
                self.timeouts.progress_s,
            )
            if not failed:
                return [results[cell][0][0] for cell in shards]
            self._bury(failed)

    def train_step(self, step: Step, data: Mapping[str, Any], *, objective: str = "policy") -> dict[str, Any]:
        """One optimizer step on `data` by whoever is alive; returns its metrics. Raises StepFailed, NoLiveCells."""
        cause = ""
        for _ in range(self.max_attempts):
            quorum = self.form_quorum()
            attempt = self.arbiter.begin(step, quorum)
            for cell in self._members:
                if not cell.alive:  # between the quorum and the attempt: nobody waits for its vote
                    self.arbiter.lose(cell.index, "it died before the attempt began", self.spec.role)
            shards = self.split(data)
            self.moment("split")
            metrics, cause = self._attempt(attempt, shards, objective)
            if metrics is not None:
                self.last_step = step.position
                self._note("committed", **attempt.to_dict(), samples=list(data.get("sample_indices", ())))
                return metrics
            self._note("discarded", **attempt.to_dict(), cause=cause)
            self._configured = None  # whatever failed, the groups are formed anew
        raise StepFailed(f"{step} was discarded {self.max_attempts} times; last cause: {cause}")

    def _attempt(
        self, attempt: Attempt, shards: Mapping[int, tuple[Any, Any]], objective: str
    ) -> tuple[dict[str, Any] | None, str]:
        def train(cell: TrainerCellHandle) -> dict[str, float]:
            shard, reference = shards[cell.index]
            refs = [a.train.remote(attempt, reference, objective) for a in cell.actors]
            try:
                result = get(refs, self.timeouts.attempt_s)[0]
            except Exception as error:
                if (cause := death_of(error)) is not None:
                    self.mark_dead(cell.index, cause, cell.incarnation)
                self.arbiter.vote(attempt, cell.index, DISCARD, first_line(error))
                return {}
            self._note("trained", **attempt.to_dict(), cell=cell.index, samples=list(shard.get("sample_indices", ())))
            self.arbiter.vote(attempt, cell.index, COMMIT)
            return result

        with ThreadPoolExecutor(len(self._members)) as pool:
            results = list(pool.map(train, self._members))
        decision = self.arbiter.wait(attempt, self.timeouts.ask_s)
        finished, failed = self._on_cells(
            lambda c: [a.finish.remote(attempt, decision.commit, self.checksums) for a in c.actors],
            self.timeouts.progress_s,
        )
        for index, error in failed.items():  # a cell that cannot act on the decision is out of step for good
            cause = death_of(error) or DeathCause(DeathKind.FAILED_COMMIT, first_line(error))
            self.mark_dead(index, cause, self._member(index).incarnation)
        for index in finished:
            self.supervisor.stepped(index, self._member(index).incarnation)
        if not decision.commit:
            return None, decision.cause
        if not finished:
            raise NoLiveCells(f"{attempt} was committed, but no cell could apply it")
        answers = {cell: ranks[0] for cell, ranks in finished.items()}
        first = answers[min(answers)]
        return {
            **next(r for r in results if r),
            **first,
            "checksums": {c: a.get("checksum") for c, a in answers.items()},
        }, ""

    def _note(self, kind: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.append(kind, **fields)

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        """Let every live cell begin with a fresh optimizer and schedule."""
        while True:
            self.form_quorum()
            failed = self._on_cells(
                lambda c: [a.use_optimizer.remote(spec) for a in c.actors], self.timeouts.progress_s
            )[1]
            if not failed:
                return
            self._bury(failed)  # who is left has done it; doing it again changes nothing

    # -- the rest -----------------------------------------------------------------------------------------------

    def weight_checksums(self) -> dict[int, str]:
        """Checksum over the whole model, of every live cell."""
        self._members = self.live
        results, failed = self._on_cells(lambda c: [a.checksum.remote() for a in c.actors], self.timeouts.progress_s)
        self._bury(failed)
        return {cell: ranks[0] for cell, ranks in results.items()}

    def save_hf(self, directory: str) -> None:
        self._on_one(lambda c: [a.save_hf.remote(directory) for a in c.actors])

    def save_state(self, directory: str) -> None:
        """Write the state of one live cell (all hold the same), one file a rank."""
        self._on_one(lambda c: [a.save_state.remote(directory) for a in c.actors])

    def _on_one(self, call: Callable[[TrainerCellHandle], list[Any]]) -> None:
        """Let one live cell do it; if it dies, another. Raises NoLiveCells."""
        while True:
            self.gather()
            self._members = self.live[:1]
            failed = self._on_cells(call, self.timeouts.checkpoint_s)[1]
            if not failed:
                return
            self._bury(failed)

    def load_state(self, directory: str) -> None:
        """Restore every live cell from `save_state`'s files."""
        self._members = self.live
        failed = self._on_cells(
            lambda c: [a.load_state.remote(directory) for a in c.actors], self.timeouts.checkpoint_s
        )[1]
        self._bury(failed)

    def restart_from(self, directory: str) -> None:
        """Nobody holds the run's state any more: wait for replacements and let them load `save_state`'s files.

        Raises NoLiveCells: no cell comes back.
        """
        while True:
            with self.supervisor.changed:
                while self.supervisor.coming():
                    self.supervisor.changed.wait(0.5)
            members = [self.cells[i] for i in self.supervisor.waiting_for_state()]
            if not members:
                raise NoLiveCells(f"no {self.spec.role} cell came back: every restart budget is spent")
            self._members = members
            results, failed = self._on_cells(
                lambda c: [a.load_state.remote(directory) for a in c.actors], self.timeouts.checkpoint_s
            )
            self._bury(failed)
            for index in results:
                self._holds_state(self._member(index), None)
                if self.on_up is not None:
                    self.on_up(self._member(index))
            self.quorum = self.quorum.restored()
            if results:
                return

    def shutdown(self) -> None:
        self.supervisor.close()
        self._heartbeats.close()
        with self._fencing:
            for cell in self.cells.values():
                if cell.alive:
                    cell.alive = False
                    kill_actors(cell.actors, cell.pids, self.timeouts.kill_s)


def _logprobs(cell: TrainerCellHandle, *, shards: Mapping[int, tuple[Any, Any]], reference: bool) -> list[Any]:
    return [a.logprobs.remote(shards[cell.index][1], reference) for a in cell.actors]
