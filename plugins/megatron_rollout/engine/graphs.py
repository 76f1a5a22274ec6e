"""CUDA graphs of the decoder, captured by megatron-core and replayed without its per-step checks of the arguments."""

from __future__ import annotations

from typing import Any

import megatron.core.transformer.cuda_graphs as cuda_graphs
import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import InferenceCudaGraphScope


class _Graphs(cuda_graphs.CudaGraphManager):
    """Replays a captured graph by copying the one argument whose content changes from step to step."""

    def __call__(self, megatron_module: Any, args: Any, kwargs: dict[str, Any], cache_key: Any = None) -> Any:
        runner = self.custom_cudagraphs_lookup_table[kwargs["inference_context"].padded_batch_dimensions]
        if runner is None or not runner.fwd_graph_recorded or torch.is_grad_enabled():
            return super().__call__(megatron_module, args, kwargs, cache_key)
        # the rotary embedding is constant; batch and KV cache are read at the addresses that were captured
        runner.fwd_graph_input_kwargs["hidden_states"].copy_(kwargs["hidden_states"])
        runner.fwd_graph.replay()
        return tuple(runner.to_list(runner.fwd_graph_outputs))


def enable_cuda_graphs(
    model: torch.nn.Module, *, scope: str = "block", pg_collection: ProcessGroupCollection | None = None
) -> None:
    """Let an engine capture CUDA graphs of `model`: one for the whole decoder ("block") or one a layer ("layer").

    megatron-core decides this when it builds the layers; here it is decided when an engine is built, so that a model
    which trains can also generate with graphs. Its training never enters those of a block, but those of layers: use
    "layer" for a model that only generates. Idempotent. Needs random states that can be captured (`init_megatron`).
    """
    _accept_derived_contexts()
    config: Any = model.config
    config.cuda_graph_impl, config.cuda_graph_modules = "local", []
    config.inference_cuda_graph_scope = InferenceCudaGraphScope[scope]
    decoder: Any = model.decoder
    for module in [decoder] if scope == "block" else decoder.layers:
        if not hasattr(module, "cudagraph_manager"):
            manager = _Graphs if scope == "block" else cuda_graphs.CudaGraphManager
            module.cudagraph_manager = manager(config, need_backward=False, pg_collection=pg_collection)


def _accept_derived_contexts() -> None:
    """megatron-core takes arguments of exactly its context's class; ours is derived from it."""
    check = cuda_graphs._check_supported_type
    if getattr(check, "accepts_derived", False):
        return

    def check_or_derived(meta: Any) -> None:
        if not issubclass(meta.type, DynamicInferenceContext):
            check(meta)

    check_or_derived.accepts_derived = True  # type: ignore[attr-defined]
    cuda_graphs._check_supported_type = check_or_derived
