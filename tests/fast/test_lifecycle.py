"""The life cycle of a rollout cell: each call in each state, and a random walk against an engine that checks steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_rollout.config import Timeouts
from megatron_rollout.lifecycle import CellLifecycle, IllegalState, Transition
from megatron_rollout.lifecycle_states import (
    Asleep,
    Awake,
    Created,
    Dead,
    Paused,
    Refitting,
    ShutDown,
    Stale,
    Step,
    Suspended,
    state_name,
)
from megatron_rollout.weight_version import CapturedVersion

TIMEOUTS = Timeouts(start_s=100, lifecycle_s=10, refit_s=20, shutdown_s=5)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cell(**options: Any) -> CellLifecycle:
    return CellLifecycle(3, timeouts=TIMEOUTS, clock=options.pop("clock", Clock()), **options)


def done(transition: Transition) -> tuple[Step, ...]:
    transition.commit()
    return transition.steps


def awake(**options: Any) -> CellLifecycle:
    life = cell(**options)
    done(life.prepare_for_generation())
    return life


def refit(life: CellLifecycle, version: int) -> None:
    done(life.suspend_for_refit())
    done(life.prepare_for_generation(["weights"]))
    done(life.start_refit())
    done(life.mark_refitted(version))
    done(life.prepare_for_generation(["kv_cache"]))
    done(life.resume_after_refit())


# -- generation -----------------------------------------------------------------------------------------------


def test_prepare_initialises_once_and_then_does_nothing() -> None:
    life = cell()
    assert done(life.prepare_for_generation()) == (Step.INITIALISE,)
    assert life.state == Awake(0) and life.takes_requests
    assert not life.prepare_for_generation()
    life.check_generate()


@pytest.mark.parametrize("make", [cell, awake])
def test_the_weights_tag_alone_never_initialises_or_wakes(make: Callable[..., CellLifecycle]) -> None:
    life = make()
    before = life.state
    assert not life.prepare_for_generation(["weights"])
    assert life.state == before


def test_unknown_tags_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"unknown tags \['kvcache'\]; choose among \['weights', 'kv_cache', 'cuda_gra"
    ):
        cell().prepare_for_generation(["weights", "kvcache"])


def test_finish_keeps_serving_sleeps_or_clears_caches() -> None:
    life = awake(colocated=True)
    assert not life.finish_generation(release_gpu=False)
    assert life.takes_requests

    apart = awake()
    for _ in range(2):
        assert done(apart.finish_generation()) == (Step.CLEAR_CACHES,)
        assert apart.state == Awake(0)

    steps = done(life.finish_generation())
    assert steps == (
        Step.PAUSE,
        Step.SUSPEND,
        Step.DETACH_GRAPHS,
        Step.OFFLOAD_WEIGHTS,
        Step.EMPTY_DEVICE_CACHE,
    )
    assert life.state == Asleep(0, resident=False)
    assert not life.finish_generation()
    with pytest.raises(
        IllegalState, match="rollout cell 3 is ASLEEP: generate is refused; call prepare_for_generation"
    ):
        life.check_generate()
    assert done(life.prepare_for_generation()) == (
        Step.ONLOAD_WEIGHTS,
        Step.ATTACH_GRAPHS,
        Step.RESUME,
        Step.UNPAUSE,
    )
    assert life.takes_requests


def test_shared_tensors_stay_where_they_are_when_a_cell_sleeps() -> None:
    life = awake(colocated=True, release="shared")
    assert Step.OFFLOAD_WEIGHTS not in done(life.finish_generation())
    assert done(life.start_refit()) == ()
    assert done(life.mark_refitted(1)) == (Step.CLEAR_CACHES, Step.STAMP_VERSION)
    assert done(life.prepare_for_generation()) == (Step.ATTACH_GRAPHS, Step.RESUME, Step.UNPAUSE)
    assert life.state == Awake(1)


def test_generate_after_discarded_weights_needs_a_refit() -> None:
    life = awake(colocated=True, release="discard")
    done(life.finish_generation())
    assert life.version is None
    with pytest.raises(IllegalState, match=r"ASLEEP \(weights discarded\): generate"):
        life.check_generate()
    with pytest.raises(IllegalState, match=r'start_refit is refused; call prepare_for_generation\(tags=\["weights"\]'):
        life.start_refit()
    assert done(life.prepare_for_generation()) == (Step.ALLOCATE_WEIGHTS, Step.ABORT_REQUESTS)
    with pytest.raises(IllegalState, match=r"STALE \(the weights were discarded at the last sleep\): generate"):
        life.check_generate()
    assert not life.prepare_for_generation()  # again: still waits for the refit
    refit(life, 1)
    assert life.state == Awake(1)


def test_pause_survives_a_refit() -> None:
    life = awake()
    assert done(life.pause_generation()) == (Step.PAUSE,)
    assert not life.pause_generation()
    with pytest.raises(IllegalState, match="PAUSED: generate"):
        life.check_generate()
    assert done(life.suspend_for_refit()) == (Step.SUSPEND,)
    done(life.start_refit())
    done(life.mark_refitted(5))
    assert done(life.resume_after_refit()) == (Step.RESUME,)
    assert life.state == Paused(5)
    assert done(life.continue_generation()) == (Step.UNPAUSE,)
    assert life.state == Awake(5) and not life.continue_generation()


def test_continue_during_a_suspension_holds_for_later() -> None:
    life = awake()
    done(life.pause_generation())
    done(life.suspend_for_refit())
    assert not life.continue_generation()
    assert done(life.resume_after_refit()) == (Step.RESUME, Step.UNPAUSE)
    assert life.state == Awake(0)


# -- refit ----------------------------------------------------------------------------------------------------


def test_order_of_a_refit_and_the_version_before_the_first_request() -> None:
    life = awake()
    assert done(life.suspend_for_refit()) == (Step.PAUSE, Step.SUSPEND)
    assert not life.suspend_for_refit()
    done(life.start_refit())
    assert isinstance(life.state, Refitting) and life.version is None
    for call in (life.check_generate, life.resume_after_refit, life.suspend_for_refit, life.finish_generation):
        with pytest.raises(IllegalState, match="is REFITTING"):
            call()
    assert done(life.mark_refitted(7)) == (Step.CLEAR_CACHES, Step.STAMP_VERSION)
    assert not life.takes_requests
    assert not life.mark_refitted(7)
    assert done(life.resume_after_refit()) == (Step.RESUME, Step.UNPAUSE)
    assert life.state == Awake(7) and not life.resume_after_refit()


def test_the_prefix_cache_is_dropped_unless_told_otherwise() -> None:
    life = awake(keep_prefix_cache=True)
    done(life.suspend_for_refit())
    done(life.start_refit())
    assert done(life.mark_refitted(1)) == (Step.STAMP_VERSION,)


def test_a_refit_needs_a_suspended_engine() -> None:
    with pytest.raises(IllegalState, match="AWAKE: start_refit is refused; call suspend_for_refit first"):
        awake().start_refit()
    with pytest.raises(IllegalState, match="AWAKE: mark_refitted is refused; start_refit has to come before"):
        awake().mark_refitted(1)


def test_without_weights_the_first_refit_starts_the_engine() -> None:
    life = cell(version=None)
    with pytest.raises(IllegalState, match=r"CREATED \(without weights\): prepare_for_generation .* a refit has to"):
        life.prepare_for_generation()
    assert not life.suspend_for_refit() and not life.resume_after_refit()
    done(life.start_refit())
    assert done(life.mark_refitted(4)) == ()
    assert done(life.resume_after_refit()) == (Step.INITIALISE,)
    assert life.state == Awake(4)


@pytest.mark.parametrize("version", [-1, True, 1.0, "2", None])
def test_a_version_is_a_whole_number(version: Any) -> None:
    life = awake()
    done(life.suspend_for_refit())
    done(life.start_refit())
    with pytest.raises(ValueError, match="a weight version is an integer >= 0, got"):
        life.mark_refitted(version)
    assert isinstance(life.state, Refitting)


def test_w07_versions_only_grow_whoever_sends_them() -> None:
    life = awake()
    refit(life, 5)
    life.mark_dead("killed")
    life.restarted()
    done(life.start_refit())
    with pytest.raises(ValueError, match="weight version 4 is below the newest one, 5: versions only grow"):
        life.mark_refitted(4)
    done(life.mark_refitted(5))
    done(life.resume_after_refit())
    assert life.state == Awake(5)


def test_w06_a_failed_transfer_leaves_a_stale_cell_that_the_next_refit_brings_back() -> None:
    life = awake()
    done(life.suspend_for_refit())
    done(life.start_refit())
    stale = life.mark_stale("the source died")
    assert life.state == Stale("the source died", Suspended(None))  # from this moment on
    assert done(stale) == (Step.ABORT_REQUESTS,)
    assert not life.mark_stale("another reason") and not life.resume_after_refit() and not life.suspend_for_refit()
    assert not life.prepare_for_generation() and not life.finish_generation()
    with pytest.raises(IllegalState, match=r"STALE \(the source died\): generate is refused; a refit has to succeed"):
        life.check_generate()
    refit(life, 1)
    assert life.state == Awake(1)


def test_a_cell_that_missed_a_refit_stops_serving() -> None:
    life = awake()
    stale = life.mark_stale("no trainer cell was alive")
    assert not life.takes_requests
    assert done(stale) == (Step.ABORT_REQUESTS, Step.PAUSE, Step.SUSPEND)
    sleeping = awake(colocated=True)
    done(sleeping.finish_generation())
    assert done(sleeping.mark_stale("missed")) == (Step.ABORT_REQUESTS,)
    assert sleeping.state == Stale("missed", Asleep(0, resident=False))
    assert done(sleeping.prepare_for_generation(["weights"])) == (Step.ONLOAD_WEIGHTS,)
    refit(sleeping, 2)
    assert sleeping.state == Awake(2)


def test_a_refit_that_takes_too_long_is_over() -> None:
    clock = Clock()
    life = awake(clock=clock)
    done(life.suspend_for_refit())
    done(life.start_refit())
    clock.now += 20
    assert isinstance(life.state, Refitting)
    clock.now += 0.1
    with pytest.raises(IllegalState, match=r"STALE \(its refit was not complete within 20 s\): mark_refitted"):
        life.mark_refitted(1)
    # Only a deadline has passed: what is in flight has to be aborted still, at the latest by the next refit.
    assert done(life.start_refit()) == (Step.ABORT_REQUESTS,)
    clock.now += 20.1
    assert done(life.mark_stale("late")) == (Step.ABORT_REQUESTS,)
    assert done(life.start_refit()) == ()
    done(life.mark_refitted(1))


# -- failures and the end -------------------------------------------------------------------------------------


def test_a_step_that_raises_kills_the_cell_and_the_cause_is_kept() -> None:
    life = awake()
    with pytest.raises(OSError, match="broken pipe"), life.suspend_for_refit():
        raise OSError("broken pipe")
    assert life.state == Dead("suspend_for_refit failed: OSError: broken pipe")
    for call in (life.prepare_for_generation, life.suspend_for_refit, life.check_generate, life.start_refit):
        with pytest.raises(IllegalState, match="is DEAD .*broken pipe.* it has to be restarted first"):
            call()
    life.mark_dead("later")
    assert life.state == Dead("suspend_for_refit failed: OSError: broken pipe")


def test_a_transition_that_is_not_finished_in_time_kills_the_cell_instead_of_hanging() -> None:
    clock = Clock()
    life = awake(clock=clock)
    late = life.suspend_for_refit()
    assert late.remaining_s() == 20
    clock.now += 12.5
    with pytest.raises(
        IllegalState, match=r"AWAKE and in the middle of suspend_for_refit \(up to 7.5 s more\): finish_g"
    ):
        life.finish_generation()
    assert not life.takes_requests
    clock.now += 8
    assert late.remaining_s() == 0
    assert life.state == Dead("suspend_for_refit failed: pause, suspend not done by all ranks within 20 s")
    late.commit()  # too late: without effect
    assert isinstance(life.state, Dead)


def test_death_and_shutdown_end_what_is_under_way() -> None:
    life = awake()
    under_way = life.suspend_for_refit()
    life.mark_dead("SIGKILL")
    under_way.commit()
    assert life.state == Dead("SIGKILL")
    life.restarted(has_engine=True)
    assert life.state == Stale("restarted, waits for a refit", Suspended(None))
    with pytest.raises(IllegalState, match="only a dead cell is restarted"):
        life.restarted()

    other = awake()
    under_way = other.finish_generation()
    assert done(other.shutdown()) == (Step.ABORT_REQUESTS, Step.STOP)
    under_way.commit()
    assert other.state == ShutDown() and not other.shutdown()
    with pytest.raises(IllegalState, match="is SHUT_DOWN: prepare_for_generation is refused; it is over"):
        other.prepare_for_generation()
    other.mark_dead("too late")
    assert other.state == ShutDown()


def test_a_dead_cell_and_one_without_engine_shut_down_with_what_they_have() -> None:
    life = cell()
    assert done(life.shutdown()) == (Step.STOP,)
    dead = awake()
    dead.mark_dead("x")
    assert not dead.shutdown()


def test_invalidate_kv_cache_works_wherever_there_is_an_engine() -> None:
    life = awake(recomputes_kv_cache=True)
    assert life.recomputes_kv_cache
    assert done(life.invalidate_kv_cache()) == (Step.CLEAR_CACHES,)
    done(life.suspend_for_refit())
    assert done(life.invalidate_kv_cache()) == (Step.CLEAR_CACHES,)
    assert not cell().invalidate_kv_cache()


def test_the_version_of_captured_tokens() -> None:
    with pytest.raises(ValueError, match="setup_token_capture needs the HTTP servers, but expose_http is False"):
        CapturedVersion(expose_http=False).setup_token_capture()
    captured = CapturedVersion(expose_http=True)
    with pytest.raises(RuntimeError, match="set_rollout_weight_version before setup_token_capture"):
        captured.set_rollout_weight_version(0)
    captured.setup_token_capture()
    captured.set_rollout_weight_version(2)
    captured.set_rollout_weight_version(2)
    for bad in (True, -1, 1):
        with pytest.raises(ValueError):
            captured.set_rollout_weight_version(bad)
    assert captured.version == 2


# -- a random walk --------------------------------------------------------------------------------------------


class FakeEngine:
    """Executes steps and fails on one that makes no sense in what it is. Stands for all ranks of a cell."""

    def __init__(self, content: int | None) -> None:
        self.built = self.paused = self.suspended = self.stopped = False
        self.graphs = True
        self.weights = "device"  # device | host | nowhere
        self.content = content  # version of what the weights really are; None: torn or empty
        self.stamped: int | None = None
        self.requests = 0

    def run(self, step: Step, version: int | None) -> None:
        built, on_device = self.built and not self.stopped, self.weights == "device"
        legal = {
            Step.INITIALISE: not self.built and on_device and self.content is not None,
            Step.PAUSE: built and not self.paused,
            Step.UNPAUSE: built and self.paused and not self.suspended and on_device and self.graphs,
            Step.SUSPEND: built and self.paused and not self.suspended,
            Step.RESUME: built and self.suspended and on_device and self.content is not None and self.graphs,
            Step.DETACH_GRAPHS: built and self.suspended and self.graphs,
            Step.ATTACH_GRAPHS: built and not self.graphs and on_device,
            Step.OFFLOAD_WEIGHTS: built and on_device and not self.graphs,
            Step.ONLOAD_WEIGHTS: built and self.weights == "host",
            Step.DISCARD_WEIGHTS: built and on_device and not self.graphs,
            Step.ALLOCATE_WEIGHTS: built and self.weights == "nowhere",
            Step.CLEAR_CACHES: built,
            Step.EMPTY_DEVICE_CACHE: built and self.suspended,
            Step.ABORT_REQUESTS: built,
            Step.STAMP_VERSION: built and self.suspended and version is not None,
            Step.STOP: not self.stopped,
        }
        assert legal[step], f"{step} in {vars(self)}"
        match step:
            case Step.INITIALISE:
                self.built, self.stamped = True, self.content
            case Step.PAUSE | Step.UNPAUSE:
                self.paused = step is Step.PAUSE
            case Step.SUSPEND | Step.RESUME:
                self.suspended = step is Step.SUSPEND
            case Step.DETACH_GRAPHS | Step.ATTACH_GRAPHS:
                self.graphs = step is Step.ATTACH_GRAPHS
            case Step.OFFLOAD_WEIGHTS:
                self.weights = "host"
            case Step.ONLOAD_WEIGHTS:
                self.weights = "device"
            case Step.DISCARD_WEIGHTS:
                self.weights, self.content = "nowhere", None
            case Step.ALLOCATE_WEIGHTS:
                self.weights = "device"
            case Step.ABORT_REQUESTS:
                self.requests = 0
            case Step.STAMP_VERSION:
                self.stamped = version
            case Step.STOP:
                self.stopped = True


class RandomWalk(RuleBasedStateMachine):
    @initialize(
        colocated=st.booleans(),
        release=st.sampled_from(["offload", "discard", "shared"]),
        loaded=st.booleans(),
        keep=st.booleans(),
    )
    def start(self, colocated: bool, release: str, loaded: bool, keep: bool) -> None:
        self.clock = Clock()
        self.version = 0 if loaded else None
        self.life = cell(
            clock=self.clock, colocated=colocated, release=release, version=self.version, keep_prefix_cache=keep
        )
        self.engine = FakeEngine(self.version)
        self.newest = -1
        self.refitted_since_stale = True

    def call(self, method: str, *args: Any) -> bool:
        """Calls, executes, calls again: the second time must change nothing. False if the call was refused."""
        before = self.life.state
        try:
            transition = getattr(self.life, method)(*args)
        except IllegalState as refused:
            assert state_name(before) in str(refused) and method in str(refused)
            assert self.life.state == before
            return False
        self.execute(transition)
        after = self.life.state
        if method == "start_refit":
            return True
        try:
            again = getattr(self.life, method)(*args)
        except IllegalState:
            raise AssertionError(f"{method} is refused the second time in {after}") from None
        assert set(again.steps) <= {Step.CLEAR_CACHES}, f"{method} again in {after}: {again.steps}"
        again.commit()
        assert self.life.state == after
        return True

    def execute(self, transition: Transition) -> None:
        with transition:
            for step in transition.steps:
                self.engine.run(step, transition.version)

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"], ["weights", "kv_cache"]]))
    def prepare(self, tags: list[str] | None) -> None:
        self.call("prepare_for_generation", tags)

    @rule(release=st.booleans())
    def finish(self, release: bool) -> None:
        self.call("finish_generation", release)

    @rule(name=st.sampled_from(["pause_generation", "continue_generation", "invalidate_kv_cache"]))
    def anything(self, name: str) -> None:
        self.call(name)

    @rule(name=st.sampled_from(["suspend_for_refit", "resume_after_refit"]))
    def around_a_refit(self, name: str) -> None:
        self.call(name)

    @rule()
    def begin_transfer(self) -> None:
        if self.call("start_refit"):
            self.engine.content = None
            assert self.engine.weights == "device" and self.engine.requests * (not self.engine.suspended) == 0

    @rule(grow=st.integers(0, 2))
    def land(self, grow: int) -> None:
        version = max(self.newest, self.life._newest, 0) + grow
        if isinstance(self.life.state, Refitting):
            self.engine.content = version
            assert self.call("mark_refitted", version)
            self.newest, self.refitted_since_stale = version, True

    @rule()
    def whole_refit(self) -> None:
        if isinstance(self.life.state, Created | Awake | Paused | Suspended | Asleep | Stale):
            self.call("suspend_for_refit")
            self.call("prepare_for_generation", ["weights"])
            self.begin_transfer()
            self.land(1)
            self.call("resume_after_refit")
            assert isinstance(self.life.state, Awake | Paused | Asleep)

    @rule()
    def miss_a_refit(self) -> None:
        if self.call("mark_stale", "missed"):
            self.refitted_since_stale = False

    @rule(seconds=st.sampled_from([1.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        if isinstance(self.life.state, Stale):
            self.refitted_since_stale = False

    @rule(fraction=st.floats(0, 1))
    def fail_within_a_suspend(self, fraction: float) -> None:
        try:
            transition = self.life.suspend_for_refit()
        except IllegalState:
            return
        if transition:
            for step in transition.steps[: int(fraction * len(transition.steps))]:
                self.engine.run(step, None)
            transition.fail("rank 1 raised")
            assert isinstance(self.life.state, Dead)

    @rule()
    def die_and_restart(self) -> None:
        if isinstance(self.life.state, ShutDown):
            return
        self.life.mark_dead("killed")
        assert not self.life.takes_requests
        self.life.restarted()
        self.engine = FakeEngine(None)
        self.refitted_since_stale = False

    @rule()
    def request(self) -> None:
        try:
            self.life.check_generate()
        except IllegalState as refused:
            assert state_name(self.life.state) in str(refused)
            return
        self.engine.requests += 1

    @rule()
    def shut_down(self) -> None:
        if self.clock.now > 60:  # late, or most walks would be short
            self.call("shutdown")

    @invariant()
    def serves_only_what_it_says(self) -> None:
        if not hasattr(self, "life"):
            return
        state = self.life.state
        if self.life.takes_requests:
            assert isinstance(state, Awake)
            engine = self.engine
            assert engine.built and not (engine.paused or engine.suspended or engine.stopped) and engine.graphs
            assert engine.weights == "device"
            assert engine.content == engine.stamped == state.version
            assert self.refitted_since_stale, "served after STALE without a refit"
        if isinstance(state, Stale) and state.aborted:
            assert self.engine.requests == 0 and (self.engine.suspended or not self.engine.built)
        version = self.life.version
        if version is not None:
            assert version >= self.newest
            self.newest = max(self.newest, version)


TestRandomWalk = RandomWalk.TestCase
TestRandomWalk.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
