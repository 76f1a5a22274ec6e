"""What one sample asks of an engine and what comes back. Pure data: no torch, no ray.

Every layer of the rollout side speaks these types: the driver's handle (`generation.py`), the router, a cell's
leader, the engine, and both HTTP wires. They pickle, and they hold plain Python values only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

#: How a sample ended. "abort" keeps what was generated so far, "error" carries `GenerationOutput.error`.
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response.

    temperature: 0 means greedy (argmax); negative or not finite is refused. Logprobs are those of the distribution
        that was sampled from after temperature and before top-p/top-k cut it: log_softmax(logits / temperature);
        under greedy, log_softmax(logits). That is what training recomputes.
    top_p: nucleus, in (0, 1]; 1 is off. 0 is defined as "the most likely token only".
    top_k: number of tokens kept; -1 or 0 is off.
    max_new_tokens: most tokens to generate (0 is allowed: the prompt is scored and nothing is generated).
    stop: strings; generation ends when one appears in the text. stop_token_ids: ids that end it beside the
        tokenizer's EOS (`ignore_eos` turns the latter off). The token that ended it is part of the response.
    seed: noise of this sample; the same seed draws the same noise on whatever cell the sample runs. None: the
        engine draws one.
    top_logprobs: how many alternatives to report with each token.
    prompt_logprobs: also score the prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not math.isfinite(self.temperature) or self.temperature < 0:
            problems.append(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 <= self.top_p <= 1:
            problems.append(f"top_p must be in [0, 1], got {self.top_p}")
        if self.top_k < -1:
            problems.append(f"top_k must be -1 (off), 0 (off) or positive, got {self.top_k}")
        if self.max_new_tokens < 0:
            problems.append(f"max_new_tokens must be >= 0, got {self.max_new_tokens}")
        if any(not s for s in self.stop):
            problems.append("stop strings must not be empty")
        if self.top_logprobs < 0:
            problems.append(f"top_logprobs must be >= 0, got {self.top_logprobs}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class GenerationRequest:
    """One sample to generate.

    request_id: unique among the requests in flight. group: samples of one prompt share it (prefix affinity).
    output_ids/logprobs/weight_versions: what an aborted earlier run of this sample had generated already; the engine
    goes on from there with what is left of `sampling.max_new_tokens`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    group: str | None = None
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    weight_versions: tuple[tuple[int, int], ...] = ()

    @property
    def cost(self) -> int:
        """Tokens this request may still put through an engine: what the router balances."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens

    def resumed_from(self, partial: GenerationOutput) -> GenerationRequest:
        """The request that finishes `partial` (an aborted output of this one)."""
        return replace(
            self, output_ids=partial.output_ids, logprobs=partial.logprobs, weight_versions=partial.weight_versions
        )


@dataclass(frozen=True)
class TokenDelta:
    """Tokens that a request gained since the last delta (streaming)."""

    request_id: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # per token: ((id, logprob), ...) best first


@dataclass(frozen=True)
class GenerationOutput:
    """What became of one request. `output_ids` and `logprobs` always have equal lengths.

    weight_versions: spans ((start, version), ...): output tokens from `start` (0-based, within the response) up to the
        next span were produced by `version`. Never empty if there is a token.
    finish_reason: one of FINISH_REASONS. matched_stop: the stop string or token id that ended it.
    prompt_logprobs: [len(prompt)], first None, if asked for.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "stop"
    matched_stop: str | int | None = None
    weight_versions: tuple[tuple[int, int], ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[float | None, ...] | None = None
    cached_tokens: int = 0
    error: str | None = None
    cell: int | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"
