"""Model shapes by name, as Hugging Face configs without weights: benchmarks draw those on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = dict(
    max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1_000_000.0, hidden_act="silu", eos_token_id=0
)
#: Qwen2 and Llama-3 proportions; the tiny ones are for a CPU core.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-cpu": dict(
        model_type="qwen2", num_hidden_layers=4, hidden_size=256, intermediate_size=704, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=2048, tie_word_embeddings=True,
    ),
    "small-cpu": dict(
        model_type="qwen2", num_hidden_layers=8, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=8192, tie_word_embeddings=True,
    ),
    "0.5b": dict(
        model_type="qwen2", num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    ),
    "1.5b": dict(
        model_type="qwen2", num_hidden_layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    ),
    "8b": dict(
        model_type="llama", num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
    ),
}  # fmt: skip


def write_config(name: str, directory: Path) -> Path:
    """A checkpoint directory of shape `name` with a config.json and nothing else.

    Raises ValueError for an unknown name.
    """
    if name not in SHAPES:
        raise ValueError(f"--model must be one of {', '.join(SHAPES)}, got {name!r}")
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_COMMON | SHAPES[name]))
    return path
