"""Flat buckets between many tensors and few collectives.

A bucket belongs to the group alone. That is what makes an aborted collective harmless: what it may still write to,
seconds after everybody has left it, is never a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of tensor number `tensor` lie from element `at` on in the bucket."""

    tensor: int
    begin: int
    end: int
    at: int

    @property
    def until(self) -> int:
        return self.at + self.end - self.begin


def plan(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Piece]]:
    """Cuts tensors into buckets of at most `bucket_bytes`, one dtype a bucket. Depends on the order, sizes and dtypes
    only, so that all cells cut alike. Empty tensors need no bucket."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        room = bucket_bytes // dtype.itemsize
        pieces: list[Piece] = []
        used = 0
        for number, tensor in enumerate(tensors):
            begin = 0
            while tensor.dtype == dtype and begin < tensor.numel():
                end = min(tensor.numel(), begin + room - used)
                pieces.append(Piece(number, begin, end, used))
                used += end - begin
                begin = end
                if used == room:
                    yield pieces
                    pieces, used = [], 0
        if pieces:
            yield pieces


def fill(storage: Tensor, pieces: Sequence[Piece], flat: Sequence[Tensor]) -> Tensor:
    """Copies the pieces of the flat tensors into `storage` (bytes); returns the used part of it in their dtype."""
    dtype = flat[pieces[0].tensor].dtype
    bucket = storage[: pieces[-1].until * dtype.itemsize].view(dtype)
    for piece in pieces:
        bucket[piece.at : piece.until].copy_(flat[piece.tensor][piece.begin : piece.end])
    if bucket.is_cuda:
        # The group works on another thread, whose stream knows nothing of this copy.
        torch.cuda.current_stream(bucket.device).synchronize()
    return bucket


def empty(bucket: Tensor, pieces: Sequence[Piece], flat: Sequence[Tensor]) -> None:
    """Copies a bucket back to where its pieces came from."""
    for piece in pieces:
        flat[piece.tensor][piece.begin : piece.end].copy_(bucket[piece.at : piece.until])
