"""Which tensors of an update have come, where an update comes in several calls. Pure.

Two ways to say where an update begins and ends:
- `begin` and `end` around it (Miles). What is missing at the end is an error.
- nothing but the version in every call (slime). The update is over when every tensor has come with that version; a call
  with another version begins another update, and the unfinished one is given up.
A call without either is an update of its own, of just what it brings: whoever sends parts answers for the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron_rollout.weight_sync.names import listed


class UpdateIncomplete(ValueError):
    """An update ended although tensors are missing; the message lists them."""


class UpdateSession:
    """expected: every name of the model."""

    def __init__(self, expected: Collection[str]) -> None:
        self._expected = frozenset(expected)
        self._seen: set[str] = set()
        self._bracketed = False
        self._open = False
        self.version: int | None = None

    @property
    def open(self) -> bool:
        """Whether an update has begun that is not complete."""
        return self._open

    @property
    def missing(self) -> list[str]:
        return sorted(self._expected - self._seen)

    def begin(self) -> None:
        """An update begins, ended by `end`; one that was open is given up."""
        self._start(None)
        self._bracketed = True

    def arrived(self, names: Iterable[str], version: int | None) -> bool:
        """Tensors have been written. True: the update is complete with them."""
        if not self._open:
            if version is None:
                return True
            self._start(version)
        elif not self._bracketed and version not in (None, self.version):
            self._start(version)
        self._seen.update(names)
        if version is not None:
            self.version = version
        return not self._bracketed and not self.missing

    def end(self) -> int | None:
        """The version of the update that ends here, None if none was said. Raises UpdateIncomplete."""
        if not (self._open and self._bracketed):
            raise ValueError("end of a weight update that was not begun")
        if missing := self.missing:
            self._bracketed = False
            raise UpdateIncomplete(
                f"the weight update ended without {len(missing)} of {len(self._expected)} tensors: {listed(missing)}"
            )
        return self.version

    def close(self) -> None:
        self._open = self._bracketed = False
        self._seen.clear()

    def _start(self, version: int | None) -> None:
        self._open, self._bracketed = True, False
        self._seen.clear()
        self.version = version
