"""Stop rules on constructed masses, where the number of blocks that each must read follows from its formula."""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.kernels.reference.attend import attend
from hf_sparse.selection.rounds import largest_round, round_bounds
from hf_sparse.selection.stop_rules import RULES

P = 4


def read_blocks(
    masses, rule, threshold, forced=1e-9, estimates=None, window=16, first=1, sinks=None, floor=0
):
    """Blocks that one head reads when the ranked blocks have these masses (a block's P tokens weigh the same)."""
    count = len(masses)
    key = (torch.tensor(masses, dtype=torch.float64) / P).log().float()
    # Keys of one channel: the query is 1, so a key is a logit.
    content = torch.zeros(count, P, 2)
    content[..., 0] = key[:, None]
    content = torch.cat([content[..., :1], content[..., 1:]], 1).reshape(count, -1)
    tiers = [torch.cat([torch.full_like(content[:1], math.nan), content])]
    table = torch.arange(1, count + 1)[None, None]
    estimates = torch.tensor(masses if estimates is None else estimates, dtype=torch.float64)
    rest = torch.cat([estimates.flip(0).cumsum(0).flip(0), torch.zeros(1)]).log().float()[None, None, None]
    order = torch.arange(count)[None, None]
    candidates = torch.tensor([count])
    mass = torch.tensor([[[math.log(forced)]]])
    result = attend(
        tiers,
        torch.ones(1, 1, 1, 1),
        table,
        order,
        rest,
        candidates,
        candidates,
        torch.tensor([floor]),
        torch.zeros(1, 1, 1, 1),
        mass,
        sinks,
        list(range(first, count)) + [count],
        "threshold",
        rule,
        threshold,
        window,
        False,
        P,
        1,
        0.0,
        "lru",
    )
    return int(result[2])


@pytest.mark.parametrize("blocks", [100, 1000])
def test_uniform_masses(blocks):
    """All blocks weigh 1: m blocks hold m / N of the mass, so 95 % needs 0.95 N blocks.

    The printed rule takes m / (m + 1) for it and stops after 19, whatever N is.
    """
    masses = [1.0] * blocks
    assert read_blocks(masses, "paper", 0.95 - 1e-6) == 19
    for rule in ("nleft", "window", "estimate"):
        assert read_blocks(masses, rule, 0.95 - 1e-6) == round(0.95 * blocks)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.99])
def test_falling_masses_in_true_order(threshold):
    """Masses fall as 0.9^i. The estimate knows the tail, nleft bounds it, so nleft never stops before it is true."""
    masses = [0.9**i for i in range(200)]
    total = sum(masses)
    needed = next(m for m in range(1, 201) if sum(masses[:m]) >= threshold * total)
    assert read_blocks(masses, "estimate", threshold) == needed
    bound = next(
        m
        for m in range(1, 201)
        if sum(masses[:m]) >= threshold * (sum(masses[:m]) + (200 - m) * masses[m - 1])
    )
    assert read_blocks(masses, "nleft", threshold) == bound > needed
    recent = lambda m: sum(masses[max(0, m - 16) : m]) / min(m, 16)  # noqa: E731
    window = next(
        m for m in range(1, 201) if sum(masses[:m]) >= threshold * (sum(masses[:m]) + (200 - m) * recent(m))
    )
    assert read_blocks(masses, "window", threshold) == window >= bound


def test_one_misranked_light_block_fools_nleft_and_not_window():
    masses = [1.0] * 100
    masses[3] = 1e-6
    assert read_blocks(masses, "nleft", 0.9) == 4
    assert read_blocks(masses, "paper", 0.9) == 4
    assert 85 <= read_blocks(masses, "window", 0.9) <= 95


def test_window_forgets_what_it_has_passed():
    """60 heavy blocks, then 300 light ones: once only light ones are in the window, little is left by its measure."""
    masses = [1.0] * 60 + [1e-3] * 300
    assert read_blocks(masses, "window", 0.9, window=16) == next(
        m
        for m in range(61, 361)
        if sum(masses[:m]) >= 0.9 * (sum(masses[:m]) + (360 - m) * sum(masses[m - 16 : m]) / 16)
    )
    assert read_blocks(masses, "window", 0.9, window=1) == 61
    assert read_blocks(masses, "window", 0.9, window=1000) > read_blocks(masses, "window", 0.9, window=16)


def test_the_estimate_rule_believes_the_estimates():
    masses = [1.0] * 100
    assert read_blocks(masses, "estimate", 0.9, estimates=[0.5] * 100) < 90
    assert read_blocks(masses, "estimate", 0.9, estimates=[2.0] * 100) > 90


@pytest.mark.parametrize("rule", ["estimate", "nleft", "window", "paper"])
def test_always_read_blocks_count_as_captured_only(rule):
    """Heavy sinks let a head stop early; light ones are no statistic that a rule could take for the lightest block."""
    masses = [1.0] * 100
    assert read_blocks(masses, rule, 0.9, forced=1e6) == (0 if rule == "estimate" else 1)
    light = read_blocks(masses, rule, 0.9, forced=1e-6)
    assert light == (9 if rule == "paper" else 90)


@pytest.mark.parametrize("rule", ["estimate", "nleft", "window"])
def test_sink_logits_count_as_captured(rule):
    masses = [1.0] * 100
    sinks = torch.tensor([[math.log(100.0)]])  # as heavy as all blocks together
    assert read_blocks(masses, rule, 0.75 - 1e-6, sinks=sinks) == 50


@pytest.mark.parametrize("rule", ["estimate", "nleft", "window", "paper"])
def test_floor_is_kept(rule):
    assert read_blocks([1.0] * 100, rule, 0.5, forced=1e6, floor=37) == 37


@pytest.mark.parametrize("rule", ["estimate", "nleft", "window", "paper"])
def test_no_rule_reads_past_the_end(rule):
    assert read_blocks([1.0] * 20, rule, 0.999999) == 20
    assert read_blocks([5.0], rule, 0.9999) == 1


def test_rules_in_numbers():
    """m = 3 of 5 blocks read, masses 4, 2, 1 and, masked, a fourth that does not count."""
    block_mass = torch.tensor([[[[4.0, 2.0, 1.0, 0.01]]]]).log()
    read = torch.tensor([[[[True, True, True, False]]]])
    left = torch.tensor([[[2]]])
    rest = torch.tensor([[[[9.0, 8.0, 7.0, 6.0, 5.0]]]]).log()

    def call(rule):
        return RULES[rule](rest=rest, done=3, block_mass=block_mass, read=read, left=left, size=2)

    assert call("nleft").exp().item() == pytest.approx(2 * 1.0)
    assert call("window").exp().item() == pytest.approx(2 * (2.0 + 1.0) / 2)
    assert call("estimate").exp().item() == pytest.approx(6.0)
    assert call("paper").exp().item() == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["nleft", "window", "paper"])
@pytest.mark.parametrize("left", [0, -3])
def test_nothing_left_is_no_mass(rule, left):
    block_mass = torch.zeros(1, 1, 1, 3)
    read = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    got = RULES[rule](
        rest=None, done=3, block_mass=block_mass, read=read, left=torch.tensor([[[left]]]), size=16
    )
    assert got.item() == -math.inf


@pytest.mark.parametrize("growth", [1.0, 1.25, 2.0, 10.0])
@pytest.mark.parametrize("first", [1, 2, 8, 32])
@pytest.mark.parametrize("limit", [1, 7, 8, 33, 500])
def test_rounds(limit, first, growth):
    bounds = round_bounds(limit, first, growth)
    sizes = [high - low for low, high in zip([0, *bounds], bounds)]
    assert bounds[-1] == limit and min(sizes) >= 1
    assert bounds[0] == min(first, limit)
    assert max(sizes) <= largest_round(first)
    assert all(size >= first for size in sizes[:-1])
    for low, size in zip(bounds, sizes[1:-1]):
        assert size <= max(first, low * (growth - 1) + 1e-9)
    assert bounds == round_bounds(limit + 100, first, growth)[: len(bounds) - 1] + [limit]


def test_no_rounds_for_no_blocks():
    assert round_bounds(0, 8, 1.25) == []
