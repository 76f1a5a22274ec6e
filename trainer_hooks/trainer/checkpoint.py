"""Checkpoints of a run: written whole beside their place, renamed when complete, the newest few kept."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from trainer_hooks.cells.quorum import NoLiveCells
from trainer_hooks.trainer.data import PromptData
from trainer_hooks.trainer.runtime import Runtime

_STATE = "run.json"


class RunLost(RuntimeError):
    """The run cannot go on by itself; the message ends with the command that does."""


class Checkpoints:
    """Saves and restores trainer state (of one cell; all hold the same), data position and weight version."""

    def __init__(self, args: argparse.Namespace, runtime: Runtime, prompts: PromptData) -> None:
        self.args = args
        self.runtime = runtime
        self.prompts = prompts
        self.directory = Path(args.save or args.load or Path(args.output_dir) / "checkpoints")

    def resume(self) -> int:
        """Restore the newest complete checkpoint of `--load`; returns the rollout to go on with (0: from the start)."""
        if self.args.load is None:
            return 0
        found = newest(Path(self.args.load))
        if found is None:
            raise FileNotFoundError(f"--load {self.args.load}: no complete checkpoint in there")
        state = json.loads((found / _STATE).read_text())
        self.runtime.group.load_state(str(found))
        self.runtime.restore(found.name, state)
        self.prompts.load_state_dict(state["data"])
        return int(state["rollout_id"]) + 1

    def recover(self, rollout_id: int, cause: NoLiveCells) -> int:
        """No cell holds the run's state any more: go back to the newest complete checkpoint within this run.

        Returns the rollout to go on with.

        Raises RunLost with the command that goes on: cells are not replaced, none came back, or there is no checkpoint.
        """
        found = newest(self.directory)
        if found is None or not self.args.use_fault_tolerance:
            raise RunLost(f"{cause}; {_hint(found)}") from cause
        state = json.loads((found / _STATE).read_text())
        self.runtime.restore(found.name, state)
        try:
            self.runtime.group.restart_from(str(found))
        except NoLiveCells as error:
            raise RunLost(f"{error}; {_hint(found)}") from error
        self.prompts.load_state_dict(state["data"])
        return int(state["rollout_id"]) + 1

    def maybe_save(self, rollout_id: int) -> None:
        every = self.args.save_interval
        last = rollout_id + 1 == self.args.num_rollout
        if (every and (rollout_id + 1) % every == 0) or (self.args.save and last):
            self.save(rollout_id)

    def save(self, rollout_id: int) -> Path:
        """Write a checkpoint after `rollout_id`; returns its directory."""
        start = time.monotonic()
        target = self.directory / f"rollout-{rollout_id:07d}"
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self.runtime.group.save_state(str(partial))
        state: dict[str, Any] = {
            "rollout_id": rollout_id,
            "version": self.runtime.version,
            "data": self.prompts.state_dict(),
            "quorum": self.runtime.group.quorum.to_dict(),
            "step": list(self.runtime.group.last_step or ()),
        }
        (partial / _STATE).write_text(json.dumps(state, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        self.runtime.log.append(
            "checkpoint",
            checkpoint=target.name,
            steps={"actor": list(self.runtime.group.last_step or ())},
            version=self.runtime.version,
            seconds=time.monotonic() - start,
        )
        self.runtime.spill.forget_through(rollout_id)
        for old in complete(self.directory)[: -self.args.save_retain]:
            shutil.rmtree(old)
        return target


def _hint(found: Path | None) -> str:
    """The original command, plus `--load` where there is something to load."""
    words = list(sys.argv[1:])
    while "--load" in words:
        at = words.index("--load")
        del words[at : at + 2]
    if found is None:
        return f"there is no checkpoint (see --save-interval); start again with: {_command(words)}"
    return f"go on with: {_command([*words, '--load', str(found.parent)])}"


def _command(words: list[str]) -> str:
    return shlex.join(["python", "-m", "trainer_hooks.trainer", *words])


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    return sorted(p.parent for p in directory.glob(f"rollout-*/{_STATE}") if not p.parent.name.endswith(".partial"))


def newest(directory: Path) -> Path | None:
    found = complete(directory)
    return found[-1] if found else None
