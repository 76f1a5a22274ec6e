"""Remote calls that belong together: if one fails, the others are told at once and get a short time to come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_hooks.cells.deaths import first_line


@dataclass(frozen=True)
class Call:
    """key: of the answer. who: for messages. reference: of the Ray call."""

    key: Hashable
    who: str
    reference: Any


def gather(
    calls: Sequence[Call], deadline: float, abort: Callable[[str], None], *, grace_s: float
) -> dict[Hashable, Any]:
    """{key: what the call returned, or the exception it raised}. Never raises for a failed call.

    deadline: on the monotonic clock. abort(reason) is called once, at the first failure or at the deadline; whoever has
    not answered `grace_s` seconds after it gets a TimeoutError.
    """
    import ray

    answers: dict[Hashable, Any] = {}
    waiting = {call.reference: call for call in calls}
    until, aborted = deadline, False
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        reason = ""
        for reference in ready:
            call = waiting.pop(reference)
            answers[call.key] = answer = _answer(reference)
            if isinstance(answer, Exception):
                reason = f"{call.who}: {first_line(answer)}"
        if not ready:
            late = ", ".join(sorted({call.who for call in waiting.values()}))
            reason = f"{late} had not answered at the deadline"
            if aborted:
                for call in waiting.values():
                    answers[call.key] = TimeoutError(f"{call.who} did not answer")
                break
        if reason and not aborted:
            aborted, until = True, time.monotonic() + grace_s
            abort(reason)
    return answers


def _answer(reference: Any) -> Any:
    """What a finished call returned, or the exception itself, not Ray's wrapping of it."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return error.as_instanceof_cause()
    except Exception as error:  # a death; judged by the caller
        return error
