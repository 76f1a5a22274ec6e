"""Proves from a run's event log that nothing was lost, nothing was counted twice, and nothing diverged.

What is proved (a broken rule is a problem that names the event):
1. samples and steps (`audit_steps.py`): every accepted sample was generated, is accepted once, and is committed
   exactly once for each role and pass it was accepted for; commits voided by a later `restored` do not count and must
   be made up for. A commit rests on one decision, the decision on the vote 'commit' of every member; one commit a step;
   the cells' shards of the committed attempt are disjoint and add up to the committed samples;
2. membership (`audit_cells.py`): who leaves a quorum was declared dead or suspended, who enters it healed; a dead
   process does not return; quorum ids only grow;
3. weights: all cells of either side report the same checksum for the same model and version; a cell enters an attempt
   only with the newest committed version; versions only grow;
4. faults: every injected fault was observed and had its effect, and in a run with injected faults no other cell died.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer_hooks.cells.audit_cells import FaultRules, MembershipRules, WeightRules
from trainer_hooks.cells.audit_steps import StepRules
from trainer_hooks.cells.audit_walk import Rules, Walk
from trainer_hooks.cells.event_log import Event


@dataclass
class AuditReport:
    """problems: empty iff the log proves all of the above. counts: for people."""

    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not self.problems


def audit(
    events: Iterable[Event], *, unfinished: bool = False, shrinks: int | None = None, heals: int | None = None
) -> AuditReport:
    """Checks a whole log (as `read_events` returns it: the chain is already verified).

    unfinished: accept a log that does not end with `run_finished`; samples that are not committed yet are then fine.
    shrinks, heals: exactly so many members must have left quorums, and been healed by a peer.
    """
    walk = Walk()
    rules: list[Rules] = [kind(walk) for kind in (StepRules, MembershipRules, WeightRules, FaultRules)]
    last: Event | None = None
    for event in events:
        walk.event = event
        walk.counts[event.kind] += 1
        if last is None and event.kind != "run_started":
            walk.problem("the log must begin with run_started")
        if last is not None and last.kind == "run_finished":
            walk.problem("follows run_finished")
        for rule in rules:
            rule.see(event)
        last = event
    walk.event = None
    if last is None:
        walk.problem("the log is empty")
    elif not unfinished and last.kind != "run_finished":
        walk.problem(f"the log ends with {last.kind} (event {last.seq}), not with run_finished")
    for rule in rules:
        rule.end(unfinished=unfinished)
    for name, expected in (("shrinks", shrinks), ("heals", heals)):
        if expected is not None and walk.counts[name] != expected:
            walk.problem(f"expected {expected} {name}, the log holds {walk.counts[name]}")
    return AuditReport(walk.problems, dict(sorted(walk.counts.items())))
