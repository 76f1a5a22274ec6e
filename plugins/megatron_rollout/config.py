"""Configuration of the rollout side: frozen dataclasses, every rule checked once, at construction.

A wrong configuration raises one `ConfigError` that lists all violations, each with the option's name and the values
that disagree. `construction.py` checks options together with the arguments of a generation object's constructor,
`megatron_cfg.py` merges the training configuration with generation options.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_rollout.frontend.settings import is_loopback
from megatron_rollout.layout import CellGrid, ParallelLayout, count_cells, nvlink_domain_span

KV_MODES = ("persist", "offload", "recompute")
ATTENTION_BACKENDS = ("auto", "flash", "triton", "torch")
DTYPES = ("float32", "bfloat16")
TRANSFORMER_IMPLS = ("local", "transformer_engine", "inference_optimized")
#: None lets the placement decide: "colocated" with `colocate`, else "reshard". "reshard" and "mcore" are one transport;
#: under the latter, megatron-core's own name, the backend has to be given as well. With `colocate` both are the copy
#: from one layout to the other inside the shared processes.
REFIT_TRANSPORTS = (None, "colocated", "reshard", "mcore", "nccl_reshard", "broadcast", "disk")
REFIT_BACKENDS = ("gloo", "nccl")
RELEASE_MODES = ("offload", "discard")
_REFUSED_REFIT_BACKENDS = {
    "nvshmem": "megatron-core marks its nvshmem copy service as broken",
    "nccl_m2n": "it has no deadline; use --refit-transport nccl_reshard",
}
#: megatron-core's limit of tokens in one engine step.
DEFAULT_MAX_TOKENS = 16384


class ConfigError(ValueError):
    """A configuration with at least one violation; `problems` has one line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


def _one_of(name: str, value: object, choices: Iterable[object]) -> list[str]:
    known = list(choices)
    return [] if value in known else [f"{name} must be one of {known}, got {value!r}"]


def _at_least(name: str, value: object, least: int) -> list[str]:
    """A whole number >= least; bool is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return [f"{name} must be an integer >= {least}, got {value!r}"]
    return []


def _positive(name: str, value: object) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return [f"{name} must be a finite number > 0, got {value!r}"]
    return []


@dataclass(frozen=True)
class LayoutConfig:
    """Parallel layout of one cell, under Megatron's option names.

    data_parallel_size: replicas inside the cell (trainer cells only; a rollout cell has one).
    expert_tensor_parallel_size: None is Megatron's "as configured for the experts", 1 here.
    transformer_impl: which layer implementation builds the model.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    transformer_impl: str = "local"

    def __post_init__(self) -> None:
        problems = []
        for name in (f.name for f in fields(self) if f.name.endswith("_size")):
            if name != "expert_tensor_parallel_size" or self.expert_tensor_parallel_size is not None:
                problems += _at_least(_option(name), getattr(self, name), 1)
        problems += _one_of("--transformer-impl", self.transformer_impl, TRANSFORMER_IMPLS)
        tp, etp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        if self.transformer_impl == "inference_optimized" and not problems:
            if tp > 1 and not self.sequence_parallel:
                problems.append(
                    "--transformer-impl inference_optimized needs --sequence-parallel "
                    f"with --tensor-model-parallel-size {tp}"
                )
            if (etp or 1) > 1:
                problems.append(
                    f"--transformer-impl inference_optimized takes no --expert-tensor-parallel-size above 1, got {etp}"
                )
        _raise_if(problems)
        try:
            self.parallel  # noqa: B018 (the layout checks how the sizes divide each other)
        except ValueError as cause:
            raise ConfigError([str(cause)]) from None

    @property
    def parallel(self) -> ParallelLayout:
        return ParallelLayout(
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            cp=self.context_parallel_size,
            dp=self.data_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size or 1,
        )

    def differs_from(self, training: LayoutConfig) -> list[str]:
        """What makes a model of `training` unfit to generate in this layout: names of the fields that differ.

        Training with context parallelism always differs, as generation has none. Data parallelism and sequence
        parallelism change no weight shard and are not looked at.
        """
        names = [
            name
            for name in (f.name for f in fields(self))
            if name not in ("data_parallel_size", "sequence_parallel", "context_parallel_size")
            and (getattr(self, name) or 1) != (getattr(training, name) or 1)
        ]
        return names + ["context_parallel_size"] * (training.context_parallel_size > 1)

    def rollout_problems(self) -> list[str]:
        """Why a rollout cell cannot have this layout (each names the option and what to do instead)."""
        problems = []
        if (cp := self.context_parallel_size) != 1:
            problems.append(f"--rollout-context-parallel-size {cp}: generation has no context parallelism; it is 1")
        if (dp := self.data_parallel_size) != 1:
            problems.append(
                f"--rollout-data-parallel-size {dp}: a rollout cell is one replica; use {dp} times as many cells "
                "instead (--rollout-num-gpus or --num-rollout-cells)"
            )
        if (ep := self.expert_model_parallel_size) != 1:
            problems.append(f"--expert-model-parallel-size {ep}: mixture-of-experts models are not supported")
        if (etp := self.expert_tensor_parallel_size or 1) != 1:
            problems.append(f"--expert-tensor-parallel-size {etp}: mixture-of-experts models are not supported")
        return problems


@dataclass(frozen=True)
class EngineConfig:
    """One rank's engine. Fields carry megatron-core's names where it has one.

    max_sequence_length: tokens of prompt and response together. max_requests: requests that decode at once.
    max_tokens: tokens of one engine step; None: 16,384 or the sequence length, whatever is more (a sample that is
        resumed or recomputed goes through one step whole).
    buffer_size_gb: KV cache (GB). block_size_tokens: its block. enable_prefix_caching: share blocks of equal prompts.
    kv_cache_management_mode: what a suspend does with the KV cache: persist (kept), offload (to host memory),
        recompute (freed; requests in flight are prefilled again).
    cuda_graph_impl, inference_cuda_graph_scope, num_cuda_graphs, use_cuda_graphs_for_non_decode_steps,
        async_sched_mode: only looked at on a GPU; the defaults are what measured best there.
    dtype: of weights, activations and KV cache. attention_backend: paged attention; auto takes flash-attn where it is
        installed, else Triton on a GPU, else torch.
    deterministic: admission fixed before the first step and repeatable kernels only.
    true_on_policy: the rollout runs with the trainer's own numerics, so that its logprobs are the trainer's; needs
        `deterministic`.
    """

    max_sequence_length: int = 4096
    max_requests: int = 256
    max_tokens: int | None = None
    block_size_tokens: int = 256
    buffer_size_gb: float = 20.0
    kv_cache_management_mode: str = "persist"
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = False
    cuda_graph_impl: str = "local"
    inference_cuda_graph_scope: str = "block"
    num_cuda_graphs: int | None = 16
    use_cuda_graphs_for_non_decode_steps: bool = False
    async_sched_mode: str = "async"
    dtype: str = "bfloat16"
    attention_backend: str = "auto"
    deterministic: bool = False
    true_on_policy: bool = False

    def __post_init__(self) -> None:
        problems = []
        for name in ("max_sequence_length", "max_requests", "block_size_tokens"):
            problems += _at_least(name, getattr(self, name), 1)
        for name in ("max_tokens", "num_cuda_graphs"):
            if getattr(self, name) is not None:
                problems += _at_least(name, getattr(self, name), 1)
        problems += _positive("buffer_size_gb", self.buffer_size_gb)
        problems += _one_of("kv_cache_management_mode", self.kv_cache_management_mode, KV_MODES)
        problems += _one_of("cuda_graph_impl", self.cuda_graph_impl, ("local", "none"))
        problems += _one_of("inference_cuda_graph_scope", self.inference_cuda_graph_scope, ("none", "layer", "block"))
        problems += _one_of("async_sched_mode", self.async_sched_mode, ("async", "legacy"))
        problems += _one_of("dtype", self.dtype, DTYPES)
        problems += _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        scope = self.inference_cuda_graph_scope
        if (self.cuda_graph_impl == "none") != (scope == "none"):
            problems.append(
                f"cuda_graph_impl {self.cuda_graph_impl!r} and inference_cuda_graph_scope {scope!r} disagree: "
                "either both are 'none' or neither"
            )
        if self.true_on_policy and not self.deterministic:
            problems.append("true_on_policy needs deterministic, got true_on_policy=True and deterministic=False")
        if self.deterministic and self.enable_prefix_caching:
            problems.append(
                "deterministic excludes enable_prefix_caching: what is cached depends on what a cell served before"
            )
        if not problems:
            if self.max_tokens is None:
                # One token more than the longest sequence: a prompt that fills the context still gets a token.
                object.__setattr__(self, "max_tokens", max(DEFAULT_MAX_TOKENS, self.max_sequence_length + 1))
            tokens = self.max_tokens or 0
            if tokens < self.max_requests:
                problems.append(f"max_tokens {tokens} is below max_requests {self.max_requests}")
            if tokens < self.max_sequence_length and not self.enable_chunked_prefill:
                problems.append(
                    f"max_tokens {tokens} is below max_sequence_length {self.max_sequence_length}: "
                    "a resumed sample would not fit into one engine step"
                )
        _raise_if(problems)

    @classmethod
    def for_device(cls, kind: str, **overrides: Any) -> EngineConfig:
        """Defaults for "cuda" or "cpu", with `overrides` on top.

        On the CPU: float32, small blocks and a KV cache that a laptop holds, and nothing of CUDA graphs.
        """
        _raise_if(_one_of("device", kind, ("cuda", "cpu")))
        cpu: dict[str, Any] = dict(
            max_sequence_length=1024,
            max_requests=64,
            block_size_tokens=16,
            buffer_size_gb=0.25,
            cuda_graph_impl="none",
            inference_cuda_graph_scope="none",
            num_cuda_graphs=None,
            async_sched_mode="legacy",
            dtype="float32",
        )
        return cls(**(cpu if kind == "cpu" else {}) | overrides)


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds, each the longest that one call may take before it is an error.

    start_s: actors, models and CUDA graphs. generate_s: one `generate`. lifecycle_s: one step of sleep, wake, suspend
    or resume. refit_s: one sync of a pair. reserve_s: placement groups and HTTP addresses. shutdown_s: the end.
    """

    start_s: float = 600.0
    generate_s: float = 3600.0
    lifecycle_s: float = 120.0
    refit_s: float = 120.0
    reserve_s: float = 120.0
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        _raise_if([line for f in fields(self) for line in _positive(f"timeouts.{f.name}", getattr(self, f.name))])


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout side of a run.

    layout, engine: of every rollout cell. train_layout: of the trainer cells; needed with `colocate`.
    rollout_num_gpus: GPUs of all rollout cells; num_rollout_cells: how many cells (the way to say it without GPUs).
        One is enough, both must agree, neither means one cell.
    colocate: the trainer's processes and GPUs also generate. trainer_num_ranks: ranks of all trainer cells.
    expose_http: every leader serves HTTP on `host`; wider than loopback needs `token`. router_url: a router that the
        leaders register with.
    refit_transport, refit_backend: see REFIT_TRANSPORTS. update_weight_disk_dir: directory of the disk transport.
    keep_prefix_cache_on_refit: blocks of old weights go on being shared after a refit (off: they are dropped).
    release_weights_on_sleep: "offload" keeps a copy in host memory, "discard" waits for the next refit. Looked at with
        `colocate` only, where generation has a model of its own; shared tensors belong to the trainer.
    max_failed_fraction: share of a batch that may fail before the call fails. skip_weight_load: no weights from the
        checkpoint; engine, CUDA graphs and HTTP appear with the first refit.
    """

    layout: LayoutConfig = field(default_factory=LayoutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train_layout: LayoutConfig | None = None
    rollout_num_gpus: int | None = None
    num_rollout_cells: int | None = None
    trainer_num_ranks: int | None = None
    colocate: bool = False
    expose_http: bool = False
    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    router_url: str | None = None
    refit_transport: str | None = None
    refit_backend: str | None = None
    update_weight_disk_dir: str | None = None
    keep_prefix_cache_on_refit: bool = False
    release_weights_on_sleep: str = "offload"
    max_failed_fraction: float = 0.0
    skip_weight_load: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        _raise_if(
            self.layout.rollout_problems() + self._cell_problems() + self._refit_problems() + self._service_problems()
        )

    # -- what follows from the options ------------------------------------------------------------------------

    @property
    def num_cells(self) -> int:
        if self.rollout_num_gpus is not None:
            return count_cells(self.rollout_num_gpus, self.layout.parallel, role="rollout")
        return 1 if self.num_rollout_cells is None else self.num_rollout_cells

    @property
    def grid(self) -> CellGrid:
        return CellGrid(self.layout.parallel, self.num_cells)

    @property
    def dedicated_model(self) -> bool:
        """Whether generation has a model of its own (else it shares the trainer's tensors)."""
        return not self.colocate or self.train_layout is None or bool(self.layout.differs_from(self.train_layout))

    @property
    def transport(self) -> str:
        """The transport that runs: colocated, reshard, nccl_reshard, broadcast or disk."""
        if self.colocate:
            return "colocated"
        return "reshard" if self.refit_transport in (None, "mcore") else self.refit_transport

    @property
    def uses_native_refit(self) -> bool:
        """Whether weights move through megatron-core's resharding."""
        return self.refit_transport in ("reshard", "mcore") or self.transport == "reshard"

    @property
    def blocks_training(self) -> bool:
        """Whether training has to wait while this side generates: they share processes."""
        return self.colocate

    @property
    def wake_carries_weight_updates(self) -> bool:
        return self.colocate

    @property
    def recomputes_kv_cache(self) -> bool:
        return self.engine.kv_cache_management_mode == "recompute"

    @property
    def nvlink_span(self) -> int:
        """GPUs that must share an NVLink domain; with `colocate` the trainer's layout counts too."""
        layouts = [self.layout.parallel]
        if self.colocate and self.train_layout is not None:
            layouts.append(self.train_layout.parallel)
        return nvlink_domain_span(*layouts)

    # -- rules ------------------------------------------------------------------------------------------------

    def _cell_problems(self) -> list[str]:
        problems: list[str] = []
        parallel, gpus, cells = self.layout.parallel, self.rollout_num_gpus, self.num_rollout_cells
        per_cell = parallel.tp * parallel.pp
        if cells is not None:
            problems += _at_least("--num-rollout-cells", cells, 1)
        if gpus is not None:
            problems += _at_least("--rollout-num-gpus", gpus, 1)
        if problems:
            return problems
        if gpus is not None and gpus % per_cell:
            problems.append(
                f"--rollout-num-gpus {gpus} is not divisible by the {per_cell} ranks of a rollout cell "
                f"(TP {parallel.tp} * PP {parallel.pp})"
            )
        elif gpus is not None and cells is not None and gpus != cells * per_cell:
            problems.append(
                f"--num-rollout-cells {cells} of {per_cell} ranks need {cells * per_cell} GPUs, "
                f"--rollout-num-gpus is {gpus}"
            )
        if self.engine.max_requests % parallel.tp:
            problems.append(
                f"max_requests {self.engine.max_requests} is not divisible by "
                f"--tensor-model-parallel-size {parallel.tp}"
            )
        if self.colocate and self.trainer_num_ranks is not None and not problems:
            ranks = per_cell * (gpus // per_cell if gpus is not None else cells or 1)
            if ranks != self.trainer_num_ranks:
                problems.append(
                    f"--colocate: the rollout cells have {ranks} ranks, the trainer cells {self.trainer_num_ranks}; "
                    "they share processes, so the numbers must be equal"
                )
        return problems

    def _refit_problems(self) -> list[str]:
        transport, backend = self.refit_transport, self.refit_backend
        problems = _one_of("--refit-transport", transport, REFIT_TRANSPORTS)
        if transport in ("reshard", "mcore"):
            if backend in _REFUSED_REFIT_BACKENDS:
                problems.append(f"--refit-backend {backend} is refused: {_REFUSED_REFIT_BACKENDS[backend]}")
            elif backend is None and transport == "mcore":
                problems.append(
                    f"--refit-transport mcore needs --refit-backend (one of {list(REFIT_BACKENDS)}), got None"
                )
            elif backend is not None:
                problems += _one_of("--refit-backend", backend, REFIT_BACKENDS)
        elif backend is not None:
            problems.append(
                f"--refit-backend {backend} is only for --refit-transport reshard or mcore, which is {transport!r}"
            )
        if transport == "colocated" and not self.colocate:
            problems.append("--refit-transport colocated needs --colocate")
        if self.colocate and transport in ("nccl_reshard", "broadcast", "disk"):
            problems.append(
                f"--refit-transport {transport} is for separate processes; with --colocate they are the same"
            )
        if transport == "disk" and not self.update_weight_disk_dir:
            problems.append("--refit-transport disk needs --update-weight-disk-dir")
        if self.update_weight_disk_dir and transport != "disk":
            problems.append(f"--update-weight-disk-dir is only for --refit-transport disk, which is {transport!r}")
        return problems

    def _service_problems(self) -> list[str]:
        problems = []
        if self.colocate and self.train_layout is None:
            problems.append("--colocate needs the trainer's layout (train_layout), got None")
        if self.skip_weight_load and self.colocate:
            problems.append("skip_weight_load excludes --colocate: the trainer's processes have the weights")
        if self.expose_http and not is_loopback(self.host) and not self.token:
            problems.append(f"--host {self.host} is wider than loopback: a token is required")
        if self.router_url and not self.expose_http:
            problems.append(f"a router ({self.router_url}) needs the HTTP servers: expose_http is False")
        fraction = self.max_failed_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            problems.append(f"--max-failed-fraction must be in [0, 1], got {fraction!r}")
        problems += _one_of("release_weights_on_sleep", self.release_weights_on_sleep, RELEASE_MODES)
        return problems


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
