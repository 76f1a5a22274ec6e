"""The driver's threads between the callers of `generate` and the rollout cells.

One collector thread a cell waits for what its leader finishes; every arrival lets the router hand out more. A cell that
dies is taken out, and what it had in flight is handed out again, once each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from megatron_rollout.cell import CellDead
from megatron_rollout.cell_types import CellFailed
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta
from megatron_rollout.routing import Assignment, Router, StaticRouter

logger = logging.getLogger(__name__)


class Cell(Protocol):
    """What the dispatcher needs of a rollout cell (`cell.RolloutCell`)."""

    index: int

    def submit(self, requests: list[GenerationRequest], *, stream: bool = False) -> None: ...

    def collect(self, max_wait_s: float, timeout_s: float) -> list[GenerationOutput | TokenDelta | CellFailed]: ...

    def abort(self, request_ids: list[str] | None = None) -> None: ...


class NoCells(RuntimeError):
    """No rollout cell is left to generate; the message holds the first cause."""


class Dispatcher:
    """Runs requests on `cells` as `router` decides.

    answer_timeout_s: a leader that does not answer for so long is dead. on_cell_down(index, cause) is called once a
    death, from the thread that found it, after the cell's requests were handed out again. may_recover: whether a cell
    may come back; if not, and no cell is left, everything outstanding fails.
    """

    def __init__(
        self,
        cells: Iterable[Cell],
        router: Router | StaticRouter,
        *,
        answer_timeout_s: float = 60.0,
        poll_s: float = 2.0,
        on_cell_down: Callable[[int, str], None] | None = None,
        may_recover: Callable[[], bool] = lambda: False,
    ) -> None:
        self.router = router
        self.cells: dict[int, Cell] = {}
        self.causes: list[str] = []
        self._answer_timeout_s = answer_timeout_s
        self._poll_s = poll_s
        self._on_cell_down = on_cell_down
        self._may_recover = may_recover
        self._lock = threading.RLock()
        self._tickets: dict[tuple[int, str], int] = {}
        self._callbacks: dict[str, Callable[[GenerationOutput], None]] = {}
        self._streams: dict[str, Callable[[TokenDelta], None]] = {}
        self._requests: dict[str, GenerationRequest] = {}
        self._collectors: dict[int, threading.Thread] = {}
        self._closed = False
        self.completed: dict[int, int] = {}
        for cell in cells:
            self.attach(cell)

    def attach(self, cell: Cell) -> None:
        """Take a (re)started cell in; it gets requests once `cell_up` is called."""
        with self._lock:
            self.cells[cell.index] = cell
            self.completed.setdefault(cell.index, 0)
            thread = threading.Thread(target=self._collect, args=(cell,), name=f"collect-{cell.index}", daemon=True)
            self._collectors[cell.index] = thread
            thread.start()

    def submit(
        self,
        requests: list[GenerationRequest],
        on_output: Callable[[GenerationOutput], None],
        on_delta: Callable[[TokenDelta], None] | None = None,
    ) -> None:
        """Queue samples. on_output is called once for each, from a collector thread; it must not block."""
        with self._lock:
            if not self.router.up and not self._may_recover():
                raise NoCells(self._no_cells())
            self.router.submit(*requests)
            for request in requests:
                self._requests[request.request_id] = request
                self._callbacks[request.request_id] = on_output
                if on_delta is not None:
                    self._streams[request.request_id] = on_delta
        self.pump()

    def abort(self, request_ids: list[str]) -> None:
        """End samples wherever they are. Those in flight come back as "abort"; those held here do so at once."""
        flying: dict[int, list[str]] = {}
        held: list[str] = []
        with self._lock:
            for request_id in request_ids:
                if request_id not in self._callbacks:
                    continue
                cell = next((c for c, r in self._tickets if r == request_id), None)
                if cell is not None:
                    flying.setdefault(cell, []).append(request_id)
                else:
                    self.router.withdraw(request_id) if isinstance(self.router, Router) else None
                    held.append(request_id)
        for cell_index, ids in flying.items():
            if (alive := self.cells.get(cell_index)) is not None:
                alive.abort(ids)
        for request_id in held:
            request = self._requests[request_id]
            self._deliver(
                GenerationOutput(
                    request_id=request_id,
                    prompt_ids=request.prompt_ids,
                    output_ids=request.output_ids,
                    logprobs=request.logprobs,
                    weight_versions=request.weight_versions,
                    finish_reason="abort",
                )
            )

    def pump(self) -> None:
        """Send everything that the router hands out now."""
        with self._lock:
            by_cell: dict[int, list[Assignment]] = {}
            for assignment in self.router.take():
                by_cell.setdefault(assignment.cell, []).append(assignment)
                self._tickets[assignment.cell, assignment.request.request_id] = assignment.ticket
            for index, assignments in by_cell.items():
                requests = [a.request for a in assignments]
                self.cells[index].submit(requests, stream=any(r.request_id in self._streams for r in requests))

    def cell_up(self, index: int) -> None:
        """It holds the current weights and gets requests. Does nothing if it died meanwhile."""
        with self._lock:
            if index not in self.cells:
                return
            self.router.cell_up(index)
        self.pump()

    def cell_down(self, index: int, cause: str) -> None:
        """Nothing more to this cell; what it had in flight goes elsewhere."""
        with self._lock:
            if index not in self.router.up:
                return
            self.causes.append(cause)
            self.router.cell_down(index)
            for key in [k for k in self._tickets if k[0] == index]:
                del self._tickets[key]
            lost = self.router.lost() if isinstance(self.router, Router) else []
            stranded = list(self._callbacks) if not self.router.up and not self._may_recover() else []
        logger.warning("rollout cell %d is down: %s", index, cause)
        for request in lost:
            self._fail(request.request.request_id, f"{request}; last cause: {cause}", index)
        for request_id in stranded:
            self._fail(request_id, self._no_cells(), index)
        self.pump()

    def cell_died(self, cell: Cell, cause: str) -> None:
        """Its processes are gone: nothing more to it, and its late answers are not taken, until a replacement is
        attached."""
        with self._lock:
            if self.cells.get(cell.index) is not cell:
                return
            self.cell_down(cell.index, cause)
            del self.cells[cell.index]
        if self._on_cell_down is not None:
            self._on_cell_down(cell.index, cause)

    def fail_all(self, reason: str) -> None:
        with self._lock:
            waiting = list(self._callbacks)
        for request_id in waiting:
            self._fail(request_id, reason, None)

    def close(self) -> None:
        self._closed = True

    def _collect(self, cell: Cell) -> None:
        while not self._closed and self.cells.get(cell.index) is cell:
            try:
                items = cell.collect(self._poll_s, self._answer_timeout_s)
            except CellDead as error:
                if not self._closed:
                    self.cell_died(cell, str(error))
                return
            for item in items:
                if isinstance(item, CellFailed):
                    self.cell_died(cell, f"rollout cell {cell.index}: {item.cause}")
                    return
                self._arrived(cell.index, item)
            if items:
                self.pump()

    def _arrived(self, cell: int, item: GenerationOutput | TokenDelta) -> None:
        if isinstance(item, TokenDelta):
            stream = self._streams.get(item.request_id)
            if stream is not None and (cell, item.request_id) in self._tickets:
                stream(item)
            return
        with self._lock:
            ticket = self._tickets.pop((cell, item.request_id), None)
            if ticket is None or not self.router.complete(item.request_id, ticket):
                return  # a cell that was declared dead, or the same answer twice
            self.completed[cell] += 1
        self._deliver(_on_cell(item, cell))

    def _deliver(self, output: GenerationOutput) -> None:
        with self._lock:
            callback = self._callbacks.pop(output.request_id, None)
            self._streams.pop(output.request_id, None)
            self._requests.pop(output.request_id, None)
        if callback is not None:
            callback(output)

    def _fail(self, request_id: str, reason: str, cell: int | None) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if isinstance(self.router, Router):
            self.router.withdraw(request_id)
        self._deliver(
            GenerationOutput(
                request_id=request_id, prompt_ids=request.prompt_ids, finish_reason="error", error=reason, cell=cell
            )
        )

    def _no_cells(self) -> str:
        return f"no rollout cell is left; first cause: {self.causes[0] if self.causes else 'none was ever up'}"


def _on_cell(output: GenerationOutput, cell: int) -> GenerationOutput:
    from dataclasses import replace

    return replace(output, cell=cell)
