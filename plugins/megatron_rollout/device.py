"""The one place that knows whether this process computes on a GPU or on the CPU.

Everything else asks here (or is inside `engine/`), so that one code path serves both.
"""

from __future__ import annotations

import os

import torch


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device this process computes on: its current CUDA device, else the CPU."""
    if on_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def synchronize() -> None:
    """Wait for everything that this process has asked of its GPU."""
    if on_gpu():
        torch.cuda.synchronize()


def enter_thread(of: torch.device) -> None:
    """Make `of` the device of the calling thread. CUDA's current device and stream belong to a thread.

    The thread gets a stream of its own: megatron-core captures CUDA graphs on whatever stream is current, which must
    not be the default one.
    """
    if of.type == "cuda":
        torch.cuda.set_device(of)
        torch.cuda.set_stream(torch.cuda.Stream(of))


def collective_backend() -> str:
    """Backend of a cell's own world. CUDA tensors go over NCCL, control messages over gloo."""
    return "cpu:gloo,cuda:nccl" if on_gpu() else "gloo"


def memory_in_use() -> int:
    """Bytes this process holds: device memory of torch and of KV caches on a GPU, resident memory on the CPU."""
    if on_gpu():
        from megatron_rollout.engine.static_memory import mapped_bytes

        return torch.cuda.memory_reserved() + mapped_bytes()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def release_cached_memory() -> None:
    if on_gpu():
        torch.cuda.empty_cache()


def setup_process(*, threads: int = 1, local_rank: int = 0, deterministic: bool = False) -> None:
    """Prepare a process that will run a Megatron model. Call before megatron-core builds anything.

    threads: torch threads on the CPU. deterministic: only repeatable kernels; on CUDA also the workspace setting
    that cuBLAS needs for it.
    """
    torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not on_gpu())
    if on_gpu():
        torch.cuda.set_device(local_rank)
    else:
        from megatron_rollout.engine.cpu_runtime import install

        install()
