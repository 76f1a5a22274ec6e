"""What every handler of one app shares, and the waiting for control commands."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request

from megatron_rollout.frontend.client import EngineClient, NotServing
from megatron_rollout.frontend.detokenize import TokenText
from megatron_rollout.frontend.errors import RequestError, bad_request
from megatron_rollout.frontend.inflight import Inflight
from megatron_rollout.frontend.metrics import Metrics
from megatron_rollout.frontend.schema import WireModel, parse
from megatron_rollout.frontend.settings import FrontendSettings
from megatron_rollout.frontend.wire import read_json_object


class Frontend:
    """One app's engine client, settings and books."""

    def __init__(self, client: EngineClient, settings: FrontendSettings) -> None:
        self.client = client
        self.settings = settings
        self.tokenizer = client.tokenizer
        self.token_text = TokenText(self.tokenizer)
        self.inflight = Inflight(client)
        self.metrics = Metrics(client, self.inflight)
        self.started = int(time.time())

    def model_name(self) -> str:
        return self.settings.served_model_name or self.client.status().model_name

    async def body[M: WireModel](self, request: Request, model: type[M]) -> M:
        """The request's body as `model`. RequestError 400, 408 or 413."""
        settings = self.settings
        return parse(model, await read_json_object(request, settings.max_body_bytes, settings.body_timeout_s))

    async def control(self, name: str, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Result of a command that the engine's loop executes.

        Raises RequestError: 400 with the engine's complaint, 503 while the cell cannot obey, 504 past the deadline (the
        command may still be executed). Any other failure of the engine is raised as it is.
        """
        limit = self.settings.control_timeout_s if timeout_s is None else timeout_s
        try:
            return await _result(self.client.call(name, **arguments), limit)
        except TimeoutError:
            raise RequestError(504, f"{name}: the engine did not answer within {limit:g} s") from None
        except NotServing as error:
            raise RequestError(503, f"{name}: {error}") from error
        except ValueError as error:
            raise bad_request(f"{name}: {error}") from error


async def _result(future: Future[Any], timeout_s: float) -> Any:
    """Wait without tying the engine's future to this task: cancelling the wait must not cancel the command."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not done.done():
            done.set_result(None)

    def on_done(_: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    future.add_done_callback(on_done)
    async with asyncio.timeout(timeout_s):
        await done
    try:
        return future.result(timeout=0)
    except TimeoutError as error:  # the command's own, not our deadline
        raise RequestError(504, f"the command timed out in the engine: {error}") from error
