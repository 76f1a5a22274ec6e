"""The driver's handle on all rollout cells: `MegatronGeneration`."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megatron_rollout.batches import batch_of, requests_of
from megatron_rollout.cell import RolloutCell
from megatron_rollout.cell_types import RolloutSpec
from megatron_rollout.dispatch import Dispatcher, NoCells
from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams, TokenDelta
from megatron_rollout.routing import Router, StaticRouter
from megatron_rollout.seeds import sample_seed

#: Seconds between two calls of `while_waiting`.
_TURN_S = 0.5


class GenerationFailed(RuntimeError):
    """More samples failed than `max_failed_fraction` allows; the message names the first: its index, cell and cause."""


class MegatronGeneration:
    """Generation on rollout cells, each one TP·PP replica with one megatron-core engine and one leader.

    make_actors(cell index) → that cell's Ray actors (`RolloutWorker` or a class that also trains), one a rank, rank 0
    the leader. spec: what each rank is built from. sampling: defaults of every request. seed: of the run.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        make_actors: Callable[[int], Sequence[Any]],
        *,
        num_cells: int,
        sampling: SamplingParams | None = None,
        seed: int = 1,
        pad_token_id: int = 0,
        deterministic: bool = False,
        max_failed_fraction: float = 0.0,
        start_timeout_s: float = 600.0,
        command_timeout_s: float = 120.0,
        answer_timeout_s: float = 60.0,
        may_recover: Callable[[], bool] = lambda: False,
        on_cell_down: Callable[[int, str], None] | None = None,
        started: bool = False,
    ) -> None:
        self.spec = spec
        self.sampling = sampling or SamplingParams()
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.max_failed_fraction = max_failed_fraction
        self.start_timeout_s = start_timeout_s
        self.command_timeout_s = command_timeout_s
        #: called about twice a second by the thread that waits in `run`: what replaces dead cells hooks in here
        self.while_waiting: Callable[[], None] | None = None
        self._calls = itertools.count()
        self._run = uuid.uuid4().hex[:8]
        self.cells = {i: RolloutCell(i, make_actors(i)) for i in range(num_cells)}
        if not started:
            self._start(list(self.cells.values()))
        cells = range(num_cells)
        router: Router | StaticRouter
        # a quarter more than an engine runs at once, so that none waits for the driver between two steps
        window = max(1, spec.engine.max_requests * 5 // 4)
        router = StaticRouter(cells) if deterministic else Router(cells, max_in_flight=window)
        self.dispatcher = Dispatcher(
            self.cells.values(),
            router,
            answer_timeout_s=answer_timeout_s,
            may_recover=may_recover,
            on_cell_down=on_cell_down,
        )

    def _start(self, cells: list[RolloutCell]) -> None:
        """Start cells side by side. Raises the first failure after every start has ended."""
        with ThreadPoolExecutor(max(1, len(cells))) as pool:
            futures = [
                pool.submit(c.start, self.spec, timeout_s=self.start_timeout_s, seed=self.seed + c.index) for c in cells
            ]
        for future in futures:
            future.result()

    # -- samples --------------------------------------------------------------------------------------------------

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        timeout_s: float | None = None,
        on_output: Callable[[GenerationOutput], None] | None = None,
    ) -> list[GenerationOutput]:
        """Outputs of `requests`, in their order. Failed ones are among them (finish_reason "error").

        Raises TimeoutError after `timeout_s`; the samples left are aborted. on_output sees each as it completes.
        """
        results: dict[str, GenerationOutput] = {}
        done = threading.Event()
        if not requests:
            return []

        def arrived(output: GenerationOutput) -> None:
            if on_output is not None:
                on_output(output)
            results[output.request_id] = output
            if len(results) == len(requests):
                done.set()

        self.dispatcher.submit(list(requests), arrived)
        try:
            self._wait(done, timeout_s)
        except TimeoutError as error:
            left = len(requests) - len(results)
            raise TimeoutError(f"{left} of {len(requests)} samples not done in {timeout_s} s") from error
        finally:
            if not done.is_set():
                self.dispatcher.abort([r.request_id for r in requests])
        return [results[r.request_id] for r in requests]

    def _wait(self, done: threading.Event, timeout_s: float | None) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not done.wait(_TURN_S if end is None else max(0.0, min(_TURN_S, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                raise TimeoutError
            if self.while_waiting is not None:
                self.while_waiting()

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> dict[str, Any]:
        """One response for each row of `data` (columns: see `batches`), in input order.

        Raises ValueError for a malformed batch, GenerationFailed if more than `max_failed_fraction` of it failed.
        """
        requests = self._requests(data, greedy)
        outputs = self.run(requests)
        self.check_failures(outputs)
        return batch_of(outputs, data, pad_token_id=self.pad_token_id)

    async def generate_async(
        self, data: Mapping[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(row, one-row batch) as the rows complete. Closing the iterator aborts what is left in the engines."""
        requests = self._requests(data, greedy)
        rows = {r.request_id: i for i, r in enumerate(requests)}
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        failed = 0
        if requests:

            def hand_over(output: GenerationOutput) -> None:
                loop.call_soon_threadsafe(arrived.put_nowait, output)

            self.dispatcher.submit(requests, hand_over)
        try:
            while rows:
                output = await arrived.get()
                row = rows.pop(output.request_id)
                if output.finish_reason == "error":
                    failed += 1
                    if failed > self.max_failed_fraction * len(requests):
                        raise GenerationFailed(_describe(row, output))
                yield row, batch_of([output], data, pad_token_id=self.pad_token_id, rows=[row])
        finally:
            if rows:
                self.dispatcher.abort(list(rows))

    def stream(
        self,
        request: GenerationRequest,
        on_delta: Callable[[TokenDelta], None],
        on_output: Callable[[GenerationOutput], None],
    ) -> None:
        """One sample, token by token; the callbacks come from a collector thread."""
        self.dispatcher.submit([request], on_output, on_delta)

    def _requests(self, data: Mapping[str, Any], greedy: bool) -> list[GenerationRequest]:
        call = next(self._calls)
        rows = len(data["input_lengths"])
        indices = data.get("sample_indices")
        seeds = [sample_seed(self.seed, call, int(indices[i]) if indices is not None else i) for i in range(rows)]
        defaults = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        prefix = f"{self._run}-{call}"
        return requests_of(data, defaults, prefix=prefix, pad_token_id=self.pad_token_id, seeds=seeds)

    def check_failures(self, outputs: Sequence[GenerationOutput]) -> None:
        """Raise GenerationFailed if more than `max_failed_fraction` of `outputs` are errors."""
        failed = [(i, o) for i, o in enumerate(outputs) if o.finish_reason == "error"]
        if len(failed) > self.max_failed_fraction * len(outputs):
            raise GenerationFailed(
                f"{len(failed)} of {len(outputs)} samples failed (--max-failed-fraction {self.max_failed_fraction}); "
                f"the first: {_describe(*failed[0])}"
            )

    # -- cells ----------------------------------------------------------------------------------------------------

    @property
    def live_cells(self) -> list[int]:
        return sorted(self.dispatcher.router.up)

    def call_all(
        self, command: str, /, *, cells: Sequence[int] | None = None, deadline_s: float | None = None, **kw: Any
    ) -> dict:
        """Execute a command on several cells at once: {cell: result or the exception it raised}."""
        chosen = self.live_cells if cells is None else list(cells)
        limit = deadline_s or self.command_timeout_s

        def one(index: int) -> Any:
            try:
                return self.cells[index].call(command, deadline_s=limit, **kw)
            except Exception as error:  # reported to the caller, cell by cell
                return error

        with ThreadPoolExecutor(max(1, len(chosen))) as pool:
            return dict(zip(chosen, pool.map(one, chosen), strict=True))

    def replace(self, index: int, actors: Sequence[Any], *, pids: Sequence[int] = ()) -> RolloutCell:
        """Take in started processes as cell `index`. It gets requests once a refit has brought it the weights."""
        self.cells[index] = cell = RolloutCell(index, actors)
        cell.pids = list(pids)
        self.dispatcher.attach(cell)
        return cell

    def remove(self, index: int) -> RolloutCell | None:
        """Forget a dead cell; returns what is to be killed."""
        return self.cells.pop(index, None)

    def shutdown(self) -> bool:
        """End all cells. Idempotent."""
        self.dispatcher.close()
        for cell in self.cells.values():
            cell.kill()
        self.cells.clear()
        return True


def _describe(index: int, output: GenerationOutput) -> str:
    where = f" on cell {output.cell}" if output.cell is not None else ""
    return f"sample {index} ({output.request_id}){where}: {output.error}"


__all__ = ["GenerationFailed", "MegatronGeneration", "NoCells"]
