"""A heal gives a rank everything its next step depends on: before the first step and later, for every optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_utils import RankPool
from test_training_rank import _batch, _trainer


def _healed_goes_on_as_its_source(
    rank: int, world: int, checkpoint: str, dtype: str, distributed: bool, steps: int
) -> list[list[str]]:
    """Checksums of source and healed rank after one more step each; the state travels as a heal sends it."""
    from trainer_hooks.cells import state_tree
    from trainer_hooks.training.spec import OptimizerSpec

    def build() -> Any:
        spec = OptimizerSpec(lr=1e-3, lr_decay_style="linear", lr_decay_steps=20, use_distributed_optimizer=distributed)
        return _trainer(checkpoint, optimizer=spec, dtype=dtype)

    def step(trainer: Any) -> None:
        trainer.forward_backward(_batch(4, per_token=False))
        trainer.step()

    source = build()
    for _ in range(steps):
        step(source)
    packed = state_tree.pack(source.state())
    state = state_tree.unpack(packed.header, [s.clone() for s in packed.storages])
    healed = build()
    if steps == 0:
        step(healed)  # it may have been anywhere before
    healed.load_state(state)
    sums = [[source.checksum(), healed.checksum()]]
    for _ in range(2):
        step(source)
        step(healed)
        sums.append([source.checksum(), healed.checksum()])
    return sums + [[str(source.learning_rate), str(healed.learning_rate)]]


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("dtype", "steps"), [("float32", 0), ("float32", 2), ("bfloat16", 2)])
def test_a_healed_rank_goes_on_bitwise(
    one_rank: RankPool, checkpoints: dict[str, Path], dtype: str, steps: int, distributed: bool
) -> None:
    (sums,) = one_rank.run(_healed_goes_on_as_its_source, str(checkpoints["qwen3"]), dtype, distributed, steps)
    assert len({a for a, _ in sums}) == len(sums), "the steps changed the weights"
    assert [a for a, _ in sums] == [b for _, b in sums]
