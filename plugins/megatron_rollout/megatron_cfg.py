"""The megatron_cfg of the rollout models: the training configuration with the generation options laid over it.

Works on plain mappings in NeMo RL's form, so that code written for it ports:
`{"megatron_cfg": {...}, "generation": {"colocated": {"enabled": bool}, "mcore_generation_config": {...}}}`.
Every function returns a fresh dict, nested values included, and leaves its argument alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from megatron_rollout.config import KV_MODES, ConfigError, LayoutConfig
from megatron_rollout.layout import frontend_ranks as _frontend_ranks
from megatron_rollout.layout import nvlink_domain_span as _span

_LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "transformer_impl",
)
_EXPERT_KEYS = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def layout_of(megatron_cfg: Mapping[str, Any]) -> LayoutConfig:
    """The layout that a megatron_cfg asks for; keys that are absent or None have Megatron's defaults.

    A megatron_cfg does not say how many ranks there are. Data parallelism is taken as the least that the expert axes
    need, so that a legal configuration is never refused here for its rank count.
    """
    chosen = {key: megatron_cfg[key] for key in _LAYOUT_KEYS + _EXPERT_KEYS if megatron_cfg.get(key) is not None}
    sizes = [chosen.get(key, 1) for key in _EXPERT_KEYS]
    if all(isinstance(size, int) and size >= 1 for size in sizes):
        chosen["data_parallel_size"] = sizes[0] * sizes[1]
    return LayoutConfig(**chosen)


def merged_inference_megatron_cfg(config: Mapping[str, Any]) -> dict[str, Any]:
    """Training configuration with the generation options on top, without activation checkpointing and with CP 1.

    Raises ConfigError if the generation options set a context-parallel size other than 1, or ask for the
    inference_optimized transformer in a layout that it cannot have (see `LayoutConfig`).
    """
    options = config["generation"].get("mcore_generation_config") or {}
    problems = []
    if (cp := options.get("context_parallel_size", 1)) != 1:
        problems.append(f"mcore_generation_config.context_parallel_size must be 1 (generation has none), got {cp!r}")
    merged = deepcopy({**config["megatron_cfg"], **options})
    merged |= {"activation_checkpointing": False, "context_parallel_size": 1}
    try:
        layout_of(merged)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return merged


def dedicated_inference_megatron_cfg(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The merged configuration where generation needs a model of its own, None where it can share the trainer's.

    It does iff TP, PP, EP, expert TP, CP or the transformer implementation differ; training with CP > 1 always does.
    """
    merged = merged_inference_megatron_cfg(config)
    return merged if layout_of(merged).differs_from(layout_of(config["megatron_cfg"])) else None


def effective_megatron_cfg(config: Mapping[str, Any]) -> dict[str, Any]:
    """The megatron_cfg that the rollout models run with.

    Colocated: the dedicated one if there is one, else a copy of the training configuration. Otherwise the merged one.
    """
    if is_colocated(config):
        return dedicated_inference_megatron_cfg(config) or deepcopy(dict(config["megatron_cfg"]))
    return merged_inference_megatron_cfg(config)


def nvlink_domain_span(config: Mapping[str, Any]) -> int:
    """GPUs that must share an NVLink domain: those of the rollout layout and, colocated, of the training layout."""
    layouts = [layout_of(effective_megatron_cfg(config))]
    if is_colocated(config):
        layouts.append(layout_of(config["megatron_cfg"]))
    return _span(*(layout.parallel for layout in layouts))


def frontend_ranks(world_size: int, config: Mapping[str, Any]) -> list[int]:
    """Ranks of `world_size` rollout ranks that host an HTTP server: `range(0, world_size // PP, TP)`."""
    layout = layout_of(effective_megatron_cfg(config))
    return _frontend_ranks(world_size, tp=layout.tensor_model_parallel_size, pp=layout.pipeline_model_parallel_size)


def validate_settings(policy: Mapping[str, Any], *, recompute_kv_cache_after_weight_updates: bool) -> None:
    """Refuses what generation by Megatron cannot honour.

    Raises ConfigError, all violations at once: the trainer is not Megatron; `recompute_kv_cache_after_weight_updates`
    disagrees with the KV mode (recomputing is what the engine does in mode "recompute", and only there); the merged
    layout is not a legal one.
    """
    problems = []
    training = policy.get("megatron_cfg") or {}
    if not training.get("enabled"):
        problems.append("generation by Megatron needs the Megatron trainer: megatron_cfg.enabled is not set")
    generation = policy.get("generation") or {}
    mode = (generation.get("mcore_generation_config") or {}).get("kv_cache_management_mode", "persist")
    if mode not in KV_MODES:
        choices = list(KV_MODES)
        problems.append(f"mcore_generation_config.kv_cache_management_mode must be one of {choices}, got {mode!r}")
    elif recompute_kv_cache_after_weight_updates != (mode == "recompute"):
        problems.append(
            f"recompute_kv_cache_after_weight_updates={recompute_kv_cache_after_weight_updates} disagrees with "
            f"kv_cache_management_mode={mode!r}: it is true exactly with 'recompute'"
        )
    try:
        merged_inference_megatron_cfg({"megatron_cfg": training, "generation": generation})
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def is_colocated(config: Mapping[str, Any]) -> bool:
    """Whether the trainer's processes generate as well."""
    return bool((config["generation"].get("colocated") or {}).get("enabled", False))
