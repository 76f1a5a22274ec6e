"""Breaking a process on purpose, at a named moment: for tests of what a run survives.

`fault_point(moment)` stands at those moments in the code and does nothing unless this process was armed for it.
"""

from __future__ import annotations

import os
import signal
import threading

#: How a process can be broken.
HOWS = ("SIGKILL", "SIGSTOP", "exception")


class InjectedFault(RuntimeError):
    """Raised by `fault_point` where the armed fault is an exception."""


_armed: dict[str, str] = {}
_lock = threading.Lock()


def arm(moment: str, how: str) -> None:
    """The next time this process comes to `moment` it breaks, once ("now": at once). Raises ValueError for another
    `how`."""
    if how not in HOWS:
        raise ValueError(f"a fault is one of {', '.join(HOWS)}, got {how!r}")
    if moment == "now":
        _break(moment, how)
        return
    with _lock:
        _armed[moment] = how


def disarm() -> None:
    with _lock:
        _armed.clear()


def fault_point(moment: str) -> None:
    """Break here if armed for it. Raises InjectedFault."""
    if not _armed:
        return
    with _lock:
        how = _armed.pop(moment, None)
    if how is not None:
        _break(moment, how)


def _break(moment: str, how: str) -> None:
    if how == "exception":
        raise InjectedFault(f"injected at {moment!r}")
    os.kill(os.getpid(), getattr(signal, how))
