"""The run's append-only event log: one JSON object a line, each chained to the one before it.

    {"sum":"<32 hex>","seq":17,"time":1722.25,"kind":"vote",…}

`sum` is blake2b-128 over the previous line's sum and this line's bytes after the sum, so that a line that was edited,
moved, repeated or removed breaks the chain. A line reaches the kernel whole, in one write, before `append` returns
(it survives the driver's death); kinds marked durable in `events.py` are also fsynced, which carries everything before
them to disk too (they survive the machine's). A crash may leave a torn last line, and only that: a reader drops a last
line without its newline and nothing else.

The chain finds damage and mistakes. It is no signature: who can write the file can write a consistent one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hooks.cells import events

_SUM_CHARS = 32
_PREFIX = b'{"sum":"'
_HEAD = len(_PREFIX) + _SUM_CHARS + len(b'",')
_FIRST = "0" * _SUM_CHARS


class LogCorrupt(ValueError):
    """The log is not what a driver wrote; the message names the file, the line and what is wrong with it."""


class LogInUse(RuntimeError):
    """Another process writes this log."""


@dataclass(frozen=True)
class Event:
    """seq: position in the log, from 0. time: seconds since the epoch, when it was written."""

    seq: int
    time: float
    kind: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


class EventLog:
    """The writer. Thread-safe; one writer a file, enforced by a lock that the kernel releases with the process.

    An existing log is verified and continued: a torn last line is cut off, the chain goes on. `recovered` holds its
    events. clock: seconds since the epoch.

    Raises:
        LogInUse: another process holds it.
        LogCorrupt: the existing log is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._broken: BaseException | None = None
        #: called with every event after it was written, on the thread that wrote it; they must not raise
        self.listeners: list[Callable[[Event], None]] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        existed = self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LogInUse(f"{self.path} is being written by another process") from None
            recovered, self._end, self._sum = _parse(self.path.read_bytes(), self.path)
            self.recovered: tuple[Event, ...] = tuple(recovered)
            os.ftruncate(self._fd, self._end)
            if not existed:
                _sync_directory(self.path.parent)
        except BaseException:
            os.close(self._fd)
            raise
        self._seq = len(self.recovered)

    def append(self, kind: str, **fields: Any) -> Event:
        """Writes one event; on disk when this returns if its kind is durable.

        Raises:
            EventError: the fields do not fit the kind (nothing is written).
            OSError: the write failed. If not even its traces could be removed, every later call raises too.
        """
        events.check(kind, fields)
        with self._lock:
            if self._broken is not None:
                raise OSError(f"{self.path} is unusable after a failed write") from self._broken
            event = Event(self._seq, self._clock(), kind, fields)
            line, chained = _encode(event, self._sum)
            try:
                self._write(line)
            except OSError as cause:
                try:
                    os.ftruncate(self._fd, self._end)
                except OSError:
                    self._broken = cause
                raise
            self._end += len(line)
            self._sum = chained
            self._seq += 1
            if events.KINDS[kind].durable:
                self._sync()
        for listener in self.listeners:
            listener(event)
        return event

    def flush(self) -> None:
        """Puts everything on disk."""
        with self._lock:
            self._sync()

    def close(self) -> None:
        """Flushes and releases the lock. Safe to call again."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = -1
                self._broken = ValueError("the log was closed")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        written = 0
        while written < len(line):
            written += os.write(self._fd, line[written:])

    def _sync(self) -> None:
        if self._broken is not None:
            raise OSError(f"{self.path} is unusable after a failed write") from self._broken
        try:
            os.fsync(self._fd)
        except OSError as cause:
            # After a failed fsync nobody knows what is on disk, and asking again would report success.
            self._broken = cause
            raise


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a log; a torn last line is dropped.

    Raises:
        LogCorrupt: any other damage, with file and line number.
        OSError: the file cannot be read.
    """
    return _parse(Path(path).read_bytes(), Path(path))[0]


def is_torn(path: str | os.PathLike[str]) -> bool:
    """Whether the last line was cut off (the writer died while writing it)."""
    data = Path(path).read_bytes()
    return bool(data) and not data.endswith(b"\n")


def _encode(event: Event, previous: str) -> tuple[bytes, str]:
    payload = {"seq": event.seq, "time": event.time, "kind": event.kind, **event.fields}
    body = json.dumps(payload, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()[1:]
    chained = _chain(previous, body)
    return _PREFIX + chained.encode() + b'",' + body + b"\n", chained


def _chain(previous: str, body: bytes) -> str:
    return hashlib.blake2b(previous.encode() + body, digest_size=_SUM_CHARS // 2).hexdigest()


def _parse(data: bytes, path: Path) -> tuple[list[Event], int, str]:
    """(events, bytes of whole lines, last sum)."""
    parsed: list[Event] = []
    end, previous = 0, _FIRST
    for number, line in enumerate(_whole_lines(data), start=1):
        where = f"{path}, line {number}"
        if not line.startswith(_PREFIX) or line[_HEAD - 2 : _HEAD] != b'",':
            raise LogCorrupt(f"{where}: does not begin with a checksum")
        written, body = line[len(_PREFIX) : _HEAD - 2], line[_HEAD:]
        chained = _chain(previous, body)
        if written != chained.encode():
            raise LogCorrupt(
                f"{where}: checksum {written.decode(errors='replace')} does not follow from this line and the one "
                f"before (expected {chained}): edited, moved, repeated, or lines before it are missing"
            )
        try:
            payload = json.loads(b"{" + body)
            seq, stamp, kind = payload.pop("seq"), payload.pop("time"), payload.pop("kind")
            events.check(kind, payload)
        except (ValueError, KeyError, AttributeError) as cause:
            raise LogCorrupt(f"{where}: not an event: {cause}") from cause
        if seq != len(parsed):
            raise LogCorrupt(f"{where}: sequence number {seq}, expected {len(parsed)}")
        parsed.append(Event(seq, stamp, kind, payload))
        end += len(line) + 1
        previous = chained
    return parsed, end, previous


def _whole_lines(data: bytes) -> Iterator[bytes]:
    start = 0
    while (stop := data.find(b"\n", start)) >= 0:
        yield data[start:stop]
        start = stop + 1


def _sync_directory(directory: Path) -> None:
    """A new file survives a power failure only when its directory entry was written too."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
