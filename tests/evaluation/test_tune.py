"""Choosing a threshold from what thresholds did."""
from __future__ import annotations

import pytest

from hf_sparse import PSAConfig
from hf_sparse.evaluation.tune import Trial, choose, policies, trials
from tests.evaluation.test_runner import cell, score


def trial(threshold: float, kl: float, relative: float | None = 1.0) -> Trial:
    return Trial(threshold, kl, relative, 0.1)


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ([trial(0.7, 0.02), trial(0.8, 0.009), trial(0.9, 0.001)], 0.8),
        ([trial(0.7, 0.02), trial(0.8, 0.009, 0.97), trial(0.9, 0.001, 0.98)], 0.9),
        ([trial(0.7, 0.001, None), trial(0.8, 0.0001, None)], 0.7),
        # Good by chance, below one that is not.
        ([trial(0.7, 0.009), trial(0.8, 0.011), trial(0.9, 0.001)], 0.9),
        ([trial(0.7, 0.02), trial(0.99, 0.011)], None),
        ([trial(0.7, 0.02), trial(0.99, 0.0, 0.5)], None),
    ],
    ids=["kl", "needles", "no_needles", "by_chance", "none", "no_needles_right"],
)
def test_the_smallest_threshold_from_which_on_all_are_good(found, best):
    chosen = choose(found[::-1])
    assert (None if chosen is None else chosen.threshold) == best


def test_trials_take_the_worst_length_and_weigh_tasks_alike():
    base = PSAConfig(threshold=0.5)
    candidates = policies(base, (0.9, 0.8))
    assert [policy.name for policy in candidates] == ["psa@0.8", "psa@0.9"]
    cells = []
    for policy, kl in (("dense", 0.0), ("psa@0.8", 0.3), ("psa@0.9", 0.1)):
        needles = [score(2, (kl,)), score(1 if policy == "psa@0.8" else 2, (kl,))]
        cells += [cell(policy, needles, read=30.0), cell(policy, [score(0, (kl / 3,) * 40)], task="kl")]
    low, high = trials(cells, candidates)
    assert (low.threshold, low.relative, high.relative) == (0.8, 0.5, 1.0)
    assert low.kl_mean == pytest.approx(0.2) and high.kl_mean == pytest.approx(0.2 / 3) and low.kv_fraction == 0.3


def test_needles_that_dense_attention_misses_do_not_count():
    cells = [cell("dense", [score(0), score(0)]), cell("psa@0.8", [score(0), score(0)])]
    assert trials(cells, policies(PSAConfig(), (0.8,)))[0].relative is None


def test_settings_without_a_threshold_are_refused():
    with pytest.raises(ValueError, match="no threshold to choose"):
        policies(PSAConfig(policy="top_k", top_k=0.1))
