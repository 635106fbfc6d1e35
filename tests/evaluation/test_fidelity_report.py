"""The tables of docs/fidelity.md: computed from rows, and up to date."""
from __future__ import annotations

import json

import pytest

from benchmarks import fidelity_report as report


def row(policy: str, **overrides) -> dict:
    values = dict(model="Tiny", task="needles", length=8192, policy=policy, threshold=None, questions=200, metric="exact",
                  accuracy=1.0, accuracy_dense=1.0, low=0.98, high=1.0, relative=1.0, able=True, kl_mean=0.005, kl_worst=0.1,
                  kv_fraction=0.2, hbm_fraction=0.3, mass_mean=0.9, mass_p1=0.8, dtype="float32", run_id="a", versions={"torch": "2"})
    return {**values, **overrides}


def test_the_cheapest_setting_that_keeps_the_needles():
    rows = [row("psa@0.7", kv_fraction=0.05, relative=0.97), row("psa", kv_fraction=0.1), row("psa@0.9", kv_fraction=0.2),
            row("psa@0.6/window", kv_fraction=0.01), row("psa@0.5", kv_fraction=0.01, task="copy"),
            row("psa@0.4", kv_fraction=0.01, able=False)]
    assert report.cheapest(rows, "needles", 8192, report.is_bounded_psa)["policy"] == "psa"
    assert report.cheapest(rows, "needles", 4096, report.is_bounded_psa) is None


def test_goals_are_reached_or_missed():
    rows = [row("psa", kv_fraction=0.08, hbm_fraction=0.2, threshold=0.9, mass_p1=0.5, kl_mean=0.008),
            row("psa@0.85", threshold=0.85, mass_p1=0.84, kl_mean=0.006),
            row("psa@0.7", kv_fraction=0.05, relative=0.9, threshold=0.7, mass_p1=0.65, kl_mean=0.03),
            row("psa/max_blocks=9", kv_fraction=0.3, threshold=0.85, mass_p1=0.1, kl_mean=0.5),      # may stop short of its threshold
            row("arkvale@0.45", kv_fraction=0.4), row("psa@0.85/reuse=4", kl_mean=0.018),
            row("dense/kv_bits=4", relative=0.96), row("dense/kv_bits=8", relative=0.995)]
    text = report.goals_table({"rows": rows})
    lines = {line.split(" | ")[1]: line for line in text.splitlines()[2:]}
    assert "8.0% (psa)" in lines["KV blocks read at 98 % of dense needle accuracy, 8192"]
    assert "12.5 x | reached" in lines["the same, fewer than dense"]
    assert "5.0 x (arkvale@0.45) | reached" in lines["the same, fewer than top-k with cuboid-mean digests"]
    assert "20.0% | **missed**" in lines["HBM bytes read, digest included, 8192"]
    assert "0.0080 | reached" in lines["mean KL on answers at the default, worst task and length"]
    assert "0.050 | **missed**" in lines["1st percentile of the mass gathered below the threshold, worst"]
    assert "96.0% | **missed**" in lines["needles with 4-bit keys and values, 8192"]
    assert "99.5% | reached" in lines["needles with 8-bit keys and values, 8192"]
    assert "3.0 x | **missed**" in lines["selection kept for 4 tokens: KL over that without, worst"]


def test_one_threshold_against_one_budget():
    rows = [row("psa", kl_mean=0.01, kv_fraction=0.1), row("psa", task="copy", kl_mean=0.002, kv_fraction=0.06),
            row("topk@0.1", kl_mean=0.1, kv_fraction=0.1), row("topk@0.1", task="copy", kl_mean=0.0001, kv_fraction=0.1),
            row("topk@0.4", kl_mean=0.001, kv_fraction=0.4), row("topk@0.4", task="copy", kl_mean=0.0001, kv_fraction=0.4),
            row("topk@0.2", kl_mean=0.0001, kv_fraction=0.2)]          # not measured everywhere
    ratio, policy, worst, kv = report.mixed(rows, 8192)
    assert (policy, worst) == ("psa", 0.01) and kv == pytest.approx(0.08)
    assert ratio == pytest.approx(0.2 / 0.08)               # half way between 0.1 and 0.4, in logarithms
    assert report.mixed(rows, 4096) is None
    assert report.mixed([{**one, "kl_mean": 1.0} if one["policy"] == "psa" else one for one in rows], 8192) is None


def test_thresholds_are_told_by_length():
    rows = [row("psa@0.9", threshold=0.9, relative=0.99), row("psa@0.9", task="kl", metric="agreement", threshold=0.9, relative=0.5,
            kl_mean=0.007), row("psa@0.8", threshold=0.8, length=4096), row("psa@0.85", able=False, threshold=0.85), row("psa", threshold=0.9)]
    lines = report.threshold_table({"rows": rows}).splitlines()[2:]
    assert lines == ["| 0.8 | 4096 | 1.000 | 0.0050 | 0.0050 | 20.0% | 30.0% |", "| 0.9 | 8192 | 0.990 | 0.0060 | 0.0070 | 20.0% | 30.0% |"]


def test_later_rows_replace_earlier_ones_and_intervals_are_shown():
    rows = [row("psa", kv_fraction=0.5), row("psa", run_id="b"), row("quest@0.3", able=False, low=None)]
    lines = report.policy_table({"rows": rows}).splitlines()[2:]
    assert len(lines) == 2 and "1.000 (0.980-1.000)" in lines[0] and lines[0].endswith("| b |")
    assert "needles (beyond the model)" in lines[1]
    assert report.versions_line({"rows": rows}) == "- b, a: float32, torch 2"


def test_the_document_is_up_to_date(tmp_path):
    assert report.main(["--check"]) == 0
    document, result = tmp_path / "fidelity.md", tmp_path / "fidelity.json"
    document.write_text(report.DOCUMENT.read_text())
    result.write_text(json.dumps({"rows": [row("psa", threshold=0.85)]}))
    arguments = ["--document", str(document), "--result", str(result)]
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0 and report.main([*arguments, "--check"]) == 0
    assert "| Tiny | needles | 8192 | psa |" in document.read_text()
