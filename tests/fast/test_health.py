"""States of rollout cells: every arrow of the diagram, the arrows that do not exist, and the restart budget."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_rollout.health import (
    FleetHealth,
    HealthPolicy,
    IllegalTransition,
    RestartLedger,
    RestartPolicy,
    RolloutState,
)

S = RolloutState


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fleet(cells: int = 2, **policy: object) -> tuple[FleetHealth, Clock]:
    clock = Clock()
    return FleetHealth(range(cells), HealthPolicy(**policy), clock=clock), clock  # type: ignore[arg-type]


def probes(health: FleetHealth, cell: int, outcomes: str) -> list[RolloutState]:
    return [health.probe(cell, health.cell(cell).incarnation, ok=outcome == "+") for outcome in outcomes]


def test_F01_failures_that_are_not_consecutive_leave_the_cell_healthy() -> None:
    health, _ = fleet()
    for _ in range(50):
        assert set(probes(health, 0, "-" + "+" * 100)) == {S.HEALTHY}
    assert probes(health, 0, "--+--+--+")[2::3] == [S.HEALTHY] * 3


def test_three_in_a_row_are_a_death() -> None:
    health, _ = fleet()
    assert probes(health, 0, "---") == [S.HEALTHY, S.SUSPECT, S.DEAD]
    assert health.serving() == (1,)
    assert probes(health, 0, "++++")[-1] is S.DEAD, "a probe never makes a dead cell healthy"


def restart(health: FleetHealth, cell: int, step: int = 0) -> int:
    incarnation = health.restarting(cell, step)
    assert incarnation is not None
    assert health.restarted(cell, incarnation)
    return incarnation


def test_F02_a_restart_that_ends_after_the_membership_was_fixed_stays_stale() -> None:
    health, _ = fleet()
    health.died(0, 0, "SIGKILL")
    incarnation = health.restarting(0, step=5)
    refit = health.begin_refit(6)
    assert refit.cells == (1,)
    assert incarnation == 1 and health.restarted(0, 1)
    assert not health.refitted(refit, 0), "it was no member of this refit"
    assert health.refitted(refit, 1)
    assert health.end_refit(refit) == ()
    probes(health, 0, "+" * 10)
    assert health.cell(0).state is S.STALE and health.serving() == (1,)
    following = health.begin_refit(7)
    assert following.members == ((0, 1), (1, 0))
    assert health.refitted(following, 0) and health.cell(0).version == 7
    assert health.serving() == (0, 1)


def test_a_missed_refit_makes_stale_and_the_next_one_heals() -> None:
    health, _ = fleet(3)
    refit = health.begin_refit(1)
    health.refitted(refit, 0)
    health.died(2, 0, "exit code 1")
    assert health.end_refit(refit) == (1,)
    assert [cell.state for cell in health.snapshot()] == [S.HEALTHY, S.STALE, S.DEAD]
    assert "version 1" in health.cell(1).cause
    again = health.begin_refit(1)
    assert again.cells == (0, 1) and health.refitted(again, 1)
    assert health.end_refit(again) == (), "cell 0 holds version 1 already"
    assert not health.refitted(refit, 1), "an older refit has no say any more"


def test_versions_only_grow() -> None:
    health, _ = fleet()
    health.begin_refit(4)
    with pytest.raises(ValueError, match="3 is older than 4"):
        health.begin_refit(3)


def test_a_replacement_starts_with_a_clean_count_and_the_old_one_is_not_heard() -> None:
    health, _ = fleet()
    probes(health, 0, "--")
    assert health.died(0, 0, "exit code 1")
    assert not health.died(0, 0, "exit code 1"), "the same death twice is one"
    incarnation = restart(health, 0)
    assert health.cell(0).failures == 0
    assert health.probe(0, 0, ok=False) is S.STALE and health.cell(0).failures == 0
    assert not health.died(0, 0, "late news of the old process")
    assert health.probe(0, incarnation, ok=False) is S.STALE and health.cell(0).failures == 1


def test_a_suspect_cell_recovers_by_a_probe_and_gets_nothing_new_meanwhile() -> None:
    health, _ = fleet()
    probes(health, 0, "--")
    assert health.serving() == (1,)
    probes(health, 0, "+")
    assert health.serving() == (0, 1)


def test_a_stale_cell_can_die_of_probes() -> None:
    health = FleetHealth([0], initial=S.STALE)
    assert probes(health, 0, "---")[-1] is S.DEAD


def test_backoff_and_budget() -> None:
    restarts = RestartPolicy(max_restarts=3, window_steps=10, backoff_s=2.0, backoff_max_s=3.0)
    health, clock = fleet(1, restarts=restarts)
    waits = []
    for _ in range(3):
        health.died(0, health.cell(0).incarnation, "crash loop")
        start = clock.now
        while not health.due_for_restart():
            clock.now += 0.5
        waits.append(clock.now - start)
        assert health.restarting(0, step=1) is not None
    assert waits == [0.0, 2.0, 3.0]
    health.died(0, 3, "crash loop")
    assert health.restarting(0, step=2) is None and health.cell(0).state is S.GIVEN_UP
    assert health.due_for_restart() == ()
    assert not health.died(0, 3, "again")
    with pytest.raises(IllegalTransition, match="GIVEN_UP"):
        health.restarting(0, step=2)


def test_success_resets_the_backoff_but_not_the_window() -> None:
    policy = RestartPolicy(max_restarts=2, window_steps=10)
    ledger = RestartLedger().restarted(policy, 1).restarted(policy, 5)
    assert ledger.delay_s(policy) == 2.0
    assert ledger.succeeded().delay_s(policy) == 0.0
    assert not ledger.succeeded().allows(policy, 10)
    assert ledger.succeeded().allows(policy, 11), "the restart at step 1 left the window"


def test_only_dead_cells_restart() -> None:
    health, _ = fleet()
    with pytest.raises(IllegalTransition, match="cell 1 is HEALTHY"):
        health.restarting(1, 0)
    assert not health.restarted(1, 0)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="distinct"):
        FleetHealth([])
    with pytest.raises(ValueError, match="DEAD"):
        FleetHealth([0], initial=S.DEAD)
    with pytest.raises(ValueError, match="suspect_after=4"):
        HealthPolicy(suspect_after=4)
    with pytest.raises(ValueError, match="max_restarts.*window_steps.*backoff_factor"):
        RestartPolicy(max_restarts=-1, window_steps=0, backoff_factor=0.5)
    with pytest.raises(KeyError, match="cell 9"):
        fleet()[0].probe(9, 0, ok=True)


class HealthMachine(RuleBasedStateMachine):
    """Whatever happens: a cell that left HEALTHY/SUSPECT comes back only through a refit it was a member of."""

    @initialize(initial=st.sampled_from([S.HEALTHY, S.STALE]))
    def start(self, initial: RolloutState) -> None:
        self.clock = Clock()
        self.health = FleetHealth(range(3), initial=initial, clock=self.clock)
        self.proved = {(i, 0) for i in range(3)} if initial is S.HEALTHY else set()
        self.version = 0
        self.refit = self.health.begin_refit(0)

    @rule(cell=st.integers(0, 2), age=st.integers(0, 1), ok=st.booleans())
    def probe(self, cell: int, age: int, ok: bool) -> None:
        self.health.probe(cell, self.health.cell(cell).incarnation - age, ok=ok)
        self._forget()

    @rule(cell=st.integers(0, 2), age=st.integers(0, 1))
    def died(self, cell: int, age: int) -> None:
        self.health.died(cell, self.health.cell(cell).incarnation - age, "test")
        self._forget()

    @rule(seconds=st.floats(0, 100))
    def restart(self, seconds: float) -> None:
        self.clock.now += seconds
        for cell in self.health.due_for_restart():
            self.health.restarting(cell, self.version)

    @rule(cell=st.integers(0, 2), age=st.integers(0, 1))
    def restarted(self, cell: int, age: int) -> None:
        self.health.restarted(cell, self.health.cell(cell).incarnation - age)

    @rule(grow=st.integers(0, 1))
    def begin(self, grow: int) -> None:
        self.version += grow
        self.refit = self.health.begin_refit(self.version)

    @rule(cell=st.integers(0, 2))
    def refitted(self, cell: int) -> None:
        member = (cell, self.health.cell(cell).incarnation)
        if self.health.refitted(self.refit, cell):
            assert member in self.refit.members
            self.proved.add(member)

    @rule()
    def end(self) -> None:
        self.health.end_refit(self.refit)
        self._forget()

    def _forget(self) -> None:
        for cell in self.health.snapshot():
            if cell.state not in (S.HEALTHY, S.SUSPECT):
                self.proved.discard((cell.index, cell.incarnation))

    @invariant()
    def served_only_with_proof(self) -> None:
        if hasattr(self, "health"):
            for cell in self.health.serving():
                assert (cell, self.health.cell(cell).incarnation) in self.proved


TestHealthMachine = HealthMachine.TestCase
TestHealthMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
