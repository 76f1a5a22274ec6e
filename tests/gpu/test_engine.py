"""One engine on one GPU: its tokens and logprobs, its CUDA graphs, the memory it gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_support import add_all, finish, full_precision_logits, generate, greedy, plain_logits, prompts

from megatron_rollout.requests import GenerationOutput, SamplingParams

Make = Callable[..., Any]

#: How far two logits of a random 0.5 B model may be apart in bf16 when both are right: its plain forward in bf16 and in
#: float32 differ by 0.008 on average and by 0.04 at most.
TIE = 0.06


def captures() -> int:
    """CUDA graphs that exist now."""
    from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord

    return len(_CudagraphGlobalRecord.cudagraph_inference_record)


def free_memory() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def check_greedy(rank: Any, outputs: list[GenerationOutput]) -> None:
    """Every token is the plain forward's choice, given the tokens before it, except where two logits tie."""
    same, gaps = [], []
    for output in outputs:
        logits = plain_logits(rank, output)
        chosen = logits.gather(1, torch.tensor(output.output_ids, device="cuda")[:, None])[:, 0]
        same.append(logits.argmax(-1).cpu() == torch.tensor(output.output_ids))
        gaps.append(logits.max(-1).values - chosen)
    assert torch.cat(gaps).max() <= TIE
    assert torch.cat(same).float().mean() >= 0.9


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_greedy_tokens_are_those_of_the_plain_forward(make_rank: Make, backend: str) -> None:
    rank = make_rank("0.5b", attention_backend=backend)
    outputs = generate(rank, prompts(24, rank.architecture.vocab_size), greedy(48))
    assert all(len(o.output_ids) == 48 for o in outputs)
    check_greedy(rank, outputs)


def test_logprobs_differ_from_training_by_less_than_rounding(make_rank: Make) -> None:
    """Beside the plain forward in the same type, and beside what rounding alone does to that."""
    rank = make_rank("0.5b")
    temperatures = (1.0, 0.7, 1.2)
    outputs = generate(
        rank,
        prompts(48, rank.architecture.vocab_size),
        lambda i: SamplingParams(temperature=temperatures[i % 3], max_new_tokens=64, ignore_eos=True, seed=i),
    )
    differences, floor = [], []
    exact = full_precision_logits(rank, outputs)
    for i, output in enumerate(outputs):
        ids = torch.tensor(output.output_ids, device="cuda")[:, None]
        plain = (plain_logits(rank, output) / temperatures[i % 3]).log_softmax(-1).gather(1, ids)[:, 0]
        differences.append((plain - torch.tensor(output.logprobs, device="cuda")).abs())
        floor.append((plain - (exact[i] / temperatures[i % 3]).log_softmax(-1).gather(1, ids)[:, 0]).abs())
    difference, rounding = torch.cat(differences), torch.cat(floor)
    print(f"{difference.numel()} tokens: mean {difference.mean():.2e}, max {difference.max():.2e};")
    print(f"bf16 against float32, both plain: mean {rounding.mean():.2e}, max {rounding.max():.2e}")
    assert difference.mean() <= rounding.mean() * 1.25
    assert difference.max() <= rounding.max() * 1.5


def test_the_same_batch_twice_gives_the_same_bits(make_rank: Make) -> None:
    rank = make_rank("0.5b")
    texts = prompts(40, rank.architecture.vocab_size)
    sampling = lambda i: SamplingParams(max_new_tokens=16, ignore_eos=True, seed=100 + i)  # noqa: E731
    first, again = (generate(rank, texts, sampling, prefix=prefix) for prefix in ("a", "b"))
    assert [(o.output_ids, o.logprobs) for o in again] == [(o.output_ids, o.logprobs) for o in first]
    assert len({o.output_ids for o in first}) == 40


def test_graphs_are_captured_once_and_see_new_weights(make_rank: Make) -> None:
    rank = make_rank("0.5b")
    before = captures()
    assert before > 0
    texts = prompts(8, rank.architecture.vocab_size)
    first = generate(rank, texts, greedy(16), "a")
    rank.engine.suspend()
    rank.engine.resume()
    assert [o.output_ids for o in generate(rank, texts, greedy(16), "b")] == [o.output_ids for o in first]
    rank.do_randomize_weights(1, seed=9)
    changed = generate(rank, texts, greedy(16), "c")
    assert [o.output_ids for o in changed] != [o.output_ids for o in first]
    assert all(o.weight_versions == ((0, 1),) for o in changed)
    check_greedy(rank, changed)
    assert captures() == before


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_a_suspend_gives_back_what_its_mode_promises(make_rank: Make, mode: str) -> None:
    """With requests in flight, which go on afterwards; graphs stay valid, as the cache keeps its address."""
    rank = make_rank("0.5b", kv_cache_management_mode=mode, buffer_size_gb=4.0)
    graphs, texts = captures(), prompts(16, rank.architecture.vocab_size)
    add_all(rank.engine, texts, greedy(40), "cut")
    for _ in range(12):
        rank.engine.step()
    before = free_memory()
    rank.do_release_memory()
    given_back = free_memory() - before
    assert given_back >= 4.0 * 2**30 * 0.98 if mode != "persist" else abs(given_back) < 2e8
    rank.do_resume_memory()
    assert free_memory() >= before - 2e8
    outputs = finish(rank.engine)
    assert sorted(outputs) == sorted(f"cut{i}" for i in range(16))
    assert all(len(o.output_ids) == len(o.logprobs) == 40 for o in outputs.values())
    check_greedy(rank, list(outputs.values()))
    assert captures() == graphs


def test_ten_cycles_leave_memory_flat(make_rank: Make) -> None:
    rank = make_rank("0.5b", kv_cache_management_mode="recompute")
    texts = prompts(8, rank.architecture.vocab_size)
    sizes = []
    for cycle in range(10):
        generate(rank, texts, greedy(8), f"c{cycle}-")
        rank.do_release_memory()
        rank.do_resume_memory()
        sizes.append(free_memory())
    assert sizes[-1] >= sizes[1] * 0.98


def test_abort_gives_the_blocks_back(make_rank: Make) -> None:
    rank = make_rank("0.5b")
    free = int(rank.engine.context.kv_block_allocator.total_avail)
    add_all(rank.engine, prompts(16, rank.architecture.vocab_size), greedy(200))
    for _ in range(10):
        rank.engine.step()
    aborted = rank.engine.abort()
    assert len(aborted) == 16 and all(o.output_ids and len(o.output_ids) == len(o.logprobs) for o in aborted)
    finish(rank.engine)
    assert int(rank.engine.context.kv_block_allocator.total_avail) == free


def test_top_k_and_alternatives_beside_plain_requests(make_rank: Make) -> None:
    """One batch of the kernel's rows and of rows that it does not serve."""
    rank = make_rank("0.5b")
    sampling = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, seed=1),
        SamplingParams(max_new_tokens=12, ignore_eos=True, seed=2, top_k=5, top_logprobs=5),
        SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3, top_p=0.3),
    ]
    outputs = generate(rank, prompts(3, rank.architecture.vocab_size), lambda i: sampling[i])
    assert all(len(o.output_ids) == 12 for o in outputs)
    for token, alternatives in zip(outputs[1].output_ids, outputs[1].top_logprobs, strict=True):
        assert len(alternatives) == 5 and token in [i for i, _ in alternatives]
