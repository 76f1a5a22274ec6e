"""What the audit's groups of rules share."""

from __future__ import annotations

from collections import Counter

from trainer_hooks.cells.event_log import Event


class Walk:
    """One pass over a log: the event in hand, and what was found."""

    def __init__(self) -> None:
        self.event: Event | None = None
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()

    def problem(self, text: str) -> None:
        where = f"event {self.event.seq} ({self.event.kind}): " if self.event is not None else ""
        self.problems.append(where + text)


class Rules:
    """A group of rules: a method `on_<kind>` for each kind of event that it looks at."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk

    def see(self, event: Event) -> None:
        handler = getattr(self, f"on_{event.kind}", None)
        if handler is not None:
            handler(event)

    def end(self, *, unfinished: bool) -> None:
        """The log is over."""
