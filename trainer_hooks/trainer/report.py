"""What a run shows and keeps: progress bar on a terminal, metrics.jsonl, a table and a plot at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PHASES = ("generate", "convert", "freeze", "train", "refit")


class Report:
    """metrics.jsonl gets one line a rollout (`rollout_id`, metrics, `seconds/<phase>`) and one an evaluation."""

    def __init__(self, output_dir: str, total: int, *, append: bool = False) -> None:
        self.directory = Path(output_dir)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / "metrics.jsonl"
        if not append:
            self.path.unlink(missing_ok=True)
        self.console = Console(stderr=True)
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._row: dict[str, Any] = {}
        self._started = time.monotonic()
        self._tokens = 0
        self._live = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[info]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task("start", total=total, info="")

    def __enter__(self) -> Report:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def begin(self, rollout_id: int, *, live_cells: tuple[int, int]) -> None:
        """Start a rollout's row. live_cells: (trainer, rollout)."""
        self._row = {"rollout_id": rollout_id, "cells/trainer": live_cells[0], "cells/rollout": live_cells[1]}
        self._live = f"cells {live_cells[0]}+{live_cells[1]}"
        self._started = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase into `seconds/<name>` and show it in the bar."""
        self._bar.update(self._task, description=name)
        start = time.monotonic()
        try:
            yield
        finally:
            key = f"seconds/{name}"
            self._row[key] = self._row.get(key, 0.0) + time.monotonic() - start

    def add(self, metrics: dict[str, Any]) -> None:
        self._row.update({k: v for k, v in metrics.items() if isinstance(v, int | float)})

    def end(self, *, tokens: int, version: int) -> None:
        """Finish the row. tokens: generated since the start of the run."""
        row = self._row
        seconds = time.monotonic() - self._started
        generated, self._tokens = tokens - self._tokens, tokens
        row |= {"weight_version": version, "seconds/total": seconds}
        row["tokens_per_s"] = generated / max(row.get("seconds/generate", seconds), 1e-9)
        self.rows.append(row)
        self._write(row)
        info = f"reward {row.get('rollout/reward', 0):.3f}  {row['tokens_per_s']:.0f} tokens/s  {self._live}"
        self._bar.update(self._task, advance=1, info=info)
        self._row = {}

    def evaluation(self, rollout_id: int, metrics: dict[str, float]) -> None:
        row = {"rollout_id": rollout_id, **metrics}
        self.evaluations.append(row)
        self._write(row)
        self.note(f"evaluation before rollout {rollout_id}: reward {metrics['eval/reward']:.3f} on held-out prompts")

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def _write(self, row: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(row, allow_nan=False, default=float) + "\n")

    # -- the end ------------------------------------------------------------------------------------------------

    def summary(self) -> None:
        """Print the table and write the plot."""
        if not self.rows:
            return
        table = Table(title="run")
        for column in ("", "first rollout", "last rollout"):
            table.add_column(column, justify="right" if column else "left")
        for name in ("rollout/reward", "train/loss", "train/train_rollout_logprob_abs_diff", "tokens_per_s"):
            table.add_row(name, *(f"{self.rows[i].get(name, float('nan')):.4g}" for i in (0, -1)))
        for first, last in [(self.evaluations[0], self.evaluations[-1])] if self.evaluations else []:
            table.add_row("eval/reward", f"{first['eval/reward']:.3f}", f"{last['eval/reward']:.3f}")
        total = sum(r["seconds/total"] for r in self.rows)
        for phase in _PHASES:
            spent = sum(r.get(f"seconds/{phase}", 0.0) for r in self.rows)
            table.add_row(f"share of {phase}", "", f"{spent / total:.1%}")
        Console().print(table)
        Console().print(f"metrics: {self.path}\nplot:    {self.plot()}", highlight=False, soft_wrap=True)

    def plot(self) -> Path:
        """Reward, loss, train-vs-rollout logprob difference and phase times over the rollouts, as a PNG."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        x = [r["rollout_id"] for r in self.rows]
        panels = [
            (axes[0, 0], "rollout/reward", "mean reward of the rollout"),
            (axes[0, 1], "train/loss", "loss"),
            (axes[1, 0], "train/train_rollout_logprob_abs_diff", "mean |train - rollout logprob|"),
        ]
        for axis, name, title in panels:
            axis.plot(x, [r.get(name, float("nan")) for r in self.rows], marker=".")
            axis.set(title=title, xlabel="rollout")
            axis.grid(alpha=0.3)
        if self.evaluations:
            axes[0, 0].plot(
                [e["rollout_id"] - 0.5 for e in self.evaluations],
                [e["eval/reward"] for e in self.evaluations],
                "o--",
                label="held-out, greedy",
            )
            axes[0, 0].legend()
        seconds = [[r.get(f"seconds/{p}", 0.0) for r in self.rows] for p in _PHASES]
        axes[1, 1].stackplot(x, seconds, labels=_PHASES)
        axes[1, 1].set(title="seconds by phase", xlabel="rollout")
        axes[1, 1].legend(loc="upper right", fontsize="small")
        path = self.directory / "run.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return path
