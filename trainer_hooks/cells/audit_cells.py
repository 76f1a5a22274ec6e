"""Audit rules on cells: membership of the quorums, weights, and injected faults."""

from __future__ import annotations

from collections import defaultdict

from trainer_hooks.cells.audit_walk import Rules, Walk
from trainer_hooks.cells.event_log import Event
from trainer_hooks.cells.quorum import Attempt

#: (role or None where the run has one train group, cell, incarnation)
_Process = tuple[str | None, int, int]


class MembershipRules(Rules):
    def __init__(self, walk: Walk) -> None:
        super().__init__(walk)
        self._quorums: dict[str, tuple[int, dict[int, int]]] = {}
        self._restored: set[str] = set()
        self._gone: set[_Process] = set()
        self._dead: set[tuple[str, _Process]] = set()
        self._healed: set[_Process] = set()

    def on_run_started(self, event: Event) -> None:
        """No process outlives its driver: incarnations may begin again, quorum ids go on."""
        self._gone.clear()
        self._dead.clear()
        self._healed.clear()
        self._quorums = {role: (quorum_id, {}) for role, (quorum_id, _) in self._quorums.items()}

    def on_quorum(self, event: Event) -> None:
        role, quorum_id = event["role"], event["quorum_id"]
        members = {cell: incarnation for cell, incarnation in event["members"]}
        before_id, before = self._quorums.get(role, (0, {}))
        if quorum_id <= before_id:
            self.walk.problem(f"quorum_id of {role} goes from {before_id} to {quorum_id}")
        if members == before and role not in self._restored:
            self.walk.problem(f"quorum {quorum_id} of {role} has the members of quorum {before_id}")
        for cell, incarnation in before.items():
            if members.get(cell) != incarnation:
                self.walk.counts["shrinks"] += 1
                if not _holds(self._gone, role, cell, incarnation):
                    self.walk.problem(f"{role} cell {cell} ({incarnation}) left the quorum; nothing happened to it")
        for cell, incarnation in members.items():
            if _holds(self._gone, role, cell, incarnation):
                self.walk.problem(f"{role} cell {cell} ({incarnation}) is in the quorum after its death")
            if before.get(cell) != incarnation and not _holds(self._healed, role, cell, incarnation):
                self.walk.problem(f"{role} cell {cell} ({incarnation}) joined the quorum without a heal")
        self._restored.discard(role)
        self._quorums[role] = (quorum_id, members)

    def on_attempt(self, event: Event) -> None:
        attempt = Attempt.from_dict(event.fields)
        role = attempt.step.role
        quorum_id, members = self._quorums.get(role, (0, {}))
        if quorum_id != attempt.quorum_id or list(members) != list(event["cells"]):
            cells = list(event["cells"])
            self.walk.problem(f"{attempt} is opened to cells {cells}; quorum {quorum_id} of {role} is {list(members)}")

    def on_cell_dead(self, event: Event) -> None:
        process = _process(event)
        if (event["side"], process) in self._dead:
            self.walk.problem(f"{event['side']} cell {event['cell']} ({event['incarnation']}) dies a second time")
        self._dead.add((event["side"], process))
        self._remove(event, process)

    def on_cell_suspended(self, event: Event) -> None:
        self._remove(event, _process(event))

    def on_heal(self, event: Event) -> None:
        process = _process(event)
        if process in self._healed:
            self.walk.problem(f"cell {event['cell']} ({event['incarnation']}) is healed a second time")
        self._healed.add(process)
        if event["source"] is not None:
            self.walk.counts["heals"] += 1

    def on_restored(self, event: Event) -> None:
        self._restored.update(event["steps"])

    def _remove(self, event: Event, process: _Process) -> None:
        if event["side"] == "trainer":
            self._gone.add(process)


class WeightRules(Rules):
    def __init__(self, walk: Walk) -> None:
        super().__init__(walk)
        self._checked = True
        self._checksums: dict[tuple[str, int], tuple[str, str]] = {}
        self._reports: set[tuple[str, int, str, int]] = set()
        self._versions: dict[str, list[tuple[tuple[int, int], int]]] = defaultdict(list)
        self._sent = -1

    def on_run_started(self, event: Event) -> None:
        self._checked = bool(event.get("checksums", True))

    def on_weights(self, event: Event) -> None:
        model, version, checksum = event["model"], event["version"], event["checksum"]
        who = f"{event['side']} cell {event['cell']}"
        first, expected = self._checksums.setdefault((model, version), (who, checksum))
        if checksum != expected:
            self.walk.problem(f"{model} version {version}: {who} has checksum {checksum}, {first} has {expected}")
        self._reports.add((event["side"], event["cell"], model, version))

    def on_committed(self, event: Event) -> None:
        version = event.get("version")
        if version is None:
            return
        versions = self._versions[event["role"]]
        if versions and version <= versions[-1][1]:
            self.walk.problem(f"version of {event['role']} goes from {versions[-1][1]} to {version}")
        versions.append(((event["rollout_id"], event["step_index"]), version))

    def on_attempt(self, event: Event) -> None:
        versions = self._versions[event["role"]]
        if not self._checked or not versions:
            return
        newest = versions[-1][1]
        for cell in event["cells"]:
            if ("trainer", cell, event["role"], newest) not in self._reports:
                self.walk.problem(f"{event['role']} cell {cell} enters without having reported version {newest}")

    def on_refit(self, event: Event) -> None:
        version = event["version"]
        if version < self._sent:
            self.walk.problem(f"refit to version {version} after version {self._sent}")
        self._sent = max(self._sent, version)
        if not (event["ok"] and self._checked):
            return
        for side, cell in (("trainer", event["trainer_cell"]), ("rollout", event["rollout_cell"])):
            if not any((one[0], one[1], one[3]) == (side, cell, version) for one in self._reports):
                self.walk.problem(f"{side} cell {cell} did not report its weights of version {version}")

    def on_cell_dead(self, event: Event) -> None:
        """Its replacement has to prove its weights anew."""
        self._reports = {
            one
            for one in self._reports
            if one[:2] != (event["side"], event["cell"]) or event.get("role", one[2]) != one[2]
        }

    on_cell_suspended = on_cell_dead

    def on_restored(self, event: Event) -> None:
        version = event["version"]
        self._checksums = {key: value for key, value in self._checksums.items() if key[1] <= version}
        self._reports.clear()
        for role, versions in self._versions.items():
            at = event["steps"].get(role)
            self._versions[role] = [one for one in versions if at is not None and one[0] <= tuple(at)]
        self._sent = version


class FaultRules(Rules):
    def __init__(self, walk: Walk) -> None:
        super().__init__(walk)
        self._faults: dict[str, Event] = {}
        self._observed: set[str] = set()
        self._deaths: list[Event] = []

    def on_cell_dead(self, event: Event) -> None:
        self._deaths.append(event)

    def on_fault_injected(self, event: Event) -> None:
        if event["fault"] in self._faults:
            self.walk.problem(f"fault {event['fault']!r} is injected a second time")
        self._faults[event["fault"]] = event

    def on_fault_observed(self, event: Event) -> None:
        if event["fault"] not in self._faults:
            self.walk.problem(f"fault {event['fault']!r} is observed but was never injected")
        self._observed.add(event["fault"])

    def end(self, *, unfinished: bool) -> None:
        for name in self._faults:
            if name not in self._observed:
                self.walk.problem(f"fault {name!r} was injected and not observed")
        if not self._faults:
            return
        unexplained = list(self._deaths)
        for name, fault in self._faults.items():
            if not fault["kills"]:
                continue
            death = next((d for d in unexplained if d.seq > fault.seq and _same_cell(d, fault)), None)
            if death is None:
                cell = f"{fault['side']} cell {fault['cell']}"
                self.walk.problem(f"fault {name!r} should have killed {cell}, which did not die")
            else:
                unexplained.remove(death)
        for death in unexplained:
            cell = f"{death['side']} cell {death['cell']}"
            self.walk.problem(f"event {death.seq}: {cell} died ({death['cause']}) without a fault for it")


def _process(event: Event) -> _Process:
    return (event.get("role"), event["cell"], event["incarnation"])


def _holds(table: set[_Process], role: str, cell: int, incarnation: int) -> bool:
    return (role, cell, incarnation) in table or (None, cell, incarnation) in table


def _same_cell(death: Event, fault: Event) -> bool:
    roles = (death.get("role"), fault.get("role"))
    return death["side"] == fault["side"] and death["cell"] == fault["cell"] and (None in roles or roles[0] == roles[1])
