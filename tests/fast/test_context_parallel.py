"""Gathering zigzag parts over real gloo ranks, and the value convention on packs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dist_utils import RankPool

from megatron_rollout.packing import pack_sequences
from trainer_hooks.training.advantages import whiten
from trainer_hooks.training.context_parallel import gather_zigzag, pad_values, shift_right, unpack_values
from trainer_hooks.training.losses import value_loss

TOKENS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1], [3, 4, 5]]
WORLD = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(WORLD, timeout=240) as pool:
        yield pool


def make_pack(cp: int, rows=((0, 1, 2),)):
    return pack_sequences(TOKENS, [list(r) for r in rows], multiple_of=2 * cp if cp > 1 else 1)[0]


def head_output(pack) -> torch.Tensor:
    """Raw output of a head: any number, a different one at each position, also at padding."""
    return torch.arange(1.0, pack.total_length + 1, dtype=torch.float64)[None]


def _gather(rank, world, rows):
    import torch.distributed as dist

    pack = make_pack(world, rows)
    full = torch.stack([head_output(pack), -head_output(pack)], -1)  # [1, T, 2]
    local = pack.local(full, world, rank).clone().requires_grad_()
    gathered = gather_zigzag(local, pack.padded_lengths, dist.group.WORLD)
    weight = torch.arange(gathered.numel(), dtype=torch.float64).view_as(gathered) + 100 * rank
    (gathered * weight).sum().backward()
    megatron = local.detach().transpose(0, 1)  # [T / CP, 1, 2]
    other_layout = gather_zigzag(megatron, pack.padded_lengths, dist.group.WORLD, dim=0)
    return gathered.detach(), local.grad, other_layout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [((0, 1, 2),), ((),)], ids=["three_sequences", "padding_only"])
def test_gather_restores_the_pack_and_sums_gradients(ranks, rows):
    pack = make_pack(WORLD, rows)
    full = torch.stack([head_output(pack), -head_output(pack)], -1)
    weights = [torch.arange(full.numel(), dtype=torch.float64).view_as(full) + 100 * r for r in range(WORLD)]
    for rank, (gathered, grad, other_layout) in enumerate(ranks.run(_gather, rows)):
        assert torch.equal(gathered, full) and torch.equal(other_layout, full.transpose(0, 1))
        assert torch.equal(grad, pack.local(sum(weights), WORLD, rank))


def value_columns() -> list[list[torch.Tensor]]:
    """Returns, old values and weights of each response.

    Made from a seed on each rank: a tensor pickled where megatron-core is imported takes seconds to unpickle.
    """
    g = torch.Generator().manual_seed(0)
    return [[torch.rand(n, generator=g, dtype=torch.float64) for n in (5, 0, 2)] for _ in range(3)]


def _train_values(rank, world, whole_loss):
    """A critic loss over CP ranks: by local predictor positions, or by gathering and computing the whole alike."""
    import torch.distributed as dist

    returns, old, weights = value_columns()
    pack = make_pack(world)
    head = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    raw = pack.local(head_output(pack), world, rank) * head
    if whole_loss:
        values = unpack_values(raw, pack, dist.group.WORLD)
        flat = torch.cat([v[len(v) - len(r) :] for v, r in zip(values, returns, strict=True)])
        loss, metrics = value_loss(flat, torch.cat(old), torch.cat(returns), torch.cat(weights))
        (loss / world).backward()
    else:
        parts = [pack.local(pack.pack_response(column), world, rank) for column in (old, returns, weights)]
        loss, metrics = value_loss(raw, *parts)
        loss.backward()
    return loss.detach(), head.grad, metrics


@pytest.mark.timeout(300)
def test_value_loss_is_the_same_by_parts_and_by_the_whole(ranks):
    columns = value_columns()
    pack = make_pack(1)
    head = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    # The padded pack of two ranks numbers its positions differently: give the single rank the same numbers.
    spans = zip(pack.spans(), make_pack(WORLD).spans(), strict=True)
    raw = (
        torch.cat([torch.arange(start + 1.0, start + 1 + n).double() for (_, _, n), (_, start, _) in spans])[None]
        * head
    )
    values = [v[len(v) - len(r) :] for v, r in zip(unpack_values(raw, pack), columns[0], strict=True)]
    expected, _ = value_loss(torch.cat(values), torch.cat(columns[1]), torch.cat(columns[0]), torch.cat(columns[2]))
    expected.backward()
    for whole_loss in (False, True):
        results = ranks.run(_train_values, whole_loss)
        losses = [r[0] for r in results]
        total = losses[0] if whole_loss else sum(losses)
        torch.testing.assert_close(total, expected.detach(), rtol=1e-9, atol=0)
        # Every rank's gradient reaches its own tokens only: the head's is the sum, as DDP takes it over CP.
        torch.testing.assert_close(sum(r[1] for r in results), head.grad, rtol=1e-9, atol=0)


def whiten_columns() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.tensor([0.5, 2.0, 9.0, -9.0, 1.0]), torch.arange(4.0)], [torch.tensor([1, 1, 0, 0, 1]), torch.ones(4)]


def _whiten(rank, world):
    import torch.distributed as dist

    xs, masks = whiten_columns()

    def reduce(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    return [whiten([xs[r]] if r == rank else [], [masks[r]] if r == rank else [], reduce=reduce) for r in range(world)]


@pytest.mark.timeout(300)
def test_whitening_where_a_rank_owns_no_token(ranks):
    """In each of two rounds one rank holds nothing: it takes part all the same, the other gets the whole's result."""
    xs, masks = whiten_columns()
    by_rank = ranks.run(_whiten)
    for r in range(WORLD):
        torch.testing.assert_close(by_rank[r][r], whiten([xs[r]], [masks[r]]))
        assert by_rank[1 - r][r] == []


def test_values_are_shifted_per_sequence_and_never_across_a_border():
    pack = make_pack(2)
    raw = head_output(pack)
    first, second, third = unpack_values(raw.unsqueeze(-1), pack)
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]  # the pack pads 9 tokens to 12
    assert second.tolist() == [0] and third.tolist() == [0, 17, 18]
    assert unpack_values(raw.half(), pack)[0].dtype == torch.float32
    assert shift_right(torch.zeros(0)).shape == (0,)


def test_values_to_a_padded_batch():
    out = pad_values([torch.tensor([0.0, 1.0]), torch.zeros(0), torch.tensor([0.0, 2.0, 3.0])], width=4)
    assert out.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 2, 3, 0]] and out.dtype == torch.float32
    assert pad_values([]).shape == (0, 0)
    with pytest.raises(ValueError, match="a sequence of 2 values does not fit the width 1"):
        pad_values([torch.zeros(2)], width=1)


def test_without_a_group_it_is_the_identity_and_lengths_are_checked():
    local = torch.randn(1, 8, requires_grad=True)
    assert gather_zigzag(local, [4, 4], None) is local
    with pytest.raises(ValueError, match="dimension 1 has 8 tokens, 1/1 of a pack of 12 tokens has 12"):
        gather_zigzag(local, [4, 8], None)


def _wrong_part(rank, world):
    import torch.distributed as dist

    try:
        gather_zigzag(torch.zeros(1, 3), [4, 4], dist.group.WORLD)
    except ValueError as error:
        return str(error)


@pytest.mark.timeout(300)
def test_a_part_of_a_wrong_length_is_refused_before_the_collective(ranks):
    assert ranks.run(_wrong_part) == ["dimension 1 has 3 tokens, 1/2 of a pack of 8 tokens has 4"] * 2
