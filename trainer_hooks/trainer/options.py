"""Options of the built-in trainer: slime's, Miles' and Megatron's names, checked all at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_rollout.engine.architecture import read_architecture
from trainer_hooks.arguments import add_rollout_backend_arguments
from trainer_hooks.cells.fault_plan import parse_fault
from trainer_hooks.trainer.data import split_slice
from trainer_hooks.training.advantages import ADVANTAGE_ESTIMATORS
from trainer_hooks.training.losses import KL_LOSS_TYPES


class OptionError(ValueError):
    """Options that cannot work; one line a violation."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not the page of usage that argparse prints; `--help` is there for that."""
        self.exit(2, f"error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m trainer_hooks.trainer",
        description="RL post-training with Megatron rollouts on independent DP cells. Without data and checkpoint it "
        "makes a tiny model and a small task of its own and learns it on the CPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_rollout_backend_arguments(parser)
    _add_data(parser.add_argument_group("model, data and reward"))
    _add_rollout(parser.add_argument_group("rollout"))
    _add_training(parser.add_argument_group("training"))
    _add_layout(parser.add_argument_group("cells and layout"))
    _add_run(parser.add_argument_group("run"))
    return parser


def _add_data(group: Any) -> None:
    group.add_argument("--hf-checkpoint", help="Hugging Face checkpoint directory (default: a tiny one is made)")
    group.add_argument("--prompt-data", help="JSONL of prompts (default: the built-in task's)")
    group.add_argument("--eval-prompt-data", help="JSONL of held-out prompts")
    group.add_argument("--input-key", default="input")
    group.add_argument("--label-key", default=None)
    group.add_argument("--metadata-key", default="metadata")
    group.add_argument("--apply-chat-template", action="store_true")
    group.add_argument("--rollout-shuffle", action="store_true")
    group.add_argument("--rm-type", default=None)
    group.add_argument("--reward-key", help="which value counts where a reward is a mapping")
    group.add_argument("--custom-rm-path", help="module.function(args, sample) → reward, sync or async")


def _add_rollout(group: Any) -> None:
    group.add_argument("--num-rollout", type=int, help="rollouts of the run")
    group.add_argument("--rollout-batch-size", type=int, help="prompts a rollout")
    group.add_argument("--n-samples-per-prompt", type=int)
    group.add_argument("--rollout-max-response-len", type=int)
    group.add_argument("--rollout-max-context-len", type=int, help="prompt and response (default: the model's)")
    group.add_argument("--rollout-temperature", type=float, default=1.0)
    group.add_argument("--rollout-top-p", type=float, default=1.0)
    group.add_argument("--rollout-top-k", type=int, default=-1)
    group.add_argument("--rollout-stop", nargs="+", default=[])
    group.add_argument("--rollout-stop-token-ids", nargs="+", type=int, default=[])
    group.add_argument("--rollout-seed", type=int, default=42)
    group.add_argument("--eval-interval", type=int, help="rollouts between evaluations (default: first and last only)")
    group.add_argument(
        "--rollout-external-engine-addrs", nargs="+", help="SGLang servers, for --rollout-backend sglang"
    )


def _add_training(group: Any) -> None:
    group.add_argument("--advantage-estimator", choices=ADVANTAGE_ESTIMATORS, default="grpo")
    group.add_argument("--disable-grpo-std-normalization", action="store_true")
    group.add_argument("--global-batch-size", type=int, help="rollouts an optimizer step (default: all of a rollout)")
    group.add_argument("--num-steps-per-rollout", type=int, default=1)
    group.add_argument("--use-dynamic-global-batch-size", action="store_true")
    group.add_argument("--micro-batch-size", type=int, help="samples a micro-batch")
    group.add_argument("--use-dynamic-batch-size", action="store_true")
    group.add_argument("--max-tokens-per-gpu", type=int)
    group.add_argument("--balance-data", action="store_true")
    group.add_argument("--lr", type=float)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-decay-style", default="constant", choices=("constant", "linear", "cosine"))
    group.add_argument("--lr-warmup-iters", type=int)
    group.add_argument("--lr-decay-iters", type=int)
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.95)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--eps-clip", type=float, default=0.2)
    group.add_argument("--eps-clip-high", type=float)
    group.add_argument("--eps-clip-c", type=float)
    group.add_argument("--kl-loss-coef", type=float, default=0.0)
    group.add_argument("--kl-loss-type", choices=KL_LOSS_TYPES, default="k1")
    group.add_argument("--entropy-coef", type=float, default=0.0)
    group.add_argument("--use-tis", action="store_true")
    group.add_argument("--tis-clip", type=float, default=2.0)
    group.add_argument("--tis-clip-low", type=float, default=0.0)
    group.add_argument("--calculate-per-token-loss", action="store_true")
    group.add_argument("--warmup-data", help="JSONL of prompts with answers for a supervised warm-up")
    group.add_argument("--warmup-steps", type=int, help="optimizer steps of it")
    group.add_argument("--warmup-batch-size", type=int)
    group.add_argument("--warmup-lr", type=float)


def _add_layout(group: Any) -> None:
    group.add_argument("--colocate", action="store_true", help="the trainer's processes also generate")
    group.add_argument("--actor-num-gpus", type=int, help="GPUs of all trainer cells")
    group.add_argument("--rollout-num-gpus", type=int, help="GPUs of all rollout cells")
    group.add_argument("--trainer-cell-size", type=int, help="ranks of one trainer cell (default: TP·PP·CP)")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--context-parallel-size", type=int, default=1)
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group.add_argument("--bf16", action="store_true", default=None, help="bfloat16 (default on GPUs)")
    group.add_argument("--fp32", action="store_true", help="float32 (default on the CPU)")


def _add_run(group: Any) -> None:
    group.add_argument("--output-dir", default="runs/default", help="metrics.jsonl, plot, event log, checkpoints")
    group.add_argument(
        "--save", help="directory for checkpoints (default: OUTPUT_DIR/checkpoints with --save-interval)"
    )
    group.add_argument("--save-interval", type=int, help="rollouts between checkpoints")
    group.add_argument("--save-retain", type=int, default=2, help="complete checkpoints kept")
    group.add_argument("--load", help="resume from the newest complete checkpoint in this directory")
    group.add_argument("--save-hf", help="write the final policy as a Hugging Face checkpoint here")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--ray-address", help="existing Ray cluster (default: one is started on this machine)")
    group.add_argument("--use-fault-tolerance", action="store_true", help="replace cells that die")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parsed options, unchecked."""
    return build_parser().parse_args(argv)


def validate(args: argparse.Namespace) -> None:
    """Raise one OptionError with everything that is wrong, before any process is started."""
    problems = [*_numbers(args), *_files(args), *_layout(args)]
    if args.rollout_backend not in ("megatron", "sglang"):
        problems.append(f"--rollout-backend {args.rollout_backend} is not a backend of this trainer")
    if args.rollout_backend == "sglang" and not args.rollout_external_engine_addrs:
        problems.append("--rollout-backend sglang needs --rollout-external-engine-addrs HOST:PORT …")
    if args.colocate and args.rollout_backend == "sglang":
        problems.append(
            "--colocate needs --rollout-backend megatron: an external SGLang server is a process of its own"
        )
    if args.advantage_estimator == "ppo":
        problems.append("--advantage-estimator ppo needs critic cells, which this trainer does not start yet")
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        problems.append("--use-dynamic-batch-size needs --max-tokens-per-gpu")
    problems += _faults(args)
    if args.bf16 and args.fp32:
        problems.append("--bf16 and --fp32 exclude each other")
    if problems:
        raise OptionError(problems)


_AT_LEAST_ONE = [
    "num_rollout",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "rollout_max_response_len",
    "rollout_max_context_len",
    "global_batch_size",
    "num_steps_per_rollout",
    "micro_batch_size",
    "max_tokens_per_gpu",
    "num_trainer_cells",
    "num_rollout_cells",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "save_interval",
    "save_retain",
    "eval_interval",
    "actor_num_gpus",
    "rollout_num_gpus",
    "trainer_cell_size",
    "rollout_tensor_model_parallel_size",
    "rollout_pipeline_model_parallel_size",
    "rollout_max_requests",
    "heartbeat_misses",
]
_NOT_NEGATIVE = [
    "lr",
    "min_lr",
    "weight_decay",
    "clip_grad",
    "rollout_temperature",
    "warmup_steps",
    "warmup_lr",
    "max_failed_fraction",
    "max_cell_restarts",
    "kl_loss_coef",
    "entropy_coef",
    "eps_clip",
]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _numbers(args: argparse.Namespace) -> list[str]:
    problems = []
    for name in _AT_LEAST_ONE:
        value = getattr(args, name)
        if value is not None and value < 1:
            problems.append(f"{_flag(name)} must be >= 1, got {value}")
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            problems.append(f"{_flag(name)} must be a finite number >= 0, got {value}")
    if not 0 < args.rollout_top_p <= 1:
        problems.append(f"--rollout-top-p must be in (0, 1], got {args.rollout_top_p}")
    if args.rollout_top_k < -1:
        problems.append(f"--rollout-top-k must be -1 (off), 0 (off) or positive, got {args.rollout_top_k}")
    return problems


def _files(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.hf_checkpoint is not None:
        try:
            architecture = read_architecture(args.hf_checkpoint)
            architecture.check_parallel(tp=args.tensor_model_parallel_size, pp=args.pipeline_model_parallel_size)
        except (OSError, ValueError) as error:
            problems.append(f"--hf-checkpoint: {error}")
        if args.prompt_data is None:
            problems.append("--hf-checkpoint needs --prompt-data: the built-in task fits its own tiny model only")
    elif args.prompt_data is not None:
        problems.append("--prompt-data needs --hf-checkpoint: the built-in tiny model knows only its own task")
    for name in ("prompt_data", "eval_prompt_data", "warmup_data"):
        path = getattr(args, name)
        if path is not None and not Path(split_slice(path)[0]).is_file():
            problems.append(f"{_flag(name)} {path}: no such file")
    if args.load is not None and not Path(args.load).is_dir():
        problems.append(f"--load {args.load}: no such directory")
    return problems


def _faults(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.inject_fault and not args.enable_fault_injection:
        problems.append("--inject-fault needs --enable-fault-injection")
    for text in args.inject_fault:
        try:
            parse_fault(text)
        except ValueError as error:
            problems.append(f"--inject-fault: {error}")
    if not args.heartbeat_interval > 0:
        problems.append(f"--heartbeat-interval must be > 0 seconds, got {args.heartbeat_interval:g}")
    return problems


def _layout(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.rollout_context_parallel_size != 1:
        problems.append(f"--rollout-context-parallel-size {args.rollout_context_parallel_size}: generation has none")
    if (dp := args.rollout_data_parallel_size) != 1:
        problems.append(
            f"--rollout-data-parallel-size {dp}: a rollout cell is one replica; use more --num-rollout-cells"
        )
    if args.expert_model_parallel_size != 1:
        problems.append(f"--expert-model-parallel-size {args.expert_model_parallel_size}: MoE is not supported")
    size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if args.trainer_cell_size is not None and args.trainer_cell_size % max(size, 1):
        problems.append(f"--trainer-cell-size {args.trainer_cell_size} is not divisible by TP·PP·CP = {size}")
    if args.colocate:
        pairs = [
            (args.rollout_tensor_model_parallel_size, args.tensor_model_parallel_size, "tensor"),
            (args.rollout_pipeline_model_parallel_size, args.pipeline_model_parallel_size, "pipeline"),
        ]
        problems += [
            f"--colocate with --rollout-{kind}-model-parallel-size {rollout} and --{kind}-model-parallel-size {train}: "
            "sharing tensors needs equal layouts"
            for rollout, train, kind in pairs
            if rollout is not None and rollout != train
        ]
        if args.context_parallel_size > 1:
            problems.append(f"--colocate with --context-parallel-size {args.context_parallel_size} is not supported")
        if args.num_rollout_cells not in (None, args.num_trainer_cells):
            problems.append(
                f"--colocate: each trainer cell is its own rollout cell, but --num-rollout-cells is "
                f"{args.num_rollout_cells} and --num-trainer-cells {args.num_trainer_cells}"
            )
    return problems
