"""Who takes part in a refit: compaction, pairing, when a group is rebuilt, and that nothing is reused across them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rollout.layout import ParallelLayout
from megatron_rollout.weight_sync.membership import (
    NoLiveTrainer,
    NoSurvivingShards,
    RefitMembership,
    RefitPlanner,
    needs_rebuild,
    pairing,
    plan_membership,
    ranked_workers,
    stage_communicators,
)

survivor_sets = st.integers(1, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1), st.integers(1, 4), st.integers(1, 4))
)


@given(survivor_sets)
def test_survivors_are_compacted_in_order_and_trainers_all_stay(case: tuple[int, set[int], int, int]) -> None:
    num_shards, survivors, ranks, train = case
    m = plan_membership(survivors, num_shards=num_shards, ranks_per_shard=ranks, train_world_size=train)
    assert list(m.shards) == sorted(survivors)
    assert m.world_size == train + len(survivors) * ranks
    taken = list(range(train)) + [m.group_rank(s, local) for s in m.shards for local in range(ranks)]
    assert taken == list(range(m.world_size))  # no gap, no rank twice, shards ascending
    for shard in m.shards:
        for local in range(ranks):
            original = shard * ranks + local
            assert original + m.rank_offset(shard) == m.group_rank(shard, local)
            assert m.rank_offset(shard) == train + m.generation_rank(shard, local) - original


@given(survivor_sets)
def test_ranked_workers_are_the_live_ones_with_their_new_and_old_rank(case: tuple[int, set[int], int, int]) -> None:
    num_shards, survivors, ranks, train = case
    workers = [f"worker-{i}" for i in range(num_shards * ranks)]
    m = plan_membership(survivors, num_shards=num_shards, ranks_per_shard=ranks, train_world_size=train)
    ranked = ranked_workers(workers, m)
    assert [new for _, new, _ in ranked] == list(range(m.generation_world_size))
    assert all(worker == f"worker-{original}" for worker, _, original in ranked)
    assert [original // ranks for _, _, original in ranked[::ranks]] == sorted(survivors)
    everyone = plan_membership(range(num_shards), num_shards=num_shards, ranks_per_shard=ranks, train_world_size=train)
    assert ranked_workers(workers, everyone) == ranked_workers(workers, None)


def test_ranked_workers_by_hand() -> None:
    m = plan_membership([2, 0], num_shards=3, ranks_per_shard=2, train_world_size=4)
    assert ranked_workers("abcdef", m) == [("a", 0, 0), ("b", 1, 1), ("e", 2, 4), ("f", 3, 5)]
    assert m.shard_prefixes == {0: 0, 2: 2}
    assert [m.rank_offset(shard) for shard in m.shards] == [4, 2]
    assert ranked_workers("ab", None) == [("a", 0, 0), ("b", 1, 1)]
    with pytest.raises(RuntimeError, match="rank 1 of shard 2 is worker 5, but the group has 5 workers"):
        ranked_workers("abcde", m)


def test_no_survivors_and_bad_topologies_raise() -> None:
    with pytest.raises(NoSurvivingShards, match="none of the 3 rollout cells survives"):
        plan_membership([], num_shards=3, ranks_per_shard=1, train_world_size=1)
    with pytest.raises(ValueError, match=r"surviving shards \[3\] are outside the 3 shards"):
        plan_membership([0, 3], num_shards=3, ranks_per_shard=1, train_world_size=1)
    with pytest.raises(ValueError, match="train_world_size must be >= 1, got 0; ranks_per_shard must be >= 1, got 0"):
        RefitMembership(0, (0,), 0)
    with pytest.raises(ValueError, match="distinct, ascending"):
        RefitMembership(1, (1, 0), 1)
    m = RefitMembership(2, (0, 3), 2)
    with pytest.raises(KeyError, match="shard 1 does not take part"):
        m.group_rank(1, 0)
    with pytest.raises(IndexError, match="local rank 2 is outside a shard of 2 ranks"):
        m.group_rank(3, 2)


def test_rebuild_iff_desired_differs_from_built_and_never_without_a_trainer_rank() -> None:
    full, less = RefitMembership(4, (0, 1), 2), RefitMembership(4, (1,), 2)
    assert needs_rebuild(None, full) and needs_rebuild(full, less) and needs_rebuild(less, full)
    assert not needs_rebuild(full, RefitMembership(4, (0, 1), 2))
    with pytest.raises(ValueError, match="keeps all its trainer ranks: built with 4, wanted 3"):
        needs_rebuild(full, RefitMembership(3, (0, 1), 2))


def test_one_communicator_a_training_stage() -> None:
    m = RefitMembership(8, (0, 2), 2)
    first, second = stage_communicators(ParallelLayout(tp=2, dp=2, pp=2), m)
    assert (first.train_ranks, second.train_ranks) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert first.world_size == second.world_size == 8
    assert [second.rank_of_trainer(r) for r in second.train_ranks] == [0, 1, 2, 3]
    assert [second.rank_of_generation(m.generation_rank(2, local)) for local in range(2)] == [6, 7]
    with pytest.raises(KeyError, match="trainer rank 0 is not in stage 1"):
        second.rank_of_trainer(0)
    with pytest.raises(IndexError, match="generation rank 4 is outside 4 ranks"):
        first.rank_of_generation(4)
    with pytest.raises(ValueError, match="the training layout has 4 ranks, the refit group 8 trainer ranks"):
        stage_communicators(ParallelLayout(tp=2, pp=2), m)


@given(tp=st.integers(1, 3), pp=st.integers(1, 3), dp=st.integers(1, 2), shards=st.sets(st.integers(0, 4), min_size=1))
def test_every_trainer_rank_is_in_exactly_one_communicator(tp: int, pp: int, dp: int, shards: set[int]) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    m = RefitMembership(layout.world_size, tuple(sorted(shards)), 2)
    communicators = stage_communicators(layout, m)
    assert [c.stage for c in communicators] == list(range(pp))
    assert sorted(rank for c in communicators for rank in c.train_ranks) == list(range(layout.world_size))
    for c in communicators:
        ranks = [c.rank_of_trainer(r) for r in c.train_ranks]
        ranks += [c.rank_of_generation(r) for r in range(m.generation_world_size)]
        assert ranks == list(range(c.world_size))


@given(trainers=st.integers(1, 5), rollouts=st.sets(st.integers(0, 9), min_size=1), dead=st.sets(st.integers(0, 4)))
def test_every_rollout_cell_has_one_live_owner_and_its_own_while_that_lives(
    trainers: int, rollouts: set[int], dead: set[int]
) -> None:
    live = set(range(trainers)) - dead
    if not live:
        with pytest.raises(NoLiveTrainer, match=f"none of the {trainers} trainer cells is alive"):
            pairing(rollouts, live, num_trainer_cells=trainers)
        return
    pairs = pairing(rollouts, live, num_trainer_cells=trainers)
    assert sorted(cell for cells in pairs.values() for cell in cells) == sorted(rollouts)
    assert set(pairs) <= live
    for owner, cells in pairs.items():
        for cell in cells:
            home = cell % trainers
            between = range(home, owner) if owner >= home else [*range(home, trainers), *range(owner)]
            assert not live & set(between)  # the next live index, counted from home


def test_pairing_by_hand() -> None:
    assert pairing(range(5), [0, 1], num_trainer_cells=2) == {0: (0, 2, 4), 1: (1, 3)}
    assert pairing(range(4), [0, 3], num_trainer_cells=4) == {0: (0,), 3: (1, 2, 3)}
    assert pairing([3], [0], num_trainer_cells=4) == {0: (3,)}
    with pytest.raises(ValueError, match=r"trainer cells \[4\] are outside the 4"):
        pairing([0], [4], num_trainer_cells=4)


# -- plans ----------------------------------------------------------------------------------------------------


def planner() -> RefitPlanner:
    return RefitPlanner(num_trainer_cells=3, num_rollout_cells=3, ranks_per_trainer=2, ranks_per_shard=1)


def build_all(plans: RefitPlanner) -> list[str]:
    names = [pair.name for pair in plans.to_build()]
    for pair in plans.to_build():
        plans.mark_built(pair)
    assert plans.to_build() == []
    return names


ALL = {0: 0, 1: 0, 2: 0}


def test_nothing_is_rebuilt_while_nothing_changes() -> None:
    plans = planner()
    first = plans.plan(ALL, ALL)
    assert [pair.trainer for pair in plans.to_build()] == [0, 1, 2]
    build_all(plans)
    assert plans.plan(dict(ALL), dict(ALL)) is first and plans.to_build() == []


def test_a_dead_trainers_rollout_cell_goes_to_the_next_one_and_other_pairs_stay() -> None:
    plans = planner()
    before = plans.plan(ALL, ALL)
    build_all(plans)
    after = plans.plan({0: 0, 2: 0}, ALL)
    assert after.number == before.number + 1
    assert [pair.trainer for pair in plans.to_build()] == [2]
    moved = after.pair_of_trainer(2)
    assert moved is not None and moved.membership == RefitMembership(2, (1, 2), 1)
    assert after.pair_of_shard(1) is moved and after.pair_of_trainer(1) is None
    assert after.pair_of_trainer(0) is before.pair_of_trainer(0)


def test_two_pairs_that_change_at_once_make_one_plan() -> None:
    plans = planner()
    before = plans.plan(ALL, ALL)
    build_all(plans)
    after = plans.plan({0: 1, 1: 0, 2: 0}, {0: 0, 2: 4})
    assert after.number == before.number + 1
    assert [pair.trainer for pair in plans.to_build()] == [0, 2]
    assert after.pair_of_shard(1) is None


@pytest.mark.parametrize("who", ["trainer", "shard"])
def test_a_restarted_process_is_another_member(who: str) -> None:
    plans = planner()
    plans.plan(ALL, ALL)
    old = build_all(plans)
    restarted = ALL | {1: 1}
    plans.plan(restarted if who == "trainer" else ALL, restarted if who == "shard" else ALL)
    [pair] = plans.to_build()
    assert pair.trainer == 1 and pair.name not in old


def test_names_are_never_used_twice() -> None:
    plans = planner()
    seen: list[str] = []
    for trainers in (ALL, {0: 0}, ALL, {0: 0}, {0: 1}, ALL):
        plans.plan(trainers, ALL)
        seen += build_all(plans)
    assert len(seen) == len(set(seen))


def test_a_failed_group_is_planned_anew_with_the_same_members() -> None:
    plans = planner()
    first = plans.plan(ALL, ALL)
    build_all(plans)
    plans.discard(1)
    again = plans.plan(ALL, ALL)
    assert again.number == first.number + 1
    [pair] = plans.to_build()
    old = first.pair_of_trainer(1)
    assert old is not None and pair.members == old.members and pair.name != old.name
    with pytest.raises(ValueError, match=f"group {old.name} is not part of plan {again.number}"):
        plans.mark_built(old)


def test_a_plan_needs_both_sides() -> None:
    with pytest.raises(NoSurvivingShards):
        planner().plan(ALL, {})
    with pytest.raises(NoLiveTrainer):
        planner().plan({}, ALL)
    with pytest.raises(ValueError, match=r"surviving shards \[3\] are outside the 3 shards"):
        planner().plan(ALL, {3: 0})
    with pytest.raises(ValueError, match="ranks_per_shard must be >= 1, got 0"):
        RefitPlanner(num_trainer_cells=1, num_rollout_cells=1, ranks_per_trainer=1, ranks_per_shard=0)
