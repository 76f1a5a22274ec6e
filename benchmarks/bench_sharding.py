"""Balance and time of `seqlen_balanced_partitions`, beside what else one could do with the same lengths.

    python benchmarks/bench_sharding.py [--quick] [--output FILE]

Compared in one run, on the same inputs: our partitions with free and with equal sizes, strided assignment, and
Karmarkar-Karp with equal sizes in plain Python (`KarmarkarKarp` below: objects that hold a sum and their items, merged
through a heap). Excess is (largest load) / max(mean load, longest sample) - 1. Times are processor time, the best
of three calls: all is single-threaded, so on an idle machine that is the time that passes.

The last line of stdout is one JSON object:
- `excess` {"n/k": mean over distributions and seeds}; `ms` {"n/k": median over them}; both with free sizes
- `kk_speedup`: at 4096/8, total time of Karmarkar-Karp / total time of ours with free sizes
- `kk_never_worse`: with equal sizes there is no input on which Karmarkar-Karp has the smaller largest load
- `reached`: each target, true or false (excess: in the worst distribution); and the details behind them
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from megatron_rollout.sharding import seqlen_balanced_partitions, strided_partitions

SIZES = [(64, 4), (256, 8), (256, 32), (512, 64), (2048, 64), (4096, 8), (16384, 128)]
DISTRIBUTIONS = ("lognormal", "uniform", "one long")
SPEEDUP_AT, TIME_AT = "4096/8", "16384/128"
MAX_EXCESS = {"n/k >= 16": 5e-4, "n/k = 8": 2.5e-3}
MAX_MS, MIN_SPEEDUP = 50.0, 10.0

Partitioner = Callable[[list[int], int], list[list[int]]]


class Group:
    def __init__(self) -> None:
        self.total = 0
        self.items: list[int] = []

    def add(self, item: int, cost: int) -> None:
        self.total += cost
        self.items.append(item)

    def absorb(self, other: Group) -> None:
        self.total += other.total
        self.items.extend(other.items)


class KarmarkarKarp:
    """A partial solution: k groups, heaviest first. The one with the largest spread comes first in a heap."""

    def __init__(self, block: list[int], costs: list[int], k: int) -> None:
        self.groups = [Group() for _ in range(k)]
        for group, item in zip(self.groups, block, strict=False):
            group.add(item, costs[item])
        self.sort()

    def sort(self) -> None:
        self.groups.sort(key=lambda group: -group.total)

    @property
    def spread(self) -> int:
        return self.groups[0].total - self.groups[-1].total

    def merge(self, other: KarmarkarKarp) -> None:
        for heavy, light in zip(self.groups, reversed(other.groups), strict=True):
            heavy.absorb(light)
        self.sort()

    def __lt__(self, other: KarmarkarKarp) -> bool:
        return self.spread > other.spread


def karmarkar_karp(costs: list[int], k: int) -> list[list[int]]:
    """Plain reference: blocks of k samples by falling cost, merged until one solution is left."""
    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    heap = [KarmarkarKarp(order[at : at + k], costs, k) for at in range(0, len(order), k)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)
        first.merge(heapq.heappop(heap))
        heapq.heappush(heap, first)
    return [group.items for group in heap[0].groups]


PARTITIONERS: dict[str, Partitioner] = {
    "free": lambda costs, k: seqlen_balanced_partitions(costs, k, sizes="free"),
    "equal": lambda costs, k: seqlen_balanced_partitions(costs, k, sizes="equal"),
    "strided": lambda costs, k: strided_partitions(len(costs), k),
    "karmarkar_karp": karmarkar_karp,
}


def draw(distribution: str, n: int, seed: int) -> list[int]:
    """n lengths in tokens: lognormal(7, 1) + 50 up to 16,384; uniform 1 to 16,384; one of 32,768 among 50 to 512."""
    rng = np.random.default_rng(seed)
    if distribution == "lognormal":
        return np.minimum(rng.lognormal(7, 1, n) + 50, 16_384).astype(int).tolist()
    if distribution == "uniform":
        return rng.integers(1, 16_385, n).tolist()
    costs = rng.integers(50, 513, n)
    costs[rng.integers(n)] = 32_768
    return costs.tolist()


def largest_load(costs: list[int], parts: list[list[int]]) -> int:
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    return max(sum(costs[item] for item in part) for part in parts)


def measure(costs: list[int], k: int, repeats: int) -> dict[str, tuple[int, float]]:
    """{partitioner: (largest load, best ms)}; repeats are interleaved, so that a busy moment hits all alike."""
    loads = {name: largest_load(costs, partition(costs, k)) for name, partition in PARTITIONERS.items()}
    best = dict.fromkeys(PARTITIONERS, float("inf"))
    for _ in range(repeats):
        for name, partition in PARTITIONERS.items():
            start = time.process_time()
            partition(costs, k)
            best[name] = min(best[name], 1e3 * (time.process_time() - start))
    return {name: (loads[name], best[name]) for name in PARTITIONERS}


def run(seeds: int, repeats: int) -> dict[str, Any]:
    excess: dict[str, dict[str, dict[str, float]]] = {}
    ms: dict[str, dict[str, float]] = {}
    speedup = {}
    worse = 0
    for n, k in SIZES:
        key = f"{n}/{k}"
        excess[key] = {}
        times: dict[str, list[float]] = {name: [] for name in PARTITIONERS}
        for distribution in DISTRIBUTIONS:
            over: dict[str, list[float]] = {name: [] for name in PARTITIONERS}
            for seed in range(seeds):
                costs = draw(distribution, n, seed)
                bound = max(sum(costs) / k, max(costs))
                measured = measure(costs, k, repeats)
                for name, (load, best) in measured.items():
                    over[name].append(load / bound - 1)
                    times[name].append(best)
                worse += measured["equal"][0] > measured["karmarkar_karp"][0]
            excess[key][distribution] = {name: mean(values) for name, values in over.items()}
        ms[key] = {name: median(values) for name, values in times.items()}
        speedup[key] = sum(times["karmarkar_karp"]) / sum(times["free"])
        show(key, excess[key], ms[key])
    return summary(excess, ms, speedup, worse)


def show(key: str, excess: dict[str, dict[str, float]], ms: dict[str, float]) -> None:
    for distribution, over in excess.items():
        told = "  ".join(f"{name} {100 * value:9.4f} %" for name, value in over.items())
        print(f"{key:>10} {distribution:>9}  {told}")
    print(f"{'':>10} {'ms':>9}  " + "  ".join(f"{name} {value:9.3f}  " for name, value in ms.items()), flush=True)


def summary(
    excess: dict[str, dict[str, dict[str, float]]],
    ms: dict[str, dict[str, float]],
    speedup: dict[str, float],
    worse: int,
) -> dict[str, Any]:
    free = {key: mean(over["free"] for over in by.values()) for key, by in excess.items()}
    worst = {key: max(over["free"] for over in by.values()) for key, by in excess.items()}
    per_part = {f"{n}/{k}": n // k for n, k in SIZES}
    reached = {
        "n/k >= 16": all(worst[key] <= MAX_EXCESS["n/k >= 16"] for key in worst if per_part[key] >= 16),
        "n/k = 8": all(worst[key] <= MAX_EXCESS["n/k = 8"] for key in worst if per_part[key] == 8),
        "equal never worse than Karmarkar-Karp": worse == 0,
        f"{TIME_AT} under {MAX_MS:g} ms": max(ms[TIME_AT]["free"], ms[TIME_AT]["equal"]) < MAX_MS,
        f"{SPEEDUP_AT} {MIN_SPEEDUP:g} times faster than Karmarkar-Karp": speedup[SPEEDUP_AT] >= MIN_SPEEDUP,
    }
    return {
        "excess": free,
        "ms": {key: values["free"] for key, values in ms.items()},
        "kk_speedup": speedup[SPEEDUP_AT],
        "kk_never_worse": worse == 0,
        "reached": reached,
        "excess_worst_distribution": worst,
        "excess_by_distribution": excess,
        "ms_by_partitioner": ms,
        "kk_speedup_by_size": speedup,
    }


def machine() -> dict[str, Any]:
    facts = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
    )
    return facts | ({"commit": commit.stdout.strip()} if commit.returncode == 0 else {})


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5 seeds instead of 20 (under 60 s on 2 cores)")
    parser.add_argument("--output", type=Path, help="write the JSON object to this file too")
    options = parser.parse_args()
    seeds, repeats = (5, 2) if options.quick else (20, 3)
    started = time.perf_counter()
    figures = rounded({**run(seeds, repeats), "seeds": seeds, "machine": machine()})
    figures["seconds"] = round(time.perf_counter() - started, 1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
