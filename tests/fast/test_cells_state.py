"""Trainer-cell states, quorums, pairs, deadlines: pure, so every transition and every refusal is tried."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.cells.pairing import plan_pairs
from trainer_hooks.cells.quorum import (
    Attempt,
    ConnectError,
    GroupShape,
    Member,
    NoLiveCells,
    Quorum,
    StaleAttempt,
    Step,
    StepAlreadyApplied,
    StepGuard,
    check_connect,
)
from trainer_hooks.cells.state import (
    Alive,
    BeatMissed,
    BeatOk,
    CellEvent,
    CellState,
    Dead,
    DeathCause,
    DeathKind,
    Died,
    GivenUp,
    Healed,
    Healing,
    IllegalTransition,
    Launch,
    Pending,
    Reaped,
    RestartPolicy,
    Resume,
    SourceLost,
    Started,
    Starting,
    Stepped,
    Stopped,
    Suspect,
    Suspend,
    TrainerCell,
    transition,
)
from trainer_hooks.cells.timeouts import CellTimeouts

POLICY = RestartPolicy(max_restarts=2, window_steps=10, backoff_s=4.0)
KILLED = DeathCause(DeathKind.SIGNAL, "SIGKILL")


def run(cell: TrainerCell, *events: object) -> TrainerCell:
    for event in events:
        cell = transition(cell, event, POLICY)  # type: ignore[arg-type]
    return cell


def alive(index: int = 0) -> TrainerCell:
    return run(TrainerCell(index), Launch(), Started(1), Healed(1))


def test_a_life() -> None:
    cell = alive()
    assert cell.state == Alive() and cell.incarnation == 1 and cell.trains
    cell = run(cell, BeatMissed(1), BeatMissed(1))
    assert cell.state == Suspect(2) and cell.trains
    assert run(cell, BeatOk(1)).state == Alive()
    cell = run(cell, Died(1, KILLED))
    assert cell.state == Dead(KILLED) and cell.has_process and not cell.trains
    cell = run(cell, Reaped(1, step=3, now=100.0))
    assert cell.state == Pending(not_before=100.0), "the first restart does not wait"
    cell = run(cell, Launch(), Started(2, source=3))
    assert cell.state == Healing(3) and cell.incarnation == 2
    assert run(cell, SourceLost(2, source=1), Healed(2)).state == Alive()


def test_only_a_heal_makes_alive() -> None:
    """No event but Healed leads from any other state into {Alive, Suspect}."""
    states: list[CellState] = [
        Pending(),
        Starting(),
        Healing(1),
        Dead(KILLED),
        Dead(None, True),
        Stopped(),
        GivenUp(KILLED),
    ]
    events: list[CellEvent] = [
        Launch(),
        Started(1),
        SourceLost(1, 2),
        BeatOk(1),
        BeatMissed(1),
        Stepped(1),
        Died(1, KILLED),
        Suspend(),
        Reaped(1, 0, 0.0),
        Resume(0.0),
    ]
    refused = 0
    for state, event in product(states, events):
        try:
            after = transition(TrainerCell(0, state, incarnation=1), event, POLICY)
        except IllegalTransition as error:
            refused += 1
            assert "cell 0" in str(error) and type(state).__name__ in str(error)
            continue
        assert not after.trains, f"{state} --{event}--> {after.state}"
    assert refused > 10


def test_late_news_of_a_fenced_process_is_ignored() -> None:
    cell = run(alive(), Died(1, KILLED), Reaped(1, 0, 0.0), Launch(), Started(2), Healed(2))
    for event in (Died(1, KILLED), BeatMissed(1), Reaped(1, 5, 5.0), Healed(1), Started(1)):
        assert transition(cell, event, POLICY) is cell


def test_the_budget_counts_within_a_window_and_the_backoff_since_the_last_success() -> None:
    cell = alive()
    for step, expected in ((1, 0.0), (2, 4.0)):
        cell = run(cell, Died(cell.incarnation, KILLED), Reaped(cell.incarnation, step, 50.0))
        assert cell.state == Pending(50.0 + expected)
        cell = run(cell, Launch())
    spent = run(cell, Died(3, KILLED), Reaped(3, 3, 50.0))
    assert spent.state == GivenUp(KILLED) and not spent.has_process
    later = run(cell, Started(3), Healed(3), Stepped(3), Died(3, KILLED), Reaped(3, 11, 60.0))
    assert later.state == Pending(60.0), "the step-1 restart left the window, and a finished step ends the backoff"


def test_suspend_kills_first_and_resume_starts_over() -> None:
    cell = run(alive(), Suspend())
    assert cell.state == Dead(None, suspended=True)
    cell = run(cell, Reaped(1, 0, 1.0))
    assert cell.state == Stopped()
    with pytest.raises(IllegalTransition, match="cell 0 is Stopped.*Launch"):
        run(cell, Launch())
    cell = run(cell, Resume(9.0))
    assert cell.state == Pending(9.0) and cell.ledger.at_steps == ()
    assert run(TrainerCell(0), Suspend()).state == Stopped()
    given_up = replace(cell, state=GivenUp(KILLED))
    assert run(given_up, Resume(1.0)).state == Pending(1.0)


def test_quorum_ids_grow_iff_membership_changes() -> None:
    first = Quorum().next([Member(1, 1), Member(0, 1)])
    assert (first.quorum_id, first.cells, first.rank_of(1)) == (1, (0, 1), 1)
    assert first.next([Member(0, 1), Member(1, 1)]) is first
    replaced = first.next([Member(0, 1), Member(1, 2)])
    assert replaced.quorum_id == 2, "same cells, another process: another quorum"
    assert replaced.next([Member(1, 2)]).quorum_id == 3
    with pytest.raises(KeyError, match="cell 7.*quorum 1.*0, 1"):
        first.rank_of(7)
    with pytest.raises(NoLiveCells, match=r"quorum 1 of cells \[0, 1\]"):
        first.next([])


def test_a_saved_quorum_goes_on_growing() -> None:
    quorum = Quorum(41, (Member(0, 3), Member(2, 1)))
    again = Quorum.from_dict(json.loads(json.dumps(quorum.to_dict())))
    assert again == quorum
    assert again.restored().next(quorum.members).quorum_id == 42
    for broken in ({}, {"quorum_id": 1, "members": [[0]]}, {"quorum_id": -1, "members": []}):
        with pytest.raises(ValueError, match="not a saved quorum"):
            Quorum.from_dict(broken)
    with pytest.raises(ValueError, match="distinct cells in order"):
        Quorum(1, (Member(1, 0), Member(0, 0)))


@given(st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1), max_size=20))
@settings(deadline=None)
def test_quorum_history(history: list[dict[int, int]]) -> None:
    quorum, before = Quorum(), None
    for live in history:
        following = quorum.next(Member(cell, incarnation) for cell, incarnation in live.items())
        assert following.quorum_id - quorum.quorum_id == (live != before)
        assert [following.rank_of(cell) for cell in sorted(live)] == list(range(len(live)))
        quorum, before = following, live


STEP = Step("actor", 4, 0)


def test_a_cell_refuses_what_it_has_applied_and_what_is_old() -> None:
    guard = StepGuard("actor")
    guard.admit(Attempt(STEP, 3, 0))
    guard.admit(Attempt(STEP, 3, 1))
    with pytest.raises(StaleAttempt, match="attempt 0 of actor step 4.0.*attempt 1"):
        guard.admit(Attempt(STEP, 3, 0))
    guard.apply(Attempt(STEP, 3, 1))
    for again in (Attempt(STEP, 3, 1), Attempt(STEP, 9, 7), Attempt(Step("actor", 3, 9), 9, 0)):
        with pytest.raises(StepAlreadyApplied, match="4.0"):
            guard.apply(again)
    with pytest.raises(StaleAttempt, match="quorum 2.*older than quorum 3"):
        guard.admit(Attempt(Step("actor", 4, 1), 2, 0))
    with pytest.raises(ValueError, match="critic"):
        guard.admit(Attempt(Step("critic", 9, 0), 9, 0))
    healed = StepGuard("actor")
    healed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    with pytest.raises(StepAlreadyApplied):
        healed.apply(Attempt(STEP, 5, 2))
    healed.apply(Attempt(Step("actor", 4, 1), 5, 0))
    assert healed.applied == (4, 1)
    with pytest.raises(ValueError, match="critic"):
        StepGuard("critic").load_state_dict(guard.state_dict())


def test_attempts_travel_as_dicts() -> None:
    attempt = Attempt(STEP, 3, 1)
    assert Attempt.from_dict(json.loads(json.dumps(attempt.to_dict()))) == attempt


def test_connect_names_every_difference_at_once() -> None:
    check_connect(GroupShape("actor", (2, 2)), GroupShape("critic", (2, 2)))
    with pytest.raises(ConnectError) as error:
        check_connect(GroupShape("actor", (2, 2, 4)), GroupShape("critic", (2, 1)))
    assert "actor has 3 cells, critic has 2" in str(error.value)
    assert "cell 1 has 2 ranks in actor and 1 in critic" in str(error.value)


def test_pairs() -> None:
    plan = plan_pairs(2, [0, 1], range(5))
    assert plan.pairs == ((0, 0), (1, 1), (2, 0), (3, 1), (4, 0))
    assert plan.rollout_cells_of(0) == (0, 2, 4) and plan.source_of(3) == 1
    assert plan_pairs(4, [0, 3], [0, 1, 2, 3]).pairs == ((0, 0), (1, 3), (2, 3), (3, 3))
    assert plan_pairs(4, [1], [3]).source_of(3) == 1, "the next live index wraps around"
    assert plan_pairs(3, [2], []).sources == ()
    with pytest.raises(NoLiveCells, match="none of the 2"):
        plan_pairs(2, [], [0])
    with pytest.raises(ValueError, match="0 .. 1"):
        plan_pairs(2, [2], [0])
    with pytest.raises(KeyError, match="rollout cell 9"):
        plan.source_of(9)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
@settings(max_examples=60, deadline=None)
def test_every_rollout_cell_has_one_live_source(case: tuple[int, set[int]]) -> None:
    cells, live = case
    plan = plan_pairs(cells, live, range(12))
    for rollout, trainer in plan.pairs:
        assert trainer in live
        assert trainer == rollout % cells or rollout % cells not in live
    assert [rollout for rollout, _ in plan.pairs] == list(range(12))


def test_timeouts_name_every_violation() -> None:
    assert CellTimeouts().detection_s <= 2.0
    with pytest.raises(ValueError) as error:
        CellTimeouts(vote_s=0, kill_s=float("inf"), heal_s=True)
    for name in ("vote_s", "kill_s", "heal_s"):
        assert name in str(error.value)
    with pytest.raises(ValueError, match=r"collective_s \(60 s\) must not exceed attempt_s \(10 s\)"):
        CellTimeouts(attempt_s=10)
    with pytest.raises(ValueError, match="whole number"):
        CellTimeouts(heartbeat_misses=2.5)  # type: ignore[arg-type]


def test_pure_modules_import_neither_ray_nor_torch() -> None:
    cells = ["state", "quorum", "pairing", "watchdog", "control", "timeouts", "events", "event_log", "arbiter", "audit"]
    modules = [f"trainer_hooks.cells.{name}" for name in cells] + [
        "megatron_rollout.health",
        "megatron_rollout.routing",
    ]
    code = f"import sys, {', '.join(modules)}; print([m for m in ('ray', 'torch', 'torchft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
