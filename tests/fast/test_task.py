"""The built-in task and its tiny checkpoint: honest splits, files that transformers loads, a recipe of real options."""

from __future__ import annotations

import argparse
import json
import os
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rollout.engine.architecture import read_architecture
from trainer_hooks.trainer.data import PromptData, read_pairs
from trainer_hooks.trainer.options import parse_args
from trainer_hooks.trainer.rewards import REWARDS
from trainer_hooks.trainer.sample import Sample
from trainer_hooks.trainer.task import DefaultRecipe, Task, make_task
from trainer_hooks.trainer.tiny_checkpoint import KINDS, main, make_checkpoint

RECIPE = DefaultRecipe()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"), seed=1)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digest(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


# -- prompts --------------------------------------------------------------------------------------------------------


def test_held_out_prompts_are_new_to_training_and_warm_up(task: Task) -> None:
    parts = [[r[task.input_key] for r in read(path)] for path in (task.train, task.evaluation, task.warmup)]
    everything = [prompt for part in parts for prompt in part]
    assert len(everything) == len(set(everything))
    assert len(parts[0]) >= RECIPE.rollout_batch_size
    assert len(parts[1]) >= 256, "few held-out prompts make a noisy reward"


def test_every_label_is_the_right_answer(task: Task) -> None:
    for path in (task.train, task.evaluation, task.warmup):
        for record in read(path):
            assert record[task.label_key] + ">" == record[task.input_key][-2::-1] + ">"


def test_the_reward_cannot_be_had_by_guessing(task: Task) -> None:
    """A fixed answer, a copy of the prompt or a guess from the task's letters earn nothing like what is learned."""
    reward, args = REWARDS[task.rm_type], argparse.Namespace()
    held_out = PromptData(task.evaluation, input_key=task.input_key, label_key=task.label_key).all()
    letters = sorted({c for s in held_out for c in s.label})
    rng = random.Random(0)

    def mean(answer: Any) -> float:
        return sum(reward(args, replace(s, response=answer(s))) for s in held_out) / len(held_out)

    assert mean(lambda s: s.label) == 1
    assert mean(lambda s: held_out[0].label) < 0.02
    assert mean(lambda s: "".join(rng.choices(letters, k=len(s.label)))) < 0.02
    assert mean(lambda s: s.prompt.removesuffix(">")) < 0.15, "palindromes"


def test_the_same_seed_makes_the_same_files(task: Task, tmp_path: Path) -> None:
    again, other = make_task(tmp_path / "again", seed=1), make_task(tmp_path / "other", seed=2)
    assert digest(again.checkpoint.parent) == digest(task.checkpoint.parent)
    assert read(other.evaluation) != read(task.evaluation)
    assert (other.checkpoint / "model.safetensors").read_bytes() != (task.checkpoint / "model.safetensors").read_bytes()


def test_prompts_answers_and_model_fit_one_another(task: Task) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task.checkpoint)
    pairs = read_pairs(task.warmup, input_key=task.input_key, label_key=task.label_key)
    pairs += [(r["input"], r["label"]) for path in (task.train, task.evaluation) for r in read(path)]
    for prompt, answer in pairs:
        ids = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids and len(ids) == len(prompt + answer)
        assert len(answer) + 1 <= RECIPE.rollout_max_response_len, "the answer and its EOS"
    longest = max(len(prompt) for prompt, _ in pairs)
    assert longest + RECIPE.rollout_max_response_len <= read_architecture(task.checkpoint).max_positions


# -- the recipe -----------------------------------------------------------------------------------------------------


def test_the_recipe_fills_only_what_was_not_given() -> None:
    args = parse_args(["--lr", "0", "--num-rollout", "3", "--num-trainer-cells", "1"])
    RECIPE.fill(args)
    assert (args.lr, args.num_rollout) == (0.0, 3)
    assert (args.num_trainer_cells, args.num_rollout_cells) == (1, 1), "cells are paired"
    given = {"lr", "num_rollout", "num_trainer_cells", "num_rollout_cells"}
    for name, value in asdict(RECIPE).items():
        assert name in given or getattr(args, name) == value, name


def test_the_recipe_is_two_cells_of_each_kind_and_whole_steps() -> None:
    args = parse_args([])
    RECIPE.fill(args)
    assert (args.num_trainer_cells, args.num_rollout_cells) == (2, 2)
    assert RECIPE.rollout_batch_size * RECIPE.n_samples_per_prompt % RECIPE.global_batch_size == 0


# -- the checkpoint -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_checkpoints_load_in_transformers(tmp_path: Path, kind: str, tied: bool, monkeypatch: Any) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = "ab >\n"
    path = make_checkpoint(
        tmp_path / kind, characters=text, kind=kind, tied=tied, layers=3, hidden=32, heads=4, kv_heads=1, head_dim=16
    )
    assert {p.name for p in path.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    with safe_open(path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer("z")["input_ids"] == [tokenizer.unk_token_id]
    assert model.config.eos_token_id == tokenizer.eos_token_id and model.config.pad_token_id == tokenizer.pad_token_id
    architecture = read_architecture(path)
    assert (architecture.family, architecture.num_layers, architecture.tied_embeddings) == (kind, 3, tied)
    assert architecture.num_parameters == sum(p.numel() for p in model.parameters())
    assert architecture.vocab_size % 8 == 0 and architecture.eos_token_ids == (tokenizer.eos_token_id,)


def test_a_chat_template_is_kept(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    path = make_checkpoint(tmp_path, characters="ab>", chat_template=template)
    (tmp_path / "prompts.jsonl").write_text('{"input": "ab"}\n')
    tokenizer = AutoTokenizer.from_pretrained(path)
    data = PromptData(tmp_path / "prompts.jsonl", input_key="input", tokenizer=tokenizer, apply_chat_template=True)
    assert data.all() == [Sample(prompt="ab>")]


def test_arguments_that_make_no_model_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind 'gpt2' .*characters holds 'a' more than once; 4 heads .* 3 key-value"):
        make_checkpoint(tmp_path, characters="aab", kind="gpt2", kv_heads=3)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "made"), "--kind", "qwen2", "--layers", "1", "--untied"]) == 0
    assert os.path.samefile(capsys.readouterr().out.strip(), tmp_path / "made")
    assert read_architecture(tmp_path / "made").family == "qwen2"
    assert main([str(tmp_path / "made"), "--kv-heads", "3"]) == 2
    assert capsys.readouterr().err == "error: 4 heads cannot share 3 key-value heads evenly\n"
