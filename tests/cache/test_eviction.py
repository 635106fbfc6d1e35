"""Eviction policies as formulas, and what they are for: a pool that layers visit in a cycle."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_sparse.eviction import POLICIES
from hf_sparse.kernels.reference.fetch import acquire
from tests.kernels.pools import make_tiers


def at(time: float) -> torch.Tensor:
    return torch.tensor([time], dtype=torch.float64)


def use(policy: str, times: list[float], loaded: float = 0.0, before: float = -math.inf) -> float:
    """Priority of a block that was loaded at one time and used at others; `before`: what it had when it was evicted."""
    rules = POLICIES[policy]
    priority = rules.on_load(torch.full((1,), before, dtype=torch.float64), at(loaded))
    for time in times:
        priority = rules.on_use(priority, at(time))
    return priority.item()


def test_the_policies():
    assert set(POLICIES) == {"lru", "fifo", "decayed"}


@pytest.mark.parametrize("times", [[0.0], [3.0], [0.0, 1.0, 2.0], [5.5, 7.25], [0.0] * 10], ids=str)
def test_decayed_is_the_log_of_the_decayed_count(times):
    now = 9.0
    count = sum(0.9 ** (now - time) for time in times)
    assert use("decayed", times) + now * math.log(0.9) == pytest.approx(math.log(count))


def test_counts_outlive_eviction():
    assert use("decayed", [7.0, 8.0], before=use("decayed", [1.0, 2.0])) == pytest.approx(
        use("decayed", [1.0, 2.0, 7.0, 8.0])
    )
    assert use("lru", [], loaded=7.0, before=3.0) == use("fifo", [], loaded=7.0, before=3.0) == 7.0


def test_decayed_orders_like_the_count():
    rng = random.Random(0)
    histories = [sorted(rng.uniform(0, 50) for _ in range(rng.randint(1, 20))) for _ in range(60)]
    count = [sum(0.9 ** (50 - time) for time in history) for history in histories]
    priority = [use("decayed", history) for history in histories]
    by_count = sorted(range(60), key=lambda i: count[i])
    assert sorted(range(60), key=lambda i: priority[i]) == by_count


def test_decayed_survives_long_texts():
    """After a million tokens priorities are finite and still tell one use from two."""
    once, twice = use("decayed", [1e6]), use("decayed", [1e6 - 1, 1e6])
    assert math.isfinite(once) and twice - once == pytest.approx(math.log(1.9), rel=1e-6)


def test_a_loaded_block_is_worth_more_than_a_free_slot():
    for policy in POLICIES:
        assert use(policy, []) > -math.inf


def test_lru_is_the_last_use():
    assert use("lru", [1.0, 7.0], loaded=0.5) == 7.0
    assert use("lru", [], loaded=4.0) == 4.0


def test_fifo_ignores_uses():
    assert use("fifo", [1.0, 7.0], loaded=0.5) == 0.5


def test_policies_are_elementwise_and_keep_their_input():
    priority = torch.tensor([1.0, 5.0, -math.inf], dtype=torch.float64)
    for rules in POLICIES.values():
        for rule in (rules.on_load, rules.on_use):
            result = rule(priority, at(3.0))
            assert result.shape == priority.shape and result.dtype == torch.float64
            one = torch.cat([rule(priority[i : i + 1], at(3.0)) for i in range(3)])
            torch.testing.assert_close(result, one)
    assert priority.tolist() == [1.0, 5.0, -math.inf]


def hit_rate(policy: str, slots: int, layers=8, tokens=60, hot=8, cold=3) -> float:
    """Layers in turn read blocks of their own: `hot` that stay the same and `cold` new ones each token."""
    rng = random.Random(0)
    blocks = 200
    tiers = make_tiers(torch.zeros(1 + layers * blocks, 1), 1 + slots)
    for _ in range(tokens):
        for layer in range(layers):
            wanted = [*range(hot), *rng.sample(range(hot, blocks), cold)]
            ids = torch.tensor([1 + layer * blocks + block for block in wanted])
            acquire(
                tiers, ids, torch.ones_like(ids, dtype=torch.bool), policy, load=True, use=True, count=True
            )
            tiers[6] += 1.0 / layers
    hits, misses = tiers[7].tolist()
    return hits / (hits + misses)


def test_lru_collapses_on_a_cycle_and_use_counts_do_not():
    """A token's working set is 88 blocks. A pool of 75 is too small for it: LRU evicts each block just before its turn.

    The hot 64 are kept by their counts; only the cold 24 have to miss, which leaves 73 % at best.
    """
    assert hit_rate("lru", 75) < 0.12
    assert hit_rate("fifo", 75) < 0.12
    assert hit_rate("decayed", 75) > 0.6


@pytest.mark.parametrize("slots", [30, 60, 70, 90, 120, 200])
def test_decayed_is_never_worse_than_lru(slots):
    assert hit_rate("decayed", slots) >= hit_rate("lru", slots) - 0.02


def test_a_pool_that_holds_everything_only_misses_once():
    rate = hit_rate("decayed", 8 * 200, tokens=40)
    assert rate > 8 / 11
