"""Log-probabilities and entropy of given tokens from (vocab-parallel) logits, without a second copy of the logits.

megatron-core's own vocab-parallel cross entropy casts to float32 and then overwrites what it got (for float32 logits:
the caller's), knows no temperature and no entropy, and keeps a full float32 softmax for the backward pass. Here the
softmax is recomputed chunk by chunk from the logits, which autograd holds anyway; extra memory is O(tokens) + one
chunk, and two all-reduces of [tokens] cross the tensor-parallel group whatever the number of chunks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

#: exp() of this is 0 in every dtype, and 0 times it is 0 (with -inf it would be NaN).
_LOG_ZERO = -1.0e4


def logprob_divisor(temperature: float) -> float:
    """What logits are divided by: the temperature, or 1 for temperature 0 (greedy), whose logprobs are the raw ones.

    Raises ValueError for a negative or not finite temperature.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"temperature must be a finite number >= 0, got {temperature}")
    return float(temperature) if temperature > 0 else 1.0


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """log_softmax(logits / temperature)[targets], differentiable: the first result of `token_logprobs_and_entropy`."""
    return _scores(logits, targets, temperature, group, vocab_size, chunk_size, with_entropy=False)[0]


def token_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution softmax(logits / temperature), both differentiable.

    logits: [..., V / TP], any float dtype, rows contiguous (else they are copied: keep Megatron's [S, B, V / TP] and
        transpose the targets); rank r of `group` holds the r-th part of the vocabulary (None: all of it).
    targets: int64 [...], the token that each position predicts; a negative one marks a position to ignore, whose
    results
        and gradients are zero. temperature 0: as 1 (see `logprob_divisor`).
    vocab_size: the tokenizer's, where the output layer is padded beyond it; padding columns then have probability 0.
    chunk_size: positions whose softmax is held at a time.

    Returns two tensors shaped like `targets`, in nats, float32 (float64 for float64 logits), equal on all ranks of the
    group. The gradient is that of a loss which every rank of the group computes alike, as in Megatron.
    Collective over `group`. Raises ValueError on shapes that do not fit and targets outside the vocabulary.
    """
    return _scores(logits, targets, temperature, group, vocab_size, chunk_size, with_entropy=True)


def _scores(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    group: ProcessGroup | None,
    vocab_size: int | None,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    divisor = logprob_divisor(temperature)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    columns = logits.shape[-1]
    vocab_size = columns * size if vocab_size is None else vocab_size
    if not 0 < vocab_size <= columns * size:
        raise ValueError(f"vocab_size must be in [1, {columns * size}] (the output layer's columns), got {vocab_size}")
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise ValueError(f"target {int(targets.max())} is outside the vocabulary of {vocab_size} tokens")
    first = rank * columns
    live_columns = min(max(vocab_size - first, 0), columns)
    logprobs, entropy = _TokenScores.apply(
        logits.reshape(-1, columns), targets.reshape(-1), divisor, first, live_columns, group, chunk_size, with_entropy
    )
    return logprobs.view(targets.shape), entropy.view(targets.shape) if with_entropy else entropy


class _TokenScores(torch.autograd.Function):
    """With x = logits / divisor, log Z = logsumexp(x), p = exp(x - log Z), H = log Z - sum(p x):

    d logp[y] / d x_j = [j = y] - p_j;    d H / d x_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        divisor: float,
        first: int,
        columns: int,
        group: ProcessGroup | None,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        acc = torch.float64 if logits.dtype == torch.float64 else torch.float32
        n = logits.shape[0]
        if columns:
            peak = logits[:, :columns].amax(-1).to(acc) / divisor
        else:  # a rank that holds only padding of the vocabulary
            peak = logits.new_full((n,), -math.inf, dtype=acc)
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)

        # Per position, relative to the peak: sum of exp(z), z of the target (0 on ranks that do not own it), sum of
        # exp(z) z.
        sums = logits.new_zeros((3 if with_entropy else 2, n), dtype=acc)
        owner, column = _owned(targets, first, columns)
        for start in range(0, n if columns else 0, chunk_size):
            at = slice(start, start + chunk_size)
            z = logits[at, :columns].to(acc).div(divisor).sub_(peak[at].unsqueeze(-1))
            sums[1, at] = z.gather(-1, column[at].unsqueeze(-1)).squeeze(-1).masked_fill_(~owner[at], 0)
            e = z.exp() if with_entropy else z.exp_()
            sums[0, at] = e.sum(-1)
            if with_entropy:
                sums[2, at] = e.mul_(z.clamp_min_(_LOG_ZERO)).sum(-1)
        if group is not None:
            dist.all_reduce(sums, group=group)

        log_sum = sums[0].log()
        ignored = targets < 0
        logprobs = (sums[1] - log_sum).masked_fill_(ignored, 0)
        if with_entropy:
            entropy = log_sum - sums[2] / sums[0]
            ctx.save_for_backward(logits, targets, peak + log_sum, entropy)
            entropy = entropy.masked_fill(ignored, 0)
        else:
            entropy = logprobs.new_empty(0)
            ctx.save_for_backward(logits, targets, peak + log_sum, entropy)
            ctx.mark_non_differentiable(entropy)
        ctx.divisor, ctx.first, ctx.columns, ctx.chunk_size = divisor, first, columns, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, log_z, entropy = ctx.saved_tensors
        nothing = (None,) * 7
        if grad_logprobs is None and grad_entropy is None:
            return None, *nothing
        ignored = targets < 0
        g = torch.zeros_like(log_z) if grad_logprobs is None else grad_logprobs.masked_fill(ignored, 0)
        h = None if grad_entropy is None else grad_entropy.masked_fill(ignored, 0)
        # A position without gradient must stay at zero whatever its logits are (padding may hold anything): 0 * NaN
        # is NaN.
        dead = g == 0 if h is None else (g == 0) & (h == 0)
        columns = ctx.columns
        owner, column = _owned(targets, ctx.first, columns)
        grad = torch.empty_like(logits) if columns == logits.shape[-1] else torch.zeros_like(logits)
        for start in range(0, logits.shape[0] if columns else 0, ctx.chunk_size):
            at = slice(start, start + ctx.chunk_size)
            log_p = logits[at, :columns].to(log_z.dtype).div(ctx.divisor).sub_(log_z[at].unsqueeze(-1))
            scale = g[at].neg().unsqueeze(-1)
            if h is None:
                d = log_p.exp_()
            else:
                d = log_p.exp()
                scale = scale - h[at].unsqueeze(-1) * log_p.clamp_min_(_LOG_ZERO).add_(entropy[at].unsqueeze(-1))
            d.mul_(scale)
            d.scatter_add_(-1, column[at].unsqueeze(-1), (g[at] * owner[at]).unsqueeze(-1))
            d.masked_fill_(dead[at].unsqueeze(-1), 0)
            grad[at, :columns] = d.div_(ctx.divisor)
        return grad, *nothing


def _owned(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Whether this rank's columns hold each target, and in which one (some valid column where not)."""
    column = targets - first
    return (column >= 0) & (column < columns), column.clamp(0, max(columns - 1, 0))
