"""`python -m trainer_hooks.chaos`: breaks the real trainer at every moment, and proves from its log what became of it.

    --quick             eight named trials, on two cells
    (no option)         a subset that covers every pair of (moment, kind, cell, cells, policy), at most 40 trials
    --full              every trial
    --budget MINUTES    start no further session after so long
    --resume FILE       results are kept here, a line a trial; what held before is not tried again

A trial holds if its failure was injected and noticed, its step was committed, the audit of its session's log is clean
and, with the policy `wait`, the weights are bitwise those of the same run without failure. Exit status 0: all held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainer_hooks.cells.audit import audit
from trainer_hooks.cells.event_log import Event, read_events
from trainer_hooks.cells.trials import (
    Setup,
    Trial,
    Verdict,
    all_trials,
    covering,
    judge,
    quick_trials,
    sessions,
    weights_by_version,
)

#: A small run of the built-in task: what counts is what survives, not what is learned. The entropy bonus makes sure
#: that every step changes the weights, whatever the rewards.
_RUN = """--rollout-backend megatron --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32
    --entropy-coef 0.05 --warmup-steps 0 --rollout-max-requests 32 --deterministic --check-weights --use-fault-tolerance
    --enable-fault-injection --max-cell-restarts 20"""


class SessionFailed(RuntimeError):
    """A session's run did not end with status 0; the message holds its last words."""


class Chaos:
    """directory: of the sessions' runs. seed: of the covering subset and of the runs. extra: further options of every
    run. deadline_s: of one session."""

    def __init__(self, directory: Path, *, seed: int, extra: Sequence[str], deadline_s: float) -> None:
        self.directory = directory
        self.seed = seed
        self.extra = list(extra)
        self.deadline_s = deadline_s
        self._references: dict[tuple[Setup, int], dict[int, str]] = {}
        self._count = 0

    def session(self, setup: Setup, trials: Sequence[Trial]) -> list[Verdict]:
        """Run the trainer once through `trials`, one a rollout, and judge them."""
        faults = [fault for rollout, trial in enumerate(trials) for fault in trial.faults(rollout)]
        reference: dict[int, str] | None = None
        events: list[Event] = []
        problem = ""
        try:
            if setup.policy == "wait":
                reference = self.reference(setup.reference, len(trials))
            events = self.run(setup, len(trials), [str(f) for f in faults])
        except SessionFailed as error:
            events, problem = _events(self._output), f"the run failed: {error}"
        report = audit(events, unfinished=bool(problem))
        if not problem and report.problems:
            problem = f"audit: {report.problems[0]} ({len(report.problems)} in all)"
        verdicts = [judge(trial, rollout, events, reference) for rollout, trial in enumerate(trials)]
        return [Verdict(v.trial, problem or v.why, v.seconds) for v in verdicts]

    def reference(self, setup: Setup, rollouts: int) -> dict[int, str]:
        """Weights at each version of the run without failure."""
        key = (setup, rollouts)
        if key not in self._references:
            weights = weights_by_version(self.run(setup, rollouts, []))
            if len(set(weights.values())) != rollouts + 1:
                raise SessionFailed(f"the run without failure proves nothing: its weights are {weights}")
            self._references[key] = weights
        return self._references[key]

    def run(self, setup: Setup, rollouts: int, faults: Sequence[str]) -> list[Event]:
        """One run of the trainer; its events. Raises SessionFailed."""
        self._count += 1
        self._output = output = self.directory / f"run-{self._count}"
        cells = ["--num-trainer-cells", str(setup.cells)]
        cells += ["--colocate"] if setup.colocate else ["--num-rollout-cells", "1"]
        options = [*_RUN.split(), *cells, "--on-cell-failure", setup.policy, "--num-rollout", str(rollouts)]
        options += ["--seed", str(self.seed), "--output-dir", str(output), *self.extra]
        options += [word for fault in faults for word in ("--inject-fault", fault)]
        output.mkdir(parents=True)
        with open(output / "output.txt", "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer_hooks.trainer", *options],
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                status = process.wait(self.deadline_s)
            except subprocess.TimeoutExpired:
                raise SessionFailed(f"it was not done within {self.deadline_s:g} s") from None
            finally:
                _end(process)
        if status != 0:
            words = (output / "output.txt").read_text(errors="replace").strip().splitlines()
            last = next((line for line in reversed(words) if "error:" in line), words[-1] if words else "")
            raise SessionFailed(f"status {status}: {last}")
        return _events(output)


def _events(output: Path) -> list[Event]:
    log = output / "events.jsonl"
    return read_events(log) if log.exists() else []


def _end(process: subprocess.Popen[bytes], grace_s: float = 20.0) -> None:
    """End the run with everything that it started (it ends its cells itself when it is asked to)."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(grace_s)


def chosen(options: argparse.Namespace) -> list[Trial]:
    """The trials that the options ask for, without those that held before."""
    if options.quick:
        trials = quick_trials()
    else:
        everything = all_trials()
        trials = everything if options.full else covering(everything, seed=options.seed)
    if options.only:
        trials = [t for t in all_trials() + quick_trials() if t.name in options.only]
        if missing := sorted(set(options.only) - {t.name for t in trials}):
            raise SystemExit(f"error: no trial is named {', '.join(missing)}")
        trials = list(dict.fromkeys(trials))
    done = set()
    if options.resume and options.resume.exists():
        lines = [json.loads(line) for line in options.resume.read_text().splitlines()]
        done = {line["trial"] for line in lines if line["held"]}
    return [t for t in trials if t.name not in done]


def show(verdicts: Sequence[Verdict], seed: int, console: Console) -> None:
    table = Table("trial", "held", "noticed after", "why not", title=f"chaos, seed {seed}")
    for v in verdicts:
        noticed = f"{v.seconds:.2f} s" if v.seconds is not None else "–"
        table.add_row(v.trial.name, "yes" if v.held else "NO", noticed, v.why)
    console.print(table)
    console.print(f"{sum(v.held for v in verdicts)} of {len(verdicts)} held")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_hooks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true")
    which.add_argument("--full", action="store_true")
    which.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these trials")
    parser.add_argument("--budget", type=float, metavar="MINUTES")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--session-deadline", type=float, default=1200.0, metavar="SECONDS")
    parser.add_argument("--list", action="store_true", help="print the trials and do nothing")
    parser.add_argument("extra", nargs="*", help="further options of the trainer, after --")
    options = parser.parse_args(argv)
    trials = chosen(options)
    console = Console()
    if options.list:
        console.print("\n".join(t.name for t in trials), highlight=False)
        return 0
    verdicts: list[Verdict] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        chaos = Chaos(Path(directory), seed=options.seed, extra=options.extra, deadline_s=options.session_deadline)
        for setup, group in sessions(trials):
            if options.budget is not None and time.monotonic() - began > options.budget * 60:
                console.print(f"the budget of {options.budget:g} minutes is used up: {setup} and what follows is left")
                break
            console.print(f"{setup}: {len(group)} trials", highlight=False)
            found = chaos.session(setup, group)
            verdicts += found
            if options.resume:
                with open(options.resume, "a") as file:
                    for v in found:
                        row = {**v.trial.to_dict(), "held": v.held, "why": v.why, "seconds": v.seconds}
                        file.write(json.dumps({**row, "seed": options.seed}) + "\n")
    show(verdicts, options.seed, console)
    return 0 if verdicts and all(v.held for v in verdicts) else int(bool(trials))


if __name__ == "__main__":
    sys.exit(main())
