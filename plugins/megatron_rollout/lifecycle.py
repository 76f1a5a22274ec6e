"""The life cycle of one rollout cell's engine, without I/O: which call is legal when, and what it makes the cell do.

    CREATED --prepare--> AWAKE <--continue/pause--> PAUSED
                         |   ^                        |
             suspend_for_refit  resume_after_refit    |
                         v   |                        |
      ASLEEP <--finish-- SUSPENDED <------------------+
        |  ^                |   ^
        |  '--- refit ---.  |   |
        v                v  v   |  mark_refitted(version)
       prepare          REFITTING -----------> back to where the refit began, with the new version
                            |
                            | failed, or its deadline passed
                            v
                          STALE        DEAD, SHUT_DOWN: from everywhere

The transition that does not exist: STALE → AWAKE. A stale cell has had its requests aborted and its engine suspended;
only `start_refit` and `mark_refitted` bring it back (to SUSPENDED, ASLEEP or CREATED, from where it is resumed or
woken). Nor does REFITTING → AWAKE: the version is stamped before the first new request can be scheduled.

Each call returns a `Transition`: the steps for the ranks of the cell to execute, in order, none if there is nothing to
do. The caller executes them under the transition's deadline inside a `with` block; leaving it commits the new state, an
exception inside it makes the cell DEAD, because its ranks may disagree then. A failed transfer is not such a step: the
caller reports it with `mark_stale`.

Calls are idempotent; an illegal one raises `IllegalState` with the name of the state the cell is in. Nothing here
locks: the owner calls from one thread or holds its own lock. Whether the processes live is decided in `health.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from megatron_rollout.config import Timeouts
from megatron_rollout.lifecycle_states import (
    HINTS,
    TAGS,
    Asleep,
    Awake,
    Created,
    Dead,
    Paused,
    Refitting,
    Resting,
    ShutDown,
    Stale,
    State,
    Step,
    Suspended,
    describe,
)
from megatron_rollout.weight_version import check_version


class IllegalState(RuntimeError):
    """The call is not allowed in the cell's state. The message names the cell, the state and what would help."""


class Transition:
    """Steps to execute, and the state they lead to. Use as a context manager, or call `commit` / `fail`.

    version: what STAMP_VERSION stamps. deadline: on the life cycle's clock, the sum of what each step may take.
    """

    def __init__(
        self, owner: CellLifecycle, operation: str, steps: Sequence[Step], target: State, *, version: int | None = None
    ) -> None:
        self._owner = owner
        self.operation = operation
        self.steps = tuple(steps)
        self.target = target
        self.version = version
        self.deadline = owner.now() + owner.time_for(self.steps)
        self.done = False

    def __bool__(self) -> bool:
        """Whether there is anything to execute."""
        return bool(self.steps)

    def remaining_s(self) -> float:
        """Seconds left for the steps, never below 0."""
        return max(0.0, self.deadline - self._owner.now())

    def commit(self) -> None:
        """All ranks have executed the steps. Without effect if the cell died or was shut down meanwhile."""
        if not self.done:
            self.done = True
            self._owner._committed(self)

    def fail(self, reason: str) -> None:
        """A step failed: the cell is DEAD."""
        if not self.done:
            self.done = True
            self._owner._failed(self, reason)

    def __enter__(self) -> Transition:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.commit()
        else:
            self.fail(f"{type(error).__name__}: {error}")


class CellLifecycle:
    """The state of rollout cell `cell`.

    colocated: the trainer's processes generate. release: what a sleep does with the weights: "offload", "discard", or
        "shared" where they are the trainer's own tensors. version: of the weights in the checkpoint, None with
        `skip_weight_load`. keep_prefix_cache: do not drop it at a refit.
    """

    def __init__(
        self,
        cell: int,
        *,
        version: int | None = 0,
        colocated: bool = False,
        release: str = "offload",
        recomputes_kv_cache: bool = False,
        keep_prefix_cache: bool = False,
        timeouts: Timeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if release not in ("offload", "discard", "shared"):
            raise ValueError(f"release must be offload, discard or shared, got {release!r}")
        self.cell = cell
        self.colocated = colocated
        self.recomputes_kv_cache = recomputes_kv_cache
        self._release = release
        self._keep_prefix_cache = keep_prefix_cache
        self._timeouts = timeouts or Timeouts()
        self._clock = clock
        self._state: State = Created(version)
        self._pending: Transition | None = None
        self._newest = -1 if version is None else version

    # -- what it is in ----------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state now: deadlines that have passed are taken into account."""
        self._expire()
        return self._state

    @property
    def version(self) -> int | None:
        """Version of the weights that a request would be answered with; None where none would be."""
        return getattr(self.state, "version", None)

    @property
    def takes_requests(self) -> bool:
        return isinstance(self.state, Awake) and self._pending is None

    def check_generate(self) -> None:
        """Raises IllegalState unless a new request may be given to this cell."""
        self._begin("generate")
        if not isinstance(self._state, Awake):
            raise self._illegal("generate")

    def now(self) -> float:
        return self._clock()

    def time_for(self, steps: Sequence[Step]) -> float:
        """Seconds that `steps` may take together."""
        limits = {Step.INITIALISE: self._timeouts.start_s, Step.STOP: self._timeouts.shutdown_s}
        return sum(limits.get(step, self._timeouts.lifecycle_s) for step in steps)

    # -- generation -------------------------------------------------------------------------------------------

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> Transition:
        """Initialise or wake. tags ["weights"] only brings the weights' memory back; anything else makes it serve.

        A cell whose weights were discarded becomes STALE, one that never had weights raises: both need a refit.
        """
        operation = "prepare_for_generation"
        if unknown := set(tags or ()) - set(TAGS):
            raise ValueError(f"unknown tags {sorted(unknown)}; choose among {list(TAGS)}")
        state = self._begin(operation)
        weights_only = bool(tags) and set(tags or ()) == {"weights"}
        if isinstance(state, Stale):
            return self._start(
                operation, self._weights_back(state.origin), replace(state, origin=_resident(state.origin))
            )
        if weights_only:
            return self._start(operation, self._weights_back(state), _resident(state))
        match state:
            case Awake():
                return self._start(operation, (), state)
            case Created(int(version)):
                return self._start(operation, (Step.INITIALISE,), Awake(version))
            case Paused(version):
                return self._start(operation, (Step.UNPAUSE,), Awake(version))
            case Suspended(int(version)):
                return self._start(operation, (Step.RESUME, Step.UNPAUSE), Awake(version))
            case Asleep(None, _):
                stale = Stale("the weights were discarded at the last sleep", Asleep(None, resident=True))
                return self._start(operation, (*self._weights_back(state), *self._abort(state)), stale)
            case Asleep(int(version), _):
                wake = (Step.ATTACH_GRAPHS, Step.RESUME, Step.UNPAUSE)
                return self._start(operation, (*self._weights_back(state), *wake), Awake(version))
        raise self._illegal(operation, "a refit has to bring weights first" if isinstance(state, Created) else None)

    def finish_generation(self, release_gpu: bool = True) -> Transition:
        """Colocated: sleep, or go on serving where `release_gpu` is False. Otherwise: clear caches only."""
        operation = "finish_generation"
        state = self._begin(operation)
        if isinstance(state, Refitting):
            raise self._illegal(operation)
        if not self.colocated:
            has_engine = isinstance(state, Awake | Paused | Suspended)
            return self._start(operation, (Step.CLEAR_CACHES,) if has_engine else (), state)
        if not release_gpu:
            return self._start(operation, (), state)
        stale = state if isinstance(state, Stale) else None
        engine = stale.origin if stale else state
        if not isinstance(engine, Awake | Paused | Suspended):
            return self._start(operation, (), state)
        steps = [*self._quiet(engine), Step.DETACH_GRAPHS]
        kept = None if self._release == "discard" else engine.version
        if self._release != "shared":
            steps.append(Step.DISCARD_WEIGHTS if kept is None else Step.OFFLOAD_WEIGHTS)
        steps.append(Step.EMPTY_DEVICE_CACHE)
        asleep = Asleep(kept, resident=self._release == "shared")
        return self._start(operation, steps, replace(stale, origin=asleep) if stale else asleep)

    def pause_generation(self) -> Transition:
        state = self._begin("pause_generation")
        match state:
            case Awake(version):
                return self._start("pause_generation", (Step.PAUSE,), Paused(version))
            case Suspended():
                return self._start("pause_generation", (), replace(state, paused=True))
            case Paused() | Stale():
                return self._start("pause_generation", (), state)
        raise self._illegal("pause_generation")

    def continue_generation(self) -> Transition:
        state = self._begin("continue_generation")
        match state:
            case Paused(version):
                return self._start("continue_generation", (Step.UNPAUSE,), Awake(version))
            case Suspended():
                return self._start("continue_generation", (), replace(state, paused=False))
            case Awake() | Stale():
                return self._start("continue_generation", (), state)
        raise self._illegal("continue_generation")

    def invalidate_kv_cache(self) -> Transition:
        """Drop what no request uses. Whether requests in flight are recomputed is `recomputes_kv_cache`."""
        state = self._begin("invalidate_kv_cache")
        has_engine = isinstance(state, Awake | Paused | Suspended)
        return self._start("invalidate_kv_cache", (Step.CLEAR_CACHES,) if has_engine else (), state)

    # -- refit ------------------------------------------------------------------------------------------------

    def suspend_for_refit(self) -> Transition:
        """Stop the engine between two steps; requests in flight wait. Nothing to do where no engine runs."""
        state = self._begin("suspend_for_refit")
        match state:
            case Awake(version) | Paused(version):
                target = Suspended(version, paused=isinstance(state, Paused))
                return self._start("suspend_for_refit", self._quiet(state), target)
            case Created() | Suspended() | Asleep() | Stale():
                return self._start("suspend_for_refit", (), state)
        raise self._illegal("suspend_for_refit")

    def start_refit(self) -> Transition:
        """The transfer begins: from here until `mark_refitted` the weights are of no version.

        The transfer has `Timeouts.refit_s` seconds. Only a refit that follows one whose deadline passed has steps:
        what that one left in flight is aborted.
        """
        state = self._begin("start_refit")
        origin = state.origin if isinstance(state, Stale) else state
        if isinstance(origin, Asleep) and not origin.resident:
            raise self._illegal("start_refit", 'call prepare_for_generation(tags=["weights"]) first')
        if not isinstance(origin, Created | Suspended | Asleep):
            hint = "call suspend_for_refit first" if isinstance(origin, Awake | Paused) else None
            raise self._illegal("start_refit", hint)
        late = isinstance(state, Stale) and not state.aborted
        target = Refitting(origin, self.now() + self._timeouts.refit_s)
        return self._start("start_refit", self._abort(origin) if late else (), target)

    def mark_refitted(self, version: int) -> Transition:
        """The transfer is complete: stamp `version`. Again with the same version: nothing to do.

        Raises ValueError for a version that is no integer >= 0 or below the newest this cell ever had.
        """
        state = self._begin("mark_refitted")
        check_version(version, self._newest)
        if isinstance(state, Created | Suspended | Asleep) and state.version == version:
            return self._start("mark_refitted", (), state)
        if not isinstance(state, Refitting):
            raise self._illegal("mark_refitted", "start_refit has to come before")
        target = replace(state.origin, version=version)
        if isinstance(target, Created):  # no engine to tell: it starts with this version
            return self._start("mark_refitted", (), target)
        caches = () if self._keep_prefix_cache else (Step.CLEAR_CACHES,)
        return self._start("mark_refitted", (*caches, Step.STAMP_VERSION), target, version=version)

    def resume_after_refit(self) -> Transition:
        """Serve again. A cell that was asleep stays so, a stale one stays stale, a created one gets its engine."""
        state = self._begin("resume_after_refit")
        match state:
            case Suspended(int(version), paused):
                steps = (Step.RESUME,) if paused else (Step.RESUME, Step.UNPAUSE)
                return self._start("resume_after_refit", steps, Paused(version) if paused else Awake(version))
            case Created(int(version)):
                return self._start("resume_after_refit", (Step.INITIALISE,), Awake(version))
            case Awake() | Paused() | Asleep() | Stale() | Created():
                return self._start("resume_after_refit", (), state)
        raise self._illegal("resume_after_refit")

    def mark_stale(self, reason: str) -> Transition:
        """The cell misses the run's weights: its refit failed, or did not take place.

        STALE from this moment on; the steps (abort what is in flight, suspend) are to be executed nevertheless.
        """
        state = self._begin("mark_stale", interrupts=True)
        match state:
            case Stale():
                abort = () if state.aborted else self._abort(state.origin)
                return self._start_now("mark_stale", abort, replace(state, aborted=True))
            case Refitting(origin):
                return self._start_now("mark_stale", self._abort(origin), Stale(reason, _torn(origin)))
            case Created() | Asleep():
                return self._start_now("mark_stale", self._abort(state), Stale(reason, state))
            case Awake(version) | Paused(version) | Suspended(version):
                steps = (*self._abort(state), *self._quiet(state))
                return self._start_now("mark_stale", steps, Stale(reason, Suspended(version)))
        raise self._illegal("mark_stale")

    # -- the end ----------------------------------------------------------------------------------------------

    def mark_dead(self, reason: str) -> None:
        """The cell's processes are gone (or have to go). Keeps the first reason; no effect after `shutdown`."""
        self._pending = None
        if not isinstance(self._state, Dead | ShutDown):
            self._state = Dead(reason)

    def restarted(self, *, has_engine: bool = False) -> None:
        """New processes are up, with whatever weights the checkpoint has: STALE until a refit. Only from DEAD."""
        if not isinstance(self.state, Dead):
            raise self._illegal("restarted", "only a dead cell is restarted")
        self._state = Stale("restarted, waits for a refit", Suspended(None) if has_engine else Created(None))

    def shutdown(self) -> Transition:
        """SHUT_DOWN from this moment on, whatever was going on; the steps are to be executed nevertheless."""
        self._expire()
        if isinstance(self._state, ShutDown):
            return Transition(self, "shutdown", (), self._state)
        self._pending = None
        steps = () if isinstance(self._state, Dead) else (*self._abort(self._state), Step.STOP)
        return self._start_now("shutdown", steps, ShutDown())

    # -- inside -----------------------------------------------------------------------------------------------

    def _begin(self, operation: str, *, interrupts: bool = False) -> State:
        """The state that a call starts from. Raises IllegalState at the end of life and during another transition."""
        self._expire()
        if isinstance(self._state, Dead | ShutDown):
            raise self._illegal(operation)
        if self._pending is not None:
            if not interrupts:
                busy = self._pending.operation
                raise IllegalState(
                    f"rollout cell {self.cell} is {describe(self._state)} and in the middle of {busy} (up to "
                    f"{self._pending.remaining_s():.1f} s more): {operation} has to wait for it"
                )
            self._pending = None
        return self._state

    def _start(self, operation: str, steps: Sequence[Step], target: State, *, version: int | None = None) -> Transition:
        transition = Transition(self, operation, steps, target, version=version)
        self._pending = transition
        if not steps:
            transition.commit()
        return transition

    def _start_now(self, operation: str, steps: Sequence[Step], target: State) -> Transition:
        """A transition whose state holds from the beginning."""
        self._state = target
        return self._start(operation, steps, target)

    def _committed(self, transition: Transition) -> None:
        if self._pending is not transition:
            return
        self._pending = None
        self._state = transition.target
        version = getattr(transition.target, "version", None)
        if version is not None:
            self._newest = max(self._newest, version)

    def _failed(self, transition: Transition, reason: str) -> None:
        if self._pending is transition:
            self.mark_dead(f"{transition.operation} failed: {reason}")

    def _expire(self) -> None:
        pending = self._pending
        if pending is not None and self.now() > pending.deadline:
            seconds = self.time_for(pending.steps)
            steps = ", ".join(step.value for step in pending.steps)
            pending.fail(f"{steps} not done by all ranks within {seconds:g} s")
        if isinstance(self._state, Refitting) and self._pending is None and self.now() > self._state.deadline:
            reason = f"its refit was not complete within {self._timeouts.refit_s:g} s"
            self._state = Stale(reason, _torn(self._state.origin), aborted=False)

    def _abort(self, state: State) -> tuple[Step, ...]:
        """Steps that end the requests of a cell in `state`: none where there is no engine."""
        engine = state.origin if isinstance(state, Stale | Refitting) else state
        return () if isinstance(engine, Created) else (Step.ABORT_REQUESTS,)

    def _quiet(self, state: State) -> tuple[Step, ...]:
        """Steps that stop the engine of a cell in `state`."""
        if isinstance(state, Awake):
            return (Step.PAUSE, Step.SUSPEND)
        return (Step.SUSPEND,) if isinstance(state, Paused) else ()

    def _weights_back(self, state: State) -> tuple[Step, ...]:
        if not isinstance(state, Asleep) or state.resident:
            return ()
        return (Step.ALLOCATE_WEIGHTS,) if state.version is None else (Step.ONLOAD_WEIGHTS,)

    def _illegal(self, operation: str, hint: str | None = None) -> IllegalState:
        help_ = hint or HINTS.get(type(self._state), "")
        return IllegalState(f"rollout cell {self.cell} is {describe(self._state)}: {operation} is refused; {help_}")


def _resident[S](state: S) -> S:
    return replace(state, resident=True) if isinstance(state, Asleep) else state


def _torn(origin: Resting) -> Resting:
    """Where a refit began, with weights of no version."""
    return replace(origin, version=None)
