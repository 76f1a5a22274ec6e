"""What a host's options mean for its rollout cells. Pure: reads the host's parsed options, starts nothing.

A host (Miles, slime) keeps its own options; those that have no meaning for a Megatron cell are refused here, all in one
error, so that no run silently does something else than it says.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.config import ConfigError, EngineConfig, LayoutConfig, RolloutConfig
from megatron_rollout.engine.architecture import read_architecture
from trainer_hooks.arguments import add_rollout_backend_arguments

BACKEND = "megatron"

#: SGLang's settings of one group of engines that a cell has as well (`--sglang-config`, per-group overrides).
_OVERRIDES = ("model_path", "tp_size", "pp_size", "context_length", "max_running_requests")
#: Those that say nothing a cell would do differently.
_WITHOUT_EFFECT = ("enable_memory_saver", "enable_return_routed_experts", "enable_return_indexer_topk", "dp_size", "ep_size")


def add_host_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What a launcher or a rollout function adds to its host's parser: the backend's options and the cells' token."""
    add_rollout_backend_arguments(parser)
    if "--rollout-http-token" not in parser._option_string_actions:
        parser.add_argument(
            "--rollout-http-token",
            default="auto",
            help="bearer token of the cells' HTTP servers (default: a new one for each run)",
        )
    return parser


def wants_megatron(args: Any) -> bool:
    """Whether the run's backend is ours."""
    return getattr(args, "rollout_backend", None) == BACKEND


def common_problems(args: Any) -> list[str]:
    """What both hosts offer and a Megatron cell does not do, one line each, naming the option."""

    def given(name: str, *nothing: object) -> bool:
        return getattr(args, name, None) not in (None, False, 0, "", *nothing)

    problems = []
    for name, hint in (
        ("sglang_dp_size", "a rollout cell is one replica; more GPUs (--rollout-num-gpus) make more cells"),
        ("sglang_ep_size", "mixture-of-experts models are not supported"),
    ):
        if given(name, 1):
            problems.append(f"{_flag(name)} {getattr(args, name)}: {hint}")
    for name, hint in (
        ("prefill_num_servers", "cells prefill and decode in one engine"),
        ("fp16", "cells compute in bfloat16 (float32 without GPUs)"),
        ("use_rollout_routing_replay", "mixture-of-experts models are not supported"),
        ("use_rollout_indexer_replay", "sparse-attention models are not supported"),
        ("sglang_speculative_algorithm", "cells do not decode speculatively"),
        ("use_distributed_post", "its actors do not carry the cells' token; leave it out"),
    ):
        if given(name):
            problems.append(f"{_flag(name)}: {hint}")
    return problems


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def raise_if(problems: list[str]) -> None:
    """Raises ValueError with all `problems`, one line each."""
    if problems:
        raise ConfigError(f"--rollout-backend {BACKEND} cannot run this: {line}" for line in problems)


def parallel_sizes(args: Any, num_gpus: int, overrides: Mapping[str, Any]) -> tuple[int, int]:
    """(TP, PP) of a cell on `num_gpus` GPUs: our options, else the group's overrides, else SGLang's sizes.

    Raises ConfigError unless they multiply to `num_gpus`.
    """
    pp = getattr(args, "rollout_pipeline_model_parallel_size", None) or overrides.get("pp_size")
    pp = int(pp or getattr(args, "sglang_pp_size", None) or 1)
    tp = getattr(args, "rollout_tensor_model_parallel_size", None) or overrides.get("tp_size")
    tp = int(tp or max(1, num_gpus // pp))
    if tp * pp != num_gpus:
        raise ConfigError([f"a rollout cell of TP {tp} x PP {pp} does not fill --rollout-num-gpus-per-engine {num_gpus}"])
    return tp, pp


def rollout_spec(
    args: Any, *, num_gpus: int, device: str, overrides: Mapping[str, Any] | None = None, load_weights: bool = True
) -> RolloutSpec:
    """What each rank of an engine on `num_gpus` GPUs is built from.

    device: "cuda" or "cpu". overrides: the host's settings of one group of engines, by SGLang's names.
    Raises ConfigError (all that is wrong with the options), ValueError or OSError for the checkpoint.
    """
    settings = {name.replace("-", "_"): value for name, value in (overrides or {}).items()}
    unknown = sorted(set(settings) - {*_OVERRIDES, *_WITHOUT_EFFECT})
    if unknown:
        raise ConfigError([f"settings of an engine group that a Megatron cell does not have: {', '.join(unknown)}"])
    tp, pp = parallel_sizes(args, num_gpus, settings)
    checkpoint = str(settings.get("model_path") or args.hf_checkpoint)
    architecture = read_architecture(checkpoint)
    architecture.check_parallel(tp=tp, pp=pp, option_prefix="--rollout-")

    def first(*values: Any) -> Any:
        return next((value for value in values if value), None)

    length = first(
        settings.get("context_length"),
        getattr(args, "rollout_max_context_len", None),
        getattr(args, "sglang_context_length", None),
        architecture.max_positions,
    )
    engine: dict[str, Any] = {
        "max_sequence_length": length,
        "kv_cache_management_mode": args.rollout_kv_mode,
        "enable_prefix_caching": args.rollout_prefix_cache,
        "attention_backend": args.rollout_attention_backend,
        "deterministic": args.deterministic,
    }
    requests = first(
        args.rollout_max_requests,
        settings.get("max_running_requests"),
        getattr(args, "sglang_max_running_requests", None),
    )
    if requests is not None:
        engine["max_requests"] = requests
    if args.rollout_kv_cache_gb is not None:
        engine["buffer_size_gb"] = args.rollout_kv_cache_gb
    config = RolloutConfig(
        layout=LayoutConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp),
        engine=EngineConfig.for_device(device, **engine),
    )
    return RolloutSpec(
        hf_checkpoint=checkpoint,
        engine=config.engine,
        tp=tp,
        pp=pp,
        dtype=config.engine.dtype,
        load_weights=load_weights,
    )


def visible_device(physical: int, environ: Mapping[str, str] = os.environ) -> str:
    """The entry of CUDA_VISIBLE_DEVICES for the node's GPU number `physical`.

    Under a narrowed CUDA_VISIBLE_DEVICES it may name a GPU of the node or count those visible, as the hosts allow.
    Raises ValueError if it is neither.
    """
    listed = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    if not listed or str(physical) in listed:
        return str(physical)
    if 0 <= physical < len(listed):
        return listed[physical]
    raise ValueError(f"GPU {physical} is not among CUDA_VISIBLE_DEVICES={','.join(listed)}")
