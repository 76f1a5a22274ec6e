"""Tiny Hugging Face models with random weights, and what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3-tied")
VOCAB = 128


def make_model(family: str, directory: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Write config and safetensors of a random model; returns the directory."""
    import torch
    import transformers

    torch.manual_seed(seed)
    options: dict[str, Any] = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        tie_word_embeddings=family.endswith("-tied"),
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family.split("-")[0]]
    model = model_class(config_class(**options)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return directory


def load_reference(directory: str | Path) -> Any:
    """The checkpoint as transformers runs it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """The model's own greedy continuation by plain forwards."""
    import torch

    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def logprobs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """log_softmax(logits / temperature) of the output's tokens."""
    import torch

    ids = [*prompt, *output]
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].float() / (temperature or 1.0), -1)
    return [float(scores[len(prompt) - 1 + i, token]) for i, token in enumerate(output)]


def random_prompts(count: int, *, shortest: int = 3, longest: int = 40, seed: int = 5) -> list[list[int]]:
    import random

    rng = random.Random(seed)
    return [[rng.randrange(120) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]
