"""The states of a rollout cell's engine, and the steps that lead from one to the other. See `lifecycle.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: What can be brought back by name, as in SGLang's memory tags. ["weights"] alone never wakes an engine.
TAGS = ("weights", "kv_cache", "cuda_graph")


class Step(Enum):
    """One thing that every rank of a cell does; it is over when all have done it."""

    INITIALISE = "initialise"  # engine, CUDA graphs, HTTP server
    PAUSE = "pause"  # take no engine step
    UNPAUSE = "unpause"
    SUSPEND = "suspend"  # treat the KV cache as its mode says
    RESUME = "resume"
    DETACH_GRAPHS = "detach_graphs"
    ATTACH_GRAPHS = "attach_graphs"
    OFFLOAD_WEIGHTS = "offload_weights"
    ONLOAD_WEIGHTS = "onload_weights"
    DISCARD_WEIGHTS = "discard_weights"
    ALLOCATE_WEIGHTS = "allocate_weights"  # memory without content, for the refit to fill
    CLEAR_CACHES = "clear_caches"  # KV blocks that no request uses
    EMPTY_DEVICE_CACHE = "empty_device_cache"  # the allocator's own
    ABORT_REQUESTS = "abort_requests"
    STAMP_VERSION = "stamp_version"
    STOP = "stop"


@dataclass(frozen=True)
class Created:
    """No engine yet. version: that of the loaded weights; None: they come with the first refit."""

    version: int | None


@dataclass(frozen=True)
class Awake:
    version: int


@dataclass(frozen=True)
class Paused:
    version: int


@dataclass(frozen=True)
class Suspended:
    """Weights may change. paused: the cell was paused before, and will be again. version None: contents unknown."""

    version: int | None
    paused: bool = False


@dataclass(frozen=True)
class Asleep:
    """Memory released. version None: the weights were discarded. resident: their memory is on the device."""

    version: int | None
    resident: bool


#: Where a refit begins and ends: no request is being worked on.
Resting = Created | Suspended | Asleep


@dataclass(frozen=True)
class Refitting:
    """Weights are being overwritten. origin: where the cell goes back to. deadline: on the life cycle's clock."""

    origin: Resting
    deadline: float


@dataclass(frozen=True)
class Stale:
    """Without the run's weights. origin: what the engine is in; the next refit starts and ends there.

    aborted: whether its requests in flight have been aborted. They have not where only a deadline has passed.
    """

    reason: str
    origin: Resting
    aborted: bool = True


@dataclass(frozen=True)
class Dead:
    reason: str


@dataclass(frozen=True)
class ShutDown:
    pass


State = Created | Awake | Paused | Suspended | Asleep | Refitting | Stale | Dead | ShutDown

#: What helps in each state, for messages.
HINTS: dict[type, str] = {
    Created: "call prepare_for_generation first",
    Paused: "call continue_generation first",
    Suspended: "call resume_after_refit first",
    Asleep: "call prepare_for_generation first",
    Refitting: "it has to be marked refitted, or as failed, first",
    Stale: "a refit has to succeed first",
    Dead: "it has to be restarted first",
    ShutDown: "it is over",
}


def state_name(state: State) -> str:
    return "SHUT_DOWN" if isinstance(state, ShutDown) else type(state).__name__.upper()


def describe(state: State) -> str:
    """The state's name and what matters of it, for a message."""
    if isinstance(state, Stale | Dead):
        return f"{state_name(state)} ({state.reason})"
    if isinstance(state, Asleep) and state.version is None:
        return "ASLEEP (weights discarded)"
    if isinstance(state, Created) and state.version is None:
        return "CREATED (without weights)"
    return state_name(state)
