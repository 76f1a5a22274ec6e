"""HTTP addresses of the rollout cells, known before any rollout process exists.

An address is reserved by a holder: an actor in the very bundle that the cell's leader will get. It binds a free port
and keeps it bound without listening, so that clients are refused instead of left hanging and nobody else can take it.
The leader adopts the bound socket from its holder (`adopt`); a holder that is told to release gives its port up.

Ports are taken per node: equal numbers on two nodes are fine, and two runs on one node never get the same.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

from megatron_rollout.config import ConfigError, RolloutConfig
from megatron_rollout.frontend.ports import HeldPort, adopt_port, base_url, hold_port
from megatron_rollout.frontend.settings import is_loopback
from megatron_rollout.layout import Bundle, CellGrid
from megatron_rollout.placement import Cluster, check_room, init_cluster_placement_groups

_RELEASE_TIMEOUT_S = 5.0


class PortHolder:
    """Holds one port (as a Ray actor)."""

    def __init__(self, host: str) -> None:
        self._held: HeldPort = hold_port(host)

    def port(self) -> int:
        return self._held.port

    def offer(self) -> str:
        """Where a process of this node can adopt the port. RuntimeError if it is held no more."""
        return self._held.offer()

    def release(self) -> None:
        self._held.close()


def frontend_bundles(bundles: Sequence[Bundle], grid: CellGrid) -> dict[int, Bundle]:
    """{frontend rank: the bundle it runs in}. bundles: in slot order."""
    check_room(bundles, grid)
    return {rank: bundles[grid.slot_of_rank(rank)] for rank in grid.frontend_ranks}


def advertised_hosts(bind_host: str, bundles: Mapping[int, Bundle]) -> dict[int, str]:
    """{rank: the host under which clients reach a server that binds `bind_host` in its bundle}.

    A wildcard is advertised as the node's own address, anything else as it is. The node comes from the bundle, never
    from the rank number. Raises ConfigError where clients on other nodes could not get there.
    """
    nodes = sorted({bundle.host for bundle in bundles.values()})
    if bind_host.strip("[]") not in ("0.0.0.0", "::"):
        if len(nodes) > 1:
            kind = "a loopback address" if is_loopback(bind_host) else "the address of one node"
            raise ConfigError(
                [f"--host {bind_host} is {kind}, but the leaders are on {nodes}; use 0.0.0.0 and a token"]
            )
        return {rank: bind_host for rank in bundles}
    wanted = 6 if ":" in bind_host else 4
    if wrong := [node for node in nodes if _ip_version(node) not in (None, wanted)]:
        raise ConfigError([f"--host {bind_host} listens on IPv{wanted} only, but the leaders' nodes are {wrong}"])
    return {rank: bundle.host for rank, bundle in bundles.items()}


def _ip_version(host: str) -> int | None:
    try:
        return ip_address(host.strip("[]")).version
    except ValueError:
        return None  # a name: may be both


def publish(hosts: Mapping[int, str], ports: Mapping[int, int]) -> list[str]:
    """Base URLs ("http://host:port/v1", IPv6 bracketed) in rank order.

    Raises RuntimeError if two ranks of one host have the same port: one of them cannot hold it.
    """
    taken: dict[tuple[str, int], int] = {}
    for rank in sorted(ports):
        address = hosts[rank], ports[rank]
        if address in taken:
            raise RuntimeError(f"ranks {taken[address]} and {rank} both hold {base_url(*address)}")
        taken[address] = rank
    return [base_url(host, port, "/v1") for host, port in taken]


def reserve_http_server_addresses(
    cluster: Cluster, config: RolloutConfig
) -> tuple[list[str], dict[int, int], list[Any]]:
    """Reserve an address for every frontend rank (the leaders of the cells), before there is any rollout process.

    Returns (base URLs, {frontend rank: port}, holder actors), all in rank order. The caller keeps the holders until the
    leaders have adopted their ports and ends them then (`release_holders`, in a `finally`; `reserved_addresses` does
    that). Raises TimeoutError naming the ranks whose holder did not come up within `config.timeouts.reserve_s`.
    """
    import ray

    init_cluster_placement_groups(cluster, config)
    bundles = frontend_bundles(cluster.bundles, config.grid)
    hosts = advertised_hosts(config.host, bundles)
    holder_class = ray.remote(num_cpus=0, max_restarts=0)(PortHolder)
    holders = [
        holder_class.options(scheduling_strategy=cluster.scheduling(bundle)).remote(config.host)
        for bundle in bundles.values()
    ]
    try:
        references = {holder.port.remote(): rank for rank, holder in zip(bundles, holders, strict=True)}
        _, late = ray.wait(list(references), num_returns=len(references), timeout=config.timeouts.reserve_s)
        if late:
            raise TimeoutError(
                f"no port reserved for ranks {[references[r] for r in late]} within {config.timeouts.reserve_s:g} s"
            )
        ports = dict(zip(bundles, ray.get(list(references), timeout=config.timeouts.reserve_s), strict=True))
        return publish(hosts, ports), ports, holders
    except BaseException:
        release_holders(holders)
        raise


@contextmanager
def reserved_addresses(
    cluster: Cluster, config: RolloutConfig
) -> Iterator[tuple[list[str], dict[int, int], list[Any]]]:
    """`reserve_http_server_addresses`, with the holders ended at the end of the block: by then ports are adopted."""
    urls, ports, holders = reserve_http_server_addresses(cluster, config)
    try:
        yield urls, ports, holders
    finally:
        release_holders(holders)


def release_holders(holders: Iterable[Any]) -> None:
    """Release what was not adopted and end the holders. A holder that is gone already is fine."""
    import ray

    holders = list(holders)
    told = [holder.release.remote() for holder in holders]
    if told:
        ray.wait(told, num_returns=len(told), timeout=_RELEASE_TIMEOUT_S)  # done or dead: both will do
    for holder in holders:
        ray.kill(holder)


def adopt(holder: Any, *, timeout_s: float = 30.0) -> socket.socket:
    """In the leader's process: take over the port of its holder. The socket is bound and not yet listening.

    Raises RuntimeError if the holder is gone, has no port any more, or does not hand it over within `timeout_s`.
    """
    import ray

    try:
        path = ray.get(holder.offer.remote(), timeout=timeout_s)
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise RuntimeError(f"no port was handed over: {reason}") from error
    return adopt_port(path, timeout_s)


def verify_served_addresses(served: Iterable[str | None], reserved: Iterable[str]) -> None:
    """Raises RuntimeError unless the servers are exactly where they were announced; order does not matter.

    served: URL of each server, None for ranks without one.
    """
    have, want = Counter(url for url in served if url is not None), Counter(reserved)
    if have != want:
        missing, unexpected = sorted((want - have).elements()), sorted((have - want).elements())
        raise RuntimeError(
            "the HTTP servers are not where they were announced: "
            f"nothing serves {missing}, nobody announced {unexpected}"
        )
