"""The Triton kernels against the torch path that they replace."""

from __future__ import annotations

import pytest
import torch

from megatron_rollout.engine.sampling import RequestSampler
from megatron_rollout.requests import SamplingParams


def unfused_rotary(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """megatron-core's `_apply_rotary_pos_emb_bshd`."""
    a, b = x.chunk(2, -1)
    cos, sin = frequencies.cos().to(x.dtype), frequencies.sin().to(x.dtype)
    return x * cos + torch.cat((-b, a), -1) * sin


@pytest.mark.parametrize(("heads", "dim"), [(12, 128), (2, 64), (7, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotary_kernels_compute_the_bits_of_the_unfused_path(heads: int, dim: int, dtype: torch.dtype) -> None:
    from megatron_rollout.engine.triton_rope import RotaryTable

    torch.manual_seed(0)
    half = torch.rand(4096, 1, 1, dim // 2, device="cuda") * 100
    frequencies = torch.cat((half, half), -1)
    table = RotaryTable(frequencies, dtype)
    n = 300
    mixed = torch.randn(n, 1, heads + 3, dim, device="cuda", dtype=dtype)  # queries are a view of a larger tensor
    x, values = mixed[:, 0, 1 : heads + 1], torch.randn(n, heads, dim, device="cuda", dtype=dtype)
    position = torch.randint(0, 4096, (n,), device="cuda")
    expected = unfused_rotary(x.clone(), frequencies[position][:, 0])

    places = torch.randperm(6 * 64, device="cuda")[:n]
    blocks, offsets = places // 64, (places % 64).int()
    cache = torch.full((2, 6, 64, heads, dim), torch.nan, device="cuda", dtype=dtype)
    table.append(x, values, cache[0], cache[1], position.int(), blocks, offsets)
    assert torch.equal(cache[0][blocks, offsets.long()], expected)
    assert torch.equal(cache[1][blocks, offsets.long()], values)
    table.rotate_(x, position)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("vocab", [50, 4096, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sampling_kernel_draws_what_torch_draws(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    n = 300
    fused, plain = (RequestSampler(vocab, torch.device("cuda")) for _ in range(2))
    for sampler in (fused, plain):
        for slot in range(n):
            temperature = (0.0, 1.0, 0.7, 1.3)[slot % 4]
            sampler.register(slot, SamplingParams(temperature=temperature), seed=slot * 7919 - 400, drawn=slot % 5)
        sampler._write_tables()
        sampler._slots = torch.randperm(n, generator=torch.Generator().manual_seed(2)).cuda()
    logits = torch.randn(n, vocab + 64, device="cuda").mul_(3).to(dtype)
    logits[:, vocab:] = 1e4  # padding of the vocabulary must never be drawn
    logits[5, :vocab] = -torch.inf
    logits[5, vocab // 2] = 0.0
    tokens = torch.full((n,), -1, device="cuda")
    logprobs = fused._draw_fused(logits, tokens)
    expected = plain._draw_tokens(logits[:, :vocab])
    scaled = logits[:, :vocab].float() / plain._tables["temperature"][plain._slots][:, None]
    reference = scaled.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    assert tokens.min() >= 0 and tokens.max() < vocab
    assert tokens[5] == vocab // 2
    assert (tokens == expected).float().mean() >= 0.99  # a draw on the edge of two tokens may fall to either
    assert (logprobs.double() - reference).abs().max() < 2e-5
    assert torch.equal(fused._draw[:n], torch.tensor([slot % 5 + 1 for slot in range(n)], device="cuda"))


def test_the_sampling_kernel_follows_the_distribution() -> None:
    from megatron_rollout.engine import triton_sampling

    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125], device="cuda")
    n = 40_000
    logits = probabilities.log().expand(n, 5).contiguous()
    tokens = torch.empty(n, dtype=torch.long, device="cuda")
    triton_sampling.sample(
        logits,
        torch.arange(n, device="cuda"),
        torch.ones(n, device="cuda"),
        torch.zeros(n, dtype=torch.bool, device="cuda"),
        torch.arange(n, device="cuda"),
        torch.zeros(n, dtype=torch.long, device="cuda"),
        tokens,
        5,
    )
    shares = tokens.bincount(minlength=5) / n
    assert shares[3] == 0
    assert (shares - probabilities).abs().max() < 0.01


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_paged_attention_equals_torch(backend: str) -> None:
    """Decode and prefill through the block table, on requests of different lengths."""
    from megatron_rollout.engine import paged_attention, triton_paged_attention

    torch.manual_seed(3)
    heads, kv_heads, dim, block, blocks = 12, 2, 128, 256, 24
    k, v = (torch.randn(blocks, block, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([1, 17, 256, 300, 700], dtype=torch.int32, device="cuda")
    table = torch.randperm(blocks, device="cuda")[:20].reshape(5, 4).int()
    q = torch.randn(5, 1, heads, dim, device="cuda", dtype=torch.bfloat16)
    expected = paged_attention.kvcache(q, k, v, lengths, block_table=table)
    queries = torch.tensor([1, 5, 256, 44, 130], dtype=torch.int32, device="cuda")
    cu_q = torch.cat((torch.zeros(1, device="cuda"), queries.cumsum(0))).int()
    cu_k = torch.cat((torch.zeros(1, device="cuda"), lengths.cumsum(0))).int()
    packed = torch.randn(int(queries.sum()), heads, dim, device="cuda", dtype=torch.bfloat16)
    expected_prefill = paged_attention.varlen(packed, k, v, cu_q, cu_k, 256, 700, block_table=table)
    if backend == "triton":
        found = triton_paged_attention.kvcache(q, k, v, lengths, block_table=table)
        found_prefill = triton_paged_attention.varlen(packed, k, v, cu_q, cu_k, 256, 700, block_table=table)
    else:
        cute = pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed")
        steps = torch.arange(6, device="cuda", dtype=torch.int32)
        common = dict(max_seqlen_k=1024, seqused_k=lengths, page_table=table, causal=True, num_splits=1)
        found = cute.flash_attn_varlen_func(q[:, 0], k, v, cu_seqlens_q=steps, max_seqlen_q=1, **common)[0][:, None]
        found_prefill = cute.flash_attn_varlen_func(packed, k, v, cu_seqlens_q=cu_q, max_seqlen_q=256, **common)[0]
    assert (found.float() - expected.float()).abs().max() < 0.02
    assert (found_prefill.float() - expected_prefill.float()).abs().max() < 0.03
