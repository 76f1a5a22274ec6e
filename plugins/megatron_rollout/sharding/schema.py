"""Columns of a batch: which hold one row per sample, which belong to the batch as a whole, and how rows are taken.

A batch is a mapping from column name to value. The kind of a column that the hosts know comes from the schema, whatever
its value looks like; any other column is told by its shape (`ColumnSchema.kind`), and none is ever dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np


class ColumnKind(Enum):
    PER_SAMPLE = "per sample"
    BATCH_WIDE = "batch-wide"


@dataclass(frozen=True)
class ColumnSchema:
    """Known columns. `token_ids`: per-sample columns that are padded with the pad token (others with 0) when merged.

    Raises ValueError for a name of both kinds.
    """

    per_sample: frozenset[str]
    batch_wide: frozenset[str]
    token_ids: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        both = sorted((self.per_sample | self.token_ids) & self.batch_wide)
        if both:
            raise ValueError(f"columns declared both per sample and batch-wide: {', '.join(both)}")

    def extend(
        self, *, per_sample: Iterable[str] = (), batch_wide: Iterable[str] = (), token_ids: Iterable[str] = ()
    ) -> ColumnSchema:
        """This schema with more columns (`token_ids` are per-sample ones); a known column can't change its kind."""
        ids = frozenset(token_ids)
        return ColumnSchema(
            self.per_sample | frozenset(per_sample) | ids,
            self.batch_wide | frozenset(batch_wide),
            self.token_ids | ids,
        )

    def kind(self, name: str, value: Any, num_samples: int) -> ColumnKind:
        """The kind of a column. Unknown ones: per sample iff a list, tuple, array or tensor of `num_samples` rows.

        A known per-sample column whose value is None (a host's way to say that it has none) is carried whole.
        """
        if name in self.batch_wide:
            return ColumnKind.BATCH_WIDE
        if name in self.per_sample:
            return ColumnKind.BATCH_WIDE if value is None else ColumnKind.PER_SAMPLE
        return ColumnKind.PER_SAMPLE if row_count(value) == num_samples else ColumnKind.BATCH_WIDE


#: The per-sample columns of a training batch of slime and Miles.
HOST_COLUMNS = frozenset(
    {
        "tokens",
        "multimodal_train_inputs",
        "response_lengths",
        "rewards",
        "truncated",
        "loss_masks",
        "round_number",
        "sample_indices",
        "rollout_ids",
        "rollout_mask_sums",
        "rollout_log_probs",
        "rollout_routed_experts",
        "rollout_indexer_topk",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "prompt",
        "teacher_log_probs",
        "opd_reverse_kl",
        "seq_witness_ids",
        "weight_versions",
        "adapter_slots",
        "source_names",
    }
)

#: Frozen before a rollout's first step, kept by sample.
FROZEN_COLUMNS = frozenset({"log_probs", "ref_log_probs", "values", "advantages", "returns"})

#: Requests to rollout cells and their results.
GENERATION_COLUMNS = frozenset(
    {
        "input_ids",
        "input_lengths",
        "output_ids",
        "generation_lengths",
        "unpadded_sequence_lengths",
        "logprobs",
    }
)

#: Whole in every shard.
BATCH_COLUMNS = frozenset(
    {
        "raw_reward",
        "total_lengths",
        "dynamic_global_batch_size",
        "step_slots",
        "step_adapter_names",
        "step_adapter_batch_sizes",
        "prompt_group_sizes",
    }
)

DEFAULT_SCHEMA = ColumnSchema(
    per_sample=HOST_COLUMNS | FROZEN_COLUMNS | GENERATION_COLUMNS,
    batch_wide=BATCH_COLUMNS,
    token_ids=frozenset({"tokens", "input_ids", "output_ids"}),
)


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; doesn't import torch (without it there is none)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def row_count(value: Any) -> int | None:
    """Size of the first dimension of a list, tuple, array or tensor; None for anything else (0-d included)."""
    if isinstance(value, list | tuple):
        return len(value)
    if isinstance(value, np.ndarray) or is_tensor(value):
        return int(value.shape[0]) if value.ndim else None
    return None


def take_rows(value: Any, rows: Sequence[int]) -> Any:
    """The given rows of a per-sample column, in that order, as the same kind of container (dtype, device and the other
    dimensions included; arrays and tensors are copied)."""
    if isinstance(value, list):
        return [value[i] for i in rows]
    if isinstance(value, tuple):
        return tuple(value[i] for i in rows)
    index = np.asarray(rows, dtype=np.int64)
    if isinstance(value, np.ndarray):
        return value[index]
    import torch  # loaded already: the value is a tensor

    return value[torch.as_tensor(index, device=value.device)]


def count_samples(batch: Mapping[str, Any], schema: ColumnSchema = DEFAULT_SCHEMA) -> int:
    """Number of samples in a batch: the rows of its known per-sample columns, or, without one, of all other columns
    that have rows.

    Raises ValueError: columns of different lengths (names them and both numbers); no column with rows.
    """
    rows = {name: row_count(value) for name, value in batch.items() if name not in schema.batch_wide}
    known = {name: rows[name] for name in rows if name in schema.per_sample and batch[name] is not None}
    shapeless = [f"'{name}' is a {type(batch[name]).__name__}" for name, count in known.items() if count is None]
    if shapeless:
        raise ValueError(f"per-sample columns need one row per sample: column {', column '.join(shapeless)}")
    counted = {name: count for name, count in (known or rows).items() if count is not None}
    if not counted:
        raise ValueError(f"no per-sample column in the batch; its columns are: {', '.join(batch) or 'none'}")
    first = "tokens" if "tokens" in counted else next(iter(counted))
    different = [f"'{name}' has {count}" for name, count in counted.items() if count != counted[first]]
    if different:
        raise ValueError(
            f"columns of different lengths: column '{first}' has {counted[first]} rows, column "
            + ", column ".join(different)
        )
    return counted[first]
