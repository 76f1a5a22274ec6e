"""The OpenAI wire: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, streaming and not."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_rollout.frontend import openai_format as fmt
from megatron_rollout.frontend.client import EngineStatus
from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.detokenize import TextStream, decode, response_text
from megatron_rollout.frontend.errors import RequestError, bad_request
from megatron_rollout.frontend.inflight import Call, choice_seed
from megatron_rollout.frontend.openai_schema import ChatRequest, CompletionRequest
from megatron_rollout.frontend.prompts import (
    check_prompt_ids,
    encode_prompt,
    is_token_ids,
    render_chat,
    response_budget,
    split_prompts,
)
from megatron_rollout.frontend.sglang_format import meta_info
from megatron_rollout.frontend.wire import EventStream, JSONReply, primed
from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams, TokenDelta


@dataclass
class _Reply:
    """What the answer to one call needs beside the outputs. `chat` chooses the shape of the choices."""

    frontend: Frontend
    body: CompletionRequest | ChatRequest
    chat: bool
    call_id: str
    model: str
    want_logprobs: bool
    top_logprobs: int
    echo: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, choices: list[dict[str, Any]], chunk: bool = False, **extra: Any) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        head = {"id": self.call_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **extra}


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
    reply = _Reply(
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
    reply = _Reply(
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
    reply: _Reply, prompts: Sequence[list[int]], sampling: SamplingParams, limit: int | None, status: EngineStatus
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


async def _answer(reply: _Reply, request: Request, requests: list[GenerationRequest]) -> Response:
    frontend, stream = reply.frontend, reply.body.stream
    call = frontend.inflight.submit(
        reply.call_id, requests, request.receive, frontend.settings.request_timeout_s, stream=stream
    )
    if stream:
        return EventStream(await primed(_chunks(reply, call, requests)))
    try:
        outputs = await call.results()
    finally:
        await call.close()
    frontend.metrics.finished(outputs)
    choices = [_choice(reply, index, output) for index, output in enumerate(outputs)]
    return JSONReply(reply.envelope(choices, usage=fmt.usage(outputs, reply.body.n), **fmt.version_fields(outputs[-1])))


def _choice(reply: _Reply, index: int, output: GenerationOutput) -> dict[str, Any]:
    body, tokens = reply.body, reply.frontend.token_text
    text = response_text(
        reply.frontend.tokenizer, output.output_ids, output.matched_stop,
        skip_special_tokens=body.skip_special_tokens, stop=body.stop, keep_stop=body.no_stop_trim,
    )  # fmt: skip
    choice: dict[str, Any] = {"index": index, "finish_reason": output.finish_reason, "logprobs": None}
    choice["matched_stop"] = output.matched_stop
    if reply.chat:
        choice["message"] = {"role": "assistant", "content": text}
        if reply.want_logprobs:
            choice["logprobs"] = fmt.chat_logprobs(tokens, output.output_ids, output.logprobs, output.top_logprobs)
        if isinstance(body, ChatRequest) and body.return_meta_info:
            choice["meta_info"] = meta_info(output, tokens, logprobs=True, logprob_start=-1)
    else:
        prompt_text = _echo_text(reply, output.prompt_ids)
        choice["text"] = prompt_text + text
        if reply.want_logprobs:
            choice["logprobs"] = _whole_logprobs(reply, output, len(prompt_text))
    if body.return_token_ids:
        choice |= fmt.token_fields(output.prompt_ids, output.output_ids, output.logprobs)
    elif isinstance(body, ChatRequest) and body.return_prompt_token_ids:
        choice["prompt_token_ids"] = list(output.prompt_ids)
    return choice | fmt.version_fields(output)


def _echo_text(reply: _Reply, prompt_ids: Sequence[int]) -> str:
    return decode(reply.frontend.tokenizer, prompt_ids, reply.body.skip_special_tokens) if reply.echo else ""


def _whole_logprobs(reply: _Reply, output: GenerationOutput, prompt_characters: int) -> dict[str, Any]:
    """The table of a completion: the response, after the prompt if that is echoed."""
    tokens, tops = reply.frontend.token_text, list(output.top_logprobs)
    if not reply.echo:
        return fmt.completion_logprobs(tokens, output.output_ids, output.logprobs, tops, prompt_characters)
    scores = output.prompt_logprobs or (None,) * len(output.prompt_ids)
    all_tops = [None] * len(output.prompt_ids) + tops if reply.top_logprobs else []
    return fmt.completion_logprobs(
        tokens, output.prompt_ids + output.output_ids, (*scores, *output.logprobs), all_tops, 0
    )


class _ChoiceStream:
    """One choice of a streamed answer: deltas in, chunk choices out."""

    def __init__(self, reply: _Reply, index: int, request: GenerationRequest) -> None:
        body, tokenizer = reply.body, reply.frontend.tokenizer
        self._reply, self._index, self._prompt_ids = reply, index, request.prompt_ids
        stop_ids = {*body.stop_token_ids} | (set() if body.ignore_eos else {tokenizer.eos_token_id})
        self._text = TextStream(
            tokenizer, skip_special_tokens=body.skip_special_tokens, stop=body.stop,
            stop_token_ids=stop_ids, keep_stop=body.no_stop_trim,
        )  # fmt: skip
        self._started = False
        self._sent = 0  # tokens
        self._characters = 0

    def delta(self, items: Sequence[TokenDelta]) -> dict[str, Any]:
        ids = [token for item in items for token in item.output_ids]
        logprobs = [value for item in items for value in item.logprobs]
        tops = [top for item in items for top in item.top_logprobs]
        return self._piece(self._text.push(ids), ids, logprobs, tops, None)

    def finish(self, output: GenerationOutput) -> dict[str, Any]:
        """The last chunk; carries the tokens that no delta had (all of them, if the engine sent none)."""
        ids, logprobs = output.output_ids[self._sent :], output.logprobs[self._sent :]
        tops = output.top_logprobs[self._sent :]
        text = self._text.push(ids) + self._text.finish(output.matched_stop)
        return self._piece(text, ids, logprobs, tops, output)

    def _piece(
        self,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[fmt.Top],
        last: GenerationOutput | None,
    ) -> dict[str, Any]:
        reply, first, self._started = self._reply, not self._started, True
        tokens = reply.frontend.token_text
        prefix = _echo_text(reply, self._prompt_ids) if first else ""
        choice: dict[str, Any] = {"index": self._index, "finish_reason": last.finish_reason if last else None}
        choice["logprobs"] = None
        if reply.chat:
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
            if reply.want_logprobs and ids:
                choice["logprobs"] = fmt.chat_logprobs(tokens, ids, logprobs, tops)
        else:
            choice["text"] = prefix + text
            if reply.want_logprobs and ids:
                offset = self._characters + len(prefix)
                choice["logprobs"] = fmt.completion_logprobs(tokens, ids, logprobs, tops, offset)
        if reply.body.return_token_ids:
            choice |= fmt.token_fields(self._prompt_ids if first else None, ids, logprobs)
        if last:
            choice |= {"matched_stop": last.matched_stop, **fmt.version_fields(last)}
        self._sent += len(ids)
        self._characters += len(prefix) + len(text)
        return choice


async def _chunks(
    reply: _Reply, call: Call, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[list[dict[str, Any]]]:
    streams = [_ChoiceStream(reply, index, request) for index, request in enumerate(requests)]
    outputs: dict[int, GenerationOutput] = {}
    try:
        async for group in call.events():
            yield [reply.envelope([chunk], chunk=True) for chunk in _group_chunks(streams, group, outputs)]
    finally:
        await call.close()
    ordered = [outputs[index] for index in range(len(requests))]
    reply.frontend.metrics.finished(ordered)
    if reply.body.stream_options.include_usage:
        yield [reply.envelope([], chunk=True, usage=fmt.usage(ordered, reply.body.n))]


def _group_chunks(
    streams: Sequence[_ChoiceStream],
    group: Sequence[tuple[int, TokenDelta | GenerationOutput]],
    outputs: dict[int, GenerationOutput],
) -> list[dict[str, Any]]:
    """One chunk a choice for all deltas of a group, and one for each output, which is noted in `outputs`."""
    chunks = []
    deltas: dict[int, list[TokenDelta]] = {}
    for index, item in group:
        if isinstance(item, TokenDelta):
            deltas.setdefault(index, []).append(item)
            continue
        if pending := deltas.pop(index, None):
            chunks.append(streams[index].delta(pending))
        outputs[index] = item
        chunks.append(streams[index].finish(item))
    chunks.extend(streams[index].delta(items) for index, items in deltas.items())
    return chunks
