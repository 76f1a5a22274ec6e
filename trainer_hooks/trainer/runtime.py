"""Everything a run starts and ends: Ray, the store outside all cells, trainer cells, rollout cells, the event log."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.config import EngineConfig
from megatron_rollout.device import on_gpu
from megatron_rollout.engine.architecture import read_architecture
from megatron_rollout.generation import MegatronGeneration
from megatron_rollout.ray_cluster import start_ray
from megatron_rollout.requests import SamplingParams
from trainer_hooks.cells.arbiter import Arbiter
from trainer_hooks.cells.event_log import EventLog
from trainer_hooks.cells.quorum import Quorum
from trainer_hooks.cells.store import StoreServer
from trainer_hooks.cells.sync import PairResult, WeightSync
from trainer_hooks.cells.timeouts import CellTimeouts
from trainer_hooks.cells.train_group import TrainGroup
from trainer_hooks.trainer.sample import Sample
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
        self.log: EventLog
        self._started_ray = False
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
        timeouts = CellTimeouts(refit_s=args.refit_timeout)
        output = Path(args.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        log_path = output / "events.jsonl"
        if args.load is None:
            log_path.unlink(missing_ok=True)
        self.log = EventLog(log_path)
        self.log.append(
            "run_started",
            run=uuid.uuid4().hex[:12],
            trainer_cells=args.num_trainer_cells,
            rollout_cells=args.num_rollout_cells,
            checksums=False,
        )
        actor = self._actor_class()
        ranks = self.trainer_ranks
        trainers = {i: [actor() for _ in range(ranks)] for i in range(args.num_trainer_cells)}
        rollout_ranks = self.rollout_tp * self.rollout_pp
        rollouts = (
            trainers
            if args.colocate
            else {j: [actor() for _ in range(rollout_ranks)] for j in range(args.num_rollout_cells)}
        )
        with ThreadPoolExecutor(2) as pool:
            generation = pool.submit(self._start_generation, rollouts) if not args.colocate else None
            self.group = TrainGroup(
                self.train_spec(),
                trainers.__getitem__,
                num_cells=args.num_trainer_cells,
                args=args,
                arbiter=Arbiter(self.log, timeouts),
                store=store,
                timeouts=timeouts,
                log=self.log,
            )
            if generation is not None:
                self.generation = generation.result()
        if args.colocate:
            self.group.start_colocated(self.rollout_spec())
            self.generation = self._start_generation(rollouts, started=True)
        self.sync = WeightSync(
            self.group, self.generation, store=store, timeout_s=args.refit_timeout, colocate=args.colocate
        )

    # -- during the run -----------------------------------------------------------------------------------------

    def accept(self, rollout_id: int, samples: Sequence[Sample], generated_by: Mapping[int, list[int]]) -> None:
        """The samples enter the batch of this rollout: each will be trained once."""
        for cell, indices in sorted(generated_by.items()):
            self.log.append("generated", rollout_id=rollout_id, cell=cell, samples=indices)
        self.log.append("accepted", rollout_id=rollout_id, samples=[s.index for s in samples], roles=["actor"])

    def finish_generation(self) -> None:
        """Colocated: the engines make room for training until the next refit wakes them."""
        if self.args.colocate:
            answers = self.generation.call_all("release_memory", cells=sorted(self.generation.cells))
            if failed := [a for a in answers.values() if isinstance(a, Exception)]:
                raise failed[0]

    def refit(self) -> list[PairResult]:
        """Bring the trainer's weights into the rollout cells as a new version."""
        self.version += 1
        results = self.sync.sync(self.version)
        for r in results:
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
        return results

    def restore(self, checkpoint: str, state: Mapping[str, Any]) -> None:
        """Take the driver's own state from a checkpoint: version, quorum, the last step that stands."""
        self.version = int(state["version"])
        quorum = Quorum.from_dict(state["quorum"])
        self.group.quorum = Quorum(max(quorum.quorum_id, self.group.quorum.quorum_id))
        self.group.last_step = tuple(state["step"]) if state["step"] else None  # type: ignore[assignment]
        self.group.arbiter.restore(checkpoint, {"actor": self.group.last_step}, self.version)

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

        remote = ray.remote(num_cpus=1, num_gpus=1 if on_gpu() else 0, max_concurrency=8, max_restarts=0)(TrainerWorker)
        environment = {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
        return lambda: remote.options(runtime_env=environment).remote(threads=1, deterministic=self.args.deterministic)

    def _start_generation(self, actors: dict[int, list[Any]], started: bool = False) -> MegatronGeneration:
        args = self.args
        return MegatronGeneration(
            self.rollout_spec(),
            actors.__getitem__,
            num_cells=args.num_rollout_cells,
            sampling=self.sampling(),
            seed=args.rollout_seed,
            pad_token_id=self.architecture.pad_token_id or 0,
            deterministic=args.deterministic,
            max_failed_fraction=args.max_failed_fraction,
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
