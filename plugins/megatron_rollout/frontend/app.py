"""One ASGI app for both wires, built for one cell's leader."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from megatron_rollout.frontend import control, openai, sglang
from megatron_rollout.frontend.client import EngineClient
from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.errors import RequestError, error_body
from megatron_rollout.frontend.settings import FrontendSettings
from megatron_rollout.frontend.wire import JSONReply

logger = logging.getLogger(__name__)

Handler = Callable[[Frontend, Request], Awaitable[Response]]

#: Routes that need no token: probes and scrapes, which can change nothing.
OPEN = ("/health", "/health_generate", "/metrics")

#: Tried in this order: what is called most comes first.
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST PUT", "/generate", sglang.generate),
    # OpenAI
    ("GET", "/v1/models", openai.models),
    ("GET", "/v1/models/{model:path}", openai.models),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/chat/completions", openai.chat_completions),
    # SGLang
    ("GET", "/health", control.health),
    ("GET", "/health_generate", control.health_generate),
    ("GET", "/server_info", control.server_info),
    ("GET", "/get_server_info", control.server_info),
    ("GET", "/model_info", control.model_info),
    ("GET", "/get_model_info", control.model_info),
    ("GET", "/v1/loads", control.loads),
    ("GET", "/get_load", control.get_load),
    ("POST", "/abort_request", control.abort_request),
    ("GET POST", "/flush_cache", control.flush_cache),
    ("POST", "/pause_generation", control.pause_generation),
    ("POST", "/continue_generation", control.continue_generation),
    ("GET", "/get_weight_version", control.get_weight_version),
    ("GET", "/weight_version", control.get_weight_version),
    ("POST", "/update_weight_version", control.update_weight_version),
    ("POST", "/init_weights_update_group", control.init_weights_update_group),
    ("POST", "/destroy_weights_update_group", control.destroy_weights_update_group),
    ("POST", "/begin_weight_update", control.begin_weight_update),
    ("POST", "/end_weight_update", control.end_weight_update),
    ("POST", "/update_weights_from_distributed", control.update_weights_from_distributed),
    ("POST", "/update_weights_from_tensor", control.update_weights_from_tensor),
    ("POST", "/update_weights_from_disk", control.update_weights_from_disk),
    ("POST", "/post_process_weights", control.post_process_weights),
    ("GET POST", "/release_memory_occupation", control.release_memory_occupation),
    ("GET POST", "/resume_memory_occupation", control.resume_memory_occupation),
    ("GET POST", "/weights_checker", control.weights_checker),
    ("GET POST", "/start_profile", control.start_profile),
    ("GET POST", "/stop_profile", control.stop_profile),
    *(
        ("POST", path, control.refuse)
        for path in (
            "/load_lora_adapter",
            "/load_lora_adapter_from_tensors",
            "/load_lora_adapter_from_distributed",
            "/unload_lora_adapter",
            "/update_weights_from_ipc",
            "/pull_weights",
            "/encode",
            "/classify",
        )
    ),
    # Prometheus
    ("GET", "/metrics", control.metrics),
)


def build_app(client: EngineClient, settings: FrontendSettings | None = None) -> Starlette:
    """The ASGI app of one cell.

    Answers 400 with one line for whatever a client got wrong, 401 without the token, 413 for a body over the limit, 503
    while the cell does not serve, 504 past a deadline, 500 for the engine's own failures. `app.state.frontend` is the
    Frontend.

    Raises ValueError for settings that may not serve (FrontendSettings).
    """
    frontend = Frontend(client, settings or FrontendSettings())
    routes = [
        Route(path, _endpoint(frontend, path, handler), methods=methods.split(), include_in_schema=False)
        for methods, path, handler in ROUTES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
    app.state.frontend = frontend
    return app


def _endpoint(frontend: Frontend, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the token check, with its errors turned into answers and its time taken."""
    expected = b"Bearer " + frontend.settings.token.encode() if frontend.settings.token and path not in OPEN else None

    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        try:
            if expected is not None:
                given = request.headers.get("authorization", "").encode("latin-1")
                if not hmac.compare_digest(given, expected):
                    raise RequestError(401, "a valid bearer token is required (Authorization: Bearer ...)")
            response = await handler(frontend, request)
        except ClientDisconnect:
            response = JSONReply(error_body(400, "the client went away before its body was complete"), status_code=400)
        except RequestError as error:
            response = JSONReply(error_body(error.status, error.message, error.param), status_code=error.status)
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
        except Exception as error:
            logger.exception("%s failed", path)
            response = JSONReply(error_body(500, f"{type(error).__name__}: {error}"), status_code=500)
        frontend.metrics.answered(path, response.status_code, time.perf_counter() - started)
        return response

    return endpoint


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return JSONReply(error_body(error.status_code, message), status_code=error.status_code, headers=error.headers)
