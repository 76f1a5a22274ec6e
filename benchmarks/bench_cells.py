"""Rollout cells against the bare engine, the same requests side by side in one run, on this machine's CPU.

bare: megatron-core's dynamic engine with its own sampling, driven in one process of one thread. one, two: the same
requests through `MegatronGeneration` on one and on two cells of one thread each. The last line is one JSON object:
`python_ratio` (one / bare), `cells_ratio` (two / one), tokens/s of each; medians of the repeats.

    python benchmarks/bench_cells.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


def engine_options(requests: int) -> dict[str, Any]:
    return dict(max_sequence_length=256, max_requests=requests, buffer_size_gb=0.25, block_size_tokens=16)


def bare(pipe: Any, checkpoint: str, requests: int, tokens: int) -> None:
    """Answer each message with the seconds that the bare engine takes for all requests."""
    import warnings

    warnings.filterwarnings("ignore")
    import torch.distributed as dist
    from megatron.core.inference.sampling_params import SamplingParams as EngineSampling

    from megatron_rollout import device

    device.setup_process()
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    from megatron_rollout.engine import paged_attention
    from megatron_rollout.engine.architecture import read_architecture
    from megatron_rollout.engine.checkpoint import load_hf
    from megatron_rollout.engine.model import build_model, transformer_config
    from megatron_rollout.engine.parallel import init_megatron, init_world
    from megatron_rollout.engine.weights import WeightMap

    init_world(dist.HashStore(), rank=0, world_size=1)
    init_megatron()
    paged_attention.install("torch")
    architecture = read_architecture(checkpoint)
    model = build_model(architecture, transformer_config(architecture), max_sequence_length=257).eval()
    load_hf(model, WeightMap(architecture, tp=1, tp_rank=0, layer_offset=0), checkpoint)
    context = DynamicInferenceContext(
        model.config,
        InferenceConfig(max_tokens=16384, materialize_only_last_token_logits=True, **engine_options(requests)),
    )

    class NoTokenizer:
        eod = -1

        def detokenize(self, *args: Any, **kwargs: Any) -> str:
            return ""

    controller = TextGenerationController(GPTInferenceWrapper(model, context), NoTokenizer())
    engine = DynamicInferenceEngine(controller=controller, context=context)
    sampling = EngineSampling(
        num_tokens_to_generate=tokens, termination_id=-1, return_log_probs=True, skip_prompt_log_probs=True
    )
    while pipe.recv():
        start = time.perf_counter()
        for i, prompt in enumerate(prompts(requests)):
            engine.add_request(i, prompt, sampling)
        while engine.has_unfinished_requests():
            engine.step_modern()
        pipe.send(time.perf_counter() - start)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + j) % 500 + 3 for j in range(8 + i % 17)] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", help="also write the result to this file")
    args = parser.parse_args()
    requests, tokens, repeats = (64, 24, 3) if args.quick else (256, 64, 5)

    import ray

    from megatron_rollout.cell_types import RolloutSpec
    from megatron_rollout.config import EngineConfig
    from megatron_rollout.generation import MegatronGeneration
    from megatron_rollout.ray_cluster import start_ray
    from megatron_rollout.requests import GenerationRequest, SamplingParams
    from megatron_rollout.worker import RolloutWorker
    from trainer_hooks.trainer.tiny_checkpoint import make_checkpoint

    directory = tempfile.mkdtemp()
    checkpoint = make_checkpoint(
        Path(directory) / "model",
        characters="".join(chr(0x4E00 + i) for i in range(1021)),
        layers=4,
        hidden=384,
        heads=6,
        kv_heads=2,
        head_dim=64,
        ffn=1024,
        max_positions=256,
    )
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=bare, args=(there, str(checkpoint), requests, tokens), daemon=True
    )
    process.start()
    start_ray(num_cpus=2, object_store_memory=128 * 2**20)
    actor = ray.remote(num_cpus=1, max_concurrency=8)(RolloutWorker)
    spec = RolloutSpec(str(checkpoint), EngineConfig.for_device("cpu", **engine_options(requests)))
    generation = MegatronGeneration(spec, lambda index: [actor.remote()], num_cells=2)
    wanted = [
        GenerationRequest(str(i), tuple(p), SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=i))
        for i, p in enumerate(prompts(requests))
    ]

    def through_cells(down: bool) -> float:
        if down:
            generation.dispatcher.router.cell_down(1)
        start = time.perf_counter()
        outputs = generation.run(wanted, timeout_s=600)
        seconds = time.perf_counter() - start
        assert all(len(o.output_ids) == tokens for o in outputs)
        if down:
            generation.dispatcher.cell_up(1)
        return seconds

    def through_bare() -> float:
        here.send(True)
        if not here.poll(600):
            raise TimeoutError("the bare engine did not answer within 600 s")
        return float(here.recv())

    times: dict[str, list[float]] = {"bare": [], "one": [], "two": []}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for name, measure in (
            ("bare", through_bare),
            ("one", lambda: through_cells(True)),
            ("two", lambda: through_cells(False)),
        ):
            seconds = measure()
            if repeat:
                times[name].append(seconds)
    here.send(False)
    generation.shutdown()
    ray.shutdown()
    speed = {name: requests * tokens / statistics.median(values) for name, values in times.items()}
    result = {
        "python_ratio": statistics.median(b / o for b, o in zip(times["bare"], times["one"], strict=True)),
        "cells_ratio": statistics.median(o / t for o, t in zip(times["one"], times["two"], strict=True)),
        "tokens_per_s": {name: round(value) for name, value in speed.items()},
        "requests": requests,
        "tokens": tokens,
        "repeats": repeats,
        "cores": os.cpu_count(),
    }
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
