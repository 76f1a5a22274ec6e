"""Ports are held from reservation on, refuse rather than hang, and pass whole to another process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import uuid

import pytest

from megatron_rollout.frontend.ports import adopt_port, base_url, bind_socket, find_free_port, hold_port

pytestmark = pytest.mark.timeout(180)


def refused(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_held_port_refuses_and_nobody_else_gets_it():
    with hold_port() as held:
        assert refused(held.port)
        for reuse in (0, 1):
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", held.port))
            other.close()
        with pytest.raises(OSError, match=f"cannot bind 127.0.0.1:{held.port}"):
            hold_port("127.0.0.1", held.port)
    with hold_port("127.0.0.1", held.port) as again:  # released: free for the next
        assert again.port == held.port


def test_a_port_chosen_by_number_is_held_as_tightly():
    number = find_free_port()
    with hold_port("127.0.0.1", number):
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", number))
        other.close()


def test_a_port_comes_back_at_once_though_old_connections_linger():
    sock = bind_socket("127.0.0.1")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as serve() does before it listens
    sock.listen()
    address = sock.getsockname()
    client = socket.create_connection(address)
    accepted, _ = sock.accept()
    accepted.close()  # the server closes first: its side is in TIME_WAIT
    sock.close()
    client.recv(1)
    client.close()
    bind_socket(*address).close()


def test_the_same_number_on_two_addresses_of_one_machine():
    with hold_port("127.0.0.1") as one, hold_port("127.0.0.2", one.port) as two:
        assert one.port == two.port and one.url != two.url


def test_g12_many_held_at_once_are_all_different():
    held = [hold_port() for _ in range(50)]
    assert len({h.port for h in held}) == 50
    for h in held:
        h.close()


def test_g12_eight_processes_of_two_runs_reserve_at_once():
    script = (
        "import sys; from megatron_rollout.frontend.ports import hold_port\n"
        "h = [hold_port() for _ in range(20)]; print(*(x.port for x in h), flush=True); sys.stdin.readline()"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    try:
        ports = [int(port) for run in runs for port in run.stdout.readline().split()]
        assert len(ports) == len(set(ports)) == 160
    finally:
        for run in runs:
            run.kill()
            run.communicate(timeout=10)


def test_hand_over_within_the_process():
    held = hold_port()
    sock = held.detach()
    sock.listen()
    assert not refused(held.port) and not held.held
    held.close()
    assert not refused(held.port)  # the socket is the taker's now
    with pytest.raises(RuntimeError, match="no longer held"):
        held.detach()
    with pytest.raises(RuntimeError, match="no longer held"):
        held.offer()
    sock.close()


HOLDER = (
    "import sys; from megatron_rollout.frontend.ports import hold_port\n"
    "h = hold_port(); print(h.port, h.offer(), flush=True); sys.stdin.readline(); print(h.held, flush=True)"
)


@pytest.fixture
def holder():
    """A port held and offered by another process: (process, port, address of the offer)."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port, path = process.stdout.readline().split()
    yield process, int(port), path
    process.kill()
    process.communicate(timeout=10)


def test_hand_over_between_processes_leaves_the_port_with_the_taker_only(holder):
    process, port, path = holder
    sock = adopt_port(path)
    assert sock.getsockname() == ("127.0.0.1", port) and refused(port)
    sock.listen()
    assert not refused(port)
    out, _ = process.communicate("\n", timeout=10)
    assert out.strip() == "False"  # the holder's copy is closed: it holds nothing any more
    assert not refused(port)
    sock.close()
    assert refused(port)
    with pytest.raises(RuntimeError, match="is gone"):
        adopt_port(path)


def test_a_holder_that_died_is_an_error_and_its_port_is_free(holder):
    process, port, path = holder
    process.kill()
    process.wait(10)
    with pytest.raises(RuntimeError, match="the holder of the port offered at .* is gone"):
        adopt_port(path)
    hold_port("127.0.0.1", port).close()


def test_a_taker_that_dies_half_way_leaves_the_port_held():
    with hold_port() as held:
        path = held.offer(step_timeout_s=5)
        assert held.offer() == path
        half = socket.socket(socket.AF_UNIX)
        half.connect("\0" + path[1:])
        _, descriptors, _, _ = socket.recv_fds(half, 1, 1)
        os.close(descriptors[0])
        half.close()
        assert held.held and refused(held.port)
        sock = adopt_port(path)  # and the offer stands
        assert sock.getsockname()[1] == held.port
        sock.close()


def misbehaving_holder(behave):
    path = f"@test-{uuid.uuid4().hex}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + path[1:])
    listener.listen()

    def run():
        peer, _ = listener.accept()
        with peer:
            behave(peer)

    threading.Thread(target=run, daemon=True).start()
    return path, listener


def test_a_holder_that_sends_no_descriptor_or_no_acknowledgement():
    path, listener = misbehaving_holder(lambda peer: peer.sendall(b"P"))
    with listener, pytest.raises(RuntimeError, match="sent no descriptor"):
        adopt_port(path, 2)

    with bind_socket("127.0.0.1") as spare:

        def no_acknowledgement(peer):
            socket.send_fds(peer, [b"P"], [spare.fileno()])
            peer.recv(1)

        path, listener = misbehaving_holder(no_acknowledgement)
        with listener, pytest.raises(RuntimeError, match="did not acknowledge"):
            adopt_port(path, 2)

    path, listener = misbehaving_holder(lambda peer: peer.recv(1))  # silent
    with listener, pytest.raises(RuntimeError, match="sent no descriptor within 0.3 s"):
        adopt_port(path, 0.3)


def test_an_offer_ends_with_its_port():
    held = hold_port()
    path = held.offer()
    held.close()
    held.close()
    with pytest.raises(RuntimeError, match="is gone"):
        adopt_port(path)


def test_urls():
    assert base_url("::1", 80) == base_url("[::1]", 80) == "http://[::1]:80"
    assert base_url("10.0.0.1", 80, "/v1") == "http://10.0.0.1:80/v1"


def test_ipv6():
    try:
        held = hold_port("[::1]")
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with held:
        assert held.url == f"http://[::1]:{held.port}" and refused(held.port, "::1")


def test_find_free_port_is_free():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", find_free_port()))
