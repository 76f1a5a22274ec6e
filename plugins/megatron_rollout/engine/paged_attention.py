"""The two flash-attn calls that megatron-core's dynamic engine makes, on whatever this machine has.

flash-attn 4 / 3 / 2 where installed (megatron-core finds them itself), else our Triton kernel on CUDA, else plain
torch. `install` puts the functions where megatron-core looks for them.

Both calls read a paged KV cache `[blocks, block_size, kv_heads, head_dim]` through a block table and are causal with
the last query aligned to the last key.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def install(backend: str = "auto") -> str:
    """Choose the paged attention of this process. Returns the backend's name: flash, triton or torch.

    backend: auto | flash | triton | torch. auto takes the first that works here; with flash-attn 4, decoding then goes
    through our own kernel (returned as "flash+decode"). Raises ValueError where the chosen one cannot work here.
    """
    import megatron.core.transformer.attention as attention

    from megatron_rollout.device import on_gpu

    module: Any = attention
    _restore(module)
    has_flash_4 = on_gpu() and getattr(module, "HAVE_FA4", False)
    has_flash = has_flash_4 or (on_gpu() and module.flash_attn_with_kvcache is not None)
    if backend == "auto":
        if has_flash_4:
            _wrap_flash_attn_4(module, own_decode=True)
            return "flash+decode"
        backend = "flash" if has_flash else ("triton" if on_gpu() else "torch")
    if backend == "flash":
        if not has_flash:
            raise ValueError(
                "attention backend 'flash' needs CUDA and a flash-attn package; neither 4, 3 nor 2 is here"
            )
        if has_flash_4:
            _wrap_flash_attn_4(module, own_decode=False)
        return backend
    if backend == "triton":
        if not on_gpu():
            raise ValueError("attention backend 'triton' needs CUDA")
        from megatron_rollout.engine import triton_paged_attention as kernels
    elif backend == "torch":
        import megatron_rollout.engine.paged_attention as kernels  # type: ignore[no-redef]
    else:
        raise ValueError(f"attention backend must be auto, flash, triton or torch, got {backend!r}")
    module.is_fa_min_version = lambda *args, **kwargs: True
    module.HAVE_FA4 = False
    module.flash_attn_varlen_func = kernels.varlen
    module.flash_attn_with_kvcache = kernels.kvcache
    return backend


_REPLACED = (
    "is_fa_min_version",
    "HAVE_FA4",
    "flash_attn4_varlen_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
)
_originals: dict[str, Any] = {}


def _restore(module: Any) -> None:
    """Undo an earlier choice: an engine built later in this process may ask for another backend."""
    if not _originals:
        _originals.update({name: getattr(module, name, None) for name in _REPLACED})
    for name, value in _originals.items():
        setattr(module, name, value)


def _wrap_flash_attn_4(module: Any, *, own_decode: bool) -> None:
    """Give megatron-core a flash-attn 4 that works on Hopper, where it has no split-KV and must be told so.

    own_decode: calls with one query a request go to our kernel.
    """
    from flash_attn.cute import flash_attn_varlen_func

    one_split = torch.cuda.get_device_capability()[0] == 9

    def varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> Any:
        decodes = kwargs["max_seqlen_q"] == 1 and q.shape[0] == kwargs["seqused_k"].shape[0]
        if own_decode and decodes and kwargs["window_size"] == (-1, -1) and k.shape[1] >= 16:
            from megatron_rollout.engine.triton_decode_attention import decode

            return decode(q, k, v, kwargs["seqused_k"], kwargs["page_table"], kwargs["softmax_scale"]), None
        if one_split:
            kwargs["num_splits"] = 1
        return flash_attn_varlen_func(q, k, v, **kwargs)

    module.flash_attn4_varlen_func = varlen_func


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: tuple[int, int]
) -> torch.Tensor:
    """One sequence: q [sq, heads, d]; k, v [sk, kv_heads, d]; causal, bottom-right aligned."""
    sq, sk = q.shape[0], k.shape[0]
    mask = None
    if sq > 1 or window[0] >= 0:
        rows = torch.arange(sk - sq, sk, device=q.device)[:, None]
        cols = torch.arange(sk, device=q.device)[None]
        mask = cols <= rows
        if window[0] >= 0:
            mask &= cols >= rows - window[0]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


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
    """Prefill: packed queries [tokens, heads, d] over paged keys. Plain torch."""
    if not causal or block_table is None:
        raise ValueError("paged attention is causal and needs a block table")
    out = torch.zeros_like(q)
    block_size = k.shape[1]
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for i in range(min(len(starts_q), len(starts_k)) - 1):
        first, last, length = starts_q[i], starts_q[i + 1], starts_k[i + 1] - starts_k[i]
        if last <= first or length <= 0:
            continue
        blocks = block_table[i, : (length + block_size - 1) // block_size].long()
        keys, values = k[blocks].flatten(0, 1)[:length], v[blocks].flatten(0, 1)[:length]
        out[first:last] = _attend(q[first:last], keys, values, softmax_scale, window_size)
    return out


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
    """Decode: q [requests, 1, heads, d] over paged keys. Plain torch, all requests in one call.

    Keys are gathered into [requests, longest, ...] and masked by length: one matrix product instead of a Python loop
    over requests, which is what decoding on a CPU is limited by.
    """
    if cache_seqlens is None or block_table is None:
        raise ValueError("paged decode needs cache_seqlens and a block table")
    out = torch.zeros_like(q)
    live = (cache_seqlens > 0).nonzero(as_tuple=True)[0]
    if live.numel() == 0:
        return out
    lengths = cache_seqlens[live].long()
    longest, block_size = int(lengths.max()), k_cache.shape[1]
    blocks = block_table[live, : (longest + block_size - 1) // block_size].long().clamp_(min=0)
    keys = k_cache[blocks].flatten(1, 2)[:, :longest].transpose(1, 2)
    values = v_cache[blocks].flatten(1, 2)[:, :longest].transpose(1, 2)
    cols, sq = torch.arange(longest, device=q.device), q.shape[1]
    rows = lengths[:, None] - sq + torch.arange(sq, device=q.device)
    mask = cols <= rows[..., None]
    if window_size[0] >= 0:
        mask &= cols >= rows[..., None] - window_size[0]
    attended = F.scaled_dot_product_attention(
        q[live].transpose(1, 2),
        keys,
        values.masked_fill(~mask[:, -1, None, :, None], 0),  # blocks never written may hold NaN; 0 x NaN is NaN
        attn_mask=mask[:, None],
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k_cache.shape[2],
    )
    out[live] = attended.transpose(1, 2)
    return out
