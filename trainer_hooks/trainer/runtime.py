"""Everything a run starts and ends: Ray, the store outside all cells, trainer cells, rollout cells, the event log."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.config import EngineConfig
from megatron_rollout.device import on_gpu
from megatron_rollout.engine.architecture import read_architecture
from megatron_rollout.generation import MegatronGeneration
from megatron_rollout.health import HealthPolicy, RestartPolicy
from megatron_rollout.ray_cluster import start_ray
from megatron_rollout.requests import SamplingParams
from megatron_rollout.weight_sync.checksum import combined
from trainer_hooks.cells.arbiter import Arbiter
from trainer_hooks.cells.event_log import EventLog
from trainer_hooks.cells.fault_plan import FaultPlan, parse_fault
from trainer_hooks.cells.quorum import NoLiveCells, Quorum
from trainer_hooks.cells.rollout_fleet import RolloutFleet
from trainer_hooks.cells.state import DeathCause, DeathKind
from trainer_hooks.cells.store import StoreServer
from trainer_hooks.cells.sync import PairResult, WeightSync
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.cells.train_group import TrainerCellHandle, TrainGroup
from trainer_hooks.trainer.sample import Sample
from trainer_hooks.trainer.spill import Spill
from trainer_hooks.trainer.steering import Steering
from trainer_hooks.training.losses import PolicyLossConfig
from trainer_hooks.training.spec import OptimizerSpec, TrainSpec

_OBJECT_STORE_BYTES = 256 * 2**20


class Runtime:
    """Context manager. `group`, `generation`, `sync` and `log` are there inside it; on exit everything is gone."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.architecture = read_architecture(args.hf_checkpoint)
        self.group: TrainGroup
        self.generation: MegatronGeneration
        self.sync: WeightSync
        self.fleet: RolloutFleet
        self.faults: FaultPlan
        self.log: EventLog
        self._started_ray = False
        self._accepted: set[int] = set()
        self._kept: set[int] = set()
        self._caught_up: set[tuple[int, int, int]] = set()
        self.steering: Steering | None = None
        self.tokens_per_s: float | None = None
        self.rollout_id = 0
        self.version = 0

    def __enter__(self) -> Runtime:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        args = self.args
        self._start_ray()
        import ray

        host = ray.util.get_node_ip_address()
        self._store = StoreServer(host)
        store = self._store.address
        timeouts = CellTimeouts(
            refit_s=args.refit_timeout, heartbeat_s=args.heartbeat_interval, heartbeat_misses=args.heartbeat_misses
        )
        output = Path(args.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        log_path = output / "events.jsonl"
        self.spill = Spill(output / "spill", args)
        if args.load is None:
            log_path.unlink(missing_ok=True)
            self.spill.forget_all()
        self.log = EventLog(log_path)
        self.log.append(
            "run_started",
            run=uuid.uuid4().hex[:12],
            trainer_cells=args.num_trainer_cells,
            rollout_cells=args.num_rollout_cells,
            resumed=args.load is not None,
            checksums=args.check_weights,
        )
        actor = self._actor_class()
        rollout_ranks = self.rollout_tp * self.rollout_pp

        def make_trainers(cell: int) -> list[Any]:
            return [actor() for _ in range(self.trainer_ranks)]

        def make_rollouts(cell: int) -> list[Any]:
            return [actor() for _ in range(rollout_ranks)]

        tolerant = args.use_fault_tolerance
        restarts = RestartPolicy(max_restarts=args.max_cell_restarts) if tolerant else None
        with ThreadPoolExecutor(2) as pool:
            generation = pool.submit(self._start_generation, make_rollouts) if not args.colocate else None
            self.group = TrainGroup(
                self.train_spec(),
                make_trainers,
                num_cells=args.num_trainer_cells,
                args=args,
                arbiter=Arbiter(self.log, timeouts),
                store=store,
                timeouts=timeouts,
                log=self.log,
                restarts=restarts,
                wait=args.on_cell_failure == "wait",
            )
            if generation is not None:
                self.generation = generation.result()
        if args.colocate:
            self.group.start_colocated(self.rollout_spec())
            self.generation = self._start_generation(lambda i: self.group.cells[i].actors, started=True)
        self.fleet = RolloutFleet(
            self.generation,
            None if args.colocate else make_rollouts,
            spec=self.rollout_spec(),
            seed=args.rollout_seed,
            policy=HealthPolicy(restarts=restarts or RestartPolicy(max_restarts=0)),
            timeouts=timeouts,
            step=lambda: self.rollout_id,
            log=self.log,
        )
        if args.colocate:
            self._tie_pairs()
        self.faults = FaultPlan([parse_fault(f) for f in args.inject_fault], self._actors_of, self.log)
        self.group.moment = self.faults.point
        self.group.on_started = lambda cell: self.faults.started(cell.index)
        self.generation.while_waiting = self.tend
        if args.control_port is not None:
            self.steering = Steering(self)
        self.sync = WeightSync(
            self.group, self.generation, store=store, timeout_s=args.refit_timeout, colocate=args.colocate
        )

    def _actors_of(self, side: str, cell: int) -> Sequence[Any]:
        if side == "trainer":
            return [a for c in self.group.live if c.index == cell for a in c.actors]
        rollout = self.generation.cells.get(cell)
        return rollout.actors if rollout is not None else []

    def _tie_pairs(self) -> None:
        """Colocated: a pair is one failure unit; both roles die and come back together."""

        def down(cell: TrainerCellHandle, cause: str) -> None:
            if (rollout := self.generation.cells.get(cell.index)) is not None:
                self.generation.dispatcher.cell_died(rollout, cause)

        def up(cell: TrainerCellHandle) -> None:
            self.fleet.replaced(cell.index, cell.actors, cell.pids)

        self.group.on_down, self.group.on_up = down, up

    def _rollout_died(self, index: int, cause: str) -> None:
        if not hasattr(self, "fleet"):  # the run is still starting, and ends with what the start raises
            return
        self.fleet.died(index, cause)
        if self.args.colocate:
            self.group.mark_dead(index, DeathCause(DeathKind.EXIT, cause))

    # -- during the run -----------------------------------------------------------------------------------------

    def begin(self, rollout_id: int) -> None:
        """A rollout begins. Raises NoLiveCells."""
        self.rollout_id = rollout_id
        self.faults.point("idle")
        if self.args.use_fault_tolerance and self.args.on_cell_failure == "wait":
            self.group.gather()
        self.tend()
        self.faults.begin(rollout_id)

    def tend(self) -> None:
        """Between two pieces of work, and while the loop waits for samples: heal, and bring up to date what was
        restarted; then what the control server was asked for. Raises NoLiveCells."""
        if self.steering is not None:
            self.steering.take()
        if not self.args.use_fault_tolerance:
            return
        self.group.tend()
        if not self.group.live:
            raise NoLiveCells("no trainer cell holds the run's state any more")
        # one try for a process and a version: what fails it waits for the next refit
        fresh = {
            (i, self.fleet.health.cell(i).incarnation, self.version): i for i in self.fleet.stale()
        }  # fmt: skip
        if behind := [index for key, index in fresh.items() if key not in self._caught_up]:
            self._caught_up.update(fresh)
            self._refit(behind)

    def accept(self, rollout_id: int, samples: Sequence[Sample], generated_by: Mapping[int, list[int]]) -> None:
        """The samples enter the batch of this rollout: each will be trained once."""
        self._accepted.add(rollout_id)
        if self.args.save or self.args.save_interval:
            self.spill.write(rollout_id, samples)
        for cell, indices in sorted(generated_by.items()):
            self.log.append("generated", rollout_id=rollout_id, cell=cell, samples=indices)
        self.log.append("accepted", rollout_id=rollout_id, samples=[s.index for s in samples], roles=["actor"])

    def kept(self, rollout_id: int) -> list[Sample] | None:
        """A rollout that was finished and accepted before a restore, None if it has to be generated."""
        return self.spill.read(rollout_id) if rollout_id in self._kept else None

    def finish_generation(self) -> None:
        """Colocated: the engines make room for training until the next refit wakes them."""
        if self.args.colocate:
            answers = self.generation.call_all("release_memory", cells=sorted(self.generation.cells))
            if failed := [a for a in answers.values() if isinstance(a, Exception)]:
                raise failed[0]

    def refit(self) -> list[PairResult]:
        """Bring the trainer's weights into the rollout cells as a new version."""
        self.version += 1
        self.group.version = self.version
        return self._refit(None)

    def _refit(self, only: list[int] | None) -> list[PairResult]:
        """A pair whose source died is tried again with another one."""
        refit = self.fleet.begin_refit(self.version)
        results = {r.rollout_cell: r for r in self.sync.sync(self.version, only)}
        for _ in range(len(self.group.cells) - 1 if self.args.use_fault_tolerance else 0):
            failed = [i for i, r in results.items() if not r.ok and i in self.generation.cells]
            if not failed:
                break
            results.update({r.rollout_cell: r for r in self.sync.sync(self.version, failed)})
        served = [i for i, r in results.items() if r.ok]
        self.fleet.end_refit(refit, served)
        if self.args.check_weights:
            self._report_weights(served)
        for r in results.values():
            extra = {"cause": r.cause} if r.cause else {}
            self.log.append(
                "refit",
                version=self.version,
                trainer_cell=r.trainer_cell,
                rollout_cell=r.rollout_cell,
                ok=r.ok,
                seconds=r.seconds,
                **extra,
            )
        return list(results.values())

    def _report_weights(self, rollout_cells: Sequence[int]) -> None:
        """Every cell's checksum at this version, for the audit."""
        common: dict[str, Any] = dict(model="actor", version=self.version)
        for cell, checksum in self.group.weight_checksums().items():
            self.log.append("weights", side="trainer", cell=cell, checksum=checksum, **common)
        for cell, found in self.generation.call_all("checksum", cells=rollout_cells).items():
            if not isinstance(found, Exception):
                self.log.append("weights", side="rollout", cell=cell, checksum=combined(found), **common)

    def restore(self, checkpoint: str, state: Mapping[str, Any]) -> None:
        """Take the driver's own state from a checkpoint: version, quorum, the last step that stands. Rollouts that were
        accepted after it are taken from the spill; those that are not there are generated again."""
        self.version = int(state["version"])
        quorum = Quorum.from_dict(state["quorum"])
        self.group.quorum = Quorum(max(quorum.quorum_id, self.group.quorum.quorum_id))
        self.group.last_step = tuple(state["step"]) if state["step"] else None  # type: ignore[assignment]
        accepted = self._accepted | {e["rollout_id"] for e in self.log.recovered if e.kind == "accepted"}
        later = sorted(r for r in accepted if r > int(state["rollout_id"]))
        lost = [r for r in later if self.spill.read(r) is None]
        self._accepted.update(later)
        self._accepted.difference_update(lost)
        self.group.version = self.version
        self._kept = set(later) - set(lost)
        self.group.arbiter.restore(checkpoint, {"actor": self.group.last_step}, self.version, lost)

    def _start_ray(self) -> None:
        processes = self.trainer_ranks * self.args.num_trainer_cells
        if not self.args.colocate:
            processes += self.rollout_tp * self.rollout_pp * self.args.num_rollout_cells
        if self.args.ray_address:
            start_ray(address=self.args.ray_address)
        else:
            start_ray(num_cpus=processes, object_store_memory=_OBJECT_STORE_BYTES)
        self._started_ray = True

    def _actor_class(self) -> Any:
        import ray

        from trainer_hooks.cells.worker import TrainerWorker

        remote = ray.remote(
            num_cpus=1,
            num_gpus=1 if on_gpu() else 0,
            max_concurrency=8,
            max_restarts=0,
            concurrency_groups={"health": 2},
        )(TrainerWorker)
        environment = {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
        return lambda: remote.options(runtime_env=environment).remote(threads=1, deterministic=self.args.deterministic)

    def _may_recover(self) -> bool:
        fleet = getattr(self, "fleet", None)
        return self.args.use_fault_tolerance and fleet is not None and fleet.may_recover()

    def _start_generation(self, make: Callable[[int], list[Any]], started: bool = False) -> MegatronGeneration:
        args = self.args
        return MegatronGeneration(
            self.rollout_spec(),
            make,
            num_cells=args.num_rollout_cells,
            sampling=self.sampling(),
            seed=args.rollout_seed,
            pad_token_id=self.architecture.pad_token_id or 0,
            deterministic=args.deterministic,
            max_failed_fraction=args.max_failed_fraction,
            may_recover=self._may_recover,
            on_cell_down=self._rollout_died,
            started=started,
        )

    # -- what the options mean ----------------------------------------------------------------------------------

    @property
    def trainer_ranks(self) -> int:
        args = self.args
        size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        return args.trainer_cell_size or size

    @property
    def rollout_tp(self) -> int:
        return self.args.rollout_tensor_model_parallel_size or self.args.tensor_model_parallel_size

    @property
    def rollout_pp(self) -> int:
        return self.args.rollout_pipeline_model_parallel_size or self.args.pipeline_model_parallel_size

    @property
    def dtype(self) -> str:
        bf16 = self.args.bf16 if self.args.bf16 is not None else on_gpu() and not self.args.fp32
        return "bfloat16" if bf16 else "float32"

    @property
    def context_length(self) -> int:
        return self.args.rollout_max_context_len or self.architecture.max_positions

    def sampling(self) -> SamplingParams:
        args = self.args
        return SamplingParams(
            temperature=args.rollout_temperature,
            top_p=args.rollout_top_p,
            top_k=args.rollout_top_k,
            max_new_tokens=args.rollout_max_response_len,
            stop=tuple(args.rollout_stop),
            stop_token_ids=tuple(args.rollout_stop_token_ids),
        )

    def train_spec(self) -> TrainSpec:
        args = self.args
        return TrainSpec(
            hf_checkpoint=args.hf_checkpoint,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            cp=args.context_parallel_size,
            sequence_parallel=args.sequence_parallel,
            dtype=self.dtype,
            max_sequence_length=self.context_length + 1,
            with_reference=args.kl_loss_coef > 0,
            temperature=args.rollout_temperature,
            calculate_per_token_loss=args.calculate_per_token_loss,
            micro_batch_size=args.micro_batch_size,
            use_dynamic_batch_size=args.use_dynamic_batch_size,
            max_tokens_per_gpu=args.max_tokens_per_gpu,
            seed=args.seed,
            loss=PolicyLossConfig.from_args(args),
            optimizer=OptimizerSpec(
                lr=args.lr,
                min_lr=args.min_lr,
                lr_decay_style=args.lr_decay_style,
                lr_warmup_steps=args.lr_warmup_iters,
                lr_decay_steps=args.lr_decay_iters or max(1, args.num_rollout * args.num_steps_per_rollout),
                weight_decay=args.weight_decay,
                adam_beta1=args.adam_beta1,
                adam_beta2=args.adam_beta2,
                adam_eps=args.adam_eps,
                clip_grad=args.clip_grad,
                use_distributed_optimizer=args.use_distributed_optimizer,
            ),
        )

    def rollout_spec(self) -> RolloutSpec:
        args = self.args
        overrides: dict[str, Any] = dict(
            max_sequence_length=self.context_length,
            kv_cache_management_mode=args.rollout_kv_mode,
            enable_prefix_caching=args.rollout_prefix_cache,
            attention_backend=args.rollout_attention_backend,
            dtype=self.dtype,
            deterministic=args.deterministic,
        )
        if args.rollout_max_requests is not None:
            overrides["max_requests"] = args.rollout_max_requests
        if args.rollout_kv_cache_gb is not None:
            overrides["buffer_size_gb"] = args.rollout_kv_cache_gb
        return RolloutSpec(
            hf_checkpoint=args.hf_checkpoint,
            engine=EngineConfig.for_device("cuda" if on_gpu() else "cpu", **overrides),
            tp=self.rollout_tp,
            pp=self.rollout_pp,
            sequence_parallel=args.sequence_parallel,
            dtype=self.dtype,
        )

    def close(self) -> None:
        """End every process of the run. Idempotent."""
        if self.steering is not None:
            self.steering.close()
            self.steering = None
        if (fleet := getattr(self, "fleet", None)) is not None:
            fleet.close()
        if (generation := getattr(self, "generation", None)) is not None:
            generation.dispatcher.close()
            if not self.args.colocate:
                generation.shutdown()
        if (group := getattr(self, "group", None)) is not None:
            group.shutdown()
        if (store := getattr(self, "_store", None)) is not None:
            store.close()
        if (log := getattr(self, "log", None)) is not None:
            log.close()
        if self._started_ray:
            import ray

            ray.shutdown()
            self._started_ray = False
