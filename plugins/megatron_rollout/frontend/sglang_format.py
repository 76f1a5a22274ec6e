"""`meta_info` of the SGLang wire. Pure: outputs in, plain objects out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rollout.frontend.detokenize import TokenText
from megatron_rollout.frontend.wire import finite_logprob, finite_logprobs
from megatron_rollout.requests import GenerationOutput

Top = Sequence[tuple[int, float]]
Entry = list[Any]  # [logprob, token id, text or null]


def finish_reason(output: GenerationOutput) -> dict[str, Any]:
    """{"type": "stop", "matched": ...}, {"type": "length", "length": n} or {"type": "abort", "message": ...}."""
    if output.finish_reason == "stop":
        return {"type": "stop", "matched": output.matched_stop}
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.output_ids)}
    return {"type": "abort", "message": output.error or "aborted", "status_code": None, "err_type": None}


def version_name(version: int | None) -> str:
    """Weight versions are strings on this wire."""
    return "default" if version is None else str(version)


def logprob_entries(logprobs: Sequence[float | None], ids: Sequence[int], texts: TokenText | None) -> list[Entry]:
    """[[logprob, id, text], ...], the text null unless `texts` is given."""
    values = finite_logprobs(logprobs)
    if texts is None:
        return [[value, token_id, None] for value, token_id in zip(values, ids, strict=True)]
    return [[value, token_id, texts.text(token_id)] for value, token_id in zip(values, ids, strict=True)]


def top_entries(tops: Sequence[Top], texts: TokenText | None) -> list[list[Entry]]:
    return [
        [[finite_logprob(value), token_id, texts.text(token_id) if texts else None] for token_id, value in top]
        for top in tops
    ]


def meta_info(
    output: GenerationOutput,
    texts: TokenText | None,
    *,
    logprobs: bool,
    logprob_start: int = -1,
    top_logprobs: bool = False,
) -> dict[str, Any]:
    """`meta_info` of a finished sample.

    weight_version is the one that produced the last token; weight_versions, beside it, has the spans.
    input_token_logprobs reports the prompt from logprob_start on, the first entry without a value (as SGLang does);
    the alternatives of prompt tokens are not known, so input_top_logprobs has null for each.
    """
    spans = output.weight_versions
    meta: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": finish_reason(output),
        "prompt_tokens": len(output.prompt_ids),
        "completion_tokens": len(output.output_ids),
        "cached_tokens": output.cached_tokens,
        "weight_version": version_name(spans[-1][1] if spans else None),
        "weight_versions": [list(span) for span in spans],
    }
    if not logprobs:
        return meta
    meta["output_token_logprobs"] = logprob_entries(output.logprobs, output.output_ids, texts)
    meta["output_token_logprobs_length"] = len(output.output_ids)
    prompt_ids: Sequence[int] = ()
    if 0 <= logprob_start < len(output.prompt_ids):
        prompt_ids = output.prompt_ids[logprob_start:]
    scores = (output.prompt_logprobs or (None,) * len(output.prompt_ids))[logprob_start:] if prompt_ids else ()
    meta["input_token_logprobs"] = logprob_entries((None, *scores[1:]) if scores else (), prompt_ids, texts)
    if top_logprobs:
        meta["output_top_logprobs"] = top_entries(output.top_logprobs, texts)
        meta["input_top_logprobs"] = [None] * len(prompt_ids)
    return meta


def update_reply(success: bool, message: str, **extra: Any) -> dict[str, Any]:
    """What the weight-update endpoints answer; a refusal also carries the common error body."""
    return {"success": success, "message": message, **extra}
