"""Choices, chunks and logprob tables of the OpenAI wire. Pure: outputs in, plain objects out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rollout.frontend.detokenize import TokenText
from megatron_rollout.frontend.wire import finite_logprob, finite_logprobs
from megatron_rollout.requests import GenerationOutput

Top = Sequence[tuple[int, float]]


def weight_version(output: GenerationOutput) -> int | None:
    """The version that produced the last token (the newest one in the response)."""
    return output.weight_versions[-1][1] if output.weight_versions else None


def token_fields(prompt_ids: Sequence[int] | None, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """The extras for RL of one choice: what was sampled, whatever the text shows of it. Ids and logprobs have equal
    lengths."""
    fields: dict[str, Any] = {"generation_token_ids": list(ids), "generation_log_probs": finite_logprobs(logprobs)}
    if prompt_ids is not None:
        fields["prompt_token_ids"] = list(prompt_ids)
    return fields


def version_fields(output: GenerationOutput) -> dict[str, Any]:
    """weight_version (int or null) and weight_versions ([[start, version], ...])."""
    return {
        "weight_version": weight_version(output),
        "weight_versions": [list(span) for span in output.weight_versions],
    }


def usage(outputs: Sequence[GenerationOutput], n: int) -> dict[str, Any]:
    """Token counts of a call; a prompt sampled n times counts once."""
    prompt_tokens = sum(len(output.prompt_ids) for output in outputs[::n])
    completion_tokens = sum(len(output.output_ids) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs[::n])},
    }


def chat_logprobs(
    tokens: TokenText, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]
) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry a sampled token."""
    content = []
    for position, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        entry = _chat_entry(tokens, token_id, logprob)
        top = tops[position] if position < len(tops) else ()
        entry["top_logprobs"] = [_chat_entry(tokens, other, value) for other, value in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(tokens: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokens.text(token_id),
        "token_id": token_id,
        "logprob": finite_logprob(logprob),
        "bytes": tokens.bytes(token_id),
    }


def completion_logprobs(
    tokens: TokenText,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Top | None],
    offset: int,
) -> dict[str, Any]:
    """`logprobs` of a completion choice. offset: characters of text before the first of `ids`.

    top_logprobs is null unless alternatives were asked for; a token without any (of an echoed prompt) has itself only.
    """
    texts = [tokens.text(token_id) for token_id in ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tables: list[dict[str, float | None] | None] | None = None
    if tops:
        tables = []
        for text, logprob, top in zip(texts, logprobs, tops, strict=True):
            if logprob is None:
                tables.append(None)
                continue
            table = {tokens.text(other): finite_logprob(value) for other, value in top or ()}
            tables.append({**table, text: finite_logprob(logprob)})
    return {
        "tokens": texts,
        "token_logprobs": finite_logprobs(logprobs),
        "top_logprobs": tables,
        "text_offset": offsets,
    }
