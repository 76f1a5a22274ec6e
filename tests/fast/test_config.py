"""Configuration rules: what is refused, that everything wrong is said at once, and how layouts merge."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rollout.config import ConfigError, EngineConfig, LayoutConfig, RolloutConfig, Timeouts
from megatron_rollout.construction import build_rollout_config
from megatron_rollout.megatron_cfg import (
    dedicated_inference_megatron_cfg,
    effective_megatron_cfg,
    frontend_ranks,
    layout_of,
    merged_inference_megatron_cfg,
    nvlink_domain_span,
    validate_settings,
)

CLUSTER, POLICY = object(), object()
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
DP, EP, ETP = "data_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
TRAIN = LayoutConfig()


def problems_of(call: Any, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    assert str(error.value) == "; ".join(error.value.problems)
    return error.value.problems


# -- layout and engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({TP: 0}, "--tensor-model-parallel-size must be an integer >= 1, got 0"),
        ({PP: True}, "--pipeline-model-parallel-size must be an integer >= 1, got True"),
        ({"transformer_impl": "te"}, "--transformer-impl must be one of"),
        (
            {"transformer_impl": "inference_optimized", TP: 2},
            "inference_optimized needs --sequence-parallel with --tensor-model-parallel-size 2",
        ),
        (
            {"transformer_impl": "inference_optimized", ETP: 2, DP: 2},
            "inference_optimized takes no --expert-tensor-parallel-size above 1, got 2",
        ),
        ({EP: 3}, "ep*etp = 3*1 = 3 does not divide"),
    ],
)
def test_layout_rules(options: dict[str, Any], message: str) -> None:
    [problem] = problems_of(LayoutConfig, **options)
    assert message in problem


def test_inference_optimized_is_fine_with_sequence_parallelism() -> None:
    LayoutConfig(transformer_impl="inference_optimized", tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequence_length": 0}, "max_sequence_length must be an integer >= 1, got 0"),
        ({"buffer_size_gb": float("nan")}, "buffer_size_gb must be a finite number > 0, got nan"),
        ({"kv_cache_management_mode": "keep"}, "kv_cache_management_mode must be one of"),
        ({"attention_backend": "xformers"}, "attention_backend must be one of"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"max_tokens": 100, "max_sequence_length": 50}, "max_tokens 100 is below max_requests 256"),
        ({"max_tokens": 300, "max_requests": 8}, "max_tokens 300 is below max_sequence_length 4096"),
        ({"cuda_graph_impl": "none"}, "cuda_graph_impl 'none' and inference_cuda_graph_scope 'block' disagree"),
        ({"true_on_policy": True}, "true_on_policy needs deterministic"),
        ({"deterministic": True, "enable_prefix_caching": True}, "deterministic excludes enable_prefix_caching"),
    ],
)
def test_engine_rules(options: dict[str, Any], message: str) -> None:
    [problem] = problems_of(EngineConfig, **options)
    assert message in problem


def test_engine_defaults_per_device_and_a_step_that_holds_the_longest_sample() -> None:
    gpu, cpu = EngineConfig.for_device("cuda"), EngineConfig.for_device("cpu", max_requests=8)
    assert (gpu.cuda_graph_impl, gpu.inference_cuda_graph_scope, gpu.async_sched_mode) == ("local", "block", "async")
    assert gpu.dtype == "bfloat16" and not gpu.use_cuda_graphs_for_non_decode_steps
    assert (cpu.num_cuda_graphs, cpu.dtype, cpu.max_requests) == (None, "float32", 8)
    assert gpu == EngineConfig() and gpu.max_tokens == 16384
    assert EngineConfig(max_sequence_length=40000).max_tokens == 40001
    assert "device must be one of" in problems_of(EngineConfig.for_device, "tpu")[0]


def test_every_violation_of_a_part_is_listed() -> None:
    assert len(problems_of(EngineConfig, max_requests=0, dtype="int8", buffer_size_gb=-1, attention_backend="x")) == 4
    assert problems_of(Timeouts, refit_s=0, start_s=float("inf")) == [
        "timeouts.start_s must be a finite number > 0, got inf",
        "timeouts.refit_s must be a finite number > 0, got 0",
    ]


# -- the whole configuration ----------------------------------------------------------------------------------


def test_number_of_cells_from_gpus_or_as_given() -> None:
    layout = LayoutConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert RolloutConfig(layout=layout, rollout_num_gpus=16).num_cells == 4
    assert RolloutConfig(layout=layout, num_rollout_cells=3).grid.world_size == 12
    assert RolloutConfig(layout=layout, rollout_num_gpus=8, num_rollout_cells=2).num_cells == 2
    assert RolloutConfig().num_cells == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_num_gpus": 6}, "--rollout-num-gpus 6 is not divisible by the 4 ranks of a rollout cell (TP 2 * PP"),
        (
            {"rollout_num_gpus": 8, "num_rollout_cells": 3},
            "--num-rollout-cells 3 of 4 ranks need 12 GPUs, --rollout-num-gpus is 8",
        ),
        ({"num_rollout_cells": 0}, "--num-rollout-cells must be an integer >= 1, got 0"),
        ({"engine": EngineConfig(max_requests=7)}, "max_requests 7 is not divisible by --tensor-model-parallel-size 2"),
        ({"refit_transport": "carrier-pigeon"}, "--refit-transport must be one of"),
        ({"refit_transport": "mcore", "refit_backend": "mpi"}, "--refit-backend must be one of ['gloo', 'nccl'], got"),
        ({"refit_transport": "mcore"}, "--refit-transport mcore needs --refit-backend"),
        ({"refit_transport": "mcore", "refit_backend": "nvshmem"}, "--refit-backend nvshmem is refused"),
        ({"refit_backend": "gloo"}, "--refit-backend gloo is only for --refit-transport reshard or mcore, which is No"),
        ({"refit_transport": "colocated"}, "--refit-transport colocated needs --colocate"),
        ({"refit_transport": "disk"}, "--refit-transport disk needs --update-weight-disk-dir"),
        ({"update_weight_disk_dir": "d"}, "--update-weight-disk-dir is only for --refit-transport disk, which is None"),
        ({"expose_http": True, "host": "0.0.0.0"}, "--host 0.0.0.0 is wider than loopback: a token is required"),
        ({"router_url": "http://localhost:1"}, "needs the HTTP servers"),
        ({"max_failed_fraction": 1.5}, "--max-failed-fraction must be in [0, 1], got 1.5"),
        ({"colocate": True}, "--colocate needs the trainer's layout"),
        ({"colocate": True, "train_layout": TRAIN, "skip_weight_load": True}, "skip_weight_load excludes --colocate"),
        (
            {"colocate": True, "train_layout": TRAIN, "refit_transport": "disk", "update_weight_disk_dir": "d"},
            "--refit-transport disk is for separate processes",
        ),
        (
            {"colocate": True, "train_layout": TRAIN, "trainer_num_ranks": 6, "num_rollout_cells": 2},
            "the rollout cells have 8 ranks, the trainer cells 6",
        ),
        ({"release_weights_on_sleep": "keep"}, "release_weights_on_sleep must be one of"),
    ],
)
def test_rollout_rules(options: dict[str, Any], message: str) -> None:
    layout = LayoutConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    [problem] = problems_of(RolloutConfig, **{"layout": layout} | options)
    assert message in problem


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({CP: 2}, "--rollout-context-parallel-size 2: generation has no context parallelism"),
        ({DP: 3}, "use 3 times as many cells instead (--rollout-num-gpus or --num-rollout-cells)"),
        ({EP: 2, TP: 2}, "--expert-model-parallel-size 2: mixture-of-experts models are not supported"),
        ({ETP: 2, TP: 2}, "--expert-tensor-parallel-size 2: mixture-of-experts models are not supported"),
    ],
)
def test_layouts_that_a_rollout_cell_cannot_have_name_the_option(layout: dict[str, Any], message: str) -> None:
    assert message in problems_of(RolloutConfig, layout=LayoutConfig(**layout))[0]


def test_all_violations_come_in_one_error() -> None:
    problems = problems_of(
        RolloutConfig,
        layout=LayoutConfig(context_parallel_size=2, data_parallel_size=2),
        refit_backend="gloo",
        max_failed_fraction=-1,
        expose_http=True,
        host="::",
    )
    assert len(problems) == 5


def test_transport_follows_the_placement() -> None:
    train = LayoutConfig(tensor_model_parallel_size=2)
    apart, together = RolloutConfig(), RolloutConfig(colocate=True, train_layout=train)
    assert (apart.transport, apart.uses_native_refit, apart.blocks_training) == ("reshard", True, False)
    assert (together.transport, together.uses_native_refit, together.blocks_training) == ("colocated", False, True)
    assert together.wake_carries_weight_updates and not apart.wake_carries_weight_updates
    mcore = RolloutConfig(refit_transport="mcore", refit_backend="gloo")
    assert mcore.uses_native_refit and mcore.transport == "reshard"
    disk = RolloutConfig(refit_transport="disk", update_weight_disk_dir="d")
    assert not disk.uses_native_refit and disk.transport == "disk"
    assert RolloutConfig(engine=EngineConfig(kv_cache_management_mode="recompute")).recomputes_kv_cache
    assert not apart.recomputes_kv_cache


def test_colocated_cells_share_the_trainers_model_only_in_its_layout() -> None:
    tp2, tp2_cp2 = LayoutConfig(2), LayoutConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    assert not RolloutConfig(colocate=True, layout=tp2, train_layout=tp2).dedicated_model
    assert RolloutConfig(colocate=True, train_layout=tp2).dedicated_model
    assert RolloutConfig(colocate=True, layout=tp2, train_layout=tp2_cp2).dedicated_model
    assert RolloutConfig().dedicated_model
    assert RolloutConfig(colocate=True, train_layout=tp2_cp2).nvlink_span == 4
    assert RolloutConfig(train_layout=tp2_cp2).nvlink_span == 1


def test_a_token_is_never_shown() -> None:
    assert "hunter2" not in repr(RolloutConfig(expose_http=True, token="hunter2"))


# -- constructor ----------------------------------------------------------------------------------------------


def test_a_good_construction_builds_nested_parts() -> None:
    config = build_rollout_config(
        {
            "layout": {TP: 2},
            "engine": {"max_requests": 8},
            "num_rollout_cells": 2,
            "expose_http": True,
            "timeouts": {"refit_s": 5},
        },
        cluster=CLUSTER,
        reserved_http_server_ports={0: 4000, 2: 4000},
    )
    assert (config.num_cells, config.engine.max_requests, config.timeouts.refit_s) == (2, 8, 5)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {}, "exactly one of cluster and policy must be given, got none"),
        ({}, {"cluster": CLUSTER, "policy": POLICY}, "exactly one of cluster and policy must be given, got both"),
        ({"skip_weight_load": True}, {"policy": POLICY}, "skip_weight_load goes with cluster, not with policy"),
        ({}, {"policy": POLICY, "reserved_http_server_ports": {0: 1}}, "reserved_http_server_ports go with cluster"),
        ({}, {"policy": POLICY}, "colocate must be set"),
        ({"colocate": True, "train_layout": {}}, {"cluster": CLUSTER}, "colocate must not be set"),
        ({}, {"cluster": CLUSTER, "processor": object()}, "processor: vision-language models are not supported"),
        ({}, {"cluster": CLUSTER, "reserved_http_server_ports": {0: 1}}, "need expose_http"),
        (
            {"expose_http": True, "num_rollout_cells": 2},
            {"cluster": CLUSTER, "reserved_http_server_ports": {0: 1, 3: 2}},
            "reserved_http_server_ports are for ranks [0, 3], the leaders are ranks [0, 1]",
        ),
        (
            {"num_rolout_cells": 2},
            {"cluster": CLUSTER},
            "unknown option num_rolout_cells (did you mean num_rollout_cel",
        ),
        ({"engine": {"max_request": 2}}, {"cluster": CLUSTER}, "unknown option engine.max_request (did you mean"),
    ],
)
def test_constructor_rules(options: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    assert any(message in line for line in problems_of(build_rollout_config, options, **arguments))


def test_constructor_and_options_are_judged_together() -> None:
    problems = problems_of(
        build_rollout_config,
        {"layout": {TP: 0}, "engine": {"dtype": "int8"}, "refit_backend": "gloo", "typo": 1, "rollout_num_gpus": 7}
        | {"num_rollout_cells": 2},
        cluster=CLUSTER,
        policy=POLICY,
    )
    text = "\n".join(problems)
    for part in ("exactly one of", "colocate must be set", "--tensor-model-parallel-size", "dtype", "--refit-backend"):
        assert part in text
    assert "unknown option typo" in text
    assert "7" not in text  # the number of GPUs is not judged by a layout that only stands in


# -- merging with the training configuration ------------------------------------------------------------------


def policy_config(train: dict[str, Any], generation: Any = None, colocated: bool = False) -> dict[str, Any]:
    return {
        "megatron_cfg": {"enabled": True, CP: 1, "optimizer": {"lr": 1e-6}} | train,
        "generation": {"colocated": {"enabled": colocated}, "mcore_generation_config": generation or {}},
    }


def test_merged_configuration_generates_without_cp_and_checkpointing() -> None:
    config = policy_config({TP: 4, CP: 2, "activation_checkpointing": True}, {TP: 2, "max_tokens": 99})
    merged = merged_inference_megatron_cfg(config)
    assert (merged[TP], merged[CP], merged["activation_checkpointing"], merged["max_tokens"]) == (2, 1, False, 99)


@pytest.mark.parametrize("colocated", [True, False])
def test_explicit_generation_cp_is_refused(colocated: bool) -> None:
    config = policy_config({TP: 2}, {CP: 2, "transformer_impl": "inference_optimized"}, colocated)
    problems = problems_of(effective_megatron_cfg, config)
    assert "context_parallel_size must be 1" in problems[0] and "got 2" in problems[0]
    assert "needs --sequence-parallel" in problems[1]  # both at once


def test_inference_optimized_with_expert_tp_is_refused() -> None:
    train = {TP: 2, "sequence_parallel": True, ETP: 2}
    config = policy_config(train, {"transformer_impl": "inference_optimized"})
    assert "--expert-tensor-parallel-size above 1, got 2" in problems_of(merged_inference_megatron_cfg, config)[0]


@pytest.mark.parametrize(
    ("train", "generation", "dedicated"),
    [
        ({TP: 2}, {}, False),
        ({TP: 2}, {TP: 2, "max_tokens": 5}, False),
        ({TP: 2}, {TP: 1}, True),
        ({PP: 2}, {PP: 1}, True),
        ({TP: 2, CP: 2}, {}, True),
        ({TP: 2, EP: 4}, {EP: 1}, True),
        ({TP: 2, ETP: 2}, {ETP: 1}, True),
        ({ETP: None}, {ETP: 1}, False),
        ({"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}, True),
        ({TP: 2, "sequence_parallel": True}, {"sequence_parallel": False}, False),
    ],
)
def test_when_generation_needs_a_model_of_its_own(
    train: dict[str, Any], generation: dict[str, Any], dedicated: bool
) -> None:
    config = policy_config(train, generation, colocated=True)
    found = dedicated_inference_megatron_cfg(config)
    assert (found is not None) == dedicated
    assert effective_megatron_cfg(config) == (found if dedicated else config["megatron_cfg"])
    config["generation"]["colocated"]["enabled"] = False
    assert effective_megatron_cfg(config) == merged_inference_megatron_cfg(config)


@given(colocated=st.booleans(), tp=st.sampled_from([1, 2]), train_cp=st.sampled_from([1, 2]))
def test_the_result_is_always_a_fresh_dict(colocated: bool, tp: int, train_cp: int) -> None:
    config = policy_config({TP: 2, CP: train_cp}, {TP: tp}, colocated)
    before = copy.deepcopy(config)
    result = effective_megatron_cfg(config)
    result["optimizer"]["lr"] = 1.0
    result[TP] = 99
    assert config == before


def test_span_and_frontend_ranks_of_the_effective_layout() -> None:
    apart = policy_config({TP: 8, CP: 2}, {TP: 2, PP: 2})
    assert nvlink_domain_span(apart) == 2
    assert frontend_ranks(16, apart) == [0, 2, 4, 6]
    together = policy_config({TP: 4, CP: 2}, {TP: 2, PP: 2}, colocated=True)
    assert nvlink_domain_span(together) == 8
    assert nvlink_domain_span(policy_config({EP: 8, ETP: 2})) == 16
    assert layout_of({TP: 2, ETP: None}).parallel.etp == 1


@pytest.mark.parametrize(
    ("mode", "recompute", "ok"),
    [("persist", False, True), ("offload", False, True), ("recompute", True, True), (None, False, True)]
    + [("persist", True, False), ("recompute", False, False), ("bogus", False, False)],
)
def test_kv_mode_and_recompute_flag_must_agree(mode: str | None, recompute: bool, ok: bool) -> None:
    config = policy_config({}, {} if mode is None else {"kv_cache_management_mode": mode})
    if ok:
        validate_settings(config, recompute_kv_cache_after_weight_updates=recompute)
        return
    [problem] = problems_of(validate_settings, config, recompute_kv_cache_after_weight_updates=recompute)
    assert "kv_cache_management_mode" in problem and repr(mode) in problem


def test_validate_settings_needs_the_megatron_trainer_and_says_everything() -> None:
    config = {"generation": {"mcore_generation_config": {CP: 2}}}
    problems = problems_of(validate_settings, config, recompute_kv_cache_after_weight_updates=True)
    assert len(problems) == 3 and "megatron_cfg.enabled" in problems[0]


def test_configuration_and_layout_import_neither_ray_nor_torch() -> None:
    code = "import megatron_rollout.construction, megatron_rollout.megatron_cfg, megatron_rollout.layout, sys; "
    code += "print([name for name in ('ray', 'torch', 'megatron.core') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
