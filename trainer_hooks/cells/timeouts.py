"""Every deadline of the trainer cells, in one place. All in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CellTimeouts:
    """Deadlines in seconds. None of them is how a dead process is found: that is `heartbeat_s` * `heartbeat_misses`
    (and the kernel, which closes a dead process's connections at once).

    start_s: a new process until its first heartbeat (imports, model construction).
    heartbeat_s, heartbeat_misses: one beat is expected each `heartbeat_s`; that many checks in a row without one are a
        death.
    progress_s: a cell that says it is working must move its progress counter within this time.
    configure_s: forming a cross-cell group, its members starting at different moments included.
    collective_s: one bucket of a cross-cell all-reduce, waiting for slower cells included.
    vote_s: from the first vote of an attempt until every vote must be in.
    attempt_s: from the opening of an attempt until every vote must be in, whatever happens.
    ask_s: how long a cell that did not hear the decision waits for the arbiter's answer.
    heal_s: transfer of a cell's whole state. transfer_stall_s: longest silence of the peer within it.
    refit_s: one pair's refit. checkpoint_s: writing one checkpoint.
    kill_s: SIGKILL until the process is reaped. command_s: a command of the control server until the loop took it.
    """

    start_s: float = 300.0
    heartbeat_s: float = 0.5
    heartbeat_misses: int = 3
    progress_s: float = 120.0
    configure_s: float = 30.0
    collective_s: float = 60.0
    vote_s: float = 60.0
    attempt_s: float = 1800.0
    ask_s: float = 30.0
    heal_s: float = 600.0
    transfer_stall_s: float = 20.0
    refit_s: float = 120.0
    checkpoint_s: float = 600.0
    kill_s: float = 20.0
    command_s: float = 30.0

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                problems.append(f"{field.name} must be a finite number > 0, got {value!r}")
        if not problems:
            if int(self.heartbeat_misses) != self.heartbeat_misses:
                problems.append(f"heartbeat_misses must be a whole number, got {self.heartbeat_misses}")
            for shorter, longer in _ORDER:
                less, more = getattr(self, shorter), getattr(self, longer)
                if less > more:
                    problems.append(f"{shorter} ({less:g} s) must not exceed {longer} ({more:g} s)")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def detection_s(self) -> float:
        """Longest time until a silent process is declared dead, with checks each `heartbeat_s`."""
        return self.heartbeat_s * (self.heartbeat_misses + 1)


#: What would otherwise cut off the thing it waits for.
_ORDER = (
    ("heartbeat_s", "progress_s"),
    ("collective_s", "attempt_s"),
    ("vote_s", "attempt_s"),
    ("transfer_stall_s", "heal_s"),
)
