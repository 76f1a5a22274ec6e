"""One refit of all pairs: plan, then every pair in parallel, each in the order that `RolloutRank.refit` keeps.

A rollout cell that misses it serves nothing until a later refit succeeds. Trainer cells stay what they are: a failed
transfer does not make them dead.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatron_rollout.cell import RolloutCell, get
from megatron_rollout.generation import MegatronGeneration
from trainer_hooks.cells.pairing import PairPlan, plan_pairs
from trainer_hooks.cells.train_group import TrainGroup


@dataclass(frozen=True)
class PairResult:
    """What became of one rollout cell in a refit. cause: "" if it serves the version now."""

    rollout_cell: int
    trainer_cell: int
    seconds: float
    cause: str = ""

    @property
    def ok(self) -> bool:
        return not self.cause


class WeightSync:
    """Refits the rollout cells from the trainer cells. store: "host:port" of a store outside every cell."""

    def __init__(
        self, group: TrainGroup, generation: MegatronGeneration, *, store: str, timeout_s: float, colocate: bool = False
    ) -> None:
        self.group = group
        self.generation = generation
        self.timeout_s = timeout_s
        self.colocate = colocate
        self.host, port = store.rsplit(":", 1)
        self.port = int(port)
        self._built: tuple[PairPlan, tuple[tuple[int, int], ...]] | None = None

    def sync(self, version: int, only: Sequence[int] | None = None) -> list[PairResult]:
        """Bring `version` into every rollout cell that is there (or those of `only`); one result a cell.

        Raises NoLiveCells: no trainer cell holds the weights.
        """
        cells = dict(self.generation.cells)
        chosen = sorted(cells if only is None else set(only) & set(cells))
        if not chosen:
            return []
        if self.colocate:
            return self._shared(version, chosen)
        live = {c.index: c for c in self.group.live}
        plan = plan_pairs(len(self.group.cells), live, chosen)
        incarnations = tuple((i, live[i].incarnation) for i in plan.sources)
        rebuild = self._built != (plan, incarnations)
        self._built = None
        with ThreadPoolExecutor(len(plan.sources)) as pool:
            parts = pool.map(lambda source: self._pair(cells, plan, source, version, rebuild), plan.sources)
        results = [r for part in parts for r in part]
        if all(r.ok for r in results):
            self._built = (plan, incarnations)
        return self._apply(results)

    def _pair(
        self, cells: Mapping[int, RolloutCell], plan: PairPlan, source: int, version: int, rebuild: bool
    ) -> list[PairResult]:
        """One trainer cell and its rollout cells."""
        trainer = self.group.cells[source]
        targets = [cells[i] for i in plan.rollout_cells_of(source)]
        start = time.monotonic()
        cause = ""
        try:
            if rebuild:
                self._join(trainer.actors, targets)
            limit = self.timeout_s
            # destinations first: they suspend and post their receives before the source sends
            receiving = [t.call_async("refit_reshard", deadline_s=limit, version=version) for t in targets]
            get([*receiving, *(a.send_weights.remote() for a in trainer.actors)], limit + 5)
        except Exception as error:  # reported with the pair; the next sync builds its group anew
            cause = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        return [PairResult(t.index, source, seconds, cause) for t in targets]

    def _join(self, sources: list[Any], targets: list[Any]) -> None:
        ranks = len(sources) + sum(len(t.actors) for t in targets)
        common: Mapping[str, Any] = dict(
            host=self.host,
            port=self.port,
            name=f"refit-{uuid.uuid4().hex}",
            world_size=ranks,
            source_ranks=len(sources),
            timeout_s=self.timeout_s,
        )
        offset = len(sources)
        joining = [a.join_refit_group.remote(rank=i, **common) for i, a in enumerate(sources)]
        for target in targets:
            joining.append(
                target.call_async("join_refit_group", deadline_s=self.timeout_s, destination_offset=offset, **common)
            )
            offset += len(target.actors)
        get(joining, self.timeout_s + 5)

    def _shared(self, version: int, cells: Sequence[int]) -> list[PairResult]:
        start = time.monotonic()
        answers = self.generation.call_all("refit_shared", cells=cells, deadline_s=self.timeout_s, version=version)
        seconds = time.monotonic() - start
        return self._apply(
            [
                PairResult(i, i, seconds, f"{type(a).__name__}: {a}" if isinstance(a, Exception) else "")
                for i, a in answers.items()
            ]
        )

    def _apply(self, results: list[PairResult]) -> list[PairResult]:
        """Only a completed refit lets a cell take requests (again)."""
        dispatcher = self.generation.dispatcher
        for result in results:
            if result.ok:
                dispatcher.cell_up(result.rollout_cell)
            else:
                dispatcher.cell_down(result.rollout_cell, f"refit failed: {result.cause}")
        return results
