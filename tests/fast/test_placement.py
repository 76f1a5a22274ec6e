"""Placement groups and which bundle each rank gets; the Ray part runs on several raylets on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray_nodes import add_node, ray_nodes

from megatron_rollout.config import LayoutConfig, RolloutConfig
from megatron_rollout.layout import Bundle, CellGrid, ParallelLayout
from megatron_rollout.placement import Cluster, cell_bundles, init_cluster_placement_groups, rank_placement

pytestmark = pytest.mark.timeout(400)


def bundles(*groups: int) -> list[Bundle]:
    return [Bundle(g, i, f"node-{g}", f"10.0.0.{g}") for g, count in enumerate(groups) for i in range(count)]


# -- arithmetic -----------------------------------------------------------------------------------------------


def test_with_one_stage_ranks_follow_the_bundles_group_by_group() -> None:
    grid = CellGrid(ParallelLayout(tp=2), 3)
    assert rank_placement(bundles(4, 2), grid) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_unified_group_keeps_its_sorted_order() -> None:
    slots = [Bundle(0, i, "n", "h") for i in (2, 0, 3, 1)]
    assert rank_placement(slots, CellGrid(ParallelLayout(tp=4), 1)) == [(0, 2), (0, 0), (0, 3), (0, 1)]


def test_a_cell_stays_on_one_node_also_with_pipeline_stages() -> None:
    grid = CellGrid(ParallelLayout(pp=2), 2)
    slots = bundles(2, 2)
    assert [[b.node_id for b in cell_bundles(slots, grid, cell)] for cell in (0, 1)] == [["node-0"] * 2, ["node-1"] * 2]
    # Megatron's order puts the second stage behind all first ones: rank 1 leads cell 1, on the second node.
    assert rank_placement(slots, grid) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [rank_placement(slots, grid)[rank] for rank in grid.frontend_ranks] == [(0, 0), (1, 0)]


def test_too_few_or_too_many_bundles_name_both_numbers() -> None:
    with pytest.raises(ValueError, match="2 rollout cells of 2 ranks need 4 bundles, the cluster has 6"):
        rank_placement(bundles(4, 2), CellGrid(ParallelLayout(tp=2), 2))


def test_a_cluster_names_everything_wrong_with_it() -> None:
    with pytest.raises(ValueError) as error:
        Cluster([2, 0], use_gpus=False, cpus_per_bundle=0, strategy="TIGHT")
    for part in ("bundles_per_node must be integers >= 1", "[2, 0]", "cpus_per_bundle must be > 0", "'TIGHT'"):
        assert part in str(error.value)


class Recorded(Cluster):
    """Stands for a cluster where none is wanted: what it was asked for."""

    def init_placement_groups(self, strategy: str | None = None, **options: Any) -> list[Any]:
        self.asked = {"strategy": strategy, "unified": options["unified"], "one_node": options["one_node_each"]}
        return []


@pytest.mark.parametrize(
    ("tp", "colocate", "strategy", "unified", "one_node"),
    [
        (1, False, "PACK", False, False),
        (2, False, "PACK", False, True),
        (4, False, "PACK", False, True),
        (8, False, "PACK", True, False),
        (8, True, None, True, False),
        (2, True, None, False, True),
    ],
)
def test_one_unified_group_iff_the_span_exceeds_a_node(
    tp: int, colocate: bool, strategy: str | None, unified: bool, one_node: bool
) -> None:
    layout = LayoutConfig(tensor_model_parallel_size=tp)
    cluster = Recorded([4, 4], use_gpus=True)
    init_cluster_placement_groups(
        cluster, RolloutConfig(layout=layout, colocate=colocate, train_layout=layout if colocate else None)
    )
    assert cluster.asked == {"strategy": strategy, "unified": unified, "one_node": one_node}
    init_cluster_placement_groups(
        cluster,
        {
            "megatron_cfg": {"tensor_model_parallel_size": tp},
            "generation": {"colocated": {"enabled": colocate}, "mcore_generation_config": {}},
        },
    )
    assert cluster.asked == {"strategy": strategy, "unified": unified, "one_node": one_node}


def test_the_trainers_layout_counts_when_colocated() -> None:
    cluster = Recorded([4, 4], use_gpus=True)
    wide = LayoutConfig(tensor_model_parallel_size=4, context_parallel_size=2)
    init_cluster_placement_groups(cluster, RolloutConfig(train_layout=wide, colocate=True))
    assert cluster.asked["unified"]


# -- Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    gpus = {"num_gpus": 2, "env_vars": {"CUDA_VISIBLE_DEVICES": "10,2"}}  # as a node does whose other GPUs are taken
    with ray_nodes([{"num_cpus": 2}, {"num_cpus": 2, **gpus}]) as cluster:
        yield cluster


@pytest.fixture
def made(nodes: Any) -> Iterator[list[Cluster]]:
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.shutdown()


def free(kind: str, amount: float) -> None:
    """Waits until Ray has `amount` of a resource free again."""
    import ray

    until = time.monotonic() + 30
    while ray.available_resources().get(kind, 0) != amount:
        assert time.monotonic() < until, ray.available_resources()
        time.sleep(0.1)


def test_gpu_10_comes_after_gpu_2(made: list[Cluster]) -> None:
    cluster = Cluster([2], use_gpus=True, cpus_per_bundle=0.5)
    made.append(cluster)
    init_cluster_placement_groups(cluster, RolloutConfig(layout=LayoutConfig(tensor_model_parallel_size=2)))
    assert [bundle.gpu for bundle in cluster.bundles] == ["2", "10"]
    by_index = {bundle.index: bundle.gpu for bundle in cluster.bundles}
    placed = rank_placement(cluster.bundles, CellGrid(ParallelLayout(tp=2), 1))
    assert [by_index[index] for _, index in placed] == ["2", "10"]


def test_groups_per_node_or_one_for_all_and_actors_run_where_the_bundle_says(made: list[Cluster]) -> None:
    import ray

    apart = Cluster([1, 1], use_gpus=False)
    together = Cluster([1, 1], use_gpus=False)
    made += [apart, together]
    init_cluster_placement_groups(apart, RolloutConfig())
    init_cluster_placement_groups(together, RolloutConfig(layout=LayoutConfig(tensor_model_parallel_size=2)))
    assert [(b.group, b.index) for b in apart.bundles] == [(0, 0), (1, 0)]
    assert [b.group for b in together.bundles] == [0, 0]
    assert apart.init_placement_groups() == apart.placement_groups  # again: those that are there

    @ray.remote(num_cpus=1)
    def where() -> str:
        return ray.get_runtime_context().get_node_id()

    both = apart.bundles + together.bundles
    places = [cluster.scheduling(b) for cluster in (apart, together) for b in cluster.bundles]
    found = ray.get([where.options(scheduling_strategy=place).remote() for place in places], timeout=120)
    assert found == [bundle.node_id for bundle in both]
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    assert [bundle.host for bundle in both] == [hosts[node] for node in found]


def test_no_room_is_a_clear_error_and_reserves_nothing(nodes: Any) -> None:
    free("CPU", 4)
    with pytest.raises(
        TimeoutError, match=r"no place for \[2, 3\] bundles a node within 1 s \(5 CPU asked for, \d of 4"
    ):
        Cluster([2, 3], use_gpus=False).init_placement_groups(timeout_s=1)
    free("CPU", 4)


def test_ranks_that_need_one_node_are_not_spread_silently(nodes: Any) -> None:
    config = RolloutConfig(layout=LayoutConfig(tensor_model_parallel_size=2))
    cluster = Cluster([3], use_gpus=False)
    with pytest.raises(
        RuntimeError, match=r"placed on several nodes because none has enough room: group 0: \d on node"
    ):
        init_cluster_placement_groups(cluster, config)
    free("CPU", 4)


def test_bundles_of_a_lost_node_move_and_keep_their_slots(nodes: Any, made: list[Cluster]) -> None:
    import ray

    doomed = add_node(nodes, resources={"doomed": 1})
    [doomed_id] = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("doomed")]
    cluster = Cluster([1] * 3, use_gpus=False)
    made.append(cluster)
    # SPREAD over a single unified group is the way to be on the third node for sure.
    cluster.init_placement_groups("STRICT_SPREAD", unified=True, timeout_s=60)
    before = cluster.bundles
    assert sum(bundle.node_id == doomed_id for bundle in before) == 1
    nodes.remove_node(doomed, allow_graceful=False)
    add_node(nodes)
    until = time.monotonic() + 120
    while any(node["Alive"] for node in ray.nodes() if node["NodeID"] == doomed_id):
        assert time.monotonic() < until, "Ray does not notice that a node is gone"
        time.sleep(0.2)
    [moved] = cluster.relocate(timeout_s=120)
    after = cluster.bundles
    assert [(b.group, b.index) for b in after] == [(b.group, b.index) for b in before]
    assert [a.node_id != b.node_id for a, b in zip(after, before, strict=True)].count(True) == 1
    assert moved.node_id != doomed_id and moved in after
    assert moved.node_id in {node["NodeID"] for node in ray.nodes() if node["Alive"]}
