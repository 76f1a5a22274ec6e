"""A cell's leader as its HTTP server sees it: `EngineClient` over the step loop in the same process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from megatron_rollout.cell_types import EngineFailed
from megatron_rollout.frontend.client import EngineStatus, NotServing
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta

if TYPE_CHECKING:
    from megatron_rollout.rollout_rank import RolloutRank
    from megatron_rollout.step_loop import StepLoop


class LeaderClient:
    """Implements `EngineClient`. loop, rollout: this process' step loop and rank. cell: its index, for the facts."""

    def __init__(self, loop: StepLoop, rollout: RolloutRank, *, tokenizer: Any, cell: int | None = None) -> None:
        self._loop = loop
        self._rollout = rollout
        self._tokenizer = tokenizer
        self._cell = cell
        self._lock = threading.Lock()
        self._outstanding_tokens = 0
        self._prompt_tokens = 0

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def submit(
        self, request: GenerationRequest, on_delta: Callable[[TokenDelta], None] | None = None
    ) -> Future[GenerationOutput]:
        """Queue one sample. Raises ValueError for one that this engine can never run, NotServing while it takes
        none."""
        if (reason := self._why_not()) is not None:
            raise NotServing(reason[1])
        try:
            future = self._loop.submit(request, on_delta)
        except EngineFailed as error:
            raise NotServing(str(error)) from error
        with self._lock:
            self._outstanding_tokens += request.cost
        future.add_done_callback(lambda done: self._finished(request))
        return future

    def _finished(self, request: GenerationRequest) -> None:
        with self._lock:
            self._outstanding_tokens -= request.cost
            self._prompt_tokens += len(request.prompt_ids)

    def abort(self, request_id: str | None) -> None:
        """End one sample, or all (None), keeping what they have."""
        self._loop.abort(None if request_id is None else [request_id])

    def call(self, name: str, **arguments: Any) -> Future[Any]:
        """Queue a command for every rank of the cell. After a failure of the engine the future has NotServing."""
        if self._loop.error is not None:
            refused: Future[Any] = Future()
            refused.set_exception(NotServing(str(self._loop.error)))
            return refused
        if name == "pause" and arguments.get("mode") == "abort":
            self._loop.abort(None)  # commands keep their order: what is in flight ends before the pause
        return self._loop.call(name, **arguments)

    def status(self) -> EngineStatus:
        """A snapshot. Reads what other threads write, numbers only; the step loop is not asked."""
        rollout, engine, spec = self._rollout, self._rollout.engine, self._rollout.spec
        state, reason = self._why_not() or (self._state(), "")
        outstanding = self._loop.outstanding()
        running = min(outstanding, int(engine.context.total_request_count))
        blocks, block = engine.context.kv_block_allocator, engine.context.block_size_tokens
        return EngineStatus(
            state=state,
            serving=not reason,
            reason=reason,
            weight_version=engine.version if rollout.weights_landed else None,
            running_requests=running,
            waiting_requests=outstanding - running,
            outstanding_tokens=self._outstanding_tokens,
            generated_tokens=engine.tokens_generated,
            prompt_tokens=self._prompt_tokens,
            used_tokens=0 if engine.suspended else (blocks.total_count - 1 - int(blocks.total_avail)) * block,
            kv_capacity_tokens=(blocks.total_count - 1) * block,
            max_running_requests=engine.context.max_requests,
            max_context_length=spec.engine.max_sequence_length,
            vocab_size=rollout.architecture.vocab_size,
            model_name=os.path.basename(os.path.normpath(spec.hf_checkpoint)),
            model_path=spec.hf_checkpoint,
            tensor_parallel_size=spec.tp,
            pipeline_parallel_size=spec.pp,
            dtype=spec.dtype,
            cell=self._cell,
        )

    def _why_not(self) -> tuple[str, str] | None:
        """(state, reason) while the cell takes no request."""
        if (error := self._loop.error) is not None:
            return "failed", str(error)
        if not self._loop.is_alive():
            return "stopped", "the step loop has ended"
        if not self._rollout.weights_landed:
            return "waiting for weights", "weights have not landed"
        return None

    def _state(self) -> str:
        """What a serving cell does: requests that arrive while it is paused or asleep wait."""
        if self._rollout.engine.suspended:
            return "asleep"
        return "paused" if self._rollout.paused else "serving"
