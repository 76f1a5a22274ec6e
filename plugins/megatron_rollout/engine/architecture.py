"""What a Hugging Face `config.json` says of a model, checked: the families that the engine builds, and refusals.

Pure: reads a mapping or a directory's config.json; torch and megatron-core stay out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: model_type → (QKV bias, QK norm)
FAMILIES = {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
#: the only llama3 rope scaling that megatron-core's rotary embedding computes (its factor is free)
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Architecture:
    """A dense decoder. `rope_factor` is the llama3 scaling factor, None without scaling."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def num_parameters(self) -> int:
        kv = self.num_kv_heads * self.head_dim
        q = self.num_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)
        layer = attention + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size
        layer += 2 * self.head_dim if self.qk_norm else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def check_parallel(self, *, tp: int, pp: int, option_prefix: str = "--") -> None:
        """Raise one ValueError with everything that this model and a TP·PP layout disagree on."""
        problems = []
        sizes = {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.ffn_hidden_size,
            "vocab_size": self.vocab_size,
        }
        for name, size in sizes.items():
            if size % tp:
                problems.append(
                    f"{option_prefix}tensor-model-parallel-size {tp} does not divide the model's {name} {size}"
                )
        if self.num_layers % pp:
            problems.append(
                f"{option_prefix}pipeline-model-parallel-size {pp} does not divide the model's "
                f"num_hidden_layers {self.num_layers}"
            )
        if problems:
            raise ValueError("; ".join(problems))


def read_architecture(checkpoint: str | Path) -> Architecture:
    """Architecture of a Hugging Face checkpoint directory.

    Raises FileNotFoundError without config.json, ValueError for an unreadable one or a model that is refused; both name
    the file.
    """
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; a Hugging Face checkpoint directory with a config.json is needed"
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    try:
        return architecture_from_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """Architecture of a Hugging Face config mapping; ValueError with every reason why it cannot be built."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    qkv_bias, qk_norm = FAMILIES[family]
    problems = _refusals(config, family)
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    problems += [f"{name} is missing" for name in required if not isinstance(config.get(name), int)]
    if problems:
        raise ValueError("; ".join(problems))
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    return Architecture(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_factor=_rope_factor(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        eos_token_ids=_ids(config.get("eos_token_id")),
        pad_token_id=config.get("pad_token_id"),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(kind, parameters) of the rotary scaling, from either of the two places transformers has kept it."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return parameters.get("rope_type") or parameters.get("type") or "default", parameters


def _rope_factor(config: Mapping[str, Any]) -> float | None:
    kind, parameters = _rope(config)
    return None if kind == "default" else float(parameters["factor"])


def _refusals(config: Mapping[str, Any], family: str) -> list[str]:
    problems = [
        f"{key}={config[key]}: mixture-of-experts models are not supported" for key in _MOE_KEYS if config.get(key)
    ]
    if config.get("vision_config") or config.get("audio_config"):
        problems.append("multimodal models are not supported")
    if config.get("quantization_config"):
        problems.append("quantization_config: quantised checkpoints are not supported")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("mlp_bias"):
        problems.append("mlp_bias=true is not supported")
    if config.get("attention_bias"):
        problems.append(
            f"attention_bias=true is not supported for {family} (it also puts a bias on the output projection)"
        )
    if config.get("use_sliding_window"):
        problems.append("use_sliding_window=true is not supported")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor {config['partial_rotary_factor']} is not supported")
    kind, parameters = _rope(config)
    if kind == "llama3":
        for name, value in _LLAMA3_ROPE.items():
            if parameters.get(name) != value:
                problems.append(
                    f"rope scaling llama3 with {name}={parameters.get(name)} is not supported, only {value}"
                )
        if not parameters.get("factor"):
            problems.append("rope scaling llama3 lacks its factor")
    elif kind != "default":
        problems.append(f"rope scaling {kind!r} is not supported, only 'default' and 'llama3'")
    return problems
