"""The seam between a cell's HTTP server and its engine: what the leader offers to the frontend in the same process.

The engine runs in its own thread (its step loop), the server in another. Everything here may be called from the
server's thread; nothing here may block it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta


class NotServing(RuntimeError):
    """The cell takes no request now (starting, stale, asleep without weights, failed). The wires answer 503, which a
    router retries on another cell; the message is the reason."""


@dataclass(frozen=True)
class EngineStatus:
    """One consistent snapshot of a cell, cheap to take.

    state: name of the cell's state. serving: whether a request that arrives now will be answered; false until weights
        have landed, while stale, while asleep without weights, and after a failure. A paused cell is serving: requests
        wait for the resume. reason: why it does not serve, "" if it does.
    weight_version: None until weights have landed.
    running_requests/waiting_requests: admitted by the engine / queued before it. outstanding_tokens: tokens that those
        may still put through the engine. used_tokens/kv_capacity_tokens: KV cache, in tokens.
    generated_tokens/prompt_tokens: totals since the start, for rates.
    max_context_length: prompt and response together, in tokens.
    """

    state: str
    serving: bool
    reason: str = ""
    weight_version: int | None = None
    running_requests: int = 0
    waiting_requests: int = 0
    outstanding_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    used_tokens: int = 0
    kv_capacity_tokens: int = 0
    max_running_requests: int = 0
    max_context_length: int = 0
    vocab_size: int = 0
    model_name: str = ""
    model_path: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = ""
    cell: int | None = None

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, in [0, 1]."""
        return self.used_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else 0.0


class EngineClient(Protocol):
    """What a cell's leader implements.

    Commands of `call` (executed by the step loop between two steps, in the order of the calls):

    | name | arguments | result |
    | --- | --- | --- |
    | ping | | None: the loop turns |
    | pause | mode: "abort", "retract" (KV given up, recomputed), "in_place" (KV kept) | None |
    | resume | | None |
    | flush_cache | | bool: False if requests hold the cache |
    | release_memory, resume_memory | tags: tuple of "weights", "kv_cache", or None for all | None |
    | init_weights_update_group | master_address, master_port, rank_offset, world_size, group_name, backend | None |
    | destroy_weights_update_group | group_name | None |
    | begin_weight_update, end_weight_update | selector: str / none | None |
    | update_weights_from_distributed | names, dtypes, shapes, group_name and the three below | None |
    | update_weights_from_tensor | serialized_named_tensors: list[bytes], one a TP rank, and the three below | None |
    | update_weights_from_disk | model_path and the three below | None |
    | set_weight_version | version: int | None |
    | check_weights | action: str | dict, added to the reply |
    | start_profile, stop_profile | the wire's arguments / none | None |

    The three: load_format: str or None, flush_cache: bool, weight_version: int or None (not to be changed by this
    call). A command that the caller got wrong fails with
    ValueError (the wire answers 400), a cell that cannot obey now with NotServing (503), anything else is 500.
    """

    @property
    def tokenizer(self) -> Any:
        """The model's `transformers` tokenizer. The frontend only encodes and decodes with it."""
        ...

    def submit(
        self, request: GenerationRequest, on_delta: Callable[[TokenDelta], None] | None = None
    ) -> Future[GenerationOutput]:
        """Queue one sample; thread-safe, returns at once.

        on_delta is called in the engine's thread after each step in which the sample gained tokens, always before the
        future resolves. It does not raise and does not block.

        Raises ValueError for a request that this engine can never run (a duplicate request_id included), NotServing
        while it takes none. The future resolves with finish_reason "error", or an exception, if the engine fails.
        """
        ...

    def abort(self, request_id: str | None) -> None:
        """End one sample, or all (None): its future resolves with finish_reason "abort" and what was generated so far.
        An unknown id is ignored (it has finished). Thread-safe, returns at once."""
        ...

    def call(self, name: str, **arguments: Any) -> Future[Any]:
        """Queue a command (table above) for the step loop. Thread-safe, returns at once."""
        ...

    def status(self) -> EngineStatus:
        """Thread-safe and cheap: called for every request and every health probe."""
        ...
