"""`/generate` of the SGLang wire: single and batch, text or ids, streaming and not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.detokenize import TextStream, response_text
from megatron_rollout.frontend.inflight import Call
from megatron_rollout.frontend.sglang_batch import Sample, samples_of
from megatron_rollout.frontend.sglang_format import logprob_entries, meta_info, top_entries, version_name
from megatron_rollout.frontend.sglang_schema import GenerateRequest
from megatron_rollout.frontend.wire import EventStream, JSONReply, primed
from megatron_rollout.requests import GenerationOutput, TokenDelta


async def generate(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, GenerateRequest)
    call_id, samples, batch = await samples_of(frontend, body)
    call = frontend.inflight.submit(
        call_id,
        [sample.request for sample in samples],
        request.receive,
        frontend.settings.request_timeout_s,
        stream=body.stream,
    )
    if body.stream:
        return EventStream(await primed(_chunks(frontend, body, call, samples, batch)))
    try:
        outputs = await call.results()
    finally:
        await call.close()
    frontend.metrics.finished(outputs)
    replies = [_reply(frontend, body, *pair) for pair in zip(samples, outputs, strict=True)]
    return JSONReply(replies if batch else replies[0])


def _reply(frontend: Frontend, body: GenerateRequest, sample: Sample, output: GenerationOutput) -> dict[str, Any]:
    sampling = sample.sampling
    text = response_text(
        frontend.tokenizer, output.output_ids, output.matched_stop,
        skip_special_tokens=sampling.skip_special_tokens, stop=sampling.stop, keep_stop=sampling.no_stop_trim,
    )  # fmt: skip
    meta = meta_info(
        output, frontend.token_text if body.return_text_in_logprobs else None, logprobs=sample.logprobs,
        logprob_start=sample.logprob_start, top_logprobs=sample.top_logprobs > 0,
    )  # fmt: skip
    return {"text": text, "output_ids": list(output.output_ids), "meta_info": meta}


class _SampleStream:
    """One sample of a streamed answer. On this wire each event repeats all that came before it; so deltas that arrive
    while an event is being written are folded into the next one, and `stream_interval` tokens make one event."""

    def __init__(self, frontend: Frontend, body: GenerateRequest, sample: Sample) -> None:
        sampling, tokenizer = sample.sampling, frontend.tokenizer
        self._frontend, self._body, self._sample = frontend, body, sample
        self._texts = frontend.token_text if body.return_text_in_logprobs else None
        stop_ids = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {tokenizer.eos_token_id})
        self._stream = TextStream(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, stop=sampling.stop,
            stop_token_ids=stop_ids, keep_stop=sampling.no_stop_trim,
        )  # fmt: skip
        self._text = ""
        self._ids: list[int] = []
        self._entries: list[Any] = []
        self._tops: list[Any] = []
        self._shown = 0  # tokens in the last event

    def delta(self, items: Sequence[TokenDelta]) -> dict[str, Any] | None:
        """The next event, or None while it is not due."""
        sample = self._sample
        for item in items:
            self._ids.extend(item.output_ids)
            self._text += self._stream.push(item.output_ids)
            if sample.logprobs:
                self._entries.extend(logprob_entries(item.logprobs, item.output_ids, self._texts))
                self._tops.extend(top_entries(item.top_logprobs, self._texts))
        if len(self._ids) - self._shown < sample.sampling.stream_interval:
            return None
        self._shown = len(self._ids)
        version = self._frontend.client.status().weight_version
        meta: dict[str, Any] = {
            "id": sample.request.request_id,
            "finish_reason": None,
            "prompt_tokens": len(sample.request.prompt_ids),
            "completion_tokens": len(self._ids),
            "cached_tokens": 0,
            "weight_version": version_name(version),
        }
        if sample.logprobs:
            meta["output_token_logprobs"] = self._entries
            meta["output_token_logprobs_length"] = len(self._entries)
            if sample.top_logprobs:
                meta["output_top_logprobs"] = self._tops
        return {"text": self._text, "output_ids": self._ids, "meta_info": meta}

    def finish(self, output: GenerationOutput) -> dict[str, Any]:
        return _reply(self._frontend, self._body, self._sample, output)


async def _chunks(
    frontend: Frontend, body: GenerateRequest, call: Call, samples: Sequence[Sample], batch: bool
) -> AsyncGenerator[list[dict[str, Any]]]:
    streams = [_SampleStream(frontend, body, sample) for sample in samples]
    outputs: list[GenerationOutput] = []
    try:
        async for group in call.events():
            latest: dict[int, dict[str, Any]] = {}
            deltas: dict[int, list[TokenDelta]] = {}
            for index, item in group:
                if isinstance(item, TokenDelta):
                    deltas.setdefault(index, []).append(item)
                else:
                    deltas.pop(index, None)  # the last event has everything
                    outputs.append(item)
                    latest[index] = streams[index].finish(item)
            for index, items in deltas.items():
                if (event := streams[index].delta(items)) is not None:
                    latest[index] = event
            yield [{**reply, "index": index} if batch else reply for index, reply in latest.items()]
    finally:
        await call.close()
    frontend.metrics.finished(outputs)
