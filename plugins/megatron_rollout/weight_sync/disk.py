"""Disk: each version is a directory of safetensors, written whole beside its place and then renamed.

A reader opens every file of a directory before it reads the first byte, and makes sure that it was one directory all
the time. After that it does not matter what becomes of the directory: the open files stay what they were. A reader that
came too late gets an error that names the version it wanted and the newest one there is.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import torch
from safetensors import SafetensorError

from megatron_rollout.engine.checkpoint import HFReader, save_hf
from megatron_rollout.faults import fault_point
from megatron_rollout.weight_sync.group import TransferAborted, TransferFailed, TransferTimeout
from megatron_rollout.weight_sync.loader import BadWeights, hf_shapes
from megatron_rollout.weight_sync.names import listed
from megatron_rollout.weight_sync.transport import Progress, Shard

#: How many versions stay: the newest, and the one before it for readers that are still opening it.
KEPT = 2
_POLL_S = 0.01
_NUMBER = re.compile(r"v0*(\d+)$")


class VersionGone(TransferFailed, LookupError):
    """The version that was to be read is not there (any more); the message names it and the newest one."""


def directory_of(root: str | Path, version: int) -> Path:
    return Path(root) / f"v{version:09d}"


def versions(root: str | Path) -> list[int]:
    """Versions that are there whole, ascending."""
    if not Path(root).is_dir():
        return []
    found = [_NUMBER.match(path.name) for path in Path(root).iterdir() if path.is_dir()]
    return sorted(int(match[1]) for match in found if match)


def remove_old(root: str | Path, kept: int = KEPT) -> None:
    """Remove all but the newest `kept` versions. Each disappears at once: it is renamed before it is emptied."""
    for version in versions(root)[:-kept]:
        path = directory_of(root, version)
        hidden = path.with_name(f"{path.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            os.rename(path, hidden)
        except FileNotFoundError:  # another writer of this directory was faster
            continue
        shutil.rmtree(hidden, ignore_errors=True)


class PinnedReader(HFReader):
    """An `HFReader` whose files are all open and of one directory, whatever becomes of the path later.

    Raises VersionGone if the directory is not there or was replaced while its files were being opened.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory)
        try:
            before = path.stat()
            super().__init__(path)
            self.open_all()
            after = path.stat()
        except (OSError, SafetensorError) as error:
            raise VersionGone(_gone(path, f"{type(error).__name__}: {error}")) from error
        if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
            raise VersionGone(_gone(path, "it was replaced by another version"))
        #: of the directory, the same on every host that shares it
        self.identity = after.st_ino, after.st_mtime_ns


def _gone(path: Path, why: str) -> str:
    match, there = _NUMBER.search(path.name), versions(path.parent)
    wanted = f"version {match[1]}" if match else str(path)
    newest = f"the newest one there is version {there[-1]}" if there else "no version is there"
    return f"{wanted} cannot be read from {path.parent} ({why}); {newest}"


def load(shard: Shard, read: HFReader) -> None:
    """Overwrite this rank's shard, slice by slice."""
    with torch.no_grad():
        for name, parameter in shard.model.named_parameters():
            parameter.copy_(shard.weight_map.local(name, parameter.shape, read))


def check(shard: Shard, read: HFReader) -> None:
    """Raises BadWeights with every tensor that the directory lacks or has in another shape."""
    wanted = hf_shapes(shard.weight_map)
    problems = []
    if missing := sorted(set(wanted) - set(read.files)):
        problems.append(f"{read.directory} lacks {listed(missing)}")
    for name in sorted(set(wanted) & set(read.files)):
        if (shape := read.shape(name)) != wanted[name]:
            problems.append(f"{name} has shape {list(shape)} in {read.directory}, the model's is {list(wanted[name])}")
    if problems:
        raise BadWeights("; ".join(problems))


class DiskTransfer:
    """One rank's end of a pair (`Transport`): the trainer cell writes, its rollout cells read.

    directory: of this trainer cell's weights, one directory a version below it. sends: whether this trainer rank
    belongs to the replica that writes. checkpoint: where config and tokenizer files are copied from. What else
    `ReshardGroup` takes is not needed here.
    """

    def __init__(
        self,
        *,
        name: str,
        directory: str,
        checkpoint: str = "",
        sends: bool = True,
        timeout_s: float = 120.0,
        **_: object,
    ) -> None:
        self.name = name
        self.bytes_sent = self.bytes_received = 0
        self.root = Path(directory)
        self._checkpoint = checkpoint
        self._sends = sends
        self._timeout_s = timeout_s
        self._aborted = ""
        self._ready: tuple[Shard, PinnedReader] | None = None

    def join(self) -> None:
        """Nobody to meet: the directory is enough."""

    def prepare(
        self, source: Shard | None, destination: Shard | None, *, version: int, within_s: float | None = None
    ) -> None:
        """Write the version whole, or wait until it is there and has every tensor.

        Raises TransferTimeout, TransferAborted, VersionGone, BadWeights.
        """
        if source is not None:
            self._write(source, version)
        if destination is not None:
            deadline = time.monotonic() + (self._timeout_s if within_s is None else within_s)
            path = directory_of(self.root, version)
            while not path.is_dir():
                self._check(f"waiting for version {version} in {self.root}", deadline)
                if versions(self.root)[-1:] > [version]:
                    raise VersionGone(_gone(path, "it was removed"))
                time.sleep(_POLL_S)
            reader = PinnedReader(path)
            check(destination, reader)
            self._ready = destination, reader
        fault_point("refit_planned")

    def _write(self, source: Shard, version: int) -> None:
        tp, pp = source.groups.tp, source.groups.pp
        leads = self._sends and tp.rank() == 0 and pp.rank() == 0
        if leads:
            self.root.mkdir(parents=True, exist_ok=True)
        if self._sends:
            save_hf(
                source.model,
                source.weight_map,
                directory_of(self.root, version),
                tp_group=tp,
                pp_group=pp,
                source=self._checkpoint,
            )
        if leads:
            remove_old(self.root)

    def move(self, progress: Progress | None = None) -> None:
        if self._ready is not None:
            shard, reader = self._ready
            fault_point("refit_first_window")
            load(shard, reader)
            if progress is not None:
                progress(0)

    def _check(self, what: str, deadline: float) -> None:
        if self._aborted:
            raise TransferAborted(f"refit {self.name}: aborted while {what}: {self._aborted}")
        if time.monotonic() > deadline:
            raise TransferTimeout(f"refit {self.name}: {what}: not done in time")

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason

    def close(self) -> None:
        self._ready = None
