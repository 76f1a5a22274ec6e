"""Who is where: rank order of a Megatron world, cells and their leaders, frontend ranks, GPU slots. Pure arithmetic.

Three numberings occur, and only this file converts between them:

* *local rank*: rank of a process in its cell's own world, 0 is the leader. Megatron's order: TP fastest, PP slowest.
* *rollout rank*: position among all ranks of the rollout side when its cells are read as the data-parallel replicas of
  one Megatron world (dp = number of cells). Frontend ranks and reserved ports are keyed by it.
* *slot*: position in the list of GPU bundles, nodes one after another. Cells take consecutive slots, so that a cell
  spans as few nodes as it can and the loss of a node takes as few cells as it can. With PP = 1 slot = rollout rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_DENSE_AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank on the dense axes of a layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes of one Megatron world, and the order in which ranks run through them.

    order: axes from the fastest to the slowest, as in `megatron.core.parallel_state.initialize_model_parallel`. Expert
    axes (ep, etp) divide the same ranks a second time: `ep * etp` must divide `tp * cp * dp`.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        problems = []
        for name in ("tp", "pp", "cp", "dp", "ep", "etp"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                problems.append(f"{name} must be an integer >= 1, got {size!r}")
        if sorted(self.order.split("-")) != sorted(DEFAULT_ORDER.split("-")):
            problems.append(f"order must name each of {DEFAULT_ORDER} once, got {self.order!r}")
        if not problems and (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            problems.append(
                f"ep*etp = {self.ep}*{self.etp} = {self.ep * self.etp} does not divide "
                f"tp*cp*dp = {self.tp}*{self.cp}*{self.dp} = {self.tp * self.cp * self.dp}"
            )
        if problems:
            raise ValueError("parallel layout: " + "; ".join(problems))

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def nvlink_span(self) -> int:
        """Ranks of the largest group that talks inside every layer: max(TP·CP, ETP·EP)."""
        return max(self.tp * self.cp, self.etp * self.ep)

    @property
    def frontend_ranks(self) -> list[int]:
        """Ranks with tp_rank 0 and pp_rank 0: one a data- and context-parallel replica. They host the HTTP servers."""
        return [rank for rank in range(self.world_size) if (c := self.coordinates(rank)).tp == 0 and c.pp == 0]

    def coordinates(self, rank: int) -> Coordinates:
        """Position of `rank`. Raises IndexError outside the world."""
        self._check(rank)
        return Coordinates(**{axis: rank // self._stride(axis) % getattr(self, axis) for axis in _DENSE_AXES})

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Rank at a position. Raises IndexError where an index is outside its axis."""
        rank = 0
        for axis, index in zip(_DENSE_AXES, (tp, cp, dp, pp), strict=True):
            if not 0 <= index < getattr(self, axis):
                raise IndexError(f"{axis} index {index} is outside 0..{getattr(self, axis) - 1}")
            rank += index * self._stride(axis)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """The process groups over `axes` (dense axes only), as rank lists; e.g. `groups("tp", "cp")`."""
        if unknown := set(axes) - set(_DENSE_AXES):
            raise ValueError(f"no dense axis {sorted(unknown)}; choose among {list(_DENSE_AXES)}")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = self.coordinates(rank)
            key = tuple(getattr(position, axis) for axis in _DENSE_AXES if axis not in axes)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    def _stride(self, axis: str) -> int:
        names = [name for name in self.order.split("-") if name in _DENSE_AXES]
        return math.prod(getattr(self, name) for name in names[: names.index(axis)])

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a world of {self.world_size}")


def frontend_ranks(world_size: int, *, tp: int, pp: int) -> list[int]:
    """Frontend ranks of `world_size` ranks in Megatron's default order: `range(0, world_size // pp, tp)`.

    PP is slowest, so its first stage is a leading slice; TP is fastest, so it is the stride. CP and DP are not divided
    out: each of their ranks leads a replica. Raises ValueError if TP·PP does not divide the world.
    """
    if world_size % (tp * pp):
        raise ValueError(f"{world_size} ranks are not divisible by TP*PP = {tp}*{pp} = {tp * pp}")
    return list(range(0, world_size // pp, tp))


def nvlink_domain_span(*layouts: ParallelLayout) -> int:
    """GPUs that must share an NVLink domain for every one of `layouts` (both of them when colocated)."""
    if not layouts:
        raise ValueError("nvlink_domain_span needs at least one layout")
    return max(layout.nvlink_span for layout in layouts)


def count_cells(gpus: int, layout: ParallelLayout, *, role: str) -> int:
    """How many cells of `layout` fill `gpus` GPUs exactly. `role` ("rollout", "trainer") is for the message.

    Raises ValueError naming the two numbers that disagree.
    """
    sizes = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "DP": layout.dp}
    product = "*".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP"))
    if gpus < layout.world_size or gpus % layout.world_size:
        raise ValueError(f"{gpus} {role} GPUs do not make whole cells of {product} = {layout.world_size} ranks")
    return gpus // layout.world_size


@dataclass(frozen=True)
class CellGrid:
    """All rollout cells together: `num_cells` cells of one replica each (`layout.dp == layout.cp == 1`)."""

    layout: ParallelLayout
    num_cells: int

    def __post_init__(self) -> None:
        if self.num_cells < 1:
            raise ValueError(f"num_cells must be >= 1, got {self.num_cells}")
        for axis in ("dp", "cp"):
            if getattr(self.layout, axis) != 1:
                raise ValueError(
                    f"a rollout cell has {axis} 1, got {getattr(self.layout, axis)}; use more cells instead"
                )

    @property
    def ranks_per_cell(self) -> int:
        return self.layout.world_size

    @property
    def world_size(self) -> int:
        return self.num_cells * self.ranks_per_cell

    @property
    def frontend_ranks(self) -> list[int]:
        """Rollout rank of each cell's leader, by cell."""
        return [self.rollout_rank(cell, 0) for cell in range(self.num_cells)]

    def rollout_rank(self, cell: int, local_rank: int) -> int:
        """The rollout rank of a cell's local rank (see the numberings above)."""
        if not 0 <= cell < self.num_cells:
            raise IndexError(f"cell {cell} is outside 0..{self.num_cells - 1}")
        position = self.layout.coordinates(local_rank)
        return self._together.rank_of(tp=position.tp, dp=cell, pp=position.pp)

    def cell_of(self, rollout_rank: int) -> tuple[int, int]:
        """(cell, local rank) of a rollout rank."""
        position = self._together.coordinates(rollout_rank)
        return position.dp, self.layout.rank_of(tp=position.tp, pp=position.pp)

    def slot(self, cell: int, local_rank: int) -> int:
        """Slot that a cell's local rank occupies: cells lie one after another."""
        self.rollout_rank(cell, local_rank)  # range checks
        return cell * self.ranks_per_cell + local_rank

    def slot_of_rank(self, rollout_rank: int) -> int:
        return self.slot(*self.cell_of(rollout_rank))

    @property
    def _together(self) -> ParallelLayout:
        return replace(self.layout, dp=self.num_cells)


@dataclass(frozen=True)
class Bundle:
    """One GPU's worth of a Ray placement group.

    group: index of the placement group. index: of the bundle in it. node_id, host: the node the bundle is on and that
    node's address. gpu: the GPU's id on that node as Ray reports it ("10", a UUID, None without GPUs).
    """

    group: int
    index: int
    node_id: str
    host: str
    gpu: str | None = None


def sort_bundles(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Bundles in slot order: group by group, in a group node by node, on a node by GPU number (10 after 2).

    Nodes come in the numerical order of their addresses; those that share one (several raylets on a machine) in the
    order of their first bundle. Without GPU ids the bundle index decides.
    """
    first: dict[tuple[int, str], int] = {}
    for bundle in bundles:
        key = (bundle.group, bundle.node_id)
        first[key] = min(first.get(key, bundle.index), bundle.index)

    def order(bundle: Bundle) -> tuple[object, ...]:
        node = (_natural(bundle.host), first[bundle.group, bundle.node_id])
        return (bundle.group, node, _natural(bundle.gpu or ""), bundle.index)

    return sorted(bundles, key=order)


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key that compares runs of digits as numbers."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for char in text + "\0":
        if char.isascii() and char.isdigit():
            digits += char
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        if char != "\0":
            parts.append((1, 0, char))
    return parts
