"""Who takes part: quorums, attempts, and the once-only check that two groups fit together. Pure.

A `Quorum` is the set of trainer cells of one attempt, each with the incarnation of its process: a cell that died and
was replaced between two steps is a different member although its index is the same. `quorum_id` grows iff that set
changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class NoLiveCells(RuntimeError):
    """No cell is left to form a quorum: restart from a checkpoint."""


class ConnectError(ValueError):
    """Two configured groups do not fit together; the message names every difference."""


class StaleAttempt(RuntimeError):
    """A message of an attempt that is older than what this cell has seen."""


class StepAlreadyApplied(RuntimeError):
    """This cell has applied that optimizer step already; applying it again would count the gradient twice."""


@dataclass(frozen=True, order=True)
class Member:
    cell: int
    incarnation: int


@dataclass(frozen=True)
class Quorum:
    """The live cells of an attempt, sorted by cell index. A member's rank is its position."""

    quorum_id: int = 0
    members: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        if self.quorum_id < 0:
            raise ValueError(f"quorum_id must be >= 0, got {self.quorum_id}")
        cells = [member.cell for member in self.members]
        if cells != sorted(set(cells)):
            raise ValueError(f"members of quorum {self.quorum_id} must be distinct cells in order, got {cells}")

    @property
    def cells(self) -> tuple[int, ...]:
        return tuple(member.cell for member in self.members)

    @property
    def world(self) -> int:
        return len(self.members)

    def rank_of(self, cell: int) -> int:
        """Raises KeyError naming the quorum if `cell` is no member."""
        try:
            return self.cells.index(cell)
        except ValueError:
            raise KeyError(f"cell {cell} is not in quorum {self.quorum_id} of cells {list(self.cells)}") from None

    def next(self, live: Iterable[Member]) -> Quorum:
        """The quorum of the cells alive now: this one if nobody came or went, else one with the next id.

        Raises:
            NoLiveCells: `live` is empty.
        """
        members = tuple(sorted(live))
        if not members:
            raise NoLiveCells(f"no trainer cell is alive after quorum {self.quorum_id} of cells {list(self.cells)}")
        return self if members == self.members else Quorum(self.quorum_id + 1, members)

    def to_dict(self) -> dict[str, Any]:
        return {"quorum_id": self.quorum_id, "members": [[m.cell, m.incarnation] for m in self.members]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Quorum:
        """The inverse of `to_dict`. Raises ValueError naming what is missing or malformed."""
        try:
            members = tuple(Member(int(cell), int(incarnation)) for cell, incarnation in data["members"])
            return cls(int(data["quorum_id"]), members)
        except (KeyError, TypeError, ValueError) as cause:
            raise ValueError(f"not a saved quorum: {dict(data)!r} ({cause})") from cause

    def restored(self) -> Quorum:
        """What a quorum is after a checkpoint was restored or the driver restarted: its id still counts, its members do
        not. The next quorum gets a new id, so that nothing sent before can be taken for something sent after."""
        return Quorum(self.quorum_id, ())


@dataclass(frozen=True, order=True)
class Step:
    """One optimizer update. Steps of one role are ordered by (rollout_id, step_index)."""

    role: str
    rollout_id: int
    step_index: int

    @property
    def position(self) -> tuple[int, int]:
        return (self.rollout_id, self.step_index)

    def __str__(self) -> str:
        return f"{self.role} step {self.rollout_id}.{self.step_index}"


@dataclass(frozen=True, order=True)
class Attempt:
    """One try at a step by one quorum. `attempt` counts from 0 within the step and only grows."""

    step: Step
    quorum_id: int
    attempt: int

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.step} (quorum {self.quorum_id})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "role": self.step.role,
            "rollout_id": self.step.rollout_id,
            "step_index": self.step.step_index,
            "quorum_id": self.quorum_id,
            "attempt": self.attempt,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attempt:
        step = Step(str(data["role"]), int(data["rollout_id"]), int(data["step_index"]))
        return cls(step, int(data["quorum_id"]), int(data["attempt"]))


class StepGuard:
    """A cell's own memory of one role, on each of its ranks: refuses old attempts and steps it has applied.

    `state_dict` travels with the weights (heal, checkpoint): who holds the weights after a step has applied that step.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._applied: tuple[int, int] | None = None
        self._newest: tuple[tuple[int, int], int, int] | None = None
        self._quorum_floor = 0

    @property
    def applied(self) -> tuple[int, int] | None:
        """(rollout_id, step_index) of the last step applied."""
        return self._applied

    def admit(self, attempt: Attempt) -> None:
        """Work on `attempt` begins here, or a message of it arrived.

        Raises:
            StepAlreadyApplied: whatever the attempt.
            StaleAttempt: a newer attempt, or one of a later quorum, was admitted before.
            ValueError: another role's attempt.
        """
        if attempt.step.role != self.role:
            raise ValueError(f"{attempt} came to the guard of role {self.role!r}")
        if self._applied is not None and attempt.step.position <= self._applied:
            raise StepAlreadyApplied(f"{attempt}: this cell has applied {self.role} step {_dotted(self._applied)}")
        if attempt.quorum_id < self._quorum_floor:
            raise StaleAttempt(f"{attempt} is older than quorum {self._quorum_floor}")
        key = (attempt.step.position, attempt.quorum_id, attempt.attempt)
        if self._newest is not None and key < self._newest:
            position, quorum_id, number = self._newest
            raise StaleAttempt(
                f"{attempt} is older than attempt {number} of {self.role} step {_dotted(position)} (quorum {quorum_id})"
            )
        self._newest = key
        self._quorum_floor = attempt.quorum_id

    def apply(self, attempt: Attempt) -> None:
        """Marks the step as applied: call it with the optimizer step, before anything else can fail."""
        self.admit(attempt)
        self._applied = attempt.step.position

    def state_dict(self) -> dict[str, Any]:
        return {"role": self.role, "applied": None if self._applied is None else list(self._applied)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["role"] != self.role:
            raise ValueError(f"state of role {state['role']!r} loaded into the guard of role {self.role!r}")
        applied = state["applied"]
        self._applied = None if applied is None else (int(applied[0]), int(applied[1]))
        # Weights may go back with a checkpoint, quorum ids never do: they keep older messages out.
        self._newest = None


def _dotted(position: tuple[int, int]) -> str:
    return f"{position[0]}.{position[1]}"


@dataclass(frozen=True)
class GroupShape:
    """A configured train group: ranks[i] is the number of ranks of cell i, alive or not."""

    role: str
    ranks: tuple[int, ...]


def check_connect(a: GroupShape, b: GroupShape) -> None:
    """Whether two groups may exchange data cell by cell, rank by rank. Checked once, over configured cells; who is
    alive is each group's own affair at run time.

    Raises:
        ConnectError: unequal cell counts or unequal rank counts, all named in one message.
    """
    problems = []
    if len(a.ranks) != len(b.ranks):
        problems.append(f"{a.role} has {len(a.ranks)} cells, {b.role} has {len(b.ranks)}")
    for cell, (ours, theirs) in enumerate(zip(a.ranks, b.ranks, strict=False)):
        if ours != theirs:
            problems.append(f"cell {cell} has {ours} ranks in {a.role} and {theirs} in {b.role}")
    if problems:
        raise ConnectError(f"cannot connect {a.role} with {b.role}: " + "; ".join(problems))
