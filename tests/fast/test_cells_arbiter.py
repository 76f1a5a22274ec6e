"""The commit vote and its log: one durable decision an attempt, one commit a step, also across a driver restart."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trainer_hooks.cells.arbiter import Arbiter, UnknownAttempt, VoteResult
from trainer_hooks.cells.event_log import EventLog, read_events
from trainer_hooks.cells.quorum import (
    Attempt,
    Member,
    NoLiveCells,
    Quorum,
    StaleAttempt,
    Step,
    StepAlreadyApplied,
)
from trainer_hooks.cells.timeouts import CellTimeouts

TIMES = CellTimeouts(vote_s=10, attempt_s=100, collective_s=10)
QUORUM = Quorum(1, (Member(0, 1), Member(1, 1), Member(2, 1)))
STEP = Step("actor", 0, 0)


class Court:
    """An arbiter on a log, with a clock that a test moves, which can be restarted from the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.open()

    def open(self) -> None:
        self.log = EventLog(self.path, clock=lambda: self.now)
        self.arbiter = Arbiter(self.log, TIMES, clock=lambda: self.now)

    def restart(self) -> None:
        self.log.close()
        self.open()

    def logged(self, kind: str) -> list[Any]:
        return [event for event in read_events(self.path) if event.kind == kind]


@pytest.fixture
def court(tmp_path: Path) -> Any:
    court = Court(tmp_path / "events.jsonl")
    yield court
    court.log.close()


def test_all_commit(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    assert court.arbiter.vote(attempt, 0, "commit").decision is None
    assert court.arbiter.vote(attempt, 2, "commit").decision is None
    assert court.arbiter.ask(attempt) is None
    reply = court.arbiter.vote(attempt, 1, "commit")
    assert reply.result is VoteResult.ACCEPTED and reply.decision is not None and reply.decision.commit
    assert court.arbiter.ask(attempt) == court.arbiter.wait(attempt, 1) == reply.decision
    assert court.arbiter.last_committed("actor") == (0, 0)


def test_F07_one_discard_decides_at_once_for_all(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    court.arbiter.vote(attempt, 0, "commit")
    decision = court.arbiter.vote(attempt, 1, "discard", "gradient of layer 3 is NaN").decision
    assert decision is not None and not decision.commit and decision.cause == "cell 1: gradient of layer 3 is NaN"
    late = court.arbiter.vote(attempt, 2, "commit")
    assert late.result is VoteResult.LATE and late.decision == decision
    again = court.arbiter.begin(STEP, QUORUM)
    assert again == Attempt(STEP, 1, 1)


def test_F07_a_death_after_all_voted_commit_changes_nothing(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    for cell in range(3):
        court.arbiter.vote(attempt, cell, "commit")
    assert court.arbiter.lose(1, "SIGKILL") == []
    decision = court.arbiter.ask(attempt)
    assert decision is not None and decision.commit


def test_a_death_before_its_vote_discards_now_and_after_its_vote_does_not(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    court.arbiter.vote(attempt, 0, "commit")
    assert court.arbiter.lose(0, "SIGKILL") == [], "its vote counts"
    (decision,) = court.arbiter.lose(1, "SIGKILL")
    assert not decision.commit and "cell 1 died before its vote: SIGKILL" in decision.cause
    assert court.arbiter.lose(1, "SIGKILL") == []


def test_votes_that_do_not_count(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    court.arbiter.vote(attempt, 0, "commit")
    assert court.arbiter.vote(attempt, 0, "commit").result is VoteResult.DUPLICATE
    assert court.arbiter.vote(attempt, 0, "discard").result is VoteResult.REVOKED
    assert court.arbiter.vote(attempt, 7, "discard").result is VoteResult.STRANGER
    with pytest.raises(UnknownAttempt):
        court.arbiter.vote(Attempt(STEP, 1, 5), 0, "commit")
    with pytest.raises(UnknownAttempt):
        court.arbiter.ask(Attempt(STEP, 2, 0))
    with pytest.raises(ValueError, match="'maybe'"):
        court.arbiter.vote(attempt, 1, "maybe")
    assert len(court.logged("vote")) == 1
    for cell in (1, 2):
        reply = court.arbiter.vote(attempt, cell, "commit")
    assert reply.decision is not None and reply.decision.commit


def test_a_vote_missing_at_the_deadline_discards(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    court.now = 50
    court.arbiter.vote(attempt, 0, "commit")
    court.now = 59.9
    assert court.arbiter.ask(attempt) is None
    court.now = 60
    late = court.arbiter.vote(attempt, 1, "commit")
    assert late.result is VoteResult.LATE and late.decision is not None
    assert late.decision.cause == "no vote from cells [1, 2] at the deadline"


def test_an_attempt_that_nobody_votes_on_ends_too(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    court.now = 100
    decision = court.arbiter.ask(attempt)
    assert decision is not None and not decision.commit


def test_waiting_has_a_deadline_and_is_woken_by_the_decision(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        arbiter = Arbiter(log, CellTimeouts())
        attempt = arbiter.begin(STEP, QUORUM)
        with pytest.raises(TimeoutError, match=r"undecided.*cells \[0, 1, 2\]"):
            arbiter.wait(attempt, 0.05)
        timer = threading.Timer(0.1, lambda: arbiter.vote(attempt, 0, "discard"))
        timer.start()
        assert not arbiter.wait(attempt, 10).commit
        timer.join(10)


def test_the_vote_deadline_ends_a_wait(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        arbiter = Arbiter(log, CellTimeouts(vote_s=0.1))
        attempt = arbiter.begin(STEP, QUORUM)
        arbiter.vote(attempt, 0, "commit")
        assert "at the deadline" in arbiter.wait(attempt, 10).cause


def test_a_step_is_committed_once(court: Court) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    for cell in range(3):
        court.arbiter.vote(attempt, cell, "commit")
    with pytest.raises(StepAlreadyApplied, match="0.0"):
        court.arbiter.begin(STEP, QUORUM)
    court.arbiter.begin(Step("actor", 0, 1), QUORUM)
    court.arbiter.begin(Step("critic", 0, 0), QUORUM)


def test_a_new_attempt_ends_the_open_one_and_old_quorums_are_refused(court: Court) -> None:
    first = court.arbiter.begin(STEP, QUORUM)
    second = court.arbiter.begin(STEP, Quorum(2, QUORUM.members[:2]))
    superseded = court.arbiter.ask(first)
    assert superseded is not None and "superseded" in superseded.cause
    assert court.arbiter.ask(second) is None
    with pytest.raises(StaleAttempt, match="quorum 1 is older than 2"):
        court.arbiter.begin(STEP, QUORUM)
    with pytest.raises(NoLiveCells):
        court.arbiter.begin(STEP, Quorum(3))
    ended = court.arbiter.discard(second, "the batch was withdrawn")
    assert court.arbiter.discard(second, "again") == ended


def test_the_decision_is_on_disk_before_anybody_hears_it(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        synced.append(read_events(court.path)[-1].kind)

    monkeypatch.setattr(os, "fsync", fsync)
    for cell in range(3):
        reply = court.arbiter.vote(attempt, cell, "commit")
        assert (reply.decision is not None) == (synced == ["decision"])


def test_a_decision_that_cannot_be_written_is_not_made(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = court.arbiter.begin(STEP, QUORUM)
    court.arbiter.vote(attempt, 0, "commit")
    court.arbiter.vote(attempt, 1, "commit")
    with monkeypatch.context() as patched:

        def fail(fd: int) -> None:
            raise OSError(5, "Input/output error")

        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            court.arbiter.vote(attempt, 2, "commit")
    assert court.arbiter.ask(attempt) is None, "nobody hears of a decision that may not be on disk"
    with pytest.raises(OSError, match="unusable"):
        court.arbiter.discard(attempt, "not possible either")
    court.restart()
    decision = court.arbiter.ask(attempt)
    assert decision is not None and decision.commit, "after the restart the log alone decides"


def test_a_driver_restart_keeps_decisions_and_discards_what_was_open(court: Court) -> None:
    done = court.arbiter.begin(STEP, QUORUM)
    for cell in range(3):
        court.arbiter.vote(done, cell, "commit")
    still = court.arbiter.begin(Step("actor", 0, 1), Quorum(4, QUORUM.members))
    for cell in range(2):
        court.arbiter.vote(still, cell, "commit")
    court.restart()
    before, after = court.arbiter.ask(done), court.arbiter.ask(still)
    assert before is not None and before.commit
    assert after is not None and not after.commit and "restarted" in after.cause
    assert after.votes == ((0, "commit"), (1, "commit"))
    assert court.arbiter.last_quorum_id("actor") == 4
    with pytest.raises(StepAlreadyApplied):
        court.arbiter.begin(STEP, Quorum(5, QUORUM.members))
    assert court.arbiter.begin(Step("actor", 0, 1), Quorum(5, QUORUM.members)).attempt == 1
    court.restart()
    assert court.arbiter.ask(still) == after, "recovery is the same twice"


def test_restoring_a_checkpoint_voids_later_commits_also_after_a_restart(court: Court) -> None:
    for index in range(3):
        attempt = court.arbiter.begin(Step("actor", 0, index), QUORUM)
        for cell in range(3):
            court.arbiter.vote(attempt, cell, "commit")
    with pytest.raises(ValueError, match="actor"):
        court.arbiter.restore("ckpt-0", {}, version=1)
    court.arbiter.restore("ckpt-0", {"actor": (0, 0)}, version=1, lost_rollouts=[1])
    court.restart()
    with pytest.raises(StepAlreadyApplied):
        court.arbiter.begin(Step("actor", 0, 0), QUORUM)
    assert court.arbiter.begin(Step("actor", 0, 1), QUORUM).attempt == 1, "attempts of a step go on counting"
    court.arbiter.restore(None, {"actor": None}, version=0)
    assert court.arbiter.last_committed("actor") is None


def test_voters_on_many_threads_get_one_decision(court: Court) -> None:
    for round_ in range(20):
        attempt = court.arbiter.begin(Step("actor", round_, 0), QUORUM)
        decisions: list[Any] = []
        gate = threading.Barrier(6)

        def cell(attempt: Attempt, index: int, gate: threading.Barrier, decisions: list[Any]) -> None:
            gate.wait(10)
            court.arbiter.vote(attempt, index % 3, "discard" if index == 5 else "commit")
            decisions.append(court.arbiter.wait(attempt, 10))

        threads = [threading.Thread(target=cell, args=(attempt, i, gate, decisions)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(decisions) == 6 and len(set(decisions)) == 1
    assert Counter(event["rollout_id"] for event in court.logged("decision")) == dict.fromkeys(range(20), 1)


class ArbiterMachine(RuleBasedStateMachine):
    """Random votes, deaths, delays, restarts and restores. The model keeps only what every cell was told."""

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.court = Court(Path(self.directory.name) / "log")
        self.told: dict[Attempt, str] = {}
        self.votes: dict[Attempt, dict[int, str]] = {}
        self.position = 0
        self.quorum = QUORUM
        self.attempt: Attempt | None = None

    def hear(self, attempt: Attempt, decision: Any) -> None:
        if decision is not None:
            assert self.told.setdefault(attempt, decision.decision) == decision.decision
            if decision.commit:
                votes = self.votes[attempt]
                assert set(votes.values()) == {"commit"} and len(votes) == 3

    @rule(grow=st.booleans())
    def begin(self, grow: bool) -> None:
        if grow:
            self.quorum = Quorum(self.quorum.quorum_id + 1, QUORUM.members)
        step = Step("actor", self.position, 0)
        committed = self.court.arbiter.last_committed("actor")
        if committed is not None and step.position <= committed:
            with pytest.raises(StepAlreadyApplied):
                self.court.arbiter.begin(step, self.quorum)
            self.position += 1
            return
        self.attempt = self.court.arbiter.begin(step, self.quorum)
        assert self.attempt not in self.votes, "an attempt is never reused"
        self.votes[self.attempt] = {}

    @precondition(lambda self: self.votes)
    @rule(data=st.data(), cell=st.integers(0, 3), vote=st.sampled_from(["commit", "commit", "commit", "discard"]))
    def vote(self, data: st.DataObject, cell: int, vote: str) -> None:
        attempt = data.draw(st.sampled_from(list(self.votes)))
        reply = self.court.arbiter.vote(attempt, cell, vote)
        if reply.result is VoteResult.ACCEPTED:
            assert cell < 3 and cell not in self.votes[attempt]
            self.votes[attempt][cell] = vote
        self.hear(attempt, reply.decision)

    @rule(cell=st.integers(0, 2))
    def lose(self, cell: int) -> None:
        for decision in self.court.arbiter.lose(cell, "test"):
            self.hear(decision.attempt, decision)

    @rule(seconds=st.sampled_from([1, 9, 50]))
    def delay(self, seconds: float) -> None:
        self.court.now += seconds

    @rule()
    def restart(self) -> None:
        self.court.restart()

    @rule(back=st.integers(0, 2))
    def restore(self, back: int) -> None:
        committed = self.court.arbiter.last_committed("actor")
        at = None if committed is None or committed[0] - back < 0 else (committed[0] - back, 0)
        self.court.arbiter.restore("c" if at else None, {"actor": at}, version=0)
        self.position = 0 if at is None else at[0] + 1
        self.quorum = Quorum(self.quorum.quorum_id + 1, QUORUM.members)

    @invariant()
    def decisions_stand(self) -> None:
        if not hasattr(self, "court"):
            return
        for attempt in list(self.votes)[-3:]:
            self.hear(attempt, self.court.arbiter.ask(attempt))

    def teardown(self) -> None:
        if not hasattr(self, "court"):
            return
        self.court.log.close()
        standing: dict[tuple[int, int], int] = {}
        for event in read_events(self.court.path):
            if event.kind == "restored":
                at = event["steps"]["actor"]
                standing = {key: one for key, one in standing.items() if at is not None and key <= tuple(at)}
            elif event.kind == "decision" and event["decision"] == "commit":
                key = (event["rollout_id"], event["step_index"])
                assert key not in standing, "two attempts of one step were decided commit"
                standing[key] = event["attempt"]
        self.directory.cleanup()


TestArbiterMachine = ArbiterMachine.TestCase
TestArbiterMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
