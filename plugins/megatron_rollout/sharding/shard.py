"""What one cell gets of a batch, and what its columns are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rollout.sharding.schema import ColumnKind, ColumnSchema, is_tensor, row_count

#: Column of a shard with the global indices of its rows, in row order.
PARTITION = "partition"


class Shard(dict[str, Any]):
    """What one cell gets of a batch: a plain mapping of columns for whoever reads it, which also remembers what
    `merge_shards` needs to undo the split exactly. Pickles as such; a copy made with `dict(shard)` forgets.

    num_rows: samples in all shards of this split together. kinds: the kind of each column. derived: columns that the
    split added (they aren't part of the batch).
    """

    num_rows: int
    kinds: dict[str, ColumnKind]
    derived: frozenset[str]

    def __init__(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        num_rows: int = 0,
        kinds: Mapping[str, ColumnKind] | None = None,
        derived: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(columns or {})
        self.num_rows, self.kinds, self.derived = num_rows, dict(kinds or {}), derived


def kind_in_shards(
    name: str, shards: Sequence[Mapping[str, Any]], rows: Sequence[int], schema: ColumnSchema
) -> ColumnKind:
    """The kind of a column that all shards have; rows: samples in each of them."""
    first = shards[0]
    if isinstance(first, Shard) and name in first.kinds:
        return first.kinds[name]
    kinds = {schema.kind(name, shard[name], count) for shard, count in zip(shards, rows, strict=True)}
    return ColumnKind.PER_SAMPLE if kinds == {ColumnKind.PER_SAMPLE} else ColumnKind.BATCH_WIDE


def check_containers(name: str, values: Sequence[Any]) -> None:
    """ValueError unless all shards hold a column in the same kind of container."""
    first = type(values[0]).__name__
    for position, value in enumerate(values):
        if is_tensor(value) and is_tensor(values[0]):
            continue
        if type(value) is not type(values[0]) or row_count(value) is None:
            raise ValueError(f"column '{name}': {first} in shard 0, {type(value).__name__} in shard {position}")
