"""Refits between two worlds: every transport and several layouts, exact to the bit, in engines that go on generating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_utils import RankPool, loopback_store
from refit_ranks import Job, Layout, on_both

#: (transport, family, dtype, sources on two ranks?, source layout, destination layout): each transport, dtype and family
#: meets several of the others; the long matrix is in test_refit_matrix.py.
CASES = [
    ("reshard", "llama", "float32", True, Layout(tp=2), Layout()),
    ("reshard", "qwen3-tied", "bfloat16", False, Layout(), Layout(pp=2)),
    ("reshard", "qwen2", "float32", False, Layout(), Layout(cells=2)),
    ("reshard", "qwen3", "bfloat16", True, Layout(), Layout()),  # two replicas inside the trainer cell
    ("broadcast", "qwen3", "float32", True, Layout(pp=2), Layout()),
    ("disk", "qwen2", "bfloat16", False, Layout(), Layout(tp=2)),
]


@pytest.fixture(scope="module")
def store() -> Any:
    return loopback_store()


def _versions(job: Job) -> range:
    """A writer to disk does not wait for readers, as the driver of a run does: one version."""
    return range(3, 4) if job.transport == "disk" else range(1, 4)


def _send(rank: int, world: int, job: Job, checkpoint: str, layout: Layout, _: Any, dtype: str, out: str) -> Any:
    """Three versions, each with other weights; the last one is saved for the test to load."""
    from refit_ranks import Sender, load_scaled, save, shard_of

    shard = shard_of(checkpoint, layout, dtype)
    sender = Sender(job, rank, shard)
    for version in _versions(job):
        load_scaled(shard, checkpoint, 1 + 0.1 * version)
        sent = sender.send(version)
    sender.member.leave()
    first = shard.groups.dp_cp.rank() == 0
    save(shard, out, checkpoint, writes=first)
    return shard.checksums(), sent


def _receive(rank: int, world: int, job: Job, checkpoint: str, _: Any, layout: Layout, dtype: str, out: str) -> Any:
    from refit_ranks import checksums, greedy, join_as_destination, rollout_of

    rollout = rollout_of(checkpoint, layout, dtype)
    landed = [rollout.weights_landed]
    join_as_destination(job, rollout)
    parts: dict[str, float] = {}
    for version in _versions(job):
        parts = rollout.do_refit(version)
        landed.append((rollout.weights_landed, rollout.engine.version))
    rollout.do_leave_refit_group()
    return checksums(rollout), parts, landed, greedy(rollout)


def _fresh(rank: int, world: int, directory: str, layout: Layout, dtype: str) -> Any:
    from refit_ranks import greedy, rollout_of

    return greedy(rollout_of(directory, layout, dtype, load=True))


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{c[4]}-{c[5]}".replace("Layout", "").replace(" ", "")
)
def test_a_refit_is_exact(
    case: Any, one_rank: RankPool, two_ranks: RankPool, checkpoints: dict[str, Path], store: Any, tmp_path: Path
) -> None:
    transport, family, dtype, two_sources, source, destination = case
    sources, destinations = (two_ranks, one_rank) if two_sources else (one_rank, two_ranks)
    options: dict[str, Any] = {
        "reshard": {"window_bytes": 50_000},
        "broadcast": {"stages": source.pp, "bucket_bytes": 50_000},
        "disk": {"directory": str(tmp_path / "weights"), "checkpoint": str(checkpoints[family])},
    }[transport]
    job = Job(store.port, f"exact-{CASES.index(case)}", sources.world, destinations.world, transport, options=options)
    saved = str(tmp_path / "saved")
    checkpoint = str(checkpoints[family])
    sent, received = on_both(sources, _send, destinations, _receive, job, checkpoint, source, destination, dtype, saved)

    expected = sent[0][0]
    for checksums, parts, landed, outputs in received:
        assert checksums == expected
        assert landed == [False, *((True, version) for version in _versions(job))]
        assert set(parts) == {"suspend", "prepare", "move", "resume", "bytes"}
        assert outputs == received[0][3]
    fresh = destinations.run(_fresh, saved, destination, dtype)
    assert {k: v[0] for k, v in received[0][3].items()} == {k: v[0] for k, v in fresh[0].items()}
    worst = max(
        abs(a - b) for k, (_, ours) in received[0][3].items() for a, b in zip(ours, fresh[0][k][1], strict=True)
    )
    assert worst <= (1e-4 if dtype == "float32" else 1e-2)
    if transport == "reshard":
        replicas = destination.cells
        moved = sum(parts["bytes"] for _, parts, _, _ in received)
        assert sum(s for _, s in sent) == moved, "each byte is sent once for each byte that is needed"
        assert moved == _size(checkpoints[family], dtype, destination) * replicas


def _size(checkpoint: Path, dtype: str, layout: Layout) -> int:
    """Bytes of one replica's weights; tied embeddings are there twice where pipeline stages separate them."""
    from megatron_rollout.engine.architecture import read_architecture

    a = read_architecture(checkpoint)
    elements = a.num_parameters
    if layout.pp > 1 and a.tied_embeddings:
        elements += a.vocab_size * a.hidden_size
    per_layer_norms = 2 * a.hidden_size + (2 * a.head_dim if a.qk_norm else 0)
    replicated = (a.num_layers * per_layer_norms + a.hidden_size) * (layout.tp - 1)
    return (elements + replicated) * (4 if dtype == "float32" else 2)
