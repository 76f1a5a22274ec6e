"""`--rollout-backend` and its options, for any argparse parser: the built-in trainer's, slime's, Miles'.

`add_rollout_backend_arguments(parser)` is what a host's `parse_args(add_custom_arguments=…)` gets. An option that the
host has already keeps the host's definition; its `--rollout-backend`, if there is one, gets our choices added.
"""

from __future__ import annotations

import argparse
from typing import Any

BACKENDS = ("megatron", "sglang")


def add_rollout_backend_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's options to `parser` and return it."""
    if (existing := _action(parser, "--rollout-backend")) is not None:
        existing.choices = list(dict.fromkeys([*(existing.choices or ()), *BACKENDS]))
    group = parser.add_argument_group("Megatron rollouts and independent DP cells")

    def add(name: str, **kwargs: Any) -> None:
        if _action(parser, name) is None:
            group.add_argument(name, **kwargs)

    add("--rollout-backend", choices=BACKENDS, default="sglang", help="engine that generates (default: %(default)s)")
    add("--num-trainer-cells", type=int, help="independent trainer cells (default: from the GPUs, or 1 without any)")
    add(
        "--num-rollout-cells",
        type=int,
        help="rollout cells (default: from the rollout GPUs, or as many as trainer cells)",
    )
    add("--rollout-tensor-model-parallel-size", type=int, help="TP of a rollout cell (default: the trainer's)")
    add("--rollout-pipeline-model-parallel-size", type=int, help="PP of a rollout cell (default: the trainer's)")
    add("--rollout-context-parallel-size", type=int, default=1, help="refused unless 1: generation has none")
    add("--rollout-data-parallel-size", type=int, default=1, help="refused unless 1: use more rollout cells")
    add("--balance-by", choices=("tokens", "flops"), default="tokens", help="what --balance-data evens out over cells")
    add("--balance-sizes", choices=("free", "equal"), default="free", help="whether shards may differ in sample count")
    add("--rollout-max-requests", type=int, help="samples that one engine decodes at once")
    add("--rollout-kv-cache-gb", type=float, help="KV cache of one rollout rank, in GB")
    add(
        "--rollout-kv-mode",
        choices=("persist", "offload", "recompute"),
        default="recompute",
        help="what becomes of the KV cache while weights change or training runs (default: %(default)s)",
    )
    add("--rollout-prefix-cache", action="store_true", help="share KV blocks of equal prompts; dropped at each refit")
    add("--rollout-attention-backend", choices=("auto", "flash", "triton", "torch"), default="auto")
    add("--max-failed-fraction", type=float, default=0.0, help="share of a batch that may fail before the run ends")
    add("--refit-timeout", type=float, default=120.0, help="seconds that one refit may take")
    add(
        "--deterministic", action="store_true", help="exact repetition: fixed assignment of samples, repeatable kernels"
    )
    add("--true-on-policy", action="store_true", help="rollout and training logprobs bitwise equal (one GPU, TP 1)")
    add("--on-cell-failure", choices=("continue", "wait"), default="continue", help="redo with survivors, or wait")
    add("--heartbeat-interval", type=float, default=0.5, help="seconds between two heartbeats of a cell")
    add("--heartbeat-misses", type=int, default=10, help="missed heartbeats in a row that are a death")
    add("--check-weights", action="store_true", help="checksum every cell at every version, for the audit")
    add("--max-cell-restarts", type=int, default=5, help="restarts of one cell within a window before it is given up")
    add("--control-port", type=int, help="serve the control page and API here (0: any free port; default: no server)")
    add("--control-host", default="127.0.0.1", help="address of the control server (default: %(default)s)")
    add("--enable-fault-injection", action="store_true", help="let tests and the control server break things")
    add(
        "--inject-fault",
        action="append",
        default=[],
        metavar="MOMENT:HOW:SIDE:CELL@ROLLOUT",
        help="break a cell at a named moment (needs --enable-fault-injection)",
    )
    return parser


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return parser._option_string_actions.get(name)
