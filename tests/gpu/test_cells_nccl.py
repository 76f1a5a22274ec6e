"""Cross-cell groups over NCCL: two cells on two GPUs, one of which stops in the middle. Skips itself with fewer."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fast"))

from cells_processes import SIGNALS, MemberError, Members, digest, sample_state  # noqa: E402

from trainer_hooks.cells.timeouts import CellTimeouts  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def members() -> Iterator[Members]:
    times = CellTimeouts(collective_s=60, configure_s=60, transfer_stall_s=30)
    members = Members(2, devices=["cuda:0", "cuda:1"], backend="nccl", timeouts=times)
    members.configure()
    yield members
    members.close()


def test_sums_and_transfers(members: Members) -> None:
    for member in members.live:
        member.start("reduce", elements=50_000_000)
    assert [member.result()[0] for member in members.live] == [3.0, 3.0]
    first, second = members.live
    first.start("make_state", seed=5, mib=64)
    first.result()
    expected = digest(sample_state(5, 64))
    for in_place in (False, True):
        first.start("send", peer=1)
        second.start("receive", peer=0, in_place=in_place, seed=5, mib=64)
        first.result()
        assert second.result()[0]["digest"] == expected
    members.configure()
    for member in members.live:
        member.start("check_equal", tokens=7)
    assert [member.result()[0] for member in members.live] == [None, None]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_peer_frees_the_other_at_once(members: Members, how: str) -> None:
    first, second = members.live
    for member in members.live:
        member.start("reduce", elements=50_000_000, rounds=100_000)
    time.sleep(3)
    second.signal(SIGNALS[how])
    time.sleep(0.5)
    began = time.monotonic()
    first.abort("cell 1 is dead", through=members.quorum_id)
    with pytest.raises(MemberError) as error:
        first.result(timeout=30)
    assert error.value.kind in ("Aborted", "PeerLost") and time.monotonic() - began < 5
    members.drop(second)
    members.configure([first])
    first.start("reduce", elements=10)
    assert first.result()[0] == 1.0
    members.replace(1)
    members.configure()
    for member in members.live:
        member.start("reduce", elements=10)
    assert [member.result()[0] for member in members.live] == [3.0, 3.0]
