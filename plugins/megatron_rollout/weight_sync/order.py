"""The order of every change of weights on a rank of a rollout cell, and what a failure leaves behind.

    suspend → prepare → (all ranks of the cell agree) → move → (they agree again) → drop what old weights left
            → stamp the version → resume

- Nothing is written before every rank of the cell is prepared. A refit that fails until then never started: the cell
  resumes with the weights and the version that it has.
- From the first write on the weights are of no version. If any rank of the cell fails then, the cell stays suspended
  and serves nothing: it is stale until a later refit has gone through. Requests in flight wait in it (whoever owns the
  cell hands them to another one).
- The version is stamped while the engine is suspended, so no request is ever scheduled between new weights and their
  number. A rank never goes back to an older version.
- A cell that was suspended by somebody else (asleep, to leave its memory to training) is left so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_rollout.faults import fault_point
from megatron_rollout.weight_version import check_version

#: What a rank reports to the others of its cell. The worst decides.
_READY, _DONE, _NOT_STARTED, _TORN = 0, 1, 2, 3


class RefitIncomplete(RuntimeError):
    """Another rank of this cell failed its part of a refit; this one did its own."""


class WeightUpdates:
    """Guards the weights of `model`, which `engine` runs.

    landed: whether the model has weights of a version now. agree(code): the largest code that a rank of the cell gave,
    the same on all of them; collective over the cell.
    """

    def __init__(self, engine: Any, model: torch.nn.Module, *, landed: bool, agree: Callable[[int], int]) -> None:
        self._engine = engine
        self._model = model
        self._agree = agree
        self._suspended_here = False
        self.landed = landed
        self.reason = "" if landed else "weights have not landed"

    # -- one refit ----------------------------------------------------------------------------------------------

    def refit(self, version: int, prepare: Callable[[], None], move: Callable[[], None]) -> dict[str, float]:
        """A whole refit; returns the seconds that each part took. Collective over the cell.

        prepare: everything up to the first write, may raise without harm. move: overwrites the weights.
        Raises ValueError for a version below the present one, what `prepare` or `move` raised, or RefitIncomplete.
        """
        watch = _Watch()
        self.begin(version)
        watch.lap("suspend")
        error = _caught(prepare)
        if self._agree(_READY if error is None else _NOT_STARTED) != _READY:
            self.cancel()
            raise error or RefitIncomplete(f"version {version} was not begun: another rank of the cell was not ready")
        watch.lap("prepare")
        self.overwrite(f"the refit to version {version} is not complete")
        error = _caught(move)
        fault_point("refit_moved")
        if self._agree(_DONE if error is None else _TORN) != _DONE:
            self.reason = f"the refit to version {version} failed after it had begun to write"
            raise error or RefitIncomplete(f"{self.reason}, on another rank of the cell")
        watch.lap("move")
        self.complete(version)
        watch.lap("resume")
        return watch.laps

    def worst(self, failed: bool) -> bool:
        """Whether any rank of the cell failed. Collective over the cell."""
        return bool(self._agree(int(failed)))

    # -- its parts, for weights that come in several calls ------------------------------------------------------

    def begin(self, version: int | None = None) -> None:
        """Stop the engine between two steps; requests in flight wait. Raises ValueError for an older version."""
        if version is not None:
            check_version(version, self._engine.version)
        if not self._engine.suspended:
            self._engine.suspend(keep_memory=True)
            self._suspended_here = True

    def overwrite(self, reason: str) -> None:
        """Weights are written from now on: they are of no version until `complete`."""
        self.landed = False
        self.reason = reason

    def cancel(self) -> None:
        """Nothing was written. With weights of a version the cell serves again; torn ones stay out of service."""
        if self.landed:
            self._resume()

    def complete(self, version: int) -> None:
        """All weights are of `version`."""
        refresh_derived(self._model)
        self._engine.drop_prefix_cache()
        fault_point("refit_stamp")
        self._engine.set_version(version)
        self.landed, self.reason = True, ""
        fault_point("refit_resume")
        self._resume()

    def _resume(self) -> None:
        if self._suspended_here:
            self._engine.resume()
            self._suspended_here = False


def refresh_derived(model: torch.nn.Module) -> None:
    """Tell every module that keeps something computed from its weights: `weights_changed()` is called where it is."""
    for module in model.modules():
        if callable(changed := getattr(module, "weights_changed", None)):
            changed()


def _caught(part: Callable[[], None]) -> Exception | None:
    """What `part` raised: the other ranks of the cell have to hear of it before it is raised here."""
    try:
        with torch.no_grad():
            part()
    except Exception as error:  # raised by the caller, whatever it is
        return error
    return None


class _Watch:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
