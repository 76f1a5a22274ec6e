"""Reserved HTTP addresses: where they are, that they are held until adopted, and that nobody else gets them."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dist_utils import die_with_parent
from ray_nodes import ray_nodes

from megatron_rollout.addresses import (
    adopt,
    advertised_hosts,
    frontend_bundles,
    publish,
    release_holders,
    reserve_http_server_addresses,
    reserved_addresses,
    verify_served_addresses,
)
from megatron_rollout.config import ConfigError, LayoutConfig, RolloutConfig
from megatron_rollout.frontend.ports import HeldPort, adopt_port, base_url, hold_port
from megatron_rollout.layout import Bundle, CellGrid, ParallelLayout
from megatron_rollout.placement import Cluster

pytestmark = pytest.mark.timeout(400)


def on(*hosts: str) -> dict[int, Bundle]:
    return {rank: Bundle(0, rank, f"node-{host}", host) for rank, host in enumerate(hosts)}


# -- arithmetic -----------------------------------------------------------------------------------------------


def test_the_host_is_that_of_the_leaders_bundle_not_of_the_rank_number() -> None:
    # Two cells of TP 2 and PP 2, a node each. Frontend ranks are 0 and 2; by number, rank 2 would be on the first node.
    slots = [Bundle(node, i, f"n{node}", f"10.0.0.{node + 1}") for node in range(2) for i in range(4)]
    found = frontend_bundles(slots, CellGrid(ParallelLayout(tp=2, pp=2), 2))
    assert {rank: bundle.host for rank, bundle in found.items()} == {0: "10.0.0.1", 2: "10.0.0.2"}
    assert advertised_hosts("0.0.0.0", found) == {0: "10.0.0.1", 2: "10.0.0.2"}


def test_the_same_port_on_two_nodes_is_fine_and_on_one_it_is_not() -> None:
    hosts = {0: "10.0.0.1", 2: "10.0.0.2"}
    assert publish(hosts, {0: 4321, 2: 4321}) == ["http://10.0.0.1:4321/v1", "http://10.0.0.2:4321/v1"]
    with pytest.raises(RuntimeError, match=r"ranks 0 and 2 both hold http://10\.0\.0\.1:4321"):
        publish({0: "10.0.0.1", 2: "10.0.0.1"}, {0: 4321, 2: 4321})


def test_ipv6_addresses_are_bracketed() -> None:
    assert publish({0: "fd00::1", 1: "[::1]"}, {0: 1, 1: 2}) == ["http://[fd00::1]:1/v1", "http://[::1]:2/v1"]


@pytest.mark.parametrize(
    ("bind", "nodes", "message"),
    [
        ("127.0.0.1", ("10.0.0.1", "10.0.0.2"), "--host 127.0.0.1 is a loopback address, but the leaders are on"),
        ("10.0.0.1", ("10.0.0.1", "10.0.0.2"), "--host 10.0.0.1 is the address of one node, but the leaders are on"),
        ("::", ("10.0.0.1",), r"--host :: listens on IPv6 only, but the leaders' nodes are \['10.0.0.1'\]"),
        ("0.0.0.0", ("fd00::1", "10.0.0.2"), r"--host 0.0.0.0 listens on IPv4 only, .* are \['fd00::1'\]"),
    ],
)
def test_addresses_that_other_nodes_cannot_reach_are_refused(bind: str, nodes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        advertised_hosts(bind, on(*nodes))


def test_loopback_is_fine_on_one_node_and_wildcards_become_the_nodes_address() -> None:
    assert advertised_hosts("127.0.0.1", on("10.0.0.1", "10.0.0.1")) == {0: "127.0.0.1", 1: "127.0.0.1"}
    assert advertised_hosts("::", on("fd00::1", "worker.example")) == {0: "fd00::1", 1: "worker.example"}


def test_served_addresses_must_be_the_reserved_ones_in_any_order() -> None:
    reserved = ["http://a:1/v1", "http://b:1/v1", "http://b:2/v1"]
    verify_served_addresses(["http://b:2/v1", None, "http://a:1/v1", "http://b:1/v1", None], reserved)
    verify_served_addresses([None], [])
    for served, message in [
        (["http://a:1/v1", "http://b:1/v1"], r"nothing serves \['http://b:2/v1'\], nobody announced \[\]"),
        ([*reserved, "http://b:2/v1"], r"nothing serves \[\], nobody announced \['http://b:2/v1'\]"),
        (["http://a:1/v1", "http://b:1/v1", "http://c:2/v1"], r"nothing serves \['http://b:2/v1'\], .*\['http://c:2"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            verify_served_addresses(served, reserved)


# -- two runs on one host -------------------------------------------------------------------------------------


class NamedServer(http.server.ThreadingHTTPServer):
    """Answers everything with a name, on a bound socket that it is given."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(name.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(sock.getsockname()[:2], Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self.server_activate()
        threading.Thread(target=self.serve_forever, daemon=True).start()


def get(url: str, timeout: float = 10) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return str(opener.open(url, timeout=timeout).read(), "utf-8")


def refused(host: str, port: int) -> bool:
    """Whether a client is refused at once, as opposed to accepted or left hanging."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        client.settimeout(5)
        try:
            client.connect((host, port))
        except ConnectionRefusedError:
            return True
    return False


def run_of_eight(name: str, parent: int) -> None:
    """A run: hold 8 ports, say which, and on request serve on all of them."""
    die_with_parent(parent)
    held = [hold_port("127.0.0.1") for _ in range(8)]
    print(*(port.port for port in held), flush=True)
    sys.stdin.readline()
    servers = [NamedServer(adopt_port(port.offer()), f"{name}-{i}") for i, port in enumerate(held)]
    print("serving", flush=True)
    sys.stdin.readline()
    for server in servers:
        server.shutdown()


def test_g12_two_runs_of_eight_cells_started_at_once_never_meet() -> None:
    code = "import sys, test_addresses; test_addresses.run_of_eight(sys.argv[1], int(sys.argv[2]))"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, name, str(os.getpid())],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        ports = [[int(word) for word in run.stdout.readline().split()] for run in runs if run.stdout]
        assert len({port for mine in ports for port in mine}) == 16
        assert all(refused("127.0.0.1", port) for mine in ports for port in mine)
        for run in runs:
            assert run.stdin and run.stdout
            print("go", file=run.stdin, flush=True)
            assert run.stdout.readline() == "serving\n"
        for name, mine in zip(("one", "two"), ports, strict=True):
            assert [get(f"http://127.0.0.1:{port}/") for port in mine] == [f"{name}-{i}" for i in range(8)]
    finally:
        for run in runs:
            run.kill()
            run.wait(timeout=10)


# -- nodes as network namespaces ------------------------------------------------------------------------------

NAMESPACES = """
set -e
ip link set lo up
sleep 1000 & keep=$!
unshare -n sleep 1000 & far=$!
trap 'kill $keep $far' EXIT
until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add near type veth peer name far
ip link set far netns $far
ip addr add 10.203.0.1/24 dev near && ip -6 addr add fd00:203::1/64 dev near nodad && ip link set near up
nsenter -t $far -n ip addr add 10.203.0.2/24 dev far
nsenter -t $far -n ip -6 addr add fd00:203::2/64 dev far nodad
nsenter -t $far -n ip link set far up
for pair in "10.203.0.1 10.203.0.2" "fd00:203::1 fd00:203::2"; do
    set -- $pair
    "$PYTHON" -c "import test_addresses as t; t.near_node('$1', '$2', $far)"
done
"""


def far_node(host: str, port: int) -> None:
    """On the second node: hold the port that the first node holds as well, then serve on it."""
    held: HeldPort = hold_port(host, port)
    print("held", flush=True)
    sys.stdin.readline()
    server = NamedServer(held.detach(), "far")
    print("serving", flush=True)
    sys.stdin.readline()
    server.shutdown()


def near_node(near: str, far: str, far_pid: int) -> None:
    """On the first node: the same port number on both, refused while held, told apart when served."""
    with hold_port(near) as held:
        code = f"import test_addresses as t; t.far_node({far!r}, {held.port})"
        command = ["nsenter", "-t", str(far_pid), "-n", sys.executable, "-c", code]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdin and other.stdout
        try:
            assert other.stdout.readline() == "held\n"
            assert refused(near, held.port) and refused(far, held.port)
            urls = publish({0: near, 1: far}, {0: held.port, 1: held.port})
            print("go", file=other.stdin, flush=True)
            assert other.stdout.readline() == "serving\n"
            assert refused(near, held.port)
            server = NamedServer(adopt_port(held.offer()), "near")
            assert [get(url) for url in urls] == ["near", "far"]
            server.shutdown()
        finally:
            other.kill()
            other.wait(timeout=10)
    print(*urls, "told apart")


def _namespaces_allowed() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    return tools and subprocess.run(["unshare", "-rn", "ip", "link"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _namespaces_allowed(), reason="this machine does not let us make network namespaces")
def test_the_same_port_on_two_nodes_in_network_namespaces() -> None:
    run = subprocess.run(
        ["unshare", "-rn", "bash", "-c", NAMESPACES],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("told apart") == 2 and "[fd00:203::2]" in run.stdout


# -- Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_nodes([{"num_cpus": 2}, {"num_cpus": 2}]) as cluster:
        yield cluster


@pytest.fixture
def made(nodes: Any) -> Iterator[list[Cluster]]:
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.shutdown()


def leader_class() -> Any:
    """A leader, reduced to what it does with its address."""
    import ray

    @ray.remote(num_cpus=1)
    class Leader:
        def serve(self, holder: Any, name: str, directory: str) -> str:
            import sys

            sys.path.insert(0, directory)
            from test_addresses import NamedServer

            self.server = NamedServer(adopt(holder, timeout_s=30), name)
            host, port = self.server.socket.getsockname()[:2]
            return base_url(host, port, "/v1")

        def node(self) -> str:
            import ray

            return ray.get_runtime_context().get_node_id()

    return Leader


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1].split("/")[0])


def test_reservation_adoption_and_release_on_two_nodes(made: list[Cluster]) -> None:
    import ray

    config = RolloutConfig(num_rollout_cells=2, expose_http=True)
    one, two = Cluster([1, 1], use_gpus=False), Cluster([1, 1], use_gpus=False)
    made += [one, two]
    with reserved_addresses(one, config) as (urls, ports, holders), reserved_addresses(two, config) as (other, _, _):
        assert urls == [f"http://127.0.0.1:{port}/v1" for port in ports.values()]
        assert list(ports) == config.grid.frontend_ranks == [0, 1]
        assert len({*urls, *other}) == 4  # two runs on one host
        assert all(refused("127.0.0.1", port_of(url)) for url in urls + other)

        places = [one.scheduling(bundle) for bundle in frontend_bundles(one.bundles, config.grid).values()]
        leaders = [leader_class().options(scheduling_strategy=place).remote() for place in places]
        here = str(Path(__file__).parent)
        served = ray.get(
            [
                leader.serve.remote(holder, f"cell-{i}", here)
                for i, (leader, holder) in enumerate(zip(leaders, holders, strict=True))
            ],
            timeout=120,
        )
        verify_served_addresses([*served, None], urls)
        assert ray.get([leader.node.remote() for leader in leaders], timeout=60) == [b.node_id for b in one.bundles]
    # The holders are gone: the adopted ports serve on, those of the run that never started are free.
    assert [get(url) for url in urls] == ["cell-0", "cell-1"]
    for url in other:
        until = time.monotonic() + 10
        while True:
            try:
                hold_port("127.0.0.1", port_of(url)).close()
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.1)


def test_a_holder_that_is_gone_or_has_released_is_an_error(made: list[Cluster]) -> None:
    import ray

    cluster = Cluster([1, 1], use_gpus=False)
    made.append(cluster)
    _, _, holders = reserve_http_server_addresses(cluster, RolloutConfig(num_rollout_cells=2, expose_http=True))
    ray.get(holders[0].release.remote(), timeout=30)
    with pytest.raises(RuntimeError, match="no port was handed over: .*no longer held"):
        adopt(holders[0], timeout_s=30)
    ray.kill(holders[1])
    with pytest.raises(RuntimeError, match="no port was handed over"):
        adopt(holders[1], timeout_s=30)
    release_holders(holders)  # also of those that are gone


def test_more_ranks_than_bundles_are_refused_before_anything_is_held(made: list[Cluster]) -> None:
    cluster = Cluster([1], use_gpus=False)
    made.append(cluster)
    config = RolloutConfig(layout=LayoutConfig(), num_rollout_cells=2, expose_http=True)
    with pytest.raises(ValueError, match="2 rollout cells of 1 ranks need 2 bundles, the cluster has 1"):
        reserve_http_server_addresses(cluster, config)
