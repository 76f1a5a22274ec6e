"""Routing over rollout cells: the four invariants of the module docstring, affinity, balance and the static router."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams
from megatron_rollout.routing import Router, StaticRouter


def request(name: str, *, prompt: int = 4, new: int = 16, group: str | None = None) -> GenerationRequest:
    return GenerationRequest(name, tuple(range(prompt)), SamplingParams(max_new_tokens=new), group=group)


def test_the_least_loaded_cell_takes_the_next_request() -> None:
    router = Router([0, 1, 2])
    router.submit(request("big", new=100), request("a", new=10), request("b", new=20), request("c", new=5))
    assert [a.cell for a in router.take()] == [0, 1, 2, 1]
    assert [router.outstanding_tokens(cell) for cell in range(3)] == [104, 14 + 9, 24]


def test_samples_of_one_prompt_share_a_cell_while_the_imbalance_stays_below_the_bound() -> None:
    router = Router([0, 1], max_imbalance_tokens=60)
    router.submit(*[request(f"g{i}", group="g") for i in range(6)])  # 20 tokens each
    # The 5th would make cell 0 lead by 80: its lead before it is 80 > 60.
    assert [a.cell for a in router.take()] == [0, 0, 0, 0, 1, 1]


def test_affinity_is_left_when_the_cell_goes_down() -> None:
    router = Router([0, 1])
    router.submit(request("a", group="g"))
    assert router.take()[0].cell == 0
    router.cell_down(0)
    router.submit(request("b", group="g"))
    assert {(a.request.request_id, a.cell) for a in router.take()} == {("a", 1), ("b", 1)}


def test_forgotten_groups_do_not_pile_up() -> None:
    router = Router([0, 1], remembered_groups=2)
    for name in "abcd":
        router.submit(request(name, group=name))
    router.take()
    assert len(router._groups) == 2


def test_in_flight_requests_are_handed_out_again_once_and_first() -> None:
    router = Router([0, 1])
    router.submit(request("a"), request("b"), request("c"))
    first = {a.request.request_id: a for a in router.take()}
    router.submit(request("new"))
    assert router.cell_down(0) == 2
    again = router.take()
    assert [(a.request.request_id, a.cell, a.deaths) for a in again] == [
        ("a", 1, (0,)),
        ("c", 1, (0,)),
        ("new", 1, ()),
    ]
    assert router.take() == []
    assert not router.complete("a", first["a"].ticket), "the dead cell's late answer must be ignored"
    assert router.complete("a", again[0].ticket)
    assert not router.complete("a", again[0].ticket), "the same answer twice must be ignored"
    assert router.complete("b", first["b"].ticket), "cell 1's own request is untouched"


def test_without_a_cell_requests_wait_for_one() -> None:
    router = Router([0])
    router.cell_down(0)
    router.submit(request("a"))
    assert router.take() == [] and router.held == 1
    router.cell_up(0)
    assert [a.request.request_id for a in router.take()] == ["a"]


def test_a_request_resumes_from_what_was_received_of_it() -> None:
    router = Router([0, 1])
    router.submit(request("a"))
    router.take()
    partial = GenerationOutput("a", (0, 1, 2, 3), (7, 8), (-0.1, -0.2), "abort", weight_versions=((0, 3),))
    router.cell_down(0, {"a": partial})
    again = router.take()[0].request
    assert again.output_ids == (7, 8) and again.weight_versions == ((0, 3),)


def test_a_request_under_which_cells_keep_dying_is_given_up_and_named() -> None:
    router = Router([0, 1], max_deaths=2)
    router.submit(request("poison"))
    assert router.take()[0].cell == 0
    router.cell_down(0)
    assert router.take()[0].cell == 1
    router.cell_down(1)
    (lost,) = router.lost()
    assert lost.deaths == (0, 1) and "'poison'" in str(lost) and "0, 1" in str(lost)
    assert router.lost() == [] and router.held == 0
    router.submit(request("poison"))  # its id is free again


def test_a_slow_cell_takes_less_of_a_batch_when_each_may_hold_only_so_many() -> None:
    router = Router([0, 1], max_in_flight=2)
    router.submit(*[request(str(i)) for i in range(7)])
    flying = router.take()
    assert [a.cell for a in flying] == [0, 1, 0, 1] and router.held == 3
    for assignment in flying:
        if assignment.cell == 1:
            assert router.complete(assignment.request.request_id, assignment.ticket)
    assert [a.cell for a in router.take()] == [1, 1], "the cell that is done takes the next ones"
    assert router.cell_down(0) == 2 and router.take() == [], "cell 1 is full"
    router.cell_up(0)
    assert [(a.request.request_id, a.cell) for a in router.take()] == [("0", 0), ("2", 0)]
    with pytest.raises(ValueError, match="max_in_flight must be >= 1, got 0"):
        Router([0], max_in_flight=0)


def test_withdraw() -> None:
    router = Router([0])
    router.submit(request("a"))
    router.take()
    router.submit(request("b"))
    where = router.withdraw("a")
    assert where is not None and where.cell == 0 and router.outstanding_tokens(0) == 0
    assert router.withdraw("b") is None and router.take() == []
    assert router.withdraw("never") is None


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="distinct"):
        Router([0, 0])
    with pytest.raises(ValueError, match="max_deaths"):
        Router([0], max_deaths=0)
    router = Router([0, 2])
    router.submit(request("a"))
    with pytest.raises(ValueError, match="'a'"):
        router.submit(request("b"), request("a"))
    assert [a.request.request_id for a in router.take()] == ["a"], "a refused call queues nothing"
    with pytest.raises(KeyError, match="cell 1"):
        router.cell_down(1)


class RouterMachine(RuleBasedStateMachine):
    """Random histories. The model: which ids are open, and the current ticket of each that is in flight."""

    @initialize(cells=st.integers(1, 4), imbalance=st.sampled_from([0, 50, 10_000]))
    def start(self, cells: int, imbalance: int) -> None:
        self.router = Router(range(cells), max_imbalance_tokens=imbalance, max_deaths=3)
        self.cells = cells
        self.open: set[str] = set()
        self.flying: dict[str, tuple[int, int]] = {}
        self.old: list[tuple[str, int]] = []
        self.finished: set[str] = set()
        self.lost: set[str] = set()
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 200), min_size=1, max_size=4), group=st.sampled_from([None, "x", "y"]))
    def submit(self, tokens: list[int], group: str | None) -> None:
        for new in tokens:
            self.count += 1
            self.router.submit(request(str(self.count), new=new, group=group))
            self.open.add(str(self.count))

    @rule()
    def take(self) -> None:
        for assignment in self.router.take():
            name = assignment.request.request_id
            assert name in self.open and name not in self.flying
            assert assignment.cell in self.router.up
            self.flying[name] = (assignment.ticket, assignment.cell)

    @rule(data=st.data())
    @precondition(lambda self: self.flying)
    def complete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.flying)))
        ticket, _ = self.flying.pop(name)
        assert self.router.complete(name, ticket)
        self.open.remove(name)
        self.finished.add(name)
        self.old.append((name, ticket))

    @rule(data=st.data())
    @precondition(lambda self: self.old)
    def complete_late(self, data: st.DataObject) -> None:
        assert not self.router.complete(*data.draw(st.sampled_from(self.old)))

    @rule(data=st.data())
    def down(self, data: st.DataObject) -> None:
        cell = data.draw(st.integers(0, self.cells - 1))
        gone = {name for name, (_, on) in self.flying.items() if on == cell}
        again = self.router.cell_down(cell)
        lost = {one.request.request_id for one in self.router.lost()}
        assert again == len(gone) - len(lost) and lost <= gone
        for name in gone:
            self.old.append((name, self.flying.pop(name)[0]))
        self.open -= lost
        self.lost |= lost

    @rule(data=st.data())
    def up(self, data: st.DataObject) -> None:
        self.router.cell_up(data.draw(st.integers(0, self.cells - 1)))

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        assert self.router.held == len(self.open) - len(self.flying)
        per_cell = {cell: {a.request.request_id for a in self.router.in_flight(cell)} for cell in range(self.cells)}
        assert sum(len(names) for names in per_cell.values()) == len(self.flying)
        for name, (_, cell) in self.flying.items():
            assert name in per_cell[cell]
        for cell in range(self.cells):
            assert self.router.outstanding_tokens(cell) == sum(a.request.cost for a in self.router.in_flight(cell))
        assert len(self.finished) + len(self.lost) + len(self.open) == self.count

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for cell in range(self.cells):
            self.router.cell_up(cell)
        self.take()
        assert set(self.flying) == self.open, "with all cells up everything open is in flight"


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def ids(assignments: list) -> dict[int, list[str]]:
    out: dict[int, list[str]] = {}
    for assignment in assignments:
        out.setdefault(assignment.cell, []).append(assignment.request.request_id)
    return out


def test_static_assignment_is_by_index_over_configured_cells() -> None:
    router = StaticRouter([0, 1, 2])
    router.cell_down(1)
    router.submit(*[request(str(i)) for i in range(7)])
    assert ids(router.take()) == {0: ["0", "3", "6"], 2: ["2", "5"]}, "a dead cell's share waits for that cell"
    router.cell_up(1)
    assert ids(router.take()) == {1: ["1", "4"]}


def test_a_dead_cells_whole_share_is_run_again_in_the_same_composition() -> None:
    router = StaticRouter([0, 1])
    router.submit(*[request(str(i)) for i in range(6)])
    first = {a.request.request_id: a for a in router.take()}
    assert router.complete("1", first["1"].ticket)
    assert router.cell_down(1) == 3
    assert router.take() == []
    router.cell_up(1)
    again = router.take()
    assert ids(again) == {1: ["1", "3", "5"]} and {a.deaths for a in again} == {(1,)}
    taken = {a.request.request_id: router.complete(a.request.request_id, a.ticket) for a in again}
    assert taken == {"1": False, "3": True, "5": True}, "the second answer for a finished sample is ignored"
    assert not router.complete("3", first["3"].ticket)


def test_a_given_up_cells_share_runs_alone_after_its_hosts_own() -> None:
    router = StaticRouter([0, 1])
    router.submit(*[request(str(i)) for i in range(4)])
    first = router.take()
    router.give_up(1)
    assert router.take() == [], "cell 0 must finish its own share first"
    for assignment in first:
        if assignment.cell == 0:
            assert router.complete(assignment.request.request_id, assignment.ticket)
    assert ids(router.take()) == {0: ["1", "3"]}
    router.submit(request("x"), request("y"))
    assert router.take() == [], "one share at a time"
    with pytest.raises(RuntimeError, match="given up"):
        router.give_up(0)


def test_static_withdraw_keeps_the_composition() -> None:
    router = StaticRouter([0])
    router.submit(request("a"), request("b"))
    first = {a.request.request_id: a for a in router.take()}
    router.cell_down(0)
    assert router.withdraw("a") is None
    router.cell_up(0)
    again = router.take()
    assert ids(again) == {0: ["a", "b"]}
    where = router.withdraw("b")
    assert where is not None and where.ticket == again[1].ticket != first["b"].ticket
    assert not router.complete("a", again[0].ticket)
    assert router.held == 0 and router.take() == []
