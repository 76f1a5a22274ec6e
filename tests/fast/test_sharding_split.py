"""The split and its inverse, contiguous shards and their merge, and every kind of bad input."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rollout.sharding import (
    DEFAULT_SCHEMA,
    ColumnKind,
    check_batch,
    merge_batches,
    merge_shards,
    shard_by_batch_size,
    split_train_data_by_dp,
)
from megatron_rollout.sharding.checks import same

MODES = [
    Namespace(balance_data=False),
    Namespace(balance_data=True),
    Namespace(balance_data=True, balance_sizes="equal"),
    Namespace(
        balance_data=True, balance_by="flops", hidden_size=64, num_layers=2, num_attention_heads=4, vocab_size=100
    ),
]


def batch_of(lengths: list[int]) -> dict[str, Any]:
    """A batch with a column of every kind that a host or a user may put in."""
    n = len(lengths)
    return {
        "tokens": [list(range(length)) for length in lengths],
        "response_lengths": [length // 2 for length in lengths],
        "loss_masks": [[1] * (length // 2) for length in lengths],
        "rewards": tuple(float(i) for i in range(n)),
        "sample_indices": np.arange(100, 100 + n),
        "rollout_ids": list(range(n)),
        "values": torch.arange(3.0 * n, dtype=torch.float64).reshape(n, 3),
        "rollout_log_probs": [torch.full((length // 2,), 0.5) for length in lengths],
        "multimodal_train_inputs": [None if i % 2 else {"pixels": i} for i in range(n)],
        "raw_reward": [float(i) for i in range(n)],
        "prompt_group_sizes": [n],
        "metadata": [{"id": i} for i in range(n)],
        "user_matrix": np.arange(2 * n, dtype=np.int32).reshape(n, 2),
        "note": "x" * n,
        "table": {i: i for i in range(n)},
        "temperature": 0.7,
        "schedule": list(range(n + 1)),
        "nothing": None,
    }


def sizes_of(shards: list) -> list[int]:
    return [len(shard["partition"]) for shard in shards]


@given(
    st.lists(st.integers(0, 60), max_size=25),
    st.integers(1, 8),
    st.sampled_from(MODES),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_merge_is_the_exact_inverse_and_the_batch_stays_as_it_was(
    lengths: list[int], cells: int, args: Namespace, random: Any
) -> None:
    data = batch_of(lengths)
    before = copy.deepcopy(data)
    shards = split_train_data_by_dp(args, data, dp_size=cells)
    assert same(data, before)
    assert len(shards) == cells
    assert sorted(i for shard in shards for i in shard["partition"]) == list(range(len(lengths)))
    for shard in shards:
        assert set(shard) == set(data) | {"partition", "total_lengths"}
        assert shard["total_lengths"] == lengths
        assert shard["tokens"] == [data["tokens"][i] for i in shard["partition"]]
        assert shard["sample_indices"].tolist() == [100 + i for i in shard["partition"]]
        assert shard["values"].dtype == torch.float64 and shard["values"].shape == (len(shard["partition"]), 3)
    moved = pickle.loads(pickle.dumps(shards))
    random.shuffle(moved)
    merged = merge_shards(moved)
    assert list(merged) == list(data)
    assert same(merged, data)
    again = split_train_data_by_dp(args, data, dp_size=cells)
    assert [shard["partition"] for shard in again] == [shard["partition"] for shard in shards]


@given(st.integers(0, 40), st.integers(1, 9))
@settings(deadline=None)
def test_unbalanced_is_the_static_assignment_of_prompts_to_rollout_cells(prompts: int, cells: int) -> None:
    data = {"prompt": [f"question {i}" for i in range(prompts)], "seed": 17}
    shards = split_train_data_by_dp(Namespace(), data, dp_size=cells)
    assert [shard["partition"] for shard in shards] == [list(range(cell, prompts, cells)) for cell in range(cells)]
    assert all("total_lengths" not in shard for shard in shards)
    assert merge_shards(shards) == data


@pytest.mark.parametrize("sizes", ["free", "equal"])
def test_s01_206_samples_over_4_cells(sizes: str) -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, 206) + 50, 16_384).astype(int).tolist()
    data = {"tokens": [[0] * length for length in lengths]}
    shards = split_train_data_by_dp(Namespace(balance_data=True, balance_sizes=sizes), data, dp_size=4)
    assert sum(sizes_of(shards)) == 206
    if sizes == "equal":
        assert sorted(sizes_of(shards)) == [51, 51, 52, 52]
    loads = [sum(lengths[i] for i in shard["partition"]) for shard in shards]
    assert max(loads) <= max(sum(lengths) / 4, max(lengths)) * 1.0005


@pytest.mark.parametrize("args", MODES[:3], ids=["strided", "free", "equal"])
def test_s02_5_samples_over_4_cells(args: Namespace) -> None:
    shards = split_train_data_by_dp(args, batch_of([10, 20, 30, 40, 50]), dp_size=4)
    assert sizes_of(shards) == [2, 1, 1, 1]


@pytest.mark.parametrize("args", MODES[:3], ids=["strided", "free", "equal"])
def test_s03_3_samples_over_4_cells_leave_one_empty_shard_with_all_columns(args: Namespace) -> None:
    data = batch_of([10, 20, 30])
    shards = split_train_data_by_dp(args, data, dp_size=4)
    assert sizes_of(shards) == [1, 1, 1, 0]
    assert set(shards[3]) == set(shards[0])
    assert shards[3]["tokens"] == [] and shards[3]["values"].shape == (0, 3) and shards[3]["rewards"] == ()
    assert shards[3]["note"] == data["note"]


@pytest.mark.parametrize("sizes", ["free", "equal"])
def test_16_samples_over_3_live_cells(sizes: str) -> None:
    data = batch_of([10 + i for i in range(16)])
    shards = split_train_data_by_dp(Namespace(balance_data=True, balance_sizes=sizes), data, dp_size=3)
    assert sum(sizes_of(shards)) == 16 and all(sizes_of(shards))
    assert sizes == "free" or sizes_of(shards) == [6, 5, 5]


def test_s11_unknown_columns_are_carried_by_their_shape() -> None:
    metadata, table = [{"id": i} for i in range(12)], {i: str(i) for i in range(12)}
    data = {"tokens": [[1, 2]] * 12, "metadata": metadata, "note": "twelve chars", "table": table}
    for shard in split_train_data_by_dp(Namespace(), data, dp_size=5):
        assert shard["metadata"] == [{"id": i} for i in shard["partition"]]
        assert shard["note"] == "twelve chars"
        assert shard["table"] is table


def test_the_schema_decides_over_the_shape_and_can_be_extended() -> None:
    data = {"tokens": [[1], [2]], "raw_reward": [0.0, 1.0], "thresholds": [0.1, 0.9]}
    schema = DEFAULT_SCHEMA.extend(batch_wide=["thresholds"])
    shards = split_train_data_by_dp(Namespace(), data, dp_size=2, schema=schema)
    assert [shard["thresholds"] for shard in shards] == [[0.1, 0.9]] * 2
    assert [shard["raw_reward"] for shard in shards] == [[0.0, 1.0]] * 2
    assert merge_shards(shards, schema=schema) == data
    with pytest.raises(ValueError, match="both per sample and batch-wide: tokens"):
        DEFAULT_SCHEMA.extend(batch_wide=["tokens"])
    assert DEFAULT_SCHEMA.kind("teacher_log_probs", None, 2) is ColumnKind.BATCH_WIDE


def test_a_batch_wide_column_as_long_as_a_shard_survives_the_merge() -> None:
    data = {"tokens": [[1]] * 6, "lr_per_step": [0.1, 0.2, 0.3]}
    shards = split_train_data_by_dp(Namespace(), data, dp_size=2)
    assert sizes_of(shards) == [3, 3]
    assert merge_shards(shards) == data


def test_columns_that_cells_add_are_merged_too() -> None:
    data = {"tokens": [[1] * i for i in range(1, 6)]}
    shards = split_train_data_by_dp(Namespace(balance_data=True), data, dp_size=3)
    for shard in shards:
        shard["returns"] = torch.tensor([float(len(tokens)) for tokens in shard["tokens"]])
        shard["entropy"] = [len(tokens) for tokens in shard["tokens"]]
    merged = merge_shards(shards)
    assert merged["returns"].tolist() == merged["entropy"] == [1, 2, 3, 4, 5]


def test_the_samples_of_one_step_are_split_by_their_global_indices() -> None:
    data = batch_of([10, 20, 30, 40, 50])
    shards = split_train_data_by_dp(Namespace(balance_data=True), data, dp_size=2, samples=[4, 0, 3])
    assert sorted(i for shard in shards for i in shard["partition"]) == [0, 3, 4]
    merged = merge_shards(shards)
    assert merged["tokens"] == [data["tokens"][i] for i in (0, 3, 4)]
    with pytest.raises(ValueError, match=r"samples \[5\] are not in the batch of 5"):
        split_train_data_by_dp(Namespace(), data, dp_size=2, samples=[0, 5])
    with pytest.raises(ValueError, match=r"samples \[1\] are given more than once"):
        split_train_data_by_dp(Namespace(), data, dp_size=2, samples=[1, 1])


def test_dynamic_global_batch_size_is_decided_once_and_is_in_every_shard() -> None:
    args = Namespace(use_dynamic_global_batch_size=True)
    data = {"tokens": [[1]] * 7, "rollout_ids": [0, 0, 1, 2, 3, 3, 4]}
    for cells in (1, 3, 9):
        shards = split_train_data_by_dp(args, data, dp_size=cells)
        assert [shard["dynamic_global_batch_size"] for shard in shards] == [5] * cells
        assert merge_shards(shards) == data
    given = {**data, "dynamic_global_batch_size": 3}
    assert {s["dynamic_global_batch_size"] for s in split_train_data_by_dp(args, given, dp_size=2)} == {3}
    assert split_train_data_by_dp(args, {"tokens": []}, dp_size=2)[1]["dynamic_global_batch_size"] == 0


def test_padded_tokens_take_their_lengths_from_total_lengths() -> None:
    tokens = torch.zeros(4, 10, dtype=torch.long)
    data = {"tokens": tokens, "total_lengths": [10, 1, 1, 8]}
    shards = split_train_data_by_dp(Namespace(balance_data=True), data, dp_size=2)
    assert sorted(shard["partition"] for shard in shards) == [[0], [1, 2, 3]]
    assert torch.equal(merge_shards(shards)["tokens"], tokens)
    with pytest.raises(ValueError, match="'total_lengths', sample 1: 11, but 'tokens' has 10"):
        split_train_data_by_dp(Namespace(), {**data, "total_lengths": [10, 11, 1, 8]}, dp_size=2)


BAD = {
    "columns of different lengths": ({"rewards": [1.0, 2.0]}, "'tokens' has 3 rows, column 'rewards' has 2"),
    "tensor of another length": ({"values": torch.zeros(4)}, "'tokens' has 3 rows, column 'values' has 4"),
    "column without rows": ({"rewards": 1.0}, "column 'rewards' is a float"),
    "mask unlike its response": (
        {"loss_masks": [[1], [1, 1, 1], [1]]},
        "'loss_masks', sample 1: 3 entries for a response of 2 tokens",
    ),
    "mask that is none": ({"loss_masks": [[1], None, [1]]}, "'loss_masks', sample 1: NoneType instead of a mask"),
    "response longer than its tokens": (
        {"response_lengths": [1, 9, 1], "loss_masks": [[1], [1] * 9, [1]]},
        "'response_lengths', sample 1: response of 9 tokens in a sample of 3",
    ),
    "negative response": ({"response_lengths": [-1, 2, 1]}, "'response_lengths', sample 0: negative length -1"),
    "duplicate sample index": ({"sample_indices": [7, 8, 7]}, "'sample_indices': index 7 at samples 0 and 2"),
    "duplicate index in tensors": (
        {"sample_indices": [torch.tensor(7), torch.tensor(8), torch.tensor(7)]},
        "index 7 at samples 0 and 2",
    ),
    "rewards inside a rollout": (
        {"rollout_ids": [4, 5, 5], "rewards": [0.0, 0.0, 1.0]},
        "'rewards': rollout 5 has different rewards 0.0, 1.0 at samples 1, 2",
    ),
    "total_lengths unlike tokens": ({"total_lengths": [2, 3, 5]}, "'total_lengths', sample 2: 5, but 'tokens' has 4"),
    "total_lengths of another batch": ({"total_lengths": [2, 3]}, "'total_lengths' has 2 rows, the batch has 3"),
    "tokens that are a number": ({"tokens": [[1, 2], 5, [1]]}, "'tokens', sample 1: int instead of a sequence"),
    "a shard": ({"partition": [0, 1, 2]}, "'partition' is reserved"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_batches_are_refused_by_column_sample_and_number(change: dict, message: str) -> None:
    good = {
        "tokens": [[1, 2], [1, 2, 3], [1, 2, 3, 4]],
        "response_lengths": [1, 2, 1],
        "loss_masks": [[1], [1, 1], [1]],
        "rewards": [0.0, 1.0, 2.0],
        "sample_indices": [7, 8, 9],
    }
    check_batch(good)
    with pytest.raises(ValueError) as error:
        split_train_data_by_dp(Namespace(balance_data=True), {**good, **change}, dp_size=2)
    assert message in str(error.value)


def test_all_violations_are_in_one_error() -> None:
    data = {"tokens": [[1], [1], [1]], "response_lengths": [2, 1, 3], "sample_indices": [1, 1, 2]}
    with pytest.raises(ValueError, match="sample 0: response of 2 .*; .*sample 2: response of 3 .*; .*index 1 at"):
        check_batch(data)
    many = {"tokens": [[1]] * 20, "response_lengths": [2] * 20}
    with pytest.raises(ValueError, match="and 12 more"):
        check_batch(many)


@pytest.mark.parametrize("dp_size", [0, -1, 2.0, True])
def test_dp_size_below_one_is_refused(dp_size: Any) -> None:
    with pytest.raises(ValueError, match="dp_size must be"):
        split_train_data_by_dp(Namespace(), {"tokens": [[1]]}, dp_size=dp_size)


def test_a_batch_without_samples_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="no per-sample column in the batch; its columns are: note"):
        split_train_data_by_dp(Namespace(), {"note": "abc"}, dp_size=2)
    with pytest.raises(ValueError, match="'a' has 2 rows, column 'b' has 3"):
        split_train_data_by_dp(Namespace(), {"a": [1, 2], "b": [1, 2, 3]}, dp_size=2)


def test_broken_sets_of_shards_are_refused() -> None:
    shards = split_train_data_by_dp(Namespace(), {"tokens": [[1], [2], [3]], "note": "n"}, dp_size=3)
    with pytest.raises(ValueError, match="no shards"):
        merge_shards([])
    with pytest.raises(ValueError, match="2 shards hold 2 samples of a split of 3"):
        merge_shards(shards[:2])
    with pytest.raises(ValueError, match="sample 0 is in shard 0 and in shard 1"):
        merge_shards([shards[0], shards[0]])
    plain = [dict(shard) for shard in shards]
    assert merge_shards(plain)["tokens"] == [[1], [2], [3]]
    with pytest.raises(ValueError, match=r"samples \[1\] are in no shard"):
        merge_shards([plain[0], plain[2]])
    with pytest.raises(ValueError, match="shard 1 has no column 'partition'"):
        merge_shards([plain[0], {"tokens": [[2]]}])
    with pytest.raises(ValueError, match="'note' differs between shard 0 and shard 2"):
        merge_shards([*shards[:2], {**shards[2], "note": "m"}])
    with pytest.raises(ValueError, match="column 'values' of shard 2 is missing in shard 0"):
        merge_shards([*shards[:2], {**shards[2], "values": [1.0]}])
    with pytest.raises(ValueError, match="column 'note' of shard 0 is missing in shard 1"):
        merge_shards([shards[0], {"partition": [1], "tokens": [[2]]}, shards[2]])
    with pytest.raises(ValueError, match="'tokens' of shard 1 has 2 rows for 1 samples"):
        merge_shards([shards[0], {**shards[1], "tokens": [[2], [2]]}, shards[2]])
    with pytest.raises(ValueError, match="'tokens': list in shard 0, tuple in shard 1"):
        merge_shards([shards[0], {**shards[1], "tokens": ([2],)}, shards[2]])
    wide = split_train_data_by_dp(Namespace(), {"tokens": torch.ones(2, 3)}, dp_size=2)
    wide[1]["tokens"] = torch.ones(1, 4)
    with pytest.raises(ValueError, match=r"rows of shape \(3,\) in shard 0, \(4,\) in shard 1"):
        merge_shards(wide)


@given(st.integers(0, 20), st.integers(1, 7))
@settings(deadline=None)
def test_contiguous_shards_keep_the_order_and_all_columns(rows: int, n: int) -> None:
    batch = {
        "input_ids": torch.arange(rows * 4).reshape(rows, 4),
        "input_lengths": np.arange(rows),
        "stop": [f"s{i}" for i in range(rows)],
        "temperature": 1.0,
        "ladder": [1, 2, 3] if rows != 3 else [1, 2],
    }
    shards = shard_by_batch_size(batch, n)
    assert [len(shard["stop"]) for shard in shards] == [
        max(0, min(-(-rows // n), rows - cell * -(-rows // n))) for cell in range(n)
    ]
    assert all(shard["input_ids"].shape[1:] == (4,) and shard["ladder"] == batch["ladder"] for shard in shards)
    assert same(merge_batches(shards), batch)


def test_contiguous_shards_of_5_over_4() -> None:
    assert [s["prompt"] for s in shard_by_batch_size({"prompt": list("abcde")}, 4)] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
        [],
    ]
    with pytest.raises(ValueError, match="5 samples can't be split evenly over 4"):
        shard_by_batch_size({"prompt": list("abcde")}, 4, allow_uneven=False)
    with pytest.raises(ValueError, match="number of shards must be >= 1, got 0"):
        shard_by_batch_size({"prompt": []}, 0)


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_merge_pads_different_widths_with_the_pad_token(make: Any) -> None:
    parts = [
        {"output_ids": make([[5, 6]]), "logprobs": make([[0.5, 0.25]]), "generation_lengths": make([2])},
        {"output_ids": make([[7, 8, 9]]), "logprobs": make([[1.0, 1.0, 1.0]]), "generation_lengths": make([3])},
    ]
    merged = merge_batches(parts, pad_token_id=99)
    assert merged["output_ids"].tolist() == [[5, 6, 99], [7, 8, 9]]
    assert merged["logprobs"].tolist() == [[0.5, 0.25, 0.0], [1.0, 1.0, 1.0]]
    assert merged["generation_lengths"].tolist() == [2, 3]
    assert merged["output_ids"].dtype == parts[0]["output_ids"].dtype


def test_merge_refuses_what_does_not_fit_together() -> None:
    one, two = {"output_ids": torch.ones(1, 2), "prompt": ["a"]}, {"output_ids": torch.ones(1, 2), "prompt": ["b"]}
    with pytest.raises(ValueError, match="no batches"):
        merge_batches([])
    with pytest.raises(ValueError, match="'prompt' is missing in shard 1"):
        merge_batches([one, {"output_ids": torch.ones(1, 2)}])
    with pytest.raises(ValueError, match=r"'output_ids' has \[2, 3\] dimensions"):
        merge_batches([one, {**two, "output_ids": torch.ones(1, 2, 2)}])
    with pytest.raises(ValueError, match="'output_ids': Tensor in shard 0, ndarray in shard 1"):
        merge_batches([one, {**two, "output_ids": np.ones((1, 2))}])
    with pytest.raises(ValueError, match="'model' differs between shard 0 and shard 1"):
        merge_batches([{**one, "model": "x"}, {**two, "model": "y"}])


def test_bfloat16_columns_are_split_compared_and_merged() -> None:
    data = {
        "tokens": [[1], [2]],
        "hidden": torch.ones(2, 2, dtype=torch.bfloat16),
        "scale": torch.ones((), dtype=torch.bfloat16),
    }
    merged = merge_shards(pickle.loads(pickle.dumps(split_train_data_by_dp(Namespace(), data, dp_size=3))))
    assert same(merged, data)
