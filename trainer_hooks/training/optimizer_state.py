"""What a rank's optimizer holds, as plain dicts and tensors that another rank at the same place can take over.

megatron-core's `DistributedOptimizer.state_dict` leaves out the moments and the fp32 shards (they go into a checkpoint
of another kind) and cannot be called before the first step. Between ranks of equal layout neither matters: each takes
over exactly the shard that its counterpart holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def optimizer_state(optimizer: Any) -> list[dict[str, Any]]:
    """State of every optimizer of a chain, of this rank alone. Tensors are the optimizer's own, not copies."""
    return [_one(part) for part in _parts(optimizer)]


def load_optimizer_state(optimizer: Any, state: list[Mapping[str, Any]]) -> None:
    """Take over `optimizer_state` of a rank with the same layout. Raises ValueError if the parts do not correspond."""
    parts = list(_parts(optimizer))
    if len(parts) != len(state):
        raise ValueError(f"the state holds {len(state)} optimizers, this rank has {len(parts)}")
    for part, one in zip(parts, state, strict=True):
        if not isinstance(part, DistributedOptimizer):
            part.load_state_dict(dict(one["plain"]))
            continue
        masters = _masters(part)
        if len(masters) != len(one["masters"]):
            raise ValueError(f"the state holds {len(one['masters'])} shards, this rank has {len(masters)}")
        part.optimizer.load_state_dict(one["inner"])
        with torch.no_grad():
            for mine, theirs in zip(masters, one["masters"], strict=True):
                mine.copy_(theirs)


def _one(part: Any) -> dict[str, Any]:
    if not isinstance(part, DistributedOptimizer):
        return {"plain": part.state_dict()}
    return {"inner": part.optimizer.state_dict(), "masters": [m.detach() for m in _masters(part)]}


def _masters(part: DistributedOptimizer) -> list[torch.Tensor]:
    """The shards that the inner optimizer updates (views of the parameters in fp32, fp32 copies in bf16)."""
    return [parameter for group in part.optimizer.param_groups for parameter in group["params"]]


def _parts(optimizer: Any) -> Iterator[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    yield from chained if chained is not None else [optimizer]
