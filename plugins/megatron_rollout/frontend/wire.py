"""Bytes in and out: bodies within their limit, JSON without NaN, server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron_rollout.frontend.errors import RequestError, bad_request, error_body

#: What stands for a logprob of -infinity: OpenAI's own value for "very unlikely". NaN and +infinity become null.
UNLIKELY = -9999.0


def finite_logprob(value: float | None) -> float | None:
    """A logprob that JSON can carry: -infinity -> UNLIKELY, NaN and +infinity -> None."""
    if value is None or math.isfinite(value):
        return value
    return UNLIKELY if value == -math.inf else None


def finite_logprobs(values: Sequence[float | None]) -> list[float | None]:
    """`finite_logprob` of each; one pass in C when all are finite, which is the rule."""
    try:
        if math.isfinite(math.fsum(values)):  # type: ignore[arg-type]
            return list(values)
    except (TypeError, OverflowError, ValueError):  # a None, or infinities among them
        pass
    return [finite_logprob(value) for value in values]


def dump_json(content: Any) -> bytes:
    """Compact JSON. Integers beyond 64 bits and keys other than str are refused by orjson (TypeError)."""
    return orjson.dumps(content)


class JSONReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump_json(content)


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body; RequestError 413 as soon as it is known to exceed `limit` bytes, 408 if it is too slow."""
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise RequestError(413, f"the body has {declared} bytes, more than the {limit} accepted")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise RequestError(413, f"the body has more than the {limit} bytes accepted")
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {timeout_s:g} s ({size} bytes so far)") from None
    return b"".join(chunks)


async def read_json_object(request: Request, limit: int, timeout_s: float) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object. RequestError 400, 408 or 413."""
    body = await read_body(request, limit, timeout_s)
    if not body:
        return {}
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise bad_request(f"the body must be a JSON object, got {type(content).__name__}")
    return content


class EventStream(Response):
    """`text/event-stream` of `events`: each item of a group one `data:` event, closed by `[DONE]`.

    A failure after the first event can no longer change the status: it is sent as an event with an `error`. The
    generator is closed whatever ends the response; noticing that the client went away is the generator's matter.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Iterable[Any]]) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for group in self.events:
                body = b"".join(map(_event, group))
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except RequestError as error:
            body = _event(error_body(error.status, error.message, error.param))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            await self.events.aclose()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _event(item: Any) -> bytes:
    return b"data: " + dump_json(item) + b"\n\n"


async def primed(events: AsyncGenerator[Iterable[Any]]) -> AsyncGenerator[Iterable[Any]]:
    """`events` once the first group is there, so that a call that fails at once still gets its HTTP status."""
    first = await anext(events, None)
    return _chain(first, events)


async def _chain(first: Iterable[Any] | None, events: AsyncGenerator[Iterable[Any]]) -> AsyncGenerator[Iterable[Any]]:
    try:
        if first is not None:
            yield first
            async for group in events:
                yield group
    finally:
        await events.aclose()
