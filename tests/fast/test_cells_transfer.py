"""Moving a cell's state to another cell: bitwise, without pickle, in bounded memory, and when a side dies midway."""

from __future__ import annotations

import io
import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cells_processes import MemberError, Members, digest, sample_state
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.cells import state_tree
from trainer_hooks.cells.group import CrossCellGroup
from trainer_hooks.cells.state_transfer import positional_sum, send_state
from trainer_hooks.cells.state_tree import StateError
from trainer_hooks.cells.timeouts import CellTimeouts

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def three() -> Iterator[Members]:
    members = Members(3, timeouts=CellTimeouts(configure_s=20, transfer_stall_s=3))
    yield members
    members.close()


@pytest.fixture
def members(three: Members) -> Members:
    """Members 0 and 1 hold the state of seed 5; member 2 is to be healed."""
    alive = {member.index for member in three.live}
    for index in range(3):
        if index not in alive:
            three.replace(index)
    three.configure()
    for member in three.live[:2]:
        member.start("make_state", seed=5, mib=4)
        member.result()
    return three


EXPECTED = digest(sample_state(5, 4))


def failure(member: Any, timeout: float = 60.0) -> MemberError:
    with pytest.raises(MemberError) as error:
        member.result(timeout)
    return error.value


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 100_003, 1 << 30])
def test_a_state_arrives_bitwise(members: Members, chunk_bytes: int) -> None:
    members.live[1].start("send", peer=2, chunk_bytes=chunk_bytes)
    members.live[2].start("receive", peer=1)
    sent, _ = members.live[1].result()
    got, _ = members.live[2].result()
    assert got["digest"] == EXPECTED
    # The flat buffer once, although three tensors view it; the rest is small.
    assert 4 << 20 <= got["nbytes"] == sent.nbytes < (4 << 20) + 20_000
    assert got["chunks"] == sent.chunks == -(-sent.nbytes // chunk_bytes)


def test_a_state_is_received_over_an_existing_one(members: Members) -> None:
    members.live[0].start("send", peer=2)
    members.live[2].start("receive", peer=0, in_place=True, seed=5, mib=4)
    members.live[0].result()
    got, _ = members.live[2].result()
    assert got["digest"] == EXPECTED and got["in_place"]


def test_what_does_not_fit_is_refused_and_the_source_is_told(members: Members) -> None:
    source, _, healing = members.live
    source.start("send", peer=2)
    healing.start("receive", peer=0, in_place=True, seed=5, mib=2)
    misfit = failure(healing)
    assert misfit.kind == "StateError" and "state['params']['rest']" in misfit.message and "arrives" in misfit.message
    assert failure(source).kind in ("PeerLost", "DeadlinePassed")
    source.start("digest")
    assert source.result()[0] == EXPECTED, "the source is as before"
    members.configure()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_source_that_dies_midway_is_replaced_by_another(members: Members, how: str) -> None:
    source, other, healing = members.live
    # 17 chunks of 256 KiB, each held back: the transfer takes seconds, and the source dies in the middle of it.
    source.start("send", peer=2, chunk_bytes=1 << 18, slow_s=0.2)
    healing.start("receive", peer=0)
    time.sleep(1.0)
    source.signal(9 if how == "kill" else 19)
    began = time.monotonic()
    if how == "kill":
        members.drop(source)
    error = failure(healing, timeout=20)
    assert error.kind == ("PeerLost" if how == "kill" else "DeadlinePassed")
    assert time.monotonic() - began < 8, "3 s of silence are the limit"
    if how == "stop":
        members.drop(source)
    members.configure()
    other.start("send", peer=1)
    healing.start("receive", peer=0)
    other.result()
    assert healing.result()[0]["digest"] == EXPECTED


def test_a_healing_cell_that_dies_midway_leaves_its_source_alone(members: Members) -> None:
    source, other, healing = members.live
    source.start("send", peer=2, chunk_bytes=1 << 18, slow_s=0.2)
    healing.start("receive", peer=0)
    time.sleep(1.0)
    members.drop(healing)
    assert failure(source, timeout=20).kind == "PeerLost"
    members.configure()
    source.start("digest")
    assert source.result()[0] == EXPECTED
    for member in (source, other):
        member.start("reduce", elements=10)
    assert [member.result()[0] for member in (source, other)] == [3.0, 3.0]
    members.drop(source)  # it was slowed down


def test_a_damaged_chunk_is_found_on_both_sides(members: Members) -> None:
    source, _, healing = members.live
    source.start("send_damaged", peer=2)
    healing.start("receive", peer=0)
    assert failure(source).kind == "TransferCorrupt"
    error = failure(healing)
    assert error.kind == "TransferCorrupt" and "chunks [1]" in error.message
    # The group is intact; the next transfer may use it.
    source.start("send", peer=2)
    healing.start("receive", peer=0)
    source.result()
    assert healing.result()[0]["digest"] != digest(sample_state(6, 4))


def test_an_abort_ends_a_transfer(members: Members) -> None:
    source, _, healing = members.live
    source.start("send", peer=2, chunk_bytes=1 << 18, slow_s=0.2)
    healing.start("receive", peer=0)
    time.sleep(0.6)
    for member in (source, healing):
        member.abort("cell 1 died", through=members.quorum_id)
    assert failure(source, 20).kind == "Aborted" and failure(healing, 20).kind == "Aborted"
    members.drop(source)


def roundtrip(state: Any) -> Any:
    packed = state_tree.pack(state)
    header = json.loads(json.dumps(packed.header))
    storages = state_tree.allocate(header, torch.device("cpu"))
    for mine, theirs in zip(storages, packed.storages, strict=True):
        mine.copy_(theirs)
    return state_tree.unpack(header, storages)


def test_everything_a_cell_has_travels_through_json() -> None:
    state = sample_state(3)
    again = roundtrip(state)
    assert digest(again) == digest(state)
    more = {
        "ordered": OrderedDict(b=1, a=2),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": np.float32(1.5),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::2],
        "no array": np.zeros((0, 2)),
        "extra": io.BytesIO(b"\x01\x02"),
        7: (1, (2.5, None)),
        True: float("-inf"),
    }
    back = roundtrip(more)
    assert list(back["ordered"].items()) == [("b", 1), ("a", 2)]
    assert back["size"] == torch.Size([2, 3]) and back["dtype"] is torch.bfloat16
    assert type(back["parameter"]) is torch.Tensor and not back["parameter"].requires_grad
    assert type(back["scalar"]) is np.float32 and back["scalar"] == 1.5
    assert back["array"].tolist() == [[0, 2], [3, 5]] and back["array"].dtype == np.uint32
    assert back["no array"].shape == (0, 2) and back["extra"].getvalue() == b"\x01\x02"
    assert back[7] == (1, (2.5, None)) and back[True] == float("-inf")


def test_each_storage_travels_once_and_only_what_is_used_of_it() -> None:
    flat = torch.arange(10_000.0)
    packed = state_tree.pack([flat[100:200], flat[150:300].view(10, 15), flat[100:200:3]])
    assert len(packed.storages) == 1
    assert packed.nbytes <= 200 * 4 + 16, "elements 100 to 300, not ten thousand"
    copies = state_tree.pack([flat[:10].clone(), flat[:10].clone()])
    assert len(copies.storages) == 2


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_views_of_any_dtype_arrive(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.uint8])
    )
    base = torch.arange(200).to(dtype)
    state = []
    for _ in range(draw(st.integers(1, 5))):
        begin = draw(st.integers(0, 199))
        view = base[begin : begin + draw(st.integers(0, 60)) : draw(st.integers(1, 4))]
        if view.numel() % 2 == 0:
            view = view.view(dtype).unflatten(0, (2, -1)).t() if view.numel() else view
        state.append(view)
    again = roundtrip(state)
    for mine, theirs in zip(again, state, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)
        if mine.numel():
            assert mine.stride() == theirs.stride()
    overlap = [i for i, view in enumerate(state) if view.numel()]
    for i in overlap:
        mine, theirs = again[i], state[i]
        first = overlap[0]
        apart = theirs.data_ptr() - state[first].data_ptr()
        assert mine.data_ptr() - again[first].data_ptr() == apart, "what shared a storage shares it again"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, object()]}, r"state\['a'\]\[1\]: a builtins.object"),
        ({"f": len}, r"state\['f'\]"),
        ({(1, 2): 3}, r"state: dict key \(1, 2\)"),
        ({"s": torch.eye(2).to_sparse()}, r"state\['s'\]: a Tensor \(torch.sparse_coo\)"),
        ({"o": np.array([None])}, r"state\['o'\]: a numpy array of Python objects"),
        ({"m": torch.empty(2, device="meta")}, r"state\['m'\]"),
        ({"c": torch.ones(2, dtype=torch.complex64).conj()}, r"state\['c'\]"),
    ],
)
def test_what_cannot_travel_is_named(state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        state_tree.pack(state)


def test_a_misfit_names_the_first_tensor_that_differs() -> None:
    flat = torch.zeros(8)
    ours = state_tree.pack({"a": flat[:4], "b": flat[4:]})

    def refused(state: Any, message: str) -> None:
        with pytest.raises(StateError, match=message):
            state_tree.check_fits(state_tree.pack(state).header, ours)

    state_tree.check_fits(state_tree.pack({"a": flat[:4], "b": flat[4:]}).header, ours)
    refused({"a": flat[:4], "c": flat[4:]}, r"state\['c'\] arrives where state\['b'\]")
    refused({"a": flat[:4], "b": flat[5:]}, r"state\['b'\]: float32 \[3\]")
    refused({"a": flat[:4], "b": torch.zeros(4)}, r"state\['b'\].*storage 1")
    refused({"a": flat[:4]}, "1 tensors arrive where 2")
    refused({"a": flat[:4].to(torch.int32), "b": flat[4:]}, r"state\['a'\]: int32")


def test_the_positional_sum_sees_order_and_every_byte() -> None:
    """The GPU's checksum, on the CPU: the arithmetic is the same."""
    chunk = torch.arange(256, dtype=torch.uint8)[:251].clone()
    base = positional_sum(chunk)
    for position in (0, 7, 8, 100, 247, 248, 250):
        changed = chunk.clone()
        changed[position] ^= 1
        assert positional_sum(changed) != base
    swapped = torch.cat([chunk[8:16], chunk[:8], chunk[16:]])
    assert positional_sum(swapped) != base
    assert positional_sum(torch.cat([torch.zeros(3, dtype=torch.uint8), chunk])[3:]) == base, "whatever the alignment"
    assert positional_sum(torch.zeros(0, dtype=torch.uint8)) == 0


def test_nobody_to_send_to() -> None:
    group = CrossCellGroup("actor")
    group.configure("nowhere:1", 1, 0, 1)
    with pytest.raises(ValueError, match="no peer"):
        send_state(group, 1, {})
    with pytest.raises(ValueError, match="chunk_bytes"):
        send_state(group, 1, {}, chunk_bytes=0)
