"""The weight commands of the SGLang wire on one rank of a rollout cell, so that trainers which know only that wire can
refit it: groups, buckets from a group, from a payload or from a directory, sessions, checks.

Who may generate when is the host's affair (it pauses first); here, too, nothing is scheduled while weights are written,
and an update that did not become complete leaves the cell out of service (see `session.py` for what complete means).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rollout.weight_sync.checker import WeightChecker
from megatron_rollout.weight_sync.checksum import hf_checksums
from megatron_rollout.weight_sync.disk import PinnedReader, VersionGone, check, load
from megatron_rollout.weight_sync.group import TransferFailed
from megatron_rollout.weight_sync.loader import HFLoader
from megatron_rollout.weight_sync.names import listed
from megatron_rollout.weight_sync.order import RefitIncomplete, WeightUpdates
from megatron_rollout.weight_sync.session import UpdateSession
from megatron_rollout.weight_sync.wire import Named, named_tensors
from megatron_rollout.weight_sync.wire_groups import WireGroups

#: Seconds that forming a group, or one bucket, may take; the wire has no word for it.
WIRE_TIMEOUT_S = 120.0


class WireUpdates:
    """Mixin of `RolloutRank`. The three arguments that every update has: load_format (None or "flattened_bucket"),
    flush_cache (the prefix cache is dropped in any case: it belongs to older weights), weight_version."""

    model: torch.nn.Module
    weight_map: Any
    engine: Any
    spec: Any
    groups: Any
    updates: WeightUpdates
    cell_group: dist.ProcessGroup
    cell_rank: int

    def _start_wire(self) -> None:
        self._wire = WireGroups()
        self._checker = WeightChecker(self.model)
        self._lazy_loader: HFLoader | None = None
        self._lazy_session: UpdateSession | None = None

    @property
    def _loader(self) -> HFLoader:
        if self._lazy_loader is None:
            self._lazy_loader = HFLoader(self.model, self.weight_map)
        return self._lazy_loader

    @property
    def _session(self) -> UpdateSession:
        if self._lazy_session is None:
            self._lazy_session = UpdateSession(self._loader.expected)
        return self._lazy_session

    # -- groups -------------------------------------------------------------------------------------------------

    def do_init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float = WIRE_TIMEOUT_S,
    ) -> None:
        """Join the group whose rank 0, a trainer, serves the store at that address."""
        self._wire.init(
            master_address=master_address,
            master_port=master_port,
            rank=rank_offset + self.cell_rank,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            timeout_s=timeout_s,
        )

    def do_destroy_weights_update_group(self, group_name: str) -> None:
        try:
            self._wire.destroy(group_name)
        except KeyError as error:
            raise ValueError(error.args[0]) from None

    # -- sessions -----------------------------------------------------------------------------------------------

    def do_begin_weight_update(self, selector: str = "all") -> None:
        """An update begins that `end_weight_update` ends. One that was open (its trainer may be dead) is given up."""
        if selector not in ("all", "target"):
            raise ValueError(f"selector must be 'all' or 'target' (there is no draft model here), got {selector!r}")
        self._session.begin()
        self.updates.begin()

    def do_end_weight_update(self) -> None:
        """Serve the new weights. Raises ValueError with the names that are missing: the cell serves nothing then."""
        version = self._session.end()
        self._session.close()
        self.updates.complete(self.engine.version if version is None else version)

    def do_set_weight_version(self, version: int) -> None:
        """Within an update: of what it brings; otherwise of the weights that are there."""
        if self._session.open:
            self._session.version = version
        else:
            self.engine.set_version(version)

    def _after_update(self) -> None:
        """Generation is to go on. An update that has written nothing is over; one that is not complete cannot be.

        Raises ValueError with the names that are missing.
        """
        if not self._lazy_session or not self._session.open:
            return
        missing = self._session.missing
        if not self.updates.landed:
            raise ValueError(
                f"the weight update is not complete: {len(missing)} tensors are missing: {listed(missing)}"
            )
        self._session.close()
        self.updates.cancel()

    # -- buckets ------------------------------------------------------------------------------------------------

    def do_update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: int | None = None,
        timeout_s: float = WIRE_TIMEOUT_S,
    ) -> None:
        """Take part in the broadcast of these tensors and keep this rank's slices of them.

        They are received even if a name or shape is wrong, so that the trainer gets the error and does not wait.
        """
        self._update(
            lambda: self._wire.receive(group_name, names, dtypes, shapes, load_format, timeout_s), weight_version
        )

    def do_update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[bytes],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: int | None = None,
    ) -> None:
        """Take tensors from a payload for each rank (see `wire.py`)."""
        world, tp = self.cell_group.size(), self.groups.tp.size()
        self._update(
            lambda: named_tensors(serialized_named_tensors, load_format, rank=self.cell_rank, world=world, tp=tp),
            weight_version,
        )

    def do_update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: int | None = None,
    ) -> None:
        """Take all weights from a Hugging Face checkpoint directory; every rank reads its own slices, of one version."""
        if load_format not in (None, "auto", "safetensors"):
            raise ValueError(f"load_format {load_format!r} is not supported from a directory; known is 'safetensors'")
        version = self.engine.version if weight_version is None else weight_version
        reader: list[PinnedReader] = []
        self.updates.refit(
            version, lambda: reader.append(self._open_checkpoint(model_path)), lambda: load(self, reader[0])
        )
        self._session.close()

    def _open_checkpoint(self, path: str) -> PinnedReader:
        """All ranks of the cell open the same directory, not one before and one after it was replaced."""
        reader, error = None, None
        try:
            reader = PinnedReader(path)
            check(self, reader)
        except (TransferFailed, ValueError) as caught:  # the others wait for this rank's word
            error = caught
        opened: list[Any] = [None] * self.cell_group.size()
        dist.all_gather_object(opened, None if error else reader and reader.identity, group=self.cell_group)
        if error is not None:
            raise error
        if reader is None or None in opened:
            raise RefitIncomplete(f"another rank of the cell could not open {path}")
        if len(set(opened)) > 1:
            raise VersionGone(f"{path} was replaced by another version while the ranks of the cell opened it")
        return reader

    def _update(self, receive: Callable[[], list[Named]], version: int | None) -> None:
        """One call's tensors: receive, check, write, and complete the update if it is complete with them."""
        session, updates = self._session, self.updates
        updates.begin(version)
        names: list[str] = []
        tensors: list[Named] = []
        error: Exception | None = None
        try:
            tensors = receive()
            names = [name for name, _ in tensors]
            self._loader.check(names, [tuple(tensor.shape) for _, tensor in tensors])
        except Exception as caught:  # the other ranks of the cell must hear of it before it is raised
            error = caught
        if updates.worst(error is not None):
            if not session.open:
                updates.cancel()
            raise error or RefitIncomplete("another rank of the cell could not take its part of the weights")
        if names:
            updates.overwrite("a weight update is not complete")
            self._loader.load(tensors)
        if session.arrived(names, version):
            session.close()
            updates.complete(self.engine.version if version is None else version)
        elif session.open and not updates.landed:
            updates.reason = f"a weight update is not complete: {len(session.missing)} tensors are missing"

    # -- checks -------------------------------------------------------------------------------------------------

    def do_check_weights(self, action: str = "checksum") -> dict[str, Any]:
        """checksum: of every tensor. snapshot, reset_tensors, compare: prove that an update writes everything: keep
        checksums, destroy the weights, and (after the update) name what is not as it was.

        Raises ValueError for an unknown action, for `compare` without a snapshot, and with the names that differ.
        """
        if action == "checksum":
            tp, pp = self.groups.tp, self.groups.pp
            return {"checksums": hf_checksums(self.model, self.weight_map, tp_group=tp, pp_group=pp)}
        if action == "snapshot":
            return {"tensors": self._checker.snapshot()}
        if action == "reset_tensors":
            self.updates.begin()
            self.updates.overwrite("its weights were reset by check_weights")
            return {"tensors": self._checker.reset()}
        if action == "compare":
            return {"tensors": self._checker.compare()}
        raise ValueError(f"action must be checksum, snapshot, reset_tensors or compare, got {action!r}")
