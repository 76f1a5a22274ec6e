"""A rollout cell of plain processes on this machine: one a rank, without Ray, the leader's serves HTTP.

For owners that are no Ray driver of ours: a host's engine actor, `serve.py`. The processes end with their owner, whatever
ends it: each holds the other end of a pipe that only the owner keeps open. Light: loads neither torch nor megatron-core.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.frontend.ports import HeldPort, hold_port
from megatron_rollout.frontend.settings import FrontendSettings


class CellStartFailed(RuntimeError):
    """The cell did not start; the message has the rank and the first cause. Nothing of it is left."""


@dataclass(frozen=True)
class RankTask:
    """What one rank's process is told. The descriptors are inherited: a listening place for the cell's store and for HTTP
    (rank 0 only), and the pipe for the report."""

    spec: RolloutSpec
    cell: int
    rank: int
    store: tuple[str, int]
    store_fd: int | None
    http_fd: int | None
    report_fd: int
    settings: FrontendSettings
    seed: int
    threads: int
    timeout_s: float


class LocalCell:
    """The ranks of one cell that run on this machine.

    http: the port to serve on, held (taken over here; nodes other than the first have none). devices: the entry of
    CUDA_VISIBLE_DEVICES for each rank on this machine, None to leave the variable alone. node, nodes, store: a cell
    over several machines: which one this is, how many there are, and where the cell's store is (served by node 0).
    timeout_s: for the start. Use as a context manager, or call `kill`.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        *,
        http: HeldPort | None,
        settings: FrontendSettings,
        cell: int = 0,
        devices: Sequence[str] | None = None,
        node: int = 0,
        nodes: int = 1,
        store: HeldPort | tuple[str, int] | None = None,
        seed: int = 1,
        threads: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        world = spec.tp * spec.pp
        if world % nodes:
            raise ValueError(f"a cell of {world} ranks cannot be spread evenly over {nodes} machines")
        local = world // nodes
        if devices is not None and len(devices) != local:
            raise ValueError(f"{len(devices)} devices for the {local} ranks that the cell has on this machine")
        if nodes > 1 and store is None:
            raise ValueError("a cell over several machines needs the address of its store")
        self.spec = spec
        self.cell = cell
        self.url = http.url if http is not None else None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._http, self._settings, self._devices = http, settings, devices
        self._ranks = range(node * local, (node + 1) * local)
        self._store = store
        self._seed, self._threads, self._timeout_s = seed, threads, timeout_s
        self._reports: dict[int, IO[bytes]] = {}
        self._deadline = 0.0

    # -- start --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes; does not wait for them."""
        self._deadline = time.monotonic() + self._timeout_s
        store = self._store or hold_port()
        address = (store.host, store.port) if isinstance(store, HeldPort) else store
        try:
            for i, rank in enumerate(self._ranks):
                held = [store, self._http] if rank == 0 else []
                device = None if self._devices is None else self._devices[i]
                self._spawn(rank, address, [h for h in held if isinstance(h, HeldPort)], device)
        except BaseException:
            self.kill()
            raise

    def _spawn(self, rank: int, address: tuple[str, int], held: Sequence[HeldPort], device: str | None) -> None:
        sockets = [h.detach() for h in held]
        reader, writer = os.pipe()
        fds = [s.fileno() for s in sockets]
        is_first = bool(fds)
        task = RankTask(
            spec=self.spec,
            cell=self.cell,
            rank=rank,
            store=address,
            store_fd=fds[0] if is_first else None,
            http_fd=fds[1] if len(fds) > 1 else None,
            report_fd=writer,
            settings=self._settings,
            seed=self._seed,
            threads=self._threads,
            timeout_s=self._timeout_s,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rollout.rank_process"],
            stdin=subprocess.PIPE,
            pass_fds=[*fds, writer],
            env=_environment(device),
        )
        self.processes.append(process)
        os.close(writer)
        for sock in sockets:
            sock.close()
        self._reports[rank] = os.fdopen(reader, "rb")
        assert process.stdin is not None
        try:
            process.stdin.write(pickle.dumps(task))
            process.stdin.flush()
        except BrokenPipeError:  # it is gone already; `wait` says so
            return

    def wait(self) -> str | None:
        """Wait until all ranks on this machine are up; the URL, if the leader is among them.

        Raises CellStartFailed with the first cause; the cell is gone then.
        """
        try:
            with selectors.DefaultSelector() as selector:
                for rank, reader in self._reports.items():
                    selector.register(reader, selectors.EVENT_READ, rank)
                while selector.get_map():
                    ready = selector.select(max(0.0, self._deadline - time.monotonic()))
                    if not ready:
                        ranks = sorted(key.data for key in selector.get_map().values())
                        raise CellStartFailed(
                            f"cell {self.cell}: ranks {ranks} were not up within {self._timeout_s:g} s"
                        )
                    for key, _ in ready:
                        self._take_report(key.data)
                        selector.unregister(key.fileobj)
        except BaseException:
            self.kill()
            raise
        return self.url

    def _take_report(self, rank: int) -> None:
        with self._reports[rank] as reader:
            line = reader.readline()
        if not line:
            process = self.processes[rank - self._ranks.start]
            raise CellStartFailed(f"cell {self.cell}: rank {rank} ended while it started ({_ending(process, 5.0)})")
        if error := json.loads(line).get("error"):
            raise CellStartFailed(f"cell {self.cell}: rank {rank}: {error}")

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def death(self) -> str:
        """Which rank has ended and how, "" while all live."""
        for rank, process in zip(self._ranks, self.processes, strict=False):
            if process.poll() is not None:
                return f"rank {rank} of cell {self.cell} is gone ({_ending(process, 0)})"
        return ""

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL every rank and reap it: memory and ports are free afterwards. Idempotent.

        Raises TimeoutError if a process is still there after `timeout_s`.
        """
        for held in (self._http, self._store):
            if isinstance(held, HeldPort):
                held.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"process {process.pid} is still there {timeout_s:g} s after SIGKILL") from None
            if process.stdin is not None:
                _close(process.stdin)
        for reader in self._reports.values():
            reader.close()

    def __enter__(self) -> LocalCell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _environment(device: str | None) -> Mapping[str, str]:
    environ = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    return environ if device is None else {**environ, "CUDA_VISIBLE_DEVICES": device}


def _ending(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "it closed its report"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was left in its buffer has nobody to go to
        return
