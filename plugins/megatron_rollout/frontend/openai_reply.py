"""Answers of the OpenAI wire: whole, and as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rollout.frontend import openai_format as fmt
from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.detokenize import TextStream, decode, response_text
from megatron_rollout.frontend.inflight import Call
from megatron_rollout.frontend.openai_schema import ChatRequest, CompletionRequest
from megatron_rollout.frontend.sglang_format import meta_info
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta


@dataclass
class Reply:
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


def choice_of(reply: Reply, index: int, output: GenerationOutput) -> dict[str, Any]:
    """One finished choice. The text is cut at the stop; ids and logprobs cover all that was sampled."""
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


def _echo_text(reply: Reply, prompt_ids: Sequence[int]) -> str:
    return decode(reply.frontend.tokenizer, prompt_ids, reply.body.skip_special_tokens) if reply.echo else ""


def _whole_logprobs(reply: Reply, output: GenerationOutput, prompt_characters: int) -> dict[str, Any]:
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

    def __init__(self, reply: Reply, index: int, request: GenerationRequest) -> None:
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


async def chunks_of(
    reply: Reply, call: Call, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[list[dict[str, Any]]]:
    """The chunks of a streamed answer, grouped as they became ready; closes the call at the end."""
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
