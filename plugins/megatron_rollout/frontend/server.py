"""uvicorn in a thread of the leader's process, on a socket that was bound before."""

from __future__ import annotations

import logging
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette

from megatron_rollout.frontend.ports import base_url
from megatron_rollout.frontend.settings import is_loopback

logger = logging.getLogger(__name__)

#: Longer than routers and HTTP clients keep an idle connection (reqwest: 90 s): the side that may send next must not
#: find it closed under its hands.
KEEP_ALIVE_S = 120


class ServerHandle:
    """A running server."""

    def __init__(self, server: uvicorn.Server, thread: threading.Thread, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._server = server
        self._thread = thread

    @property
    def url(self) -> str:
        return base_url(self.host, self.port)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, deadline_s: float = 10.0) -> None:
        """Take no more connections, let calls in flight finish for most of the deadline, then cut them. Idempotent.

        The port is free afterwards. Raises TimeoutError if the server's thread is still alive at the deadline.
        """
        self._server.config.timeout_graceful_shutdown = max(deadline_s * 0.8, 0.1)  # type: ignore[assignment]
        self._server.should_exit = True
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._server.force_exit = True
            raise TimeoutError(f"the server on {self.url} did not stop within {deadline_s:g} s")


def serve(app: Starlette, sock: socket.socket, *, start_timeout_s: float = 30.0, backlog: int = 2048) -> ServerHandle:
    """Serve `app` on a bound socket, which becomes the server's own; returns once it accepts connections.

    Raises ValueError if the socket is bound wider than loopback and the app asks for no token, RuntimeError if the
    server does not start, naming why.
    """
    host, port = sock.getsockname()[:2]
    if not is_loopback(host) and app.state.frontend.settings.token is None:
        raise ValueError(f"{base_url(host, port)} is wider than loopback: a token is required")
    # Connections inherit it, so that a restarted server gets the port back while they are in TIME_WAIT.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S, backlog=backlog,
        server_header=False, date_header=False, ws="none", timeout_graceful_shutdown=10,
    )  # fmt: skip
    server = uvicorn.Server(config)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[sock])
        except BaseException as error:  # a thread has nobody above it: keep the cause for who waits
            failure.append(error)
            logger.exception("the server on %s ended", base_url(host, port))

    thread = threading.Thread(target=run, name=f"http-{port}", daemon=True)
    handle = ServerHandle(server, thread, host, port)
    thread.start()
    until = time.monotonic() + start_timeout_s
    while not server.started:
        thread.join(0.01)
        if not thread.is_alive() or time.monotonic() > until:
            server.should_exit = True
            sock.close()
            cause = failure[0] if failure else None
            detail = f"{type(cause).__name__}: {cause}" if cause else f"not up after {start_timeout_s:g} s"
            raise RuntimeError(f"the server on {base_url(host, port)} did not start: {detail}") from cause
    return handle
