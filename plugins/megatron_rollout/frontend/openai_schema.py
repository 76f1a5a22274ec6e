"""Requests of the OpenAI wire (https://platform.openai.com/docs/api-reference), with the extras that RL needs."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from megatron_rollout.frontend.schema import Integers, Strings, WireModel, sampling_params
from megatron_rollout.requests import SamplingParams


class StreamOptions(WireModel):
    include_usage: bool = False


class _Sampled(WireModel):
    """Fields of both endpoints. Extras over OpenAI's: top_k, stop_token_ids, ignore_eos, skip_special_tokens,
    no_stop_trim (keep the stop in the text), return_token_ids (false: leave the token ids and logprobs for RL out)."""

    model: str | None = None
    n: int = Field(1, ge=1)
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Strings = Field(default_factory=list)
    stop_token_ids: Integers = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    return_token_ids: bool = True

    refused: ClassVar[dict[str, Any]] = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "min_tokens": 0,
        "logit_bias": None,
        "lora_path": None,
        "regex": None,
        "ebnf": None,
        "json_schema": None,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "return_indexer_topk": False,
        "custom_logit_processor": None,
    }

    def sampling(self, top_logprobs: int, prompt_logprobs: bool) -> SamplingParams:
        """The engine's parameters but for what each sample has of its own: its seed and its number of new tokens."""
        return sampling_params(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionRequest(_Sampled):
    """`/v1/completions`. prompt: text, token ids, or a list of texts and lists of ids."""

    prompt: Any = None
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)

    refused: ClassVar[dict[str, Any]] = {**_Sampled.refused, "suffix": None}


class ChatRequest(_Sampled):
    """`/v1/chat/completions`. Extras: input_ids (the prompt as it is, instead of rendering the messages),
    return_meta_info (SGLang's `meta_info` with each choice), chat_template_kwargs."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    input_ids: Any = None
    return_meta_info: bool = False
    return_prompt_token_ids: bool = False
