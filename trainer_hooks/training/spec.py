"""What one rank of a trainer cell is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rollout.packing import sequence_length_factor
from trainer_hooks.training.losses import PolicyLossConfig


@dataclass(frozen=True)
class OptimizerSpec:
    """Adam as megatron-core's optimizer runs it; names are the trainers' options.

    lr_decay_steps and lr_warmup_steps count optimizer steps. clip_grad 0 is off.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: str = "constant"
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 1_000_000
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False


@dataclass(frozen=True)
class TrainSpec:
    """hf_checkpoint: weights to begin from. role: "actor" or "critic".

    with_reference: keep a frozen copy of the initial policy for KL. temperature: of the rollout; logprobs are of
    logits / temperature. calculate_per_token_loss: mean over the step's tokens instead of over its rollouts.
    micro_batch_size, use_dynamic_batch_size, max_tokens_per_gpu, value_clip: as the trainers' options of these names.
    qkv_format: "thd" packs the sequences of a micro-batch, "bshd" pads them to the longest.
    make_sequence_length_divisible_by: pad each sequence to a multiple of it (default: the least that the layout takes).
    """

    hf_checkpoint: str
    role: str = "actor"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    dtype: str = "float32"
    max_sequence_length: int = 4096
    with_reference: bool = False
    temperature: float = 1.0
    calculate_per_token_loss: bool = False
    micro_batch_size: int = 1
    use_dynamic_batch_size: bool = False
    max_tokens_per_gpu: int | None = None
    qkv_format: str = "thd"
    make_sequence_length_divisible_by: int | None = None
    value_clip: float | None = 0.2
    seed: int = 1
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    model_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def multiple_of(self) -> int:
        """What each padded sequence length is a multiple of."""
        return self.make_sequence_length_divisible_by or sequence_length_factor(
            self.tp, self.cp, self.sequence_parallel
        )
