"""Batches as `generate` takes and gives them: dicts of right-padded tensors, one row a sample.

In: input_ids [B, S] (right-padded), input_lengths [B]; optional per-row stop_strings, stop_token_ids, seeds and
sampling overrides (temperature, top_p, top_k, max_new_tokens). Out: output_ids and logprobs [B, S_out], generation_lengths,
unpadded_sequence_lengths and truncated [B], weight_versions (spans, one list a row). Every other column is carried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams

_OVERRIDES = ("temperature", "top_p", "top_k", "max_new_tokens")
_READ = ("input_ids", "input_lengths", "stop_strings", "stop_token_ids", "seeds", *_OVERRIDES)


def requests_of(
    data: Mapping[str, Any], defaults: SamplingParams, *, prefix: str, pad_token_id: int, seeds: Sequence[int]
) -> list[GenerationRequest]:
    """One request a row of `data`; `seeds` are used where the batch brings none.

    Raises ValueError for columns of other lengths, lengths beyond the width, and rows that are not right-padded.
    """
    ids = torch.as_tensor(data["input_ids"])
    lengths = torch.as_tensor(data["input_lengths"])
    if ids.dim() != 2 or lengths.shape != ids.shape[:1]:
        raise ValueError(
            f"input_ids must be [B, S] and input_lengths [B], got {list(ids.shape)} and {list(lengths.shape)}"
        )
    rows, width = ids.shape
    for name in (*_READ[2:],):
        column = data.get(name)
        if column is not None and len(column) != rows:
            raise ValueError(f"column {name!r} has {len(column)} rows, input_ids has {rows}")
    requests = []
    for i, (row, length) in enumerate(zip(ids.tolist(), lengths.tolist(), strict=True)):
        if not 0 < length <= width:
            raise ValueError(f"sample {i}: input_lengths is {length}, input_ids is {width} wide")
        if any(token != pad_token_id for token in row[length:]):
            place = next(j for j in range(length, width) if row[j] != pad_token_id)
            raise ValueError(
                f"sample {i}: input_ids must be right-padded with {pad_token_id} from its length {length} on, "
                f"but position {place} holds {row[place]}"
            )
        overrides = {name: data[name][i] for name in _OVERRIDES if data.get(name) is not None}
        overrides = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in overrides.items()}
        stop = data.get("stop_strings")
        stop_ids = data.get("stop_token_ids")
        own_seeds = data.get("seeds")
        sampling = replace(
            defaults,
            stop=(*defaults.stop, *((stop[i] or ()) if stop is not None else ())),
            stop_token_ids=(*defaults.stop_token_ids, *((stop_ids[i] or ()) if stop_ids is not None else ())),
            seed=int(own_seeds[i]) if own_seeds is not None else seeds[i],
            **overrides,
        )
        requests.append(GenerationRequest(f"{prefix}-{i}", tuple(row[:length]), sampling))
    return requests


def batch_of(
    outputs: Sequence[GenerationOutput],
    data: Mapping[str, Any],
    *,
    pad_token_id: int,
    rows: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The batch of `outputs`, in their order. rows: the rows of `data` that they belong to (default: all)."""
    total = [len(o.prompt_ids) + len(o.output_ids) for o in outputs]
    width = max(total, default=0)
    ids = torch.full((len(outputs), width), pad_token_id, dtype=torch.long)
    logprobs = torch.zeros((len(outputs), width))
    for i, output in enumerate(outputs):
        start = len(output.prompt_ids)
        ids[i, : total[i]] = torch.tensor((*output.prompt_ids, *output.output_ids), dtype=torch.long)
        logprobs[i, start : total[i]] = torch.tensor(output.logprobs)
    batch: dict[str, Any] = {
        "output_ids": ids,
        "logprobs": logprobs,
        "generation_lengths": torch.tensor([len(o.output_ids) for o in outputs], dtype=torch.long),
        "unpadded_sequence_lengths": torch.tensor(total, dtype=torch.long),
        "truncated": torch.tensor([o.truncated for o in outputs], dtype=torch.bool),
        "weight_versions": [list(o.weight_versions) for o in outputs],
        "gen_leader_worker_idx": [o.cell for o in outputs],
    }
    for name, column in data.items():
        if name not in _READ and name not in batch:
            batch[name] = column if rows is None else _take(column, rows, len(data["input_lengths"]))
    return batch


def _take(column: Any, rows: Sequence[int], size: int) -> Any:
    if isinstance(column, torch.Tensor) and column.dim() and column.shape[0] == size:
        return column[list(rows)]
    if isinstance(column, list | tuple) and len(column) == size:
        return [column[r] for r in rows]
    return column
