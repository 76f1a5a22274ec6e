"""Rotary embedding for the paged engine: one kernel for queries, one that also writes keys and values into the cache.

megatron-core's unfused path takes about ten kernels a layer for the queries and as many for the keys. These round where
it rounds (cosine, sine, both products and their sum each to the activations' type), so that rollout and training
compute the same bits.

Safe inside CUDA graphs: nothing depends on the host, and the grid depends on shapes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotated(x1, x2, cos, sin, TYPE: tl.constexpr):
    """Both halves of a rotated vector: (x1·cos − x2·sin, x2·cos + x1·sin), every operation rounded to TYPE.

    The compiler may fuse none of them: launched with enable_fp_fusion=False.
    """
    a = (x1.to(tl.float32) * cos).to(TYPE).to(tl.float32) + (-x2.to(tl.float32) * sin).to(TYPE).to(tl.float32)
    b = (x2.to(tl.float32) * cos).to(TYPE).to(tl.float32) + (x1.to(tl.float32) * sin).to(TYPE).to(tl.float32)
    return a.to(TYPE), b.to(TYPE)


@triton.jit
def _rotate(
    X, COS, SIN, POSITION, x_token, x_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITION + token).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, HALF_PAD)[None]
    real = (heads < HEADS) & (dims < HALF)
    cos = tl.load(COS + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sin = tl.load(SIN + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    first = X + token * x_token + heads * x_head + dims
    x1 = tl.load(first, mask=real, other=0.0)
    x2 = tl.load(first + HALF, mask=real, other=0.0)
    a, b = _rotated(x1, x2, cos, sin, X.dtype.element_ty)
    tl.store(first, a, mask=real)
    tl.store(first + HALF, b, mask=real)


@triton.jit
def _append(
    K, V, K_CACHE, V_CACHE, COS, SIN, POSITION, BLOCK, PLACE,
    k_token, k_head, v_token, v_head, c_block, c_place, c_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITION + token).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, HALF_PAD)[None]
    real = (heads < HEADS) & (dims < HALF)
    cos = tl.load(COS + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sin = tl.load(SIN + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    place = tl.load(BLOCK + token).to(tl.int64) * c_block + tl.load(PLACE + token).to(tl.int64) * c_place
    k = K + token * k_token + heads * k_head + dims
    a, b = _rotated(
        tl.load(k, mask=real, other=0.0), tl.load(k + HALF, mask=real, other=0.0), cos, sin, K.dtype.element_ty
    )
    to = place + heads * c_head + dims
    tl.store(K_CACHE + to, a.to(K_CACHE.dtype.element_ty), mask=real)
    tl.store(K_CACHE + to + HALF, b.to(K_CACHE.dtype.element_ty), mask=real)
    v = V + token * v_token + heads * v_head + dims
    tl.store(V_CACHE + to, tl.load(v, mask=real, other=0.0).to(V_CACHE.dtype.element_ty), mask=real)
    tl.store(V_CACHE + to + HALF, tl.load(v + HALF, mask=real, other=0.0).to(V_CACHE.dtype.element_ty), mask=real)


class RotaryTable:
    """Cosine and sine of every position, each [positions, dim / 2] in the activations' type.

    frequencies: [positions, 1, 1, dim], as megatron-core's `RotaryEmbedding` gives them (both halves alike).
    """

    def __init__(self, frequencies: torch.Tensor, dtype: torch.dtype) -> None:
        half = frequencies.reshape(frequencies.shape[0], -1).chunk(2, -1)[0]
        self.dim = 2 * half.shape[1]
        self.cos = half.cos().to(dtype).contiguous()
        self.sin = half.sin().to(dtype).contiguous()

    def rotate_(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate x [n, heads, dim] in place; positions: [n], integers below the table's length."""
        n, heads, dim = x.shape
        self._check(dim, x)
        if n:
            _rotate[(n,)](
                x, self.cos, self.sin, positions, x.stride(0), x.stride(1),
                HEADS=heads, HALF=dim // 2,
                HEADS_PAD=triton.next_power_of_2(heads), HALF_PAD=triton.next_power_of_2(dim // 2), num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Write rotated keys and the values of n tokens into the cache.

        k, v: [n, kv_heads, dim]. caches: [blocks, block size, kv_heads, dim], of equal strides. positions, blocks and
        places: [n], the token's position, its block and its place in the block.
        """
        n, heads, dim = k.shape
        self._check(dim, k)
        if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1 or v.stride(-1) != 1:
            raise ValueError("key and value caches must have equal strides, and the head dimension must be contiguous")
        if n:
            _append[(n,)](
                k, v, k_cache, v_cache, self.cos, self.sin, positions, blocks, places,
                k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3],
                HEADS=heads, HALF=dim // 2,
                HEADS_PAD=triton.next_power_of_2(heads), HALF_PAD=triton.next_power_of_2(dim // 2), num_warps=1,
                enable_fp_fusion=False,
            )  # fmt: skip

    def _check(self, dim: int, x: torch.Tensor) -> None:
        if dim != self.dim or x.stride(-1) != 1:
            raise ValueError(
                f"the rotary table has dimension {self.dim}, contiguous; got {dim} of stride {x.stride(-1)}"
            )
