"""The driver's handle on all trainer cells of one role: quorum, split, attempt, vote, decision.

The driver collects the cells' votes as the answers to `train` and gives them to the arbiter, which decides once and
durably; the cells act on that decision only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_rollout.cell import get, kill_actors, start_cell
from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.sharding import check_global_batch_size, merge_shards, split_train_data_by_dp
from trainer_hooks.cells.arbiter import COMMIT, DISCARD, Arbiter
from trainer_hooks.cells.event_log import EventLog
from trainer_hooks.cells.quorum import Attempt, Member, NoLiveCells, Quorum, Step
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.training.spec import OptimizerSpec, TrainSpec

logger = logging.getLogger(__name__)


@dataclass
class TrainerCellHandle:
    """One trainer cell: its actors (one a rank), and which process generation they are."""

    index: int
    actors: list[Any]
    incarnation: int = 0
    pids: list[int] = field(default_factory=list)
    alive: bool = True


class StepFailed(RuntimeError):
    """A step was not committed within the allowed attempts; the message holds the last cause."""


class TrainGroup:
    """All trainer cells of `spec.role`. make_actors(cell) → the cell's actors; store: "host:port" of a store outside
    every cell; arbiter: decides."""

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
    ) -> None:
        self.spec = spec
        self.args = args
        self.arbiter = arbiter
        self.store = store
        self.timeouts = timeouts
        self.max_attempts = max_attempts
        self.checksums = checksums
        self.log = log
        self.last_step: tuple[int, int] | None = None
        self.quorum = Quorum(arbiter.last_quorum_id(spec.role))
        self._configured: Quorum | None = None
        self.cells = {i: TrainerCellHandle(i, list(make_actors(i))) for i in range(num_cells)}
        with ThreadPoolExecutor(num_cells) as pool:
            for done in [pool.submit(self._start, cell) for cell in self.cells.values()]:
                done.result()

    def _start(self, cell: TrainerCellHandle) -> None:
        limit = self.timeouts.start_s
        start_cell(cell.actors, timeout_s=limit)
        cell.pids = get([a.pid.remote() for a in cell.actors], limit)
        get([a.start_trainer.remote(self.spec, cell=cell.index, timeouts=self.timeouts) for a in cell.actors], limit)
        self._note("heal", role=self.spec.role, cell=cell.index, incarnation=0, source=None, version=0)

    def start_colocated(self, spec: RolloutSpec) -> None:
        """Let every cell generate with its own weights, in its own processes."""
        get(
            [a.start_colocated_rollout.remote(spec, cell=c.index) for c in self.live for a in c.actors],
            self.timeouts.start_s,
        )

    # -- membership ---------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[TrainerCellHandle]:
        return [c for c in self.cells.values() if c.alive]

    def mark_dead(self, index: int, cause: str) -> None:
        """Fence and forget a cell: its processes are gone before the quorum changes."""
        cell = self.cells[index]
        if not cell.alive:
            return
        logger.warning("%s cell %d is dead: %s", self.spec.role, index, cause)
        cell.alive = False
        self.arbiter.lose(index, cause)
        for other in self.live:
            for actor in other.actors:
                actor.abort_cross_cell.remote(f"cell {index} is dead: {cause}", self.quorum.quorum_id)
        kill_actors(cell.actors, cell.pids, self.timeouts.kill_s)

    def form_quorum(self) -> Quorum:
        """The quorum of the cells alive now, its cross-cell groups configured."""
        while True:
            quorum = self.quorum.next(Member(c.index, c.incarnation) for c in self.live)
            if quorum != self.quorum:
                self.quorum = quorum
                self._note("quorum", role=self.spec.role, **quorum.to_dict())
            if self._configured == self.quorum:
                return self.quorum
            failed = self._on_cells(
                lambda c: [a.configure.remote(self.store, self.quorum) for a in c.actors], self.timeouts.configure_s
            )[1]
            if not failed:
                self._configured = self.quorum
                return self.quorum
            for index, error in failed.items():  # whatever it was, the cell did not come to the quorum
                self.mark_dead(index, f"{type(error).__name__}: {error}")

    def _on_cells(
        self, call: Callable[[TrainerCellHandle], list[Any]], timeout_s: float
    ) -> tuple[dict[int, list[Any]], dict[int, Exception]]:
        """Call every live cell at once: (results by cell, errors of those that failed)."""
        results: dict[int, list[Any]] = {}
        failed: dict[int, Exception] = {}

        def one(cell: TrainerCellHandle) -> None:
            try:
                results[cell.index] = get(call(cell), timeout_s)
            except Exception as error:  # the cell's failure, whatever it is, is the caller's to judge
                failed[cell.index] = error

        live = self.live
        with ThreadPoolExecutor(max(1, len(live))) as pool:
            list(pool.map(one, live))
        return results, failed

    def _bury(self, failed: Mapping[int, Exception]) -> None:
        """Mark the dead; raise what is no death: it would happen again on every cell."""
        for index, error in failed.items():
            if not _is_death(error):
                raise error
            self.mark_dead(index, f"{type(error).__name__}: {error}")

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

    def train_step(self, step: Step, data: Mapping[str, Any], *, objective: str = "policy") -> dict[str, Any]:
        """One optimizer step on `data` by whoever is alive; returns its metrics. Raises StepFailed, NoLiveCells."""
        cause = ""
        for _ in range(self.max_attempts):
            quorum = self.form_quorum()
            attempt = self.arbiter.begin(step, quorum)
            shards = self.split(data)
            metrics, cause = self._attempt(attempt, shards, objective)
            if metrics is not None:
                self.last_step = step.position
                self._note("committed", **attempt.to_dict(), samples=list(data.get("sample_indices", ())))
                return metrics
            self._note("discarded", **attempt.to_dict(), cause=cause)
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
                self.arbiter.vote(attempt, cell.index, DISCARD, f"{type(error).__name__}: {error}")
                if _is_death(error):
                    self.mark_dead(cell.index, str(error).splitlines()[0])
                return {}
            self._note("trained", **attempt.to_dict(), cell=cell.index, samples=list(shard.get("sample_indices", ())))
            self.arbiter.vote(attempt, cell.index, COMMIT)
            return result

        live = self.live
        with ThreadPoolExecutor(len(live)) as pool:
            results = list(pool.map(train, live))
        decision = self.arbiter.wait(attempt, self.timeouts.ask_s)
        finished, failed = self._on_cells(
            lambda c: [a.finish.remote(attempt, decision.commit, self.checksums) for a in c.actors],
            self.timeouts.progress_s,
        )
        for index, error in failed.items():  # a cell that cannot act on the decision is out of step for good
            self.mark_dead(index, f"{type(error).__name__}: {error}")
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
        get([a.use_optimizer.remote(spec) for c in self.live for a in c.actors], self.timeouts.configure_s)

    # -- the rest -----------------------------------------------------------------------------------------------

    def save_hf(self, directory: str) -> None:
        source = self.live[0]
        get([a.save_hf.remote(directory) for a in source.actors], self.timeouts.checkpoint_s)

    def save_state(self, directory: str) -> None:
        """Write the state of one live cell (all hold the same), one file a rank."""
        get([a.save_state.remote(directory) for a in self.live[0].actors], self.timeouts.checkpoint_s)

    def load_state(self, directory: str) -> None:
        """Restore every live cell from `save_state`'s files."""
        get([a.load_state.remote(directory) for c in self.live for a in c.actors], self.timeouts.checkpoint_s)

    def shutdown(self) -> None:
        for cell in self.live:
            cell.alive = False
            kill_actors(cell.actors, cell.pids, self.timeouts.kill_s)


def _logprobs(cell: TrainerCellHandle, *, shards: Mapping[int, tuple[Any, Any]], reference: bool) -> list[Any]:
    return [a.logprobs.remote(shards[cell.index][1], reference) for a in cell.actors]


def _is_death(error: BaseException) -> bool:
    import ray

    return isinstance(error, ray.exceptions.RayActorError | TimeoutError)
