"""What an error of a remote call says about the process that was called."""

from __future__ import annotations

from trainer_hooks.cells.lane import GroupError
from trainer_hooks.cells.state import DeathCause, DeathKind


def death_of(error: BaseException) -> DeathCause | None:
    """Why the process is dead, None if `error` is no death: the process raised it and lives.

    A call that was not answered in time counts as a hang; a cross-cell deadline does not, since a survivor reports it.
    """
    import ray

    text = first_line(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return DeathCause(DeathKind.OUT_OF_MEMORY, text)
    if isinstance(error, ray.exceptions.NodeDiedError):
        return DeathCause(DeathKind.NODE_LOST, text)
    if isinstance(error, ray.exceptions.RayActorError):
        lowered = str(error).lower()
        if "running low on memory" in lowered:  # its memory monitor's words; others only suggest the possibility
            return DeathCause(DeathKind.OUT_OF_MEMORY, text)
        if "node" in lowered and ("died" in lowered or "dead" in lowered) and "node where" in lowered:
            return DeathCause(DeathKind.NODE_LOST, text)
        return DeathCause(DeathKind.EXIT, text)
    if isinstance(error, TimeoutError) and not isinstance(error, GroupError):
        return DeathCause(DeathKind.HANG, text)
    return None


def first_line(error: BaseException) -> str:
    """The error in one line. Of what a remote call raised: the error there, without Ray's traceback around it."""
    error = getattr(error, "cause", None) or error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
