"""A token and its logprob for every row of logits in two kernels and one pass over the logits.

The first kernel reduces each chunk of a row to (largest value, sum of exponentials, place of the largest). The second
finds, for one uniform number a row, the chunk in which the cumulative distribution passes it and looks only there: the
same inverse-transform draw, from the same number, as the torch path in `sampling.py`, which also serves rows with
top-k or top-p.

Safe inside CUDA graphs: nothing depends on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096


@triton.jit
def _mix(x):
    """splitmix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _scaled(LOGITS, row, column, row_stride, temperature, VOCAB: tl.constexpr):
    x = tl.load(LOGITS + row * row_stride + column, mask=column < VOCAB, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x, temperature)


@triton.jit
def _reduce_chunks(
    LOGITS, SLOT, TEMPERATURE, LARGEST, TOTAL, PLACE, row_stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(TEMPERATURE + tl.load(SLOT + row))
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(LOGITS, row, column, row_stride, temperature, VOCAB)
    largest = tl.max(x, 0)
    safe = tl.where(largest == -float("inf"), 0.0, largest)
    tl.store(LARGEST + row * CHUNKS + chunk, largest)
    tl.store(TOTAL + row * CHUNKS + chunk, tl.sum(tl.exp(x - safe), 0))
    tl.store(PLACE + row * CHUNKS + chunk, chunk * CHUNK + tl.argmax(x, 0, tie_break_left=True))


@triton.jit
def _draw(
    LOGITS, SLOT, TEMPERATURE, GREEDY, SEED, DRAW, LARGEST, TOTAL, PLACE, TOKEN, LOGPROB, row_stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOT + row)
    temperature = tl.load(TEMPERATURE + slot)
    chunks = tl.arange(0, CHUNKS_PAD)
    real = chunks < CHUNKS
    largest = tl.load(LARGEST + row * CHUNKS + chunks, mask=real, other=-float("inf"))
    total = tl.load(TOTAL + row * CHUNKS + chunks, mask=real, other=0.0)
    place = tl.load(PLACE + row * CHUNKS + chunks, mask=real, other=0)
    top = tl.max(largest, 0)
    weight = tl.where(largest == -float("inf"), 0.0, total * tl.exp(largest - top))
    cumulative = tl.cumsum(weight, 0)
    whole = tl.sum(weight, 0)

    drawn = tl.load(DRAW + slot)
    tl.store(DRAW + slot, drawn + 1)
    noise = _mix(tl.load(SEED + slot).to(tl.uint64) + drawn.to(tl.uint64) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64))
    uniform = ((noise >> 40).to(tl.int32).to(tl.float32) + 0.5) / 16777216.0
    target = uniform * whole
    # the first chunk with weight whose cumulative sum passes the target; the last with weight if rounding hides it
    last = tl.max(tl.where(weight > 0, chunks, 0), 0)
    chosen = tl.minimum(tl.sum(tl.where(real & (cumulative <= target), 1, 0), 0), last)
    rest = target - tl.sum(tl.where(chunks < chosen, weight, 0.0), 0)

    column = chosen * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(LOGITS, row, column, row_stride, temperature, VOCAB)
    mass = tl.exp(x - top)
    inside = tl.cumsum(mass, 0)
    last_inside = tl.max(tl.where(mass > 0, column, 0), 0)
    sampled = tl.minimum(chosen * CHUNK + tl.sum(tl.where(inside <= rest, 1, 0), 0), last_inside)
    most_likely = tl.min(tl.where(largest == top, place, VOCAB), 0)
    token = tl.where(tl.load(GREEDY + slot) != 0, most_likely, sampled)
    chosen_logit = tl.div_rn(tl.load(LOGITS + row * row_stride + token).to(tl.float32), temperature)
    tl.store(TOKEN + row, token.to(tl.int64))
    tl.store(LOGPROB + row, chosen_logit - top - tl.log(whole))


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    seed: torch.Tensor,
    draw: torch.Tensor,
    tokens: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Draw one token a row into `tokens` and count it in `draw`; returns the tokens' logprobs, float32 [n].

    logits: [n, ≥ vocab_size], columns from vocab_size on are padding. slots: int64 [n], each row's place in the tables
    temperature (float32), greedy (bool), seed and draw (int64).
    """
    n, chunks = logits.shape[0], triton.cdiv(vocab_size, CHUNK)
    scratch = torch.empty((3, n, chunks), dtype=torch.float32, device=logits.device)
    largest, total, place = scratch[0], scratch[1], scratch[2].view(torch.int32)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    sizes = dict(VOCAB=vocab_size, CHUNK=CHUNK, CHUNKS=chunks)
    _reduce_chunks[(n, chunks)](
        logits, slots, temperature, largest, total, place, logits.stride(0), **sizes, num_warps=8
    )
    _draw[(n,)](
        logits, slots, temperature, greedy, seed, draw, largest, total, place, tokens, logprobs, logits.stride(0),
        **sizes, CHUNKS_PAD=triton.next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
    return logprobs
