"""Ranking of candidate blocks, and the estimated mass that is left after each."""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.kernels.reference.select import select
from tests import references


def draw(rows=2, heads=3, group=4, blocks=12, spread=2.0):
    return torch.randn(rows, heads, group, blocks) * spread, torch.randn(rows, heads, group)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_order_is_by_mean_share(group, first):
    estimate, captured = draw(group=group)
    last = torch.tensor([12, 7])
    order, rest = select(estimate, captured, first, last, 12, "softmax_mean")
    for b in range(2):
        for h in range(3):
            low, high = first, int(last[b])
            expected = [low + i for i in references.rank(estimate[b, h, :, low:high], captured[b, h])]
            assert order[b, h, : high - low].tolist() == expected


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_other_reductions(reduction):
    estimate, captured = draw()
    order, _ = select(estimate, captured, 0, torch.tensor([12, 12]), 12, reduction)
    score = estimate.double().amax(2) if reduction == "max" else estimate.double().mean(2)
    torch.testing.assert_close(score.gather(-1, order), score.sort(-1, descending=True).values)


def test_mean_share_differs_from_mean_logit():
    """One head that is certain of block 2 outweighs another's slight preference for block 0, in shares but not in logits."""
    estimate = torch.tensor([[[[0.0, -9.0, 4.0], [0.2, 0.0, -30.0]]]])
    captured = torch.full((1, 1, 2), -5.0)
    by_share, _ = select(estimate, captured, 0, torch.tensor([3]), 3, "softmax_mean")
    by_logit, _ = select(estimate, captured, 0, torch.tensor([3]), 3, "mean")
    assert by_share[0, 0, 0] == 2 and by_logit[0, 0, 0] == 0


@pytest.mark.parametrize("first", [0, 2])
def test_rest_is_the_estimated_mass_left(first):
    estimate, captured = draw()
    last = torch.tensor([12, 6])
    order, rest = select(estimate, captured, first, last, 12, "softmax_mean")
    for b in range(2):
        count = int(last[b]) - first
        for h in range(3):
            ranked = estimate[b, h].double()[:, order[b, h, :count]]
            for done in range(count):
                expected = torch.log(torch.exp(ranked[:, done:]).sum(-1))
                torch.testing.assert_close(rest[b, h, :, done].double(), expected, rtol=1e-5, atol=1e-5)
            assert (rest[b, h, :, count:] == -math.inf).all()


@pytest.mark.parametrize("limit", [1, 5, 12, 99])
def test_limit_cuts_the_ranking_but_not_the_mass(limit):
    estimate, captured = draw()
    last = torch.tensor([12, 9])
    everything = select(estimate, captured, 1, last, 12, "softmax_mean")
    order, rest = select(estimate, captured, 1, last, limit, "softmax_mean")
    kept = min(limit, 12)
    assert order.shape[-1] == kept and rest.shape[-1] == kept + 1
    assert torch.equal(order, everything[0][..., :kept])
    assert torch.equal(rest, everything[1][..., : kept + 1])


@pytest.mark.parametrize("reduction", ["softmax_mean", "max", "mean"])
def test_ties_keep_block_order(reduction):
    estimate = torch.zeros(1, 2, 3, 40)
    estimate[..., 7] = estimate[..., 31] = 1.0
    order, _ = select(estimate, torch.zeros(1, 2, 3), 0, torch.tensor([40]), 40, reduction)
    expected = [7, 31, *(block for block in range(40) if block not in (7, 31))]
    assert order[0].tolist() == [expected, expected]


def test_no_candidates():
    estimate, captured = draw()
    order, rest = select(estimate, captured, 4, torch.tensor([4, 0]), 12, "softmax_mean")
    assert (rest == -math.inf).all()
    assert order.shape == (2, 3, 12) and (order >= 0).all() and (order < 12).all()


@pytest.mark.parametrize("reduction", ["softmax_mean", "max", "mean"])
def test_estimates_of_no_mass_at_all(reduction):
    """Blocks that a digest gives nothing to are still ranked, in order, and nothing becomes NaN."""
    estimate = torch.full((1, 1, 2, 5), -math.inf)
    for captured in (torch.zeros(1, 1, 2), torch.full((1, 1, 2), -math.inf)):
        order, rest = select(estimate, captured, 0, torch.tensor([5]), 5, reduction)
        assert order.tolist() == [[[0, 1, 2, 3, 4]]]
        assert (rest == -math.inf).all()
        # Blocks that are no candidates come after all that are, even after those.
        order, _ = select(estimate, captured, 2, torch.tensor([5]), 5, reduction)
        assert order[..., :3].tolist() == [[[2, 3, 4]]]


@pytest.mark.parametrize("reduction", ["softmax_mean", "max", "mean"])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
def test_what_is_no_candidate_is_not_looked_at(poison, reduction):
    estimate, captured = draw()
    last = torch.tensor([9, 5])
    clean = select(estimate, captured, 2, last, 12, reduction)
    block = torch.arange(12)
    outside = ((block < 2) | (block >= last[:, None]))[:, None, None]
    order, rest = select(estimate.masked_fill(outside, poison), captured, 2, last, 12, reduction)
    torch.testing.assert_close(rest, clean[1], rtol=0, atol=0)
    for b, count in enumerate((7, 3)):
        assert torch.equal(order[b, :, :count], clean[0][b, :, :count])


def test_a_row_ranks_the_same_in_any_batch():
    estimate, captured = draw(rows=3, blocks=20)
    last = torch.tensor([20, 11, 3])
    batch = select(estimate, captured, 1, last, 20, "softmax_mean")
    for b in range(3):
        count = int(last[b])
        alone = select(
            estimate[b : b + 1, ..., :count], captured[b : b + 1], 1, last[b : b + 1], count, "softmax_mean"
        )
        assert torch.equal(batch[0][b, :, : count - 1], alone[0][0, :, : count - 1])
        torch.testing.assert_close(batch[1][b, ..., :count], alone[1][0, ..., :count])
