"""The real engine on the CPU: greedy and sampled output, aborts, versions, limits. One process for all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_utils import RankPool
from tiny_models import FAMILIES

LOGPROB_TOLERANCE = 1e-4


def _greedy_case(rank: int, world: int, checkpoint: str, tp: int, pp: int, sp: bool = False) -> dict[str, Any]:
    from megatron_ranks import build_rank, drain
    from tiny_models import greedy, load_reference, logprobs, random_prompts

    from megatron_rollout.requests import GenerationRequest, SamplingParams

    engine = build_rank(checkpoint, tp=tp, pp=pp, sequence_parallel=sp).engine
    prompts = random_prompts(12)
    for i, prompt in enumerate(prompts):
        engine.add(GenerationRequest(str(i), tuple(prompt), SamplingParams(temperature=0, max_new_tokens=16)))
    outputs = drain(engine)
    if rank:
        return {"tokens": [outputs[str(i)].output_ids for i in range(len(prompts))]}
    model = load_reference(checkpoint)
    wrong, worst = [], 0.0
    for i, prompt in enumerate(prompts):
        output = outputs[str(i)]
        if list(output.output_ids) != greedy(model, prompt, 16):
            wrong.append(i)
        expected = logprobs(model, prompt, list(output.output_ids))
        worst = max(worst, *(abs(a - b) for a, b in zip(output.logprobs, expected, strict=True)))
    tokens = [outputs[str(i)].output_ids for i in range(len(prompts))]
    return {"wrong": wrong, "worst": worst, "tokens": tokens, "reasons": {o.finish_reason for o in outputs.values()}}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(one_rank: RankPool, checkpoints: dict[str, Path], family: str) -> None:
    (result,) = one_rank.run(_greedy_case, str(checkpoints[family]), 1, 1)
    assert result["wrong"] == []
    assert result["worst"] <= LOGPROB_TOLERANCE
    assert result["reasons"] == {"length"}


@pytest.mark.parametrize(
    ("family", "tp", "pp", "sp"),
    [("llama", 2, 1, False), ("qwen2", 1, 2, False), ("qwen3", 2, 1, True), ("qwen3-tied", 1, 2, False)],
)
def test_greedy_over_two_ranks(
    two_ranks: RankPool, checkpoints: dict[str, Path], family: str, tp: int, pp: int, sp: bool
) -> None:
    first, second = two_ranks.run(_greedy_case, str(checkpoints[family]), tp, pp, sp)
    assert first["wrong"] == []
    assert first["worst"] <= LOGPROB_TOLERANCE
    assert first["tokens"] == second["tokens"], "the ranks of a cell sample the same tokens"


def _sampling_case(rank: int, world: int, checkpoint: str) -> dict[str, Any]:
    from megatron_ranks import build_rank, drain
    from tiny_models import load_reference, logprobs, random_prompts

    from megatron_rollout.requests import GenerationRequest, SamplingParams

    engine = build_rank(checkpoint, kv_cache_management_mode="recompute", enable_prefix_caching=True).engine
    prompts = random_prompts(12)

    def request(i: int, **params: Any) -> Any:
        merged = dict(temperature=0.7, max_new_tokens=20, seed=i) | params
        return GenerationRequest(f"s{i}", tuple(prompts[i % 12]), SamplingParams(**merged))

    def run(*requests: Any) -> dict[str, Any]:
        for r in requests:
            engine.add(r)
        return drain(engine)

    result: dict[str, Any] = {}
    first = run(*(request(i) for i in range(12)))
    second = run(*(request(i) for i in reversed(range(12))))
    result["same seeds, other order"] = all(first[k].output_ids == second[k].output_ids for k in first)
    other = run(*(request(i, seed=1000 + i) for i in range(12)))
    result["other seeds differ"] = sum(first[k].output_ids != other[k].output_ids for k in first)

    model = load_reference(checkpoint)
    result["worst logprob"] = 0.0
    for temperature in (0.6, 1.0, 1.3):
        outputs = run(*(request(i, temperature=temperature) for i in range(6)))
        for i in range(6):
            o = outputs[f"s{i}"]
            expected = logprobs(model, prompts[i], list(o.output_ids), temperature)
            worst = max(abs(a - b) for a, b in zip(o.logprobs, expected, strict=True))
            result["worst logprob"] = max(result["worst logprob"], worst)

    # an aborted sample goes on with the same noise, and says which version made which token
    engine.drop_prefix_cache()
    free = int(engine.context.kv_block_allocator.total_avail)
    engine.add(request(3))
    for _ in range(6):
        engine.step()
    (partial,) = engine.abort()
    result["partial"] = (len(partial.output_ids), len(partial.logprobs), partial.finish_reason)
    drain(engine)
    engine.set_version(5)
    whole = run(request(3).resumed_from(partial))["s3"]
    result["resumed equals uninterrupted"] = whole.output_ids == first["s3"].output_ids
    result["spans"] = whole.weight_versions
    engine.drop_prefix_cache()
    result["blocks returned"] = int(engine.context.kv_block_allocator.total_avail) == free

    # weights change (here only their version) with requests in flight
    for i in range(12):
        engine.add(request(i))
    for _ in range(5):
        engine.step()
    engine.suspend()
    engine.set_version(6)
    engine.resume()
    after = drain(engine)
    result["in flight over a suspend"] = all(after[k].output_ids == first[k].output_ids for k in first)
    result["spans over a suspend"] = sorted({o.weight_versions for o in after.values()})

    stop_token = first["s3"].output_ids[4]
    stopped = run(request(3, stop_token_ids=(stop_token,)))["s3"]
    cut_at = first["s3"].output_ids.index(stop_token) + 1
    result["stop id"] = (
        stopped.output_ids == first["s3"].output_ids[:cut_at],
        stopped.finish_reason,
        stopped.matched_stop == stop_token,
        len(stopped.logprobs) == cut_at,
    )
    top = run(request(1, top_logprobs=3))["s1"]
    result["top logprobs"] = [len(t) for t in top.top_logprobs] == [3] * 20 and all(
        best >= chosen - 1e-4 for ((_, best), *_), chosen in zip(top.top_logprobs, top.logprobs, strict=True)
    )
    return result


def test_sampling_aborts_and_versions(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    (result,) = one_rank.run(_sampling_case, str(checkpoints["qwen3"]))
    assert result["same seeds, other order"]
    assert result["other seeds differ"] == 12
    assert result["worst logprob"] <= LOGPROB_TOLERANCE
    assert result["partial"] == (6, 6, "abort")
    assert result["resumed equals uninterrupted"]
    assert result["spans"] == ((0, 0), (6, 5))
    assert result["blocks returned"]
    assert result["in flight over a suspend"]
    assert ((0, 5), (5, 6)) in result["spans over a suspend"]
    assert all(span[0][0] == 0 for span in result["spans over a suspend"])
    assert result["stop id"] == (True, "stop", True, True)
    assert result["top logprobs"]


def _distribution_case(rank: int, world: int, checkpoint: str, count: int) -> dict[str, Any]:
    import torch
    from megatron_ranks import build_rank, drain
    from tiny_models import load_reference

    from megatron_rollout.requests import GenerationRequest, SamplingParams

    engine = build_rank(checkpoint, max_requests=64).engine
    prompt = (3, 1, 4, 1, 5)

    def draw(**params: Any) -> list[int]:
        for i in range(count):
            sampling = SamplingParams(max_new_tokens=1, seed=i * 7919 + 1, **params)
            engine.add(GenerationRequest(str(i), prompt, sampling))
        return [o.output_ids[0] for o in drain(engine).values()]

    with torch.no_grad():
        logits = load_reference(checkpoint)(torch.tensor([prompt])).logits[0, -1].float()
    expected = torch.softmax(logits / 1.3, -1)
    seen = torch.bincount(torch.tensor(draw(temperature=1.3)), minlength=logits.numel())
    likely = expected * count >= 5
    chi2 = float((((seen - count * expected) ** 2) / (count * expected))[likely].sum())
    order = torch.argsort(logits, descending=True)
    probabilities = torch.softmax(logits[order[:5]] / 1.0, -1)
    nucleus = int((probabilities.cumsum(0) - probabilities < 0.6).sum())
    return {
        "chi2": chi2,
        "cells": int(likely.sum()),
        "top-k and top-p": set(draw(top_k=5, top_p=0.6)) <= set(order[:nucleus].tolist()),
        "top-k": set(draw(top_k=5)) <= set(order[:5].tolist()),
        "top_p 0": set(draw(top_p=0.0)) == {int(order[0])},
    }


def test_the_noise_follows_the_distribution(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    (result,) = one_rank.run(_distribution_case, str(checkpoints["llama"]), 1500)
    # 99.99 % point of chi-square with n cells, by Wilson and Hilferty
    n = result["cells"]
    assert result["chi2"] < n * (1 - 2 / (9 * n) + 3.72 * (2 / (9 * n)) ** 0.5) ** 3
    assert result["top-k and top-p"]
    assert result["top-k"]
    assert result["top_p 0"]


def _limits_case(rank: int, world: int, checkpoint: str) -> dict[str, Any]:
    from megatron_ranks import build_rank, drain

    from megatron_rollout.requests import GenerationRequest, SamplingParams

    engine = build_rank(checkpoint).engine
    refused = {}
    for name, prompt in {"empty": (), "long": (1,) * 129, "unknown token": (1, 500)}.items():
        try:
            engine.add(GenerationRequest(name, prompt))
        except ValueError as error:
            refused[name] = str(error)
    engine.add(GenerationRequest("full", (1,) * 128, SamplingParams(max_new_tokens=9)))
    engine.add(GenerationRequest("none", (1, 2), SamplingParams(max_new_tokens=0)))
    try:
        engine.add(GenerationRequest("full", (1,)))
    except ValueError as error:
        refused["twice"] = str(error)
    outputs = drain(engine)
    return {
        "refused": refused,
        "full": (len(outputs["full"].output_ids), outputs["full"].truncated),
        "none": (outputs["none"].output_ids, outputs["none"].finish_reason),
    }


def test_g14_limits_and_refusals(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    (result,) = one_rank.run(_limits_case, str(checkpoints["qwen2"]))
    assert "empty" in result["refused"]["empty"]
    assert "129" in result["refused"]["long"] and "128" in result["refused"]["long"]
    assert "500" in result["refused"]["unknown token"] and "128" in result["refused"]["unknown token"]
    assert "in flight" in result["refused"]["twice"]
    assert result["full"] == (1, True)
    assert result["none"] == ((), "length")
