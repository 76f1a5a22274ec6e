"""megatron-core's controller and dynamic engine without the per-request host work that rollouts never use.

Decoding small models on a fast GPU is bound by the host: megatron-core's bookkeeping of a step loops over all requests
with speculative decoding, stop words, text, events and timings in mind. Steps in which none of that happens take the
short loops here; every other step takes megatron-core's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.inference_request import Status
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController


class Detokenizer:
    """Stands for the tokenizer: text is the front end's business. One id alone is an alternative's key."""

    eod = -1

    def detokenize(self, ids: Any, *args: Any, **kwargs: Any) -> str:
        return str(int(ids[0])) if len(ids) == 1 else ""


class Controller(TextGenerationController):
    """Samples and schedules; turns nothing into text."""

    @staticmethod
    def detokenize(*args: Any, **kwargs: Any) -> str:
        """Finished requests are not turned into text."""
        return ""

    @staticmethod
    def _materialize_async_sched_log_probs(
        transfer: Any, accepted_counts_cpu: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        if transfer is None or accepted_counts_cpu is not None or transfer.top_n_log_probs_cpu_view is not None:
            return TextGenerationController._materialize_async_sched_log_probs(transfer, accepted_counts_cpu)
        selected = transfer.selected_log_probs_cpu_view
        if len(transfer.row_counts) != selected.numel():  # more than one row of some request
            return TextGenerationController._materialize_async_sched_log_probs(transfer, accepted_counts_cpu)
        return [[p] for p in selected.tolist()], None


class BatchEngine(DynamicInferenceEngine):
    """The engine. Its requests ask for logprobs of generated tokens only, and bring no stop words."""

    def post_process_requests(
        self,
        request_ids: torch.Tensor,
        finished_request_ids: torch.Tensor,
        evict_request_ids: torch.Tensor | None,
        step_time: float,
        sample: torch.Tensor,
        accepted_tokens: torch.Tensor | None,
        log_probs: list[list[float]] | None,
        consumed_chunked_prefill_request_id: int,
        top_n_logprobs: Any = None,
        **rest: Any,
    ) -> tuple[list[int], list[Any]]:
        """As megatron-core's: hand the step's tokens to their requests; returns the ids still active and the records of
        those that finished."""
        evicts = evict_request_ids is not None and evict_request_ids.numel() > 0
        chunked = consumed_chunked_prefill_request_id != -1
        if evicts or chunked or accepted_tokens is not None or top_n_logprobs or not log_probs:
            return super().post_process_requests(
                request_ids, finished_request_ids, evict_request_ids, step_time, sample, accepted_tokens, log_probs,
                consumed_chunked_prefill_request_id, top_n_logprobs, **rest,
            )  # fmt: skip
        finished = set(finished_request_ids.tolist())
        self.finished_request_count += len(finished)
        stopping, requests = self.stop_word_being_finished_ids, self.requests
        active, records = [], []
        for request_id, token, logprobs in zip(request_ids.tolist(), sample.tolist(), log_probs, strict=True):
            request = requests[request_id].record.requests[-1]
            generated = request.generated_tokens
            # a request that is being stopped has its last token already
            if request_id not in stopping and len(generated) < request.sampling_params.num_tokens_to_generate:
                generated.append(token)
                if not request.generated_log_probs:
                    request.prompt_log_probs, request.generated_log_probs = [], []
                request.generated_log_probs.append(logprobs[-1])
            if request_id in finished:
                records.append(self._finish(request_id))
            else:
                active.append(request_id)
        stopping.clear()
        return active, records

    def _finish(self, request_id: int) -> Any:
        entry = self.requests.pop(request_id)
        request = entry.record.requests[-1]
        request.generated_length = len(request.generated_tokens)
        request.status = Status.COMPLETED
        request.add_event_finish()
        entry.future.set_result(entry.record)
        return entry.record
