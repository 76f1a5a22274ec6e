"""Where the time of a decode step goes: host functions, GPU kernels, and how long the GPU waits for the host.

    python benchmarks/profile_decode.py [--model 1.5b] [--concurrency 256] [--prompt 128] [--steps 100]

One engine in this process with random weights. The last line of stdout is one JSON object: `step_ms` (median, nothing
attached), `gpu_busy_ms` (sum of kernels a step), `kernels` {name: ms a step}, `host` {function: ms a step, cumulative;
the profiler itself slows the host down}, `bytes_per_step` and `roofline_fraction` against the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shapes import SHAPES, write_config

from megatron_rollout import device
from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.config import EngineConfig
from megatron_rollout.engine import parallel
from megatron_rollout.requests import GenerationRequest, SamplingParams
from megatron_rollout.rollout_rank import RolloutRank


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy on this device."""
    size = (4 << 30) if device.on_gpu() else (64 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device.device())
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        device.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size / median(times[1:])


def bytes_of_step(rank: RolloutRank, tokens_in_cache: float) -> float:
    """Bytes a decode step must read: every weight once (tied embeddings too, as the output layer) and the KV cache."""
    a = rank.architecture
    weights = sum(p.numel() * p.element_size() for p in rank.model.parameters())
    if not a.tied_embeddings:
        weights -= a.vocab_size * a.hidden_size * next(rank.model.parameters()).element_size()
    kv = 2 * a.num_layers * a.num_kv_heads * a.head_dim * next(rank.model.parameters()).element_size()
    return weights + tokens_in_cache * kv


def start_rank(model: str, engine: EngineConfig) -> RolloutRank:
    directory = Path(tempfile.mkdtemp(prefix="profile-"))
    store, _ = parallel.serve_store("127.0.0.1")
    parallel.init_world(store, rank=0, world_size=1)
    parallel.init_megatron()
    path = write_config(model, directory)
    rank = RolloutRank(RolloutSpec(str(path), engine, dtype=engine.dtype, load_weights=False))
    rank.do_randomize_weights(0, std=0.03)
    return rank


class Decoding:
    """A full batch of requests that never ends, refilled when asked."""

    def __init__(self, rank: RolloutRank, concurrency: int, prompt: int, output: int) -> None:
        self.engine = rank.engine
        self.vocab = rank.architecture.vocab_size
        self.shape = (concurrency, prompt, output)
        self.batches = 0

    def fill(self) -> None:
        """Run what is left, then add a full batch and prefill it."""
        concurrency, prompt, output = self.shape
        while self.engine.has_work:
            self.engine.step()
        tokens = torch.randint(0, self.vocab, (concurrency, prompt), generator=torch.Generator().manual_seed(1))
        for i, row in enumerate(tokens.tolist()):
            sampling = SamplingParams(max_new_tokens=output, ignore_eos=True, seed=i)
            self.engine.add(GenerationRequest(f"{self.batches}-{i}", tuple(row), sampling))
        self.batches += 1
        for _ in range(4):
            self.engine.step()

    def steps(self, n: int) -> list[float]:
        times = []
        for _ in range(n):
            start = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - start)
        return times


def host_profile(decoding: Decoding, steps: int) -> dict[str, float]:
    profile = cProfile.Profile()
    profile.enable()
    decoding.steps(steps)
    profile.disable()
    found: Counter[str] = Counter()
    stats: Any = pstats.Stats(profile)
    for (file, line, name), (_, _, own, cumulative, _) in stats.stats.items():
        found[f"{Path(file).name}:{line}:{name} own={1e3 * own / steps:.3f}"] = 1e3 * cumulative / steps
    return {name: round(ms, 3) for name, ms in found.most_common(60)}


def kernel_profile(decoding: Decoding, steps: int) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        decoding.steps(steps)
        device.synchronize()
    found: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            found[event.name[:90]] += event.device_time / 1e3 / steps
    return {name: round(ms, 4) for name, ms in found.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--model", default="1.5b" if on_gpu else "tiny-cpu", choices=SHAPES)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--attention-backend", default="auto")
    args = parser.parse_args()
    device.setup_process()
    output = 5 * args.steps + 32
    engine = EngineConfig.for_device(
        "cuda" if on_gpu else "cpu",
        max_sequence_length=args.prompt + output,
        max_requests=args.concurrency,
        max_tokens=max(16384, args.concurrency * args.prompt if not on_gpu else 0),
        attention_backend=args.attention_backend,
        **({} if on_gpu else {"buffer_size_gb": 4.0}),
    )
    rank = start_rank(args.model, engine)
    decoding = Decoding(rank, args.concurrency, args.prompt, output)
    decoding.fill()
    decoding.steps(args.steps)
    step = median(decoding.steps(args.steps))
    in_cache = args.concurrency * (args.prompt + 1.5 * args.steps)
    result: dict[str, Any] = {
        "model": args.model,
        "concurrency": args.concurrency,
        "attention": rank.engine.attention_backend,
        "step_ms": round(1e3 * step, 3),
        "tokens_per_s": round(args.concurrency / step),
        "bytes_per_step": bytes_of_step(rank, in_cache),
        "copy_bandwidth": copy_bandwidth(),
    }
    result["roofline_fraction"] = round(result["bytes_per_step"] / result["copy_bandwidth"] / step, 4)
    result["host"] = host_profile(decoding, args.steps)
    if on_gpu:
        result["kernels"] = kernel_profile(decoding, min(20, args.steps))
        result["gpu_busy_ms"] = round(sum(result["kernels"].values()), 3)
    for key in ("host", "kernels"):
        for name, ms in list(result.get(key, {}).items())[:45]:
            print(f"{ms:9.3f}  {name}")
        print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
