"""`/generate` of the SGLang wire: single and batch, text or ids, streaming and not."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.detokenize import TextStream, response_text
from megatron_rollout.frontend.errors import bad_request
from megatron_rollout.frontend.inflight import Call, choice_seed
from megatron_rollout.frontend.prompts import check_prompt_ids, encode_prompt, response_budget, split_prompts
from megatron_rollout.frontend.schema import parse
from megatron_rollout.frontend.sglang_format import logprob_entries, meta_info, top_entries, version_name
from megatron_rollout.frontend.sglang_schema import GenerateRequest, SGLangSampling
from megatron_rollout.frontend.wire import EventStream, JSONReply, primed
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta


@dataclass(frozen=True)
class _Sample:
    """One sample of a call: what the engine gets and how its answer is to look."""

    request: GenerationRequest
    sampling: SGLangSampling
    request_id: str  # the client's
    logprobs: bool
    logprob_start: int
    top_logprobs: int


async def generate(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, GenerateRequest)
    call_id, samples, batch = await _samples(frontend, body)
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


async def _samples(frontend: Frontend, body: GenerateRequest) -> tuple[str, list[_Sample], bool]:
    """(id of the call, its samples, whether the answer is a list)."""
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("exactly one of text and input_ids is required")
    param = "text" if body.text is not None else "input_ids"
    value = body.text if body.text is not None else body.input_ids
    prompts = split_prompts(value, param)
    listed = isinstance(value, list) and not (param == "input_ids" and prompts[0] is value)
    kinds = {str} if param == "text" else {list}
    if set(map(type, prompts)) != kinds:
        raise bad_request(f"{param}: must hold {'strings' if param == 'text' else 'token ids'} only", param)
    count = len(prompts)
    samplings = _samplings(body.sampling_params, count)
    total = sum(sampling.n for sampling in samplings)
    if total > frontend.settings.max_samples_per_call:
        limit = frontend.settings.max_samples_per_call
        raise bad_request(f"{param}: {total} samples are more than the {limit} of one call", param)
    call_id, names = _request_ids(body.rid, count)
    with_logprobs = _per_sample(body.return_logprob, count, "return_logprob")
    starts = _per_sample(body.logprob_start_len, count, "logprob_start_len")
    tops = _per_sample(body.top_logprobs_num, count, "top_logprobs_num")
    shared_seed = not isinstance(body.sampling_params, list)
    status = frontend.client.status()
    samples: list[_Sample] = []
    for position, prompt in enumerate(prompts):
        where = f"{param}[{position}]" if listed else param
        ids = await encode_prompt(frontend.tokenizer, prompt)
        check_prompt_ids(ids, status, frontend.settings.max_prompt_tokens, where)
        sampling, start, logprobs = samplings[position], starts[position], with_logprobs[position]
        if start < -1 or start > len(ids):
            raise bad_request(
                f"logprob_start_len: {start} is outside the prompt of {len(ids)} tokens", "logprob_start_len"
            )
        top = tops[position] if logprobs else 0
        if top > status.vocab_size:
            raise bad_request(
                f"top_logprobs_num: {top} is more than the vocabulary of {status.vocab_size}", "top_logprobs_num"
            )
        params = sampling.sampling(top, prompt_logprobs=logprobs and 0 <= start < len(ids))
        params = replace(params, max_new_tokens=response_budget(params.max_new_tokens, len(ids), status))
        for i in range(sampling.n):
            index = len(samples) if shared_seed else i
            name = names[position] if sampling.n == 1 else f"{names[position]}_{i}"
            own = replace(params, seed=choice_seed(params.seed, index))
            sent = GenerationRequest(name, tuple(ids), own, group=names[position])
            samples.append(_Sample(sent, sampling, name, logprobs, start, top))
    return call_id, samples, listed or total > 1


def _samplings(value: Any, count: int) -> list[SGLangSampling]:
    if isinstance(value, list):
        if len(value) != count:
            raise bad_request(f"sampling_params: {len(value)} for {count} prompts", "sampling_params")
        return [parse(SGLangSampling, item or {}, f"sampling_params[{i}]") for i, item in enumerate(value)]
    return [parse(SGLangSampling, value if value is not None else {}, "sampling_params")] * count


def _request_ids(rid: str | list[str] | None, count: int) -> tuple[str, list[str]]:
    """(id of the call, ids of its prompts). One rid for a batch is the prefix of its samples' ids."""
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count or not all(rid):
            raise bad_request(f"rid: needs {count} different non-empty ids, got {len(set(rid))}", "rid")
        return (rid[0] if count == 1 else uuid.uuid4().hex), rid
    base = rid or uuid.uuid4().hex
    return base, [base] if count == 1 else [f"{base}_{position}" for position in range(count)]


def _per_sample(value: Any, count: int, param: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_request(f"{param}: {len(value)} values for {count} prompts", param)
    return value


def _reply(frontend: Frontend, body: GenerateRequest, sample: _Sample, output: GenerationOutput) -> dict[str, Any]:
    sampling = sample.sampling
    text = response_text(
        frontend.tokenizer, output.output_ids, output.matched_stop,
        skip_special_tokens=sampling.skip_special_tokens, stop=sampling.stop, keep_stop=sampling.no_stop_trim,
    )  # fmt: skip
    meta = meta_info(
        output, frontend.token_text if body.return_text_in_logprobs else None, logprobs=sample.logprobs,
        logprob_start=sample.logprob_start, top_logprobs=sample.top_logprobs > 0, request_id=sample.request_id,
    )  # fmt: skip
    return {"text": text, "output_ids": list(output.output_ids), "meta_info": meta}


class _SampleStream:
    """One sample of a streamed answer. On this wire each event repeats all that came before it; so deltas that arrive
    while an event is being written are folded into the next one, and `stream_interval` tokens make one event."""

    def __init__(self, frontend: Frontend, body: GenerateRequest, sample: _Sample) -> None:
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
            "id": sample.request_id,
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
    frontend: Frontend, body: GenerateRequest, call: Call, samples: Sequence[_Sample], batch: bool
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
