"""One step through Megatron is the same number whatever the cut: cells, micro-batches, token caps, layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_utils import RankPool

TOLERANCE = 1e-5


def _batch(samples: int, *, per_token: bool) -> dict[str, Any]:
    """A batch with uneven lengths, one empty response and one sample that is all masked."""
    import random

    from megatron_rollout.sharding import normalisation
    from trainer_hooks.training.losses import loss_weights

    rng = random.Random(3)
    prompts = [rng.randint(2, 9) for _ in range(samples)]
    responses = [rng.randint(1, 12) for _ in range(samples)]
    responses[samples // 2] = 0
    masks = [[1] * n for n in responses]
    masks[-1] = [0] * responses[-1]
    data: dict[str, Any] = {
        "tokens": [[rng.randrange(120) for _ in range(p + r)] for p, r in zip(prompts, responses, strict=True)],
        "response_lengths": responses,
        "loss_masks": masks,
        "advantages": [[(-1.0) ** i * (1 + i / 10)] * n for i, n in enumerate(responses)],
        "log_probs": [[-3.0 - 0.1 * i] * n for i, n in enumerate(responses)],
        "rollout_log_probs": [[-3.0] * n for n in responses],
        "rollout_ids": list(range(samples)),
        "sample_indices": list(range(samples)),
    }
    counts = normalisation(data)
    weights = loss_weights(
        masks,
        calculate_per_token_loss=per_token,
        global_tokens=counts.num_tokens,
        global_rollouts=counts.num_rollouts,
        rollout_mask_sums=counts.rollout_mask_sums,
    )
    return data | {"weights": [w.tolist() for w in weights]}


def _trainer(checkpoint: str, *, tp: int = 1, pp: int = 1, cp: int = 1, **spec: Any) -> Any:
    from megatron.core.inference.utils import InferenceMode
    from megatron_ranks import use_layout

    from trainer_hooks.training.rank import TrainerRank
    from trainer_hooks.training.spec import OptimizerSpec, TrainSpec

    use_layout(tp, pp, cp)
    InferenceMode.unset_active()  # an engine of an earlier test in this process may have left it on
    options: dict[str, Any] = dict(temperature=0.7, optimizer=OptimizerSpec(lr=1e-3), max_sequence_length=128)
    return TrainerRank(TrainSpec(checkpoint, tp=tp, pp=pp, cp=cp, **options | spec))


def _whole_gradient(trainer: Any) -> Any:
    import torch

    return torch.cat([g.flatten().double() for g in trainer.gradients()])


def _cells_case(rank: int, world: int, checkpoint: str, samples: int, cuts: list[dict[str, Any]]) -> list[Any]:
    """Relative gradient error and loss difference of every cut against one cell with one micro-batch."""
    from argparse import Namespace
    from dataclasses import replace

    from megatron_rollout.sharding import split_train_data_by_dp

    trainer = _trainer(checkpoint)
    spec = trainer.spec
    results = []
    for per_token in (True, False):
        data = _batch(samples, per_token=per_token)
        trainer.spec = replace(spec, micro_batch_size=samples)
        loss = trainer.forward_backward(data)["loss"]
        whole = _whole_gradient(trainer)
        for cut in cuts:
            options = {k: v for k, v in cut.items() if k != "cells"}
            trainer.spec = replace(spec, **options)
            shards = split_train_data_by_dp(Namespace(balance_data=True), data, dp_size=cut["cells"])
            total, gradient = 0.0, None
            for shard in shards:
                total += trainer.forward_backward(shard)["loss"]
                part = _whole_gradient(trainer)
                gradient = part if gradient is None else gradient + part
            error = float((gradient - whole).norm() / whole.norm())
            results.append((per_token, cut, error, abs(total - loss), [len(s["tokens"]) for s in shards]))
    return results


def test_one_two_and_three_cells_take_the_same_step(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    cuts = [{"cells": n, "micro_batch_size": 2} for n in (1, 2, 3, 7)]
    (results,) = one_rank.run(_cells_case, str(checkpoints["qwen3"]), 5, cuts)
    for per_token, cut, error, difference, sizes in results:
        assert error <= TOLERANCE, (per_token, cut)
        assert difference <= TOLERANCE, (per_token, cut)
        if cut["cells"] == 7:
            assert 0 in sizes, "a cell without samples takes part"


def test_thirteen_samples_over_every_cut(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    fixed: list[dict[str, Any]] = [{"cells": c, "micro_batch_size": m} for c in (1, 2, 3, 4) for m in (1, 2, 4)]
    capped = [
        {"cells": c, "use_dynamic_batch_size": True, "max_tokens_per_gpu": cap}
        for c in (1, 2, 3, 4)
        for cap in (24, 64)
    ]
    (results,) = one_rank.run(_cells_case, str(checkpoints["qwen2"]), 13, fixed + capped)
    assert len(results) == 2 * (len(fixed) + len(capped))
    worst = max(results, key=lambda r: r[2])
    assert worst[2] <= TOLERANCE, worst
    assert max(r[3] for r in results) <= TOLERANCE


def _layout_case(rank: int, world: int, checkpoint: str, layout: dict[str, Any]) -> dict[str, Any]:
    trainer = _trainer(checkpoint, **layout)
    data = _batch(13, per_token=True)
    logprobs = [x.tolist() for x in trainer.logprobs(data)]
    metrics = trainer.forward_backward(data)
    norm = trainer.gradient_norm()
    empty = trainer.forward_backward({k: [] for k in data})
    empty_norm = trainer.gradient_norm()
    trainer.forward_backward(data)
    stepped = trainer.step()
    return {
        "logprobs": logprobs,
        "loss": metrics["loss"],
        "norm": norm,
        "empty": (empty["loss"], empty_norm),
        "after": [x.tolist() for x in trainer.logprobs(data)],
        "lr": stepped["lr"],
    }


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "micro_batch_size": 2},
        {"cp": 2},
        {"micro_batch_size": 2},  # intra-cell data parallelism
    ],
    ids=["TP2+SP", "PP2", "CP2", "DP2"],
)
def test_layouts_take_the_same_step(
    one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, Path], layout: dict[str, Any]
) -> None:
    checkpoint = str(checkpoints["qwen3"])
    (alone,) = one_rank.run(_layout_case, checkpoint, {})
    for result in two_ranks.run(_layout_case, checkpoint, layout):
        for name in ("logprobs", "after"):
            pairs = [(a, b) for x, y in zip(alone[name], result[name], strict=True) for a, b in zip(x, y, strict=True)]
            assert max(abs(a - b) for a, b in pairs) <= 1e-4, name
        assert result["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
        assert result["norm"] == pytest.approx(alone["norm"], rel=TOLERANCE)
        assert result["empty"] == (0.0, 0.0)
        assert result["lr"] == alone["lr"]
    assert any(
        a != b for x, y in zip(alone["logprobs"], alone["after"], strict=True) for a, b in zip(x, y, strict=True)
    )


def _rollout_against_training(rank: int, world: int, checkpoint: str) -> float:
    """Worst difference between the rollout's logprobs and those that training recomputes."""
    from dataclasses import replace

    from megatron_ranks import build_rank, drain
    from tiny_models import random_prompts

    from megatron_rollout.requests import GenerationRequest, SamplingParams

    rollout = build_rank(checkpoint)
    rollout.engine.suspend()  # the trainer comes first; `resume` wakes it
    trainer = _trainer(checkpoint)
    spec = trainer.spec
    worst = 0.0
    for temperature in (0.6, 1.0, 1.3, 0.0):
        rollout.engine.resume()
        for i, prompt in enumerate(random_prompts(8)):
            sampling = SamplingParams(temperature=temperature, max_new_tokens=12, seed=i)
            rollout.engine.add(GenerationRequest(str(i), tuple(prompt), sampling))
        outputs = list(drain(rollout.engine).values())
        rollout.engine.suspend()
        trainer.spec = replace(spec, temperature=temperature)
        shard = {
            "tokens": [[*o.prompt_ids, *o.output_ids] for o in outputs],
            "response_lengths": [len(o.output_ids) for o in outputs],
        }
        for output, recomputed in zip(outputs, trainer.logprobs(shard), strict=True):
            worst = max(worst, *(abs(a - b) for a, b in zip(output.logprobs, recomputed.tolist(), strict=True)))
    return worst


def test_training_recomputes_the_rollouts_logprobs(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    (worst,) = one_rank.run(_rollout_against_training, str(checkpoints["qwen3"]))
    assert worst <= 1e-4


def _resume_case(rank: int, world: int, checkpoint: str) -> tuple[list[float], list[float]]:
    import io

    import torch

    trainer = _trainer(checkpoint)
    data = _batch(5, per_token=False)

    def steps(t: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(t.forward_backward(data)["loss"])
            losses.append(t.step()["grad_norm"])
        return losses

    steps(trainer, 2)
    file = io.BytesIO()
    torch.save(trainer.state(), file)
    uninterrupted = steps(trainer, 3)
    file.seek(0)
    other = _trainer(checkpoint)
    other.load_state(torch.load(file, weights_only=False))
    return uninterrupted, steps(other, 3)


def test_a_resumed_trainer_goes_on_bitwise(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    ((uninterrupted, resumed),) = one_rank.run(_resume_case, str(checkpoints["qwen3-tied"]))
    assert uninterrupted == resumed
    assert len(set(uninterrupted)) > 2


def _hf_case(rank: int, world: int, checkpoint: str, directory: str, layout: dict[str, Any]) -> dict[str, str]:
    trainer = _trainer(checkpoint, **layout)
    trainer.save_hf(directory)
    return trainer.checksums()


@pytest.mark.parametrize(("family", "layout"), [("qwen3", {"tp": 2}), ("qwen3-tied", {"pp": 2}), ("qwen2", {"tp": 2})])
def test_save_hf_gives_back_what_was_loaded(
    two_ranks: RankPool, checkpoints: dict[str, Path], tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    import torch
    from tiny_models import load_reference

    target = tmp_path / "saved"
    first, second = two_ranks.run(_hf_case, str(checkpoints[family]), str(target), layout)
    assert first == second
    before, after = (load_reference(d).state_dict() for d in (checkpoints[family], target))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not list(tmp_path.glob("*.partial"))
