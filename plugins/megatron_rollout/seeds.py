"""Seeds that belong to a sample, never to the cell that happens to run it."""

from __future__ import annotations

import hashlib


def sample_seed(rollout_seed: int, rollout_id: int, sample_index: int, draw: int = 0) -> int:
    """63-bit seed of one sample: a hash of the run's seed, the rollout, the sample and how often it was drawn anew."""
    key = f"{rollout_seed}/{rollout_id}/{sample_index}/{draw}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
