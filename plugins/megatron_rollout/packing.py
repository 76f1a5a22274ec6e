"""Packed sequences (`thd`): what shares a pack, how it is padded, who holds which part under context parallelism.

Pure: lengths and tensors, no process group. Words used below:

L      tokens of one sequence; L' = L rounded up to the padding multiple (`sequence_length_factor` or a multiple of it).
T      tokens of one pack = sum of its L' (plus a tail of padding where packs are padded alike).
pack   one micro-batch of shape [1, T]. `cu_seqlens` counts real tokens, `cu_seqlens_padded` counts L'; a reader that
       walks through the pack uses the padded one, a reader that wants lengths the other.

Two coordinates exist for the columns of a response of R tokens that ends a sequence of L:
token position t in [L-R, L): where the token itself stands (values after the right shift, rewards);
predictor position t-1 in [L-R-1, L-1): the output that the model had before it saw the token (logprobs, the raw
output of a value head). Losses are computed in predictor positions, so nothing moves across a context-parallel border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: Segments of padding only are at least this long where there is room (see `_tail_segments`).
_TAIL_SEGMENT = 128

#: Target of a position that predicts nothing (last token of a sequence, padding).
IGNORED_TOKEN = -1


def sequence_length_factor(tp: int, cp: int, sequence_parallel: bool) -> int:
    """What each padded sequence length must be a multiple of: (2·CP if CP > 1) · (TP if sequence parallel).

    2·CP because the zigzag cuts a sequence into 2·CP equal chunks; TP because sequence parallelism scatters the T/CP
    tokens of a context-parallel rank over the tensor-parallel ranks.
    """
    return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)


def pad_length(length: int, multiple_of: int) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple_of) * multiple_of


def validate_packing(**options: Any) -> int:
    """Check how a cell's layout and its micro-batches fit together; return the multiple to pad sequences to.

    options: see `packing_problems`. Raises ValueError once, listing every violation.
    """
    if problems := packing_problems(**options):
        raise ValueError("; ".join(problems))
    explicit = options.get("make_sequence_length_divisible_by")
    if explicit is not None:
        return int(explicit)
    return sequence_length_factor(
        options.get("tensor_model_parallel_size", 1),
        options.get("context_parallel_size", 1),
        options.get("sequence_parallel", False),
    )


def packing_problems(
    *,
    world_size: int,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    sequence_parallel: bool = False,
    packing: bool = True,
    use_dynamic_batch_size: bool = False,
    max_tokens_per_gpu: int | None = None,
    max_sequences_per_pack: int | None = None,
    make_sequence_length_divisible_by: int | None = None,
    variable_seq_lengths: bool = False,
    pad_packs_alike: bool = True,
) -> list[str]:
    """Everything that a cell's layout and its micro-batches disagree on, one line each.

    world_size: ranks of one cell. packing: `--qkv-format thd`. pad_packs_alike: pad all packs of a step to the longest
    where PP > 1 needs one shape; variable_seq_lengths: the stages exchange shapes instead.
    """
    sizes = {
        "world_size": world_size,
        "--tensor-model-parallel-size": tensor_model_parallel_size,
        "--pipeline-model-parallel-size": pipeline_model_parallel_size,
        "--context-parallel-size": context_parallel_size,
        "--max-tokens-per-gpu": max_tokens_per_gpu,
        "max_sequences_per_pack": max_sequences_per_pack,
        "make_sequence_length_divisible_by": make_sequence_length_divisible_by,
    }
    problems = [f"{name} must be >= 1, got {size}" for name, size in sizes.items() if size is not None and size < 1]
    if problems:  # the rules below divide by these
        return problems

    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    factor = sequence_length_factor(tp, cp, sequence_parallel)
    factor_text = f"{factor} = (2*CP if CP > 1)*(TP if sequence parallel) for TP {tp}, CP {cp}, SP {sequence_parallel}"
    if world_size % (tp * pp * cp):
        problems.append(
            f"world size {world_size} of a cell is not divisible by TP*PP*CP = {tp}*{pp}*{cp} = {tp * pp * cp}"
        )
    multiple_of = factor if make_sequence_length_divisible_by is None else make_sequence_length_divisible_by
    if multiple_of % factor:
        problems.append(
            f"make_sequence_length_divisible_by {multiple_of} is not a multiple of the factor {factor_text}"
        )
    if cp > 1 and not packing:
        problems.append(f"--context-parallel-size {cp} needs packing (--qkv-format thd)")
    if use_dynamic_batch_size and max_tokens_per_gpu is None:
        problems.append("--use-dynamic-batch-size needs --max-tokens-per-gpu")
    if use_dynamic_batch_size and pp > 1 and not variable_seq_lengths:
        if packing and not pad_packs_alike:
            problems.append(
                f"packing with --use-dynamic-batch-size gives packs of different lengths, which "
                f"--pipeline-model-parallel-size {pp} supports only with pad_packs_alike or variable_seq_lengths"
            )
        if not packing:
            problems.append(
                f"--use-dynamic-batch-size without packing gives micro-batches of different shapes, which "
                f"--pipeline-model-parallel-size {pp} supports only with variable_seq_lengths"
            )
    if packing and max_tokens_per_gpu is not None and max_tokens_per_gpu * cp < multiple_of:
        problems.append(
            f"--max-tokens-per-gpu {max_tokens_per_gpu} times CP {cp} is below the shortest padded sequence of "
            f"{multiple_of} tokens"
        )
    return problems


def first_fit_decreasing(
    lengths: Sequence[int], budget: int, *, max_sequences: int | None = None, multiple_of: int = 1
) -> list[list[int]]:
    """Pack sequences into bins: longest first, each into the first bin with room (first-fit-decreasing).

    lengths: unpadded tokens per sequence; each costs its length padded to `multiple_of`. budget: most padded tokens
    of a bin (with context parallelism that is max_tokens_per_gpu · CP, as a pack is spread over the CP ranks).
    max_sequences: most sequences of a bin; a bin may hold exactly that many.

    Returns bins of indices into `lengths`, each sorted. Invariants: every index is in exactly one bin; a bin is above
    the budget only if it is a single sequence that is; ties go by index, so every process gets the same bins; no bin
    is empty. O(n log n). Raises ValueError on an empty sequence or a limit below 1.
    """
    limits = {"token budget": budget, "max_sequences": max_sequences, "multiple_of": multiple_of}
    problems = [
        f"{name} must be >= 1, got {value}" for name, value in limits.items() if value is not None and value < 1
    ]
    problems += [f"sequence {i} has no token" for i, length in enumerate(lengths) if length < 1]
    if problems:
        raise ValueError("; ".join(problems))

    costs = [pad_length(length, multiple_of) for length in lengths]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    oversize = [[i] for i in order if costs[i] > budget]
    bins: list[list[int]] = [[] for _ in costs]
    # A tournament tree over the room of all bins (all n exist from the start, empty): the root tells the largest room,
    # and the leftmost leaf with enough of it is found in log n steps.
    leaves = 1 << max(len(costs) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    for i in order[len(oversize) :]:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < costs[i]:
                node += 1
        chosen = bins[node - leaves]
        chosen.append(i)
        room[node] = 0 if len(chosen) == max_sequences else room[node] - costs[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return oversize + [sorted(members) for members in bins if members]


def length_sorted_bins(lengths: Sequence[int], budget: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Bins for micro-batches without packing, [B, S] each with every sequence padded to the bin's longest.

    Longest first, as many into a bin as B * S padded tokens stay within the budget; a sequence above it is alone.
    Returns bins of indices into `lengths`, each sorted. Raises ValueError on a limit below 1.
    """
    if budget < 1 or multiple_of < 1:
        raise ValueError(f"token budget and multiple_of must be >= 1, got {budget} and {multiple_of}")
    bins: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if room == 0:
            bins.append([])
            room = max(1, budget // max(1, pad_length(lengths[i], multiple_of)))
        bins[-1].append(i)
        room -= 1
    return [sorted(members) for members in bins]


# --- context-parallel zigzag -----------------------------------------------------------------------------------------


def zigzag_indices(padded_lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Positions of the full pack that CP rank `cp_rank` holds, in the order in which it holds them: int64 [T / CP].

    Each sequence is cut into 2·CP equal chunks; rank r holds chunks r and 2·CP-1-r (so that under a causal mask all
    ranks do the same work). Raises ValueError where a padded length is no multiple of 2·CP.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"context-parallel rank {cp_rank} is not in [0, {cp_size})")
    starts = torch.tensor([0, *padded_lengths], dtype=torch.int64).cumsum(0).tolist()
    if cp_size == 1:
        return torch.arange(starts[-1])
    pieces = []
    for i, (start, length) in enumerate(zip(starts, padded_lengths, strict=False)):
        if length % (2 * cp_size):
            raise ValueError(
                f"padded length {length} of sequence {i} is not divisible by 2*CP = {2 * cp_size} chunks (CP {cp_size})"
            )
        chunk = length // (2 * cp_size)
        for c in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + c * chunk, start + (c + 1) * chunk))
    return torch.cat(pieces) if pieces else torch.arange(0)


def zigzag_inverse(padded_lengths: Sequence[int], cp_size: int) -> Tensor:
    """Index that restores a pack from the concatenation of all ranks' parts (rank 0 first): int64 [T].

    torch.cat([full[zigzag_indices(lengths, CP, r)] for r in range(CP)])[zigzag_inverse(lengths, CP)] == full, exactly.
    """
    return torch.cat([zigzag_indices(padded_lengths, cp_size, r) for r in range(cp_size)]).argsort()


# --- packs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of packed sequences, whole (not yet cut for context parallelism).

    input_ids: int64 [1, T], the pad token where padded. position_ids: int64 [1, T], counted inside each sequence, 0
    where
        padded. rows: for each sequence, its row in the lists that the pack was made from.
    lengths, padded_lengths: per segment of the pack; the segments are the sequences, and last, where packs are padded
        alike or the pack holds no sequence, segments of padding only (length 0).
    cu_seqlens, cu_seqlens_padded: int32 [segments + 1], cumulated from those. max_seqlen: longest padded segment.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]

    @property
    def total_length(self) -> int:
        """T, padding included."""
        return sum(self.padded_lengths)

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        return max(self.padded_lengths)

    def to(self, device: torch.device | str) -> PackedBatch:
        names = ("input_ids", "position_ids", "cu_seqlens", "cu_seqlens_padded")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def attention_kwargs(self) -> dict[str, object]:
        """Keyword arguments of megatron-core's `PackedSeqParams`."""
        return {
            "qkv_format": "thd",
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_kv": self.cu_seqlens,
            "cu_seqlens_q_padded": self.cu_seqlens_padded,
            "cu_seqlens_kv_padded": self.cu_seqlens_padded,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_kv": self.max_seqlen,
        }

    def as_rows(self, packed: Tensor) -> Tensor:
        """[1, T, ...] as [B, S, ...], for packs whose segments have one length. Raises ValueError for others."""
        if len(set(self.padded_lengths)) > 1:
            raise ValueError(f"a pack with segments of {sorted(set(self.padded_lengths))} tokens has no rows")
        return packed.reshape(len(self.padded_lengths), self.padded_lengths[0], *packed.shape[2:])

    def spans(self) -> list[tuple[int, int, int]]:
        """(row, first position, L) of each sequence."""
        spans, start = [], 0
        for row, length, padded in zip(self.rows, self.lengths, self.padded_lengths, strict=False):
            spans.append((row, start, length))
            start += padded
        return spans

    def next_tokens(self, fill: int = IGNORED_TOKEN) -> Tensor:
        """The token that each position predicts: int64 [1, T]; `fill` at the last of a sequence and at padding."""
        out = torch.full_like(self.input_ids, fill)
        for _, start, length in self.spans():
            out[0, start : start + length - 1] = self.input_ids[0, start + 1 : start + length]
        return out

    def pack_tokens(self, columns: Sequence[Tensor], fill: float = 0) -> Tensor:
        """Lay per-token columns [L, ...], one per row of the whole list, into the pack: [1, T, ...], else `fill`."""
        return self._pack(columns, self.spans(), fill, "tokens")

    def pack_response(self, columns: Sequence[Tensor], fill: float = 0) -> Tensor:
        """Lay response columns [R, ...] (one per row) into the pack at their *predictor* positions: [1, T, ...].

        Raises ValueError where a response is as long as its sequence: nothing predicts its first token.
        """
        return self._pack(columns, self._predictors([len(c) for c in columns]), fill, "response tokens")

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Per sequence, in the order of `rows`, its real tokens [L, ...] of `packed` [1, T, ...] (views)."""
        return [packed[0, start : start + length] for _, start, length in self.spans()]

    def unpack_response(self, packed: Tensor, response_lengths: Sequence[int]) -> list[Tensor]:
        """Per sequence, in the order of `rows`, its predictor positions [R, ...] of `packed` [1, T, ...] (views).

        response_lengths: one per row of the whole list. For logprobs this gives those of the response's tokens.
        """
        return [packed[0, start : start + n] for _, start, n in self._predictors(response_lengths)]

    def local(self, packed: Tensor, cp_size: int, cp_rank: int) -> Tensor:
        """The part [1, T / CP, ...] of `packed` [1, T, ...] that a context-parallel rank holds."""
        if cp_size == 1:
            return packed
        return packed.index_select(1, zigzag_indices(self.padded_lengths, cp_size, cp_rank).to(packed.device))

    def _predictors(self, response_lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        out = []
        for row, start, length in self.spans():
            n = int(response_lengths[row])
            if n > 0 and n >= length:
                raise ValueError(
                    f"row {row}: a response of {n} tokens in a sequence of {length} leaves no prompt token that "
                    f"predicts its first"
                )
            out.append((row, start + max(length - n - 1, 0), n))
        return out

    def _pack(self, columns: Sequence[Tensor], places: list[tuple[int, int, int]], fill: float, what: str) -> Tensor:
        like = columns[0] if len(columns) else self.input_ids.new_zeros(0, dtype=torch.get_default_dtype())
        out = torch.full((1, self.total_length, *like.shape[1:]), fill, dtype=like.dtype, device=like.device)
        for row, start, n in places:
            if len(columns[row]) != n:
                raise ValueError(f"row {row}: column of {len(columns[row])} for {n} {what}")
            out[0, start : start + n] = columns[row]
        return out


def pack_sequences(
    tokens: Sequence[Tensor | Sequence[int]],
    bins: Sequence[Sequence[int]],
    *,
    multiple_of: int = 1,
    pad_token_id: int = 0,
    pad_packs_alike: bool = False,
    pad_sequences_alike: bool = False,
) -> list[PackedBatch]:
    """One `PackedBatch` per bin of rows of `tokens`.

    An empty bin gives a pack of the minimum length, all padding: a rank without samples still runs forward and
    backward, with zero weight. No bins at all count as one empty bin. pad_packs_alike: all packs get the longest
    one's length. pad_sequences_alike: all sequences of a pack get the longest one's length, so that it can be viewed as
    [B, S] (`PackedBatch.as_rows`). Raises ValueError on a sequence without tokens.
    """
    lengths = [[len(tokens[row]) for row in rows] for rows in bins] or [[]]
    for rows, counts in zip(bins, lengths, strict=False):
        for row, count in zip(rows, counts, strict=True):
            if count < 1:
                raise ValueError(f"row {row} has no token")
    padded = [[pad_length(n, multiple_of) for n in counts] for counts in lengths]
    if pad_sequences_alike:
        padded = [[max(sizes, default=0)] * len(sizes) for sizes in padded]
    longest = max(max(map(sum, padded)), multiple_of)
    packs = []
    for rows, counts, sizes in zip(bins or [[]], lengths, padded, strict=True):
        total = longest if pad_packs_alike else max(sum(sizes), multiple_of)
        tail = _tail_segments(total - sum(sizes), sizes, multiple_of)
        packs.append(_pack_bin(tokens, tuple(rows), [*counts, *[0] * len(tail)], [*sizes, *tail], pad_token_id))
    return packs


def _tail_segments(length: int, sizes: list[int], multiple_of: int) -> list[int]:
    """Cut padding behind the last sequence into segments no longer than the sequences: attention is quadratic."""
    step = max([pad_length(_TAIL_SEGMENT, multiple_of), *sizes])
    return [min(step, length - start) for start in range(0, length, step)]


def _pack_bin(
    tokens: Sequence[Tensor | Sequence[int]], rows: tuple[int, ...], lengths: list[int], padded: list[int], pad: int
) -> PackedBatch:
    device = next((t.device for row in rows if isinstance(t := tokens[row], Tensor)), torch.device("cpu"))
    input_ids = torch.full((1, sum(padded)), pad, dtype=torch.int64, device=device)
    position_ids = torch.zeros_like(input_ids)
    pack = PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        cu_seqlens=_cumulated(lengths, device),
        cu_seqlens_padded=_cumulated(padded, device),
        rows=rows,
        lengths=tuple(lengths),
        padded_lengths=tuple(padded),
    )
    for row, start, length in pack.spans():
        input_ids[0, start : start + length] = torch.as_tensor(tokens[row], dtype=torch.int64, device=device)
        position_ids[0, start : start + length] = torch.arange(length, device=device)
    return pack


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
