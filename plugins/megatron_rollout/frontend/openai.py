"""The OpenAI wire: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, streaming and not."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from megatron_rollout.frontend import openai_format as fmt
from megatron_rollout.frontend.client import EngineStatus
from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.errors import RequestError, bad_request
from megatron_rollout.frontend.inflight import choice_seed
from megatron_rollout.frontend.openai_reply import Reply, choice_of, chunks_of
from megatron_rollout.frontend.openai_schema import ChatRequest, CompletionRequest
from megatron_rollout.frontend.prompts import (
    check_prompt_ids,
    encode_prompt,
    is_token_ids,
    render_chat,
    response_budget,
    split_prompts,
)
from megatron_rollout.frontend.wire import EventStream, JSONReply, primed
from megatron_rollout.requests import GenerationRequest, SamplingParams


async def models(frontend: Frontend, request: Request) -> Response:
    name, status = frontend.model_name(), frontend.client.status()
    card = {
        "id": name,
        "object": "model",
        "created": frontend.started,
        "owned_by": "megatron",
        "root": status.model_path or name,
        "max_model_len": status.max_context_length,
    }
    wanted = request.path_params.get("model")
    if wanted is None:
        return JSONReply({"object": "list", "data": [card]})
    if wanted != name:
        raise RequestError(404, f"the model {wanted!r} does not exist; this server has {name!r}", "model")
    return JSONReply(card)


async def completions(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, CompletionRequest)
    if body.prompt is None:
        raise bad_request("prompt: is required", "prompt")
    prompts = split_prompts(body.prompt, "prompt")
    if body.stream and body.echo and body.logprobs is not None:
        raise bad_request("echo: with logprobs it cannot be streamed", "echo")
    _check_counts(frontend, body, len(prompts), body.logprobs or 0)
    status = frontend.client.status()
    ids = [await encode_prompt(frontend.tokenizer, prompt) for prompt in prompts]
    for position, prompt_ids in enumerate(ids):
        where = "prompt" if len(ids) == 1 else f"prompt[{position}]"
        check_prompt_ids(prompt_ids, status, frontend.settings.max_prompt_tokens, where)
    sampling = body.sampling(body.logprobs or 0, prompt_logprobs=body.echo and body.logprobs is not None)
    reply = Reply(
        frontend, body, chat=False, call_id=f"cmpl-{uuid.uuid4().hex}", model=_model(frontend, body),
        want_logprobs=body.logprobs is not None, top_logprobs=body.logprobs or 0, echo=body.echo,
    )  # fmt: skip
    return await _answer(reply, request, _requests(reply, ids, sampling, body.max_tokens, status))


async def chat_completions(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, ChatRequest)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.response_format is not None and body.response_format.get("type", "text") != "text":
        raise bad_request("response_format: only text is supported", "response_format")
    if body.tool_choice not in (None, "auto", "none"):
        raise bad_request("tool_choice: only auto and none are supported: output is not constrained", "tool_choice")
    _check_counts(frontend, body, 1, body.top_logprobs)
    status = frontend.client.status()
    ids = await _chat_prompt(frontend, body)
    check_prompt_ids(ids, status, frontend.settings.max_prompt_tokens, "messages")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = body.sampling(body.top_logprobs, prompt_logprobs=False)
    reply = Reply(
        frontend, body, chat=True, call_id=f"chatcmpl-{uuid.uuid4().hex}", model=_model(frontend, body),
        want_logprobs=body.logprobs, top_logprobs=body.top_logprobs,
    )  # fmt: skip
    return await _answer(reply, request, _requests(reply, [ids], sampling, limit, status))


async def _chat_prompt(frontend: Frontend, body: ChatRequest) -> list[int]:
    if body.input_ids is not None:
        if not is_token_ids(body.input_ids):
            raise bad_request("input_ids: must be a non-empty list of token ids", "input_ids")
        return body.input_ids
    if not body.messages:
        raise bad_request("messages: is required", "messages")
    return await render_chat(
        frontend.tokenizer,
        body.messages,
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_arguments=body.chat_template_kwargs,
    )


def _model(frontend: Frontend, body: CompletionRequest | ChatRequest) -> str:
    """The name to answer with. Any is accepted: a cell serves one model, and RL code sends names of its own."""
    return body.model or frontend.model_name()


def _check_counts(frontend: Frontend, body: CompletionRequest | ChatRequest, prompts: int, top_logprobs: int) -> None:
    limit = frontend.settings.max_samples_per_call
    if prompts * body.n > limit:
        raise bad_request(f"n: {prompts} prompts times n={body.n} are more than the {limit} samples of one call", "n")
    if top_logprobs > frontend.settings.max_top_logprobs:
        raise bad_request(
            f"top_logprobs: {top_logprobs} is more than {frontend.settings.max_top_logprobs}", "top_logprobs"
        )


def _requests(
    reply: Reply, prompts: Sequence[list[int]], sampling: SamplingParams, limit: int | None, status: EngineStatus
) -> list[GenerationRequest]:
    """prompts times n requests, choice j*n + i being sample i of prompt j, each of at most `limit` new tokens."""
    requests = []
    for position, ids in enumerate(prompts):
        prompt_ids = tuple(ids)
        budget = response_budget(limit, len(ids), status)
        for i in range(reply.body.n):
            index = position * reply.body.n + i
            own = replace(sampling, seed=choice_seed(sampling.seed, index), max_new_tokens=budget)
            requests.append(
                GenerationRequest(f"{reply.call_id}-{index}", prompt_ids, own, f"{reply.call_id}-{position}")
            )
    return requests


async def _answer(reply: Reply, request: Request, requests: list[GenerationRequest]) -> Response:
    frontend, stream = reply.frontend, reply.body.stream
    call = frontend.inflight.submit(
        reply.call_id, requests, request.receive, frontend.settings.request_timeout_s, stream=stream
    )
    if stream:
        return EventStream(await primed(chunks_of(reply, call, requests)))
    try:
        outputs = await call.results()
    finally:
        await call.close()
    frontend.metrics.finished(outputs)
    choices = [choice_of(reply, index, output) for index, output in enumerate(outputs)]
    return JSONReply(reply.envelope(choices, usage=fmt.usage(outputs, reply.body.n), **fmt.version_fields(outputs[-1])))
