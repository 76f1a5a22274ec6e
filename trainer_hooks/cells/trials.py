"""Which failures a chaos run tries, and whether a trial held. Pure.

A *trial* is one failure in a position: moment, kind, cell, number of cells, policy. A *session* is one run of the real
trainer that goes through several trials, one a rollout, so that the processes are started once. With the policy `wait`
every version of the weights must be bitwise that of the session's reference, the same run without failure.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer_hooks.cells.event_log import Event
from trainer_hooks.cells.fault_plan import Fault

#: Trials of one run: each costs a restart, and the run must end within minutes.
SESSION = 8


@dataclass(frozen=True, order=True)
class Setup:
    """What a session's run is started with. cells: trainer cells; colocated ones also generate."""

    cells: int
    policy: str = "wait"
    colocate: bool = False

    @property
    def reference(self) -> Setup:
        return Setup(self.cells, "wait", self.colocate)

    def __str__(self) -> str:
        return f"{self.cells} {'pairs' if self.colocate else 'cells + 1'}, {self.policy}"


@dataclass(frozen=True, order=True)
class Trial:
    """second: (moment, cell) of another failure in the same rollout, for the moments of a heal."""

    setup: Setup
    moment: str
    how: str
    side: str
    cell: int
    second: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        more = f"+{self.second[0]}:{self.second[1]}" if self.second else ""
        place = f"{self.setup.cells}{'c' if self.setup.colocate else ''}"
        return f"{self.moment}/{self.how}/{self.side}{self.cell}{more}/{place}/{self.setup.policy}"

    def faults(self, rollout: int) -> list[Fault]:
        first = Fault(self.moment, self.how, self.side, self.cell, rollout)
        if self.second is None:
            return [first]
        return [first, Fault(self.second[0], self.how, "trainer", self.second[1], rollout)]

    def to_dict(self) -> dict[str, Any]:
        return {"trial": self.name, **asdict(self)}


def quick_trials() -> list[Trial]:
    """Eight that reach every part: detection, vote, decision, optimizer, exception, stopped process, refit, rollout."""
    two = Setup(2)
    return [
        Trial(two, "idle", "SIGKILL", "trainer", 1),
        Trial(two, "before_vote", "SIGKILL", "trainer", 0),
        Trial(two, "before_step", "SIGKILL", "trainer", 1),
        Trial(two, "before_reduce", "exception", "trainer", 0),
        Trial(two, "generate", "SIGKILL", "rollout", 0),
        Trial(two, "in_reduce", "SIGSTOP", "trainer", 1),
        Trial(two, "after_step", "SIGKILL", "trainer", 0),
        Trial(two, "refit", "SIGKILL", "trainer", 1),
    ]


_TRAINER = (
    "idle",
    "convert",
    "split",
    "forward",
    "backward",
    "before_reduce",
    "in_reduce",
    "after_reduce",
    "before_vote",
    "before_step",
    "after_step",
    "refit",
)
_DRIVER = ("idle", "convert", "split")
_HOWS = ("SIGKILL", "SIGSTOP", "exception")


def all_trials() -> list[Trial]:
    """Every combination that can exist: moment × kind × cell 0 or the last × 2, 3, 4 cells × policy."""
    trials = []
    setups = [Setup(n, policy) for n in (2, 3, 4) for policy in ("wait", "continue")]
    for setup, moment, how, cell in itertools.product(setups, _TRAINER, _HOWS, (0, -1)):
        if how != "exception" or moment not in _DRIVER:
            trials.append(Trial(setup, moment, how, "trainer", cell % setup.cells))
    for setup, how in itertools.product(setups, _HOWS[:2]):
        trials += [Trial(setup, moment, how, "rollout", 0) for moment in ("generate", "refit_reshard")]
        if setup.cells > 2:
            trials.append(Trial(setup, "before_vote", how, "trainer", 0, ("heal_source", 1)))
        trials.append(Trial(setup, "before_vote", how, "trainer", 1, ("heal_destination", 1)))
    for setup, how in itertools.product([Setup(2, p, True) for p in ("wait", "continue")], _HOWS[:2]):
        trials += [Trial(setup, "generate", how, "rollout", cell) for cell in (0, 1)]
        trials.append(Trial(setup, "before_vote", how, "trainer", 0))
    return trials


def covering(trials: Sequence[Trial], *, seed: int, most: int = 40) -> list[Trial]:
    """At most `most` trials that together hold as many pairs of (moment, kind, cell, cells, policy) as can be, chosen
    greedily."""
    rng = random.Random(seed)
    rest = list(trials)
    rng.shuffle(rest)
    missing = set().union(*(_pairs(t) for t in rest)) if rest else set()
    chosen: list[Trial] = []
    while rest and missing and len(chosen) < most:
        best = max(rest, key=lambda t: len(_pairs(t) & missing))
        chosen.append(best)
        missing -= _pairs(best)
        rest.remove(best)
    return chosen


def _pairs(trial: Trial) -> set[tuple[Any, Any]]:
    second = trial.second[0] if trial.second else ""
    facts = {
        "moment": f"{trial.moment}+{second}",
        "how": trial.how,
        "cell": (trial.side, min(trial.cell, 1)),
        "cells": (trial.setup.cells, trial.setup.colocate),
        "policy": trial.setup.policy,
    }
    return set(itertools.combinations(facts.items(), 2))


def sessions(trials: Iterable[Trial], size: int = SESSION) -> list[tuple[Setup, list[Trial]]]:
    """Trials of one setup together, `size` a run at most."""
    by_setup: dict[Setup, list[Trial]] = {}
    for trial in trials:
        by_setup.setdefault(trial.setup, []).append(trial)
    return [
        (setup, group[i : i + size]) for setup, group in sorted(by_setup.items()) for i in range(0, len(group), size)
    ]


@dataclass(frozen=True)
class Verdict:
    """why: empty if the trial held. seconds: from the fault until the run noticed it."""

    trial: Trial
    why: str
    seconds: float | None

    @property
    def held(self) -> bool:
        return not self.why


def judge(trial: Trial, rollout: int, events: Sequence[Event], reference: Mapping[int, str] | None) -> Verdict:
    """What the log of a session says about the trial of its rollout `rollout`. reference: checksum of the weights at
    each version in the run without failure, None where equality is not asked for."""
    seconds: float | None = None
    for fault in trial.faults(rollout):
        name = str(fault)
        injected = next((e for e in events if e.kind == "fault_injected" and e["fault"] == name), None)
        if injected is None:
            return Verdict(trial, f"{name} was not injected", None)
        observed = next((e for e in events if e.kind == "fault_observed" and e["fault"] == name), None)
        if observed is None:
            return Verdict(trial, f"{name} was not observed", None)
        seconds = max(seconds or 0.0, float(observed.get("seconds", 0.0)))
    if not any(e.kind == "committed" and e["rollout_id"] == rollout for e in events):
        return Verdict(trial, f"rollout {rollout} was not committed", seconds)
    if reference is not None:
        version = rollout + 2  # version 1 is the first refit, before rollout 0
        found = weights_by_version(events).get(version)
        if found is None or found != reference.get(version):
            return Verdict(
                trial, f"weights of version {version} are {found}, without failure {reference.get(version)}", seconds
            )
    return Verdict(trial, "", seconds)


def weights_by_version(events: Iterable[Event]) -> dict[int, str]:
    """Checksum of each version, the last one reported (a version after a restore counts)."""
    return {e["version"]: e["checksum"] for e in events if e.kind == "weights" and e["model"] == "actor"}
