"""Collectives over cells that die: real processes, real gloo, SIGKILL and SIGSTOP in the middle of an all-reduce."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cells_processes import SIGNALS, Member, MemberError, Members, mixed_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.cells import buckets
from trainer_hooks.cells.group import Aborted, CrossCellGroup, GroupUnusable, StaleConfiguration
from trainer_hooks.cells.store import StoreServer
from trainer_hooks.cells.timeouts import CellTimeouts

pytestmark = pytest.mark.timeout(600)

#: Long enough that a test which waits for it has failed.
TIMES = CellTimeouts(collective_s=45, configure_s=20, transfer_stall_s=20)
LARGE = 1 << 20  # float32 elements: 4 MiB, 16 buckets


@pytest.fixture(scope="module")
def four() -> Iterator[Members]:
    members = Members(4, timeouts=TIMES, bucket_bytes=1 << 18)
    yield members
    members.close()


@pytest.fixture
def members(four: Members) -> Members:
    """Four live members in a fresh quorum, whoever the test before has killed."""
    alive = {member.index for member in four.live}
    for index in range(4):
        if index not in alive:
            four.replace(index)
    four.configure()
    return four


def each(members: list[Member], what: str, **kwargs: Any) -> list[Any]:
    for member in members:
        member.start(what, **kwargs)
    return [member.result()[0] for member in members]


def failures(members: list[Member], timeout: float = 60.0) -> list[MemberError]:
    """Every member must fail; returns how."""
    found = []
    for member in members:
        with pytest.raises(MemberError) as error:
            member.result(timeout)
        found.append(error.value)
    return found


def test_sums_over_many_buckets(members: Members) -> None:
    assert each(members.live, "reduce", elements=LARGE) == [10.0] * 4
    assert each(members.live, "reduce", elements=3, op="max") == [4.0] * 4
    assert each(members.live, "reduce", elements=3, op="min") == [1.0] * 4


def test_every_dtype_shape_and_layout_bitwise_equal_everywhere(members: Members) -> None:
    results = each(members.live, "reduce_many", seed=7)
    assert all(result == results[0] for result in results[1:])
    parts = [mixed_tensors(7 + index) for index in range(4)]
    for got, tensors in zip(results[0], zip(*parts, strict=True), strict=True):
        expected = sum(tensor.double() for tensor in tensors)
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)


def test_disagreement_names_the_values_and_leaves_the_group_usable(members: Members) -> None:
    for member in members.live:
        member.start("check_equal", global_batch_size=16 if member.index else 12, rollout_id=-3)
    for error in failures(members.live):
        assert error.kind == "Disagreement"
        assert "global_batch_size is" in error.message and "12 to 16 over all cells" in error.message
        assert "rollout_id" not in error.message
    assert each(members.live, "check_equal", tokens=1 << 62, sign=-(1 << 63)) == [None] * 4
    for member in members.live:
        member.start("reduce_shape", shape=[2, 3] if member.index == 1 else [3, 2])
    assert {error.kind for error in failures(members.live)} == {"Disagreement"}
    assert each(members.live, "reduce", elements=5) == [10.0] * 4


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_lost_in_the_middle_frees_all_others_at_once(members: Members, how: str, victim: int) -> None:
    """The driver aborts the survivors from a side thread; a stopped member is not even fenced yet. Then the survivors
    form the next quorum and reduce."""
    lost = members.live[victim]
    survivors = [member for member in members.live if member is not lost]
    for member in members.live:
        member.start("reduce", elements=4 * LARGE, rounds=10_000)
    time.sleep(0.5)
    lost.signal(SIGNALS[how])
    time.sleep(0.2)
    began = time.monotonic()
    for member in survivors:
        member.abort(f"cell {victim} is dead", through=members.quorum_id)
    errors = failures(survivors, timeout=20)
    took = time.monotonic() - began
    assert took < 5, f"survivors needed {took:.1f} s; the collective's deadline is {TIMES.collective_s:g} s"
    assert {error.kind for error in errors} <= {"Aborted", "PeerLost"}
    if how == "SIGSTOP":
        assert {error.kind for error in errors} == {"Aborted"}, "a stopped process closes nothing"
    for member in survivors:
        member.start("reduce", elements=4)
    assert {error.kind for error in failures(survivors)} <= {"Aborted", "PeerLost"}, "unusable until the next quorum"
    # The next quorum is formed while the stopped process is still there.
    members.configure(survivors)
    expected = 10.0 - (victim + 1)
    assert each(survivors, "reduce", elements=LARGE) == [expected] * 3
    members.drop(lost)
    assert each(survivors, "reduce", elements=LARGE) == [expected] * 3


def test_without_an_abort_a_killed_member_frees_the_others_too(members: Members) -> None:
    """Each survivor that fails closes its connections, so that the failure travels round the ring."""
    for member in members.live:
        member.start("reduce", elements=4 * LARGE, rounds=10_000)
    time.sleep(0.5)
    lost = members.live[1]
    members.drop(lost)
    began = time.monotonic()
    errors = failures(members.live, timeout=30)
    assert time.monotonic() - began < 10
    assert {error.kind for error in errors} == {"PeerLost"}
    assert all("quorum" in error.message and "all-reduce" in error.message for error in errors)


def test_what_was_left_behind_ends(members: Members) -> None:
    """A short deadline: the waiting call ends in time, and the thread that gloo holds ends a little later."""
    lost, *survivors = members.live
    lost.signal(signal.SIGSTOP)
    for member in survivors:
        member.start("reduce", elements=LARGE, deadline_s=1.0)
    errors = failures(survivors, timeout=20)
    assert {error.kind for error in errors} == {"DeadlinePassed"}
    assert all("1 s" in error.message for error in errors)
    members.drop(lost)
    members.configure(survivors)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        lanes = [state["lanes"] for state in each(survivors, "lane")]
        if all(len(one) == 1 for one in lanes):
            break
        time.sleep(0.5)
    assert all(len(one) == 1 for one in lanes), f"lanes of dead groups are still there: {lanes}"
    assert each(survivors, "reduce", elements=10) == [9.0] * 3


def test_a_continued_member_is_alone_in_its_old_quorum(members: Members) -> None:
    """F09: what was stopped, declared dead and then continued (before its SIGKILL) reaches nobody."""
    lost = members.live[3]
    survivors = members.live[:3]
    lost.signal(signal.SIGSTOP)
    members.configure(survivors)
    lost.start("reduce", elements=100, deadline_s=2.0)
    lost.signal(signal.SIGCONT)
    assert each(survivors, "reduce", elements=LARGE) == [6.0] * 3
    (error,) = failures([lost], timeout=20)
    assert error.kind in ("DeadlinePassed", "PeerLost")
    members.drop(lost)


def test_a_member_that_never_comes_ends_the_forming(members: Members) -> None:
    """Aborted by the driver, long before the deadline of forming a group."""
    members.quorum_id += 1
    present = members.live[:3]
    for rank, member in enumerate(present):
        member.start("configure", address=members.store.address, quorum_id=members.quorum_id, rank=rank, world=4)
    time.sleep(0.5)
    began = time.monotonic()
    for member in present:
        member.abort("cell 3 died while the group was formed", through=members.quorum_id)
    assert {error.kind for error in failures(present, timeout=20)} == {"Aborted"}
    assert time.monotonic() - began < 5
    members.configure()
    assert each(members.live, "reduce", elements=10) == [10.0] * 4


def test_an_abort_that_comes_before_its_quorum_is_formed_holds(members: Members) -> None:
    member = members.live[0]
    member.abort("cell 1 died", through=members.quorum_id + 1)
    time.sleep(0.3)
    member.start("configure", address=members.store.address, quorum_id=members.quorum_id + 1, rank=0, world=4)
    (error,) = failures([member])
    assert error.kind == "StaleConfiguration" and "aborted before" in error.message
    members.quorum_id += 1
    members.configure()
    member.abort("old news", through=members.quorum_id - 1)
    time.sleep(0.3)
    assert each(members.live, "reduce", elements=10) == [10.0] * 4, "an abort of an older quorum touches nothing"


def test_the_same_quorum_can_be_formed_again_as_a_new_attempt(members: Members) -> None:
    address, quorum_id = members.store.address, members.quorum_id
    for rank, member in enumerate(members.live):
        member.start("configure", address=address, quorum_id=quorum_id, rank=rank, world=4)
    assert {error.kind for error in failures(members.live)} == {"StaleConfiguration"}
    for rank, member in enumerate(members.live):
        member.start("configure", address=address, quorum_id=quorum_id, rank=rank, world=4, attempt=1)
    for member in members.live:
        member.result()
    assert each(members.live, "reduce", elements=10) == [10.0] * 4


def test_shrink_to_one_and_grow_again(members: Members) -> None:
    first = members.live[0]
    members.configure([first])
    assert each([first], "reduce", elements=10) == [1.0]
    first.start("check_equal", tokens=1)
    assert first.result()[0] is None
    members.configure()
    assert each(members.live, "reduce", elements=10) == [10.0] * 4


def test_a_group_alone_needs_nobody_and_can_be_aborted() -> None:
    group = CrossCellGroup("actor")
    with pytest.raises(GroupUnusable, match="no quorum"):
        group.all_reduce([torch.ones(2)])
    group.configure("nowhere:1", 1, 0, 1)
    tensor = torch.arange(3.0)
    group.all_reduce([tensor])
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    group.abort("the driver says so")
    with pytest.raises(Aborted, match="driver says so"):
        group.all_reduce([tensor])
    with pytest.raises(StaleConfiguration, match="not newer"):
        group.configure("nowhere:1", 1, 0, 1)
    group.configure("nowhere:1", 2, 0, 1)
    group.all_reduce([tensor])
    with pytest.raises(ValueError, match="no peer"):
        group.post_send(tensor, 1)
    group.close()
    group.close()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="'mpi'"):
        CrossCellGroup("actor", backend="mpi")
    with pytest.raises(ValueError, match="nccl.*None"):
        CrossCellGroup("actor", backend="nccl")
    group = CrossCellGroup("actor")
    with pytest.raises(ValueError, match="rank 2.*world 2"):
        group.configure("x:1", 1, 2, 2)
    group.configure("x:1", 1, 0, 1)
    with pytest.raises(ValueError, match="'avg'"):
        group.all_reduce([torch.ones(1)], "avg")
    with pytest.raises(TypeError, match="tensor 1.*bool"):
        group.all_reduce([torch.ones(1), torch.ones(1, dtype=torch.bool)])


def test_the_store_listens_on_one_address_only() -> None:
    with StoreServer() as server:
        assert server.address.startswith("127.0.0.1:")
        server.store.set("key", "value")
        port = int(server.address.rsplit(":", 1)[1])
        listening = _listeners(os.getpid())
        assert ("127.0.0.1", port) in listening and ("0.0.0.0", port) not in listening
    with pytest.raises(ValueError, match="every interface"):
        StoreServer("0.0.0.0")
    with pytest.raises(RuntimeError, match="closed"):
        _ = server.store


def test_members_listen_on_loopback_only(members: Members) -> None:
    for member in members.live:
        assert {address for address, _ in _listeners(member.pid)} <= {"127.0.0.1"}


def _listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that the process listens on, from /proc."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            octets = bytes.fromhex(address)[::-1]
            found.add((".".join(map(str, octets)), int(port, 16)))
    return found


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 90), st.sampled_from([torch.float32, torch.int64, torch.bfloat16])), max_size=8
    ),
    room=st.sampled_from([16, 64, 160, 4096]),
)
@settings(max_examples=80, deadline=None)
def test_buckets_hold_everything_once(sizes: list[tuple[int, torch.dtype]], room: int) -> None:
    tensors = [torch.arange(size).to(dtype) for size, dtype in sizes]
    back = [torch.full_like(tensor, -1) for tensor in tensors]
    storage = torch.empty(room, dtype=torch.uint8)
    covered = [0] * len(tensors)
    for pieces in buckets.plan(tensors, room):
        assert {tensors[piece.tensor].dtype for piece in pieces} == {tensors[pieces[0].tensor].dtype}
        assert pieces[0].at == 0 and all(a.until == b.at for a, b in zip(pieces, pieces[1:], strict=False))
        for piece in pieces:
            covered[piece.tensor] += piece.end - piece.begin
        buckets.empty(buckets.fill(storage, pieces, tensors), pieces, back)
    assert covered == [tensor.numel() for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
