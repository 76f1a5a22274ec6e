"""Requests over rollout cells: contiguous shards of a batch, and their results merged again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rollout.sharding.checks import same
from megatron_rollout.sharding.partitions import check_parts
from megatron_rollout.sharding.schema import (
    DEFAULT_SCHEMA,
    ColumnKind,
    ColumnSchema,
    count_samples,
    take_rows,
)
from megatron_rollout.sharding.shard import Shard, check_containers, kind_in_shards


def shard_by_batch_size(
    batch: Mapping[str, Any], n: int, allow_uneven: bool = True, *, schema: ColumnSchema = DEFAULT_SCHEMA
) -> list[Shard]:
    """Split a batch of B samples into n contiguous shards of ceil(B / n) rows; the last ones get what is left
    (5 samples over 4 shards: 2, 2, 1, 0).

    Invariants: the shards' rows, one after the other, are the batch's; every shard has every column, also with zero
    rows, of the same container, dtype and width; batch-wide columns are whole in each.

    Raises ValueError: n < 1; B not divisible by n without `allow_uneven`; columns of different lengths.
    """
    parts = check_parts(n, "number of shards")
    num_samples = count_samples(batch, schema)
    if num_samples % parts and not allow_uneven:
        raise ValueError(f"{num_samples} samples can't be split evenly over {parts} shards")
    size = -(-num_samples // parts)
    kinds = {name: schema.kind(name, value, num_samples) for name, value in batch.items()}
    shards = []
    for begin in range(0, parts * size, size) if size else [0] * parts:
        rows = range(min(begin, num_samples), min(begin + size, num_samples))
        shard = {
            name: take_rows(value, rows) if kinds[name] is ColumnKind.PER_SAMPLE else value
            for name, value in batch.items()
        }
        shards.append(Shard(shard, num_rows=num_samples, kinds=kinds))
    return shards


def merge_batches(
    batches: Sequence[Mapping[str, Any]], *, pad_token_id: int = 0, schema: ColumnSchema = DEFAULT_SCHEMA
) -> dict[str, Any]:
    """Put shards together again, in the given order.

    Arrays and tensors whose rows differ in width are padded on the right to the widest: token ids with `pad_token_id`,
    all else with 0. A batch-wide column is taken once.

    Raises ValueError: no batch; a column that one of them lacks; containers or numbers of dimensions that differ;
    batch-wide columns that disagree.
    """
    if not batches:
        raise ValueError("no batches to merge")
    names = list(dict.fromkeys(name for batch in batches for name in batch))
    for name in names:
        lacking = [position for position, batch in enumerate(batches) if name not in batch]
        if lacking:
            raise ValueError(f"column '{name}' is missing in shard {lacking[0]}")
    rows = [count_samples(batch, schema) for batch in batches]
    merged = {}
    for name in names:
        values = [batch[name] for batch in batches]
        if kind_in_shards(name, batches, rows, schema) is ColumnKind.PER_SAMPLE:
            merged[name] = _join(name, values, pad_token_id if name in schema.token_ids else 0)
            continue
        for position, value in enumerate(values):
            if not same(values[0], value):
                raise ValueError(f"batch-wide column '{name}' differs between shard 0 and shard {position}")
        merged[name] = values[0]
    return merged


def _join(name: str, values: Sequence[Any], pad: int) -> Any:
    check_containers(name, values)
    if isinstance(values[0], list | tuple):
        return type(values[0])(row for value in values for row in value)
    dimensions = [value.ndim for value in values]
    if len(set(dimensions)) > 1:
        raise ValueError(f"column '{name}' has {dimensions} dimensions in shards 0 to {len(values) - 1}")
    shape = np.max([value.shape[1:] for value in values], axis=0).astype(int) if dimensions[0] > 1 else ()
    widened = [_widen(value, tuple(shape), pad) for value in values]
    if isinstance(values[0], np.ndarray):
        return np.concatenate(widened)
    import torch  # loaded already: the values are tensors

    return torch.cat(widened)


def _widen(value: Any, shape: tuple[int, ...], pad: int) -> Any:
    """`value` with its trailing dimensions filled up to `shape` at their ends."""
    if tuple(value.shape[1:]) == shape:
        return value
    rows = int(value.shape[0])
    if isinstance(value, np.ndarray):
        wide = np.full((rows, *shape), pad, dtype=value.dtype)
    else:
        wide = value.new_full((rows, *shape), pad)
    wide[tuple(slice(size) for size in value.shape)] = value
    return wide
