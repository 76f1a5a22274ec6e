"""A process that hosts one rank of a trainer cell, as a Ray actor; colocated, it hosts a rank of a rollout cell too.

Ray calls its methods from several threads: training work runs in one thread of its own, in the order of the calls, so
that heartbeats, aborts and generation go on beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rollout import device
from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.engine.parallel import init_megatron
from megatron_rollout.worker import RolloutWorker
from trainer_hooks.cells.group import CrossCellGroup
from trainer_hooks.cells.quorum import Attempt, Quorum, StepGuard
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.training.spec import OptimizerSpec, TrainSpec

if TYPE_CHECKING:
    from megatron_rollout.weight_sync.reshard import ReshardGroup
    from trainer_hooks.training.rank import TrainerRank

T = TypeVar("T")
Shard = Mapping[str, Any]


class CellDisagrees(RuntimeError):
    """Another rank of this cell failed its part of the attempt; the message names it."""


class TrainerWorker(RolloutWorker):
    """One rank of one trainer cell. `progress` moves while it works, for the watchdog."""

    def __init__(self, **process: Any) -> None:
        super().__init__(**process)
        self._trainer_thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self.trainer: TrainerRank | None = None
        self.progress = 0
        self._reshard: ReshardGroup | None = None
        self._gradients_of: Attempt | None = None

    def _moved(self) -> None:
        self.progress += 1

    def _train(self, work: Callable[[], T]) -> T:
        """Run `work` in the trainer's thread. The caller's `ray.get` has the deadline."""

        def moved() -> T:
            self._moved()
            try:
                return work()
            finally:
                self._moved()

        return self._trainer_thread.submit(moved).result()

    # -- start --------------------------------------------------------------------------------------------------

    def start_trainer(self, spec: TrainSpec, *, cell: int, timeouts: CellTimeouts) -> None:
        """Build model and optimizer of this rank. Collective over the cell, after `join_world`."""
        from trainer_hooks.training.rank import TrainerRank

        def start() -> None:
            init_megatron(tp=spec.tp, pp=spec.pp, cp=spec.cp, seed=spec.seed, timeout_s=timeouts.collective_s)
            self.cell = cell
            self.timeouts = timeouts
            self.guard = StepGuard(spec.role)
            self.trainer = TrainerRank(spec)
            where = device.device()
            self.cells = CrossCellGroup(
                spec.role,
                dist.get_rank(),
                backend="nccl" if where.type == "cuda" else "gloo",
                device=where if where.type == "cuda" else None,
                host=self.host,
                timeouts=timeouts,
                progress=self._moved,
            )

        self._train(start)

    def start_colocated_rollout(self, spec: RolloutSpec, *, cell: int) -> None:
        """Generation in this process with the trainer's own tensors (equal layouts)."""
        from megatron_rollout.rollout_rank import RolloutRank

        def start() -> None:
            rank = RolloutRank(spec, model=self._trainer().model, tokenizer=self.load_tokenizer(spec.hf_checkpoint))
            self.host_rollout(rank, cell)

        self._train(start)

    def configure(self, store: str, quorum: Quorum, attempt: int = 0) -> None:
        """Join the cross-cell group of `quorum`: the ranks at this rank's place in all of its cells."""
        rank, world = quorum.rank_of(self.cell), quorum.world
        self._train(lambda: self.cells.configure(store, quorum.quorum_id, rank, world, attempt=attempt))

    def abort_cross_cell(self, reason: str, through: int) -> None:
        """A member of the quorum is dead: make this rank's cross-cell collective raise now. From any thread."""
        self.cells.abort(reason, through=through)

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        self._train(lambda: self._trainer().use_optimizer(spec))

    # -- one rollout --------------------------------------------------------------------------------------------

    def logprobs(self, shard: Shard, reference: bool = False) -> list[Any] | None:
        """Logprobs of the shard's responses, one array a sample; from rank 0 only. Collective over the cell."""
        found = self._train(lambda: self._trainer().logprobs(shard, reference=reference))
        return [x.numpy() for x in found] if dist.get_rank() == 0 else None

    def train(self, attempt: Attempt, shard: Shard, objective: str = "policy") -> dict[str, float]:
        """Forward, backward and the sum over cells; the gradient waits for the decision. Returns the step's metrics.

        What it raises is this cell's vote 'discard' (on every rank of the cell: they agree before they return).
        """
        return self._train(lambda: self._attempt(attempt, shard, objective))

    def _attempt(self, attempt: Attempt, shard: Shard, objective: str) -> dict[str, float]:
        self.guard.admit(attempt)
        self._gradients_of = None
        trainer = self._trainer()
        metrics: dict[str, float] = {}
        error: BaseException | None = None
        try:
            metrics = trainer.forward_backward(shard, objective=objective)
            metrics = self._sum_over_cells(trainer, metrics)
            norm = trainer.gradient_norm()
            if not norm < float("inf"):
                raise FloatingPointError(f"the gradient norm is {norm}")
            metrics["grad_norm"] = norm
        except Exception as caught:  # every failure is a vote, and the ranks of the cell must hear of it
            error = caught
        self._agree(attempt, error)
        self._gradients_of = attempt
        return metrics

    def _sum_over_cells(self, trainer: TrainerRank, metrics: dict[str, float]) -> dict[str, float]:
        names = sorted(metrics)
        sums = torch.tensor([metrics[n] for n in names], dtype=torch.float64)
        self.cells.all_reduce([*trainer.gradients(), sums])
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
            if self._gradients_of != attempt:
                raise RuntimeError(f"cell {self.cell} holds no gradient of {attempt}, so it cannot apply it")
            self.guard.apply(attempt)
            self._gradients_of = None
            result: dict[str, Any] = trainer.step()
            if checksum:
                result["checksum"] = trainer.checksum()
            return result

        return self._train(act)

    # -- weights ------------------------------------------------------------------------------------------------

    def join_refit_group(self, **arguments: Any) -> None:
        """Become a source of a refit group (see `ReshardGroup`)."""

        from megatron_rollout.weight_sync.reshard import ReshardGroup

        def join() -> None:
            self.leave_refit()
            self._reshard = ReshardGroup(**arguments)

        self._train(join)

    def send_weights(self) -> None:
        """Give the group's rollout cells their slices of the current weights. Collective over the group."""

        def send() -> None:
            if self._reshard is None:
                raise RuntimeError(f"cell {self.cell} has joined no refit group")
            try:
                self._reshard.send(self._trainer().model)
            except BaseException:
                self.leave_refit()
                raise

        self._train(send)

    def leave_refit(self) -> None:
        if self._reshard is not None:
            self._reshard.close()
        self._reshard = None

    def checksums(self) -> dict[str, str]:
        return self._train(lambda: self._trainer().checksums())

    def save_hf(self, directory: str) -> None:
        self._train(lambda: self._trainer().save_hf(directory))

    def save_state(self, directory: str) -> None:
        """Write this rank's state and the guard's into `directory` (one file a rank, renamed when whole)."""

        def save() -> None:
            path = os.path.join(directory, f"rank-{dist.get_rank():05d}.pt")
            torch.save({"trainer": self._trainer().state(), "guard": self.guard.state_dict()}, path + ".partial")
            os.replace(path + ".partial", path)

        self._train(save)

    def load_state(self, directory: str) -> None:
        def load() -> None:
            path = os.path.join(directory, f"rank-{dist.get_rank():05d}.pt")
            state = torch.load(path, map_location="cpu", weights_only=False)
            self._trainer().load_state(state["trainer"])
            self.guard.load_state_dict(state["guard"])

        self._train(load)

    def _trainer(self) -> TrainerRank:
        if self.trainer is None:
            raise RuntimeError("start_trainer has not been called")
        return self.trainer
