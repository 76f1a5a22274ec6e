"""Decides once, durably, whether an attempt is committed: one vote a cell, one decision an attempt.

Rules, asserted by the tests:
- 'commit' needs the vote 'commit' of every member; one 'discard', a lost member, or a vote missing at the deadline
  makes it 'discard';
- the decision is on disk before anybody hears it; a second decision of the same attempt does not exist;
- at most one attempt of a step is ever decided 'commit' (unless a restored checkpoint voided that step), and a step
  that was committed is never opened again;
- what comes late, twice, from a stranger or for an older attempt changes nothing and gets a defined answer;
- after a driver restart the log alone says what was decided; an attempt that was still open is discarded.

The arbiter lives in the driver, outside every cell. It is thread-safe; votes and questions may come from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainer_hooks.cells.event_log import Event, EventLog
from trainer_hooks.cells.quorum import Attempt, NoLiveCells, Quorum, StaleAttempt, Step, StepAlreadyApplied
from trainer_hooks.cells.timeouts import CellTimeouts

COMMIT = "commit"
DISCARD = "discard"
#: Decisions kept in memory for cells that ask; older ones are in the log.
_REMEMBERED = 4096


class UnknownAttempt(LookupError):
    """This arbiter never opened that attempt (or it is far in the past)."""


class VoteResult(Enum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REVOKED = "revoked"
    LATE = "late"
    STRANGER = "stranger"


@dataclass(frozen=True)
class Decision:
    """votes: (cell, vote) in order of arrival."""

    attempt: Attempt
    decision: str
    cause: str
    votes: tuple[tuple[int, str], ...] = ()

    @property
    def commit(self) -> bool:
        return self.decision == COMMIT


@dataclass(frozen=True)
class VoteReply:
    """What became of a vote, and the decision if there is one already.

    DUPLICATE: the same vote again. REVOKED: the cell had voted otherwise; its first vote stands. LATE: decided before.
    STRANGER: the cell is no member of the attempt.
    """

    result: VoteResult
    decision: Decision | None


@dataclass
class _Open:
    attempt: Attempt
    cells: tuple[int, ...]
    deadline: float
    votes: dict[int, str] = field(default_factory=dict)


class Arbiter:
    """log: where decisions are written; its `recovered` events are the history. clock: seconds, monotonic."""

    def __init__(
        self, log: EventLog, timeouts: CellTimeouts | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._timeouts = timeouts or CellTimeouts()
        self._clock = clock
        self._changed = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._decided: dict[Attempt, Decision] = {}
        self._committed: dict[str, tuple[int, int]] = {}
        self._attempts: dict[Step, int] = {}
        self._quorum_ids: dict[str, int] = {}
        with self._changed:
            self._replay(log.recovered)

    def begin(self, step: Step, quorum: Quorum) -> Attempt:
        """Opens the next attempt of `step` to the members of `quorum`. An attempt of the role that is still open is
        discarded first.

        Raises:
            StepAlreadyApplied: this step, or a later one, was decided 'commit'.
            StaleAttempt: a later quorum of this role was seen before.
            NoLiveCells: the quorum is empty.
        """
        if not quorum.members:
            raise NoLiveCells(f"{step}: quorum {quorum.quorum_id} has no member")
        with self._changed:
            committed = self._committed.get(step.role)
            if committed is not None and step.position <= committed:
                raise StepAlreadyApplied(
                    f"{step}: step {committed[0]}.{committed[1]} of this role was committed already"
                )
            newest = self._quorum_ids.get(step.role, 0)
            if quorum.quorum_id < newest:
                raise StaleAttempt(f"{step}: quorum {quorum.quorum_id} is older than {newest}")
            if (still := self._open.get(step.role)) is not None:
                self._decide(still, DISCARD, "superseded by a new attempt")
            attempt = Attempt(step, quorum.quorum_id, self._attempts.get(step, 0))
            self._log.append("attempt", **attempt.to_dict(), cells=list(quorum.cells))
            self._note_attempt(attempt)
            self._open[step.role] = _Open(attempt, quorum.cells, self._clock() + self._timeouts.attempt_s)
            return attempt

    def vote(self, attempt: Attempt, cell: int, vote: str, cause: str = "") -> VoteReply:
        """A cell's vote, 'commit' or 'discard'; `cause` says why it discards. Never blocks on other cells.

        Raises:
            UnknownAttempt, ValueError (another word than the two).
        """
        if vote not in (COMMIT, DISCARD):
            raise ValueError(f"a vote is {COMMIT!r} or {DISCARD!r}, cell {cell} sent {vote!r}")
        with self._changed:
            self._expire()
            ballot = self._find(attempt)
            if isinstance(ballot, Decision):
                return VoteReply(VoteResult.LATE, ballot)
            if cell not in ballot.cells:
                return VoteReply(VoteResult.STRANGER, None)
            if cell in ballot.votes:
                same = ballot.votes[cell] == vote
                return VoteReply(VoteResult.DUPLICATE if same else VoteResult.REVOKED, None)
            extra = {"cause": cause} if cause else {}
            self._log.append("vote", **attempt.to_dict(), cell=cell, vote=vote, **extra)
            if not ballot.votes:
                ballot.deadline = min(ballot.deadline, self._clock() + self._timeouts.vote_s)
            ballot.votes[cell] = vote
            if vote == DISCARD:
                self._decide(ballot, DISCARD, f"cell {cell}: {cause or 'voted discard'}")
            elif len(ballot.votes) == len(ballot.cells):
                self._decide(ballot, COMMIT, "every cell voted commit")
            return VoteReply(VoteResult.ACCEPTED, self._decided.get(attempt))

    def lose(self, cell: int, cause: str, role: str | None = None) -> list[Decision]:
        """`cell` of `role` (None: of every role) is dead: attempts that still wait for its vote are discarded now, not
        at the deadline. A vote that it sent before it died counts. Returns the decisions this made."""
        with self._changed:
            made = []
            for ballot in list(self._open.values()):
                if role not in (None, ballot.attempt.step.role):
                    continue
                if cell in ballot.cells and cell not in ballot.votes:
                    made.append(self._decide(ballot, DISCARD, f"cell {cell} died before its vote: {cause}"))
            return made

    def discard(self, attempt: Attempt, cause: str) -> Decision:
        """The driver ends an attempt. Returns the decision that stands, which is an earlier one if there was one."""
        with self._changed:
            ballot = self._find(attempt)
            return ballot if isinstance(ballot, Decision) else self._decide(ballot, DISCARD, cause)

    def ask(self, attempt: Attempt) -> Decision | None:
        """The decision, or None while it is open. For cells that did not hear it: ask again, never guess.

        Raises:
            UnknownAttempt
        """
        with self._changed:
            self._expire()
            ballot = self._find(attempt)
            return ballot if isinstance(ballot, Decision) else None

    def wait(self, attempt: Attempt, timeout_s: float) -> Decision:
        """Blocks until the attempt is decided, which its own deadlines guarantee to happen.

        Raises:
            TimeoutError: not decided within `timeout_s`.
            UnknownAttempt
        """
        until = self._clock() + timeout_s
        with self._changed:
            while True:
                self._expire()
                ballot = self._find(attempt)
                if isinstance(ballot, Decision):
                    return ballot
                left = until - self._clock()
                if left <= 0:
                    missing = [cell for cell in ballot.cells if cell not in ballot.votes]
                    raise TimeoutError(f"{attempt} is undecided after {timeout_s:g} s; no vote from cells {missing}")
                self._changed.wait(max(min(left, ballot.deadline - self._clock()), 0.001))

    def restore(
        self,
        checkpoint: str | None,
        steps: Mapping[str, tuple[int, int] | None],
        version: int,
        lost_rollouts: Iterable[int] = (),
    ) -> None:
        """All trainer state went back to `checkpoint`, whose last step of each role is in `steps` (None: none was
        taken). Later steps are void and may be committed again; the caller goes on with `Quorum.restored()`.

        Raises:
            ValueError: a role with commits is missing in `steps`.
        """
        with self._changed:
            missing = sorted(set(self._committed) - set(steps))
            if missing:
                raise ValueError(f"restore to {checkpoint!r} does not say where role(s) {', '.join(missing)} stand")
            for ballot in list(self._open.values()):
                self._decide(ballot, DISCARD, "a checkpoint was restored")
            plain = {role: None if at is None else list(at) for role, at in steps.items()}
            self._log.append(
                "restored", checkpoint=checkpoint, steps=plain, version=version, lost_rollouts=list(lost_rollouts)
            )
            self._void_after(steps)

    def last_quorum_id(self, role: str) -> int:
        """The newest quorum of `role` that this arbiter or its log knows, 0 if none."""
        with self._changed:
            return self._quorum_ids.get(role, 0)

    def last_committed(self, role: str) -> tuple[int, int] | None:
        """(rollout_id, step_index) of the newest committed step that stands."""
        with self._changed:
            return self._committed.get(role)

    # Everything below runs with the lock held.

    def _find(self, attempt: Attempt) -> _Open | Decision:
        decided = self._decided.get(attempt)
        if decided is not None:
            return decided
        ballot = self._open.get(attempt.step.role)
        if ballot is not None and ballot.attempt == attempt:
            return ballot
        raise UnknownAttempt(f"{attempt} was never opened here")

    def _decide(self, ballot: _Open, word: str, cause: str) -> Decision:
        """The only place where a decision is made. On disk first: if that fails, nobody hears of it."""
        attempt = ballot.attempt
        votes = tuple(ballot.votes.items())
        self._log.append(
            "decision", **attempt.to_dict(), decision=word, votes=[list(vote) for vote in votes], cause=cause
        )
        decision = Decision(attempt, word, cause, votes)
        self._note_decision(decision)
        self._changed.notify_all()
        return decision

    def _expire(self) -> None:
        now = self._clock()
        for ballot in list(self._open.values()):
            if now >= ballot.deadline:
                missing = [cell for cell in ballot.cells if cell not in ballot.votes]
                self._decide(ballot, DISCARD, f"no vote from cells {missing} at the deadline")

    def _note_attempt(self, attempt: Attempt) -> None:
        self._attempts[attempt.step] = attempt.attempt + 1
        self._quorum_ids[attempt.step.role] = max(attempt.quorum_id, self._quorum_ids.get(attempt.step.role, 0))
        _forget_oldest(self._attempts)

    def _note_decision(self, decision: Decision) -> None:
        step = decision.attempt.step
        self._decided[decision.attempt] = decision
        self._open.pop(step.role, None)
        if decision.commit:
            self._committed[step.role] = step.position
        _forget_oldest(self._decided)

    def _void_after(self, steps: Mapping[str, Any]) -> None:
        for role, at in steps.items():
            if at is None:
                self._committed.pop(role, None)
            else:
                self._committed[role] = (int(at[0]), int(at[1]))

    def _replay(self, history: Iterable[Event]) -> None:
        for event in history:
            if event.kind == "attempt":
                attempt = Attempt.from_dict(event.fields)
                self._note_attempt(attempt)
                self._open[attempt.step.role] = _Open(attempt, tuple(event["cells"]), deadline=self._clock())
            elif event.kind == "vote":
                ballot = self._open.get(event["role"])
                if ballot is not None and ballot.attempt == Attempt.from_dict(event.fields):
                    ballot.votes[event["cell"]] = event["vote"]
            elif event.kind == "decision":
                votes = tuple((cell, vote) for cell, vote in event["votes"])
                attempt = Attempt.from_dict(event.fields)
                self._note_decision(Decision(attempt, event["decision"], event["cause"], votes))
            elif event.kind == "restored":
                self._void_after(event["steps"])
            elif event.kind == "quorum":
                self._quorum_ids[event["role"]] = max(event["quorum_id"], self._quorum_ids.get(event["role"], 0))
        for ballot in list(self._open.values()):
            # Its votes may all be in the log, but no decision is, so no cell was told to step.
            self._decide(ballot, DISCARD, "the driver restarted before a decision")


def _forget_oldest(table: dict[Any, Any]) -> None:
    while len(table) > _REMEMBERED:
        del table[next(iter(table))]
