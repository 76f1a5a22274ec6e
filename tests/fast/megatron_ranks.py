"""Code that runs inside the test ranks: layouts, engines and trainer ranks, kept from one test to the next."""

from __future__ import annotations

import warnings
from typing import Any


def use_layout(tp: int = 1, pp: int = 1, cp: int = 1) -> None:
    """megatron-core's groups over the ranks of this pool, anew if the layout differs from the last one."""
    import logging

    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megatron_rollout import device

    device.setup_process()
    from megatron.core import parallel_state

    from megatron_rollout.engine.parallel import init_megatron

    if parallel_state.model_parallel_is_initialized():
        current = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
        )
        if current == (tp, pp, cp):
            return
        parallel_state.destroy_model_parallel()
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        get_cuda_rng_tracker().reset()
    init_megatron(tp=tp, pp=pp, cp=cp)


def build_rank(
    checkpoint: str, *, tp: int = 1, pp: int = 1, sequence_parallel: bool = False, tokenizer: Any = None, **engine: Any
) -> Any:
    """A `RolloutRank` on `checkpoint`."""
    from megatron_rollout.cell_types import RolloutSpec
    from megatron_rollout.config import EngineConfig
    from megatron_rollout.rollout_rank import RolloutRank

    use_layout(tp, pp)
    options: dict[str, Any] = dict(max_sequence_length=128, max_requests=16, buffer_size_gb=0.02) | engine
    spec = RolloutSpec(
        checkpoint, EngineConfig.for_device("cpu", **options), tp=tp, pp=pp, sequence_parallel=sequence_parallel
    )
    return RolloutRank(spec, tokenizer=tokenizer)


def drain(engine: Any, limit: int = 2000) -> dict[str, Any]:
    """Step until nothing is left; outputs by request id."""
    outputs: dict[str, Any] = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for output in engine.step().finished:
            outputs[output.request_id] = output
    raise AssertionError(f"the engine still has work after {limit} steps")
