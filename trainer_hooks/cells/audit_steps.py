"""Audit rules on samples and optimizer steps: nothing lost, nothing counted twice, nothing decided twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from trainer_hooks.cells.audit_walk import Rules, Walk
from trainer_hooks.cells.event_log import Event
from trainer_hooks.cells.quorum import Attempt, Step

Position = tuple[int, int]


@dataclass
class _Accepted:
    rollout_id: int
    roles: tuple[str, ...]
    passes: int


@dataclass
class _Tried:
    """One attempt: its cells, votes, shards and decision."""

    cells: tuple[int, ...]
    votes: dict[int, str] = field(default_factory=dict)
    shards: dict[int, list[Any]] = field(default_factory=dict)
    decision: str | None = None


@dataclass
class _Commit:
    position: Position
    samples: tuple[Any, ...]


class StepRules(Rules):
    def __init__(self, walk: Walk) -> None:
        super().__init__(walk)
        self._started = False
        self._continues_another_log = False
        self._generated: set[Any] = set()
        self._accepted: dict[Any, _Accepted] = {}
        self._tries: dict[Attempt, _Tried] = {}
        self._unfulfilled: dict[Step, Attempt] = {}
        self._commits: dict[str, list[_Commit]] = defaultdict(list)
        self._committed: Counter[tuple[Any, str]] = Counter()
        self._base: dict[str, Position | None] = {}
        self._checkpoints: dict[str, dict[str, Any]] = {}

    def on_run_started(self, event: Event) -> None:
        resumed = bool(event.get("resumed", False))
        if not self._started:
            self._continues_another_log = resumed
        elif not resumed:
            self.walk.problem("a second run_started that is not a resume")
        self._started = True

    def on_generated(self, event: Event) -> None:
        self._generated.update(event["samples"])

    def on_accepted(self, event: Event) -> None:
        for sample in event["samples"]:
            if sample in self._accepted:
                self.walk.problem(f"sample {sample!r} is accepted a second time")
            if sample not in self._generated and not self._continues_another_log:
                self.walk.problem(f"sample {sample!r} is accepted but was never generated")
            self._accepted[sample] = _Accepted(event["rollout_id"], tuple(event["roles"]), event.get("passes", 1))

    def on_attempt(self, event: Event) -> None:
        attempt = Attempt.from_dict(event.fields)
        if attempt in self._tries:
            self.walk.problem(f"{attempt} is opened a second time")
        position = self._position(attempt.step.role)
        if position is not None and attempt.step.position <= position:
            self.walk.problem(f"{attempt} is opened after step {position[0]}.{position[1]} was committed")
        self._tries[attempt] = _Tried(tuple(event["cells"]))

    def on_trained(self, event: Event) -> None:
        attempt = Attempt.from_dict(event.fields)
        tried = self._tries.get(attempt)
        if tried is None or event["cell"] not in tried.cells:
            self.walk.problem(f"cell {event['cell']} is no member of {attempt}")
        elif event["cell"] in tried.shards:
            self.walk.problem(f"cell {event['cell']} trains twice in {attempt}")
        else:
            tried.shards[event["cell"]] = list(event["samples"])

    def on_vote(self, event: Event) -> None:
        attempt = Attempt.from_dict(event.fields)
        tried = self._tries.get(attempt)
        if tried is None or event["cell"] not in tried.cells:
            self.walk.problem(f"vote of cell {event['cell']}, no member of {attempt}")
        elif tried.decision is not None or event["cell"] in tried.votes:
            self.walk.problem(f"vote of cell {event['cell']} for {attempt} after its vote or the decision")
        else:
            tried.votes[event["cell"]] = event["vote"]

    def on_decision(self, event: Event) -> None:
        attempt = Attempt.from_dict(event.fields)
        tried = self._tries.get(attempt)
        if tried is None:
            self.walk.problem(f"{attempt} is decided but was never opened")
            return
        if tried.decision is not None:
            self.walk.problem(f"{attempt} is decided a second time")
            return
        tried.decision = event["decision"]
        if {cell: vote for cell, vote in event["votes"]} != tried.votes:
            self.walk.problem(f"{attempt}: the decision's votes {event['votes']} are not those in the log")
        if event["decision"] != "commit":
            return
        missing = [cell for cell in tried.cells if tried.votes.get(cell) != "commit"]
        if missing:
            self.walk.problem(f"{attempt} is decided commit without the vote of cells {missing}")
        position = self._position(attempt.step.role)
        if attempt.step in self._unfulfilled or (position is not None and attempt.step.position <= position):
            self.walk.problem(f"{attempt.step} is decided commit a second time")
        self._unfulfilled[attempt.step] = attempt

    def on_discarded(self, event: Event) -> None:
        attempt = Attempt.from_dict(event.fields)
        tried = self._tries.get(attempt)
        if tried is None or tried.decision != "discard":
            self.walk.problem(f"{attempt} is discarded without that decision")

    def on_committed(self, event: Event) -> None:
        attempt = Attempt.from_dict(event.fields)
        step = attempt.step
        tried = self._tries.get(attempt)
        if tried is None or tried.decision != "commit":
            self.walk.problem(f"{attempt} is committed without the decision to commit")
            return
        if self._unfulfilled.pop(step, None) is None:
            self.walk.problem(f"{step} is committed a second time")
        samples = tuple(event["samples"])
        self._check_shards(attempt, tried, samples)
        for sample in samples:
            self._check_sample(sample, step)
        self._commits[step.role].append(_Commit(step.position, samples))

    def on_checkpoint(self, event: Event) -> None:
        self._checkpoints[event["checkpoint"]] = event["steps"]
        for role, at in event["steps"].items():
            position = self._position(role)
            if at is not None and (position is None or tuple(at) > position):
                self.walk.problem(f"{event['checkpoint']} holds {role} step {at[0]}.{at[1]}, which was not committed")

    def on_restored(self, event: Event) -> None:
        steps, name = event["steps"], event["checkpoint"]
        known = dict.fromkeys(steps) if name is None else self._checkpoints.get(name)
        if known is None and not (self._continues_another_log and not any(self._commits.values())):
            self.walk.problem(f"checkpoint {name!r} is not in the log")
        elif known is not None and known != steps:
            self.walk.problem(f"checkpoint {name!r} holds steps {known}, restored are {steps}")
        for role in set(self._commits) | set(steps):
            self._void_after(role, steps.get(role))
        # A decision that no cell lived to carry out is void with everything after the checkpoint.
        for step in list(self._unfulfilled):
            at = steps.get(step.role)
            if at is None or step.position > tuple(at):
                del self._unfulfilled[step]
        self._forget_rollouts(set(event["lost_rollouts"]))

    def end(self, *, unfinished: bool) -> None:
        self.walk.counts["samples committed"] = sum(1 for count in self._committed.values() if count > 0)
        if unfinished:
            return
        for step, attempt in self._unfulfilled.items():
            self.walk.problem(f"{step} was decided commit ({attempt}) and never committed")
        missing = [
            f"{sample!r} for {role} ({self._committed[sample, role]} of {accepted.passes})"
            for sample, accepted in self._accepted.items()
            for role in accepted.roles
            if self._committed[sample, role] < accepted.passes
        ]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            self.walk.problem(f"accepted and not committed: {', '.join(missing[:5])}{more}")

    def _position(self, role: str) -> Position | None:
        commits = self._commits[role]
        return commits[-1].position if commits else self._base.get(role)

    def _check_shards(self, attempt: Attempt, tried: _Tried, samples: tuple[Any, ...]) -> None:
        trained = Counter(sample for shard in tried.shards.values() for sample in shard)
        twice = [repr(sample) for sample, count in trained.items() if count > 1]
        if twice:
            self.walk.problem(f"{attempt}: trained in more than one shard: {', '.join(twice[:5])}")
        distinct = set(samples)
        if trained.keys() != distinct or len(distinct) != len(samples):
            self.walk.problem(
                f"{attempt}: {len(samples)} samples are committed ({len(distinct)} distinct), its shards held "
                f"{len(trained)} distinct ones"
            )

    def _check_sample(self, sample: Any, step: Step) -> None:
        accepted = self._accepted.get(sample)
        if accepted is None:
            self.walk.problem(f"sample {sample!r} is committed but not accepted")
            return
        if step.role not in accepted.roles or step.rollout_id != accepted.rollout_id:
            wanted = f"rollout {accepted.rollout_id} for {', '.join(accepted.roles)}"
            self.walk.problem(f"sample {sample!r} of {wanted} is committed by {step}")
        self._committed[sample, step.role] += 1
        if (count := self._committed[sample, step.role]) > accepted.passes:
            self.walk.problem(f"sample {sample!r} is committed {count} times for {step.role}")

    def _void_after(self, role: str, at: list[int] | None) -> None:
        kept = [c for c in self._commits[role] if at is not None and c.position <= tuple(at)]
        for commit in self._commits[role][len(kept) :]:
            self.walk.counts["voided commits"] += 1
            for sample in commit.samples:
                self._committed[sample, role] -= 1
        self._commits[role] = kept
        self._base[role] = None if at is None else (at[0], at[1])

    def _forget_rollouts(self, lost: set[int]) -> None:
        for sample, accepted in list(self._accepted.items()):
            if accepted.rollout_id in lost:
                if any(self._committed[sample, role] > 0 for role in accepted.roles):
                    self.walk.problem(f"rollout {accepted.rollout_id} is lost, but its sample {sample!r} is committed")
                del self._accepted[sample]
