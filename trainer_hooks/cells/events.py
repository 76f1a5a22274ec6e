"""The kinds of events of a run and their fields: the only place that defines them.

`required` and `optional` map field names to types. A sample id is a string or an int; a cell is an int; `side` is
"trainer" or "rollout"; `steps` maps a role to the [rollout_id, step_index] of the last step contained, or to null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SIDES = ("trainer", "rollout")
DECISIONS = ("commit", "discard")
SAMPLES = "a list of sample ids"

_STEP: dict[str, Any] = {"role": str, "rollout_id": int, "step_index": int}
_ATTEMPT: dict[str, Any] = {**_STEP, "quorum_id": int, "attempt": int}
_CELL: dict[str, Any] = {"side": SIDES, "cell": int, "incarnation": int}
#: Where a run has several train groups, `role` says whose cell it is.
_ROLE: dict[str, Any] = {"role": str}


@dataclass(frozen=True)
class Kind:
    """One kind of event. durable: on disk before `EventLog.append` returns."""

    doc: str
    required: Mapping[str, Any]
    optional: Mapping[str, Any] = MappingProxyType({})
    durable: bool = False


KINDS: dict[str, Kind] = {
    "run_started": Kind(
        "A driver began (again). trainer_cells, rollout_cells: configured counts. checksums: whether cells report "
        "`weights` after each committed version and each refit (default true).",
        {"run": str, "trainer_cells": int, "rollout_cells": int},
        {"resumed": bool, "seed": int, "checksums": bool},
        durable=True,
    ),
    "generated": Kind("A rollout cell finished samples.", {"rollout_id": int, "cell": int, "samples": SAMPLES}),
    "accepted": Kind(
        "Samples entered the batch of a rollout. Each of `roles` must train each of them `passes` times (default 1).",
        {"rollout_id": int, "samples": SAMPLES, "roles": list},
        {"passes": int},
    ),
    "abandoned": Kind(
        "Generated work that was not used: a request re-run elsewhere, a sample filtered out.",
        {"rollout_id": int, "samples": SAMPLES, "cause": str},
    ),
    "quorum": Kind(
        "Membership of a role's trainer cells changed. members: [[cell, incarnation], …].",
        {"role": str, "quorum_id": int, "members": list},
        durable=True,
    ),
    "attempt": Kind("An attempt was opened to these cells.", {**_ATTEMPT, "cells": list}, durable=True),
    "trained": Kind(
        "A cell finished forward and backward on its shard.", {**_ATTEMPT, "cell": int, "samples": SAMPLES}
    ),
    "vote": Kind("A cell's vote.", {**_ATTEMPT, "cell": int, "vote": DECISIONS}, {"cause": str}),
    "decision": Kind(
        "The arbiter's decision; votes: [[cell, vote], …] as far as they came.",
        {**_ATTEMPT, "decision": DECISIONS, "votes": list, "cause": str},
        durable=True,
    ),
    "committed": Kind(
        "The step of these samples was applied by at least one live cell. version: of the weights after it.",
        {**_ATTEMPT, "samples": SAMPLES},
        {"version": int, "loss": float},
        durable=True,
    ),
    "discarded": Kind("An attempt's gradients were thrown away everywhere.", {**_ATTEMPT, "cause": str}),
    "weights": Kind(
        "Checksum over the whole model, independent of its layout, as one cell holds it at `version`; model: the role "
        "that trains it. Cells of either side that report the same model and version must agree.",
        {"side": SIDES, "cell": int, "model": str, "version": int, "checksum": str},
    ),
    "refit": Kind(
        "One pair's refit ended. ok: the rollout cell holds `version` and serves it.",
        {"version": int, "trainer_cell": int, "rollout_cell": int, "ok": bool},
        {"seconds": float, "bytes": int, "cause": str},
    ),
    "cell_dead": Kind(
        "A cell was declared dead.", {**_CELL, "cause": str}, {**_ROLE, "detail": str, "node": str}, durable=True
    ),
    "cell_restarted": Kind("A replacement process was started.", _CELL, {**_ROLE, "node": str}),
    "cell_given_up": Kind("Its restart budget is spent.", _CELL, {**_ROLE, "cause": str}, durable=True),
    "cell_suspended": Kind("An operator took it out.", _CELL, _ROLE),
    "cell_resumed": Kind("An operator put it back.", _CELL, _ROLE),
    "heal": Kind(
        "A trainer cell took its state from `source` (null: initial weights or a checkpoint) and joins the next "
        "quorum. start_seconds: what its process took until it could take the state; seconds, bytes: of the transfer.",
        {"cell": int, "incarnation": int, "source": (int, None), "version": int},
        {**_ROLE, "start_seconds": float, "seconds": float, "bytes": int},
    ),
    "checkpoint": Kind(
        "A checkpoint is complete and verified.",
        {"checkpoint": str, "steps": dict, "version": int},
        {"seconds": float},
        durable=True,
    ),
    "restored": Kind(
        "All trainer state went back to a checkpoint (null: to the initial weights). Commits after `steps` are void; "
        "so are the accepted samples of `lost_rollouts`, which are generated again.",
        {"checkpoint": (str, None), "steps": dict, "version": int, "lost_rollouts": list},
        durable=True,
    ),
    "fault_injected": Kind(
        "A test broke something. fault: its id. kills: whether this cell's death is the expected effect; where one "
        "fault kills several cells (a node), each gets an event with an id of its own.",
        {"fault": str, "side": (*SIDES, "driver", "node"), "cell": int, "how": str, "kills": bool},
        {**_ROLE, "moment": str},
        durable=True,
    ),
    "fault_observed": Kind("The run noticed the injected fault.", {"fault": str}, {"seconds": float}),
    "run_finished": Kind("The run ended as planned; nothing follows it.", {"rollouts": int}, durable=True),
}


class EventError(ValueError):
    """An event that does not fit its kind; names kind, field and what is wrong."""


def check(kind: str, fields: Mapping[str, Any]) -> None:
    """Raises EventError with every violation: unknown kind, missing or unknown field, wrong type or value."""
    spec = KINDS.get(kind)
    if spec is None:
        raise EventError(f"unknown kind of event {kind!r}; known are {', '.join(sorted(KINDS))}")
    problems = [f"field {name!r} is missing" for name in spec.required if name not in fields]
    for name, value in fields.items():
        expected = spec.required.get(name, spec.optional.get(name))
        if expected is None:
            problems.append(f"field {name!r} is unknown")
        elif not _fits(value, expected):
            problems.append(f"field {name!r} must be {_describe(expected)}, got {value!r:.80}")
    if problems:
        raise EventError(f"event {kind!r}: " + "; ".join(problems))


def _fits(value: Any, expected: Any) -> bool:
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if expected is list:
        return isinstance(value, list | tuple)
    if expected is SAMPLES:
        return isinstance(value, list | tuple) and all(_fits(one, int) or isinstance(one, str) for one in value)
    if isinstance(expected, type):
        return isinstance(value, expected)
    if None in expected:
        return value is None or any(_fits(value, one) for one in expected if one is not None)
    return value in expected


def _describe(expected: Any) -> str:
    if isinstance(expected, type):
        return expected.__name__
    if isinstance(expected, str):
        return expected
    return " or ".join(one.__name__ if isinstance(one, type) else repr(one) for one in expected)
