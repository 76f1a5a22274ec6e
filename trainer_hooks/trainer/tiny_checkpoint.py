"""A tiny Hugging Face checkpoint with random weights and a character tokenizer, as `transformers` loads them.

`python -m trainer_hooks.trainer.tiny_checkpoint DIR --kind llama` makes one to try the trainer with.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
KINDS = ("llama", "qwen2", "qwen3")


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
    chat_template: str | None = None,
) -> Path:
    """Write config.json, model.safetensors (float32) and the tokenizer's files; returns the directory.

    characters: each becomes one token; everything else is the unknown token. kind: one of KINDS. tied: one matrix for
    the embedding and the output. The same arguments give the same files. Raises ValueError for arguments that make no
    model.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    if problems := _problems(characters=characters, kind=kind, hidden=hidden, heads=heads, kv_heads=kv_heads):
        raise ValueError("; ".join(problems))
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    vocabulary = [PAD, EOS, UNKNOWN, *characters]
    vocabulary += [f"<unused{i}>" for i in range(-len(vocabulary) % 8)]  # a multiple of 8 leaves room for TP
    options: dict[str, Any] = dict(
        architectures=[model_class.__name__],
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=vocabulary.index(EOS),
        pad_token_id=vocabulary.index(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**options))
    directory = Path(directory)
    _tokenizer(vocabulary, chat_template).save_pretrained(str(directory))
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
    (directory / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    model.config.save_pretrained(directory)
    # not model.save_pretrained, which draws a progress bar for these few kilobytes
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _problems(*, characters: str, kind: str, hidden: int, heads: int, kv_heads: int) -> list[str]:
    problems = []
    if kind not in KINDS:
        problems.append(f"kind {kind!r} is none of {', '.join(KINDS)}")
    if twice := sorted({c for c in characters if characters.count(c) > 1}):
        problems.append(f"characters holds {', '.join(map(repr, twice))} more than once")
    if heads % kv_heads:
        problems.append(f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    return problems


def _tokenizer(vocabulary: list[str], chat_template: str | None) -> Any:
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    )
    fast.chat_template = chat_template
    return fast


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_hooks.trainer.tiny_checkpoint",
        description="Make a tiny Hugging Face checkpoint with random weights; each character is a token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("directory")
    parser.add_argument("--kind", choices=KINDS, default="qwen3")
    parser.add_argument("--characters", default=f"{string.digits}{string.ascii_lowercase} +-*=<>:,.?")
    parser.add_argument("--seed", type=int, default=0)
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv-heads": 2, "head-dim": 16, "ffn": 128, "max-positions": 512}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--untied", action="store_true", help="an output matrix of its own")
    arguments = vars(parser.parse_args(argv))
    try:
        made = make_checkpoint(arguments.pop("directory"), tied=not arguments.pop("untied"), **arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
