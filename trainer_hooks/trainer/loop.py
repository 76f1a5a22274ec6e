"""The training loop: generate, convert, freeze, train, refit. One rollout an iteration; see DESIGN for the order."""

from __future__ import annotations

import argparse

from trainer_hooks.cells.quorum import NoLiveCells, Step
from trainer_hooks.trainer.checkpoint import Checkpoints
from trainer_hooks.trainer.convert import convert_samples_to_train_data, freeze, optimizer_steps, rollout_metrics
from trainer_hooks.trainer.data import PromptData
from trainer_hooks.trainer.report import Report
from trainer_hooks.trainer.rollout import Rollouts
from trainer_hooks.trainer.runtime import Runtime
from trainer_hooks.trainer.warmup import supervised_warmup


class RefitFailed(RuntimeError):
    """No rollout cell holds the current weights; the message has the first cause."""


def train(
    args: argparse.Namespace,
    runtime: Runtime,
    rollouts: Rollouts,
    prompts: PromptData,
    held_out: PromptData | None,
    report: Report,
) -> None:
    """Run `args.num_rollout` rollouts from where `args.load` left off (or from the start)."""
    checkpoints = Checkpoints(args, runtime, prompts)
    start = checkpoints.resume()
    runtime.finish_generation()
    if start == 0:
        supervised_warmup(args, runtime, rollouts.tokenizer, report)
    refit(runtime, report)
    evaluate(rollouts, held_out, report, start)

    rollout_id = start
    while rollout_id < args.num_rollout:
        try:
            one_rollout(args, runtime, rollouts, prompts, report, rollout_id)
            checkpoints.maybe_save(rollout_id)
            rollout_id += 1
        except NoLiveCells as cause:
            rollout_id = checkpoints.recover(rollout_id, cause)
            refit(runtime, report)
            continue
        if rollout_id == args.num_rollout or (args.eval_interval and rollout_id % args.eval_interval == 0):
            evaluate(rollouts, held_out, report, rollout_id)
        report.end(tokens=rollouts.tokens_generated, version=runtime.version)
        runtime.tokens_per_s = report.rows[-1]["tokens_per_s"]

    if args.save_hf:
        runtime.group.save_hf(args.save_hf)
    runtime.log.append("run_finished", rollouts=args.num_rollout)


def one_rollout(
    args: argparse.Namespace,
    runtime: Runtime,
    rollouts: Rollouts,
    prompts: PromptData,
    report: Report,
    rollout_id: int,
) -> None:
    """One iteration. Raises NoLiveCells: the trainer's state is lost."""
    runtime.begin(rollout_id)
    report.begin(rollout_id, live_cells=(len(runtime.group.live), len(runtime.generation.live_cells)))
    with report.phase("generate"):
        batch = prompts.next_batch(args.rollout_batch_size)
        samples = runtime.kept(rollout_id)
        if samples is None:
            samples = rollouts.generate(rollout_id, batch)
            runtime.accept(rollout_id, samples, rollouts.generated_by)
        runtime.finish_generation()
    with report.phase("convert"):
        runtime.faults.point("convert")
        data = convert_samples_to_train_data(args, samples)
        report.add(rollout_metrics(data))
    with report.phase("freeze"):
        data = freeze(args, runtime.group, data)
    with report.phase("train"):
        for step_index, step in enumerate(optimizer_steps(args, data)):
            metrics = runtime.group.train_step(Step("actor", rollout_id, step_index), step)
            report.add({f"train/{name}": value for name, value in metrics.items()})
    with report.phase("refit"):
        refit(runtime, report)


def refit(runtime: Runtime, report: Report) -> None:
    """Bring the current weights into every pair's rollout cells; at least one must hold them afterwards."""
    results = runtime.refit()
    seconds = max((r.seconds for r in results), default=0.0)
    report.add({"refit/seconds": seconds, "refit/failed": float(sum(not r.ok for r in results))})
    if not any(r.ok for r in results) and not runtime.fleet.may_recover():
        causes = [r.cause for r in results] or ["none is up"]
        raise RefitFailed(f"no rollout cell could be refitted to version {runtime.version}: {causes[0]}")


def evaluate(rollouts: Rollouts, held_out: PromptData | None, report: Report, rollout_id: int) -> None:
    if held_out is not None:
        with report.phase("eval"):
            report.evaluation(rollout_id, rollouts.evaluate(held_out.all()))
