"""How another thread asks the group's loop to change something: the control server never changes state itself.

A server thread calls `request`; it blocks (with a deadline) until the loop has taken the command, done it and answered.
The loop calls `take` between two pieces of work and answers each command it got. A command that nobody took in time is
withdrawn atomically: it is either done and answered, or reported as expired and never done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any


class CommandExpired(TimeoutError):
    """The loop did not take the command in time; it will not be done."""


class CommandUnanswered(TimeoutError):
    """The loop took the command and has not answered in time; it may still be done. Look at the state before asking
    again."""


class QueueClosed(RuntimeError):
    """The run is ending; no command is taken any more."""


@dataclass(frozen=True)
class SuspendCell:
    """Take a cell out: its process is killed, the others go on. side: "trainer" or "rollout"."""

    side: str
    cell: int


@dataclass(frozen=True)
class ResumeCell:
    """Put a suspended or given-up cell back, with a fresh restart budget."""

    side: str
    cell: int


@dataclass(frozen=True)
class InjectFault:
    """Break something on purpose. how: "SIGKILL", "SIGSTOP" or "exception"; moment: where in the iteration."""

    side: str
    cell: int
    how: str
    moment: str = "now"


Command = SuspendCell | ResumeCell | InjectFault


class PendingCommand:
    """A command in the loop's hands. As a context manager it makes sure of an answer: an exception inside the block is
    sent to whoever asked (the loop goes on), and leaving without `reply` answers None."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._answered = threading.Event()
        self._taken = False
        self._result: Any = None
        self._error: BaseException | None = None

    def reply(self, result: Any = None) -> None:
        self._result = result
        self._answered.set()

    def refuse(self, error: Exception) -> None:
        self._error = error
        self._answered.set()

    def __enter__(self) -> Command:
        return self.command

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self.refuse(error)
            return True
        if not self._answered.is_set():
            if error is not None:
                self.refuse(QueueClosed(f"the loop ended while it carried out {self.command}"))
            else:
                self.reply()
        return False


class ControlQueue:
    """Commands from any number of threads to one loop. clock: seconds, monotonic."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived = threading.Condition()
        self._waiting: deque[PendingCommand] = deque()
        self._closed = False

    def request(self, command: Command, timeout_s: float) -> Any:
        """Hands `command` to the loop and returns its answer.

        Raises:
            CommandExpired: the loop did not take it in time.
            CommandUnanswered: taken, but not answered in time.
            QueueClosed: the run is ending.
            Whatever the loop refused it with.
        """
        pending = PendingCommand(command)
        with self._arrived:
            if self._closed:
                raise QueueClosed("the run is ending; no command is taken any more")
            self._waiting.append(pending)
            self._arrived.notify_all()
        if not pending._answered.wait(timeout_s):
            with self._arrived:
                if not pending._taken:
                    self._waiting.remove(pending)
                    raise CommandExpired(f"{command} was not taken within {timeout_s:g} s; it will not be done")
            if not pending._answered.is_set():
                raise CommandUnanswered(f"{command} was taken but not answered within {timeout_s:g} s")
        if pending._error is not None:
            raise pending._error
        return pending._result

    def take(self, wait_s: float = 0.0) -> list[PendingCommand]:
        """Everything that waits now, oldest first; with `wait_s`, waits that long for the first. For the loop only."""
        until = self._clock() + wait_s
        with self._arrived:
            while not self._waiting and not self._closed and (left := until - self._clock()) > 0:
                self._arrived.wait(left)
            taken = list(self._waiting)
            self._waiting.clear()
            for pending in taken:
                pending._taken = True
            return taken

    def close(self) -> None:
        """Refuses what waits and everything that comes. Safe to call again."""
        with self._arrived:
            self._closed = True
            for pending in self._waiting:
                pending._taken = True
                pending.refuse(QueueClosed("the run is ending; the command was not done"))
            self._waiting.clear()
            self._arrived.notify_all()
