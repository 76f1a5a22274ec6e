"""Ports that stay ours from reservation to the server: bound at once, listened on only by the server.

A held port is bound but not listening: a client is refused, not left hanging, and no other process can bind it. It
passes to the server, within a process as a socket or between two processes of one machine as a file descriptor over a
unix socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import uuid

_TAKEN, _RELEASED = b"T", b"R"


def url_host(host: str) -> str:
    """`host` as it stands in a URL: IPv6 addresses in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def base_url(host: str, port: int, path: str = "") -> str:
    """`http://host:port/path`, IPv6 bracketed."""
    return f"http://{url_host(host)}:{port}{path}"


def find_free_port() -> int:
    """A port that was free on 127.0.0.1 a moment ago, for rendezvous that can only be given a number.

    It is not held: where the taker can adopt a socket, use `hold_port`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bind_socket(host: str, port: int = 0) -> socket.socket:
    """A TCP socket bound to `host:port` (0: any free port), not listening, that no other process can bind beside us.

    SO_REUSEADDR is set during the bind only. During it, because a restarted server must get its port back while old
    connections are in TIME_WAIT; not after it, because two sockets that both carry the flag may be bound to one port
    as long as neither listens.

    Raises OSError naming the address if it cannot be bound.
    """
    bare = host.strip("[]")
    family, kind, proto, _, address = socket.getaddrinfo(
        bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot bind {url_host(host)}:{port}: {os.strerror(error.errno or errno.EIO)}"
        ) from error
    return sock


def hold_port(host: str = "127.0.0.1", port: int = 0) -> HeldPort:
    """Bind a port of `host` (0: any free one) and hold it until it is handed over or closed."""
    return HeldPort(host, bind_socket(host, port))


class HeldPort:
    """A bound port and, once offered, the thread that hands it to the process that asks."""

    def __init__(self, host: str, sock: socket.socket) -> None:
        self.host = host.strip("[]")
        self.port: int = sock.getsockname()[1]
        self._sock: socket.socket | None = sock
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._address: str | None = None

    @property
    def url(self) -> str:
        return base_url(self.host, self.port)

    @property
    def held(self) -> bool:
        """False once handed over, detached or closed."""
        return self._sock is not None

    def detach(self) -> socket.socket:
        """The socket, for a server in this process; the port is no longer held here."""
        with self._lock:
            if self._sock is None:
                raise RuntimeError(f"port {self.port} is no longer held here")
            sock, self._sock = self._sock, None
        self._end_offer()
        return sock

    def offer(self, step_timeout_s: float = 10.0) -> str:
        """Offer the port to one process of the same user on this machine; returns the address for `adopt_port`.

        The offer stands until the port is adopted or closed; a taker that dies half-way leaves the port held here.
        The address is a name in Linux' abstract namespace: nothing in the file system can be left behind.
        step_timeout_s bounds each message of the exchange.
        """
        with self._lock:
            if self._sock is None:
                raise RuntimeError(f"port {self.port} is no longer held here")
            if self._address is None:
                self._address = f"@held-port-{uuid.uuid4().hex}"
                self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._listener.bind(_abstract(self._address))
                self._listener.listen(4)
                threading.Thread(
                    target=self._serve,
                    args=(self._listener, step_timeout_s),
                    name=f"held-port-{self.port}",
                    daemon=True,
                ).start()
            return self._address

    def close(self) -> None:
        """Release the port, whatever became of an offer. Idempotent."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
        self._end_offer()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_offer(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread out of accept()
            listener.close()

    def _serve(self, listener: socket.socket, step_timeout_s: float) -> None:
        while self.held:
            try:
                taker, _ = listener.accept()
            except OSError:  # the offer ended
                return
            # A taker that goes away on the way: the port stays here, unless it had been released already.
            with taker, contextlib.suppress(OSError):
                taker.settimeout(step_timeout_s)
                self._hand_over(taker)

    def _hand_over(self, taker: socket.socket) -> None:
        """Send the descriptor; once the taker says it has it, close ours and acknowledge."""
        if _peer_uid(taker) != os.getuid():
            return
        with self._lock:
            if self._sock is None:
                return
            socket.send_fds(taker, [b"P"], [self._sock.fileno()])
        if taker.recv(1) != _TAKEN:
            return
        with self._lock:
            if self._sock is None:
                return
            self._sock.close()
            self._sock = None
        self._end_offer()
        taker.sendall(_RELEASED)


def adopt_port(address: str, timeout_s: float = 10.0) -> socket.socket:
    """Take over the port offered at `address`: the bound socket, not yet listening, held by nobody else any more.

    Raises RuntimeError if the holder is gone, sent no descriptor, or did not acknowledge within timeout_s a message.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        holder.settimeout(timeout_s)
        try:
            holder.connect(_abstract(address))
        except OSError as error:
            raise RuntimeError(f"the holder of the port offered at {address} is gone: {error}") from error
        if _peer_uid(holder) != os.getuid():  # the name is free for anybody once its holder is gone
            raise RuntimeError(f"{address} is offered by another user")
        try:
            message, descriptors, _, _ = socket.recv_fds(holder, 1, 1)
        except OSError as error:
            raise RuntimeError(f"the holder at {address} sent no descriptor within {timeout_s} s: {error}") from error
        if not message or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise RuntimeError(f"the holder at {address} sent no descriptor")
        sock = socket.socket(fileno=descriptors[0])
        try:
            os.set_inheritable(sock.fileno(), False)
            holder.sendall(_TAKEN)
            acknowledged = holder.recv(1) == _RELEASED
        except OSError as error:
            sock.close()
            raise RuntimeError(f"the holder at {address} did not acknowledge within {timeout_s} s: {error}") from error
        if not acknowledged:
            sock.close()
            raise RuntimeError(f"the holder at {address} did not acknowledge the hand-over")
        return sock


def _peer_uid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid


def _abstract(address: str) -> str:
    """The socket name of a printable address."""
    return "\0" + address.removeprefix("@")
