"""Lists of tensor names for messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 20


def listed(names: Sequence[str]) -> str:
    """All names, or the first and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
