"""The event log and its audit: a complete run with failures passes, and every way of breaking it is found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_hooks.audit import main
from trainer_hooks.cells.arbiter import Arbiter
from trainer_hooks.cells.audit import audit
from trainer_hooks.cells.event_log import Event, EventLog, LogCorrupt, LogInUse, _encode, read_events
from trainer_hooks.cells.events import KINDS, EventError
from trainer_hooks.cells.quorum import Attempt, Member, Quorum, Step

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small logs are written here and no machine loses power; test_cells_arbiter.py is about fsync."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Run:
    """Writes the log of a small run. `edit` sees the events before they are written, so that a test can break one rule
    while the file itself stays intact."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: Events = []
        self.quorum = Quorum()
        self.incarnations = {0: 1, 1: 1}
        self.version = 0
        self.attempts: dict[Step, int] = {}

    def say(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def start(self, **extra: Any) -> None:
        self.say("run_started", run="r", trainer_cells=2, rollout_cells=2, **extra)
        for cell in self.incarnations:
            self.say("heal", cell=cell, incarnation=1, source=None, version=0)

    def generate(self, rollout: int, count: int = 4) -> list[str]:
        samples = [f"{rollout}/{i}" for i in range(count)]
        self.say("generated", rollout_id=rollout, cell=0, samples=samples)
        self.say("accepted", rollout_id=rollout, samples=samples, roles=["actor"])
        return samples

    def gather(self) -> None:
        following = self.quorum.next(Member(c, i) for c, i in self.incarnations.items())
        if following is not self.quorum:
            self.say("quorum", role="actor", **following.to_dict())
        self.quorum = following

    def attempt(self, rollout: int, samples: list[str], discard: int | None = None) -> dict[str, Any]:
        self.gather()
        step = Step("actor", rollout, 0)
        number = self.attempts.get(step, 0)
        self.attempts[step] = number + 1
        fields = Attempt(step, self.quorum.quorum_id, number).to_dict()
        self.say("attempt", **fields, cells=list(self.quorum.cells))
        votes = []
        for rank, cell in enumerate(self.quorum.cells):
            vote = "discard" if cell == discard else "commit"
            self.say("trained", **fields, cell=cell, samples=samples[rank :: self.quorum.world])
            self.say("vote", **fields, cell=cell, vote=vote)
            votes.append([cell, vote])
        word = "commit" if discard is None else "discard"
        self.say("decision", **fields, decision=word, votes=votes, cause="test")
        if discard is not None:
            self.say("discarded", **fields, cause="test")
        return fields

    def commit(self, rollout: int, samples: list[str], fields: dict[str, Any], tag: str = "") -> None:
        self.version += 1
        self.say("committed", **fields, samples=samples, version=self.version)
        self.report(tag)
        for cell in (0, 1):
            trainer = cell if cell in self.incarnations else next(iter(self.incarnations))
            self.say("refit", version=self.version, trainer_cell=trainer, rollout_cell=cell, ok=True)

    def report(self, tag: str = "", cells: list[int] | None = None) -> None:
        checksum = f"w{self.version}{tag}"
        for cell in cells or list(self.incarnations):
            self.say("weights", side="trainer", cell=cell, model="actor", version=self.version, checksum=checksum)
        for cell in (0, 1) if cells is None else ():
            self.say("weights", side="rollout", cell=cell, model="actor", version=self.version, checksum=checksum)

    def die(self, cell: int, fault: str | None = None) -> None:
        if fault is not None:
            self.say("fault_injected", fault=fault, side="trainer", cell=cell, how="SIGKILL", kills=True)
        incarnation = self.incarnations.pop(cell)
        self.say("cell_dead", side="trainer", cell=cell, incarnation=incarnation, cause="signal")
        if fault is not None:
            self.say("fault_observed", fault=fault, seconds=0.7)

    def heal(self, cell: int, incarnation: int) -> None:
        self.say("cell_restarted", side="trainer", cell=cell, incarnation=incarnation)
        self.say("heal", cell=cell, incarnation=incarnation, source=0, version=self.version)
        self.incarnations[cell] = incarnation
        self.incarnations = dict(sorted(self.incarnations.items()))
        self.report(cells=[cell])

    def write(self) -> Path:
        with EventLog(self.path, clock=lambda: 1.0) as log:
            for kind, fields in self.events:
                log.append(kind, **fields)
        return self.path


def failures(path: Path) -> Run:
    """A run in which a cell is killed, heals, an attempt is discarded, and a checkpoint is restored."""
    run = Run(path)
    run.start()
    first = run.generate(0)
    run.commit(0, first, run.attempt(0, first))
    run.say("checkpoint", checkpoint="c0", steps={"actor": [0, 0]}, version=1)
    second = run.generate(1)
    run.attempt(1, second, discard=1)
    run.die(1, fault="kill-1")
    run.commit(1, second, run.attempt(1, second))
    run.heal(1, incarnation=2)
    third = run.generate(2, count=5)
    run.commit(2, third, run.attempt(2, third))
    # Everything dies; rollout 2 was spilled, rollout 3 was not.
    run.generate(3)
    run.say("restored", checkpoint="c0", steps={"actor": [0, 0]}, version=1, lost_rollouts=[3])
    run.quorum = run.quorum.restored()
    run.version = 1
    run.report()
    run.commit(1, second, run.attempt(1, second), tag="again")
    run.commit(2, third, run.attempt(2, third), tag="again")
    fourth = run.generate(3)
    run.commit(3, fourth, run.attempt(3, fourth))
    run.say("run_finished", rollouts=4)
    return run


def test_a_run_with_failures_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = failures(tmp_path / "log").write()
    report = audit(read_events(path), shrinks=1, heals=1)
    assert report.problems == []
    assert report.counts["samples committed"] == 17 and report.counts["voided commits"] == 2
    assert main([str(path), "--shrinks", "1", "--heals", "1"]) == 0
    assert "clean" in capsys.readouterr().out


def drop(events: Events, kind: str, which: int = 0) -> None:
    del events[[i for i, (one, _) in enumerate(events) if one == kind][which]]


def change(events: Events, kind: str, which: int = 0, **fields: Any) -> None:
    at = [i for i, (one, _) in enumerate(events) if one == kind][which]
    events[at] = (kind, {**events[at][1], **fields})


def repeat(events: Events, kind: str, which: int = 0) -> None:
    at = [i for i, (one, _) in enumerate(events) if one == kind][which]
    events.insert(at + 1, events[at])


BROKEN: dict[str, tuple[Callable[[Events], None], str]] = {
    "sample lost": (
        lambda e: change(e, "committed", 0, samples=["0/0", "0/1", "0/2"]),
        "0/3.*actor|samples are commit",
    ),
    "sample committed twice": (
        lambda e: change(e, "committed", 1, samples=["1/0", "1/1", "1/2", "1/3", "1/3"]),
        "'1/3' is committed 2 times",
    ),
    "sample of another rollout": (lambda e: change(e, "accepted", 1, rollout_id=7), "rollout 7 for actor is committed"),
    "accepted twice": (lambda e: repeat(e, "accepted"), "'0/0' is accepted a second time"),
    "never generated": (lambda e: drop(e, "generated"), "'0/0' is accepted but was never generated"),
    "never accepted": (lambda e: drop(e, "accepted"), "'0/0' is committed but not accepted"),
    "critic forgotten": (
        lambda e: change(e, "accepted", 4, roles=["actor", "critic"]),
        "accepted and not committed: '3/0' for critic",
    ),
    "overlapping shards": (lambda e: change(e, "trained", 0, samples=["0/0", "0/1", "0/2"]), "more than one shard"),
    "cell trains twice": (lambda e: repeat(e, "trained"), "trains twice"),
    "step applied twice": (lambda e: repeat(e, "committed"), "actor step 0.0 is committed a second time"),
    "committed without decision": (lambda e: drop(e, "decision"), "without the decision to commit"),
    "commit against a vote": (lambda e: change(e, "vote", 0, vote="discard"), "without the vote of cells"),
    "commit without a vote": (lambda e: drop(e, "vote"), "without the vote of cells"),
    "decided twice": (lambda e: repeat(e, "decision"), "decided a second time"),
    "discard applied": (lambda e: change(e, "decision", 0, decision="discard"), "without the decision to commit"),
    "decided and forgotten": (lambda e: drop(e, "committed", -1), "decided commit .* and never committed"),
    "attempt reopened": (lambda e: repeat(e, "attempt"), "opened a second time"),
    "discard undecided": (lambda e: change(e, "discarded", 0, attempt=9), "discarded without that decision"),
    "weights differ": (lambda e: change(e, "weights", 1, checksum="other"), "version 1: trainer cell 1 has checksum"),
    "rollout weights differ": (
        lambda e: change(e, "weights", 3, checksum="other"),
        "rollout cell 1 has checksum other",
    ),
    "unproved entry": (lambda e: drop(e, "weights", 6), "did not report|without having reported"),
    "unproved heal": (lambda e: drop(e, "weights", 7), "cell 1 enters without having reported version 2"),
    "version back": (lambda e: change(e, "committed", 1, version=1), "version of actor goes from 1 to 1"),
    "refit back": (lambda e: change(e, "refit", 3, version=1), "refit to version 1 after version 2"),
    "silent shrink": (lambda e: drop(e, "cell_dead"), "left the quorum; nothing happened"),
    "join without heal": (lambda e: drop(e, "heal", 2), "joined the quorum without a heal"),
    "the dead return": (lambda e: change(e, "quorum", 2, members=[[0, 1], [1, 1]]), "in the quorum after its death"),
    "quorum id back": (lambda e: change(e, "quorum", 1, quorum_id=1), "quorum_id of actor goes from 1 to 1"),
    "attempt outside the quorum": (lambda e: change(e, "attempt", 0, cells=[0]), r"opened to cells \[0\]"),
    "fault not observed": (lambda e: drop(e, "fault_observed"), "'kill-1' was injected and not observed"),
    "fault without effect": (lambda e: change(e, "fault_injected", 0, cell=0), "should have killed trainer cell 0"),
    "death without fault": (lambda e: change(e, "fault_injected", 0, kills=False), "without a fault for it"),
    "unknown checkpoint": (lambda e: change(e, "restored", 0, checkpoint="c9"), "'c9' is not in the log"),
    "checkpoint elsewhere": (lambda e: change(e, "restored", 0, steps={"actor": [1, 0]}), "restored are"),
    "checkpoint of the future": (lambda e: change(e, "checkpoint", 0, steps={"actor": [5, 0]}), "was not committed"),
    "void commits not redone": (lambda e: drop(e, "committed", 3), "accepted and not committed: '1/0'"),
    "no end": (lambda e: drop(e, "run_finished"), "not with run_finished"),
    "goes on after the end": (lambda e: repeat(e, "run_finished"), "follows run_finished"),
    "no beginning": (lambda e: drop(e, "run_started"), "must begin with run_started"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_rule_is_found(name: str, tmp_path: Path) -> None:
    break_it, message = BROKEN[name]
    run = failures(tmp_path / "log")
    break_it(run.events)
    path = run.write()
    report = audit(read_events(path))
    assert any(re.search(message, problem) for problem in report.problems), report.problems
    assert main([str(path)]) == 1


def test_a_restarted_driver_begins_with_new_processes(tmp_path: Path) -> None:
    run = failures(tmp_path / "log")
    drop(run.events, "run_finished")
    run.say("checkpoint", checkpoint="c3", steps={"actor": [3, 0]}, version=run.version)
    run.say("fault_injected", fault="driver", side="driver", cell=0, how="SIGKILL", kills=False)
    run.start(resumed=True)
    run.say("fault_observed", fault="driver")
    run.say("restored", checkpoint="c3", steps={"actor": [3, 0]}, version=run.version, lost_rollouts=[])
    run.incarnations = {0: 1, 1: 1}
    run.quorum = run.quorum.restored()
    run.report()
    samples = run.generate(4)
    run.commit(4, samples, run.attempt(4, samples))
    run.say("run_finished", rollouts=5)
    assert audit(read_events(run.write()), shrinks=1, heals=1).problems == []


def test_wrong_counts_of_shrinks_and_heals_are_found(tmp_path: Path) -> None:
    path = failures(tmp_path / "log").write()
    assert audit(read_events(path), shrinks=2, heals=0).problems == [
        "expected 2 shrinks, the log holds 1",
        "expected 0 heals, the log holds 1",
    ]


def test_an_unfinished_log_can_be_audited(tmp_path: Path) -> None:
    run = failures(tmp_path / "log")
    del run.events[-4:]
    path = run.write()
    assert main([str(path), "--unfinished"]) == 0
    assert main([str(path)]) == 1


def test_checksums_can_be_declared_absent(tmp_path: Path) -> None:
    run = failures(tmp_path / "log")
    change(run.events, "run_started", 0, checksums=False)
    run.events = [event for event in run.events if event[0] != "weights"]
    assert audit(read_events(run.write())).problems == []


def swap_lines(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[5], lines[4], *lines[6:]]


def edit_line(lines: list[bytes]) -> list[bytes]:
    at = next(i for i, line in enumerate(lines) if b'"vote":"discard"' in line)
    return [*lines[:at], lines[at].replace(b'"vote":"discard"', b'"vote":"commit"'), *lines[at + 1 :]]


def reseal_line(lines: list[bytes]) -> list[bytes]:
    """An edited line with a sum that fits it: the next line's does not."""
    event = json.loads(lines[6])
    previous = json.loads(lines[5])["sum"]
    stamp, seq, kind = event.pop("time"), event.pop("seq"), event.pop("kind")
    event.pop("sum")
    sealed, _ = _encode(Event(seq, stamp + 1, kind, event), previous)
    return [*lines[:6], sealed.rstrip(b"\n"), *lines[7:]]


CORRUPTIONS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "reordered": swap_lines,
    "edited": edit_line,
    "edited with a fitting sum": reseal_line,
    "line removed": lambda lines: lines[:7] + lines[8:],
    "beginning removed": lambda lines: lines[2:],
    "line repeated": lambda lines: [*lines[:8], lines[7], *lines[8:]],
    "line cut in the middle": lambda lines: [*lines[:5], lines[5][:40], *lines[6:]],
    "last line cut but ended": lambda lines: [*lines[:-1], lines[-1][:-10]],
    "whitespace added": lambda lines: [*lines[:3], lines[3].replace(b":", b": ", 1), *lines[4:]],
    "blank line": lambda lines: [*lines[:3], b"", *lines[3:]],
    "foreign line": lambda lines: [*lines[:3], b'{"kind":"vote"}', *lines[3:]],
    "sum of the wrong length": lambda lines: [*lines[:3], lines[3].replace(b'"sum":"', b'"sum":"0', 1), *lines[4:]],
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_damaged_file_is_rejected(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = failures(tmp_path / "log").write()
    lines = CORRUPTIONS[name](path.read_bytes().split(b"\n")[:-1])
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(LogCorrupt, match=r"log, line \d+"):
        read_events(path)
    with pytest.raises(LogCorrupt):
        EventLog(path)
    assert main([str(path)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_whole_lines_cut_off_at_the_end_are_found_by_the_audit(tmp_path: Path) -> None:
    path = failures(tmp_path / "log").write()
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:-3]) + b"\n")
    assert main([str(path)]) == 1


def test_only_a_torn_last_line_is_tolerated_and_writing_goes_on(tmp_path: Path) -> None:
    run = failures(tmp_path / "log")
    drop(run.events, "run_finished")
    path = run.write()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"sum":"0123')
    assert len(read_events(path)) == len(run.events)
    with EventLog(path) as log:
        assert len(log.recovered) == len(run.events)
        log.append("run_finished", rollouts=4)
    assert path.read_bytes().startswith(whole)
    assert main([str(path)]) == 0


def test_the_command_line(tmp_path: Path) -> None:
    path = failures(tmp_path / "log").write()
    command = [sys.executable, "-m", "trainer_hooks.audit"]
    ok = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60)
    assert ok.returncode == 0 and "clean" in ok.stdout
    missing = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2 and "none: No such file" in missing.stderr and "Traceback" not in missing.stderr


def test_an_empty_log_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert main([str(tmp_path / "log")]) == 1


def test_events_that_do_not_fit_are_refused_whole(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        with pytest.raises(EventError, match="unknown kind of event 'voted'"):
            log.append("voted")
        with pytest.raises(EventError) as error:
            log.append("vote", role="actor", rollout_id=True, step_index=0, quorum_id=1, attempt=0, vote="maybe", x=1)
        for part in ("'cell' is missing", "'rollout_id' must be int", "'vote' must be 'commit' or 'discard'", "'x' is"):
            assert part in str(error.value)
        with pytest.raises(EventError, match="a list of sample ids"):
            log.append("generated", rollout_id=0, cell=0, samples=[1.5])
        with pytest.raises(EventError, match="float"):
            log.append("fault_observed", fault="x", seconds=float("nan"))
        assert log.append("run_finished", rollouts=0).seq == 0
    assert all(kind.doc for kind in KINDS.values())


def test_one_writer_a_file(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log"), pytest.raises(LogInUse, match="another process"):
        EventLog(tmp_path / "log")
    with EventLog(tmp_path / "log") as log:
        pass
    log.close()
    with pytest.raises(OSError, match="unusable"):
        log.append("run_finished", rollouts=0)


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    """F08's kind: what a process held is free when it was killed with SIGKILL."""
    code = (
        "import sys, os, signal\n"
        "from trainer_hooks.cells.event_log import EventLog\n"
        "log = EventLog(sys.argv[1])\n"
        "log.append('run_started', run='r', trainer_cells=1, rollout_cells=1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], timeout=60)
    assert done.returncode == -9
    with EventLog(tmp_path / "log") as log:
        assert [event.kind for event in log.recovered] == ["run_started"]


def test_a_failed_write_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLog(tmp_path / "log") as log:
        log.append("run_started", run="r", trainer_cells=1, rollout_cells=1)
        real = os.write

        def half(fd: int, data: bytes) -> int:
            real(fd, data[: len(data) // 2])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", half)
            with pytest.raises(OSError, match="No space left"):
                log.append("run_finished", rollouts=0)
        log.append("run_finished", rollouts=0)
    assert [event.kind for event in read_events(tmp_path / "log")] == ["run_started", "run_finished"]


def test_the_arbiters_own_events_pass(tmp_path: Path) -> None:
    """What the real arbiter writes is what the audit expects."""
    with EventLog(tmp_path / "log") as log:
        log.append("run_started", run="r", trainer_cells=2, rollout_cells=1, checksums=False)
        for cell in (0, 1):
            log.append("heal", cell=cell, incarnation=1, source=None, version=0)
        arbiter = Arbiter(log)
        quorum = Quorum().next([Member(0, 1), Member(1, 1)])
        log.append("quorum", role="actor", **quorum.to_dict())
        log.append("generated", rollout_id=0, cell=0, samples=[1, 2, 3])
        log.append("accepted", rollout_id=0, samples=[1, 2, 3], roles=["actor"])
        for fails in (True, False):
            attempt = arbiter.begin(Step("actor", 0, 0), quorum)
            for cell, shard in ((0, [1, 2]), (1, [3])):
                log.append("trained", **attempt.to_dict(), cell=cell, samples=shard)
                arbiter.vote(attempt, cell, "discard" if fails else "commit")
                if fails:
                    break
        log.append("committed", **attempt.to_dict(), samples=[1, 2, 3])
        log.append("run_finished", rollouts=1)
    assert audit(read_events(tmp_path / "log")).problems == []
