"""What the trainer's command says about wrong input: one clear line each, exit status 2, nothing started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_hooks.trainer.__main__ import main
from trainer_hooks.trainer.tiny_checkpoint import make_checkpoint

BACKEND = ["--rollout-backend", "megatron"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), characters="ab>")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": "a>", "label": "a"}) + "\n" for _ in range(4)))
    return path


def refuse(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The lines on stderr of a run that ends with status 2 and without a traceback or Ray."""
    import ray

    try:
        status = main([*BACKEND, *argv])
    except SystemExit as stopped:
        status = stopped.code  # type: ignore[assignment]
    assert status == 2
    assert not ray.is_initialized()
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines), lines
    return lines


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refuse(capsys, "--no-such-option", "3")
    assert "--no-such-option" in line


def test_all_violations_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refuse(
        capsys,
        "--rollout-temperature",
        "-0.5",
        "--num-rollout",
        "0",
        "--rollout-top-p",
        "1.5",
        "--use-dynamic-batch-size",
    )
    text = "\n".join(lines)
    for part in ("--rollout-temperature", "-0.5", "--num-rollout", "--rollout-top-p", "1.5", "--max-tokens-per-gpu"):
        assert part in text
    assert len(lines) == 4


def test_a_missing_checkpoint_is_named(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    (line,) = refuse(capsys, "--hf-checkpoint", "/nowhere", "--prompt-data", str(prompts))
    assert "--hf-checkpoint" in line and "/nowhere" in line


def test_an_unknown_model_type_is_named(capsys: pytest.CaptureFixture[str], prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    (line,) = refuse(capsys, "--hf-checkpoint", str(tmp_path), "--prompt-data", str(prompts))
    assert "mamba" in line and "config.json" in line


def test_a_layout_that_does_not_divide_the_model(
    checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str], prompts: Path
) -> None:
    (line,) = refuse(
        capsys,
        "--hf-checkpoint",
        str(checkpoints["qwen3"]),
        "--prompt-data",
        str(prompts),
        "--tensor-model-parallel-size",
        "3",
    )
    assert "--tensor-model-parallel-size 3" in line and "num_key_value_heads 2" in line


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"input": "a>"}\n{"prompt": "b>"}\n', ("line 2", "'input'", "--input-key")),
        ('{"input": "a>"}\nnot json\n', ("line 2", "JSON")),
        ('{"input": 3}\n', ("line 1", "string")),
        ("\n", ("no prompt",)),
    ],
)
def test_a_bad_line_is_named(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, content: str, parts: tuple[str, ...]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    (line,) = refuse(capsys, "--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--rm-type", "exact_match")
    for part in (*parts, "--prompt-data", "data.jsonl"):
        assert part in line


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        (["--rm-type", "nonsense"], "nonsense"),
        (["--custom-rm-path", "no_such_module.reward"], "no_such_module"),
        (["--custom-rm-path", "json.no_such_function"], "no_such_function"),
        ([], "--custom-rm-path"),
    ],
)
def test_a_reward_that_is_not_there(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, reward: list[str], part: str
) -> None:
    (line,) = refuse(capsys, "--hf-checkpoint", str(checkpoint), "--prompt-data", str(prompts), *reward)
    assert part in line


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--rollout-data-parallel-size", "2"], "--num-rollout-cells"),
        (["--rollout-context-parallel-size", "2"], "--rollout-context-parallel-size"),
        (["--expert-model-parallel-size", "2"], "--expert-model-parallel-size"),
        (["--colocate", "--num-trainer-cells", "2", "--num-rollout-cells", "3"], "--num-rollout-cells"),
    ],
)
def test_layouts_that_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], part: str) -> None:
    (line,) = refuse(capsys, *options)
    assert part in line
