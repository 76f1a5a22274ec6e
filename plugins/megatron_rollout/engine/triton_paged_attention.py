"""Paged attention for CUDA without flash-attn: a Triton kernel for prefill (packed) and several queries a request.

Safe inside CUDA graphs: no host synchronisation, and the grid depends on shapes only. Block size of the KV cache must
be a power of two, at least 16. Flash attention's online softmax; keys are read block by block through the table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rollout.engine.triton_decode_attention import decode


@triton.jit
def _kernel(
    Q, K, V, OUT, CU_Q, LEN_K, TABLE, scale,
    q_token, q_head, k_block, k_place, k_head, o_token, o_head, table_row,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    D_PAD: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    first = tl.load(CU_Q + request)
    n_q = tl.load(CU_Q + request + 1) - first
    n_k = tl.load(LEN_K + request)
    if tile * ROWS < n_q:
        rows = tile * ROWS + tl.arange(0, ROWS)
        dims = tl.arange(0, D_PAD)
        places = tl.arange(0, TILE)
        real_q = (rows < n_q)[:, None] & (dims < D)[None]
        q = tl.load(Q + (first + rows)[:, None] * q_token + head * q_head + dims[None], mask=real_q, other=0.0)
        position = n_k - n_q + rows
        biggest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        visible = tl.minimum(n_k, n_k - n_q + (tile + 1) * ROWS)
        for j in range(0, tl.cdiv(visible, TILE)):
            block = tl.load(TABLE + request * table_row + j * TILE // BLOCK).to(tl.int64)
            key = j * TILE + places
            offset = block * k_block + (key % BLOCK)[:, None] * k_place + (head // GROUP) * k_head + dims[None]
            real_k = (key < n_k)[:, None] & (dims < D)[None]
            k = tl.load(K + offset, mask=real_k, other=0.0)
            scores = tl.dot(q, tl.trans(k)).to(tl.float32) * scale
            allowed = (key[None] <= position[:, None]) & (key < n_k)[None]
            if WINDOW >= 0:
                allowed = allowed & (key[None] >= position[:, None] - WINDOW)
            scores = tl.where(allowed, scores, -float("inf"))
            new = tl.maximum(biggest, tl.max(scores, 1))
            safe = tl.where(new == -float("inf"), 0.0, new)
            weights = tl.exp(scores - safe[:, None])
            decay = tl.exp(biggest - safe)
            v = tl.load(V + offset, mask=real_k, other=0.0)
            acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v).to(tl.float32)
            total = total * decay + tl.sum(weights, 1)
            biggest = new
        out = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(
            OUT + (first + rows)[:, None] * o_token + head * o_head + dims[None],
            out.to(OUT.dtype.element_ty),
            mask=real_q,
        )


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    len_k: torch.Tensor,
    table: torch.Tensor,
    max_q: int,
    scale: float,
    window: tuple[int, int],
) -> torch.Tensor:
    block, (heads, dim) = k.shape[1], q.shape[1:]
    if block < 16 or block & (block - 1):
        raise ValueError(f"the Triton attention needs a KV block size that is a power of two >= 16, got {block}")
    out = torch.zeros_like(q)
    rows = 16 if max_q <= 16 else 64
    _kernel[(len_k.shape[0], heads, triton.cdiv(max(max_q, 1), rows))](
        q, k, v, out, cu_q, len_k, table, scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), out.stride(0), out.stride(1), table.stride(0),
        GROUP=heads // k.shape[2], D=dim, BLOCK=block, TILE=min(block, 64), ROWS=rows,
        D_PAD=max(16, triton.next_power_of_2(dim)), WINDOW=window[0],
    )  # fmt: skip
    return out


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Prefill: packed queries [tokens, heads, d] over paged keys (see `paged_attention.varlen`)."""
    if not causal or block_table is None:
        raise ValueError("paged attention is causal and needs a block table")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _run(q, k, v, cu_q, (cu_k[1:] - cu_k[:-1]).contiguous(), block_table, int(max_q), scale, window_size)


def kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Decode: q [requests, tokens, heads, d] over paged keys (see `paged_attention.kvcache`)."""
    if cache_seqlens is None or block_table is None:
        raise ValueError("paged decode needs cache_seqlens and a block table")
    requests, tokens = q.shape[:2]
    if tokens == 1 and window_size[0] < 0:
        return decode(q[:, 0], k_cache, v_cache, cache_seqlens, block_table, softmax_scale)[:, None]
    cu_q = torch.arange(0, (requests + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    flat = q.reshape(requests * tokens, *q.shape[2:])
    return _run(flat, k_cache, v_cache, cu_q, cache_seqlens, block_table, tokens, scale, window_size).view_as(q)
