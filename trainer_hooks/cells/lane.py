"""One configured process group and the one thread that touches it.

Why a thread: neither gloo nor the NCCL of a hung peer returns from a wait just because somebody wants it to (gloo's
abort does nothing at all, and destroying the group blocks until the operation in flight has timed out). So the
operation runs here, and whoever waits for it can leave at once: on a deadline, or when another thread calls `fail`.
What is left behind ends by the operation's own timeout, touching nothing but the buffers it was given, and closes its
connections.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class GroupError(RuntimeError):
    """A cross-cell operation did not complete. What it was to fill is undefined: recompute it, never reduce it
    again."""


class Aborted(GroupError):
    """Another thread called `abort`: a peer is known to be dead."""


class PeerLost(GroupError):
    """The backend reported a failure, mostly a closed connection."""


class DeadlinePassed(GroupError, TimeoutError):
    """The operation was not done in time."""


class GroupUnusable(GroupError):
    """No quorum was configured, or the group was left."""


class Job:
    """An operation handed to a lane."""

    def __init__(self, what: str, call: Callable[[], Any]) -> None:
        self.what = what
        self.call = call
        self.done = False
        self.result: Any = None


class Lane:
    """Runs jobs in order on its own thread. The first failure, of a job or from outside, ends the lane.

    name: for messages. release: frees the process group; called on the lane's thread when nothing runs in it any more.
    interrupt: makes a running operation return where the backend can do that; called on a thread of its own.
    """

    def __init__(self, name: str, release: Callable[[], None], interrupt: Callable[[], None] | None = None) -> None:
        self.name = name
        self._release = release
        self._interrupt = interrupt
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._error: GroupError | None = None
        self._interrupter: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane {name}", daemon=True)
        self._thread.start()

    @property
    def error(self) -> GroupError | None:
        return self._error

    def submit(self, what: str, call: Callable[[], Any]) -> Job:
        """Queues an operation. Raises what ended the lane, if it has ended."""
        self.check()
        job = Job(what, call)
        self._jobs.put(job)
        return job

    def check(self) -> None:
        """Raises what ended the lane, if it has ended."""
        error = self._error
        if error is not None:
            raise type(error)(str(error)) from error

    def wait(self, job: Job, seconds: float) -> Any:
        """The job's result.

        Raises:
            Aborted, PeerLost, DeadlinePassed: as soon as it is known, whatever the backend still does.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not job.done and self._error is None:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if job.done:
                return job.result
            if self._error is not None:
                raise self._error
        late = DeadlinePassed(f"{self.name}: {job.what} was not done after {seconds:g} s")
        self.fail(late)
        raise late

    def fail(self, error: GroupError) -> None:
        """Ends the lane from any thread; everybody who waits gets `error`. Returns at once. The first error stands."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
        self._jobs.put(None)
        if self._interrupt is not None:
            self._interrupter = threading.Thread(target=self._interrupt, name=f"interrupt {self.name}", daemon=True)
            self._interrupter.start()

    def join(self, seconds: float) -> bool:
        """Waits until nothing of a failed lane is left; False if something still is."""
        until = time.monotonic() + seconds
        for thread in (self._interrupter, self._thread):
            if thread is not None:
                thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and self._error is None:
                try:
                    job.result = job.call()
                except Exception as cause:
                    failure = PeerLost(f"{self.name}: {job.what} failed: {cause}")
                    failure.__cause__ = cause
                    self.fail(failure)
                    return
                with self._changed:
                    job.done = True
                    self._changed.notify_all()
                # Nothing here may keep a tensor alive while the lane is idle.
                del job
        finally:
            self._release()
