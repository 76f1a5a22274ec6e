"""Who takes part in a refit and under which rank. Pure arithmetic, apart from the calls that apply it.

A *shard* is a rollout cell. The ranks of a refit group are the trainer's, all of them and first, then those of the
surviving shards in the order of their indices, without gaps. Trainer ranks are never left out: a trainer cell takes
part whole, or another one takes its place in a new plan.

A group is rebuilt iff the members that are wanted differ from those it was built with; a restarted process counts as
another member. Every rebuild has a plan of its own under a name that was never used before: rank numbers are reused
after a failure, so nothing derived from them (communicator, transfer plan, store key) may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rollout.layout import ParallelLayout


class NoSurvivingShards(RuntimeError):
    """No rollout cell is left to refit."""


class NoLiveTrainer(RuntimeError):
    """No trainer cell is left to refit from."""


@dataclass(frozen=True)
class RefitMembership:
    """The ranks of one refit group.

    train_world_size: trainer ranks, ranks 0 … train_world_size - 1 of the group. shards: surviving shards, ascending.
    ranks_per_shard: ranks of one rollout cell (TP·PP).
    """

    train_world_size: int
    shards: tuple[int, ...]
    ranks_per_shard: int

    def __post_init__(self) -> None:
        if not self.shards:
            raise NoSurvivingShards("a refit group needs at least one surviving shard")
        problems = []
        for name in ("train_world_size", "ranks_per_shard"):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be >= 1, got {getattr(self, name)}")
        if list(self.shards) != sorted(set(self.shards)) or self.shards[0] < 0:
            problems.append(f"shards must be distinct, ascending and >= 0, got {list(self.shards)}")
        if problems:
            raise ValueError("refit membership: " + "; ".join(problems))

    @property
    def generation_world_size(self) -> int:
        return len(self.shards) * self.ranks_per_shard

    @property
    def world_size(self) -> int:
        return self.train_world_size + self.generation_world_size

    @property
    def shard_prefixes(self) -> dict[int, int]:
        """{surviving shard: its first rank among the generation ranks}."""
        return {shard: position * self.ranks_per_shard for position, shard in enumerate(self.shards)}

    def generation_rank(self, shard: int, local_rank: int) -> int:
        """New rank among the generation ranks. Raises KeyError for a shard that does not take part."""
        if shard not in self.shards:
            raise KeyError(f"shard {shard} does not take part; those that do: {list(self.shards)}")
        if not 0 <= local_rank < self.ranks_per_shard:
            raise IndexError(f"local rank {local_rank} is outside a shard of {self.ranks_per_shard} ranks")
        return self.shard_prefixes[shard] + local_rank

    def group_rank(self, shard: int, local_rank: int) -> int:
        """Rank in the whole group, trainers first."""
        return self.train_world_size + self.generation_rank(shard, local_rank)

    def rank_offset(self, shard: int) -> int:
        """What a rank of `shard` adds to its original rank to get its rank in the group: train world + new - original.

        Original ranks number all ranks of all shards, dead ones included, shard by shard.
        """
        return self.group_rank(shard, 0) - shard * self.ranks_per_shard


def plan_membership(
    survivors: Iterable[int], *, num_shards: int, ranks_per_shard: int, train_world_size: int
) -> RefitMembership:
    """Membership of the surviving shards, compacted in order, with every trainer rank.

    Raises NoSurvivingShards if there is none, ValueError for an index outside `num_shards` or a size below 1.
    """
    shards = tuple(sorted(set(survivors)))
    if outside := [shard for shard in shards if not 0 <= shard < num_shards]:
        raise ValueError(f"surviving shards {outside} are outside the {num_shards} shards there are")
    if not shards:
        raise NoSurvivingShards(f"none of the {num_shards} rollout cells survives: there is nothing to refit")
    return RefitMembership(train_world_size, shards, ranks_per_shard)


def needs_rebuild(built: RefitMembership | None, desired: RefitMembership) -> bool:
    """Whether a group built for `built` (None: not built) must be rebuilt.

    Raises ValueError if that would drop or add trainer ranks: a group keeps its trainer side for life.
    """
    if built is not None and built.train_world_size != desired.train_world_size:
        raise ValueError(
            f"a refit group keeps all its trainer ranks: built with {built.train_world_size}, "
            f"wanted {desired.train_world_size}"
        )
    return built != desired


def ranked_workers[W](workers: Sequence[W], membership: RefitMembership | None) -> list[tuple[W, int, int]]:
    """(worker, new generation rank, original rank) of those that take part; all of them, unchanged, without membership.

    workers: every rank of every shard, shard by shard. Raises RuntimeError if a surviving shard reaches beyond them.
    """
    if membership is None:
        return [(worker, rank, rank) for rank, worker in enumerate(workers)]
    ranked = []
    for shard, prefix in membership.shard_prefixes.items():
        for local in range(membership.ranks_per_shard):
            original = shard * membership.ranks_per_shard + local
            if original >= len(workers):
                raise RuntimeError(
                    f"rank {local} of shard {shard} is worker {original}, but the group has {len(workers)} workers"
                )
            ranked.append((workers[original], prefix + local, original))
    return ranked


@dataclass(frozen=True)
class StageCommunicator:
    """The communicator of one training PP stage: its trainer ranks first, then all generation ranks.

    train_ranks: ranks in the trainer cell's world, ascending; their index is their rank here.
    """

    stage: int
    train_ranks: tuple[int, ...]
    generation_world_size: int

    @property
    def world_size(self) -> int:
        return len(self.train_ranks) + self.generation_world_size

    def rank_of_trainer(self, train_rank: int) -> int:
        if train_rank not in self.train_ranks:
            raise KeyError(f"trainer rank {train_rank} is not in stage {self.stage}: {list(self.train_ranks)}")
        return self.train_ranks.index(train_rank)

    def rank_of_generation(self, generation_rank: int) -> int:
        """generation_rank: the new one (`RefitMembership.generation_rank`)."""
        if not 0 <= generation_rank < self.generation_world_size:
            raise IndexError(f"generation rank {generation_rank} is outside {self.generation_world_size} ranks")
        return len(self.train_ranks) + generation_rank


def stage_communicators(train_layout: ParallelLayout, membership: RefitMembership) -> list[StageCommunicator]:
    """One communicator a training PP stage. They are used one after the other: two at once can deadlock.

    Raises ValueError if the layout's world is not the membership's trainer side.
    """
    if train_layout.world_size != membership.train_world_size:
        raise ValueError(
            f"the training layout has {train_layout.world_size} ranks, the refit group {membership.train_world_size} "
            "trainer ranks"
        )
    stages = train_layout.groups("tp", "cp", "dp")
    return [
        StageCommunicator(stage, tuple(sorted(ranks)), membership.generation_world_size)
        for stage, ranks in sorted((train_layout.coordinates(ranks[0]).pp, ranks) for ranks in stages)
    ]


def pairing(
    rollout_cells: Iterable[int], live_trainers: Iterable[int], *, num_trainer_cells: int
) -> dict[int, tuple[int, ...]]:
    """{live trainer cell: rollout cells that it refits}, both ascending.

    Rollout cell j belongs to trainer cell j mod N; where that one is dead, to the next live index (cyclic).
    Raises NoLiveTrainer if there is none, ValueError for an index outside `num_trainer_cells`.
    """
    live = sorted(set(live_trainers))
    if outside := [cell for cell in live if not 0 <= cell < num_trainer_cells]:
        raise ValueError(f"trainer cells {outside} are outside the {num_trainer_cells} there are")
    if not live:
        raise NoLiveTrainer(f"none of the {num_trainer_cells} trainer cells is alive: there is nothing to refit from")
    pairs: dict[int, list[int]] = {}
    for cell in sorted(set(rollout_cells)):
        home = cell % num_trainer_cells
        owner = next((trainer for trainer in live if trainer >= home), live[0])
        pairs.setdefault(owner, []).append(cell)
    return {trainer: tuple(pairs[trainer]) for trainer in sorted(pairs)}


@dataclass(frozen=True)
class Pair:
    """One trainer cell and the rollout cells that it refits.

    trainer_incarnation, shard_incarnations: which processes of them; shard_incarnations in the order of
    `membership.shards`. name: of the group, used once; everything that is built for it is named after it.
    """

    trainer: int
    trainer_incarnation: int
    membership: RefitMembership
    shard_incarnations: tuple[int, ...]
    name: str

    @property
    def members(self) -> tuple[object, ...]:
        """Everything that makes this group another one than before."""
        return self.trainer, self.trainer_incarnation, self.membership, self.shard_incarnations


@dataclass(frozen=True)
class RefitPlan:
    """All pairs of a sync at once. number: only grows; the same plan as before keeps its number."""

    number: int
    pairs: tuple[Pair, ...]

    def pair_of_trainer(self, trainer: int) -> Pair | None:
        return next((pair for pair in self.pairs if pair.trainer == trainer), None)

    def pair_of_shard(self, shard: int) -> Pair | None:
        return next((pair for pair in self.pairs if shard in pair.membership.shards), None)


class RefitPlanner:
    """Makes the plan of each sync, and says which groups have to be (re)built for it.

    Order of use: `plan` (membership is settled before anything is distributed), build every pair of `to_build`,
    `mark_built` for each, transfer. A group that failed is forgotten with `discard` and gets a new name the next time.
    """

    def __init__(
        self, *, num_trainer_cells: int, num_rollout_cells: int, ranks_per_trainer: int, ranks_per_shard: int
    ) -> None:
        sizes = {"num_trainer_cells": num_trainer_cells, "num_rollout_cells": num_rollout_cells}
        sizes |= {"ranks_per_trainer": ranks_per_trainer, "ranks_per_shard": ranks_per_shard}
        if wrong := [f"{name} must be >= 1, got {size}" for name, size in sizes.items() if size < 1]:
            raise ValueError("refit planner: " + "; ".join(wrong))
        self._num_trainers = num_trainer_cells
        self._num_shards = num_rollout_cells
        self._ranks_per_trainer = ranks_per_trainer
        self._ranks_per_shard = ranks_per_shard
        self._plan = RefitPlan(0, ())
        self._built: dict[int, Pair] = {}

    def plan(self, trainers: Mapping[int, int], shards: Mapping[int, int]) -> RefitPlan:
        """The plan for what lives now: {trainer cell: incarnation}, {rollout cell: incarnation}.

        The plan before it if nothing changed, else one new plan however many pairs changed; pairs that did not change
        and whose group was not discarded keep their name. Raises NoSurvivingShards or NoLiveTrainer.
        """
        plan_membership(  # the checks of all shards together
            shards, num_shards=self._num_shards, ranks_per_shard=self._ranks_per_shard, train_world_size=1
        )
        number = self._plan.number + 1
        kept = {pair.trainer: pair for pair in self._plan.pairs}
        pairs = []
        for trainer, cells in pairing(shards, trainers, num_trainer_cells=self._num_trainers).items():
            membership = RefitMembership(self._ranks_per_trainer, cells, self._ranks_per_shard)
            pair = Pair(
                trainer,
                trainers[trainer],
                membership,
                tuple(shards[cell] for cell in cells),
                name=f"refit-{number}-trainer-{trainer}",
            )
            before = kept.get(trainer)
            pairs.append(before if before is not None and before.members == pair.members else pair)
        if tuple(pairs) != self._plan.pairs:
            self._plan = RefitPlan(number, tuple(pairs))
            current = {pair.name for pair in pairs}
            self._built = {trainer: pair for trainer, pair in self._built.items() if pair.name in current}
        return self._plan

    def to_build(self) -> list[Pair]:
        """Pairs of the current plan whose group is not built as the plan wants it."""
        return [pair for pair in self._plan.pairs if self._built.get(pair.trainer) != pair]

    def mark_built(self, pair: Pair) -> None:
        """Raises ValueError for a pair of another plan: what was built for it is of no use."""
        if pair not in self._plan.pairs:
            raise ValueError(f"group {pair.name} is not part of plan {self._plan.number}")
        self._built[pair.trainer] = pair

    def discard(self, trainer: int) -> None:
        """The pair's group failed or was released: whatever was planned or built for it is never used again."""
        self._built.pop(trainer, None)
        rest = tuple(pair for pair in self._plan.pairs if pair.trainer != trainer)
        self._plan = RefitPlan(self._plan.number, rest)
