"""Bins, padding, zigzag and the columns of a pack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rollout.packing import (
    first_fit_decreasing,
    pack_sequences,
    pad_length,
    sequence_length_factor,
    validate_packing,
    zigzag_indices,
    zigzag_inverse,
)

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def plain_first_fit_decreasing(costs: list[int], budget: int, max_sequences: int | None) -> list[list[int]]:
    """The textbook algorithm, quadratic."""
    bins: list[list[int]] = []
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        for members in bins:
            full = max_sequences is not None and len(members) == max_sequences
            if not full and sum(costs[j] for j in members) + costs[i] <= budget:
                members.append(i)
                break
        else:
            bins.append([i])
    return [sorted(members) for members in bins]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), st.one_of(st.none(), st.integers(1, 6)), st.integers(1, 8))
def test_bins_are_those_of_plain_first_fit_decreasing(lengths, budget, max_sequences, multiple_of):
    bins = first_fit_decreasing(lengths, budget, max_sequences=max_sequences, multiple_of=multiple_of)
    costs = [pad_length(n, multiple_of) for n in lengths]
    assert bins == plain_first_fit_decreasing(costs, budget, max_sequences)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert 0 < len(members) <= (max_sequences or len(members))
        assert len(members) == 1 or sum(costs[i] for i in members) <= budget


def test_bin_of_exactly_the_maximum_number():
    assert first_fit_decreasing([1] * 7, 100, max_sequences=3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert first_fit_decreasing([1] * 6, 100, max_sequences=3) == [[0, 1, 2], [3, 4, 5]]


def test_s07_static_micro_batches_with_packing():
    """249 samples, two a micro-batch: 125, the last with one."""
    bins = first_fit_decreasing([5] * 249, 10**9, max_sequences=2)
    assert [len(b) for b in bins] == [2] * 124 + [1]


def test_sequence_above_the_budget_is_alone():
    assert first_fit_decreasing([7, 7, 9, 1], 8) == [[2], [0, 3], [1]]


def test_no_sequences_no_bins():
    assert first_fit_decreasing([], 8) == []


def test_bad_bins_are_refused_in_one_error():
    with pytest.raises(ValueError, match=r"token budget must be >= 1, got 0.*max_sequences.*got -1.*sequence 1 has no"):
        first_fit_decreasing([3, 0], 0, max_sequences=-1)


@pytest.mark.parametrize(
    ("tp", "cp", "sp", "factor"),
    [(1, 1, False, 1), (4, 1, False, 1), (4, 1, True, 4), (4, 2, True, 16), (4, 2, False, 4)],
)
def test_sequence_length_factor(tp, cp, sp, factor):
    assert sequence_length_factor(tp, cp, sp) == factor


def test_valid_layouts_give_the_multiple():
    assert validate_packing(world_size=1) == 1
    two_by_two: dict[str, Any] = dict(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    assert validate_packing(world_size=8, **two_by_two) == 8
    assert validate_packing(world_size=8, make_sequence_length_divisible_by=16, **two_by_two) == 16
    dynamic: dict[str, Any] = dict(use_dynamic_batch_size=True, max_tokens_per_gpu=64)
    assert validate_packing(world_size=2, pipeline_model_parallel_size=2, **dynamic) == 1
    assert validate_packing(world_size=1, packing=False, **dynamic) == 1


def test_all_violations_in_one_error():
    with pytest.raises(ValueError) as error:
        validate_packing(
            world_size=6,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            context_parallel_size=2,
            sequence_parallel=True,
            packing=False,
            use_dynamic_batch_size=True,
            make_sequence_length_divisible_by=4,
        )
    text = str(error.value)
    assert "world size 6 of a cell is not divisible by TP*PP*CP = 2*2*2 = 8" in text
    assert "make_sequence_length_divisible_by 4 is not a multiple of the factor 8" in text
    assert "--context-parallel-size 2 needs packing" in text
    assert "--use-dynamic-batch-size needs --max-tokens-per-gpu" in text
    assert "--pipeline-model-parallel-size 2 supports only with variable_seq_lengths" in text


def test_dynamic_packs_of_different_lengths_under_pipeline_parallelism():
    options: dict[str, Any] = dict(
        world_size=2, pipeline_model_parallel_size=2, use_dynamic_batch_size=True, max_tokens_per_gpu=64
    )
    with pytest.raises(ValueError, match="packs of different lengths.*pad_packs_alike or variable_seq_lengths"):
        validate_packing(**options, pad_packs_alike=False)
    validate_packing(**options, pad_packs_alike=False, variable_seq_lengths=True)


def test_sizes_below_one_and_a_budget_below_one_sequence():
    with pytest.raises(
        ValueError, match=r"world_size must be >= 1, got 0; --context-parallel-size must be >= 1, got 0"
    ):
        validate_packing(world_size=0, context_parallel_size=0)
    with pytest.raises(ValueError, match="--max-tokens-per-gpu 1 times CP 2 is below .* 4 tokens"):
        validate_packing(world_size=2, context_parallel_size=2, max_tokens_per_gpu=1)


# --- zigzag ----------------------------------------------------------------------------------------------------------


def test_zigzag_of_the_definition():
    """Rank r holds chunks r and 2·CP-1-r of each sequence."""
    assert zigzag_indices([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_indices([3, 2], 1, 0).tolist() == [0, 1, 2, 3, 4]


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(1, 5))
def test_zigzag_inverse_is_exact(units, cp):
    lengths = [2 * cp * u for u in units]
    full = torch.randn(sum(lengths))
    parts = [full[zigzag_indices(lengths, cp, r)] for r in range(cp)]
    assert {len(p) for p in parts} == {sum(lengths) // cp}
    assert torch.equal(torch.cat(parts)[zigzag_inverse(lengths, cp)], full)


def test_zigzag_refuses_what_does_not_divide():
    with pytest.raises(ValueError, match=r"padded length 6 of sequence 1 is not divisible by 2\*CP = 4"):
        zigzag_indices([8, 6], 2, 0)
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 2\)"):
        zigzag_indices([8], 2, 2)


# --- packs -----------------------------------------------------------------------------------------------------------


def test_pack_keeps_real_and_padded_lengths_apart():
    (pack,) = pack_sequences([[5, 6, 7], [1, 2, 3, 4, 5], [8, 9]], [[0, 1, 2]], multiple_of=4, pad_token_id=99)
    assert pack.cu_seqlens.tolist() == [0, 3, 8, 10]
    assert pack.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    assert pack.cu_seqlens.dtype == pack.cu_seqlens_padded.dtype == torch.int32
    assert pack.input_ids.tolist() == [[5, 6, 7, 99, 1, 2, 3, 4, 5, 99, 99, 99, 8, 9, 99, 99]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 0, 0]]
    assert pack.next_tokens().tolist() == [[6, 7, -1, -1, 2, 3, 4, 5, -1, -1, -1, -1, 9, -1, -1, -1]]
    assert (pack.total_length, pack.num_tokens, pack.max_seqlen) == (16, 10, 8)
    assert [x.tolist() for x in pack.unpack(pack.input_ids)] == [[5, 6, 7], [1, 2, 3, 4, 5], [8, 9]]


def test_attention_arguments_are_those_of_megatron_core():
    from megatron.core.packed_seq_params import PackedSeqParams

    (pack,) = pack_sequences([[5, 6, 7], [1, 2, 3, 4, 5]], [[0, 1]], multiple_of=4)
    params = PackedSeqParams(**pack.attention_kwargs())
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 8, 8)
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 8]
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 4, 12]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 120), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
def test_packs_round_trip_for_any_cut(lengths, budget, cp, sequence_parallel, alike):
    factor = sequence_length_factor(2, cp, sequence_parallel)
    tokens = [torch.randint(0, 1000, (n,)) for n in lengths]
    bins = first_fit_decreasing(lengths, budget, multiple_of=factor)
    packs = pack_sequences(tokens, bins, multiple_of=factor, pad_packs_alike=alike)
    assert len(packs) == max(len(bins), 1)
    if alike:
        assert len({p.total_length for p in packs}) == 1
    for pack in packs:
        assert pack.input_ids.shape == (1, pack.total_length) and pack.total_length >= factor
        assert all(n % factor == 0 for n in pack.padded_lengths)
        assert pack.cu_seqlens_padded.diff().tolist() == list(pack.padded_lengths)
        assert pack.cu_seqlens.diff().tolist() == list(pack.lengths)
        parts = [pack.local(pack.input_ids, cp, r) for r in range(cp)]
        restored = torch.cat(parts, 1)[:, zigzag_inverse(pack.padded_lengths, cp)]
        assert torch.equal(restored, pack.input_ids)
        columns = [t * 2.0 for t in tokens]
        for row, real, doubled in zip(
            pack.rows, pack.unpack(restored), pack.unpack(pack.pack_tokens(columns)), strict=True
        ):
            assert torch.equal(real, tokens[row]) and torch.equal(doubled, columns[row])


def test_response_columns_stand_where_they_are_predicted():
    tokens = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    responses = [torch.tensor([30.0, 40.0, 50.0]), torch.zeros(0), torch.tensor([90.0, 100.0])]
    (pack,) = pack_sequences(tokens, [[0, 1, 2]], multiple_of=4)
    packed = pack.pack_response(responses, fill=-1.0)
    assert packed.tolist() == [[-1, 30, 40, 50, -1, -1, -1, -1, -1, -1, -1, -1, 90, 100, -1, -1]]
    predicted = torch.where(packed > 0, pack.next_tokens() * 10.0, -1.0)
    assert torch.equal(predicted, packed)
    assert [x.tolist() for x in pack.unpack_response(packed, [3, 0, 2])] == [x.tolist() for x in responses]


def test_response_without_a_prompt_and_column_of_a_wrong_length():
    (pack,) = pack_sequences([[1, 2], [3, 4, 5]], [[0, 1]])
    with pytest.raises(ValueError, match="row 0: a response of 2 tokens in a sequence of 2"):
        pack.pack_response([torch.ones(2), torch.ones(1)])
    with pytest.raises(ValueError, match="row 1: column of 2 for 3 tokens"):
        pack.pack_tokens([torch.ones(2), torch.ones(2)])


@pytest.mark.parametrize("bins", [[], [[]]])
def test_no_sequence_gives_one_pack_of_padding(bins):
    (pack,) = pack_sequences([], bins, multiple_of=8, pad_token_id=3)
    assert pack.input_ids.tolist() == [[3] * 8]
    assert (pack.cu_seqlens.tolist(), pack.cu_seqlens_padded.tolist(), pack.num_tokens) == ([0, 0], [0, 8], 0)
    assert pack.unpack(pack.input_ids) == []
    assert pack.pack_response([]).tolist() == [[0.0] * 8]
    assert pack.local(pack.input_ids, 2, 1).shape == (1, 4)


def test_alike_padding_goes_into_segments_of_its_own():
    """Quadratic attention over one long segment of padding would cost more than the sequences do."""
    packs = pack_sequences([[1] * 1000, [2] * 10], [[0], [1], []], multiple_of=2, pad_packs_alike=True)
    assert [p.total_length for p in packs] == [1000, 1000, 1000]
    assert [p.max_seqlen for p in packs] == [1000, 128, 128]
    assert [p.num_tokens for p in packs] == [1000, 10, 0]
    assert [len(p.rows) for p in packs] == [1, 1, 0]


def test_sequence_without_tokens_is_refused():
    with pytest.raises(ValueError, match="row 1 has no token"):
        pack_sequences([[1], []], [[0, 1]])


def test_columns_keep_dtype_trailing_dimensions_and_gradient():
    (pack,) = pack_sequences([[1, 2, 3], [4, 5]], [[0, 1]], multiple_of=4)
    raw = torch.randn(1, pack.total_length, 2, dtype=torch.float64, requires_grad=True)
    parts = pack.unpack(raw)
    assert [tuple(p.shape) for p in parts] == [(3, 2), (2, 2)]
    assert torch.equal(pack.pack_tokens(parts).detach(), raw.detach() * (pack.input_ids != 0)[..., None])
    sum(p.sum() for p in parts).backward()
    assert torch.equal(raw.grad[0, :, 0], (pack.input_ids[0] != 0).double())
