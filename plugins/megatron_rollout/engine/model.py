"""Builds the megatron-core model of an `Architecture`: the one place that chooses the model class.

Upstream deprecates `GPTModel` for `HybridModel`; whoever moves does it here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rollout.device import device, on_gpu
from megatron_rollout.engine.architecture import Architecture
from megatron_rollout.engine.attention import block_spec


def transformer_config(
    architecture: Architecture,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> TransformerConfig:
    """TransformerConfig of `architecture` in a TP·PP·CP layout; `overrides` win over every field.

    Fused SwiGLU on CUDA; activations in `dtype`, which is also the parameters' dtype.
    """
    a = architecture
    fields: dict[str, Any] = dict(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        ffn_hidden_size=a.ffn_hidden_size,
        num_attention_heads=a.num_heads,
        num_query_groups=a.num_kv_heads,
        kv_channels=a.head_dim,
        layernorm_epsilon=a.norm_eps,
        add_qkv_bias=a.qkv_bias,
        qk_layernorm=a.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel and tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=pp > 1,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, for dense models too
        use_cpu_initialization=not on_gpu(),
        perform_initialization=False,  # every weight is loaded
        bias_dropout_fusion=False,
        bias_activation_fusion=on_gpu(),
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
    )
    fields.update(overrides)
    return TransformerConfig(**fields)


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    *,
    max_sequence_length: int,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """The model part of this rank, parameters uninitialised, on this process' device.

    pg_collection: explicit process groups (a second layout in one process); default: megatron-core's global ones.
    Raises ValueError where the layout does not divide the model.
    """
    from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage

    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    architecture.check_parallel(tp=config.tensor_model_parallel_size, pp=config.pipeline_model_parallel_size)
    layers = get_num_layers_to_build(config, pp_rank=groups.pp.rank())
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(layers, qk_layernorm=architecture.qk_norm),
        vocab_size=architecture.vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=is_pp_first_stage(groups.pp),
        post_process=is_pp_last_stage(groups.pp),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor or 8.0,
        pg_collection=groups,
    )
    return model.to(device())


@torch.no_grad()
def randomize(model: torch.nn.Module, *, seed: int, std: float = 0.02) -> None:
    """Normal matrices, norms of one, biases of zero, drawn on the model's own device."""
    generator = torch.Generator(device()).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, std, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
