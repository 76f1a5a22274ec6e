"""The multi-process helpers themselves: results, errors, deadlines, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dist_utils import RankError, RankPool, find_free_port, kill_and_reap, loopback_store, run_ranks

pytestmark = pytest.mark.timeout(120)


def _sum_of_ranks(rank: int, world: int, offset: int) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return {"sum": value, "threads": torch.get_num_threads(), "world": dist.get_world_size()}


def _fail_on(rank: int, world: int, bad: int) -> int:
    import torch.distributed as dist

    if rank == bad:
        raise ZeroDivisionError(f"told to fail on {rank}")
    dist.barrier()
    return rank


def _hang_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        time.sleep(1000)
    return rank


def _die_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _start_a_sleeper(rank: int, world: int) -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def _gone(pid: int, within: float = 10.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_pool_returns_results_in_rank_order_until_the_first_failure_ends_it() -> None:
    with RankPool(2) as pool:
        first = pool.run(_sum_of_ranks, 10)
        second = pool.run(_sum_of_ranks, 0)
        assert [float(r["sum"]) for r in first] == [21.0, 21.0]
        assert [float(r["sum"]) for r in second] == [1.0, 1.0]
        assert [r["threads"] for r in first] == [1, 1]

        pids = pool.pids
        with pytest.raises(RankError, match=r"rank 1 of 2: (.|\n)*_fail_on(.|\n)*ZeroDivisionError: told to fail on 1"):
            pool.run(_fail_on, 1)
        assert all(_gone(pid) for pid in pids)
        with pytest.raises(RankError, match="closed"):
            pool.run(_fail_on, 5)


def test_deadline_names_the_rank_and_shows_where_it_was() -> None:
    with RankPool(1) as pool:
        assert pool.run(_hang_on, 7) == [0]  # it is up: the next deadline is not spent on imports
        pids = pool.pids
        with pytest.raises(RankError, match=r"rank 0 of 1 was not done after 1 s(.|\n)*_hang_on"):
            pool.run(_hang_on, 0, timeout=1)
    assert all(_gone(pid) for pid in pids)


def test_a_rank_that_is_killed_is_an_error_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 of 1: died with exit code -9"):
        run_ranks(_die_on, 1, 0)


def test_what_a_rank_started_is_killed_with_it() -> None:
    [sleeper] = run_ranks(_start_a_sleeper, 1)
    assert _gone(sleeper)


def test_children_die_with_a_killed_parent() -> None:
    code = "import dist_utils, time; p = dist_utils.RankPool(2); print(*p.pids, flush=True); time.sleep(1000)"
    script = f"if __name__ == '__main__':\n    {code}"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(1)  # long enough for the children to have asked for the signal; both ways out must work
        parent.kill()
        assert all(_gone(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait(timeout=10)


def test_only_module_level_functions_and_positive_worlds() -> None:
    with pytest.raises(ValueError, match="world must be >= 1, got 0"):
        RankPool(0)
    with RankPool(1) as pool, pytest.raises(ValueError, match="must pickle"):
        pool.run(lambda rank, world: rank)


def test_find_free_port_is_free_on_loopback() -> None:
    port = find_free_port()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_loopback_store_is_not_reachable_from_other_addresses() -> None:
    from torch.distributed import TCPStore

    server = loopback_store()
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    client.set("key", "value")
    assert server.get("key") == b"value"
    with socket.socket() as other:
        other.settimeout(5)
        # 127.0.0.2 is this machine as well: a store bound to all interfaces would accept.
        assert other.connect_ex(("127.0.0.2", server.port)) != 0


def test_kill_and_reap_leaves_nothing() -> None:
    sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    kill_and_reap([sleeper.pid])
    assert not Path(f"/proc/{sleeper.pid}").exists()
