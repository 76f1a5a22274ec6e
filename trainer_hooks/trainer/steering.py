"""A run's control server: what it shows, and the commands that the loop carries out for it."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_hooks.cells.control import Command, ControlQueue, InjectFault, ResumeCell, SuspendCell
from trainer_hooks.cells.control_server import ControlServer
from trainer_hooks.cells.event_log import Event
from trainer_hooks.cells.fault_plan import Fault
from trainer_hooks.cells.pairing import plan_pairs
from trainer_hooks.cells.supervisor import describe

if TYPE_CHECKING:
    from trainer_hooks.trainer.runtime import Runtime

_EVENTS = 40


class Steering:
    """Its address and token go into OUTPUT_DIR/control.json, readable by the run's user alone."""

    def __init__(self, runtime: Runtime) -> None:
        args = runtime.args
        self._runtime = runtime
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        runtime.log.listeners.append(self._events.append)
        self.queue = ControlQueue()
        self.server = ControlServer(
            self.queue,
            self.status,
            host=args.control_host,
            port=args.control_port,
            fault_injection=args.enable_fault_injection,
        )
        self._file = Path(args.output_dir) / "control.json"
        self._file.unlink(missing_ok=True)
        with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": self.server.url, "token": self.server.token}, file)

    def take(self) -> None:
        """Carry out what was asked for since the last call. For the loop only."""
        for pending in self.queue.take():
            with pending as command:
                self._do(command)

    def _do(self, command: Command) -> None:
        runtime = self._runtime
        if isinstance(command, InjectFault):
            fault = Fault(command.moment, command.how, command.side, command.cell, runtime.rollout_id)
            runtime.faults.inject(fault)
            return
        owner: Any = runtime.group if command.side == "trainer" else runtime.fleet
        if command.side == "rollout" and runtime.args.colocate:
            owner = runtime.group  # a pair is one failure unit
        if isinstance(command, SuspendCell):
            if command.side == "trainer" and [c.index for c in runtime.group.live] == [command.cell]:
                raise ValueError(f"trainer cell {command.cell} is the last that holds the run's state")
            owner.suspend(command.cell)
        elif isinstance(command, ResumeCell):
            owner.resume(command.cell)

    def status(self) -> dict[str, Any]:
        """From any thread."""
        runtime = self._runtime
        group, fleet = runtime.group, runtime.fleet
        rollout = fleet.health.snapshot()
        live = group.supervisor.training()
        pairs: dict[int, int] = (
            dict(plan_pairs(len(group.cells), live, [c.index for c in rollout]).pairs) if live else {}
        )
        return {
            "rollout_id": runtime.rollout_id,
            "version": runtime.version,
            "quorum": group.quorum.to_dict(),
            "tokens_per_s": runtime.tokens_per_s,
            "trainer": [
                {
                    "cell": c.index,
                    "state": describe(c),
                    "incarnation": c.incarnation,
                    "restarts": len(c.ledger.at_steps),
                    "cause": str(getattr(c.state, "cause", "") or ""),
                }
                for c in group.supervisor.snapshot()
            ],
            "rollout": [
                {
                    "cell": c.index,
                    "state": c.state.value,
                    "incarnation": c.incarnation,
                    "version": c.version,
                    "pair": pairs.get(c.index),
                    "cause": c.cause,
                }
                for c in rollout
            ],
            "events": [{"time": e.time, "kind": e.kind, "text": _text(e)} for e in list(self._events)],
        }

    def close(self) -> None:
        self.queue.close()
        self.server.close()
        self._file.unlink(missing_ok=True)


def _text(event: Event) -> str:
    parts = []
    for name, value in event.fields.items():
        shown = f"{len(value)} samples" if name == "samples" else f"{name} {value}"
        parts.append(shown)
    return ", ".join(parts)[:300]
