"""Token logprobs and entropy against torch's own log_softmax, whole and split over tensor-parallel ranks."""

from __future__ import annotations

import math

import pytest
import torch
from dist_utils import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.training.logprobs import (
    logprob_divisor,
    token_logprobs,
    token_logprobs_and_entropy,
)


def reference(logits, targets, temperature):
    """Plain autograd in the precision of the logits."""
    log_p = torch.log_softmax(logits / (temperature or 1.0), -1)
    finite = torch.where(log_p > -math.inf, log_p, 0.0)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * finite).sum(-1)


@pytest.mark.parametrize("target", [0, 1, 2])
def test_g09_logprob_under_the_sampling_temperature(target):
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    targets = torch.tensor([target])
    expected = torch.log_softmax(logits / 0.6, -1)[0, target]
    assert abs(token_logprobs(logits, targets, temperature=0.6) - expected) <= 1e-6
    raw = torch.log_softmax(logits, -1)[0, target]
    assert abs(token_logprobs(logits, targets) - raw) <= 1e-6
    assert abs(raw - expected) > 0.1 or target == 1


def test_g01_temperature_zero_is_raw_and_a_bad_one_is_refused():
    logits, targets = torch.randn(4, 9), torch.arange(4)
    assert torch.equal(token_logprobs(logits, targets, temperature=0), token_logprobs(logits, targets, temperature=1))
    assert token_logprobs(logits, targets, temperature=0).isfinite().all()
    assert logprob_divisor(0) == 1.0 and logprob_divisor(0.6) == 0.6
    for bad in (-0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature must be a finite number >= 0, got {bad}"):
            token_logprobs(logits, targets, temperature=bad)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 12),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.6, 1.0, 1.3]),
    st.integers(0, 2**31 - 1),
)
def test_values_and_gradients_equal_plain_autograd(n, vocab, chunk_size, temperature, seed):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab, generator=g, dtype=torch.float64) * 5).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=g)
    a, b = torch.randn(2, n, generator=g, dtype=torch.float64)
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, temperature=temperature, chunk_size=chunk_size)
    expected_logprobs, expected_entropy = reference(logits, targets, temperature)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad((a * logprobs + b * entropy).sum(), logits)
    (expected,) = torch.autograd.grad((a * expected_logprobs + b * expected_entropy).sum(), logits)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-10)
    only = token_logprobs(logits, targets, temperature=temperature, chunk_size=chunk_size)
    (grad,) = torch.autograd.grad((a * only).sum(), logits)
    (expected,) = torch.autograd.grad((a * reference(logits, targets, temperature)[0]).sum(), logits)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-10)


def test_megatron_layout_dtypes_and_untouched_logits():
    """Logits [T, 1, V] in bf16: float32 results, gradient in bf16, and the caller's logits are not overwritten."""
    logits = torch.randn(6, 1, 11, dtype=torch.bfloat16).requires_grad_()
    before = logits.detach().clone()
    targets = torch.randint(0, 11, (6, 1))
    logprobs = token_logprobs(logits, targets, temperature=0.7, chunk_size=4)
    assert logprobs.shape == (6, 1) and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, reference(logits.float(), targets, 0.7)[0], rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16 and torch.equal(logits.detach(), before)


def test_ignored_positions_and_positions_without_gradient_stay_zero_even_over_nan():
    logits = torch.randn(4, 5, dtype=torch.float64)
    logits[1], logits[3] = math.nan, math.nan
    logits.requires_grad_()
    targets = torch.tensor([2, -1, 0, 1])
    logprobs, entropy = token_logprobs_and_entropy(logits, targets)
    assert logprobs[1] == 0 and entropy[1] == 0
    (grad,) = torch.autograd.grad((logprobs[:3].sum() + entropy[:3].sum()), logits)
    assert grad.isfinite().all() and not grad[1].any() and not grad[3].any() and grad[0].any()


def test_impossible_tokens():
    """-inf logits: probability 0, finite entropy and gradients (G03: all -inf but one)."""
    logits = torch.tensor([[0.0, -math.inf, -math.inf], [1.0, 2.0, -math.inf]], requires_grad=True)
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([0, 1]), temperature=0.6)
    torch.testing.assert_close(logprobs, torch.tensor([0.0, torch.log_softmax(torch.tensor([1.0, 2.0]) / 0.6, 0)[1]]))
    assert entropy[0] == 0 and entropy.isfinite().all()
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_padding_of_the_vocabulary_has_no_probability():
    logits = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (5,))
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, vocab_size=11)
    expected = reference(logits[:, :11], targets, 1.0)
    torch.testing.assert_close((logprobs, entropy), expected)
    (logprobs + entropy).sum().backward()
    assert not logits.grad[:, 11:].any() and logits.grad[:, :11].all()


def test_inputs_that_do_not_fit():
    logits = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"logits \(3, 4\) do not fit targets \(2,\)"):
        token_logprobs(logits, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="target 4 is outside the vocabulary of 4 tokens"):
        token_logprobs(logits, torch.tensor([0, 4, 1]))
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 4\].*got 5"):
        token_logprobs(logits, torch.zeros(3, dtype=torch.long), vocab_size=5)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        token_logprobs(logits, torch.zeros(3, dtype=torch.long), chunk_size=0)


def test_no_second_copy_of_the_logits_is_kept():
    """What forward leaves for backward, beside the logits themselves, is a few numbers per token."""
    logits = torch.randn(64, 4096, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        token_logprobs_and_entropy(logits, torch.zeros(64, dtype=torch.long), chunk_size=8)
    extra = sum(t.numel() for t in saved if t.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr())
    assert any(t.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr() for t in saved)
    assert extra <= 4 * 64


def _vocab_parallel_cases():
    """Made from a seed on each rank: a tensor pickled where megatron-core is imported takes seconds to unpickle."""
    g = torch.Generator().manual_seed(0)
    logits, weights = (torch.randn(n, width, generator=g, dtype=torch.float64) for n, width in ((10, 16), (2, 10)))
    return [(size, torch.randint(0, size, (10,), generator=g)) for size in (16, 7)], logits, weights


def _vocab_parallel(rank, world):
    import torch.distributed as dist

    cases, logits, weights = _vocab_parallel_cases()
    results = []
    for vocab_size, targets in cases:
        part = logits.chunk(world, -1)[rank].clone().requires_grad_()
        logprobs, entropy = token_logprobs_and_entropy(
            part, targets, temperature=0.6, group=dist.group.WORLD, vocab_size=vocab_size, chunk_size=3
        )
        (weights[0] * logprobs + weights[1] * entropy).sum().backward()
        none = part[:0].detach().requires_grad_()
        token_logprobs(none, targets[:0], group=dist.group.WORLD).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), part.grad, tuple(none.grad.shape)))
    return results


@pytest.mark.timeout(300)
def test_vocab_parallel_equals_whole():
    """Two ranks; with 7 real tokens of 16 columns the second rank holds padding only."""
    cases, logits, weights = _vocab_parallel_cases()
    by_rank = run_ranks(_vocab_parallel, 2, timeout=240)
    for case, (vocab_size, targets) in enumerate(cases):
        whole = logits.clone().requires_grad_()
        expected = token_logprobs_and_entropy(whole, targets, temperature=0.6, vocab_size=vocab_size)
        (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
        results = [rank[case] for rank in by_rank]
        for logprobs, entropy, _, empty in results:
            torch.testing.assert_close((logprobs, entropy), tuple(x.detach() for x in expected))
            assert empty == (0, 8)
        torch.testing.assert_close(torch.cat([r[2] for r in results], -1), whole.grad)
