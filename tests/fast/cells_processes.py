"""Cells as bare processes for the tests of groups and transfers.

A `Member` gets commands over a pipe and runs them one after another in its main thread, as a cell's loop does; an abort
comes in over a second pipe that a side thread reads, as from the driver. Members are forked by a server that has
imported torch and torchft (importing them in each would cost more than all the tests); it holds no thread and no group
then. They die with that server, which dies with the test process, and `Members` kills whatever is left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from dist_utils import die_with_parent, kill_and_reap


class MemberError(RuntimeError):
    """A member raised. kind: name of the class; the text holds its traceback."""

    def __init__(self, kind: str, message: str, text: str) -> None:
        super().__init__(f"{kind}: {message}\n{text}")
        self.kind = kind
        self.message = message


class Member:
    def __init__(self, index: int, context: Any, options: dict[str, Any]) -> None:
        self.index = index
        self._pipe, theirs = context.Pipe()
        self._side, their_side = context.Pipe()
        self.process = context.Process(target=_serve, args=(index, theirs, their_side, options))
        self.process.start()
        theirs.close()
        their_side.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def start(self, what: str, **kwargs: Any) -> None:
        """Tells the member to run `do_<what>`; `result` picks up what came of it."""
        self._pipe.send((what, kwargs))

    def result(self, timeout: float = 60.0) -> Any:
        """(value, seconds it took in the member). Raises MemberError, TimeoutError, EOFError (it died)."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"member {self.index} did not answer within {timeout:g} s")
        kind, value, seconds = self._pipe.recv()
        if kind == "error":
            raise MemberError(*value)
        return value, seconds

    def abort(self, reason: str, through: int | None = None) -> None:
        self._side.send((reason, through))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        kill_and_reap([self.pid])


class Members:
    """Some members and the store they meet at."""

    def __init__(self, count: int, *, devices: list[str] | None = None, **options: Any) -> None:
        from trainer_hooks.cells.store import StoreServer

        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["trainer_hooks.cells.group", "trainer_hooks.cells.state_transfer"])
        self._options = options
        self._devices = devices
        self.store = StoreServer()
        self.quorum_id = 0
        self._all: list[Member] = []
        self.live: list[Member] = []
        for index in range(count):
            self.replace(index)

    def replace(self, index: int) -> Member:
        device = {} if self._devices is None else {"device": self._devices[index]}
        member = Member(index, self._context, {**self._options, **device})
        self._all.append(member)
        self.live = sorted([m for m in self.live if m.index != index] + [member], key=lambda m: m.index)
        return member

    def drop(self, member: Member) -> None:
        """SIGKILL, and reaped, as a fenced cell is."""
        member.kill()
        self.live = [m for m in self.live if m is not member]

    def configure(self, members: list[Member] | None = None) -> float:
        """Forms the next quorum; returns the longest time a member needed."""
        self.quorum_id += 1
        members = self.live if members is None else members
        for member in members:
            member.start("pid")
        for member in members:
            member.result(timeout=400)  # a first start imports torch, on a machine that may be busy
        for rank, member in enumerate(members):
            member.start(
                "configure", address=self.store.address, quorum_id=self.quorum_id, rank=rank, world=len(members)
            )
        return max(member.result()[1] for member in members)

    def close(self) -> None:
        for member in self._all:
            if member.process.is_alive():
                member.kill()
        self.store.close()


def _serve(index: int, pipe: Connection, side: Connection, options: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    die_with_parent(os.getppid())
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from trainer_hooks.cells.group import CrossCellGroup

    torch.set_num_threads(1)
    if "device" in options:
        options["device"] = torch.device(options["device"])
    cell = _Cell(index, CrossCellGroup("actor", **options))

    def listen() -> None:
        while True:
            try:
                reason, through = side.recv()
            except EOFError:
                return
            cell.group.abort(reason, through=through)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            what, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        began = time.monotonic()
        try:
            value = getattr(cell, f"do_{what}")(**kwargs)
            answer = ("ok", value, time.monotonic() - began)
        except BaseException as error:
            text = traceback.format_exc()
            answer = ("error", (type(error).__name__, str(error), text), time.monotonic() - began)
        pipe.send(answer)


class _Cell:
    """What a member can do."""

    def __init__(self, index: int, group: Any) -> None:
        self.index = index
        self.group = group
        self.state: Any = None

    def do_configure(self, address: str, quorum_id: int, rank: int, world: int, attempt: int = 0) -> None:
        self.group.configure(address, quorum_id, rank, world, attempt=attempt)

    def do_reduce(self, elements: int, op: str = "sum", deadline_s: float | None = None, rounds: int = 1) -> float:
        import torch

        for _ in range(rounds):
            tensor = torch.full((elements,), float(self.index + 1), device=self.group.device)
            self.group.all_reduce([tensor], op, deadline_s=deadline_s)
            if not bool((tensor == tensor[0]).all()):
                raise AssertionError("the sum differs within one tensor")
        return float(tensor[0])

    def do_reduce_many(self, seed: int) -> list[Any]:
        """Tensors of many dtypes, shapes and layouts; returns them as lists."""
        tensors = mixed_tensors(seed + self.index)
        self.group.all_reduce(tensors)
        return [tensor.double().tolist() for tensor in tensors]

    def do_reduce_shape(self, shape: list[int]) -> None:
        import torch

        self.group.all_reduce([torch.zeros(shape)])

    def do_check_equal(self, **values: int) -> None:
        self.group.check_equal(values)

    def do_make_state(self, seed: int, mib: int = 1) -> None:
        self.state = sample_state(seed, mib, self.group.device)

    def do_send(self, peer: int, chunk_bytes: int = 1 << 20, slow_s: float = 0.0) -> Any:
        from trainer_hooks.cells import state_transfer

        if slow_s:
            self._slow_down(state_transfer, slow_s)
        return state_transfer.send_state(self.group, peer, self.state, chunk_bytes=chunk_bytes)

    def do_send_damaged(self, peer: int) -> Any:
        """Flips a bit of the second chunk after its checksum was taken."""
        from trainer_hooks.cells import state_transfer

        real, seen = state_transfer.checksum, []

        def flip(chunk: Any) -> int:
            value = real(chunk)
            seen.append(value)
            if len(seen) == 2:
                chunk[5] ^= 4
            return int(value)

        state_transfer.checksum = flip
        try:
            return state_transfer.send_state(self.group, peer, self.state, chunk_bytes=1 << 18)
        finally:
            state_transfer.checksum = real

    def do_receive(self, peer: int, in_place: bool = False, seed: int = 0, mib: int = 1) -> dict[str, Any]:
        """Returns the digest of what came and how many times more than the chunks it took of memory."""
        from trainer_hooks.cells.state_transfer import receive_state

        into = sample_state(seed + 1000, mib, self.group.device) if in_place else None
        kept = into["params"]["w"] if into is not None else None
        self.state, transfer = receive_state(self.group, peer, into=into)
        same = kept is not None and kept.data_ptr() == self.state["params"]["w"].data_ptr()
        return {"nbytes": transfer.nbytes, "chunks": transfer.chunks, "digest": digest(self.state), "in_place": same}

    def do_digest(self) -> str:
        return digest(self.state)

    def do_pid(self) -> int:
        return os.getpid()

    def do_lane(self) -> dict[str, Any]:
        threads = [thread.name for thread in threading.enumerate()]
        return {"lanes": [name for name in threads if name.startswith("lane ")], "error": str(self.group.error)}

    @staticmethod
    def _slow_down(module: Any, seconds: float) -> None:
        real = module.checksum

        def slow(chunk: Any) -> int:
            time.sleep(seconds)
            return int(real(chunk))

        module.checksum = slow


def mixed_tensors(seed: int) -> list[Any]:
    import torch

    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1000, generator=draw),
        torch.randint(-50, 50, (7, 3), generator=draw),
        torch.randn(20, 30, generator=draw).t(),
        torch.zeros(0),
        torch.randn((), generator=draw),
        torch.randn(300, generator=draw).to(torch.float64)[::3],
        torch.randint(-4, 4, (33,), generator=draw).to(torch.bfloat16),
        torch.randn(5, 5, generator=draw),
    ]


def sample_state(seed: int, mib: int = 1, device: Any = "cpu") -> dict[str, Any]:
    """Parameters that share one flat buffer (on `device`), optimizer and RNG states, and what else a cell has."""
    import random

    import numpy as np
    import torch

    draw = torch.Generator().manual_seed(seed)
    flat = torch.randn(mib * (1 << 18), generator=draw).to(device)
    random.seed(seed)
    numpy_state = np.random.RandomState(seed).get_state()
    return {
        "params": {"w": flat[: 1 << 10].view(32, 32), "tied": flat[: 1 << 10].view(1024), "rest": flat[1 << 10 :]},
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(64, generator=draw), "step": torch.tensor(float(seed))}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "rng": {"torch": draw.get_state(), "python": random.getstate(), "numpy": numpy_state},
        "bf16": torch.randn(9, generator=draw).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "version": seed,
        "name": "cell",
        "loss": float("nan"),
        "flags": [True, None, b"\x00\xff"],
    }


def digest(state: Any) -> str:
    """Equal iff the states are bitwise equal, structure and aliasing of the parameters included."""
    import hashlib

    import numpy as np
    import torch

    sha = hashlib.sha256()

    def walk(value: Any) -> None:
        sha.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}{value.stride()}".encode())
            sha.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        elif isinstance(value, np.ndarray):
            sha.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        elif isinstance(value, dict):
            for key, one in value.items():
                walk(key)
                walk(one)
        elif isinstance(value, list | tuple):
            for one in value:
                walk(one)
        else:
            sha.update(repr(value).encode())

    walk(state)
    params = state["params"]
    walk(params["w"].data_ptr() == params["tied"].data_ptr())
    walk(params["rest"].untyped_storage().data_ptr() == params["w"].untyped_storage().data_ptr())
    return sha.hexdigest()


SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
