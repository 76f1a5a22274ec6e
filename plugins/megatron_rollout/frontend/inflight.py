"""Samples of HTTP calls while they are in the engine: submission, results, deltas, deadline, disconnect.

The engine's thread and the event loop meet in one mailbox a call. A call that does not stream wakes the loop once a
sample, never per token; one that streams wakes it at most once for all that arrived since it last looked.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future

from starlette.types import Receive

from megatron_rollout.frontend.client import EngineClient, NotServing
from megatron_rollout.frontend.errors import RequestError, bad_request
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

#: How long a call past its deadline waits for the engine to give up its samples.
ABORT_GRACE_S = 5.0


def choice_seed(seed: int | None, index: int) -> int | None:
    """Seed of the index-th sample of a call with one seed: the first draws the seed's own noise, the others differ.

    Depends on nothing but its arguments, so the same call draws the same samples on whatever cell it runs.
    """
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Inflight:
    """All calls of one app that have samples in the engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._calls: dict[str, Call] = {}  # by request id given by the client (`rid`) or made here
        self.samples = 0
        self.disconnects = 0

    def submit(
        self, call_id: str, requests: Sequence[GenerationRequest], receive: Receive, timeout_s: float, *, stream: bool
    ) -> Call:
        """Hand the samples of one call to the engine.

        Raises RequestError: 400 if an id is in flight already or the engine can never run one, 503 while it serves
        none. Then no sample of the call stays in the engine.
        """
        if call_id in self._calls:
            raise bad_request(f"rid: {call_id!r} is in flight already", "rid")
        call = Call(self, self._client, call_id, requests, timeout_s)
        try:
            for index, request in enumerate(requests):
                call.send(index, request, stream)
        except Exception as error:
            call.abort()
            if not isinstance(error, ValueError | NotServing):
                raise
            status = 503 if isinstance(error, NotServing) else 400
            raise RequestError(status, str(error)) from error
        self._calls[call_id] = call
        self.samples += len(requests)
        call.watch(receive)
        return call

    def abort(self, request_id: str) -> None:
        """Abort a call by its id, or a sample by its own."""
        call = self._calls.get(request_id)
        if call is not None:
            call.abort()
        else:
            self._client.abort(request_id)

    def forget(self, call: Call) -> None:
        if self._calls.get(call.call_id) is call:
            del self._calls[call.call_id]
            self.samples -= call.size


class Call:
    """The samples of one HTTP call. `close` must be called, whatever happened."""

    def __init__(
        self,
        inflight: Inflight,
        client: EngineClient,
        call_id: str,
        requests: Sequence[GenerationRequest],
        timeout_s: float,
    ) -> None:
        self.call_id = call_id
        self.size = len(requests)
        self._inflight = inflight
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s
        self._timeout_s = timeout_s
        self._open: dict[int, str] = {}  # index -> request id of samples that have not finished
        self._mail: collections.deque[tuple[int, TokenDelta | Future[GenerationOutput]]] = collections.deque()
        self._wake = asyncio.Event()
        self._woken = False
        self._watcher: asyncio.Task[None] | None = None

    def send(self, index: int, request: GenerationRequest, stream: bool) -> None:
        on_delta = (lambda delta: self._post(index, delta)) if stream else None
        future = self._client.submit(request, on_delta)
        self._open[index] = request.request_id
        future.add_done_callback(lambda done: self._post(index, done))

    def watch(self, receive: Receive) -> None:
        """Abort the call when its client goes away. Needs the whole body to have been read."""
        self._watcher = self._loop.create_task(self._abort_on_disconnect(receive))

    def abort(self) -> None:
        """End what has not finished; the results say "abort"."""
        for request_id in list(self._open.values()):
            self._client.abort(request_id)

    async def results(self) -> list[GenerationOutput]:
        """All outputs, in order. Raises RequestError: 504 past the deadline, 500 with the first sample that failed."""
        outputs: dict[int, GenerationOutput] = {}
        while len(outputs) < self.size:
            for index, item in await self._read():
                if isinstance(item, GenerationOutput):
                    outputs[index] = item
        return [outputs[index] for index in range(self.size)]

    async def events(self) -> AsyncGenerator[list[tuple[int, TokenDelta | GenerationOutput]]]:
        """What arrived since the last look, the deltas of a sample in order and before its output. Raises as
        `results`."""
        finished = 0
        while finished < self.size:
            group = await self._read()
            finished += sum(isinstance(item, GenerationOutput) for _, item in group)
            if group:
                yield group

    async def close(self) -> None:
        """Give up what has not finished and stop watching. Idempotent."""
        self.abort()
        self._inflight.forget(self)
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None

    def _post(self, index: int, item: TokenDelta | Future[GenerationOutput]) -> None:
        """From the engine's thread: append, and wake the loop unless it is about to look anyway."""
        self._mail.append((index, item))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _read(self) -> list[tuple[int, TokenDelta | GenerationOutput]]:
        remaining = self._deadline - self._loop.time()
        try:
            async with asyncio.timeout(max(remaining, 0)):
                await self._wake.wait()
        except TimeoutError:
            await self._give_up()
        return self._drain()

    def _drain(self) -> list[tuple[int, TokenDelta | GenerationOutput]]:
        self._wake.clear()
        self._woken = False  # before reading: what is posted from here on wakes the loop again
        group: list[tuple[int, TokenDelta | GenerationOutput]] = []
        while self._mail:
            index, item = self._mail.popleft()
            group.append((index, self._finish(index, item) if isinstance(item, Future) else item))
        return group

    def _finish(self, index: int, future: Future[GenerationOutput]) -> GenerationOutput:
        request_id = self._open.pop(index, None)
        if future.cancelled():
            raise RequestError(500, f"sample {index} ({request_id}): the engine cancelled it")
        error = future.exception()
        if isinstance(error, NotServing):
            raise RequestError(503, str(error))
        if isinstance(error, ValueError):
            raise bad_request(str(error))
        if error is not None:
            raise RequestError(500, f"sample {index} ({request_id}): {type(error).__name__}: {error}") from error
        output = future.result()
        if output.finish_reason == "error":
            raise RequestError(500, f"sample {index} ({request_id}): {output.error or 'the engine gave no cause'}")
        return output

    async def _give_up(self) -> None:
        """Past the deadline: free the engine of the call, then say so."""
        open_samples = len(self._open)
        self.abort()
        until = self._loop.time() + ABORT_GRACE_S
        with contextlib.suppress(TimeoutError):
            while self._open and self._loop.time() < until:
                async with asyncio.timeout_at(until):
                    await self._wake.wait()
                self._drain()
        raise RequestError(
            504, f"{open_samples} of {self.size} samples had not finished after {self._timeout_s:g} s and were aborted"
        )

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._open:
            self._inflight.disconnects += 1
            logger.info("client of call %s went away: aborting %d samples", self.call_id, len(self._open))
            self.abort()
