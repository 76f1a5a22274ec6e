"""Runs test functions on several gloo ranks, each a process of its own, and never leaves one behind.

`run_ranks(fn, world, *args)` is the usual way in; `RankPool` keeps the processes for several functions, which saves the
seconds that importing torch costs. Functions must be module-level (the start method is spawn) and are called as
`fn(rank, world, *args)` inside an initialised default process group.

How leaks and hangs are ruled out: every run has a deadline; children get SIGKILL from the kernel when the test process
dies; each is the leader of its own process group, so what it starts is killed with it; ranks meet through a file, not
through a port that somebody else may take; at the deadline the stack of every rank that still runs is in the error.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

DEFAULT_TIMEOUT_S = 120.0
#: After one rank has failed, how long the others get to say why they failed too (theirs may be the clearer error).
GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A rank raised, died or missed the deadline. The message holds every traceback that could be had."""


def find_free_port() -> int:
    """A TCP port that was free on 127.0.0.1 a moment ago. Prefer `loopback_listener`, which cannot lose the race."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def loopback_listener() -> socket.socket:
    """A socket listening on a free port of 127.0.0.1; the port is ours until the socket is closed."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def loopback_store(timeout_s: float = 30.0) -> Any:
    """A `torch.distributed.TCPStore` served by this process on 127.0.0.1 only; clients use its `.port`."""
    from torch.distributed import TCPStore

    listener = loopback_listener()
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on, so Python must not close it too.
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to SIGKILL this process when its parent ends, however that happens (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the request was in place
        os._exit(1)


class RankPool:
    """`world` processes that form one gloo world and run functions one after another.

    Use it as a context manager. The first failure closes the pool: ranks that may hang in a collective are of no use.
    """

    def __init__(self, world: int, *, timeout: float = DEFAULT_TIMEOUT_S, env: dict[str, str] | None = None) -> None:
        if world < 1:
            raise ValueError(f"world must be >= 1, got {world}")
        self.world = world
        self._timeout = timeout
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, world, theirs, str(self._directory), os.getpid(), timeout, env or {})
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """`fn(rank, world, *args)` on every rank; returns the results in rank order.

        Arguments and results travel by plain pickle, so tensors are copied and outlive the process that made them.

        Raises:
            RankError: a rank raised, died without a word, or was not done after `timeout` seconds.
        """
        if not self._processes:
            raise RankError("this pool is closed")
        try:
            job = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError) as cause:
            raise ValueError(f"{fn!r} and its arguments must pickle (module-level function?): {cause}") from cause
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        for pipe in self._pipes:
            try:
                pipe.send_bytes(job)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it is dead; _collect says how
        results, errors = self._collect(deadline)
        missing = [rank for rank in range(self.world) if rank not in results and rank not in errors]
        if not errors and not missing:
            return [results[rank] for rank in range(self.world)]
        report = [f"rank {rank} of {self.world}: {text}" for rank, text in sorted(errors.items())]
        for rank in missing:
            late = "had not finished when another rank failed" if errors else f"was not done after {limit:g} s"
            report.append(f"rank {rank} of {self.world} {late}; it was at\n{self._stack(rank)}")
        self.close()
        raise RankError("\n".join(report))

    def close(self) -> None:
        """Kills every rank and what it started, reaps it, and removes the rendezvous file. Safe to call again."""
        for process in self._processes:
            _kill_group(process.pid)
        for process in self._processes:
            process.join(timeout=10)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting.values()), timeout=left)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                pipe = waiting.pop(rank)
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=5)
                    code = self._processes[rank].exitcode
                    kind, value = "error", f"died with exit code {code} before it returned"
                (results if kind == "result" else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return results, errors

    def _stack(self, rank: int) -> str:
        path = self._directory / f"stack-{rank}"
        pid = self._processes[rank].pid
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(already gone)"
        until = time.monotonic() + 1
        while time.monotonic() < until and not (path.exists() and path.stat().st_size):
            time.sleep(0.05)
        return path.read_text() if path.exists() else "(no stack: it had not started yet)"


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT_S,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(rank, world, *args)` on `world` fresh gloo ranks and returns the results in rank order.

    `timeout` (seconds) covers everything, the start of the processes included. See `RankPool.run` for the errors.
    """
    with RankPool(world, timeout=timeout, env=env) as pool:
        return pool.run(fn, *args)


def kill_and_reap(pids: Sequence[int], timeout: float = 10.0) -> None:
    """SIGKILLs processes (and their groups) that a test started outside a pool and waits until they are gone."""
    for pid in pids:
        _kill_group(pid)
    until = time.monotonic() + timeout
    for pid in pids:
        while _alive(pid):
            if time.monotonic() > until:
                raise TimeoutError(f"process {pid} is still there {timeout:g} s after SIGKILL")
            time.sleep(0.02)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group may not exist yet if the child has not come that far
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _alive(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != pid
    except ChildProcessError:
        pass  # not our child, so not ours to reap: only look
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def _serve(
    rank: int, world: int, pipe: Connection, directory: str, parent: int, timeout: float, env: dict[str, str]
) -> None:
    os.setpgid(0, 0)
    die_with_parent(parent)
    # Kept open as long as the process: faulthandler writes to it from the signal handler.
    stack = open(os.path.join(directory, f"stack-{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(world)}
        | {"LOCAL_RANK": str(rank)}
        | env
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), world)
    limit = timedelta(seconds=timeout)
    code = 0
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        while True:
            try:
                fn, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                break
            pipe.send_bytes(pickle.dumps(("result", fn(rank, world, *args))))
    except BaseException:
        code = 1
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    # No clean-up of process groups: a peer may be gone, and their destructors would wait for it.
    os._exit(code)
