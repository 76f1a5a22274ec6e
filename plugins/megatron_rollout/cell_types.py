"""What crosses the border between a rollout cell's processes and its owner. Light: neither torch nor megatron-core.

A driver that only owns cells never imports the model code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class EngineFailed(RuntimeError):
    """The cell's engine failed; the message holds the first cause."""


class CommandError(RuntimeError):
    """A command failed on at least one rank of the cell; the message names rank and cause."""


@dataclass(frozen=True)
class RolloutSpec:
    """What every rank of a rollout cell is built from.

    engine: a `config.EngineConfig`. load_weights: False leaves the weights to the first refit; the cell serves nothing
    before it. initial_version: the version that the checkpoint's weights have.
    """

    hf_checkpoint: str
    engine: Any
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    dtype: str = "float32"
    load_weights: bool = True
    initial_version: int = 0
    model_overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellFailed:
    """The cell's engine failed with `cause`; what it had in flight will not come."""

    cause: str


@dataclass(frozen=True)
class CellStatus:
    """What the driver asks of a leader, cheap to take.

    turns, steps: of the step loop, for progress. outstanding: requests. kv_usage: share of the KV cache in use.
    """

    serving: bool
    reason: str
    version: int
    outstanding: int
    steps: int
    turns: int
    tokens_generated: int
    kv_usage: float
