"""Driving one engine to its end, and the plain forward pass that its tokens and logprobs are compared with."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams


def prompts(n: int, vocab: int, *, shortest: int = 4, longest: int = 100, seed: int = 7) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator).tolist()
    return [tuple(torch.randint(1, vocab, (length,), generator=generator).tolist()) for length in lengths]


def add_all(engine: Any, texts: list[tuple[int, ...]], sampling: Any, prefix: str = "r") -> list[str]:
    """sampling(i) → SamplingParams of the i-th prompt."""
    ids = []
    for i, text in enumerate(texts):
        ids.append(f"{prefix}{i}")
        engine.add(GenerationRequest(ids[-1], text, sampling(i)))
    return ids


def finish(engine: Any, timeout_s: float = 120.0) -> dict[str, GenerationOutput]:
    """Step until nothing is left."""
    outputs: dict[str, GenerationOutput] = {}
    deadline = time.monotonic() + timeout_s
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step().finished}
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine still has work after {timeout_s} s")
    return outputs


def generate(rank: Any, texts: list[tuple[int, ...]], sampling: Any, prefix: str = "r") -> list[GenerationOutput]:
    ids = add_all(rank.engine, texts, sampling, prefix)
    outputs = finish(rank.engine)
    return [outputs[i] for i in ids]


@torch.no_grad()
def plain_logits(rank: Any, output: GenerationOutput) -> torch.Tensor:
    """Logits [len(output_ids), vocab] in float32 of the model's ordinary forward pass over prompt and response."""
    rank.engine.suspend()  # the model's inference mode is global
    try:
        return _logits(rank.model, output, rank.architecture.vocab_size)
    finally:
        rank.engine.resume()


def _logits(model: torch.nn.Module, output: GenerationOutput, vocab: int) -> torch.Tensor:
    ids = torch.tensor([[*output.prompt_ids, *output.output_ids]], device="cuda")
    logits = model(ids, torch.arange(ids.shape[1], device="cuda")[None], None)
    return logits[0, len(output.prompt_ids) - 1 : -1, :vocab].float()


@torch.no_grad()
def full_precision_logits(rank: Any, outputs: list[GenerationOutput]) -> list[torch.Tensor]:
    """As `plain_logits`, of the same weights in float32."""
    from megatron_rollout.engine.model import build_model, transformer_config

    config = transformer_config(rank.architecture, dtype=torch.float32)
    model = build_model(rank.architecture, config, max_sequence_length=512).eval()
    for exact, rounded in zip(model.parameters(), rank.model.parameters(), strict=True):
        exact.copy_(rounded)
    rank.engine.suspend()
    try:
        return [_logits(model, output, rank.architecture.vocab_size) for output in outputs]
    finally:
        rank.engine.resume()


def greedy(n: int) -> Any:
    return lambda i: SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True)
