"""What crosses a context-parallel group: packs restored from zigzag parts, and the value convention built on them.

values[t] = V(state before token t). At position t a value head reads the state *after* token t, so values are its
outputs shifted right by one inside each sequence, with values[0] = 0. The shift crosses chunk borders, hence it
happens after the parts are gathered, and per sequence, hence never across a border of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rollout.packing import PackedBatch, zigzag_indices, zigzag_inverse


def gather_zigzag(local: Tensor, padded_lengths: Sequence[int], group: ProcessGroup | None, dim: int = 1) -> Tensor:
    """Restore a pack from the parts of all context-parallel ranks: size T/CP becomes T along `dim`. Differentiable.

    padded_lengths: of the pack's segments (`PackedBatch.padded_lengths`). group None or of one rank: identity.
    Backward sums the gradient over the group and keeps this rank's chunks. So where each rank computes the loss of
    its own tokens only, the gradient is that of the sum; where every rank computes the whole loss alike, divide it by
    CP first. Forward and backward are collective: on every rank the loss must depend on the result, if only with zero
    weight. Raises ValueError where the part is not T/CP long.
    """
    size = 1 if group is None else group.size()
    total = sum(padded_lengths)
    if local.shape[dim] * size != total:
        raise ValueError(
            f"dimension {dim} has {local.shape[dim]} tokens, 1/{size} of a pack of {total} tokens has {total / size:g}"
        )
    if group is None or size == 1:
        return local
    return _GatherZigzag.apply(local, tuple(padded_lengths), group, dim)


class _GatherZigzag(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, padded_lengths: tuple[int, ...], group: ProcessGroup, dim: int) -> Tensor:
        part = local.movedim(dim, 0).contiguous()
        parts = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(parts, part, group=group)
        ctx.save_for_backward(zigzag_indices(padded_lengths, group.size(), group.rank()).to(local.device))
        ctx.group, ctx.dim = group, dim
        inverse = zigzag_inverse(padded_lengths, group.size()).to(local.device)
        return parts.index_select(0, inverse).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (own,) = ctx.saved_tensors
        # All-reduce, not reduce-scatter: ranks' chunks are not contiguous, and gloo has no uneven one.
        total = grad.movedim(ctx.dim, 0).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.index_select(0, own).movedim(0, ctx.dim), None, None, None


def shift_right(raw: Tensor) -> Tensor:
    """Outputs of a value head on one sequence [L] to values [L]: values[0] = 0, values[t] = raw[t - 1]."""
    return torch.cat([raw.new_zeros(min(len(raw), 1)), raw[:-1]])


def unpack_values(raw: Tensor, pack: PackedBatch, group: ProcessGroup | None = None) -> list[Tensor]:
    """Values of each sequence of a pack from the head's local output: [L] in the order of `pack.rows`, >= float32.

    raw: [1, T/CP] or [1, T/CP, 1]. Collective over the context-parallel group (also for a pack of padding only),
    differentiable like `gather_zigzag`.
    """
    full = gather_zigzag(raw.squeeze(-1) if raw.dim() == 3 else raw, pack.padded_lengths, group)
    return [shift_right(x) for x in pack.unpack(full.to(torch.promote_types(full.dtype, torch.float32)))]


def pad_values(values: Sequence[Tensor], width: int | None = None) -> Tensor:
    """Per-sequence values [L] to one float32 [B, S], zero where padded; S = width or the longest.

    Raises ValueError where a sequence is longer than `width`.
    """
    longest = max((len(v) for v in values), default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a sequence of {longest} values does not fit the width {width}")
    out = torch.zeros(len(values), width, dtype=torch.float32, device=values[0].device if len(values) else None)
    for row, value in zip(out, values, strict=True):
        row[: len(value)] = value
    return out
