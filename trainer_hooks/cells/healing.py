"""Heals replacements between two attempts: each from a live cell, several at once from several sources."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_rollout.cell import get
from trainer_hooks.cells.deaths import death_of, first_line
from trainer_hooks.cells.state import DeathCause, DeathKind
from trainer_hooks.cells.timeouts import CellTimeouts

if TYPE_CHECKING:
    from trainer_hooks.cells.train_group import TrainerCellHandle

logger = logging.getLogger(__name__)

#: Failed transfers (with both sides alive) after which a replacement is given up for dead.
_ATTEMPTS = 3


class Bury(Protocol):
    def __call__(self, index: int, cause: DeathCause, incarnation: int) -> None: ...


@dataclass(frozen=True)
class Heal:
    """One completed heal. nbytes: of all ranks; seconds: group formation, transfer and loading."""

    cell: int
    incarnation: int
    source: int
    nbytes: int
    seconds: float


class Healer:
    """store: "host:port" outside every cell. bury: declares a cell dead."""

    def __init__(self, store: str, timeouts: CellTimeouts, bury: Bury) -> None:
        self._store = store
        self._timeouts = timeouts
        self._bury = bury
        self._numbers = itertools.count(1)
        self._served: Counter[int] = Counter()
        self._failed: Counter[tuple[int, int]] = Counter()
        self._running: list[tuple[TrainerCellHandle, TrainerCellHandle]] = []

    def pair(
        self, waiting: Sequence[TrainerCellHandle], sources: Sequence[TrainerCellHandle]
    ) -> list[tuple[TrainerCellHandle, TrainerCellHandle]]:
        """(replacement, source): a source serves one at a time, those that served least come first."""
        by_load = sorted(sources, key=lambda c: (self._served[c.index], c.index))
        return list(zip(waiting, by_load, strict=False))

    def heal(
        self,
        waiting: Sequence[TrainerCellHandle],
        sources: Sequence[TrainerCellHandle],
        done: Callable[[Heal], None],
    ) -> None:
        """One round: as many heals at once as there are pairs. `done` is called for each that succeeded; who failed
        waits for the next round, with another source first."""
        self._running = pairs = self.pair(waiting, sources)
        with ThreadPoolExecutor(max(1, len(pairs))) as pool:
            for healed in pool.map(lambda pair: self._one(*pair), pairs):
                if healed is not None:
                    done(healed)
        self._running = []

    def lost(self, index: int, cause: str) -> None:
        """Cell `index` is dead: the other side of its heal need not wait for a deadline. From any thread."""
        for pair in self._running:
            for cell in pair:
                if index in (pair[0].index, pair[1].index) and cell.index != index and cell.alive:
                    for actor in cell.actors:
                        actor.abort_heal.remote(f"cell {index} is dead: {cause}")

    def _one(self, cell: TrainerCellHandle, source: TrainerCellHandle) -> Heal | None:
        number = next(self._numbers)
        self._served[source.index] += 1
        began = time.monotonic()
        receiving = [a.receive_heal.remote(self._store, number) for a in cell.actors]
        sending = [a.send_heal.remote(self._store, number) for a in source.actors]
        limit = self._timeouts.configure_s + self._timeouts.heal_s + self._timeouts.transfer_stall_s
        errors: dict[int, Exception] = {}
        nbytes = 0
        for index, references in ((cell.index, receiving), (source.index, sending)):
            try:
                nbytes = sum(t.nbytes for t in get(references, limit))
            except Exception as error:  # judged below, when both sides have ended
                errors[index] = error
                limit = self._timeouts.transfer_stall_s + self._timeouts.configure_s
        if not errors:
            return Heal(cell.index, cell.incarnation, source.index, nbytes, time.monotonic() - began)
        for side in (source, cell):
            failure = errors.get(side.index)
            if failure is not None and (cause := death_of(failure)) is not None:
                self._bury(side.index, cause, side.incarnation)
        cause_text = "; ".join(f"cell {index}: {first_line(error)}" for index, error in errors.items())
        logger.warning("cell %d did not heal from cell %d: %s", cell.index, source.index, cause_text)
        key = (cell.index, cell.incarnation)
        self._failed[key] += 1
        if self._failed[key] >= _ATTEMPTS:
            self._bury(cell.index, DeathCause(DeathKind.FAILED_HEAL, cause_text), cell.incarnation)
        return None
