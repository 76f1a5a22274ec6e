"""What the refit tests run inside ranks: both ends of a transfer, models whose weights can be told apart.

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
    """One refit between two pools: the store, and how many ranks each side has. options: of the transport."""

    store_port: int
    name: str
    sources: int
    destinations: int
    transport: str = "reshard"
    timeout_s: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def common(self) -> dict[str, Any]:
        """What every member gets, as the driver says it."""
        return dict(
            host="127.0.0.1",
            port=self.store_port,
            name=self.name,
            world_size=self.sources + self.destinations,
            source_ranks=self.sources,
            timeout_s=self.timeout_s,
            **self.options,
        )


class Sender:
    """The trainer side of a job, as `TrainerWorker` drives it. shard: a `TrainerRank` or a `BareShard`."""

    def __init__(self, job: Job, rank: int, shard: Any) -> None:
        from megatron_rollout.weight_sync.member import RefitMember, as_source

        self.shard = shard
        self.member = RefitMember()
        arguments = {**as_source(shard, job.transport), **job.common, "rank": rank}
        self.member.join([arguments], transport=job.transport)

    def send(self, version: int, within_s: float | None = None) -> int:
        """The bytes that this rank sent."""
        try:
            self.member.prepare(self.shard, None, version=version, within_s=within_s)
            self.member.move()
        except BaseException:
            self.member.leave()
            raise
        return self.member.bytes_sent


def join_as_destination(job: Job, rollout: Any) -> None:
    """`rollout` (a `RolloutRank`) joins. Cells that share one world have its ranks in their process groups, too."""
    import torch.distributed as dist

    arguments = {**job.common, "rank": job.sources + dist.get_rank(), "destination_offset": job.sources}
    rollout.refit_member.join([arguments], transport=job.transport)


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


@dataclass
class BareShard:
    """A model without engine or optimizer, as transports see one."""

    model: Any
    weight_map: Any
    groups: Any

    def checksums(self) -> dict[str, str]:
        return checksums(self)


def checksums(shard: Any) -> dict[str, str]:
    """By Hugging Face name, from all ranks of the cell."""
    from megatron_rollout.weight_sync.checksum import hf_checksums

    return hf_checksums(shard.model, shard.weight_map, tp_group=shard.groups.tp, pp_group=shard.groups.pp)


def shard_of(checkpoint: str, layout: Layout, dtype: str = "float32", factor: float = 1.0) -> BareShard:
    """This rank's part of the checkpoint's model, its weights times `factor`."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron_ranks import use_layout

    from megatron_rollout.engine.architecture import read_architecture
    from megatron_rollout.engine.model import build_model, transformer_config
    from megatron_rollout.engine.weights import WeightMap

    use_layout(layout.tp, layout.pp, layout.cp)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    architecture = read_architecture(checkpoint)
    config = transformer_config(architecture, tp=layout.tp, pp=layout.pp, cp=layout.cp, dtype=getattr(torch, dtype))
    model = build_model(architecture, config, max_sequence_length=128, pg_collection=groups)
    weights = WeightMap(
        architecture,
        tp=layout.tp,
        tp_rank=groups.tp.rank(),
        layer_offset=get_transformer_layer_offset(config, pp_rank=groups.pp.rank()),
    )
    shard = BareShard(model, weights, groups)
    load_scaled(shard, checkpoint, factor)
    return shard


def load_scaled(shard: Any, checkpoint: str, factor: float) -> None:
    """The checkpoint's weights times `factor`: the same whatever the layout."""
    import torch

    from megatron_rollout.engine.checkpoint import load_hf

    load_hf(shard.model, shard.weight_map, checkpoint)
    with torch.no_grad():
        for parameter in shard.model.parameters():
            parameter.mul_(factor)


def rollout_of(checkpoint: str, layout: Layout, dtype: str = "float32", *, load: bool = False, **engine: Any) -> Any:
    """A `RolloutRank` in `layout`, without weights unless `load`."""
    import torch
    from megatron_ranks import use_layout

    from megatron_rollout.cell_types import RolloutSpec
    from megatron_rollout.config import EngineConfig
    from megatron_rollout.engine.parallel import second_layout
    from megatron_rollout.rollout_rank import RolloutRank

    use_layout(layout.tp, layout.pp)
    options: dict[str, Any] = dict(max_sequence_length=128, max_requests=16, buffer_size_gb=0.02, dtype=dtype) | engine
    spec = RolloutSpec(
        checkpoint,
        EngineConfig.for_device("cpu", **options),
        tp=layout.tp,
        pp=layout.pp,
        dtype=dtype,
        load_weights=load,
    )
    torch.manual_seed(0)
    if layout.cells == 1:
        return RolloutRank(spec)
    groups = second_layout(tp=1, pp=1)
    return RolloutRank(spec, pg_collection=groups, cell_group=groups.mp)


def save(shard: Any, directory: str, checkpoint: str, writes: bool = True) -> None:
    """`shard`'s weights as a Hugging Face checkpoint. Collective over the cell."""
    from megatron_rollout.engine.checkpoint import save_hf

    save_hf(
        shard.model,
        shard.weight_map,
        directory,
        tp_group=shard.groups.tp,
        pp_group=shard.groups.pp,
        source=checkpoint,
        writes=writes,
    )


def greedy(rollout: Any, count: int = 4, tokens: int = 8) -> dict[str, Any]:
    """Greedy outputs of a few prompts: {id: (tokens, logprobs)}."""
    from megatron_ranks import drain
    from tiny_models import random_prompts

    from megatron_rollout.requests import GenerationRequest, SamplingParams

    for i, prompt in enumerate(random_prompts(count)):
        params = SamplingParams(temperature=0, max_new_tokens=tokens)
        rollout.engine.add(GenerationRequest(str(i), tuple(prompt), params))
    return {k: (o.output_ids, o.logprobs) for k, o in drain(rollout.engine).items()}
