"""From the body of a `/generate` call to the samples that it asks for."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from megatron_rollout.frontend.client import EngineStatus
from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.errors import bad_request
from megatron_rollout.frontend.inflight import choice_seed
from megatron_rollout.frontend.prompts import Prompt, check_prompt_ids, encode_prompt, response_budget, split_prompts
from megatron_rollout.frontend.schema import parse
from megatron_rollout.frontend.sglang_schema import GenerateRequest, SGLangSampling
from megatron_rollout.requests import GenerationRequest


@dataclass(frozen=True)
class Sample:
    """One sample of a call: what the engine gets and how its answer is to look."""

    request: GenerationRequest
    sampling: SGLangSampling
    logprobs: bool
    logprob_start: int
    top_logprobs: int


async def samples_of(frontend: Frontend, body: GenerateRequest) -> tuple[str, list[Sample], bool]:
    """(id of the call, its samples, whether the answer is a list). RequestError 400 names the field that is wrong.

    Samples of one prompt (n) follow each other. With one seed for the whole call, each sample of the call has noise of
    its own, so that a batch of equal prompts is not one sample many times; with a seed for each prompt, each of its n.
    """
    param, prompts, listed = _prompts(body)
    count = len(prompts)
    samplings = _samplings(body.sampling_params, count)
    total, limit = sum(sampling.n for sampling in samplings), frontend.settings.max_samples_per_call
    if total > limit:
        raise bad_request(f"{param}: {total} samples are more than the {limit} of one call", param)
    call_id, names = _request_ids(body.rid, count)
    logprobs = _per_prompt(body.return_logprob, count, "return_logprob")
    starts = _per_prompt(body.logprob_start_len, count, "logprob_start_len")
    tops = _per_prompt(body.top_logprobs_num, count, "top_logprobs_num")
    one_seed = not isinstance(body.sampling_params, list)
    status = frontend.client.status()
    samples: list[Sample] = []
    for position, prompt in enumerate(prompts):
        ids = await encode_prompt(frontend.tokenizer, prompt)
        where = f"{param}[{position}]" if listed else param
        check_prompt_ids(ids, status, frontend.settings.max_prompt_tokens, where)
        top = tops[position] if logprobs[position] else 0
        first = _sample(names[position], ids, samplings[position], logprobs[position], starts[position], top, status)
        for i in range(first.sampling.n):
            name = names[position] if first.sampling.n == 1 else f"{names[position]}_{i}"
            seed = choice_seed(first.request.sampling.seed, len(samples) if one_seed else i)
            sampling = replace(first.request.sampling, seed=seed)
            samples.append(replace(first, request=replace(first.request, request_id=name, sampling=sampling)))
    return call_id, samples, listed or total > 1


def _prompts(body: GenerateRequest) -> tuple[str, list[Prompt], bool]:
    """(name of the field, its prompts, whether it was a list of prompts)."""
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("exactly one of text and input_ids is required")
    if body.text is not None:
        prompts = split_prompts(body.text, "text")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise bad_request("text: must hold strings only", "text")
        return "text", prompts, isinstance(body.text, list)
    prompts = split_prompts(body.input_ids, "input_ids")
    if any(isinstance(prompt, str) for prompt in prompts):
        raise bad_request("input_ids: must hold token ids only", "input_ids")
    return "input_ids", prompts, prompts[0] is not body.input_ids


def _sample(
    name: str, ids: list[int], sampling: SGLangSampling, logprobs: bool, start: int, top: int, status: EngineStatus
) -> Sample:
    """The first sample of a prompt."""
    if not -1 <= start <= len(ids):
        raise bad_request(f"logprob_start_len: {start} is outside the prompt of {len(ids)} tokens", "logprob_start_len")
    if top > status.vocab_size:
        message = f"top_logprobs_num: {top} is more than the vocabulary of {status.vocab_size}"
        raise bad_request(message, "top_logprobs_num")
    params = sampling.sampling(top, prompt_logprobs=logprobs and 0 <= start < len(ids))
    params = replace(params, max_new_tokens=response_budget(params.max_new_tokens, len(ids), status))
    return Sample(GenerationRequest(name, tuple(ids), params, group=name), sampling, logprobs, start, top)


def _samplings(value: Any, count: int) -> list[SGLangSampling]:
    if isinstance(value, list):
        if len(value) != count:
            raise bad_request(f"sampling_params: {len(value)} for {count} prompts", "sampling_params")
        return [parse(SGLangSampling, item or {}, f"sampling_params[{i}]") for i, item in enumerate(value)]
    return [parse(SGLangSampling, {} if value is None else value, "sampling_params")] * count


def _request_ids(rid: str | list[str] | None, count: int) -> tuple[str, list[str]]:
    """(id of the call, ids of its prompts). One rid for a batch is the prefix of its samples' ids."""
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count or not all(rid):
            raise bad_request(f"rid: needs {count} different non-empty ids, got {len(set(rid))}", "rid")
        return (rid[0] if count == 1 else uuid.uuid4().hex), rid
    base = rid or uuid.uuid4().hex
    return base, [base] if count == 1 else [f"{base}_{position}" for position in range(count)]


def _per_prompt(value: Any, count: int, param: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_request(f"{param}: {len(value)} values for {count} prompts", param)
    return value
