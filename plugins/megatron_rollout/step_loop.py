"""The thread that drives one rank's engine, in lockstep with the other ranks of its cell.

The leader drains its queue of commands, broadcasts them inside the cell, every rank executes them, then every rank
takes one engine step. No extra process: it starts at once and dies with its rank, visibly. Commands therefore happen
between two steps, in the order of the calls; requests that arrive meanwhile join the next step (continuous batching).

A failure of any rank ends the cell: the leader fails what is in flight with the first cause, a follower leaves its
cause in the cell's store and exits, and whoever owns the cell replaces it.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rollout.cell_types import CommandError, EngineFailed
from megatron_rollout.device import device, enter_thread
from megatron_rollout.engine.engine import Engine
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

#: An idle leader tells its followers that it lives this often; it must stay well below the world's collective timeout.
HEARTBEAT_S = 20.0
_STOP, _STEP = 1, 2


class Rank(Protocol):
    """What the loop drives: one rank's engine and its commands."""

    engine: Engine
    paused: bool

    def handle(self, name: str, arguments: dict[str, Any]) -> Any:
        """Execute a command on this rank."""


@dataclass
class _Command:
    name: str
    arguments: dict[str, Any]
    future: Future[Any] | None = None


class StepLoop(threading.Thread):
    """Drives `rank`. group: the cell's ranks (CPU tensors must work on it), None for a cell of one rank.

    store: the cell's store, where a failing follower leaves its cause. The public methods belong to the leader.
    """

    def __init__(
        self, rank: Rank, *, group: dist.ProcessGroup | None = None, store: dist.Store | None = None, name: str = "cell"
    ) -> None:
        super().__init__(name=f"step-loop-{name}", daemon=True)
        self.rank = rank
        self.group = group if group is not None and group.size() > 1 else None
        self.store = store
        self.is_leader = self.group is None or self.group.rank() == 0
        self._device = device()  # of the thread that built the engine
        self.steps = 0
        self.turns = 0
        self.error: EngineFailed | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._futures: dict[str, Future[GenerationOutput]] = {}
        self._streams: dict[str, Callable[[TokenDelta], None]] = {}
        self._lock = threading.Lock()
        self._stopping = False

    # -- called from any thread of the leader's process ---------------------------------------------------------

    def submit(
        self, request: GenerationRequest, on_delta: Callable[[TokenDelta], None] | None = None
    ) -> Future[GenerationOutput]:
        """Queue one sample. Raises ValueError for one that this engine can never run, EngineFailed after a failure."""
        self.rank.engine.check(request)
        future: Future[GenerationOutput] = Future()
        with self._lock:
            if self.error is not None:
                raise self.error
            if request.request_id in self._futures:
                raise ValueError(f"request id {request.request_id!r} is in flight already")
            self._futures[request.request_id] = future
            if on_delta is not None:
                self._streams[request.request_id] = on_delta
        self._commands.put(_Command("add", {"request": request, "streams": on_delta is not None}))
        return future

    def abort(self, request_ids: list[str] | None) -> None:
        """End samples (all for None) keeping what they have; unknown ids are ignored."""
        self._commands.put(_Command("abort", {"request_ids": request_ids}))

    def call(self, command: str, /, **arguments: Any) -> Future[Any]:
        """Queue a command for every rank; the future has the leader's result."""
        future: Future[Any] = Future()
        with self._lock:
            if self.error is not None:
                future.set_exception(self.error)
                return future
        self._commands.put(_Command(command, arguments, future))
        return future

    def outstanding(self) -> int:
        with self._lock:
            return len(self._futures)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop on all ranks; what is in flight fails."""
        self._stopping = True
        self._commands.put(_Command("ping", {}))
        self.join(timeout_s)

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        enter_thread(self._device)
        try:
            self._lead() if self.is_leader else self._follow()
        except BaseException as error:  # whatever it was, the cell is over and must say why  # noqa: BLE001
            self._fail(error)

    def _lead(self) -> None:
        while True:
            commands = self._drain()
            stop = self._stopping
            step = not stop and self._should_step(commands)
            if self.group is not None:
                self._send(commands, _STOP * stop | _STEP * step)
            if stop:
                self._resolve_all(EngineFailed("the cell was shut down"))
                return
            for command in commands:
                self._execute(command)
            # commands may have paused or emptied the engine; the followers come to the same conclusion
            if step and self._has_step():
                self._step()
            self.turns += 1

    def _follow(self) -> None:
        while True:
            commands, flags = self._receive()
            if flags & _STOP:
                return
            for command in commands:
                self._execute(command)
            if flags & _STEP and self._has_step():
                self._step()
            self.turns += 1

    def _drain(self) -> list[_Command]:
        """All queued commands; waits for one while there is nothing to step."""
        commands: list[_Command] = []
        try:
            if not self._has_step():
                commands.append(self._commands.get(timeout=HEARTBEAT_S))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _has_step(self) -> bool:
        engine = self.rank.engine
        if engine.suspended:
            return False
        return engine.has_work and (not self.rank.paused or engine.only_aborted_left)

    def _should_step(self, commands: list[_Command]) -> bool:
        return bool(commands) or self._has_step()

    def _step(self) -> None:
        result = self.rank.engine.step()
        self.steps += 1
        if not self.is_leader:
            return
        for delta in result.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream(delta)
        for output in result.finished:
            self._resolve(output)

    def _execute(self, command: _Command) -> None:
        if command.name == "add":
            self._add(**command.arguments)
        elif command.name == "abort":
            for output in self.rank.engine.abort(command.arguments["request_ids"]):
                self._resolve(output)
        else:
            self._call(command)

    def _add(self, request: GenerationRequest, streams: bool) -> None:
        try:
            self.rank.engine.add(request, streams=streams)
        except ValueError as error:  # the same on every rank: a property of the request
            if self.is_leader and (future := self._futures.pop(request.request_id, None)) is not None:
                future.set_exception(error)

    def _call(self, command: _Command) -> None:
        result, error = None, None
        try:
            result = self.rank.handle(command.name, command.arguments)
        except Exception as caught:  # the caller of this command gets it, and so do the other ranks
            error = caught
        errors = self._gather_errors(error)
        if command.future is None:
            return
        if error is not None:
            command.future.set_exception(error)
        elif errors:
            command.future.set_exception(CommandError(f"{command.name}: {'; '.join(errors)}"))
        else:
            command.future.set_result(result)

    def _gather_errors(self, error: BaseException | None) -> list[str]:
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        if self.group is None:
            return [mine] if mine else []
        everyone: list[str] = [""] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        return [f"rank {i}: {e}" for i, e in enumerate(everyone) if e]

    # -- inside the cell ----------------------------------------------------------------------------------------

    def _send(self, commands: list[_Command], flags: int) -> None:
        data = pickle.dumps([(c.name, c.arguments) for c in commands]) if commands else b""
        dist.broadcast(torch.tensor([len(data), flags]), group=self.group, group_src=0)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=self.group, group_src=0)

    def _receive(self) -> tuple[list[_Command], int]:
        header = torch.zeros(2, dtype=torch.long)
        dist.broadcast(header, group=self.group, group_src=0)
        size, flags = header.tolist()
        if not size:
            return [], flags
        data = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, group=self.group, group_src=0)
        return [_Command(name, arguments) for name, arguments in pickle.loads(data.numpy().tobytes())], flags

    # -- ends ---------------------------------------------------------------------------------------------------

    def _resolve(self, output: GenerationOutput) -> None:
        with self._lock:
            future = self._futures.pop(output.request_id, None)
            self._streams.pop(output.request_id, None)
        if future is not None:
            future.set_result(output)

    def _resolve_all(self, error: EngineFailed) -> None:
        with self._lock:
            self.error = error
            futures, self._futures = list(self._futures.values()), {}
            self._streams.clear()
        for future in futures:
            future.set_exception(error)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command.future is not None:
                command.future.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        cause = f"{type(error).__name__}: {error}"
        logger.error("engine of %s failed:\n%s", self.name, "".join(traceback.format_exception(error)))
        if not self.is_leader:
            if self.store is not None:
                self.store.set("engine-error", f"rank {self.group.rank() if self.group else 0}: {cause}")
            time.sleep(0.1)  # let the store's message out before the connection closes
            os._exit(1)
        self._resolve_all(EngineFailed(self._first_cause(cause)))

    def _first_cause(self, cause: str) -> str:
        """A follower's own error says more than the leader's broken collective."""
        if self.group is None or self.store is None:
            return cause
        try:
            self.store.wait(["engine-error"], timedelta(seconds=1))
            return f"{self.store.get('engine-error').decode()} (the leader saw {cause})"
        except RuntimeError:  # no follower has left one
            return cause
