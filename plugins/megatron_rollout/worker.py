"""A process that hosts one rank of a rollout cell, as a Ray actor; the leader's also takes requests and serves HTTP.

The methods here run in Ray's threads and never touch the engine themselves: they hand commands to the step loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_rollout import device, faults
from megatron_rollout.cell_types import CellFailed, CellStatus, EngineFailed, RolloutSpec
from megatron_rollout.engine import parallel
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta

if TYPE_CHECKING:
    from megatron_rollout.frontend.server import ServerHandle
    from megatron_rollout.rollout_rank import RolloutRank
    from megatron_rollout.step_loop import StepLoop


class RolloutWorker:
    """One rank of one rollout cell. Every method that waits has a deadline."""

    def __init__(self, *, threads: int = 1, deterministic: bool = False, log_level: str = "WARNING") -> None:
        import logging

        with contextlib.suppress(OSError):  # it leads a group already
            os.setpgid(0, 0)  # what this process starts can be ended with it
        logging.basicConfig(level=log_level)
        logging.getLogger("megatron").setLevel(logging.ERROR)
        device.setup_process(threads=threads, deterministic=deterministic)
        self._finished: deque[GenerationOutput | TokenDelta | CellFailed] = deque()
        self._arrived = threading.Condition()
        self.rollout: RolloutRank | None = None
        self.loop: StepLoop | None = None
        self.tokenizer: Any = None
        self._store: dist.Store | None = None
        self._server: ServerHandle | None = None
        self.cell_index: int | None = None

    @property
    def host(self) -> str:
        """Address of this node, as Ray knows it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def pid(self) -> int:
        return os.getpid()

    def identity(self) -> tuple[str, int]:
        """(host name, process id): who shares the host can watch the process itself."""
        return socket.gethostname(), os.getpid()

    def beat(self) -> tuple[int, str, str]:
        """(progress counter, "idle" or "working", what it does), for whoever watches this rank. Never blocks."""
        if self.loop is None:
            return 0, "idle", ""
        return self.loop.turns, "working" if self.loop.outstanding() else "idle", "generate"

    def arm_fault(self, moment: str, how: str) -> None:
        """Break this process at `moment` (see `faults`); tests only."""
        faults.arm(moment, how)

    # -- start --------------------------------------------------------------------------------------------------

    def serve_world_store(self, timeout_s: float = 600.0) -> tuple[str, int]:
        """Rank 0 of a cell: serve the store at which its world meets. Returns host and port."""
        self._store, port = parallel.serve_store(self.host, timeout_s)
        return self.host, port

    def join_world(self, host: str, port: int, rank: int, world_size: int, timeout_s: float = 600.0) -> None:
        if self._store is None:
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        parallel.init_world(self._store, rank=rank, world_size=world_size, timeout_s=timeout_s)

    def start_rollout(self, spec: RolloutSpec, *, cell: int, timeout_s: float = 600.0, seed: int = 1) -> None:
        """Build the model and the engine of this rank and start its step loop. Collective over the cell."""
        from megatron_rollout.rollout_rank import RolloutRank

        parallel.init_megatron(tp=spec.tp, pp=spec.pp, seed=seed, timeout_s=timeout_s)
        self.host_rollout(RolloutRank(spec, tokenizer=self.load_tokenizer(spec.hf_checkpoint)), cell)

    def host_rollout(self, rollout: RolloutRank, cell: int, group: dist.ProcessGroup | None = None) -> None:
        from megatron_rollout.step_loop import StepLoop

        self.rollout = rollout
        self.cell_index = cell
        self.loop = StepLoop(rollout, group=group or dist.group.WORLD, store=self._store, name=f"cell-{cell}")
        self.loop.start()

    def serve_http(self, settings: Any = None, *, offered_port: str | None = None, port: int = 0) -> str:
        """Leader only: serve both wires from this process; returns the URL. Idempotent.

        settings: `frontend.settings.FrontendSettings`, default loopback. offered_port: address of a held port to take
        over (`frontend.ports.HeldPort.offer`), else `port` of the settings' host is bound (0: any).
        """
        from megatron_rollout.frontend.app import build_app
        from megatron_rollout.frontend.leader import LeaderClient
        from megatron_rollout.frontend.ports import adopt_port, bind_socket
        from megatron_rollout.frontend.server import serve
        from megatron_rollout.frontend.settings import FrontendSettings

        if self._server is None:
            loop, rollout = self._loop(), self.rollout
            if rollout is None:
                raise RuntimeError("start_rollout has not been called")
            settings = settings or FrontendSettings()
            client = LeaderClient(loop, rollout, tokenizer=self.tokenizer, cell=self.cell_index)
            sock = adopt_port(offered_port) if offered_port else bind_socket(settings.host, port)
            self._server = serve(build_app(client, settings), sock)
        return self._server.url

    def load_tokenizer(self, checkpoint: str) -> Any:
        """The checkpoint's tokenizer, or None where it has none (token ids only)."""
        from transformers import AutoTokenizer

        if self.tokenizer is None and os.path.exists(os.path.join(checkpoint, "tokenizer_config.json")):
            self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        return self.tokenizer

    # -- requests (leader) ----------------------------------------------------------------------------------------

    def submit(self, requests: list[GenerationRequest], stream: bool = False) -> None:
        """Queue samples; their outputs (and deltas, if `stream`) come from `collect`."""
        faults.fault_point("generate")
        on_delta = self._put if stream else None
        for request in requests:
            try:
                future = self._loop().submit(request, on_delta)
            except EngineFailed as error:
                self._put(CellFailed(str(error)))
                return
            except ValueError as error:
                self._put(_failed(request, error))
                continue
            future.add_done_callback(self._done(request))

    def _done(self, request: GenerationRequest) -> Callable[[Future[GenerationOutput]], None]:
        def done(future: Future[GenerationOutput]) -> None:
            error = future.exception()
            if isinstance(error, EngineFailed):
                self._put(CellFailed(str(error)))
            else:
                self._put(future.result() if error is None else _failed(request, error))

        return done

    def _put(self, item: GenerationOutput | TokenDelta | CellFailed) -> None:
        with self._arrived:
            self._finished.append(item)
            self._arrived.notify_all()

    def collect(self, max_wait_s: float = 5.0) -> list[GenerationOutput | TokenDelta | CellFailed]:
        """Everything that came since the last call, in order; waits up to `max_wait_s` for the first."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._finished, timeout=max_wait_s)
            items = list(self._finished)
            self._finished.clear()
        return items

    def abort(self, request_ids: list[str] | None = None) -> None:
        self._loop().abort(request_ids)

    def call(self, command: str, deadline_s: float = 120.0, **arguments: Any) -> Any:
        """Execute a command on every rank of the cell and return the leader's result.

        Raises TimeoutError after `deadline_s`, else what the command raised.
        """
        faults.fault_point(command)
        return self._loop().call(command, **arguments).result(timeout=deadline_s)

    def abort_refit(self, name: str, reason: str) -> None:
        """Make this rank's part in refit group `name` raise now. From any thread, whatever the step loop does."""
        if self.rollout is not None:
            self.rollout.refit_member.abort(name, reason)

    def status(self) -> CellStatus:
        loop, rollout = self._loop(), self.rollout
        if rollout is None:
            raise RuntimeError("start_rollout has not been called")
        reason = ""
        if loop.error is not None:
            reason = str(loop.error)
        elif not rollout.weights_landed:
            reason = rollout.updates.reason
        return CellStatus(
            serving=not reason,
            reason=reason,
            version=rollout.engine.version,
            outstanding=loop.outstanding(),
            steps=loop.steps,
            turns=loop.turns,
            tokens_generated=rollout.engine.tokens_generated,
            kv_usage=rollout.engine.kv_usage() if not rollout.engine.suspended else 0.0,
        )

    def memory_in_use(self) -> int:
        return device.memory_in_use()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        if self._server is not None:
            self._server.stop(timeout_s)
            self._server = None
        if self.loop is not None:
            self.loop.stop(timeout_s)
            deadline = time.monotonic() + timeout_s
            while self.loop.is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)

    def _loop(self) -> StepLoop:
        if self.loop is None:
            raise RuntimeError("start_rollout has not been called")
        return self.loop


def _failed(request: GenerationRequest, error: BaseException) -> GenerationOutput:
    return GenerationOutput(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        output_ids=request.output_ids,
        logprobs=request.logprobs,
        weight_versions=request.weight_versions,
        finish_reason="error",
        error=f"{type(error).__name__}: {error}",
    )
