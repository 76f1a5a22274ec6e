"""The key-value store through which cells find each other. It lives in the driver, outside every cell."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore


class StoreServer:
    """A TCPStore on a socket that we bind ourselves, so that no port is guessed and only `host` is listened on.

    host: address to bind and to announce; loopback unless cells live on other machines (the store has no
        authentication: name one address of a trusted network, wildcards are refused). port: 0 takes a free one.
    timeout_s: for the store's own blocking calls.

    Raises:
        ValueError: a wildcard address.
        OSError: the address cannot be bound.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, timeout_s: float = 30.0) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(address[0]).is_unspecified:
            raise ValueError(f"store host {host!r} means every interface; name the one address that cells shall use")
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(1024)
            bound = int(listener.getsockname()[1])
            store = TCPStore(
                host,
                bound,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                # The store owns a descriptor of its own, so that `listener` can be closed in any case.
                master_listen_fd=socket.dup(listener.fileno()),
            )
        finally:
            listener.close()
        self._store: TCPStore | None = store
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    @property
    def store(self) -> TCPStore:
        if self._store is None:
            raise RuntimeError(f"the store at {self.address} was closed")
        return self._store

    def close(self) -> None:
        """Stops serving. Safe to call again."""
        self._store = None

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
