"""Finished rollouts on disk until a checkpoint holds what was learned from them, so that none has to be made again.

A rollout that is taken up again after a restore is the one that was accepted: its samples are in the event log already
and were made with the very weights that the checkpoint restored (or, some rollouts after it, with those that the run
comes to again).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from trainer_hooks.trainer.sample import Sample

#: A spilled rollout fits a run only if these are what they were.
_SHAPE = ("rollout_batch_size", "n_samples_per_prompt", "rollout_seed", "prompt_data")


class Spill:
    """directory: made when first needed. Samples that JSON cannot hold (a reward function's own objects) are not
    spilled; such a rollout is generated again."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self.directory = directory
        self._shape = {name: getattr(args, name) for name in _SHAPE}

    def write(self, rollout_id: int, samples: Sequence[Sample]) -> bool:
        """Keep a finished rollout, on disk when this returns. False if its samples cannot be kept."""
        try:
            lines = [json.dumps(self._shape), *(json.dumps(s.to_dict()) for s in samples)]
        except (TypeError, ValueError):
            return False
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._path(rollout_id)
        partial = path.with_suffix(".partial")
        with open(partial, "w") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        return True

    def read(self, rollout_id: int) -> list[Sample] | None:
        """The samples of a rollout, None if it is not here or was made with other options."""
        try:
            shape, *lines = self._path(rollout_id).read_text().splitlines()
        except (FileNotFoundError, ValueError):
            return None
        if json.loads(shape) != self._shape:
            return None
        return [Sample.from_dict(json.loads(line)) for line in lines]

    def forget_through(self, rollout_id: int) -> None:
        """A checkpoint holds what was learned from these."""
        for path in self.directory.glob("rollout-*.jsonl"):
            if int(path.stem.split("-")[1]) <= rollout_id:
                path.unlink(missing_ok=True)

    def forget_all(self) -> None:
        for path in self.directory.glob("rollout-*"):
            path.unlink(missing_ok=True)

    def _path(self, rollout_id: int) -> Path:
        return self.directory / f"rollout-{rollout_id:07d}.jsonl"
