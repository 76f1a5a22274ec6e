"""HTTP for watching and steering the cells of a run. Loopback unless told otherwise; every change needs the token.

    GET   /                     page for people          GET  /status    the same as JSON
    GET   /cells                all cells                GET  /metrics   for Prometheus
    PATCH /cells/{side}/{cell}  {"action": "suspend" | "resume"}
    POST  /faults               {"side", "cell", "how", "moment"}; only with fault injection enabled

The server changes nothing itself: a change is a command in the `ControlQueue`, which the run's own loop carries out
between two pieces of work.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from megatron_rollout.faults import HOWS
from megatron_rollout.frontend.ports import bind_socket
from megatron_rollout.frontend.server import ServerHandle, serve
from megatron_rollout.health import IllegalTransition
from trainer_hooks.cells.control import (
    Command,
    CommandExpired,
    CommandUnanswered,
    ControlQueue,
    InjectFault,
    QueueClosed,
    ResumeCell,
    SuspendCell,
)
from trainer_hooks.cells.control_page import PAGE
from trainer_hooks.cells.events import SIDES

_ACTIONS: dict[str, type[SuspendCell] | type[ResumeCell]] = {"suspend": SuspendCell, "resume": ResumeCell}
#: A change is a few words.
_MAX_BODY = 64 * 1024


class ControlServer:
    """status(): the run as it is now, JSON-able, from any thread (see `control_page` for the fields). token: what a
    change must present as `Authorization: Bearer …`; a random one if not given.

    Raises OSError: the address cannot be bound.
    """

    def __init__(
        self,
        queue: ControlQueue,
        status: Callable[[], Mapping[str, Any]],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        fault_injection: bool = False,
        command_timeout_s: float = 30.0,
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self._queue = queue
        self._status = status
        self._timeout_s = command_timeout_s
        self._registry = CollectorRegistry()
        self._registry.register(_Cells(status))
        routes = [
            Route("/", self._page),
            Route("/status", self._show),
            Route("/cells", self._cells),
            Route("/metrics", self._metrics),
            Route("/cells/{side}/{cell}", self._change, methods=["PATCH"]),
        ]
        if fault_injection:
            routes.append(Route("/faults", self._fault, methods=["POST"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _problem})
        app.state.frontend = SimpleNamespace(settings=SimpleNamespace(token=self.token))
        self._handle: ServerHandle = serve(app, bind_socket(host, port))

    @property
    def url(self) -> str:
        return self._handle.url

    def close(self) -> None:
        """Ends the server. Close the queue first: a call that waits for the loop is answered then."""
        self._handle.stop()

    # -- reading -------------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._status))

    async def _cells(self, request: Request) -> Response:
        status = await run_in_threadpool(self._status)
        return JSONResponse({side: status[side] for side in SIDES})

    async def _metrics(self, request: Request) -> Response:
        text = await run_in_threadpool(generate_latest, self._registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    # -- changing ------------------------------------------------------------------------------------------------

    async def _change(self, request: Request) -> Response:
        self._authorize(request)
        side, cell = request.path_params["side"], request.path_params["cell"]
        await self._check_cell(side, cell)
        body = await _body(request)
        action = body.get("action")
        if action not in _ACTIONS or set(body) != {"action"}:
            raise HTTPException(400, f"the body must be {{'action': one of {sorted(_ACTIONS)}}}, got {body!r:.200}")
        return await self._ask(_ACTIONS[action](side, int(cell)))

    async def _fault(self, request: Request) -> Response:
        self._authorize(request)
        body = await _body(request)
        unknown = sorted(set(body) - {"side", "cell", "how", "moment"})
        if unknown or not {"side", "cell", "how"} <= set(body):
            raise HTTPException(400, "a fault has side, cell, how and, if it is not now, moment")
        if body["how"] not in HOWS:
            raise HTTPException(400, f"how is one of {', '.join(HOWS)}, got {body['how']!r:.100}")
        await self._check_cell(str(body["side"]), str(body["cell"]))
        moment = str(body.get("moment", "now"))
        return await self._ask(InjectFault(body["side"], int(body["cell"]), body["how"], moment))

    def _authorize(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), self.token.encode()):
            raise HTTPException(401, "a change needs this run's token: Authorization: Bearer …")

    async def _check_cell(self, side: str, cell: str) -> None:
        status = await run_in_threadpool(self._status)
        known = {str(one["cell"]) for one in status[side]} if side in SIDES else set()
        if cell not in known:
            raise HTTPException(404, f"there is no {side} cell {cell}; {side} cells are {', '.join(sorted(known))}")

    async def _ask(self, command: Command) -> Response:
        try:
            result = await run_in_threadpool(self._queue.request, command, self._timeout_s)
        except (CommandExpired, QueueClosed) as error:
            raise HTTPException(503, str(error)) from error
        except CommandUnanswered as error:
            raise HTTPException(504, str(error)) from error
        except (IllegalTransition, ValueError) as error:
            raise HTTPException(409, str(error)) from error
        return JSONResponse({"done": str(command), "result": result})


async def _body(request: Request) -> dict[str, Any]:
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > _MAX_BODY:
            raise HTTPException(413, f"the body is longer than {_MAX_BODY} bytes")
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


class _Cells(Collector):
    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Any:
        status = self._status()
        for name, text in (("rollout_id", "Present rollout"), ("version", "Weight version")):
            yield GaugeMetricFamily(f"trainer_hooks_{name}", text, value=status[name])
        quorum = status["quorum"]
        yield GaugeMetricFamily("trainer_hooks_quorum_id", "Newest quorum", value=quorum["quorum_id"])
        yield GaugeMetricFamily("trainer_hooks_quorum_cells", "Its members", value=len(quorum["members"]))
        state = GaugeMetricFamily(
            "trainer_hooks_cell_state", "1 for the state it is in", labels=["side", "cell", "state"]
        )
        restarts = GaugeMetricFamily("trainer_hooks_cell_incarnation", "Of its processes", labels=["side", "cell"])
        for side in SIDES:
            for one in status[side]:
                state.add_metric([side, str(one["cell"]), one["state"]], 1)
                restarts.add_metric([side, str(one["cell"])], one["incarnation"])
        yield state
        yield restarts
