"""What the refit tests run inside ranks: models in a layout, weights that can be told apart, both ends of a transfer.

Sources and destinations are ranks of different pools, so that each side has a world of its own, as in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dist_utils import RankPool


@dataclass(frozen=True)
class Layout:
    """tp, pp, cp of one side. cells: that many cells of one rank each instead (they share the pool's world)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    cells: int = 1


@dataclass(frozen=True)
class Job:
    """One refit between two pools: the store, and how many ranks each side has."""

    store_port: int
    name: str
    sources: int
    destinations: int
    transport: str = "reshard"
    timeout_s: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)

    def group(self, rank: int, shard: Any, *, source: bool) -> Any:
        """This rank's end, not joined yet."""
        from megatron_rollout.weight_sync.member import as_source, make

        place = as_source(shard, self.transport) if source else {"destination_offset": self.sources}
        return make(
            self.transport,
            host="127.0.0.1",
            port=self.store_port,
            name=self.name,
            rank=rank if source else self.sources + rank,
            world_size=self.sources + self.destinations,
            source_ranks=self.sources,
            timeout_s=self.timeout_s,
            **place,
            **self.options,
        )


def on_both(
    sources: RankPool, source: Callable[..., Any], destinations: RankPool, destination: Callable[..., Any], *args: Any
) -> tuple[list[Any], list[Any]]:
    """Run a function on the ranks of each pool at the same time; what each side returned, in rank order."""
    results: dict[str, Any] = {}

    def run(side: str, pool: RankPool, fn: Callable[..., Any]) -> None:
        try:
            results[side] = pool.run(fn, *args)
        except BaseException as error:  # raised in the test's own thread below
            results[side] = error

    threads = [
        threading.Thread(target=run, args=("source", sources, source)),
        threading.Thread(target=run, args=("destination", destinations, destination)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for side in ("source", "destination"):
        if isinstance(results[side], BaseException):
            raise results[side]
    return results["source"], results["destination"]


def own_cell_groups() -> Any:
    """Process groups of a cell of one rank, inside whatever world this rank is in. Collective over the world."""
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    names = [
        "tp",
        "pp",
        "cp",
        "dp",
        "mp",
        "embd",
        "pos_embd",
        "tp_cp",
        "dp_cp",
        "ep",
        "expt_tp",
        "expt_dp",
        "tp_ep",
        "tp_ep_pp",
    ]
    return ProcessGroupCollection(**dict.fromkeys(names, mine))


@dataclass
class TestShard:
    """A model without engine or optimizer, as transports see one."""

    __test__ = False
    model: Any
    weight_map: Any
    groups: Any

    def checksums(self) -> dict[str, str]:
        from megatron_rollout.weight_sync.checksum import hf_checksums

        return hf_checksums(self.model, self.weight_map, tp_group=self.groups.tp, pp_group=self.groups.pp)


def shard_of(checkpoint: str, layout: Layout, dtype: str = "float32") -> TestShard:
    """This rank's part of a model with weights of no meaning."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron_ranks import use_layout

    from megatron_rollout.engine.architecture import read_architecture
    from megatron_rollout.engine.model import build_model, transformer_config
    from megatron_rollout.engine.weights import WeightMap

    use_layout(layout.tp, layout.pp, layout.cp)
    groups = own_cell_groups() if layout.cells > 1 else ProcessGroupCollection.use_mpu_process_groups()
    architecture = read_architecture(checkpoint)
    config = transformer_config(architecture, tp=layout.tp, pp=layout.pp, cp=layout.cp, dtype=getattr(torch, dtype))
    model = build_model(architecture, config, max_sequence_length=128, pg_collection=groups)
    weights = WeightMap(
        architecture,
        tp=layout.tp,
        tp_rank=groups.tp.rank(),
        layer_offset=get_transformer_layer_offset(config, pp_rank=groups.pp.rank()),
    )
    return TestShard(model, weights, groups)


def load_scaled(shard: Any, checkpoint: str, factor: float) -> None:
    """The checkpoint's weights times `factor`: the same whatever the layout."""
    import torch

    from megatron_rollout.engine.checkpoint import load_hf

    load_hf(shard.model, shard.weight_map, checkpoint)
    with torch.no_grad():
        for parameter in shard.model.parameters():
            parameter.mul_(factor)


def scramble(model: Any) -> None:
    """Weights that no transfer would leave behind."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
