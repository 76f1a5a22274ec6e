"""Splitting, balancing and scheduling, as pure functions: prompts over rollout cells, training data over trainer cells.

- `split_train_data_by_dp` / `merge_shards`: one batch into the shards of the cells and back
- `shard_by_batch_size` / `merge_batches`: the same in contiguous pieces
- `plan_steps` / `build_dp_schedule` / `schedule_cell`: optimizer steps and micro-batches
- `normalisation`: what losses are divided by
"""

from megatron_rollout.sharding.batches import merge_batches, shard_by_batch_size
from megatron_rollout.sharding.checks import check_batch
from megatron_rollout.sharding.costs import BalanceOptions, FlopsCost
from megatron_rollout.sharding.micro_batches import MicroBatchOptions, pack_micro_batches, schedule_cell
from megatron_rollout.sharding.normalisation import Normalisation, normalisation
from megatron_rollout.sharding.partitions import seqlen_balanced_partitions, strided_partitions
from megatron_rollout.sharding.schedule import DpSchedule, StepSchedule, build_dp_schedule
from megatron_rollout.sharding.schema import DEFAULT_SCHEMA, ColumnKind, ColumnSchema
from megatron_rollout.sharding.shard import PARTITION, Shard
from megatron_rollout.sharding.split import merge_shards, split_train_data_by_dp
from megatron_rollout.sharding.steps import (
    StepPlan,
    check_global_batch_size,
    dynamic_global_batch_size,
    plan_steps,
)

__all__ = [
    "DEFAULT_SCHEMA",
    "PARTITION",
    "BalanceOptions",
    "ColumnKind",
    "ColumnSchema",
    "DpSchedule",
    "FlopsCost",
    "MicroBatchOptions",
    "Normalisation",
    "Shard",
    "StepPlan",
    "StepSchedule",
    "build_dp_schedule",
    "check_batch",
    "check_global_batch_size",
    "dynamic_global_batch_size",
    "merge_batches",
    "merge_shards",
    "normalisation",
    "pack_micro_batches",
    "plan_steps",
    "schedule_cell",
    "seqlen_balanced_partitions",
    "shard_by_batch_size",
    "split_train_data_by_dp",
    "strided_partitions",
]
