"""What the tests share: tiny checkpoints, and processes that run megatron-core, started once for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # before anything imports Ray
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from dist_utils import RankPool
from tiny_models import FAMILIES, make_model

#: Importing torch and megatron-core takes half a minute of a busy core.
START_S = 400.0


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Hugging Face checkpoint of each family: llama, qwen2, qwen3 and qwen3-tied."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_model(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A process of its own for what runs megatron-core on one rank."""
    with RankPool(1, timeout=START_S) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout=START_S) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """For tests marked slow: four such processes take minutes to start on two cores."""
    with RankPool(4, timeout=2 * START_S) as pool:
        yield pool
