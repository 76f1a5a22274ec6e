"""Process groups of one cell: its own `torch.distributed` world and megatron-core's groups inside it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rollout.device import collective_backend, on_gpu


def init_world(
    store: dist.Store, *, rank: int, world_size: int, timeout_s: float = 600.0, backend: str | None = None
) -> None:
    """Join the world of this cell. Every collective of it fails after `timeout_s` seconds."""
    dist.init_process_group(
        backend or collective_backend(),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def serve_store(
    host: str, timeout_s: float = 600.0, listener: socket.socket | None = None
) -> tuple[dist.TCPStore, int]:
    """A TCP store served by this process on `host` only, and its port. listener: a bound socket to take for it.

    torch's own server would listen on all interfaces; it gets a socket that is bound already instead.
    """
    if listener is None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return store, port


def cross_world_group(
    backend: str, store: dist.Store, *, name: str, rank: int, world_size: int, timeout_s: float
) -> dist.ProcessGroup:
    """A process group over ranks that have different default worlds. `name` must be new for each membership.

    torch's public constructors know only ranks of the default world; this is the way its own helpers build a group,
    with an identity map from group rank to rank.
    """
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    timeout = timedelta(seconds=timeout_s)
    group, _ = _new_process_group_helper(
        world_size, rank, [], backend, dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def init_megatron(*, tp: int = 1, pp: int = 1, cp: int = 1, seed: int = 1, timeout_s: float = 600.0) -> None:
    """megatron-core's groups over the world of this cell (data parallelism takes what TP·PP·CP leaves), and its RNG.

    Raises ValueError if TP·PP·CP does not divide the world.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    world = dist.get_world_size()
    if world % (tp * pp * cp):
        raise ValueError(f"a world of {world} ranks is not divisible by TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=on_gpu())


def second_layout(*, tp: int, pp: int, timeout_s: float = 600.0) -> Any:
    """Process groups of another layout over this world, beside megatron-core's global ones: consecutive blocks of TP·PP
    ranks, each a cell of its own (TP fastest), without data or context parallelism. Collective over the world.

    Returns this rank's `ProcessGroupCollection`; `mp` holds all ranks of its cell. Raises ValueError if TP·PP does not
    divide the world.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    world, size = dist.get_world_size(), tp * pp
    if world % size:
        raise ValueError(f"a world of {world} ranks is not divisible by TP {tp} x PP {pp} = {size}")
    cells = [list(range(first, first + size)) for first in range(0, world, size)]
    single = [[rank] for rank in range(world)]
    partitions = {
        "mp": cells,
        "tp": [cell[stage * tp : (stage + 1) * tp] for cell in cells for stage in range(pp)],
        "pp": [cell[place::tp] for cell in cells for place in range(tp)],
        "embd": [sorted({cell[place], cell[place + (pp - 1) * tp]}) for cell in cells for place in range(tp)],
        "pos_embd": [[cell[place]] for cell in cells for place in range(tp)],
        "cp": single,
    }
    mine: dict[str, Any] = {}
    for name, groups in partitions.items():
        for ranks in groups:  # every rank has to make every group
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if dist.get_rank() in ranks:
                mine[name] = group
    mine |= {name: mine["cp"] for name in ("dp", "dp_cp", "ep", "expt_dp")}
    mine |= {name: mine["tp"] for name in ("tp_cp", "expt_tp", "tp_ep")}
    return ProcessGroupCollection(**mine, tp_ep_pp=mine["mp"])
