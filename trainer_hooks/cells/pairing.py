"""Which trainer cell refits which rollout cell. Pure; a new plan is made before each refit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainer_hooks.cells.quorum import NoLiveCells


@dataclass(frozen=True)
class PairPlan:
    """pairs: (rollout cell, trainer cell), sorted by rollout cell."""

    pairs: tuple[tuple[int, int], ...]

    def source_of(self, rollout_cell: int) -> int:
        """Raises KeyError if the rollout cell takes no part in this refit."""
        for rollout, trainer in self.pairs:
            if rollout == rollout_cell:
                return trainer
        raise KeyError(f"rollout cell {rollout_cell} is not in this plan: {list(self.pairs)}")

    def rollout_cells_of(self, trainer_cell: int) -> tuple[int, ...]:
        return tuple(rollout for rollout, trainer in self.pairs if trainer == trainer_cell)

    @property
    def sources(self) -> tuple[int, ...]:
        """Trainer cells that have something to send, each once, in order."""
        return tuple(sorted({trainer for _, trainer in self.pairs}))


def plan_pairs(trainer_cells: int, live_trainer_cells: Iterable[int], rollout_cells: Iterable[int]) -> PairPlan:
    """Rollout cell j belongs to trainer cell j mod N (N = `trainer_cells`, configured); if that one is not alive, to
    the next live index, cyclically. rollout_cells: those that take part, dead ones left out.

    Raises:
        NoLiveCells: no trainer cell is alive.
        ValueError: a live index outside 0 .. N - 1, or a negative rollout cell.
    """
    live = sorted(set(live_trainer_cells))
    if trainer_cells < 1 or any(not 0 <= cell < trainer_cells for cell in live):
        raise ValueError(f"live trainer cells {live} must lie in 0 .. {trainer_cells - 1}")
    if not live:
        raise NoLiveCells(f"none of the {trainer_cells} trainer cells is alive: no source for a refit")
    alive = set(live)
    pairs = []
    for rollout in sorted(set(rollout_cells)):
        if rollout < 0:
            raise ValueError(f"rollout cell {rollout} is negative")
        owner = next(cell for k in range(trainer_cells) if (cell := (rollout + k) % trainer_cells) in alive)
        pairs.append((rollout, owner))
    return PairPlan(tuple(pairs))
