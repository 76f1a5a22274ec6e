"""A tiny Hugging Face checkpoint with random weights and a character tokenizer, as `transformers` loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_checkpoint(
    directory: str | Path,
    *,
    characters: str,
    seed: int = 0,
    kind: str = "qwen3",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    max_positions: int = 64,
    tied: bool = True,
) -> Path:
    """Write config.json, model.safetensors and tokenizer files; every character of `characters` is one token.

    kind: llama, qwen2 or qwen3. The same arguments give the same files.
    """
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    vocabulary = [PAD, EOS, UNKNOWN, *characters]
    vocabulary += [f"<unused{i}>" for i in range(-len(vocabulary) % 8)]  # a multiple of 8 leaves room for TP
    options: dict[str, Any] = dict(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=vocabulary.index(EOS),
        pad_token_id=vocabulary.index(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**options))
    model.save_pretrained(directory)
    _tokenizer(vocabulary).save_pretrained(str(directory))
    return Path(directory)


def _tokenizer(vocabulary: list[str]) -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    )
