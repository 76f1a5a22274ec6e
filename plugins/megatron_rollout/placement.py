"""Where the ranks of the rollout cells run: Ray placement groups, and which bundle each rank gets.

The order of slots is decided once, in `layout.sort_bundles`, and everything that needs a place (worker start, address
reservation) asks the same `Cluster` for it, so that they agree. Ray is imported only inside functions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rollout import megatron_cfg
from megatron_rollout.config import RolloutConfig
from megatron_rollout.layout import Bundle, CellGrid, sort_bundles

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class Cluster:
    """What one side of a run holds of a Ray cluster: one bundle a rank.

    bundles_per_node: ranks on each node. use_gpus: a bundle is one GPU (and `cpus_per_bundle` CPUs), else CPUs only.
    strategy: of the placement groups where the caller of `init_placement_groups` has no opinion.
    """

    def __init__(
        self,
        bundles_per_node: Sequence[int],
        *,
        use_gpus: bool,
        cpus_per_bundle: float = 1,
        strategy: str = "PACK",
        name: str = "rollout",
    ) -> None:
        problems = []
        if not bundles_per_node or any(
            isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in bundles_per_node
        ):
            problems.append(f"bundles_per_node must be integers >= 1, one a node, got {list(bundles_per_node)}")
        if cpus_per_bundle <= 0:
            problems.append(f"cpus_per_bundle must be > 0, got {cpus_per_bundle}")
        if strategy not in STRATEGIES:
            problems.append(f"strategy must be one of {list(STRATEGIES)}, got {strategy!r}")
        if problems:
            raise ValueError("cluster: " + "; ".join(problems))
        self.bundles_per_node = tuple(bundles_per_node)
        self.use_gpus = use_gpus
        self.strategy = strategy
        self.name = name
        self._resources = {"CPU": cpus_per_bundle} | ({"GPU": 1} if use_gpus else {})
        self._groups: list[Any] = []
        self._bundles: list[Bundle] = []

    @property
    def world_size(self) -> int:
        return sum(self.bundles_per_node)

    @property
    def num_gpus_per_node(self) -> int:
        """Most bundles of a node: what fits into one NVLink domain at the least."""
        return max(self.bundles_per_node)

    @property
    def placement_groups(self) -> list[Any]:
        return self.init_placement_groups()

    @property
    def bundles(self) -> list[Bundle]:
        """All bundles in slot order."""
        self.init_placement_groups()
        return list(self._bundles)

    def init_placement_groups(
        self,
        strategy: str | None = None,
        *,
        unified: bool = False,
        one_node_each: bool = False,
        timeout_s: float = 120.0,
    ) -> list[Any]:
        """Create the placement groups and wait for them; later calls return what is there.

        strategy: None leaves the cluster's own. unified: one group over all nodes, else one a node. one_node_each: a
        group that Ray spread over nodes is an error.
        Raises TimeoutError if they are not there after `timeout_s` seconds, with what was asked for and what is free;
        RuntimeError for a group that is spread. Nothing stays reserved then.
        """
        if self._groups:
            return list(self._groups)
        from ray.util import placement_group

        counts = [self.world_size] if unified else self.bundles_per_node
        run = uuid.uuid4().hex[:8]  # Ray takes its time to forget the name of a group that was removed
        deadline = time.monotonic() + timeout_s
        try:
            for number, count in enumerate(counts):
                bundles = [dict(self._resources) for _ in range(count)]
                group = placement_group(bundles, strategy=strategy or self.strategy, name=f"{self.name}-{run}-{number}")
                self._groups.append(group)
            self._wait(deadline, timeout_s)
            found = self._locate(max(1.0, deadline - time.monotonic()))
            if one_node_each:
                _check_not_spread(found)
        except BaseException:
            self.shutdown()
            raise
        self._bundles = sort_bundles(found)
        return list(self._groups)

    def scheduling(self, bundle: Bundle) -> Any:
        """Ray's `scheduling_strategy` for an actor in `bundle`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self._groups[bundle.group], placement_group_bundle_index=bundle.index
        )

    def relocate(self, timeout_s: float = 120.0) -> list[Bundle]:
        """Look again where the bundles are: Ray moves those of a lost node to another one. The slots stay the same.

        To be called once Ray knows of the loss (`ray.nodes()`). Returns the bundles that have moved. Raises
        TimeoutError if some have no node after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        self._wait(deadline, timeout_s)
        now = {(b.group, b.index): b for b in self._locate(max(1.0, deadline - time.monotonic()), known=self._bundles)}
        before, self._bundles = self._bundles, [now[b.group, b.index] for b in self._bundles]
        return [bundle for old, bundle in zip(before, self._bundles, strict=True) if old.node_id != bundle.node_id]

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Give the bundles back, and wait until Ray has them. What runs in them is killed by Ray. Idempotent.

        Raises TimeoutError if they are not back after `timeout_s` seconds.
        """
        import ray
        from ray.util import placement_group_table, remove_placement_group

        groups, self._groups, self._bundles = self._groups, [], []
        if not ray.is_initialized():  # disconnected: Ray has removed them already, and asking would start a new cluster
            return
        for group in groups:
            remove_placement_group(group)
        deadline = time.monotonic() + timeout_s
        for group in groups:
            while placement_group_table(group).get("state") != "REMOVED":
                if time.monotonic() > deadline:
                    raise TimeoutError(f"placement group {group.id.hex()} is not removed after {timeout_s:g} s")
                time.sleep(0.05)

    def _wait(self, deadline: float, timeout_s: float) -> None:
        """Until every bundle is on a live node (of a group whose node is lost Ray says for a while that it is fine)."""
        import ray
        from ray.util import placement_group_table

        while True:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            tables = [placement_group_table(group) for group in self._groups]
            if all(t["state"] == "CREATED" and set(t["bundles_to_node_id"].values()) <= alive for t in tables):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(self._shortage(timeout_s))
            time.sleep(0.05)

    def _locate(self, timeout_s: float, known: Sequence[Bundle] = ()) -> list[Bundle]:
        """Every bundle with its node; on GPUs, with the GPU's id too. known: not asked again if on the same node."""
        import ray
        from ray.util import placement_group_table

        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        found = []
        for number, group in enumerate(self._groups):
            nodes = placement_group_table(group)["bundles_to_node_id"]
            found += [Bundle(number, index, node, hosts[node]) for index, node in nodes.items()]
        if not self.use_gpus:
            return found
        kept = [b for b in known if replace(b, gpu=None) in found]
        unknown = [b for b in found if b not in {replace(k, gpu=None) for k in kept}]
        # Only a process inside the bundle is told which GPU it is.
        probe = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_gpu_id)
        references = [probe.options(scheduling_strategy=self.scheduling(bundle)).remote() for bundle in unknown]
        try:
            ids = ray.get(references, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"{self.name}: {len(unknown)} bundles did not say which GPUs they are within {timeout_s:g} s"
            ) from None
        return kept + [replace(bundle, gpu=gpu) for bundle, gpu in zip(unknown, ids, strict=True)]

    def _shortage(self, timeout_s: float) -> str:
        import ray

        free, there = ray.available_resources(), ray.cluster_resources()
        lines = [
            f"{amount * self.world_size:g} {kind} asked for, {free.get(kind, 0):g} of {there.get(kind, 0):g} free"
            for kind, amount in self._resources.items()
        ]
        per_node = list(self.bundles_per_node)
        return f"{self.name}: no place for {per_node} bundles a node within {timeout_s:g} s ({'; '.join(lines)})"


def _gpu_id() -> str:
    import ray

    return str(ray.get_gpu_ids()[0])


def _check_not_spread(bundles: Sequence[Bundle]) -> None:
    nodes: dict[int, dict[str, int]] = {}
    for bundle in bundles:
        counts = nodes.setdefault(bundle.group, {})
        counts[bundle.node_id] = counts.get(bundle.node_id, 0) + 1
    spread = [
        f"group {group}: {', '.join(f'{count} on node {node[:8]}' for node, count in sorted(counts.items()))}"
        for group, counts in sorted(nodes.items())
        if len(counts) > 1
    ]
    if spread:
        raise RuntimeError(
            "ranks that need one NVLink domain were placed on several nodes because none has enough room: "
            + "; ".join(spread)
        )


def init_cluster_placement_groups(
    cluster: Cluster, config: RolloutConfig | Mapping[str, Any], *, timeout_s: float = 120.0
) -> None:
    """Create the placement groups that `config` needs; nothing if they exist.

    config: a `RolloutConfig`, or a mapping in the form of `megatron_cfg.py`. Colocated: the cluster's own strategy (the
    trainer was there first), else PACK. One unified group iff the NVLink span exceeds the GPUs of a node.
    """
    if isinstance(config, RolloutConfig):
        colocated, span, timeout_s = config.colocate, config.nvlink_span, config.timeouts.reserve_s
    else:
        colocated, span = megatron_cfg.is_colocated(config), megatron_cfg.nvlink_domain_span(config)
    unified = span > cluster.num_gpus_per_node
    cluster.init_placement_groups(
        None if colocated else "PACK", unified=unified, one_node_each=span > 1 and not unified, timeout_s=timeout_s
    )


def check_room(bundles: Sequence[Bundle], grid: CellGrid) -> None:
    """Raises ValueError unless there is exactly one bundle a rank."""
    if len(bundles) != grid.world_size:
        raise ValueError(
            f"{grid.num_cells} rollout cells of {grid.ranks_per_cell} ranks need {grid.world_size} bundles, "
            f"the cluster has {len(bundles)}"
        )


def rank_placement(bundles: Sequence[Bundle], grid: CellGrid) -> list[tuple[int, int]]:
    """(placement group, bundle) of each rollout rank. bundles: in slot order (`Cluster.bundles`)."""
    check_room(bundles, grid)
    places = [bundles[grid.slot_of_rank(rank)] for rank in range(grid.world_size)]
    return [(bundle.group, bundle.index) for bundle in places]


def cell_bundles(bundles: Sequence[Bundle], grid: CellGrid, cell: int) -> list[Bundle]:
    """The bundles of a cell, by local rank. bundles: in slot order."""
    check_room(bundles, grid)
    return [bundles[grid.slot(cell, local)] for local in range(grid.ranks_per_cell)]
