"""A process that hosts one rank of a trainer cell, as a Ray actor; colocated, it hosts a rank of a rollout cell too.

Ray calls its methods from several threads: training work runs in one thread of its own, in the order of the calls, so
that heartbeats, aborts and generation go on beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch
import torch.distributed as dist

from megatron_rollout import device, faults
from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.engine.parallel import init_megatron, second_layout
from megatron_rollout.worker import RolloutWorker
from trainer_hooks.cells import frozen
from trainer_hooks.cells.group import CrossCellGroup
from trainer_hooks.cells.quorum import Attempt, Quorum, StepGuard
from trainer_hooks.cells.state_transfer import Transfer, receive_state, send_state
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.training.spec import OptimizerSpec, TrainSpec

if TYPE_CHECKING:
    from megatron_rollout.weight_sync.offload import OffloadedWeights
    from trainer_hooks.training.rank import TrainerRank

T = TypeVar("T")
Shard = Mapping[str, Any]


class CellDisagrees(RuntimeError):
    """Another rank of this cell failed its part of the attempt; the message names it."""


class TrainerWorker(RolloutWorker):
    """One rank of one trainer cell. `progress` moves while it works, for the watchdog."""

    def __init__(self, **process: Any) -> None:
        from megatron_rollout.weight_sync.member import RefitMember

        super().__init__(**process)
        self._trainer_thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self.trainer: TrainerRank | None = None
        self.progress = 0
        self._at_work = 0
        self._phase = ""
        self._heal: CrossCellGroup | None = None
        self.cells: CrossCellGroup | None = None
        self._refit = RefitMember()
        self._offloaded: OffloadedWeights | None = None
        self._gradients_of: Attempt | None = None

    def _moved(self) -> None:
        self.progress += 1

    @ray.method(concurrency_group="health")
    def beat(self) -> tuple[int, str, str]:
        """As `RolloutWorker.beat`; "waiting" while this rank waits for other cells."""
        counter, activity, phase = super().beat()
        counter += self.progress
        if not self._at_work:
            return counter, activity, phase
        groups = (self.cells, self._heal)
        waiting = any(group is not None and group.waiting for group in groups)
        return counter, "waiting" if waiting else "working", self._phase

    def _train(self, work: Callable[[], T], phase: str = "") -> T:
        """Run `work` in the trainer's thread. The caller's `ray.get` has the deadline."""

        def moved() -> T:
            self._phase, self._at_work = phase, self._at_work + 1
            self._moved()
            try:
                return work()
            finally:
                self._moved()
                self._at_work -= 1

        return self._trainer_thread.submit(moved).result()

    # -- start --------------------------------------------------------------------------------------------------

    def start_trainer(self, spec: TrainSpec, *, cell: int, timeouts: CellTimeouts) -> None:
        """Build model and optimizer of this rank. Collective over the cell, after `join_world`."""
        from trainer_hooks.training.value_model import build_rank

        def start() -> None:
            init_megatron(tp=spec.tp, pp=spec.pp, cp=spec.cp, seed=spec.seed, timeout_s=timeouts.collective_s)
            self.cell = cell
            self.timeouts = timeouts
            self.guard = StepGuard(spec.role)
            self.trainer = build_rank(spec)
            self._watch_model(self.trainer)
            where = device.device()
            self.cells = CrossCellGroup(
                spec.role,
                dist.get_rank(),
                backend="nccl" if where.type == "cuda" else "gloo",
                device=where if where.type == "cuda" else None,
                host=self.host,
                timeouts=timeouts,
                progress=self._reduced_a_bucket,
            )

        self._train(start, "start")

    def _watch_model(self, trainer: TrainerRank) -> None:
        """Every forward and backward of a micro-batch is progress (and a moment at which a test may break this)."""

        def forward(module: Any, inputs: Any, output: Any) -> None:
            self._moved()
            if torch.is_grad_enabled():
                faults.fault_point("forward")
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(backward)

        def backward(gradient: torch.Tensor) -> None:
            self._moved()
            faults.fault_point("backward")

        trainer.ddp.register_forward_hook(forward)
        if trainer.reference is not None:
            trainer.reference.register_forward_hook(forward)

    def _reduced_a_bucket(self) -> None:
        self._moved()
        faults.fault_point("in_reduce")

    def start_colocated_rollout(self, spec: RolloutSpec, *, cell: int) -> None:
        """Generation in this process: with the trainer's own tensors where the layouts are equal, else with a second
        model that refits fill. Collective over the trainer cell."""
        from megatron_rollout.rollout_rank import RolloutRank

        def start() -> None:
            trainer, tokenizer = self._trainer(), self.load_tokenizer(spec.hf_checkpoint)
            train = trainer.spec
            if (spec.tp, spec.pp) == (train.tp, train.pp) and train.cp == 1:
                self.host_rollout(RolloutRank(spec, model=trainer.model, tokenizer=tokenizer), cell)
                return
            groups = second_layout(tp=spec.tp, pp=spec.pp)
            rank = RolloutRank(
                replace(spec, load_weights=False),
                pg_collection=groups,
                cell_group=groups.mp,
                trainer=trainer,
                tokenizer=tokenizer,
            )
            self.host_rollout(rank, cell, groups.mp)

        self._train(start)

    def configure(self, store: str, quorum: Quorum, attempt: int = 0) -> None:
        """Join the cross-cell group of `quorum`: the ranks at this rank's place in all of its cells."""
        rank, world = quorum.rank_of(self.cell), quorum.world
        self._train(lambda: self._cells().configure(store, quorum.quorum_id, rank, world, attempt=attempt), "configure")

    @ray.method(concurrency_group="health")
    def abort_cross_cell(self, reason: str, through: int) -> None:
        """A member of the quorum is dead: make this rank's cross-cell collective raise now. From any thread."""
        if self.cells is not None:
            self.cells.abort(reason, through=through)

    # -- heal ---------------------------------------------------------------------------------------------------

    def send_heal(self, store: str, number: int) -> Transfer:
        """Give this rank's state to its counterpart in a cell that heals. number: of this heal, only grows.

        Raises GroupError: the peer died, stalled or refused. This rank's own state was only read.
        """
        return self._healing(store, number, 0, lambda group: send_state(group, 1, self._state()))

    def receive_heal(self, store: str, number: int) -> Transfer:
        """Take over the state of a live cell's rank at the same place. Raises GroupError: take another source."""

        def receive(group: CrossCellGroup) -> Transfer:
            state, transfer = receive_state(group, 0)
            self._load_state(state)
            return transfer

        return self._healing(store, number, 1, receive)

    @ray.method(concurrency_group="health")
    def abort_heal(self, reason: str) -> None:
        """The peer of a heal is dead."""
        if (group := self._heal) is not None:
            group.abort(reason, through=sys.maxsize)

    def _healing(self, store: str, number: int, rank: int, transfer: Callable[[CrossCellGroup], Transfer]) -> Transfer:
        """Run `transfer` in a group of two, so that its failure breaks no quorum."""

        def heal() -> Transfer:
            cells = self._cells()
            self._heal = group = CrossCellGroup(
                f"{self.guard.role}-heal",
                dist.get_rank(),
                backend=cells.backend,
                device=cells.device if cells.device.type == "cuda" else None,
                host=self.host,
                timeouts=self.timeouts,
                progress=self._moved,
            )
            try:
                group.configure(store, number, rank, 2)
                faults.fault_point("heal_source" if rank == 0 else "heal_destination")
                return transfer(group)
            finally:
                self._heal = None
                group.close()

        return self._train(heal, "heal")

    def _state(self) -> dict[str, Any]:
        return {"trainer": self._trainer().state(), "guard": self.guard.state_dict()}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._trainer().load_state(state["trainer"])
        self.guard.load_state_dict(state["guard"])

    def _cells(self) -> CrossCellGroup:
        if self.cells is None:
            raise RuntimeError("start_trainer has not been called")
        return self.cells

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        self._train(lambda: self._trainer().use_optimizer(spec))

    # -- one rollout --------------------------------------------------------------------------------------------

    def logprobs(self, shard: Shard, reference: bool = False) -> list[Any] | None:
        """Logprobs of the shard's responses, one array a sample; from rank 0 only. Collective over the cell."""
        found = self._train(lambda: self._trainer().logprobs(shard, reference=reference))
        return [x.numpy() for x in found] if dist.get_rank() == 0 else None

    def values(self, shard: Shard) -> list[Any] | None:
        """Put a critic's values of the shard's responses into the object store: [reference to {sample index: [R]}];
        from rank 0 only. Collective over the cell."""
        found = self._train(lambda: self._trainer().values(shard))
        return [frozen.put_values(shard["sample_indices"], found)] if dist.get_rank() == 0 else None

    def train(self, attempt: Attempt, shard: Shard, objective: str = "policy") -> dict[str, float]:
        """Forward, backward and the sum over cells; the gradient waits for the decision. Returns the step's metrics.

        What it raises is this cell's vote 'discard' (on every rank of the cell: they agree before they return).
        """
        return self._train(lambda: self._attempt(attempt, shard, objective), "train")

    def _attempt(self, attempt: Attempt, shard: Shard, objective: str) -> dict[str, float]:
        self.guard.admit(attempt)
        self._gradients_of = None
        trainer = self._trainer()
        metrics: dict[str, float] = {}
        error: BaseException | None = None
        try:
            shard = frozen.fetched(shard, self.timeouts.progress_s)
            metrics = trainer.forward_backward(shard, objective=objective)
            faults.fault_point("before_reduce")
            metrics = self._sum_over_cells(trainer, metrics)
            faults.fault_point("after_reduce")
            norm = trainer.gradient_norm()
            if not norm < float("inf"):
                raise FloatingPointError(f"the gradient norm is {norm}")
            metrics["grad_norm"] = norm
        except Exception as caught:  # every failure is a vote, and the ranks of the cell must hear of it
            error = caught
        self._agree(attempt, error)
        self._gradients_of = attempt
        faults.fault_point("before_vote")
        return metrics

    def _sum_over_cells(self, trainer: TrainerRank, metrics: dict[str, float]) -> dict[str, float]:
        names = sorted(metrics)
        sums = torch.tensor([metrics[n] for n in names], dtype=torch.float64)
        self._cells().all_reduce([*trainer.gradients(), sums])
        return dict(zip(names, sums.tolist(), strict=True))

    def _agree(self, attempt: Attempt, error: BaseException | None) -> None:
        """The ranks of a cell agree first. Raises on all of them if one failed."""
        mine = "" if error is None else f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        everyone = [mine]
        if dist.get_world_size() > 1:
            everyone = [""] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        if failed := [e for e in everyone if e]:
            self._trainer().discard()
            raise CellDisagrees(f"{attempt}, cell {self.cell}: {'; '.join(failed)}") from error

    def finish(self, attempt: Attempt, commit: bool, checksum: bool = False) -> dict[str, Any]:
        """Act on the decision: apply the gradient of exactly this attempt, or throw it away."""

        def act() -> dict[str, Any]:
            trainer = self._trainer()
            if not commit:
                trainer.discard()
                self._gradients_of = None
                return {}
            faults.fault_point("before_step")
            if self._gradients_of != attempt:
                raise RuntimeError(f"cell {self.cell} holds no gradient of {attempt}, so it cannot apply it")
            self.guard.apply(attempt)
            self._gradients_of = None
            result: dict[str, Any] = trainer.step()
            faults.fault_point("after_step")
            if checksum:
                result["checksum"] = trainer.checksum()
            return result

        return self._train(act, "step")

    # -- weights ------------------------------------------------------------------------------------------------

    def join_refit_group(self, transport: str = "reshard", **arguments: Any) -> None:
        """Become a source of a refit group (see `weight_sync.member`)."""
        from megatron_rollout.weight_sync.member import as_source

        def join() -> None:
            self._refit.join([as_source(self._trainer(), transport) | arguments], transport=transport)

        self._train(join, "refit")

    def send_weights(self, version: int, within_s: float | None = None) -> int:
        """Give the group's rollout cells their slices of the current weights, which are `version`; returns the bytes
        that this rank sent. Collective over the group. Raises TransferFailed: the group is left then."""

        def send() -> int:
            faults.fault_point("refit")
            try:
                self._refit.prepare(self._trainer(), None, version=version, within_s=within_s)
                self._refit.move()
            except BaseException:
                self._refit.leave()
                raise
            faults.fault_point("refit_sent")
            return self._refit.bytes_sent

        return self._train(send, "refit")

    def offload_weights(self) -> int:
        """Put the trainer's weights away, to host memory, until its next work here; returns the bytes freed.

        For a colocated rollout with a model of its own; not while it shares the trainer's tensors (ValueError).
        """
        from megatron_rollout.weight_sync.offload import OffloadedWeights

        def offload() -> int:
            if self.rollout is not None and self.rollout.shares_model:
                raise ValueError("the rollout generates with the trainer's own tensors: they cannot be put away")
            if self._offloaded is None:
                self._offloaded = OffloadedWeights(self._trainer().model)
            return self._offloaded.nbytes

        return self._train(offload, "refit")

    def onload_weights(self) -> None:
        """Bring back what `offload_weights` put away; any other work of the trainer does so, too."""
        self._train(self._trainer, "refit")

    @ray.method(concurrency_group="health")
    def abort_refit(self, name: str, reason: str) -> None:
        super().abort_refit(name, reason)
        self._refit.abort(name, reason)

    def checksum(self) -> str:
        """Over the whole model, independent of its layout. Collective over the cell."""
        return self._train(lambda: self._trainer().checksum())

    def checksums(self) -> dict[str, str]:
        return self._train(lambda: self._trainer().checksums())

    def save_hf(self, directory: str) -> None:
        self._train(lambda: self._trainer().save_hf(directory))

    def save_state(self, directory: str) -> None:
        """Write this rank's state and the guard's into `directory` (one file a rank, renamed when whole)."""

        def save() -> None:
            path = os.path.join(directory, f"rank-{dist.get_rank():05d}.pt")
            torch.save(self._state(), path + ".partial")
            faults.fault_point("checkpoint")
            os.replace(path + ".partial", path)

        self._train(save, "checkpoint")

    def load_state(self, directory: str) -> None:
        def load() -> None:
            path = os.path.join(directory, f"rank-{dist.get_rank():05d}.pt")
            self._load_state(torch.load(path, map_location="cpu", weights_only=False))

        self._train(load, "checkpoint")

    def _trainer(self) -> TrainerRank:
        if self.trainer is None:
            raise RuntimeError("start_trainer has not been called")
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        return self.trainer
