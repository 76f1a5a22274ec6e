"""One refit of all pairs: one plan, then every pair in parallel, each in the order that `weight_sync.order` keeps.

A rollout cell that misses it serves nothing until a later refit succeeds. Trainer cells stay what they are: a failed
transfer does not make them dead. At the first failure in a pair its transfer is aborted on every rank of the pair, so
that nobody waits for a peer that is gone; the next sync forms its group anew, under another name.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from megatron_rollout.cell import RolloutCell, get
from megatron_rollout.generation import MegatronGeneration
from megatron_rollout.weight_sync.membership import Pair, RefitPlanner
from megatron_rollout.weight_version import check_version
from trainer_hooks.cells.calls import Call, gather
from trainer_hooks.cells.deaths import first_line
from trainer_hooks.cells.quorum import NoLiveCells
from trainer_hooks.cells.train_group import TrainerCellHandle, TrainGroup

#: How long ranks may take to come back after their transfer's deadline, or after it was aborted.
GRACE_S = 3.0


@dataclass(frozen=True)
class PairResult:
    """What became of one rollout cell in a refit. cause: "" if it serves the version now.

    seconds: of the whole pair. parts: seconds of each part on the rollout cell's leader, and the bytes it received.
    """

    rollout_cell: int
    trainer_cell: int
    seconds: float
    cause: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.cause


class WeightSync:
    """Refits the rollout cells from the trainer cells. store: "host:port" of a store outside every cell.

    timeout_s: of one sync, from its begin until every transfer is complete or has been aborted.
    colocate: trainer cell i is rollout cell i, in the same processes. transport: between separate ones, see
        `weight_sync.member`. directory: of the disk transport, reachable from everywhere. offload_trainer: colocated with
        a rollout model of its own, the trainer's weights leave the device until the next training.
    """

    def __init__(
        self,
        group: TrainGroup,
        generation: MegatronGeneration,
        *,
        store: str,
        timeout_s: float,
        colocate: bool = False,
        transport: str = "reshard",
        directory: str = "",
        offload_trainer: bool = False,
    ) -> None:
        self.group = group
        self.generation = generation
        self.timeout_s = timeout_s
        self.colocate = colocate
        self.transport = transport
        self.offload_trainer = offload_trainer
        self._directory = directory
        self._colocated_names = itertools.count()
        self._colocated_name = next(self._colocated_names)
        self.host, port = store.rsplit(":", 1)
        self.port = int(port)
        self._newest = 0
        self._planner: RefitPlanner | None = None
        self._processes: dict[int, tuple[int, list[Any]]] = {}

    def sync(self, version: int, only: Sequence[int] | None = None) -> list[PairResult]:
        """Bring `version` into every rollout cell that is there (or those of `only`); one result a cell.

        Raises ValueError for a version below that of the last sync, NoLiveCells: no trainer cell holds the weights.
        """
        check_version(version, self._newest)
        self._newest = version
        cells = dict(self.generation.cells)
        chosen = sorted(cells if only is None else set(only) & set(cells))
        if not chosen:
            return []
        if self.colocate:
            return self._apply(self._colocated(version, chosen))
        live = {c.index: c for c in self.group.live}
        if not live:
            raise NoLiveCells("no trainer cell holds the weights: there is nothing to refit from")
        planner = self._planner_for(cells)
        plan = planner.plan(
            {i: c.incarnation for i, c in live.items()}, {i: self._incarnation(cells[i]) for i in chosen}
        )
        building = {pair.trainer for pair in planner.to_build()}
        deadline = time.monotonic() + self.timeout_s

        def refit(pair: Pair) -> tuple[bool, list[PairResult]]:
            return self._pair(pair, live[pair.trainer], cells, version, pair.trainer in building, deadline)

        with ThreadPoolExecutor(len(plan.pairs)) as pool:
            outcomes = list(pool.map(refit, plan.pairs))
        for pair, (intact, _) in zip(plan.pairs, outcomes, strict=True):
            if intact:
                planner.mark_built(pair)
            else:
                planner.discard(pair.trainer)
        return self._apply([result for _, results in outcomes for result in results])

    # -- one pair -----------------------------------------------------------------------------------------------

    def _pair(
        self,
        pair: Pair,
        trainer: TrainerCellHandle,
        cells: Mapping[int, RolloutCell],
        version: int,
        build: bool,
        deadline: float,
    ) -> tuple[bool, list[PairResult]]:
        """One trainer cell and its rollout cells: (whether the group can be used again, what became of each cell)."""
        start = time.monotonic()
        targets = [cells[i] for i in pair.membership.shards]

        def abort(reason: str) -> None:
            for actor in (*trainer.actors, *(a for t in targets for a in t.actors)):
                actor.abort_refit.remote(pair.name, reason)

        answers: dict[Any, Any] = {}
        if build:
            answers = gather(self._joins(pair, trainer, targets, deadline), deadline, abort, grace_s=GRACE_S)
        if not any(isinstance(a, Exception) for a in answers.values()):
            answers = gather(self._transfers(trainer, targets, version, deadline), deadline, abort, grace_s=GRACE_S)
        seconds = time.monotonic() - start
        failures = [a for a in answers.values() if isinstance(a, Exception)]
        results = []
        for target in targets:
            answer = answers.get(target.index)
            if isinstance(answer, Mapping):
                results.append(PairResult(target.index, pair.trainer, seconds, parts=answer))
            else:
                cause = answer if isinstance(answer, Exception) else failures[0]
                results.append(PairResult(target.index, pair.trainer, seconds, first_line(cause)))
        return not failures, results

    def _joins(
        self, pair: Pair, trainer: TrainerCellHandle, targets: Sequence[RolloutCell], deadline: float
    ) -> list[Call]:
        left = deadline - time.monotonic()
        common: dict[str, Any] = dict(
            host=self.host,
            port=self.port,
            name=pair.name,
            world_size=pair.membership.world_size,
            source_ranks=pair.membership.train_world_size,
            timeout_s=left,
            transport=self.transport,
        )
        if self.transport == "broadcast":
            common["stages"] = self.group.spec.pp
        if self.transport == "disk":
            common["directory"] = os.path.join(self._directory, f"trainer-{pair.trainer}")
            common["checkpoint"] = self.group.spec.hf_checkpoint
        calls = [
            Call(target.index, f"rollout cell {target.index}", target.call_async(
                "join_refit_group",
                deadline_s=left + GRACE_S,
                destination_offset=pair.membership.group_rank(target.index, 0),
                **common,
            ))
            for target in targets
        ]  # fmt: skip
        return calls + [
            Call(("trainer", rank), f"trainer cell {pair.trainer}", actor.join_refit_group.remote(rank=rank, **common))
            for rank, actor in enumerate(trainer.actors)
        ]

    def _transfers(
        self, trainer: TrainerCellHandle, targets: Sequence[RolloutCell], version: int, deadline: float
    ) -> list[Call]:
        """Destinations first: they suspend and wait for their sources, which may still be at something else."""
        left = deadline - time.monotonic()
        common: dict[str, Any] = dict(version=version, within_s=left)
        calls = [
            Call(t.index, f"rollout cell {t.index}", t.call_async("refit", deadline_s=left + GRACE_S, **common))
            for t in targets
        ]
        return calls + [
            Call(("trainer", rank), f"trainer cell {trainer.index}", actor.send_weights.remote(**common))
            for rank, actor in enumerate(trainer.actors)
        ]

    # -- the rest -----------------------------------------------------------------------------------------------

    def _planner_for(self, cells: Mapping[int, RolloutCell]) -> RefitPlanner:
        if self._planner is None:
            self._planner = RefitPlanner(
                num_trainer_cells=len(self.group.cells),
                num_rollout_cells=max(len(self.generation.cells), max(cells) + 1),
                ranks_per_trainer=len(self.group.live[0].actors),
                ranks_per_shard=len(next(iter(cells.values())).actors),
            )
        return self._planner

    def _incarnation(self, cell: RolloutCell) -> int:
        """Grows with every set of processes that is seen as this cell."""
        number, actors = self._processes.get(cell.index, (-1, []))
        if actors is not cell.actors:
            number += 1
            self._processes[cell.index] = (number, cell.actors)
        return number

    def _colocated(self, version: int, cells: Sequence[int]) -> list[PairResult]:
        start = time.monotonic()
        deadline = start + self.timeout_s
        trainers = [a for c in self.group.live if c.index in cells for a in c.actors]
        if self.offload_trainer:
            get([a.onload_weights.remote() for a in trainers], self.timeout_s)
        left = deadline - time.monotonic()
        name = f"colocated-{self._colocated_name}"
        answers = self.generation.call_all(
            "refit_colocated", cells=cells, deadline_s=left + GRACE_S, version=version, name=name, within_s=left
        )
        if any(isinstance(a, Exception) for a in answers.values()):
            self._colocated_name = next(self._colocated_names)
        elif self.offload_trainer:
            get([a.offload_weights.remote() for a in trainers], self.timeout_s)
        seconds = time.monotonic() - start
        return [
            PairResult(i, i, seconds, first_line(a)) if isinstance(a, Exception) else PairResult(i, i, seconds, parts=a)
            for i, a in answers.items()
        ]

    def _apply(self, results: list[PairResult]) -> list[PairResult]:
        """Only a completed refit lets a cell take requests (again)."""
        dispatcher = self.generation.dispatcher
        for result in results:
            if result.ok:
                dispatcher.cell_up(result.rollout_cell)
            else:
                dispatcher.cell_down(result.rollout_cell, f"refit failed: {result.cause}")
        return results
