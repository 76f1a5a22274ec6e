"""The main job as its user runs it: a process of its own, real Ray, real cells. Each run has a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 900.0
_COMMAND = [sys.executable, "-m", "trainer_hooks.trainer", "--rollout-backend", "megatron"]


def run(output: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    """Run the trainer to its end and return the lines of metrics.jsonl."""
    command = [*_COMMAND, "--output-dir", str(output), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        text = "(deadline)"
        pytest.fail(f"the run did not end within {DEADLINE_S} s")
    finally:
        _end(process)
    assert process.returncode == status, text
    assert not _left_behind(output), "the run left processes behind"
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _left_behind(output: Path) -> list[int]:
    """Processes that still have this run's output directory on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(output).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
    return found


def learned(metrics: list[dict[str, Any]]) -> bool:
    """The check of the main job: held-out reward at the end against before the first step."""
    evaluations = [m["eval/reward"] for m in metrics if "eval/reward" in m]
    before, after = evaluations[0], evaluations[-1]
    return before >= 0.02 and after >= max(2 * before, before + 0.2)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_default_job_learns(tmp_path: Path) -> None:
    metrics = run(tmp_path / "run", "--save-hf", str(tmp_path / "final"))
    assert learned(metrics)
    rollouts = [m for m in metrics if "rollout/reward" in m]
    assert max(m["train/train_rollout_logprob_abs_diff"] for m in rollouts) <= 1e-4
    assert (tmp_path / "run" / "run.png").stat().st_size > 10_000
    assert [m["weight_version"] for m in rollouts] == list(range(2, len(rollouts) + 2))

    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "final")
    audit = subprocess.run(
        [sys.executable, "-m", "trainer_hooks.audit", str(tmp_path / "run" / "events.jsonl")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert audit.returncode == 0, audit.stdout


@pytest.mark.timeout(DEADLINE_S + 60)
def test_without_a_learning_rate_nothing_is_learned(tmp_path: Path) -> None:
    assert not learned(run(tmp_path / "run", "--lr", "0", "--num-rollout", "4"))


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("seed", [7, 2024])
def test_other_seeds_learn_too(tmp_path: Path, seed: int) -> None:
    assert learned(run(tmp_path / "run", "--seed", str(seed), "--rollout-seed", str(seed)))


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("colocate", [False, True], ids=["paired", "colocated"])
def test_a_resumed_run_goes_on_bitwise(tmp_path: Path, colocate: bool) -> None:
    common = ["--deterministic", "--seed", "3", *(["--colocate"] if colocate else [])]
    whole = run(tmp_path / "whole", *common, "--num-rollout", "4")
    first = run(tmp_path / "first", *common, "--num-rollout", "4", "--save-interval", "2", "--save-retain", "9")
    checkpoints = tmp_path / "first" / "checkpoints"
    for path in checkpoints.glob("rollout-*3"):  # as if it had been stopped after the second rollout
        path.rename(tmp_path / "set-aside")
    resumed = run(tmp_path / "resumed", *common, "--num-rollout", "4", "--load", str(checkpoints))
    keys = ("train/loss", "train/grad_norm", "rollout/reward", "rollout/response_length")

    def rows(metrics: list[dict[str, Any]]) -> dict[int, tuple[float, ...]]:
        return {m["rollout_id"]: tuple(m[k] for k in keys) for m in metrics if "train/loss" in m}

    assert rows(first) == rows(whole), "exact repetition"
    assert {i: r for i, r in rows(whole).items() if i >= 2} == rows(resumed)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_ctrl_c_ends_everything_within_ten_seconds(tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = subprocess.Popen(
        [*_COMMAND, "--output-dir", str(output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S / 2
        while not (output / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - start < 10
        assert process.returncode == 130
        assert "interrupted" in errors
        assert not _left_behind(output)
    finally:
        _end(process)
