"""Prompts of all forms to token ids, checked against the model: text, ids, chat messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from megatron_rollout.frontend.client import EngineStatus
from megatron_rollout.frontend.errors import bad_request

#: Longer texts (characters) are tokenised beside the event loop: about a millisecond of work.
_LONG_TEXT = 16384
#: Arguments of the chat template that a request may not set through `chat_template_kwargs`.
_RESERVED = frozenset({"conversation", "messages", "tools", "tokenize", "return_dict", "chat_template",
                       "add_generation_prompt", "continue_final_message", "return_tensors"})  # fmt: skip

Prompt = str | list[int]


def is_token_ids(value: Any) -> bool:
    """A non-empty list of ints (bool is not one)."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def split_prompts(value: Any, param: str) -> list[Prompt]:
    """The prompts of one call: a text, a list of ids, or a list of texts and lists of ids. RequestError 400 else."""
    if isinstance(value, str) or is_token_ids(value):
        return [value]
    if not isinstance(value, list):
        raise bad_request(
            f"{param}: must be a string, a list of token ids, or a list of those, got {type(value).__name__}", param
        )
    if not value:
        raise bad_request(f"{param}: is empty", param)
    for position, item in enumerate(value):
        if not (isinstance(item, str) or is_token_ids(item)):
            raise bad_request(
                f"{param}[{position}]: must be a string or a non-empty list of token ids, got {_short(item)}", param
            )
    return value


async def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of one prompt; ids pass through. Text gets the tokenizer's own special tokens (BOS, if any)."""
    if isinstance(prompt, list):
        return prompt
    if len(prompt) > _LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, prompt)
    return tokenizer.encode(prompt)


def check_prompt_ids(ids: Sequence[int], status: EngineStatus, limit: int | None, where: str) -> None:
    """RequestError 400 if the engine cannot take `ids`; names both numbers."""
    if not ids:
        raise bad_request(f"{where}: the prompt has no tokens", where)
    if len(ids) > status.max_context_length:
        raise bad_request(
            f"{where}: the prompt has {len(ids)} tokens, the model's context {status.max_context_length}", where
        )
    if limit is not None and len(ids) > limit:
        raise bad_request(f"{where}: the prompt has {len(ids)} tokens, this server accepts {limit}", where)
    low, high = min(ids), max(ids)
    if low < 0 or high >= status.vocab_size:
        position = next(i for i, token in enumerate(ids) if not 0 <= token < status.vocab_size)
        raise bad_request(
            f"{where}: token {ids[position]} at position {position} is outside the vocabulary of {status.vocab_size}",
            where,
        )


def response_budget(requested: int | None, prompt_length: int, status: EngineStatus) -> int:
    """New tokens that a request may get: what it asked for (None: all there is), within the model's context. A prompt
    that fills the context still gets the one token that its last position predicts."""
    room = max(status.max_context_length - prompt_length, 1)
    return room if requested is None else min(requested, room)


async def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_arguments: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template. RequestError 400 with the template's complaint."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise bad_request("messages: this model's tokenizer has no chat template; use /v1/completions", "messages")
    reserved = sorted(_RESERVED & template_arguments.keys())
    if reserved:
        raise bad_request(f"chat_template_kwargs: {', '.join(reserved)} may not be set", "chat_template_kwargs")
    flat = flatten_messages(messages)

    def render() -> list[int]:
        return tokenizer.apply_chat_template(
            flat,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=True,
            return_dict=False,
            **template_arguments,
        )

    try:
        long = sum(len(message["content"]) for message in flat) > _LONG_TEXT
        return await asyncio.to_thread(render) if long else render()
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise bad_request(f"messages: the chat template refused them: {error}", "messages") from error


def flatten_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is a plain string: text parts joined, absent content empty, media refused by name."""
    flat = []
    for position, message in enumerate(messages):
        where = f"messages.{position}"
        if not isinstance(message.get("role"), str):
            raise bad_request(f"{where}.role: is required", where)
        content = message.get("content")
        if content is None:
            content = ""
        elif isinstance(content, list):
            content = "".join(_part_text(part, f"{where}.content.{i}") for i, part in enumerate(content))
        elif not isinstance(content, str):
            raise bad_request(f"{where}.content: must be a string or a list of parts, got {_short(content)}", where)
        flat.append({**message, "content": content})
    return flat


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if isinstance(kind, str) and kind != "text":
        raise bad_request(f"{where}: {kind} parts are not supported: the model takes text only", where)
    raise bad_request(f"{where}: must be a text part, got {_short(part)}", where)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
