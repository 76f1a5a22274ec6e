"""One rank's dynamic engine: requests in, tokens out, abort, versions, suspend and resume.

megatron-core's `DynamicInferenceEngine` does the batching, the paged KV cache and the model. What it lacks is here:
abort that gives the KV blocks back, a generator per request (`sampling.py`), several stop ids, stop strings that may
end inside a token, the weight version of every token, and finishing what an aborted run of a sample had begun.

All ranks of a cell hold one of these and are driven in lockstep: the same calls in the same order on each.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from megatron.core.inference.config import (
    AsyncScheduleMode,
    InferenceConfig,
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
)
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams as EngineSampling

from megatron_rollout.device import device, on_gpu, synchronize
from megatron_rollout.engine import paged_attention
from megatron_rollout.engine.bookkeeping import BatchEngine, Controller, Detokenizer
from megatron_rollout.engine.context import Context
from megatron_rollout.engine.graphs import enable_cuda_graphs
from megatron_rollout.engine.sampling import RequestSampler
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta

_NEVER = -1  # a termination id that no token has
_STOP_WINDOW = 32  # tokens looked at beyond a stop string's own length


@dataclass
class _Entry:
    """A request in the engine. `slot` is its id there; `done` once its output has been handed out."""

    request: GenerationRequest
    slot: int
    stop_ids: frozenset[int]
    spans: list[tuple[int, int]]
    done: bool = False
    reported: int = 0
    streams: bool = False
    tokens: list[int] = field(default_factory=list)  # generated before the last checkpoint of the record
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """finished: outputs complete since the last step. deltas: new tokens of the requests that stream."""

    finished: tuple[GenerationOutput, ...] = ()
    deltas: tuple[TokenDelta, ...] = ()


class Engine:
    """The engine of this rank over `model` (the bare megatron-core model of this rank).

    config: an object with the fields of `megatron_rollout.config.EngineConfig`. tokenizer: a transformers tokenizer,
    used for stop strings only. eos_token_ids end a response unless the request ignores them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Any = None,
        pg_collection: Any = None,
        version: int = 0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.version = version
        self.tokens_generated = 0
        self.attention_backend = paged_attention.install(config.attention_backend)
        self._entries: dict[str, _Entry] = {}
        self._by_slot: dict[int, _Entry] = {}
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._ready: list[GenerationOutput] = []
        self._pending_version: int | None = None
        self._memory_kept = False
        self.model = model.eval()
        # a later pipeline stage gets its input where the last transfer put it, which no graph can know
        graphs = on_gpu() and config.cuda_graph_impl == "local" and model.config.pipeline_model_parallel_size == 1
        if graphs:
            enable_cuda_graphs(model, scope=config.inference_cuda_graph_scope, pg_collection=pg_collection)
        self.context = Context(
            model.config,
            InferenceConfig(
                # one more than asked for: a prompt as long as the context still gets its one token
                max_sequence_length=config.max_sequence_length + 1,
                buffer_size_gb=config.buffer_size_gb,
                block_size_tokens=config.block_size_tokens,
                max_requests=config.max_requests,
                max_tokens=config.max_tokens,
                kv_cache_management_mode=KVCacheManagementMode(config.kv_cache_management_mode),
                enable_prefix_caching=config.enable_prefix_caching,
                prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
                materialize_only_last_token_logits=True,
                logprobs_mode="processed_logprobs",
                use_cuda_graphs_for_non_decode_steps=config.use_cuda_graphs_for_non_decode_steps,
                async_sched_mode=AsyncScheduleMode(config.async_sched_mode if on_gpu() else "legacy"),
                num_cuda_graphs=config.num_cuda_graphs if graphs else None,
                pg_collection=pg_collection,
            ),
        )
        if on_gpu():
            self.context.fuse_rotary(model.rotary_pos_emb, model.config.params_dtype)
        wrapper = GPTInferenceWrapper(model, self.context)
        self.controller = Controller(inference_wrapped_model=wrapper, tokenizer=Detokenizer())
        self.sampler = RequestSampler(vocab_size, device())
        self.controller._sampling = self.sampler
        self.engine = BatchEngine(controller=self.controller, context=self.context)
        synchronize()  # another thread, with a stream of its own, will step

    # -- requests ---------------------------------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError if the request cannot be served whatever the load; the message names the two lengths."""
        limit, length = self.config.max_sequence_length, len(request.prompt_ids)
        if length == 0:
            raise ValueError("the prompt is empty; it needs at least one token")
        if length > limit:
            raise ValueError(f"the prompt has {length} tokens, the context holds {limit}")
        if length + len(request.output_ids) > self.context.max_tokens:
            raise ValueError(f"the prompt has {length} tokens, one engine step holds {self.context.max_tokens}")
        vocab = self.sampler.vocab_size
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
            bad = next(t for t in request.prompt_ids if not 0 <= t < vocab)
            raise ValueError(f"prompt token id {bad} is outside the vocabulary of {vocab}")
        blocks = -(-min(limit + 1, request.cost) // self.context.block_size_tokens)
        if blocks > (total := self.context.kv_block_allocator.total_count - 1):
            raise ValueError(f"the request needs {blocks} KV blocks, the cache has {total}")

    def budget(self, request: GenerationRequest) -> int:
        """Tokens this request may still generate: what is left of max_new_tokens, cut at the context's end."""
        room = max(1, self.config.max_sequence_length - len(request.prompt_ids)) - len(request.output_ids)
        return min(request.sampling.max_new_tokens - len(request.output_ids), room)

    def add(self, request: GenerationRequest, *, streams: bool = False) -> None:
        """Take a request in. Its output comes from a later `step` (at once where nothing is left to generate).

        Raises ValueError as `check` does, and for an id that is in flight already.
        """
        if request.request_id in self._entries:
            raise ValueError(f"request id {request.request_id!r} is in flight already")
        self.check(request)
        params, budget = request.sampling, self.budget(request)
        if budget <= 0:
            reason = "length" if request.output_ids or params.max_new_tokens == 0 else "stop"
            self._ready.append(self._output_of_finished(request, reason))
            return
        slot = self._free_slots.pop() if self._free_slots else self._take_slot()
        eos = () if params.ignore_eos else self.eos_token_ids
        termination = eos[0] if eos else _NEVER
        entry = _Entry(
            request=request,
            slot=slot,
            stop_ids=frozenset((*eos[1:], *params.stop_token_ids)) - {termination},
            spans=list(request.weight_versions),
            reported=len(request.output_ids),
            streams=streams,
        )
        self._stamp(entry, len(request.output_ids))
        self._entries[request.request_id] = self._by_slot[slot] = entry
        seed = params.seed if params.seed is not None else crc32(request.request_id.encode())
        self.sampler.register(slot, params, seed, len(request.output_ids))
        self.engine._add_request(
            DynamicInferenceRequest(
                request_id=slot,
                prompt_tokens=torch.tensor((*request.prompt_ids, *request.output_ids)),  # batches are made on the host
                sampling_params=EngineSampling(
                    num_tokens_to_generate=budget,
                    termination_id=termination,
                    return_log_probs=True,
                    skip_prompt_log_probs=True,
                    top_n_logprobs=params.top_logprobs,
                ),
                block_size_tokens=self.context.block_size_tokens,
                enable_prefix_caching=self.context.enable_prefix_caching,
            )
        )

    def _take_slot(self) -> int:
        self._next_slot += 1
        return self._next_slot - 1

    @property
    def has_work(self) -> bool:
        return bool(self._ready) or self.engine.has_unfinished_requests() or bool(self.engine.failed_request_ids)

    @property
    def in_flight(self) -> int:
        return sum(not entry.done for entry in self._entries.values())

    @property
    def only_aborted_left(self) -> bool:
        """Only requests whose output is out already are left: a step would just give their KV blocks back."""
        return bool(self._by_slot) and all(entry.done for entry in self._by_slot.values())

    def step(self) -> StepResult:
        """One engine step. Collective over the ranks of the cell."""
        ready, self._ready = self._ready, []
        if not (self.engine.has_unfinished_requests() or self.engine.failed_request_ids):
            return StepResult(tuple(ready))
        launched_before = self._pending_version
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = self.engine.step_modern()
        self._pending_version = self.version if self.controller._async_sched_logits.is_valid else None
        if launched_before is not None and launched_before != self.version:
            self._relabel(launched_before)
        finished = list(ready)
        for record in result["finished_request_records"]:
            entry = self._by_slot.pop(record.request_id)
            self._free_slots.append(entry.slot)
            if not entry.done:
                finished.append(self._finish(entry, record))
        deltas = self._after_tokens(result["active_request_ids"], finished)
        self.tokens_generated += sum(len(o.output_ids) for o in finished)
        return StepResult(tuple(finished), tuple(deltas))

    def _after_tokens(self, active: list[int], finished: list[GenerationOutput]) -> list[TokenDelta]:
        """Stop ids and strings, and deltas, for the requests that asked for either; the others cost nothing."""
        deltas = []
        for slot in active:
            entry = self._by_slot[slot]
            if entry.done or not (entry.streams or entry.stop_ids or entry.request.sampling.stop):
                continue
            record = self.engine.requests[slot].record
            matched = self._matched_stop(entry, self._tokens(entry, record)[-_STOP_WINDOW:])
            if entry.streams and matched is None:
                deltas.append(self._delta(entry, record))
            if matched is not None:
                finished.append(self._finish(entry, record, matched=matched))
                self._release(entry)
        return deltas

    # -- what a record holds ----------------------------------------------------------------------------------

    def _tokens(self, entry: _Entry, record: Any) -> list[int]:
        """Output tokens so far: those of an earlier run, then those of every checkpoint of the record."""
        return [*entry.request.output_ids, *(t for r in record.requests for t in r.generated_tokens)]

    def _logprobs(self, entry: _Entry, record: Any) -> list[float]:
        return [*entry.request.logprobs, *(p for r in record.requests for p in r.generated_log_probs or ())]

    def _top_logprobs(self, record: Any, n: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        tops = (t for r in record.requests for t in r.generated_top_n_logprobs or ())
        return tuple(tuple((int(i), p) for i, p in list(t.items())[:n]) for t in tops)

    def _matched_stop(self, entry: _Entry, tail: list[int]) -> str | int | None:
        if not tail:
            return None
        if tail[-1] in entry.stop_ids:
            return tail[-1]
        if entry.request.sampling.stop and self.tokenizer is not None:
            text = self.tokenizer.decode(tail)
            return next((s for s in entry.request.sampling.stop if s in text), None)
        return None

    def _delta(self, entry: _Entry, record: Any) -> TokenDelta:
        tokens, logprobs = self._tokens(entry, record), self._logprobs(entry, record)
        first, entry.reported = entry.reported, len(tokens)
        top = self._top_logprobs(record, entry.request.sampling.top_logprobs)
        offset = first - len(entry.request.output_ids)
        return TokenDelta(entry.request.request_id, tuple(tokens[first:]), tuple(logprobs[first:]), top[offset:])

    def _finish(
        self, entry: _Entry, record: Any, *, matched: str | int | None = None, reason: str | None = None
    ) -> GenerationOutput:
        entry.done = True
        del self._entries[entry.request.request_id]
        request = entry.request
        tokens, logprobs = self._tokens(entry, record), self._logprobs(entry, record)
        error = None
        if record.requests[-1].status == Status.FAILED:
            reason = "error"
            error = "; ".join(str(e.payload) for e in record.requests[-1].events if e.payload is not None) or "failed"
        if reason is None:
            if matched is None and tokens and not request.sampling.ignore_eos and tokens[-1] in self.eos_token_ids:
                matched = tokens[-1]
            if matched is None:
                matched = self._matched_stop(entry, tokens[-_STOP_WINDOW:])
            reason = "stop" if matched is not None else "length"
        return GenerationOutput(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(tokens),
            logprobs=tuple(logprobs[: len(tokens)]),
            finish_reason=reason,
            matched_stop=matched,
            weight_versions=tuple(s for s in entry.spans if s[0] < len(tokens)),
            top_logprobs=self._top_logprobs(record, request.sampling.top_logprobs),
            cached_tokens=record.requests[0].num_cached_tokens,
            error=error,
        )

    @staticmethod
    def _output_of_finished(request: GenerationRequest, reason: str) -> GenerationOutput:
        return GenerationOutput(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            logprobs=request.logprobs,
            finish_reason=reason,
            weight_versions=request.weight_versions,
        )

    # -- abort ------------------------------------------------------------------------------------------------

    def abort(self, request_ids: list[str] | None = None) -> list[GenerationOutput]:
        """End requests now (all of them for None), keeping what they have; unknown ids are ignored.

        KV blocks of a running request return at its next step (or at once if it never ran).
        """
        chosen = list(self._entries) if request_ids is None else [r for r in request_ids if r in self._entries]
        outputs = []
        for request_id in chosen:
            entry = self._entries[request_id]
            record = self.engine.requests[entry.slot].record
            outputs.append(self._finish(entry, record, reason="abort"))
            self._release(entry)
        self.tokens_generated += sum(len(o.output_ids) for o in outputs)
        return outputs

    def _release(self, entry: _Entry) -> None:
        """Let the engine forget a request whose output is out."""
        slot = entry.slot
        for queue in (self.engine.waiting_request_ids, self.engine.resume_request_ids or []):
            if slot in queue and not self._in_context(slot):
                queue.remove(slot)
                self._forget(entry)
                return
        # in the KV cache: finished by the engine's own path at the next step, the extra token dropped
        self.engine.stop_word_finished_request_ids.add(slot)

    def _in_context(self, slot: int) -> bool:
        return slot in self.context.request_ids[: self.context.total_request_count].tolist()

    def _forget(self, entry: _Entry) -> None:
        self.engine.requests.pop(entry.slot)
        self.engine.stop_word_finished_request_ids.discard(entry.slot)
        self._by_slot.pop(entry.slot)
        self._free_slots.append(entry.slot)

    # -- weights ----------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Tokens sampled from forwards launched after this call are labelled `version`."""
        self.version = version
        for entry in self._entries.values():
            tokens = self._tokens(entry, self.engine.requests[entry.slot].record)
            self._stamp(entry, len(tokens))

    def _stamp(self, entry: _Entry, start: int) -> None:
        spans = entry.spans
        if spans and spans[-1][0] == start:
            spans.pop()
        if not spans or spans[-1][1] != self.version:
            spans.append((start, self.version))

    def _relabel(self, version: int) -> None:
        """The step's tokens came from logits that an earlier version had left pending: move their spans by one."""
        for entry in self._by_slot.values():
            if len(entry.spans) > 1 and entry.spans[-1][1] == self.version and entry.spans[-2][1] == version:
                start, _ = entry.spans[-1]
                tokens = self._tokens(entry, self.engine.requests[entry.slot].record)
                if len(tokens) == start + 1:
                    entry.spans[-1] = (start + 1, self.version)

    def suspend(self, *, keep_memory: bool = False) -> None:
        """Stop stepping and put the KV cache away as the KV mode says. Idempotent.

        keep_memory: for a pause in which nobody else needs the memory. The cache stays where it is, and so do CUDA
        graphs, in every mode; requests in flight are recomputed all the same where the mode says so.
        """
        if self.suspended:
            if keep_memory or not self._memory_kept:
                return
            self.resume()
        recompute = self.context.kv_cache_management_mode == KVCacheManagementMode.RECOMPUTE
        if recompute:
            # logits already launched belong to rows that will be rebuilt; their tokens are not drawn yet
            self.controller._async_sched_logits.clear()
            self._pending_version = None
        self._memory_kept = keep_memory and self.context.kv_cache_management_mode != KVCacheManagementMode.PERSIST
        if not self._memory_kept:
            self.engine.suspend()
            return
        with self._pointers_stay():
            self.context.is_tensor_state_allocated = False  # there is nothing to free
            self.engine.suspend()
            self.context.is_tensor_state_allocated = True
        if recompute:
            self.context.reset_metadata(preserve_counters=True)

    def resume(self) -> None:
        """Take the KV cache back; requests in flight go on (recomputed where the mode says so). Idempotent."""
        self.model.eval()  # a colocated trainer shares the model and leaves it in training mode
        with self._pointers_stay() if self._memory_kept else contextlib.nullcontext():
            self.engine.resume()
        self._memory_kept = False

    @contextlib.contextmanager
    def _pointers_stay(self) -> Iterator[None]:
        """megatron-core deletes CUDA graphs at a suspend, and captures them anew, unless the cache never moves."""
        static = self.context.static_kv_memory_pointers
        self.context.static_kv_memory_pointers = True
        try:
            yield
        finally:
            self.context.static_kv_memory_pointers = static

    @property
    def suspended(self) -> bool:
        return self.engine.state.name != "RUNNING"

    def drop_prefix_cache(self) -> None:
        """Forget cached prefixes: they belong to older weights. Blocks that running requests use stay theirs."""
        if not self.context.enable_prefix_caching:
            return
        allocator = self.context.kv_block_allocator
        cached = allocator.block_hashes != -1
        unused = (cached & (allocator.block_ref_counts == 0)).nonzero(as_tuple=True)[0]
        if unused.numel():
            allocator._deregister_blocks(unused)
        allocator.block_hashes[cached] = -1
        allocator.kv_hash_to_block_id.clear()

    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        allocator = self.context.kv_block_allocator
        return 1 - int(allocator.total_avail) / max(1, allocator.total_count - 1)
