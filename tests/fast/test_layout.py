"""Rank order, cells, frontend ranks and slots, against megatron-core's own rank generator where it has one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rollout.layout import (
    Bundle,
    CellGrid,
    ParallelLayout,
    count_cells,
    frontend_ranks,
    nvlink_domain_span,
    sort_bundles,
)

sizes = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes, order=st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]))
def test_groups_are_those_of_megatron_core(tp: int, cp: int, dp: int, pp: int, order: str) -> None:
    from megatron.core.parallel_state import RankGenerator

    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    assert layout.world_size == theirs.world_size
    for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("tp", "cp"), ("tp", "pp"), ("dp", "cp")):
        assert sorted(layout.groups(*axes)) == sorted(theirs.get_ranks("-".join(axes)))


@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes)
def test_coordinates_and_rank_of_are_inverse(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp)
    seen = set()
    for rank in range(layout.world_size):
        c = layout.coordinates(rank)
        assert layout.rank_of(tp=c.tp, cp=c.cp, dp=c.dp, pp=c.pp) == rank
        seen.add(c)
    assert len(seen) == layout.world_size


@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes)
def test_frontend_ranks_are_the_first_stage_with_stride_tp(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp)
    assert layout.frontend_ranks == frontend_ranks(layout.world_size, tp=tp, pp=pp)
    assert layout.frontend_ranks == list(range(0, layout.world_size // pp, tp))
    assert len(layout.frontend_ranks) == cp * dp


def test_a_stride_of_tp_pp_would_miss_frontends() -> None:
    # 16 ranks, TP 2, PP 2: the first stage is ranks 0..7, one in two of them leads a replica.
    assert frontend_ranks(16, tp=2, pp=2) == [0, 2, 4, 6]


def test_frontend_ranks_name_both_numbers_that_disagree() -> None:
    with pytest.raises(ValueError, match=r"10 ranks are not divisible by TP\*PP = 2\*2 = 4"):
        frontend_ranks(10, tp=2, pp=2)


@given(tp=sizes, pp=sizes, cells=st.integers(1, 5))
def test_leaders_of_the_cells_are_exactly_the_frontend_ranks(tp: int, pp: int, cells: int) -> None:
    grid = CellGrid(ParallelLayout(tp=tp, pp=pp), cells)
    assert grid.frontend_ranks == frontend_ranks(grid.world_size, tp=tp, pp=pp)


@given(tp=sizes, pp=sizes, cells=st.integers(1, 5))
def test_every_rank_has_one_slot_and_a_cell_has_consecutive_ones(tp: int, pp: int, cells: int) -> None:
    grid = CellGrid(ParallelLayout(tp=tp, pp=pp), cells)
    slots = []
    for cell in range(cells):
        mine = [grid.slot(cell, local) for local in range(grid.ranks_per_cell)]
        assert mine == list(range(mine[0], mine[0] + grid.ranks_per_cell))
        for local in range(grid.ranks_per_cell):
            rank = grid.rollout_rank(cell, local)
            assert grid.cell_of(rank) == (cell, local)
            assert grid.slot_of_rank(rank) == mine[local]
        slots += mine
    assert slots == list(range(grid.world_size))
    if pp == 1:
        assert [grid.slot_of_rank(rank) for rank in range(grid.world_size)] == slots


def test_grid_refuses_internal_replicas_and_indices_outside() -> None:
    with pytest.raises(ValueError, match="a rollout cell has dp 1, got 2; use more cells"):
        CellGrid(ParallelLayout(dp=2), 1)
    grid = CellGrid(ParallelLayout(tp=2), 2)
    with pytest.raises(IndexError, match=r"cell 2 is outside 0\.\.1"):
        grid.slot(2, 0)
    with pytest.raises(IndexError, match="rank 2 is outside a world of 2"):
        grid.slot(0, 2)
    with pytest.raises(IndexError, match="rank 4 is outside a world of 4"):
        grid.cell_of(4)
    with pytest.raises(IndexError, match=r"tp index 2 is outside 0\.\.1"):
        grid.layout.rank_of(tp=2)


def test_number_of_cells() -> None:
    assert count_cells(8, ParallelLayout(tp=2, pp=2), role="rollout") == 2
    assert count_cells(8, ParallelLayout(tp=2, cp=2, dp=2), role="trainer") == 1
    with pytest.raises(ValueError, match=r"8 rollout GPUs do not make whole cells of TP=3\*PP=1 = 3 ranks"):
        count_cells(8, ParallelLayout(tp=3), role="rollout")
    with pytest.raises(ValueError, match=r"2 trainer GPUs do not make whole cells of TP=2\*PP=1\*CP=2 = 4 ranks"):
        count_cells(2, ParallelLayout(tp=2, cp=2), role="trainer")
    with pytest.raises(ValueError, match="0 rollout GPUs"):
        count_cells(0, ParallelLayout(), role="rollout")


def test_span_counts_context_and_experts_and_every_layout() -> None:
    assert nvlink_domain_span(ParallelLayout(tp=2, cp=2)) == 4
    assert nvlink_domain_span(ParallelLayout(tp=2, dp=4, ep=4, etp=2)) == 8
    assert nvlink_domain_span(ParallelLayout(tp=2), ParallelLayout(tp=8)) == 8
    assert nvlink_domain_span(ParallelLayout(pp=8)) == 1
    with pytest.raises(ValueError, match="at least one layout"):
        nvlink_domain_span()


def test_a_layout_names_every_violation_at_once() -> None:
    with pytest.raises(ValueError) as error:
        ParallelLayout(tp=0, pp=True, order="tp-pp")
    for part in ("tp must be an integer >= 1, got 0", "pp must be an integer >= 1, got True", "'tp-pp'"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"ep\*etp = 3\*1 = 3 does not divide tp\*cp\*dp = 2\*1\*2 = 4"):
        ParallelLayout(tp=2, dp=2, ep=3)
    with pytest.raises(ValueError, match="no dense axis"):
        ParallelLayout().groups("ep")


def test_bundles_are_sorted_by_number_not_by_text() -> None:
    gpus = [str(n) for n in (10, 2, 0, 11, 1, 9)]
    bundles = [Bundle(0, i, "n", "10.0.0.1", gpu) for i, gpu in enumerate(gpus)]
    assert [b.gpu for b in sort_bundles(bundles)] == ["0", "1", "2", "9", "10", "11"]
    hosts = [Bundle(0, i, f"n{i}", host) for i, host in enumerate(["10.0.0.10", "10.0.0.9"])]
    assert [b.host for b in sort_bundles(hosts)] == ["10.0.0.9", "10.0.0.10"]
    plain = [Bundle(0, i, "n", "::1") for i in (11, 3, 10)]
    assert [b.index for b in sort_bundles(plain)] == [3, 10, 11]


def test_bundles_of_a_node_stay_together_and_groups_come_first() -> None:
    bundles = [
        Bundle(1, 0, "a", "10.0.0.1", "0"),
        Bundle(0, 2, "b", "10.0.0.1", "1"),
        Bundle(0, 1, "a", "10.0.0.1", "0"),
        Bundle(0, 0, "b", "10.0.0.1", "0"),
        Bundle(0, 3, "a", "10.0.0.1", "1"),
    ]
    assert [(b.group, b.node_id, b.gpu) for b in sort_bundles(bundles)] == [
        (0, "b", "0"),
        (0, "b", "1"),
        (0, "a", "0"),
        (0, "a", "1"),
        (1, "a", "0"),
    ]


@given(st.permutations([("MIG-3", 0), ("MIG-20", 1), ("GPU-a1", 2), ("GPU-a10", 3), ("7", 4)]))
def test_any_gpu_id_sorts_and_the_order_of_arrival_does_not_matter(bundles: list[tuple[str, int]]) -> None:
    found = sort_bundles([Bundle(0, index, "n", "h", gpu) for gpu, index in bundles])
    assert [b.gpu for b in found] == ["7", "GPU-a1", "GPU-a10", "MIG-3", "MIG-20"]
