"""Values on their way from critic cells to whoever trains on them: through the object store, by sample, kept outside
every cell.

A critic cell puts its values into the object store and names the objects. `FrozenColumns`, an actor outside every cell,
makes advantages and returns of them, once for the whole rollout, and puts one object a sample. It owns those objects,
so they survive any cell; the driver only ever holds their names, and a rank fetches those of its own samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_hooks.training.ppo import PpoOptions

#: Column of references, one a sample, to {column: [R]}.
COLUMN = "frozen"


class ValuesLost(RuntimeError):
    """A cell died before its values were taken over: compute them again with the cells that are left."""


class FrozenColumns:
    """Ray actor. timeout_s: for fetching the values of one cell."""

    def __init__(self, timeout_s: float) -> None:
        import torch

        torch.set_num_threads(1)
        self.timeout_s = timeout_s

    def freeze(
        self, data: Mapping[str, Any], parts: Sequence[Any], options: PpoOptions
    ) -> tuple[list[Any], dict[str, float]]:
        """References to the columns of each sample, in the order of `data`, and the rollout's metrics.

        data: see `freeze_columns`, and `sample_indices`. parts: references to {sample index: values}, one a cell.
        Raises ValuesLost; ValueError naming samples that are missing or there twice.
        """
        import ray

        from trainer_hooks.training.ppo import freeze_columns

        try:
            found = ray.get(list(parts), timeout=self.timeout_s)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            raise ValuesLost(str(error).splitlines()[0]) from None
        rows, metrics = freeze_columns(data, by_sample(data["sample_indices"], found), options)
        return [ray.put(row) for row in rows], metrics


def by_sample(indices: Sequence[Any], parts: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """The values of each sample, from the parts of all cells. Raises ValueError if they are not each there once."""
    merged: dict[Any, Any] = {}
    for part in parts:
        if twice := sorted(merged.keys() & part.keys()):
            raise ValueError(f"two critic cells gave values of the samples {twice[:8]}")
        merged.update(part)
    if missing := [i for i in indices if i not in merged]:
        raise ValueError(f"no critic cell gave values of the samples {missing[:8]}")
    return [merged[i] for i in indices]


def put_values(indices: Sequence[Any], values: Sequence[Any]) -> Any:
    """Put a cell's values into the object store: a reference to {sample index: [R]}."""
    import ray

    return ray.put({index: value.numpy() for index, value in zip(indices, values, strict=True)})


def fetched(shard: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
    """The shard with its frozen columns in place of their references (itself if it has none).

    Raises TimeoutError, and what Ray raises for an object that is gone.
    """
    if COLUMN not in shard:
        return shard
    import numpy as np
    import ray

    from trainer_hooks.training.ppo import FROZEN

    try:
        rows = ray.get(list(shard[COLUMN]), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"frozen columns of {len(shard[COLUMN])} samples did not come in {timeout_s} s") from error
    rest = {name: value for name, value in shard.items() if name != COLUMN}
    return rest | {name: [np.array(row[name]) for row in rows] for name in FROZEN}
