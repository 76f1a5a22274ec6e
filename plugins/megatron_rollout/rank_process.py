"""The process of one rank of a `LocalCell`: `python -m megatron_rollout.rank_process`, told what to do on its stdin.

It reports once, when it is up or why it is not, and lives until its owner closes the pipe, dies, or kills it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import sys
import threading
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rollout.local_cell import RankTask


def main() -> int:
    task: RankTask = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_owner, name="owner", daemon=True).start()
    logging.basicConfig(level="WARNING")
    with os.fdopen(task.report_fd, "w") as report:
        try:
            loop = run(task)
        except Exception as error:  # the owner has to hear of it, whatever it is
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=report)
            return 1
        print(json.dumps({"up": True}), file=report)
    # The leader's loop may end before its process: its server goes on saying why it does not serve.
    if task.rank == 0:
        threading.Event().wait()
    loop.join()
    return 0


def _end_with_owner() -> None:
    """Nothing more comes on stdin: it ends when the owner closes it or is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


def run(task: RankTask) -> threading.Thread:
    """Join the cell's world, build the engine and start its step loop; on rank 0 serve HTTP too. Returns the loop."""
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from megatron_rollout import device
    from megatron_rollout.engine import parallel

    spec = task.spec
    logging.getLogger("megatron").setLevel(logging.ERROR)
    device.setup_process(threads=task.threads, deterministic=spec.engine.deterministic)
    host, port = task.store
    if task.store_fd is not None:
        store, _ = parallel.serve_store(host, task.timeout_s, listener=socket.socket(fileno=task.store_fd))
    else:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=task.timeout_s))
    parallel.init_world(store, rank=task.rank, world_size=spec.tp * spec.pp, timeout_s=task.timeout_s)
    parallel.init_megatron(tp=spec.tp, pp=spec.pp, seed=task.seed, timeout_s=task.timeout_s)

    from megatron_rollout.rollout_rank import RolloutRank
    from megatron_rollout.step_loop import StepLoop

    tokenizer: Any = AutoTokenizer.from_pretrained(spec.hf_checkpoint)
    rollout = RolloutRank(spec, tokenizer=tokenizer)
    loop = StepLoop(rollout, group=dist.group.WORLD, store=store, name=f"cell-{task.cell}")
    loop.start()
    if task.http_fd is not None:
        from megatron_rollout.frontend.app import build_app
        from megatron_rollout.frontend.leader import LeaderClient
        from megatron_rollout.frontend.server import serve

        client = LeaderClient(loop, rollout, tokenizer=tokenizer, cell=task.cell)
        serve(build_app(client, task.settings), socket.socket(fileno=task.http_fd))
    return loop


if __name__ == "__main__":
    sys.exit(main())
