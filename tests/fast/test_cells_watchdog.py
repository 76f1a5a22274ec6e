"""Liveness and progress with an injected clock (F09), and the queue between a server thread and the loop (F10)."""

from __future__ import annotations

import threading
import time

import pytest

from trainer_hooks.cells.control import (
    CommandExpired,
    CommandUnanswered,
    ControlQueue,
    InjectFault,
    QueueClosed,
    ResumeCell,
    SuspendCell,
)
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.cells.watchdog import Activity, Beat, Finding, Verdict, Watchdog

TIMES = CellTimeouts(heartbeat_s=1, heartbeat_misses=3, progress_s=10, start_s=30)


class Bench:
    """A watchdog whose clock moves one heartbeat a turn."""

    def __init__(self, **phases: float) -> None:
        self.now = 0.0
        self.dog = Watchdog(TIMES, phase_deadlines=phases, clock=lambda: self.now)

    def turn(self, *beats: Beat, seconds: float = 1.0) -> list[Verdict]:
        for beat in beats:
            self.dog.beat(beat)
        self.now += seconds
        return self.dog.check()

    def turns(self, count: int, *beats: Beat) -> list[tuple[int, Verdict]]:
        return [(turn, verdict) for turn in range(1, count + 1) for verdict in self.turn(*beats)]


def test_three_missed_heartbeats_in_a_row_are_a_death() -> None:
    bench = Bench()
    bench.dog.watch(0, 1)
    assert bench.turn(Beat(0, 1, 5)) == []
    found = bench.turns(5)
    assert [(turn, v.finding) for turn, v in found] == [(1, Finding.SUSPECT), (3, Finding.NO_HEARTBEAT)]
    assert found[-1][1].fatal and "cell 0" in found[-1][1].detail
    assert not bench.dog.beat(Beat(0, 1, 6)), "a cell that was declared dead is not heard again"


def test_misses_that_are_not_in_a_row_do_not_add_up() -> None:
    bench = Bench()
    bench.dog.watch(0, 1)
    for counter in range(20):
        findings = [v.finding for v in bench.turn(Beat(0, 1, counter)) + bench.turn() + bench.turn()]
        assert findings in ([Finding.SUSPECT], [Finding.RECOVERED, Finding.SUSPECT])


def test_F09_a_beating_cell_that_stands_still_hangs() -> None:
    bench = Bench()
    bench.dog.watch(0, 1)
    bench.dog.watch(1, 1)
    stuck = Beat(0, 1, 7, phase="backward")
    # Cell 1 waits for cell 0 in a collective: it stands still as well and is not the one to blame.
    found = bench.turns(15, stuck, Beat(1, 1, 7, Activity.WAITING))
    assert [(turn, v.cell, v.finding) for turn, v in found] == [(11, 0, Finding.HANG)]
    assert "'backward'" in found[0][1].detail and "beyond 7" in found[0][1].detail


def test_progress_idleness_and_a_change_of_phase_reset_the_progress_deadline() -> None:
    bench = Bench()
    bench.dog.watch(0, 1)
    for counter in range(5):
        assert bench.turns(9, Beat(0, 1, counter)) == []
    assert bench.turns(30, Beat(0, 1, 4, Activity.IDLE)) == []
    assert bench.turns(9, Beat(0, 1, 4, phase="forward")) == []
    assert bench.turns(9, Beat(0, 1, 4, phase="backward")) == []
    # Waiting long and then working: the wait is not counted against it.
    assert bench.turns(30, Beat(0, 1, 4, Activity.WAITING)) == []
    assert bench.turns(9, Beat(0, 1, 4)) == []


def test_a_phase_can_have_its_own_deadline() -> None:
    bench = Bench(heal=25.0)
    bench.dog.watch(0, 1)
    found = bench.turns(40, Beat(0, 1, 1, phase="heal"))[:1]
    assert found[0][0] == 26 and "25 s" in found[0][1].detail


def test_start_has_one_grace_period_however_often_it_is_announced() -> None:
    bench = Bench()
    found: list[tuple[int, Verdict]] = []
    for turn in range(1, 40):
        bench.dog.watch(0, 1)
        found += [(turn, v) for v in bench.turn()]
        if found:
            break
    assert found[0][0] == 31 and found[0][1].finding is Finding.NEVER_STARTED


def test_a_pause_of_the_watcher_is_not_held_against_the_cells() -> None:
    bench = Bench()
    bench.dog.watch(0, 1)
    bench.turn(Beat(0, 1, 1))
    found = bench.turn(seconds=3600)
    assert [v.finding for v in found] == [Finding.SUSPECT], "one miss, not three thousand"
    assert [v.finding for v in bench.turn(Beat(0, 1, 2))] == [Finding.RECOVERED]


def test_checks_that_come_too_often_do_nothing() -> None:
    bench = Bench()
    bench.dog.watch(0, 1)
    bench.turn(Beat(0, 1, 1))
    for _ in range(9):
        bench.now += 0.1
        assert bench.dog.check() == []


def test_other_incarnations_and_forgotten_cells_are_not_heard() -> None:
    bench = Bench()
    bench.dog.watch(0, 2)
    bench.dog.watch(0, 1)
    assert not bench.dog.beat(Beat(0, 1, 1)) and bench.dog.beat(Beat(0, 2, 1))
    assert not bench.dog.beat(Beat(5, 1, 1))
    bench.dog.forget(0)
    assert bench.turns(10) == []
    bench.dog.watch(0, 3)
    assert bench.dog.beat(Beat(0, 3, 0)), "a replacement is watched from scratch"


def serve(queue: ControlQueue, count: int) -> list[object]:
    seen: list[object] = []
    until = time.monotonic() + 10
    while len(seen) < count and time.monotonic() < until:
        for pending in queue.take(wait_s=0.2):
            with pending as command:
                seen.append(command)
                if isinstance(command, SuspendCell):
                    pending.reply(f"suspended {command.cell}")
                elif isinstance(command, ResumeCell):
                    raise KeyError(f"no cell {command.cell}")
    return seen


def test_commands_are_carried_out_by_the_loop_and_answered() -> None:
    queue = ControlQueue()
    results: dict[str, object] = {}

    def ask(name: str, command: SuspendCell | ResumeCell | InjectFault) -> None:
        try:
            results[name] = queue.request(command, timeout_s=10)
        except Exception as error:
            results[name] = error

    commands = {
        "suspend": SuspendCell("trainer", 1),
        "resume": ResumeCell("trainer", 9),
        "fault": InjectFault("rollout", 0, "SIGKILL"),
    }
    threads = [threading.Thread(target=ask, args=item) for item in commands.items()]
    for thread in threads:
        thread.start()
    seen = serve(queue, 3)
    for thread in threads:
        thread.join(10)
    assert sorted(map(str, seen)) == sorted(map(str, commands.values()))
    assert results["suspend"] == "suspended 1" and results["fault"] is None
    assert isinstance(results["resume"], KeyError), "a refused command reaches who asked, and the loop goes on"


def test_a_command_that_nobody_took_is_never_done() -> None:
    queue = ControlQueue()
    with pytest.raises(CommandExpired, match="SuspendCell"):
        queue.request(SuspendCell("trainer", 0), timeout_s=0.05)
    assert queue.take() == []


def test_a_command_that_was_taken_and_not_answered_says_so() -> None:
    queue = ControlQueue()
    taken: list[object] = []
    loop = threading.Thread(target=lambda: taken.extend(queue.take(wait_s=5)))
    loop.start()
    with pytest.raises(CommandUnanswered, match="may still|not answered"):
        queue.request(SuspendCell("trainer", 0), timeout_s=0.3)
    loop.join(10)
    assert len(taken) == 1


def test_closing_refuses_what_waits_and_what_comes() -> None:
    queue = ControlQueue()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            queue.request(SuspendCell("trainer", 0), timeout_s=10)
        except QueueClosed as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until = time.monotonic() + 10
    while not queue._waiting and time.monotonic() < until:
        time.sleep(0.01)
    queue.close()
    thread.join(10)
    ask()
    assert len(errors) == 2 and queue.take() == []


def test_the_loop_ending_inside_a_command_is_told_to_who_asked() -> None:
    queue = ControlQueue()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            queue.request(SuspendCell("trainer", 0), timeout_s=10)
        except QueueClosed as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    (pending,) = queue.take(wait_s=10)
    with pytest.raises(KeyboardInterrupt), pending:
        raise KeyboardInterrupt
    thread.join(10)
    assert len(errors) == 1
