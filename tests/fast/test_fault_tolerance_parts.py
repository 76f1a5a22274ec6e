"""What keeps a run alive, without processes: supervisor, fault plan, dispatcher, trials and their judgement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rollout import faults
from megatron_rollout.cell import CellDead
from megatron_rollout.dispatch import Dispatcher
from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams
from megatron_rollout.routing import Router
from trainer_hooks.cells.event_log import EventLog, read_events
from trainer_hooks.cells.fault_plan import Fault, FaultPlan, parse_fault
from trainer_hooks.cells.state import DeathCause, DeathKind, GivenUp, Healing, IllegalTransition, RestartPolicy
from trainer_hooks.cells.supervisor import Supervisor, describe
from trainer_hooks.cells.trials import Setup, Trial, all_trials, covering, judge, quick_trials, sessions
from trainer_hooks.trainer.options import parse_args, validate

KILLED = DeathCause(DeathKind.EXIT, "killed")


def wait_for(what: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Starts:
    """Stands in for the processes: what `start` did, and whether the next one fails."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.fail: set[tuple[int, int]] = set()

    def __call__(self, cell: int, incarnation: int) -> None:
        if (cell, incarnation) in self.fail:
            raise RuntimeError("no memory left")
        self.started.append((cell, incarnation))


def supervisor(starts: Starts, log: EventLog | None = None, **policy: Any) -> Supervisor:
    restarts = RestartPolicy(**{"max_restarts": 2, "backoff_s": 0.0, **policy})
    made = Supervisor("actor", range(2), starts, policy=restarts, step=lambda: 3, log=log)
    made.start_all()
    for cell in (0, 1):
        made.healed(cell, 1)
    return made


def test_a_dead_cell_is_replaced_once_it_was_fenced(tmp_path: Path) -> None:
    starts = Starts()
    with EventLog(tmp_path / "log.jsonl") as log:
        cells = supervisor(starts, log)
        assert cells.training() == [0, 1]
        assert cells.died(1, 1, KILLED)
        assert not cells.died(1, 1, KILLED), "old news"
        cells.launch_due()
        assert starts.started == [(0, 1), (1, 1)], "not before it was fenced"
        assert cells.training() == [0] and cells.coming() == [1]
        cells.reaped(1, 1)
        cells.launch_due()
        wait_for(lambda: cells.waiting_for_state() == [1])
        assert isinstance(cells.cell(1).state, Healing) and cells.training() == [0], "up is not healed"
        assert not cells.died(1, 1, KILLED), "news of the process before"
        cells.healed(1, 2)
        assert cells.training() == [0, 1] and cells.cell(1).incarnation == 2
    kinds = [(e.kind, e["cell"], e["incarnation"]) for e in read_events(tmp_path / "log.jsonl")]
    assert kinds == [("cell_dead", 1, 1), ("cell_restarted", 1, 2)]


def test_a_replacement_that_does_not_start_costs_budget_until_the_cell_is_given_up() -> None:
    starts = Starts()
    starts.fail = {(0, n) for n in range(2, 9)}
    cells = supervisor(starts)
    cells.died(0, 1, KILLED)
    cells.reaped(0, 1)

    def given_up() -> bool:
        cells.launch_due()
        return isinstance(cells.cell(0).state, GivenUp)

    wait_for(given_up)
    assert cells.cell(0).incarnation == 3, "two restarts were allowed"
    assert describe(cells.cell(0)) == "given up"
    assert cells.coming() == [] and cells.training() == [1]


def test_without_fault_tolerance_a_dead_cell_stays_dead() -> None:
    starts = Starts()
    cells = Supervisor("actor", range(2), starts, policy=None, step=lambda: 0)
    cells.start_all()
    cells.died(0, 1, KILLED)
    cells.reaped(0, 1)
    cells.launch_due()
    assert cells.coming() == [] and len(starts.started) == 2


def test_suspended_is_out_without_a_mark_and_back_when_resumed() -> None:
    starts = Starts()
    cells = supervisor(starts)
    assert cells.suspend(1)
    cells.reaped(1, 1)
    cells.launch_due()
    assert describe(cells.cell(1)) == "suspended" and cells.coming() == []
    with pytest.raises(IllegalTransition, match="Stopped"):
        cells.suspend(1)
    cells.resume(1)
    wait_for(lambda: cells.waiting_for_state() == [1])
    with pytest.raises(KeyError, match="no cell 7"):
        cells.suspend(7)


# -- faults ----------------------------------------------------------------------------------------------------------


class Actor:
    def __init__(self) -> None:
        self.armed: list[tuple[str, str]] = []

    @property
    def arm_fault(self) -> Any:
        actor = self

        class Call:
            def remote(self, moment: str, how: str) -> None:
                actor.armed.append((moment, how))

        return Call()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SIGKILL", "is no fault"),
        ("lunch:SIGKILL:trainer:0@1", "moments of a trainer cell are"),
        ("before_vote:SIGKILL:rollout:0@1", "moments of a rollout cell are"),
        ("before_vote:gently:trainer:0@1", "how is one of"),
        ("idle:exception:trainer:0@1", "at idle"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fault(text)
    args = parse_args(["--inject-fault", text])
    with pytest.raises(ValueError) as refused:
        validate(args)
    assert message in str(refused.value) and "--enable-fault-injection" in str(refused.value)


def test_a_fault_is_armed_in_its_rollout_and_observed_by_what_the_run_writes(tmp_path: Path) -> None:
    actor = Actor()
    listed = ["before_vote:SIGKILL:trainer:1@2", "idle:SIGSTOP:trainer:0@3", "forward:exception:trainer:0@3"]
    with EventLog(tmp_path / "log.jsonl") as log:
        plan = FaultPlan([parse_fault(f) for f in listed], lambda side, cell: [actor], log)
        plan.begin(1)
        plan.point("idle")
        assert actor.armed == []
        plan.begin(2)
        assert actor.armed == [("before_vote", "SIGKILL")]
        log.append("cell_dead", side="trainer", cell=0, incarnation=1, cause="exit")
        log.append("cell_dead", side="trainer", cell=1, incarnation=1, cause="exit")
        plan.begin(3)
        plan.point("idle")
        assert actor.armed[1:] == [("forward", "exception"), ("now", "SIGSTOP")]
        step = dict(role="actor", rollout_id=3, step_index=0, quorum_id=1, attempt=0)
        log.append("vote", **step, cell=0, vote="discard", cause="InjectedFault: injected at 'forward'")
    seen = [e["fault"] for e in read_events(tmp_path / "log.jsonl") if e.kind == "fault_observed"]
    assert seen == [listed[0], listed[2]]


def test_a_cell_that_is_down_cannot_be_broken(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log.jsonl") as log:
        plan = FaultPlan([Fault("forward", "SIGKILL", "trainer", 0, 0)], lambda side, cell: [], log)
        plan.begin(0)
    assert read_events(tmp_path / "log.jsonl") == []


def test_fault_points_do_nothing_unless_armed_and_then_break_once() -> None:
    faults.fault_point("forward")
    faults.arm("forward", "exception")
    faults.fault_point("backward")
    with pytest.raises(faults.InjectedFault, match="forward"):
        faults.fault_point("forward")
    faults.fault_point("forward")
    with pytest.raises(ValueError, match="SIGKILL, SIGSTOP, exception"):
        faults.arm("forward", "kindly")


# -- dispatcher ------------------------------------------------------------------------------------------------------


class Cell:
    """A rollout cell whose answers and death the test decides."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.got: list[str] = []
        self.answers: list[Any] = []
        self.dead = threading.Event()

    def submit(self, requests: list[GenerationRequest], *, stream: bool = False) -> None:
        self.got += [r.request_id for r in requests]

    def collect(self, max_wait_s: float, timeout_s: float) -> list[Any]:
        if self.dead.wait(0.02):
            raise CellDead(f"rollout cell {self.index} died")
        items, self.answers = self.answers, []
        return items

    def abort(self, request_ids: list[str] | None = None) -> None: ...

    def answer(self) -> None:
        self.answers += [
            GenerationOutput(request_id=r, prompt_ids=(1,), output_ids=(2,), logprobs=(0.0,), finish_reason="stop")
            for r in self.got
        ]


def test_F02_a_replacement_gets_nothing_before_its_refit_and_a_dead_cell_is_not_brought_up() -> None:
    cell, downs, outputs = Cell(0), [], []
    dispatcher = Dispatcher([cell], Router([0]), on_cell_down=lambda i, c: downs.append(i), may_recover=lambda: True)
    try:
        dispatcher.submit([GenerationRequest("a", (1,), SamplingParams(max_new_tokens=1))], outputs.append)
        assert cell.got == ["a"]
        cell.dead.set()
        wait_for(lambda: downs == [0])
        dispatcher.cell_up(0)  # a refit that ended as the cell died
        assert dispatcher.router.up == frozenset()
        replacement = Cell(0)
        dispatcher.attach(replacement)
        dispatcher.pump()
        assert replacement.got == [], "up, but without the weights"
        dispatcher.cell_up(0)
        assert replacement.got == ["a"]
        cell.answer()
        replacement.answer()
        wait_for(lambda: outputs)
        time.sleep(0.1)
        assert [o.finish_reason for o in outputs] == ["stop"] and downs == [0]
    finally:
        dispatcher.close()


def test_a_stale_cell_that_dies_is_reported_once() -> None:
    cell, downs = Cell(0), []
    dispatcher = Dispatcher([cell], Router([0]), on_cell_down=lambda i, c: downs.append(i), may_recover=lambda: True)
    try:
        dispatcher.cell_down(0, "refit failed")
        assert downs == [], "alive, but without the weights"
        cell.dead.set()
        wait_for(lambda: downs == [0])
        dispatcher.cell_died(cell, "again")
        assert downs == [0]
    finally:
        dispatcher.close()


# -- trials ----------------------------------------------------------------------------------------------------------


def test_the_covering_subset_is_small_repeatable_and_reaches_every_moment_and_kind() -> None:
    everything = all_trials()
    assert len({t.name for t in everything}) == len(everything)
    chosen = covering(everything, seed=1)
    assert len(chosen) <= 40 and chosen == covering(everything, seed=1)
    assert {t.moment for t in chosen} == {t.moment for t in everything}
    assert {t.how for t in chosen} == {"SIGKILL", "SIGSTOP", "exception"}
    assert {t.setup.cells for t in chosen} == {2, 3, 4} and {t.setup.policy for t in chosen} == {"wait", "continue"}
    for _, group in sessions(everything):
        assert len(group) <= 8 and len({t.setup for t in group}) == 1
        for rollout, trial in enumerate(group):
            for fault in trial.faults(rollout):
                assert parse_fault(str(fault)) == fault
    assert len(quick_trials()) == 8 and len(sessions(quick_trials())) == 1


@pytest.mark.parametrize(
    ("leave_out", "weights", "why"),
    [
        ("", "same", ""),
        ("fault_injected", "same", "was not injected"),
        ("fault_observed", "same", "was not observed"),
        ("committed", "same", "was not committed"),
        ("", "other", "without failure same"),
        ("weights", "same", "are None"),
    ],
)
def test_a_trial_holds_only_if_everything_happened(tmp_path: Path, leave_out: str, weights: str, why: str) -> None:
    trial = Trial(Setup(2), "before_vote", "SIGKILL", "trainer", 0)
    (fault,) = trial.faults(1)
    step = dict(role="actor", rollout_id=1, step_index=0, quorum_id=1, attempt=0)
    with EventLog(tmp_path / "log.jsonl") as log:
        for kind, fields in [
            ("fault_injected", dict(fault=str(fault), side="trainer", cell=0, how="SIGKILL", kills=True)),
            ("fault_observed", dict(fault=str(fault), seconds=0.5)),
            ("committed", dict(**step, samples=[1])),
            ("weights", dict(side="trainer", cell=0, model="actor", version=3, checksum=weights)),
        ]:
            if kind != leave_out:
                log.append(kind, **fields)
    verdict = judge(trial, 1, read_events(tmp_path / "log.jsonl"), {3: "same"})
    assert verdict.held == (why == "") and why in verdict.why
