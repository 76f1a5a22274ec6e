"""The dispatcher with real threads over cells that only pretend to generate (the border here is the Ray actor)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_rollout.cell import CellDead
from megatron_rollout.cell_types import CellFailed
from megatron_rollout.dispatch import Dispatcher, NoCells
from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams
from megatron_rollout.routing import Router, StaticRouter

WAIT_S = 20.0


class FakeCell:
    """Answers each request after `seconds`, one at a time; `die` makes it fall silent, `fail` makes its engine fail."""

    def __init__(self, index: int, seconds: float = 0.0) -> None:
        self.index = index
        self.seconds = seconds
        self.got: list[str] = []
        self.dead = threading.Event()
        self.failure: str | None = None
        self._work: queue.Queue[GenerationRequest] = queue.Queue()
        self._done: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.dead.is_set():
            try:
                request = self._work.get(timeout=0.01)
            except queue.Empty:
                continue
            time.sleep(self.seconds)
            if self.failure is not None:
                self._done.put(CellFailed(self.failure))
                return
            if not self.dead.is_set():
                self._done.put(answer(request))

    def submit(self, requests: list[GenerationRequest], *, stream: bool = False) -> None:
        self.got += [r.request_id for r in requests]
        for request in requests:
            self._work.put(request)

    def collect(self, max_wait_s: float, timeout_s: float) -> list[Any]:
        if self.dead.is_set():
            raise CellDead(f"rollout cell {self.index} died: killed by the test")
        try:
            items = [self._done.get(timeout=0.01)]
        except queue.Empty:
            return []
        while not self._done.empty():
            items.append(self._done.get_nowait())
        return items

    def abort(self, request_ids: list[str] | None = None) -> None: ...


def answer(request: GenerationRequest) -> GenerationOutput:
    return GenerationOutput(request.request_id, request.prompt_ids, output_ids=(7,), logprobs=(-1.0,))


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{i}", (1, 2), SamplingParams(max_new_tokens=4)) for i in range(count)]


class Outcome:
    def __init__(self, expected: int) -> None:
        self.outputs: list[GenerationOutput] = []
        self._expected = expected
        self._complete = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, output: GenerationOutput) -> None:
        with self._lock:
            self.outputs.append(output)
            if len(self.outputs) >= self._expected:
                self._complete.set()

    def wait(self) -> list[GenerationOutput]:
        assert self._complete.wait(WAIT_S), f"{len(self.outputs)} of {self._expected} answers within {WAIT_S} s"
        return self.outputs


Start = Callable[..., Dispatcher]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Dispatcher] = []

    def make(cells: list[FakeCell], router: Any = None, **options: Any) -> Dispatcher:
        chosen = router or Router([c.index for c in cells], max_in_flight=2)
        dispatcher = Dispatcher(cells, chosen, poll_s=0.01, **options)
        started.append(dispatcher)
        return dispatcher

    yield make
    for dispatcher in started:
        for cell in dispatcher.cells.values():
            cell.dead.set()  # type: ignore[attr-defined]
        dispatcher.close()


def test_all_four_cells_work(start: Start) -> None:
    cells = [FakeCell(i, 0.002) for i in range(4)]
    outcome = Outcome(40)
    start(cells).submit(requests(40), outcome)
    outputs = outcome.wait()
    assert sorted(o.request_id for o in outputs) == sorted(r.request_id for r in requests(40))
    assert all(cell.got for cell in cells)
    assert {o.cell for o in outputs} == {0, 1, 2, 3}


def test_one_slow_cell_does_not_hold_up_the_batch(start: Start) -> None:
    """Against a static split, in which the slow cell keeps its quarter."""
    slow, fast, count = 0.1, 0.005, 40

    def seconds(router: Any) -> float:
        cells = [FakeCell(0, slow), *(FakeCell(i, fast) for i in (1, 2, 3))]
        outcome = Outcome(count)
        begin = time.monotonic()
        start(cells, router).submit(requests(count), outcome)
        outcome.wait()
        return time.monotonic() - begin

    adaptive, static = seconds(None), seconds(StaticRouter(range(4)))
    assert static >= slow * count / 4
    assert adaptive < static / 2


def test_requests_on_a_dying_cell_are_run_again_once(start: Start) -> None:
    cells = [FakeCell(0, 0.01), FakeCell(1, 5.0)]
    outcome, down = Outcome(10), []
    dispatcher = start(cells, on_cell_down=lambda index, cause: down.append((index, cause)))
    dispatcher.submit(requests(10), outcome)
    lost = list(cells[1].got)
    assert lost
    cells[1].dead.set()
    outputs = outcome.wait()
    assert len({o.request_id for o in outputs}) == len(outputs) == 10
    assert all(cells[0].got.count(r) == 1 for r in lost)
    assert [index for index, _ in down] == [1] and "killed by the test" in down[0][1]
    assert dispatcher.router.up == {0}


def test_g06_when_no_cell_is_left_everything_fails_with_the_first_cause(start: Start) -> None:
    cells = [FakeCell(0), FakeCell(1)]
    for cell in cells:
        cell.failure = f"ValueError: broken weights on {cell.index}"
    outcome = Outcome(6)
    dispatcher = start(cells)
    dispatcher.submit(requests(6), outcome)
    outputs = outcome.wait()
    assert {o.finish_reason for o in outputs} == {"error"}
    assert all("broken weights" in (o.error or "") for o in outputs)
    with pytest.raises(NoCells, match="broken weights"):
        dispatcher.submit(requests(1), outcome)


def test_late_answers_of_a_cell_that_was_declared_dead_are_ignored(start: Start) -> None:
    cells = [FakeCell(0, 0.01), FakeCell(1, 0.2)]
    outcome = Outcome(4)
    dispatcher = start(cells)
    dispatcher.submit(requests(4), outcome)
    dispatcher.cell_down(1, "declared dead, though it lives")
    outputs = outcome.wait()
    time.sleep(0.5)  # the time in which cell 1 would answer
    assert len(outputs) == 4
    assert all(o.cell == 0 for o in outputs)


def test_a_cell_gets_requests_only_once_it_is_up_again(start: Start) -> None:
    cells = [FakeCell(0, 0.02), FakeCell(1)]
    dispatcher = start(cells)
    dispatcher.cell_down(1, "its refit failed")
    first = Outcome(4)
    dispatcher.submit(requests(4), first)
    first.wait()
    assert cells[1].got == []
    dispatcher.attach(cells[1])
    dispatcher.cell_up(1)
    second = Outcome(4)
    dispatcher.submit(requests(4), second)
    second.wait()
    assert cells[1].got


def test_aborting_what_is_held_back_answers_at_once(start: Start) -> None:
    cells = [FakeCell(0, 1.0)]
    outcome = Outcome(2)
    dispatcher = start(cells, Router([0], max_in_flight=1))
    dispatcher.submit(requests(3), outcome)
    dispatcher.abort(["r1", "r2"])
    assert {(o.request_id, o.finish_reason) for o in outcome.wait()} == {("r1", "abort"), ("r2", "abort")}
