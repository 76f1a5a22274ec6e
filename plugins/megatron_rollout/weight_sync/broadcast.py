"""Broadcast: buckets of whole Hugging Face tensors, from one rank of each pipeline stage of a trainer cell to all ranks
of its rollout cells, each of which keeps its own slices.

More bytes than resharding, but neither side needs to know the other's layout. What trainers of other projects do over
the SGLang wire is the same from outside; see `wire_groups.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_rollout.device import device
from megatron_rollout.faults import fault_point
from megatron_rollout.weight_sync import wire
from megatron_rollout.weight_sync.buckets import BUCKET_BYTES, Entry, cut, entries, places, whole_tensors
from megatron_rollout.weight_sync.group import RefitGroup, TransferFailed
from megatron_rollout.weight_sync.loader import BadWeights, HFLoader
from megatron_rollout.weight_sync.names import listed
from megatron_rollout.weight_sync.transport import Progress, Shard


class BroadcastGroup:
    """One rank's end of a pair (`Transport`). Arguments as of `ReshardGroup`, and:

    stages: pipeline stages of the trainer; each has a group of its own: its first rank, then all rollout ranks. stage,
    tp_rank: of this trainer rank. sends: whether it belongs to the replica that sends; tensor-parallel rank 0 of each
    stage does, the others help to gather.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        name: str,
        rank: int,
        world_size: int,
        source_ranks: int,
        destination_offset: int | None = None,
        stages: int = 1,
        stage: int | None = None,
        tp_rank: int = 0,
        sends: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 120.0,
    ) -> None:
        self.name = name
        self.bytes_sent = self.bytes_received = 0
        self._bucket_bytes = bucket_bytes
        self._source: Shard | None = None
        self._loader: tuple[Shard, HFLoader] | None = None
        self._buckets: dict[int, list[list[Entry]]] = {}
        self._is_source = destination_offset is None
        self._gathers = self._is_source and sends
        leads = [stage or 0] if self._gathers and tp_rank == 0 else []
        members = leads if self._is_source else range(stages)
        self._links = {
            number: RefitGroup(
                host=host,
                port=port,
                name=f"{name}-stage-{number}",
                rank=0 if self._is_source else 1 + rank - source_ranks,
                world_size=1 + world_size - source_ranks,
                timeout_s=timeout_s,
            )
            for number in members
        }

    def join(self) -> None:
        for link in self._links.values():
            link.join()

    def prepare(
        self, source: Shard | None, destination: Shard | None, *, version: int, within_s: float | None = None
    ) -> None:
        """The trainer says what it will send; every rollout rank checks it against its model before it says yes.

        Raises BadWeights (names, shapes), TransferFailed.
        """
        self._source = source
        if source is not None:
            if self._gathers:
                self._agree(source, lambda: self._offer(source, None, version, within_s))
        else:
            self._offer(None, destination, version, within_s)
        fault_point("refit_planned")

    def _agree(self, source: Shard, offer: Callable[[], None]) -> None:
        """The ranks that gather begin together, or not at all: they would wait for each other."""
        failure: Exception | None = None
        try:
            offer()
        except (TransferFailed, ValueError) as error:
            failure = error
        if source.groups.tp.size() > 1:
            failed = torch.tensor([failure is not None], dtype=torch.int32)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=source.groups.tp)
            if failed.item() and failure is None:
                failure = TransferFailed(f"refit group {self.name}: the rank that sends for this stage is not ready")
        if failure is not None:
            raise failure

    def _offer(self, source: Shard | None, destination: Shard | None, version: int, within_s: float | None) -> None:
        for link in self._links.values():
            link.within(link.timeout_s if within_s is None else within_s)
        mine = entries(source) if source is not None and self._links else []
        offers: list[Entry] = []
        for number, link in self._links.items():
            said = link.exchange((version, mine))
            versions = [v for v, _ in said]
            if set(versions) != {version}:
                raise TransferFailed(f"{link}: the members refit different versions: {versions}")
            self._buckets[number] = cut(said[0][1], self._bucket_bytes)
            offers += said[0][1]
        self.bytes_sent = sum(e.nbytes for e in mine) if source is not None else 0
        self.bytes_received = sum(e.nbytes for e in offers) if destination is not None else 0
        problem = _checked(self._loader_of(destination), offers) if destination is not None else ""
        for link in self._links.values():  # a refusal is everybody's: nobody starts to send
            refusals = sorted({answer for answer in link.exchange(problem) if answer})
            if refusals:
                raise BadWeights("; ".join(refusals))

    def move(self, progress: Progress | None = None) -> None:
        if self._is_source:
            self._send(progress)
        elif self._loader is not None:
            self._receive(self._loader[1], progress)

    def _send(self, progress: Progress | None) -> None:
        """Every rank of the stage gathers every tensor, whatever becomes of the transfer: the others wait for it."""
        if self._source is None:
            raise TransferFailed(f"refit group {self.name}: nothing was prepared")
        if not self._gathers:
            return
        tensors = whole_tensors(self._source)
        failure: TransferFailed | None = None
        link = next(iter(self._links.values()), None)
        if link is None:
            for _ in tensors:
                pass
            return
        (buckets,) = self._buckets.values()
        for number, bucket in enumerate(buckets):
            flat = _flat([next(tensors)[1] for _ in bucket])
            if failure is None:
                try:
                    link.wait(link.post_broadcast([flat]))
                except TransferFailed as error:
                    failure = error
            fault_point("refit_first_window" if number == 0 else "refit_middle")
            if progress is not None:
                progress(number)
        if failure is not None:
            raise failure
        link.settle()

    def _receive(self, loader: HFLoader, progress: Progress | None) -> None:
        done = 0
        for number, link in self._links.items():
            for bucket in self._buckets[number]:
                flat = torch.empty(sum(e.nbytes for e in bucket), dtype=torch.uint8, device=device())
                link.wait(link.post_broadcast([flat]))
                loader.load(wire.unflatten(flat, places(bucket)))
                fault_point("refit_first_window" if done == 0 else "refit_middle")
                if progress is not None:
                    progress(done)
                done += 1
            link.settle()

    def _loader_of(self, shard: Shard) -> HFLoader:
        if self._loader is None or self._loader[0] is not shard:
            self._loader = shard, HFLoader(shard.model, shard.weight_map)
        return self._loader[1]

    def abort(self, reason: str) -> None:
        for link in self._links.values():
            link.abort(reason)

    def close(self) -> None:
        self._source = self._loader = None
        for link in self._links.values():
            link.close()


def _checked(loader: HFLoader, offers: Sequence[Entry]) -> str:
    """What is wrong with the trainer's offer, "" if nothing is: it must be the whole model."""
    names = [entry.name for entry in offers]
    try:
        loader.check(names, [entry.shape for entry in offers])
    except BadWeights as error:
        return str(error)
    missing = sorted(set(loader.expected) - set(names))
    return f"the trainer lacks {listed(missing)}" if missing else ""


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
