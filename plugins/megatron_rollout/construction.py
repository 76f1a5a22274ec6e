"""A generation object's options and constructor arguments, checked together: every violation in one error.

The rules of the options themselves are in `config.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_rollout.config import ConfigError, EngineConfig, LayoutConfig, RolloutConfig, Timeouts

_NESTED: dict[str, type] = {
    "layout": LayoutConfig,
    "train_layout": LayoutConfig,
    "engine": EngineConfig,
    "timeouts": Timeouts,
}
_COUNTS = ("rollout_num_gpus", "num_rollout_cells", "trainer_num_ranks")


def build_rollout_config(
    options: Mapping[str, Any],
    *,
    cluster: object | None = None,
    policy: object | None = None,
    processor: object | None = None,
    reserved_http_server_ports: Mapping[int, int] | None = None,
) -> RolloutConfig:
    """The checked configuration of a generation object: its options and the arguments of its constructor together.

    options: fields of `RolloutConfig`; `layout`, `train_layout`, `engine` and `timeouts` may be mappings of theirs.
    cluster / policy: the cluster of dedicated rollout cells, or the training side that generation shares; exactly one.
    reserved_http_server_ports: {rollout rank of a leader: port}, dedicated cells only.
    Raises ConfigError with every violation at once, unknown options included.
    """
    problems: list[str] = []
    if (cluster is None) == (policy is None):
        problems.append(f"exactly one of cluster and policy must be given, got {'none' if cluster is None else 'both'}")
    if policy is not None and options.get("skip_weight_load"):
        problems.append("skip_weight_load goes with cluster, not with policy: the policy has its weights")
    if policy is not None and reserved_http_server_ports is not None:
        problems.append("reserved_http_server_ports go with cluster, not with policy")
    if policy is not None and not options.get("colocate"):
        problems.append("policy means generation in the trainer's processes: colocate must be set, it is not")
    if cluster is not None and options.get("colocate"):
        problems.append("cluster means rollout cells of their own: colocate must not be set, it is")
    if processor is not None:
        problems.append("processor: vision-language models are not supported")
    if reserved_http_server_ports is not None and not options.get("expose_http"):
        problems.append("reserved_http_server_ports need expose_http, which is not set")

    before = len(problems)
    values = {name: _build_nested(name, value, problems) for name, value in options.items()}
    if len(problems) > before:  # how many cells there are cannot be judged while a layout stands in
        values = {name: value for name, value in values.items() if name not in _COUNTS}
    config = _build(RolloutConfig, values, "", problems)
    if config is not None and reserved_http_server_ports is not None:
        expected, got = config.grid.frontend_ranks, sorted(reserved_http_server_ports)
        if expected != got:
            problems.append(f"reserved_http_server_ports are for ranks {got}, the leaders are ranks {expected}")
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _build_nested(name: str, value: Any, problems: list[str]) -> Any:
    """The dataclass behind a mapping; where that fails, its defaults stand in, so that the rest is checked as well."""
    kind = _NESTED.get(name)
    if kind is None or not isinstance(value, Mapping):
        return value
    return _build(kind, value, f"{name}.", problems) or kind()


def _build(kind: type, values: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """`kind(**values)` without the unknown names, or None; what is wrong is added to `problems`."""
    names = [f.name for f in fields(kind)]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {prefix}{close[0]}?)" if close else ""
            problems.append(f"unknown option {prefix}{name}{hint}")
    try:
        return kind(**{name: value for name, value in values.items() if name in names})
    except ConfigError as error:
        problems += error.problems
        return None
