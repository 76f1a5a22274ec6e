"""Tests on real GPUs. Without one, all of them are skipped; with one, those that need more are."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # shapes.py


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(n): needs n GPUs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), {found} found"))


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    """This process as a cell of one rank."""
    from megatron_rollout import device
    from megatron_rollout.engine import parallel

    device.setup_process()
    store, _ = parallel.serve_store("127.0.0.1")
    parallel.init_world(store, rank=0, world_size=1)
    parallel.init_megatron()
    yield


@pytest.fixture
def make_rank(world: None, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """make_rank(model, **engine settings) → a RolloutRank with random weights; its memory is released afterwards."""
    from shapes import write_config

    from megatron_rollout.cell_types import RolloutSpec
    from megatron_rollout.config import EngineConfig
    from megatron_rollout.rollout_rank import RolloutRank

    made: list[Any] = []

    def make(model: str = "0.5b", *, std: float = 0.02, **settings: Any) -> Any:
        defaults: dict[str, Any] = dict(max_sequence_length=512, max_requests=64, buffer_size_gb=2.0, num_cuda_graphs=4)
        engine = EngineConfig.for_device("cuda", **(defaults | settings))
        spec = RolloutSpec(str(write_config(model, tmp_path)), engine, dtype=engine.dtype, load_weights=False)
        rank = RolloutRank(spec)
        rank.do_randomize_weights(0, std=std)
        made.append(rank)
        return rank

    yield make
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    delete_cuda_graphs()
    for rank in made:
        rank.engine.controller = rank.engine.engine = None  # cycles through the module tree would keep the cache
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()
