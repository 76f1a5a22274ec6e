"""One rank of a trainer cell: model, optimizer and schedule, and one step's gradient as a plain sum.

Losses are weighted with the global counts of the step, megatron-core adds micro-batches, context-parallel and
data-parallel ranks up without scaling anything, and cells are added up by the caller. So the gradient is the same
whatever the cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rollout.engine.architecture import Architecture, read_architecture
from megatron_rollout.engine.checkpoint import load_hf, save_hf
from megatron_rollout.engine.model import build_model, transformer_config
from megatron_rollout.engine.weights import WeightMap
from trainer_hooks.training.forward import MicroBatches, forward_only, run_schedule
from trainer_hooks.training.objectives import OBJECTIVES, read_logprobs
from trainer_hooks.training.optimizer_state import load_optimizer_state, optimizer_state
from trainer_hooks.training.spec import OptimizerSpec, TrainSpec

Shard = Mapping[str, Any]


class TrainerRank:
    """Policy (and reference) of one rank, inside an initialised cell. `build` says what model it is."""

    def __init__(self, spec: TrainSpec) -> None:
        self.spec = spec
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.architecture = self.read_architecture()
        self.dtype = getattr(torch, spec.dtype)
        config = transformer_config(
            self.architecture,
            tp=spec.tp,
            pp=spec.pp,
            cp=spec.cp,
            sequence_parallel=spec.sequence_parallel,
            dtype=self.dtype,
            calculate_per_token_loss=True,  # nothing is scaled: the weights hold the normalisation
            **spec.model_overrides,
        )
        config.finalize_model_grads_func = _finalize
        self.model = self.build(config)
        self.weight_map = WeightMap(
            self.architecture,
            tp=spec.tp,
            tp_rank=self.groups.tp.rank(),
            layer_offset=get_transformer_layer_offset(config, pp_rank=self.groups.pp.rank()),
            value_head=self.value_head,
        )
        load_hf(self.model, self.weight_map, spec.hf_checkpoint)
        self.reference: torch.nn.Module | None = None
        if spec.with_reference:
            self.reference = self.build(config)
            load_hf(self.reference, self.weight_map, spec.hf_checkpoint)
            self.reference.requires_grad_(False)
        wrapped: torch.nn.Module = Float16Module(config, self.model) if self.dtype == torch.bfloat16 else self.model
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=spec.optimizer.use_distributed_optimizer,
                grad_reduce_in_fp32=True,
            ),
            wrapped,
        )
        self.optimizer_steps = 0
        self.use_optimizer(spec.optimizer)

    # -- what a value model has otherwise -----------------------------------------------------------------------

    value_head = False

    def read_architecture(self) -> Architecture:
        return read_architecture(self.spec.hf_checkpoint)

    def build(self, config: TransformerConfig) -> GPTModel:
        """The bare model of this rank, before its weights are loaded and DDP wraps it."""
        return build_model(self.architecture, config, max_sequence_length=self.spec.max_sequence_length)

    def use_optimizer(self, spec: OptimizerSpec) -> None:
        """Begin with a fresh optimizer and schedule (moments and step count start anew)."""
        self.optimizer = get_megatron_optimizer(_optimizer_config(spec, self.dtype), [self.ddp])
        self.scheduler = _scheduler(self.optimizer, spec)

    # -- forward only -------------------------------------------------------------------------------------------

    def logprobs(self, shard: Shard, *, reference: bool = False) -> list[torch.Tensor]:
        """Logprobs [R] of each sample's response under the policy (or the reference), in row order, on the CPU.

        Collective over the cell; every rank of it returns all of the cell's samples.
        """
        model = self.reference if reference else self.ddp
        if model is None:
            raise RuntimeError("logprobs of the reference were asked for, but the trainer was built without one")
        batches = self.micro_batches(shard)
        return forward_only(model, batches, read_logprobs(batches, self.spec, self.groups), self.groups)

    def values(self, shard: Shard) -> list[torch.Tensor]:
        """Values of each sample's response: of a critic's rank only (`ValueRank`)."""
        raise RuntimeError(f"a rank of role {self.spec.role!r} has no values")

    # -- a step -------------------------------------------------------------------------------------------------

    def forward_backward(self, shard: Shard, *, objective: str = "policy") -> dict[str, float]:
        """Gradient of this cell's part of the step, summed into the buffers; returns additive metrics of the cell.

        shard: columns by name (`tokens`, `response_lengths`, `loss_masks`, `weights`, `advantages`, `log_probs`, …);
        `weights` are the per-token weights that carry the global normalisation. A shard without samples runs one
        micro-batch of padding, whose gradient is zero.
        """
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.ddp.train()
        batches = self.micro_batches(shard)
        if objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
        loss = OBJECTIVES[objective](batches, self.spec, self.groups)
        return run_schedule(self.ddp, batches, loss, self.groups)

    def gradients(self) -> list[torch.Tensor]:
        """The flat gradient buffers of this rank, to be summed over cells in place."""
        buffers = [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
        return [b.grad_data for b in buffers]

    def step(self, increment: int = 1) -> dict[str, float]:
        """Apply the gradient. Returns grad_norm and lr. Raises FloatingPointError if it is not finite; nothing is
        applied then."""
        norm = self.gradient_norm()
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient norm is {norm}")
        success, grad_norm, _ = self.optimizer.step()
        if not success:
            raise FloatingPointError("the optimizer found an overflow")
        self.scheduler.step(increment)
        self.optimizer_steps += 1
        return {"grad_norm": float(norm if grad_norm is None else grad_norm), "lr": self.learning_rate}

    def gradient_norm(self) -> float:
        """Norm of the gradient over the whole cell, before clipping. Collective over the cell."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def discard(self) -> None:
        """Throw the gradient away: buffers of a failed attempt may be partly summed."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def micro_batches(self, shard: Shard) -> MicroBatches:
        return MicroBatches.of_shard(shard, self.spec, self.groups)

    # -- state --------------------------------------------------------------------------------------------------

    def save_hf(self, directory: str, *, writes: bool = True) -> None:
        """Write the policy as a Hugging Face checkpoint. Collective over the cell."""
        save_hf(
            self.model,
            self.weight_map,
            directory,
            tp_group=self.groups.tp,
            pp_group=self.groups.pp,
            source=self.spec.hf_checkpoint,
            writes=writes and self.groups.dp_cp.rank() == 0,
        )

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, of this rank: parameters, optimizer, schedule, random states."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return {
            "model": {k: v for k, v in self.model.state_dict().items() if isinstance(v, torch.Tensor)},
            "optimizer": optimizer_state(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "rng_tracker": get_cuda_rng_tracker().get_states(),
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        self.model.load_state_dict(state["model"], strict=False)
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.scheduler.num_steps = 0  # megatron-core adds the saved steps to those that were taken here
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        get_cuda_rng_tracker().set_states(state["rng_tracker"])
        self.optimizer_steps = state["optimizer_steps"]

    def checksum(self) -> str:
        from megatron_rollout.weight_sync.checksum import combined

        return combined(self.checksums())

    def checksums(self) -> dict[str, str]:
        """Checksum of every Hugging Face tensor. Collective over the cell's TP and PP ranks."""
        from megatron_rollout.weight_sync.checksum import hf_checksums

        return hf_checksums(self.model, self.weight_map, tp_group=self.groups.tp, pp_group=self.groups.pp)


def _finalize(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, pg_collection: Any = None, **kwargs: Any
) -> None:
    """megatron-core's reductions inside the cell, without its division by a token count."""
    finalize_model_grads(model, None, pg_collection=pg_collection, **kwargs)


def _optimizer_config(spec: OptimizerSpec, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.adam_beta1,
        adam_beta2=spec.adam_beta2,
        adam_eps=spec.adam_eps,
        clip_grad=spec.clip_grad,
        use_distributed_optimizer=spec.use_distributed_optimizer,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )


def _scheduler(optimizer: Any, spec: OptimizerSpec) -> OptimizerParamScheduler:
    """Counts optimizer steps. The first value is that of step 0."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=spec.lr,
        min_lr=min(spec.min_lr, spec.lr),
        lr_warmup_steps=spec.lr_warmup_steps,
        lr_decay_steps=max(spec.lr_decay_steps, spec.lr_warmup_steps + 1),
        lr_decay_style=spec.lr_decay_style,
        start_wd=spec.weight_decay,
        end_wd=spec.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
