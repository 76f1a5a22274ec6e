"""`split_train_data_by_dp` and its inverse: one batch into the shards of the cells and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rollout.sharding.checks import as_list, check_batch, same, token_lengths
from megatron_rollout.sharding.costs import BalanceOptions
from megatron_rollout.sharding.partitions import check_parts, seqlen_balanced_partitions, strided_partitions
from megatron_rollout.sharding.schema import DEFAULT_SCHEMA, ColumnKind, ColumnSchema, row_count, take_rows
from megatron_rollout.sharding.shard import PARTITION, Shard, check_containers, kind_in_shards
from megatron_rollout.sharding.steps import dynamic_global_batch_size


def split_train_data_by_dp(
    args: Any,
    data: Mapping[str, Any],
    *,
    dp_size: int,
    schema: ColumnSchema = DEFAULT_SCHEMA,
    samples: Sequence[int] | None = None,
) -> list[Shard]:
    """Split a batch into `dp_size` shards, one per cell (a host: per data-parallel rank).

    args: the host's options; read are balance_data, balance_by, balance_sizes, use_dynamic_global_batch_size,
    num_steps_per_rollout and, for FLOPs, the model's dimensions. data: columns by name, never changed. samples: the
    global indices to split (those of one step; default: all).

    Each shard holds `partition` (global indices of its rows, in row order), its rows of every per-sample column, and
    every batch-wide column whole: the same object, not a copy. Added, if the batch has tokens but lacks it:
    `total_lengths` ([n] tokens of every sample of the batch); and, with --use-dynamic-global-batch-size,
    `dynamic_global_batch_size`.

    Balanced (`--balance-data`) by `seqlen_balanced_partitions` on tokens or FLOPs, else strided by index: the static
    assignment that `--deterministic` relies on. A batch without lengths (prompts over rollout cells) counts every
    sample as one.

    Invariants: every sample is in exactly one shard; all shards have the same columns, also those without rows;
    `merge_shards` gives the batch back.

    Raises ValueError: what `check_batch` finds; dp_size < 1; unknown balance options; a `partition` column (the
    data is a shard already: merge first); `samples` out of range or repeated.
    """
    num_parts = check_parts(dp_size, "dp_size")
    options = BalanceOptions.from_args(args)
    if PARTITION in data:
        raise ValueError(f"column '{PARTITION}' is reserved: the batch is a shard already; merge its shards first")
    num_samples = check_batch(data, schema)
    chosen = _chosen(samples, num_samples)

    columns = dict(data)
    lengths = token_lengths(data)
    if "total_lengths" not in columns and lengths is not None:
        columns["total_lengths"] = lengths
    if getattr(args, "use_dynamic_global_batch_size", False) and "dynamic_global_batch_size" not in columns:
        columns["dynamic_global_batch_size"] = dynamic_global_batch_size(args, _rollout_ids(data, num_samples))
    derived = frozenset(columns.keys() - data.keys())
    kinds = {
        name: ColumnKind.BATCH_WIDE if name in derived else schema.kind(name, value, num_samples)
        for name, value in columns.items()
    }

    if options.data:
        tokens = [1 if lengths is None else lengths[i] for i in chosen]
        costs = tokens if lengths is None else options.costs(args, tokens)
        parts = seqlen_balanced_partitions(costs, num_parts, sizes=options.sizes)
    else:
        parts = strided_partitions(len(chosen), num_parts)
    shards = []
    for part in parts:
        rows = [chosen[i] for i in part]
        shard = {
            name: take_rows(value, rows) if kinds[name] is ColumnKind.PER_SAMPLE else value
            for name, value in columns.items()
        }
        shards.append(Shard({PARTITION: rows, **shard}, num_rows=len(chosen), kinds=kinds, derived=derived))
    return shards


def merge_shards(shards: Sequence[Mapping[str, Any]], *, schema: ColumnSchema = DEFAULT_SCHEMA) -> dict[str, Any]:
    """Undo `split_train_data_by_dp`, in any order of the shards: rows by ascending global index, batch-wide columns
    once, columns that the split added left out.

    Columns that the cells added to every shard (values, log-probabilities) are merged too, by the schema or by having
    one row per row of their shard. Shards that are plain mappings are taken as shards of a whole batch, every unknown
    column judged in that way, and no column left out.

    Raises ValueError: no shard; a shard without `partition`; a sample missing or in two shards; shards whose columns
    differ, whose rows aren't as many as their partition, or whose batch-wide columns disagree.
    """
    if not shards:
        raise ValueError("no shards to merge")
    _check_complete(shards)
    order = np.argsort(np.asarray([i for shard in shards for i in shard[PARTITION]], dtype=np.int64), kind="stable")
    first = shards[0]
    rows = [len(shard[PARTITION]) for shard in shards]
    derived = first.derived if isinstance(first, Shard) else frozenset()
    merged = {}
    for name in first:
        if name == PARTITION or name in derived:
            continue
        for position, shard in enumerate(shards):
            if name not in shard:
                raise ValueError(f"column '{name}' of shard 0 is missing in shard {position}")
        values = [shard[name] for shard in shards]
        if kind_in_shards(name, shards, rows, schema) is ColumnKind.PER_SAMPLE:
            merged[name] = _join(name, values, shards, order)
            continue
        for position, value in enumerate(values):
            if not same(values[0], value):
                raise ValueError(f"batch-wide column '{name}' differs between shard 0 and shard {position}")
        merged[name] = values[0]
    for position, shard in enumerate(shards):
        extra = sorted(set(shard) - set(first))
        if extra:
            raise ValueError(f"column '{extra[0]}' of shard {position} is missing in shard 0")
    return merged


def _chosen(samples: Sequence[int] | None, num_samples: int) -> list[int]:
    if samples is None:
        return list(range(num_samples))
    chosen = [int(i) for i in samples]
    outside = [i for i in chosen if not 0 <= i < num_samples]
    if outside:
        raise ValueError(f"samples {outside[:8]} are not in the batch of {num_samples} samples")
    if len(set(chosen)) != len(chosen):
        repeated = [i for i, count in Counter(chosen).items() if count > 1]
        raise ValueError(f"samples {repeated[:8]} are given more than once")
    return sorted(chosen)


def _rollout_ids(data: Mapping[str, Any], num_samples: int) -> Sequence[Any]:
    rollouts = data.get("rollout_ids")
    return range(num_samples) if rollouts is None else as_list(rollouts)


def _check_complete(shards: Sequence[Mapping[str, Any]]) -> None:
    """Each sample of the split is in exactly one of the shards."""
    owners: dict[int, int] = {}
    for position, shard in enumerate(shards):
        if PARTITION not in shard:
            raise ValueError(f"shard {position} has no column '{PARTITION}'")
        for index in shard[PARTITION]:
            if index in owners:
                raise ValueError(f"sample {index} is in shard {owners[index]} and in shard {position}")
            owners[index] = position
    first = shards[0]
    if isinstance(first, Shard):
        if len(owners) != first.num_rows:
            raise ValueError(f"the {len(shards)} shards hold {len(owners)} samples of a split of {first.num_rows}")
        return
    missing = sorted(set(range(len(owners))) - owners.keys())
    if missing:
        raise ValueError(f"samples {missing[:8]} are in no shard")


def _join(name: str, values: Sequence[Any], shards: Sequence[Mapping[str, Any]], order: np.ndarray[Any, Any]) -> Any:
    for position, (value, shard) in enumerate(zip(values, shards, strict=True)):
        if row_count(value) != len(shard[PARTITION]):
            raise ValueError(
                f"column '{name}' of shard {position} has {row_count(value)} rows for {len(shard[PARTITION])} samples"
            )
    check_containers(name, values)
    if isinstance(values[0], list | tuple):
        rows = [row for value in values for row in value]
        return type(values[0])(rows[i] for i in order)
    shapes = [tuple(value.shape[1:]) for value in values]
    for position, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(f"column '{name}' has rows of shape {shapes[0]} in shard 0, {shape} in shard {position}")
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)[order]
    import torch  # loaded already: the values are tensors

    joined = torch.cat(list(values))
    return joined[torch.as_tensor(order, device=joined.device)]
