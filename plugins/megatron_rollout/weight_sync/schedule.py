"""What goes from which rank to which in a refit, in windows that all ranks pass through in step.

megatron-core's resharding planner says which slices of which parameter a destination rank needs and who has them; it is
a function of what all ranks say of their tensors, so every rank replays it and keeps its own part. On top of it:
whatever disagrees between the two sides is found before the first byte; large slices are cut; and the transfers are
dealt out to the destinations in turn, in windows of bounded size, so that staging is bounded too and all destinations
are served at the same time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# The deterministic core of build_plan_from_rosters, which itself keeps neither dtypes nor the order over ranks.
from megatron.core.resharding.planner import _extract_module_metadata, _iter_global_transfer_ops
from megatron.core.resharding.utils import ParameterMetadata, named_persistent_buffers

from megatron_rollout.weight_sync.names import listed

#: Largest piece of a tensor that is moved (or staged) at once, and what a rank sends or receives in one window.
PIECE_BYTES = 32 << 20
WINDOW_BYTES = 64 << 20

_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


class RefitMismatch(ValueError):
    """The two sides of a refit do not have the same tensors; the message lists every difference."""


@dataclass(frozen=True)
class Tensors:
    """What one rank says of its model: metadata of its parameters and persistent buffers, and which are buffers."""

    source: list[ParameterMetadata] = field(default_factory=list)
    destination: list[ParameterMetadata] = field(default_factory=list)
    buffers: frozenset[str] = frozenset()


def describe(
    source: torch.nn.Module | None, destination: torch.nn.Module | None, *, rank: int, source_offset: int, offset: int
) -> Tensors:
    """This rank's contribution. rank: in the group. source_offset, offset: what turns a rank of the model's own world
    into one of the group, on either side."""
    cache: dict[Any, Any] = {}
    found = Tensors(
        _extract_module_metadata(source, rank, None, source_offset, cache),
        _extract_module_metadata(destination, rank, None, offset, cache),
    )
    names = {
        full_name
        for module in (source, destination)
        if module is not None
        for full_name, *_ in named_persistent_buffers(module)
    }
    resolved = {m.resolved_name for m in (*found.source, *found.destination) if m.name in names}
    return Tensors(found.source, found.destination, frozenset(str(name) for name in resolved))


@dataclass(frozen=True)
class Piece:
    """A slice that goes from `sender` to `receiver` (group ranks), as `dtype`.

    source, destination: names of the tensor in the two models (they differ under pipeline parallelism).
    """

    sender: int
    receiver: int
    source: str
    destination: str
    source_slice: tuple[slice, ...]
    destination_slice: tuple[slice, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Schedule:
    """This rank's part. windows: pieces that it sends, receives or keeps, in an order that all ranks share.

    buffer_dtypes: {buffer: dtype that the source has it in}, by the name in the destination model of this rank.
    """

    rank: int
    windows: tuple[tuple[Piece, ...], ...]
    buffer_dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for window in self.windows for piece in window)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks that this one exchanges something with."""
        return tuple(sorted({r for p in self.pieces for r in (p.sender, p.receiver)} - {self.rank}))

    @property
    def bytes_sent(self) -> int:
        return sum(p.nbytes for p in self.pieces if p.sender == self.rank != p.receiver)

    @property
    def bytes_received(self) -> int:
        return sum(p.nbytes for p in self.pieces if p.receiver == self.rank != p.sender)


def schedule(
    everyone: Sequence[Tensors], *, rank: int, partial: bool = False, window_bytes: int = WINDOW_BYTES
) -> Schedule:
    """The schedule of `rank` from what all ranks said (`describe`), in rank order.

    partial: the source has a part of the model only (one pipeline stage); tensors that it does not have stay as they
    are. Raises RefitMismatch, the same on every rank.
    """
    sources: dict[str, list[ParameterMetadata]] = defaultdict(list)
    for tensors in everyone:
        for metadata in tensors.source:
            sources[str(metadata.resolved_name)].append(metadata)
    destinations = {
        r: {str(m.resolved_name): m for m in tensors.destination if not partial or _origin(m, sources)}
        for r, tensors in enumerate(everyone)
    }
    check(sources, destinations, partial=partial)
    buffers = frozenset().union(*(tensors.buffers for tensors in everyone))
    pieces = _pieces(sources, destinations, buffers)
    _check_covered(pieces, destinations)
    windows = _windows(pieces, window_bytes)
    mine = tuple(tuple(p for p in window if rank in (p.sender, p.receiver)) for window in windows)
    adopted = {m.name: sources[name][0].dtype for name, m in destinations[rank].items() if name in buffers}
    return Schedule(rank, tuple(w for w in mine if w), adopted)


def _origin(metadata: ParameterMetadata, sources: dict[str, list[ParameterMetadata]]) -> str | None:
    """Name under which the source has this tensor of a destination, None if it does not.

    A tied output layer of a last pipeline stage is the embedding once more, which is all that a source may have.
    """
    name = str(metadata.resolved_name)
    if name in sources:
        return name
    return _EMBEDDING if name == _OUTPUT and _EMBEDDING in sources else None


def _whole_shape(metadata: ParameterMetadata) -> tuple[int, ...]:
    shape = list(metadata.shape)
    if metadata.is_tp and metadata.tensor_parallel_group_ranks:
        shape[metadata.partition_dim] *= len(metadata.tensor_parallel_group_ranks)
    return tuple(shape)


def check(
    sources: dict[str, list[ParameterMetadata]],
    destinations: dict[int, dict[str, ParameterMetadata]],
    *,
    partial: bool = False,
) -> None:
    """Raises RefitMismatch with every tensor that one side lacks or has in another shape."""
    problems = []
    wanted = {name: m for by_name in destinations.values() for name, m in by_name.items()}
    origins = {name: _origin(m, sources) for name, m in wanted.items()}
    if missing := sorted(name for name, origin in origins.items() if origin is None):
        problems.append(f"the trainer lacks {listed(missing)}")
    # a tied output layer may be there only because the source's pipeline needs a second copy of the embedding
    unused = set(sources) - set(filter(None, origins.values())) - {_OUTPUT if _EMBEDDING in sources else ""}
    if wanted and unused and not partial:
        problems.append(f"the rollout model lacks {listed(sorted(unused))}")
    for name, metadata in sorted(wanted.items()):
        if (origin := origins[name]) is not None:
            theirs, ours = _whole_shape(sources[origin][0]), _whole_shape(metadata)
            if theirs != ours:
                problems.append(f"{name} is {list(theirs)} in the trainer and {list(ours)} in the rollout model")
    if problems:
        raise RefitMismatch("trainer and rollout cells cannot be matched: " + "; ".join(problems))


def _check_covered(pieces: Sequence[Piece], destinations: dict[int, dict[str, ParameterMetadata]]) -> None:
    """Raises RefitMismatch if an element of a destination would keep its old value.

    The planner passes over ranks that do not find themselves in their own process groups: a wrong offset, mostly.
    """
    covered: dict[tuple[int, str], int] = defaultdict(int)
    for piece in pieces:
        covered[piece.receiver, piece.destination] += math.prod(piece.shape)
    short = [
        f"{m.name} of rank {rank} ({covered[rank, m.name]} of {math.prod(m.shape)} elements)"
        for rank, by_name in destinations.items()
        for m in by_name.values()
        if covered[rank, m.name] != math.prod(m.shape)
    ]
    if short:
        raise RefitMismatch(f"the transfer would not cover {listed(short)}")


def _pieces(
    sources: dict[str, list[ParameterMetadata]],
    destinations: dict[int, dict[str, ParameterMetadata]],
    buffers: frozenset[str],
) -> list[Piece]:
    """All pieces of all ranks: destinations in turn, so that none waits until another has everything."""
    turns: dict[int, int] = defaultdict(int)
    ordered: list[tuple[int, int, Piece]] = []
    for _, receiver, sender, source_slice, slice_, src, dst in _iter_global_transfer_ops(destinations, sources):
        shape = tuple(len(range(*s.indices(n))) for s, n in zip(slice_, dst.shape, strict=True))
        dtype = src.dtype if dst.resolved_name in buffers else dst.dtype
        whole = Piece(sender, receiver, src.name, dst.name, source_slice, slice_, shape, dtype)
        for piece in _cut(whole, src.shape, dst.shape):
            ordered.append((turns[receiver], receiver, piece))
            turns[receiver] += 1
    ordered.sort(key=lambda entry: entry[:2])
    return [piece for _, _, piece in ordered]


def _cut(piece: Piece, source_shape: Sequence[int], shape: Sequence[int]) -> Iterator[Piece]:
    """`piece` in parts of at most PIECE_BYTES, cut along the first dimension."""
    rows = piece.shape[0] if piece.shape else 1
    step = max(1, PIECE_BYTES * rows // max(1, piece.nbytes))
    if step >= rows:
        yield piece
        return
    begin_source = piece.source_slice[0].indices(source_shape[0])[0]
    begin = piece.destination_slice[0].indices(shape[0])[0]
    for row in range(0, rows, step):
        n = min(step, rows - row)
        yield Piece(
            piece.sender,
            piece.receiver,
            piece.source,
            piece.destination,
            (slice(begin_source + row, begin_source + row + n), *piece.source_slice[1:]),
            (slice(begin + row, begin + row + n), *piece.destination_slice[1:]),
            (n, *piece.shape[1:]),
            piece.dtype,
        )


def _windows(pieces: Sequence[Piece], window_bytes: int) -> Iterator[list[Piece]]:
    """Cut where a rank would send, or receive, more than `window_bytes` in one window."""
    window: list[Piece] = []
    load: dict[tuple[str, int], int] = defaultdict(int)
    for piece in pieces:
        ends = ("out", piece.sender), ("in", piece.receiver)
        if window and max(load[end] for end in ends) + piece.nbytes > window_bytes:
            yield window
            window = []
            load.clear()
        window.append(piece)
        for end in ends:
            load[end] += piece.nbytes
    if window:
        yield window
