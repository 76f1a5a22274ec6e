"""The value model: one head, one convention, and the same values and gradients whatever the layout and the cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_utils import RankPool

VALUES = 1e-5  # absolute, float32
GRADIENT = 1e-5  # relative norm, float32
PACKED: dict[str, Any] = {"micro_batch_size": 4}
PADDED: dict[str, Any] = {"micro_batch_size": 4, "qkv_format": "bshd"}
DYNAMIC: dict[str, Any] = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 32}
DYNAMIC_PADDED: dict[str, Any] = DYNAMIC | {"qkv_format": "bshd"}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "CP2": {"cp": 2},
    "DP2": {},
}


def batch(samples: int = 12, *, seed: int = 3) -> dict[str, Any]:
    """Uneven lengths, one response that is masked wholly, one in the middle, one of a single token. No token 0: its row
    in these checkpoints is zero, which a norm turns into huge gradients (and transformers gives it none)."""
    import random

    rng = random.Random(seed)
    prompts = [rng.randint(2, 9) for _ in range(samples)]
    responses = [rng.randint(2, 12) for _ in range(samples)]
    prompts[1], responses[1] = 1, 1
    masks = [[1.0] * n for n in responses]
    masks[2] = [0.0] * responses[2]
    masks[3][1:2] = [0.0]
    tokens = sum(map(sum, masks))
    return {
        "tokens": [[rng.randrange(1, 120) for _ in range(p + r)] for p, r in zip(prompts, responses, strict=True)],
        "response_lengths": responses,
        "loss_masks": masks,
        "weights": [[m / tokens for m in mask] for mask in masks],
        "returns": [[rng.gauss(0, 1) for _ in range(n)] for n in responses],
        "values": [[rng.gauss(0, 0.3) for _ in range(n)] for n in responses],
        "advantages": [[rng.gauss(0, 1) for _ in range(n)] for n in responses],
        "log_probs": [[rng.gauss(-4, 1) for _ in range(n)] for n in responses],
        "sample_indices": list(range(samples)),
    }


def build(checkpoint: str, role: str = "critic", **spec: Any) -> Any:
    from megatron_ranks import use_layout

    from trainer_hooks.training.spec import OptimizerSpec, TrainSpec
    from trainer_hooks.training.value_model import build_rank

    use_layout(spec.get("tp", 1), spec.get("pp", 1), spec.get("cp", 1))
    options: dict[str, Any] = dict(optimizer=OptimizerSpec(lr=1e-3), max_sequence_length=128)
    return build_rank(TrainSpec(checkpoint, role=role, **options | spec))


def sharpened(trainer: Any) -> Any:
    """The trainer with a head that is large enough for differences to show."""
    import torch

    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name == "output_layer.weight":
                parameter.mul_(10)
    return trainer


def gradients(trainer: Any) -> Any:
    """The whole gradient of the cell in one order, whatever its layout: float64, by Hugging Face names."""
    import torch
    import torch.distributed as dist

    from megatron_rollout.engine.checkpoint import gather_shards

    mine = {}
    for name, parameter in trainer.model.named_parameters():
        for hf_name, dim, part in trainer.weight_map.hf_parts(name, parameter.main_grad):
            mine[hf_name] = gather_shards(part, dim, trainer.groups.tp).double().flatten()
    stages: list[Any] = [{} for _ in range(trainer.groups.pp.size())]
    dist.all_gather_object(stages, mine, group=trainer.groups.pp)
    found = {name: part for stage in stages for name, part in stage.items()}
    return torch.cat([found[name] for name in sorted(found)])


def relative(a: Any, b: Any) -> float:
    return float((a - b).norm() / b.norm())


def measure(
    rank: int, world: int, checkpoint: str, layout: dict[str, Any], cuts: list[dict[str, Any]], role: str
) -> list[dict[str, Any]]:
    """What one cell computes of `batch()` under each cut: values, loss and gradient."""
    from dataclasses import replace

    trainer = build(checkpoint, role, **layout)
    objective = "policy"
    if role == "critic":
        sharpened(trainer)
        objective = "value"
    spec, results = trainer.spec, []
    for cut in cuts:
        trainer.spec = replace(spec, **cut)
        metrics = trainer.forward_backward(batch(), objective=objective)
        result = {"loss": metrics["value_loss" if role == "critic" else "loss"], "gradient": gradients(trainer)}
        if role == "critic":
            result["values"] = trainer.get_values(batch())
            result["responses"] = trainer.values(batch())
        results.append(result)
    return results


def same(found: dict[str, Any], expected: dict[str, Any], context: Any) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5), context
    assert relative(found["gradient"], expected["gradient"]) <= GRADIENT, context
    if "values" in expected:
        assert float((found["values"] - expected["values"]).abs().max()) <= VALUES, context
        for a, b in zip(found["responses"], expected["responses"], strict=True):
            assert float((a - b).abs().max()) <= VALUES, context


# --- what the values are ---------------------------------------------------------------------------------------------


def _against_transformers(rank: int, world: int, checkpoint: str) -> dict[str, Any]:
    import torch
    import transformers

    trainer = sharpened(build(checkpoint, temperature=0.3))
    reference = transformers.AutoModel.from_pretrained(checkpoint).eval()
    row = trainer.model.output_layer.weight.detach()
    data = batch()
    with torch.no_grad():
        raw = [(reference(torch.tensor([t])).last_hidden_state[0] @ row[0]) for t in data["tokens"]]
    lengths = [len(t) for t in data["tokens"]]
    padded = torch.zeros(len(lengths), max(lengths) + 3, dtype=torch.long)
    for i, tokens in enumerate(data["tokens"]):
        padded[i, : len(tokens)] = torch.tensor(tokens)
    return {
        "raw": raw,
        "lengths": lengths,
        "values": trainer.get_values({"input_ids": padded, "input_lengths": torch.tensor(lengths)}),
        "responses": trainer.values(data),
        "counts": data["response_lengths"],
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "llama"])
def test_values_are_the_state_before_each_token(one_rank: RankPool, checkpoints: dict[str, Path], family: str) -> None:
    """Against transformers' hidden states: shifted right by one, first 0, zero where padded, no temperature."""
    import torch

    (found,) = one_rank.run(_against_transformers, str(checkpoints[family]))
    values = found["values"]
    assert values.dtype == torch.float32 and values.shape == (len(found["lengths"]), max(found["lengths"]) + 3)
    assert max(float(raw.abs().max()) for raw in found["raw"]) > 0.3, "values large enough to tell differences"
    for i, (raw, length, count) in enumerate(zip(found["raw"], found["lengths"], found["counts"], strict=True)):
        expected = torch.cat([torch.zeros(1), raw[:-1]])
        assert float((values[i, :length] - expected).abs().max()) <= VALUES, i
        assert not values[i, length:].any(), i
        assert torch.equal(found["responses"][i], values[i, length - count : length]), i


# --- the same whatever the layout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(TWO_RANKS))
def test_layouts_give_equal_values_and_gradients(
    one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, Path], layout: str
) -> None:
    cuts = [PACKED, DYNAMIC] if layout == "CP2" else [PACKED, PADDED, DYNAMIC, DYNAMIC_PADDED]
    checkpoint = str(checkpoints["qwen3-tied"])  # tied, so that untying it is tried too
    ((alone,),) = one_rank.run(measure, checkpoint, {}, [{"micro_batch_size": 12}], "critic")
    for results in two_ranks.run(measure, checkpoint, TWO_RANKS[layout], cuts, "critic"):
        for cut, found in zip(cuts, results, strict=True):
            same(found, alone, (layout, cut))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["critic", "actor"])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "cp": 2, "sequence_parallel": True},
        {"pp": 2, "cp": 2},
        {"tp": 2, "pp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True},
    ],
    ids=["TP2·CP2+SP", "PP2·CP2", "TP2·PP2+SP", "TP2·DP2+SP"],
)
def test_four_ranks_give_equal_values_and_gradients(
    one_rank: RankPool, four_ranks: RankPool, checkpoints: dict[str, Path], layout: dict[str, Any], role: str
) -> None:
    cuts = [PACKED, DYNAMIC] if "cp" in layout else [PACKED, PADDED, DYNAMIC]
    checkpoint = str(checkpoints["qwen3"])
    ((alone,),) = one_rank.run(measure, checkpoint, {}, [{"micro_batch_size": 12}], role)
    for results in four_ranks.run(measure, checkpoint, layout, cuts, role):
        for cut, found in zip(cuts, results, strict=True):
            same(found, alone, (layout, cut))


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2", "CP2"])
def test_the_policy_packed_and_padded(
    one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, Path], layout: str
) -> None:
    cuts = [PACKED, DYNAMIC] if layout == "CP2" else [PACKED, PADDED, DYNAMIC, DYNAMIC_PADDED]
    checkpoint = str(checkpoints["qwen3"])
    (alone,) = one_rank.run(measure, checkpoint, {}, [PACKED, PADDED, DYNAMIC_PADDED], "actor")
    for other in alone[1:]:
        same(other, alone[0], "padded on one rank")
    for results in two_ranks.run(measure, checkpoint, TWO_RANKS[layout], cuts, "actor"):
        for cut, found in zip(cuts, results, strict=True):
            same(found, alone[0], (layout, cut))


# --- the same whatever the cut: the schedule scales nothing ----------------------------------------------------------


def _cut_case(rank: int, world: int, checkpoint: str, layout: dict[str, Any], role: str) -> list[Any]:
    """The step as 1, 2 and 4 micro-batches of 1, 2 and 3 cells: (cut, loss, gradient), cells summed."""
    from argparse import Namespace
    from dataclasses import replace

    from megatron_rollout.sharding import split_train_data_by_dp

    trainer = build(checkpoint, role, **layout)
    objective, loss_name = ("value", "value_loss") if role == "critic" else ("policy", "loss")
    spec, data, results = trainer.spec, batch(24), []
    for cells in (1, 2, 3):
        shards = split_train_data_by_dp(Namespace(balance_data=False), data, dp_size=cells)
        for count in (1, 2, 4):
            trainer.spec = replace(spec, micro_batch_size=24 // cells // count)
            loss, total = 0.0, None
            for shard in shards:
                assert len(trainer.micro_batches(shard).packs) == count
                loss += trainer.forward_backward(shard, objective=objective)[loss_name]
                part = gradients(trainer)
                total = part if total is None else total + part
            results.append(((cells, count), loss, total))
    return results


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_one_gradient_for_every_number_of_micro_batches_context_ranks_and_cells(
    one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, Path], role: str
) -> None:
    """megatron-core would multiply by CP and divide by the number of micro-batches; the gradient must not show it, and
    the loss that is logged is the one that was differentiated."""
    checkpoint = str(checkpoints["qwen2"])
    (alone,) = one_rank.run(_cut_case, checkpoint, {}, role)
    _, loss, gradient = alone[0]
    for layout, results in ((1, alone), (2, two_ranks.run(_cut_case, checkpoint, {"cp": 2}, role)[1])):
        for cut, found_loss, found in results:
            assert relative(found, gradient) <= GRADIENT, (layout, cut)
            assert found_loss == pytest.approx(loss, rel=1e-5), (layout, cut)


def _autograd(rank: int, world: int, checkpoint: str, layout: dict[str, Any]) -> tuple[float, float, float]:
    """(logged loss, loss by plain autograd, relative difference of the gradients)"""
    import torch
    import transformers

    trainer = sharpened(build(checkpoint, value_clip=None, micro_batch_size=4, **layout))
    data = batch()
    logged = trainer.forward_backward(data, objective="value")["value_loss"]
    reference = transformers.AutoModel.from_pretrained(checkpoint)
    row = trainer.model.output_layer.weight.detach().clone().requires_grad_()
    loss = torch.zeros(())
    for tokens, returns, weights in zip(data["tokens"], data["returns"], data["weights"], strict=True):
        raw = reference(torch.tensor([tokens])).last_hidden_state[0] @ row[0]
        values = raw[len(tokens) - len(returns) - 1 : -1]
        loss = loss + 0.5 * (torch.tensor(weights) * (values - torch.tensor(returns)).square()).sum()
    loss.backward()
    found = {"score.weight": row.grad} | {f"model.{n}": p.grad for n, p in reference.named_parameters()}
    expected = torch.cat([found[name].double().flatten() for name in sorted(found)])
    return logged, float(loss), relative(gradients(trainer), expected)


@pytest.mark.parametrize("layout", [{}, {"cp": 2}], ids=["CP1", "CP2"])
def test_the_gradient_is_that_of_the_logged_loss(
    one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, Path], layout: dict[str, Any]
) -> None:
    """Against autograd through transformers: a factor on gradients that the reported loss lacks would show here."""
    pool = two_ranks if layout else one_rank
    logged, loss, difference = pool.run(_autograd, str(checkpoints["llama"]), layout)[0]
    assert logged == pytest.approx(loss, rel=1e-5)
    assert difference <= GRADIENT


# --- edges -----------------------------------------------------------------------------------------------------------


def _short_sequences(rank: int, world: int, checkpoint: str) -> dict[str, Any]:
    """Sequences of which one context-parallel rank holds padding only."""
    import torch

    trainer = build(checkpoint, cp=2)
    shards = {
        "one token": {"tokens": [[5]], "response_lengths": [0]},
        "two tokens": {"tokens": [[5, 6]], "response_lengths": [1]},
        "nothing": {"tokens": [], "response_lengths": []},
    }
    results = {}
    for name, shard in shards.items():
        lengths = shard["response_lengths"]
        columns = {c: [[0.5] * n for n in lengths] for c in ("weights", "returns", "values")}
        metrics = trainer.forward_backward({**shard, **columns}, objective="value")
        local = trainer.micro_batches(shard)
        results[name] = {
            "loss": metrics["value_loss"],
            "norm": trainer.gradient_norm(),
            "finite": all(bool(torch.isfinite(g).all()) for g in trainer.gradients()),
            "values": trainer.values(shard),
            "own tokens": int((local.targets(0) >= 0).sum()),
        }
    return results


def test_context_ranks_with_padding_only(two_ranks: RankPool, checkpoints: dict[str, Path]) -> None:
    first, second = two_ranks.run(_short_sequences, str(checkpoints["qwen3"]))
    assert sorted((first["two tokens"]["own tokens"], second["two tokens"]["own tokens"])) == [0, 1]
    for name, found in first.items():
        assert found["finite"] and second[name]["finite"], name
        assert found["loss"] == second[name]["loss"] and found["norm"] == second[name]["norm"], name
    for name in ("one token", "nothing"):
        assert first[name]["loss"] == 0.0 and first[name]["norm"] == 0.0
    assert first["two tokens"]["loss"] > 0 and first["two tokens"]["norm"] > 0
    assert [len(v) for v in first["two tokens"]["values"]] == [1] and first["nothing"]["values"] == []


def _refusals(rank: int, world: int, checkpoint: str) -> list[str]:
    import copy
    from dataclasses import replace

    import torch

    from trainer_hooks.training.value_model import build_value_model

    trainer = build(checkpoint)
    config = copy.copy(trainer.ddp.config)
    config.virtual_pipeline_model_parallel_size = 2
    tied = replace(trainer.architecture, tied_embeddings=True)
    messages = []
    for call in (
        lambda: trainer.get_values({"input_ids": torch.ones(2, 3, dtype=torch.long), "input_lengths": [3, 4]}),
        lambda: trainer.forward_backward(batch(), objective="other"),
        lambda: trainer.forward_backward({k: v for k, v in batch().items() if k != "returns"}, objective="value"),
        lambda: build(checkpoint, role="judge"),
        lambda: build(checkpoint, value_clip=-1.0).forward_backward(batch(), objective="value"),
        lambda: build_value_model(tied, config, max_sequence_length=16, seed=1),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_is_refused_names_its_cause(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    (messages,) = one_rank.run(_refusals, str(checkpoints["qwen3"]))
    expected = [
        ["input_lengths", "row 1: 4", "3"],
        ["objective", "'other'"],
        ["'returns'"],
        ["'judge'"],
        ["--value-clip", "-1"],
        ["--critic-virtual-pipeline-model-parallel-size 2", "tied"],
    ]
    assert len(messages) == len(expected)
    for message, parts in zip(messages, expected, strict=True):
        assert all(part in message for part in parts), message


# --- head, optimizer, checkpoints ------------------------------------------------------------------------------------


def _training(rank: int, world: int, checkpoint: str, directory: str, layout: dict[str, Any]) -> dict[str, Any]:
    import io

    import torch

    from trainer_hooks.training.spec import OptimizerSpec

    optimizer = OptimizerSpec(lr=1e-2, lr_warmup_steps=10, weight_decay=0.01, lr_decay_steps=20)
    trainer = build(checkpoint, optimizer=optimizer, micro_batch_size=4, **layout)
    first = trainer.checksums()
    data = batch()
    losses, rates = [], []
    for _ in range(10):
        losses.append(trainer.forward_backward(data, objective="value")["value_loss"])
        trainer.step()
        rates.append({group["lr"] for group in trainer.optimizer.param_groups})
    file = io.BytesIO()
    torch.save(trainer.state(), file)
    trainer.save_hf(directory)
    file.seek(0)
    resumed = build(checkpoint, optimizer=optimizer, micro_batch_size=4, **layout)
    resumed.load_state(torch.load(file, weights_only=False))
    trained = trainer.checksums()
    going_on = [t.forward_backward(data, objective="value")["value_loss"] for t in (trainer, resumed)]
    for t in (trainer, resumed):
        t.step()
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return {
        "losses": losses,
        "rates": rates,
        "first": first,
        "trained": trained,
        "resumed": going_on,
        "after": (trainer.checksums(), resumed.checksums()),
        "from saved": build(directory, **layout).checksums(),
        "one optimizer": len(optimized) == len(list(trainer.model.parameters())),
    }


@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=["TP2+SP", "PP2"])
def test_head_and_trunk_learn_together_and_come_back(
    two_ranks: RankPool, checkpoints: dict[str, Path], tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The value loss falls; there is one learning rate; a resumed critic goes on bitwise; an exported one is itself."""
    found = two_ranks.run(_training, str(checkpoints["qwen3-tied"]), str(tmp_path / "critic"), layout)[0]
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert all(len(rates) == 1 for rates in found["rates"]) and found["rates"][9] == {1e-2}
    assert found["rates"][4] == {5e-3} or found["rates"][4] == pytest.approx({5e-3})
    assert found["one optimizer"]
    assert found["first"].keys() == found["trained"].keys() and "score.weight" in found["first"]
    assert all(found["first"][name] != found["trained"][name] for name in found["first"])
    assert found["resumed"][0] == found["resumed"][1]
    assert found["after"][0] == found["after"][1]
    assert found["from saved"] == found["trained"]


def _heads(rank: int, world: int, checkpoint: str, layout: dict[str, Any]) -> dict[str, Any]:
    import torch

    trainer = build(checkpoint, **layout)
    head = dict(trainer.model.named_parameters()).get("output_layer.weight")
    return {
        "head": None if head is None else head.detach().clone(),
        "dtype": None if head is None else trainer.model.output_layer(torch.zeros(2, 1, 64))[0].dtype,
        "sums": trainer.checksums(),
    }


def test_the_head_is_initialised_and_never_loaded(
    one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, Path]
) -> None:
    import torch

    checkpoint = str(checkpoints["qwen3"])  # it has an lm_head of [V, H]
    (alone,) = one_rank.run(_heads, checkpoint, {})
    assert alone["head"].shape == (1, 64) and alone["dtype"] == torch.float32
    assert 0 < float(alone["head"].std()) < 0.1 / 8 * 1.5
    assert "lm_head.weight" not in alone["sums"]
    first, last = two_ranks.run(_heads, checkpoint, {"pp": 2})
    assert first["head"] is None and torch.equal(last["head"], alone["head"])
    assert first["sums"] == alone["sums"]
