"""Core attention on torch alone: dense, packed (`thd`), grouped-query and context parallel.

Without Transformer Engine megatron-core's own local attention refuses context parallelism and packed sequences, and its
RMSNorm refuses sequence parallelism; the classes here take their places in the layer spec. Packed sequences run
through torch's varlen flash kernel on CUDA and through padded SDPA elsewhere.

Context parallelism is by zigzag: of 2·CP chunks of a sequence rank r holds r and 2·CP−1−r; keys and values are
all-gathered, and each of the two chunks attends to its own prefix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class _GatherTokens(torch.autograd.Function):
    """All-gather along dim 0 over the context-parallel group; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_lens: list[int],
    k_lens: list[int],
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention of packed pieces; the last query of a piece is aligned with its last key.

    q: [sum(q_lens), heads, d]; k, v: [sum(k_lens), kv_heads, d]. Returns [sum(q_lens), heads, d].
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _varlen_flash(q, k, v, q_lens, k_lens, scale)
    return _varlen_padded(q, k, v, q_lens, k_lens, scale, dropout)


def _varlen_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_lens: list[int], k_lens: list[int], scale: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # the kernel's Python interface takes equal head counts only
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    cu_q = torch.tensor([0, *q_lens], device=q.device).cumsum(0, dtype=torch.int32)
    cu_k = torch.tensor([0, *k_lens], device=q.device).cumsum(0, dtype=torch.int32)
    out = varlen_attn(q, k, v, cu_q, cu_k, max(q_lens), max(k_lens), scale=scale, window_size=(-1, 0))
    return out[0] if isinstance(out, tuple) else out


def _padded_rows(lens: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [n, longest] into the packed rows (any row where padded) and the mask of real places."""
    lengths = torch.tensor(lens, device=device)
    place = torch.arange(max(lens), device=device)
    real = place < lengths[:, None]
    starts = lengths.cumsum(0) - lengths
    return torch.where(real, starts[:, None] + place, torch.zeros_like(place)), real


def _varlen_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_lens: list[int],
    k_lens: list[int],
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    q_rows, q_real = _padded_rows(q_lens, q.device)
    k_rows, k_real = (q_rows, q_real) if q_lens == k_lens else _padded_rows(k_lens, q.device)
    mask: dict[str, Any] = {"is_causal": True}
    if q_lens != k_lens:
        shift = torch.tensor([b - a for a, b in zip(q_lens, k_lens, strict=True)], device=q.device)
        row = torch.arange(q_rows.shape[1], device=q.device)[:, None] + shift[:, None, None]
        visible = torch.arange(k_rows.shape[1], device=q.device) <= row
        mask = {"attn_mask": (visible & (k_real[:, None] | ~q_real[:, :, None]))[:, None]}
    out = F.scaled_dot_product_attention(
        q[q_rows].transpose(1, 2),
        k[k_rows].transpose(1, 2),
        v[k_rows].transpose(1, 2),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        **mask,
    )
    return out.transpose(1, 2)[q_real]


def _zigzag_pieces(lens: list[int], cp: int, rank: int) -> tuple[list[int], list[int], list[int]]:
    """How this rank's tokens attend: query lengths, key lengths, and the gathered rows of each piece's keys.

    lens: full (padded) lengths, each a multiple of 2·cp. The gathered keys lie rank by rank, each rank with its two
    chunks of every sequence in turn.
    """
    per_rank = sum(lens) // cp
    q_lens: list[int] = []
    k_lens: list[int] = []
    rows: list[int] = []
    offset = 0
    for length in lens:
        chunk = length // (2 * cp)
        in_order: list[int] = []  # gathered rows of the whole sequence, by position
        for c in range(2 * cp):
            owner = c if c < cp else 2 * cp - 1 - c
            first = owner * per_rank + offset + (0 if c < cp else chunk)
            in_order.extend(range(first, first + chunk))
        for c in (rank, 2 * cp - 1 - rank):
            q_lens.append(chunk)
            k_lens.append((c + 1) * chunk)
            rows.extend(in_order[: (c + 1) * chunk])
        offset += 2 * chunk
    return q_lens, k_lens, rows


class CoreAttention(MegatronModule):
    """Causal core attention: q [s, b, heads, d] or packed [t, heads, d] → [s, b, heads·d] or [t, heads·d]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if pg_collection is None:
            from megatron.core.process_groups_config import ProcessGroupCollection

            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        cp = self.cp_group.size() if self.cp_group is not None else 1
        dropout = self.dropout if self.training else 0.0
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            cu = packed_seq_params.cu_seqlens_q_padded
            cu = packed_seq_params.cu_seqlens_q if cu is None else cu
            lens = [n for n in (cu[1:] - cu[:-1]).tolist() if n]
            out = self._packed(query, key, value, lens, cp, dropout)
            return out.reshape(out.shape[0], -1)
        s, b = query.shape[:2]
        if cp > 1:
            out = torch.stack(
                [self._packed(query[:, i], key[:, i], value[:, i], [s * cp], cp, dropout) for i in range(b)], dim=1
            )
        else:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                dropout_p=dropout,
                scale=self.softmax_scale,
                is_causal=True,
                enable_gqa=query.shape[2] != key.shape[2],
            ).permute(2, 0, 1, 3)
        return out.reshape(s, b, -1)

    def _packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int], cp: int, dropout: float
    ) -> torch.Tensor:
        if cp == 1:
            return varlen_attention(q, k, v, lens, lens, self.softmax_scale, dropout)
        k, v = _GatherTokens.apply(k, self.cp_group), _GatherTokens.apply(v, self.cp_group)
        q_lens, k_lens, rows = _zigzag_pieces(lens, cp, self.cp_group.rank())
        index = torch.tensor(rows, device=q.device)
        return varlen_attention(q, k[index], v[index], q_lens, k_lens, self.softmax_scale, dropout)


class RMSNorm(torch.nn.Module):
    """RMSNorm that is legal under sequence parallelism: its weight is marked, so its gradient is summed over TP."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def block_spec(num_layers: int, *, qk_layernorm: bool) -> TransformerBlockSubmodules:
    """Spec of `num_layers` decoder layers (those of this pipeline stage) with the classes above."""
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm)
    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
