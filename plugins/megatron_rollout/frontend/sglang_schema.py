"""Requests of the SGLang wire, by the names that its clients (slime, Miles, sglang-router) send."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from megatron_rollout.frontend.schema import Integers, Strings, WireModel, sampling_params
from megatron_rollout.requests import SamplingParams


class SGLangSampling(WireModel):
    """`sampling_params`. Unknown names are refused: a misspelt one would silently sample something else.

    skip_special_tokens, no_stop_trim: of the text only. spaces_between_special_tokens is accepted and changes nothing
    (fast tokenizers put none).
    """

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int = Field(128, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Strings = Field(default_factory=list)
    stop_token_ids: Integers = Field(default_factory=list)
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: int = Field(1, ge=1)
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    stream_interval: int = Field(1, ge=1)

    refused: ClassVar[dict[str, Any]] = {
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_regex": None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "logit_bias": None,
        "custom_params": None,
    }

    def sampling(self, top_logprobs: int, prompt_logprobs: bool) -> SamplingParams:
        """The engine's parameters, as the first sample of the call gets them."""
        return sampling_params(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.sampling_seed,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class GenerateRequest(WireModel):
    """`/generate`. One of text and input_ids, each single or a batch; per-sample fields single or a list a batch.

    logprob_start_len: first prompt position to report in input_token_logprobs, -1 for none of the prompt.
    """

    rid: str | list[str] | None = None
    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False

    refused: ClassVar[dict[str, Any]] = {
        "input_embeds": None,
        "image_data": None,
        "video_data": None,
        "audio_data": None,
        "token_ids_logprob": None,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "return_indexer_topk": False,
        "return_sampling_mask": False,
        "session_params": None,
        "lora_path": None,
        "custom_logit_processor": None,
    }


class AbortRequest(WireModel):
    rid: str = ""
    abort_all: bool = False


class PauseRequest(WireModel):
    """mode: "abort" ends what runs, "retract" gives up its KV cache, "in_place" keeps it."""

    mode: str = Field("abort", pattern="^(abort|retract|in_place)$")


class TagsRequest(WireModel):
    """tags: of "weights" and "kv_cache"; absent or null for all."""

    tags: list[str] | None = None


class InitGroupRequest(WireModel):
    master_address: str
    master_port: int = Field(ge=0, le=65535)
    rank_offset: int = Field(ge=0)
    world_size: int = Field(ge=1)
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroupRequest(WireModel):
    group_name: str = "weight_update_group"


class _UpdateRequest(WireModel):
    """flush_cache: drop the prefix cache afterwards. weight_version: stamped once the weights are in."""

    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | int | None = None


class DistributedUpdateRequest(_UpdateRequest):
    """A bucket of tensors by Hugging Face names, broadcast over `group_name` in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"

    @model_validator(mode="after")
    def _equal_lengths(self) -> DistributedUpdateRequest:
        lengths = len(self.names), len(self.dtypes), len(self.shapes)
        if len(set(lengths)) != 1:
            raise ValueError(
                "names, dtypes and shapes must have equal lengths, they have {}, {} and {}".format(*lengths)
            )
        return self


class TensorUpdateRequest(_UpdateRequest):
    """serialized_named_tensors: one base64 string a TP rank."""

    serialized_named_tensors: list[str]


class DiskUpdateRequest(_UpdateRequest):
    model_path: str = Field(min_length=1)


class VersionRequest(WireModel):
    new_version: str | int
    abort_all_requests: bool = False


class SelectorRequest(WireModel):
    selector: str = "all"


class CheckRequest(WireModel):
    action: str = "checksum"


class ProfileRequest(WireModel):
    output_dir: str | None = None
    start_step: int | None = Field(None, ge=0)
    num_steps: int | None = Field(None, ge=1)
    activities: list[str] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None
