"""The real trainer loses cells and ends as if it had not: real processes, real signals, one run for several failures.

Each run is judged by its own event log (every failure injected and noticed, audit clean), with the policy `wait` also
by the weights of the same run without failure, bit for bit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rollout.cell import _family, kill_actors
from trainer_hooks.cells.audit import audit
from trainer_hooks.cells.event_log import Event, read_events
from trainer_hooks.cells.trials import Setup, Trial, Verdict, quick_trials
from trainer_hooks.chaos import Chaos

#: Heartbeats are for what does not die at once; a busy machine must not be taken for a stopped process.
PATIENT = ["--heartbeat-misses", "60"]
SESSION_S = 900.0

pytestmark = pytest.mark.timeout(2 * SESSION_S + 100)


def run(directory: Path, setup: Setup, trials: list[Trial]) -> tuple[list[Verdict], list[Event]]:
    chaos = Chaos(directory, seed=1, extra=PATIENT, deadline_s=SESSION_S)
    verdicts = chaos.session(setup, trials)
    newest = max(directory.glob("run-*"), key=lambda p: int(p.name.split("-")[1]))
    return verdicts, read_events(newest / "events.jsonl")


def assert_held(verdicts: list[Verdict]) -> None:
    assert not [f"{v.trial.name}: {v.why}" for v in verdicts if not v.held]


@pytest.mark.slow
def test_F06_cells_of_both_sides_die_and_the_weights_are_those_without_failure(tmp_path: Path) -> None:
    """A trainer cell dies before the first step of the run; later a rollout cell, the only one, while it generates."""
    two = Setup(2)
    trials = [
        Trial(two, "before_vote", "SIGKILL", "trainer", 0),
        Trial(two, "generate", "SIGKILL", "rollout", 0),
        Trial(two, "before_reduce", "exception", "trainer", 1),
    ]
    verdicts, events = run(tmp_path, two, trials)
    assert_held(verdicts)
    heals = [(e["cell"], e["incarnation"], e["source"]) for e in events if e.kind == "heal" and e["source"] is not None]
    assert heals == [(0, 2, 1)], "the replacement of cell 0 took its state from cell 1, and nobody else was healed"
    detection = next(e["seconds"] for e in events if e.kind == "fault_observed")
    assert detection < 60.0, "a dead process is not found by a collective's deadline"


@pytest.mark.slow
def test_F03_a_pair_dies_while_it_generates_and_the_run_goes_on(tmp_path: Path) -> None:
    pair = Setup(2, "continue", colocate=True)
    # a second rollout, in which the pair may come back
    trials = [Trial(pair, "generate", "SIGKILL", "rollout", 0), Trial(pair, "before_reduce", "exception", "trainer", 1)]
    verdicts, events = run(tmp_path, pair, trials)
    assert_held(verdicts)
    died = [(e["side"], e["cell"]) for e in events if e.kind == "cell_dead"]
    assert sorted(died) == [("rollout", 0), ("trainer", 0)], "a pair is one failure unit"
    for kind, field in (("quorum", "quorum_id"), ("refit", "version")):
        values = [e[field] for e in events if e.kind == kind]
        assert values == sorted(values)


@pytest.mark.slow
@pytest.mark.timeout(3 * SESSION_S)
def test_the_eight_quick_trials(tmp_path: Path) -> None:
    verdicts, _ = run(tmp_path, Setup(2), quick_trials())
    assert_held(verdicts)


@pytest.mark.slow
@pytest.mark.timeout(3 * SESSION_S)
def test_all_cells_dead_is_a_restart_from_the_newest_checkpoint(tmp_path: Path) -> None:
    setup = Setup(2, "continue")
    chaos = Chaos(tmp_path, seed=1, extra=[*PATIENT, "--save-interval", "1"], deadline_s=SESSION_S)
    faults = [f"before_step:SIGKILL:trainer:{cell}@2" for cell in (0, 1)]
    events = chaos.run(setup, 4, faults)
    assert audit(events).problems == []
    (restored,) = [e for e in events if e.kind == "restored"]
    assert (restored["checkpoint"], restored["lost_rollouts"]) == ("rollout-0000001", []), (
        "the rollout that was finished is not lost"
    )


def test_F04_what_a_dead_actor_started_is_gone_when_it_is_fenced() -> None:
    """The bare mechanism: a worker that leads a group, killed; its child, left behind, is found and killed."""
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"import os, time; os.setpgid(0, 0); {child}; print('up', flush=True); time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
        worker.kill()
        worker.wait(30)
        orphans = _family(worker.pid)
        assert len(orphans) == 1
        kill_actors([], [worker.pid], 30.0)
        assert _family(worker.pid) == []
    finally:
        for pid in _family(worker.pid):
            os.kill(pid, signal.SIGKILL)
        if worker.poll() is None:
            worker.kill()
        worker.wait(30)


def test_a_process_number_that_was_given_to_somebody_else_is_left_alone() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    try:
        kill_actors([], [stranger.pid], 5.0)
        time.sleep(0.2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(30)
