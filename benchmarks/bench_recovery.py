"""What the loss of a trainer cell costs: the time to notice it, to redo the step, to heal, and to restart instead.

    python benchmarks/bench_recovery.py [--quick] [--output FILE]

One run of the trainer with two cells loses one of them (SIGKILL while a step begins) and, some rollouts later, both.
Beside it, in the same minutes, a bare cell is started alone (the same imports and model) and the bandwidth of gloo
between two processes is measured. --quick takes the built-in tiny model; without it the state is larger than 256 MB.

The last line of stdout is one JSON object:
- `detection_s`: from the kill until the cell was declared dead
- `recovery_steps`: (commit of the interrupted step - detection) / median time of a training phase
- `heal_ratio`: (start of the replacement + transfer of its state) / (start of a bare cell + bytes / bandwidth); the
  wait for the next attempt is left out and reported as `wait_s`
- `checkpoint_restart_steps`: as `recovery_steps`, where both cells died and the newest checkpoint was restored
- and what they are made of: `state_bytes`, `train_s`, `heal_s`, `bare_start_s`, `gloo_bytes_per_s`, `audit_clean`
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

from trainer_hooks.cells.audit import audit  # noqa: E402
from trainer_hooks.cells.event_log import Event, read_events  # noqa: E402

KILLED_ONE, KILLED_ALL, ROLLOUTS = 2, 5, 7
#: 12 bytes of state a parameter: weights and two moments in fp32
LARGE = dict(layers=6, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048)
DEADLINE_S = 1800.0


def run_trainer(directory: Path, options: Sequence[str]) -> tuple[list[Event], list[dict[str, Any]]]:
    """Events and metrics of a run that loses one cell and later all. Raises RuntimeError with its last words."""
    output = directory / "run"
    faults = [f"split:SIGKILL:trainer:0@{KILLED_ONE}", *(f"split:SIGKILL:trainer:{c}@{KILLED_ALL}" for c in (0, 1))]
    command = [sys.executable, "-m", "trainer_hooks.trainer", "--rollout-backend", "megatron", *options]
    command += ["--num-trainer-cells", "2", "--num-rollout-cells", "1", "--num-rollout", str(ROLLOUTS)]
    command += ["--use-fault-tolerance", "--enable-fault-injection", "--save-interval", "2", "--heartbeat-misses", "60"]
    command += ["--output-dir", str(output), *(word for fault in faults for word in ("--inject-fault", fault))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        raise RuntimeError(f"the run ended with status {done.returncode}: {done.stderr[-2000:]}")
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return read_events(output / "events.jsonl"), [m for m in metrics if "seconds/train" in m]


def bare_start(checkpoint: str) -> float:
    """Seconds until an actor of the trainer's class, alone on the machine, has built its model."""
    import ray

    from megatron_rollout.cell import get, kill_actors, local_pids, start_cell
    from megatron_rollout.ray_cluster import start_ray
    from trainer_hooks.cells.timeouts import CellTimeouts
    from trainer_hooks.cells.worker import TrainerWorker
    from trainer_hooks.training.spec import TrainSpec

    start_ray(num_cpus=1, object_store_memory=128 * 2**20)
    try:
        remote = ray.remote(num_cpus=1, max_concurrency=8, concurrency_groups={"health": 2})(TrainerWorker)
        began = time.monotonic()
        actors = [remote.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote(threads=1)]
        pids = local_pids(get([a.identity.remote() for a in actors], 600))
        start_cell(actors, timeout_s=600)
        spec = TrainSpec(checkpoint)
        get([a.start_trainer.remote(spec, cell=0, timeouts=CellTimeouts()) for a in actors], 600)
        seconds = time.monotonic() - began
        kill_actors(actors, pids)
        return seconds
    finally:
        ray.shutdown()


def gloo_bandwidth(nbytes: int = 64 << 20, rounds: int = 5) -> float:
    """Bytes a second from one process to another; the best of `rounds`."""
    import torch.distributed as dist

    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe()
    processes = [context.Process(target=_bandwidth, args=(r, store.port, nbytes, rounds, theirs)) for r in (0, 1)]
    try:
        for process in processes:
            process.start()
        if not ours.poll(300):
            raise TimeoutError("gloo's bandwidth was not measured within 300 s")
        return float(nbytes / ours.recv())
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _bandwidth(rank: int, port: int, nbytes: int, rounds: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    data = torch.ones(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(rounds):
        dist.barrier()
        began = time.monotonic()
        dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
        times.append(time.monotonic() - began)
    if rank == 1:
        pipe.send(min(times))
    dist.barrier()
    dist.destroy_process_group()


def figures(events: Sequence[Event], metrics: Sequence[dict[str, Any]], bare_s: float, bandwidth: float) -> dict:
    """The figures of the docstring from a run's log and metrics."""
    undisturbed = [m["seconds/train"] for m in metrics if m["rollout_id"] not in (KILLED_ONE, KILLED_ALL)]
    train_s = median(undisturbed)
    dead = {r: _first(events, "cell_dead", after=_first(events, "fault_injected", rollout=r)) for r in (2, 5)}
    injected = _first(events, "fault_injected", rollout=KILLED_ONE)
    heal = next(e for e in events if e.kind == "heal" and e["source"] is not None)
    restarted = _first(events, "cell_restarted", after=dead[KILLED_ONE])
    heal_s = heal["start_seconds"] + heal["seconds"]
    commits = {r: [e for e in events if e.kind == "committed" and e["rollout_id"] == r][-1] for r in (2, 5)}
    return {
        "detection_s": dead[KILLED_ONE].time - injected.time,
        "recovery_steps": (commits[KILLED_ONE].time - dead[KILLED_ONE].time) / train_s,
        "heal_ratio": heal_s / (bare_s + heal["bytes"] / bandwidth),
        "checkpoint_restart_steps": (commits[KILLED_ALL].time - dead[KILLED_ALL].time) / train_s,
        "wait_s": heal.time - restarted.time - heal_s,
        "state_bytes": heal["bytes"],
        "train_s": train_s,
        "heal_s": heal_s,
        "transfer_s": heal["seconds"],
        "bare_start_s": bare_s,
        "gloo_bytes_per_s": bandwidth,
        "audit_clean": audit(events).clean,
    }


def _first(events: Sequence[Event], kind: str, *, after: Event | None = None, rollout: int | None = None) -> Event:
    return next(
        e
        for e in events
        if e.kind == kind
        and (after is None or e.seq > after.seq)
        and (rollout is None or e["fault"].endswith(f"@{rollout}"))
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, help="write the figures with the machine's facts here")
    options = parser.parse_args(argv)
    from trainer_hooks.trainer.task import make_task

    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
        directory = Path(name)
        task = make_task(directory / "task", seed=1)
        checkpoint = task.checkpoint
        trainer = ["--warmup-steps", "0", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]
        if not options.quick:
            from trainer_hooks.trainer.tiny_checkpoint import make_checkpoint

            checkpoint = directory / "large"
            vocabulary = json.loads((task.checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
            characters = "".join(token for token in vocabulary if len(token) == 1)
            make_checkpoint(checkpoint, characters=characters, **LARGE)
            trainer += ["--micro-batch-size", "8", "--lr", "1e-5", "--rollout-max-response-len", "6"]
            trainer += ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(task.train), "--rm-type", task.rm_type]
            trainer += ["--input-key", task.input_key, "--label-key", task.label_key]
        print("measuring a bare start and gloo", file=sys.stderr)
        bare_s, bandwidth = bare_start(str(checkpoint)), gloo_bandwidth()
        print("running the trainer", file=sys.stderr)
        events, metrics = run_trainer(directory, trainer)
        found = figures(events, metrics, bare_s, bandwidth)
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "commit": commit}
        options.output.write_text(json.dumps(found | facts, indent=1) + "\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
