"""A sample of the family sweep, a few for each way to be served or refused, and the sweep's own output.

The whole sweep is a command: python -m tests.families.sweep
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import hf_sparse.patches.attention as attention
from hf_sparse.cache.layer import PSALayer
from tests.families.classify import OUTCOMES, classify
from tests.families.sweep import main
from tests.families.table import END, OTHER_CAUSE, START, cause, render, write

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[2] / "README.md"

SERVED = {
    "llama": ("sparse", {"psa"}),  # the plain case
    "gpt2": ("sparse", {"psa"}),  # learned positions, fused projections
    "bert": ("sparse", {"psa"}),  # an encoder used as a decoder
    "llama4_text": ("sparse", {"psa", "window"}),  # chunked attention
    "gemma3n_text": ("sparse", {"psa", "window"}),  # layers that share keys and values
    "qwen3_next": ("sparse", {"psa", "native"}),  # linear attention beside full attention
    "jamba": ("sparse", {"psa", "native"}),  # state space layers beside full attention
    "deepseek_v3": ("dense", {"psa"}),  # latent attention: keys are made from what is cached
    "diffllama": ("dense", {"psa"}),  # values are split after caching
    "recurrent_gemma": ("native", {"window"}),  # nothing with full attention
}
REFUSED = {
    "bloom": "BloomAttention computes attention itself",
    "doge": "it builds a mask of its own",
    "deepseek_v32": "uses the attention mask for something of its own",
    "falcon_h1": "LinearAttentionAndFullAttentionLayer, which PSACache can't replace",
    "minimax": "a cache class of its own",
}


@pytest.mark.parametrize("family", SERVED)
def test_served(family):
    outcome, kinds = SERVED[family]
    record = classify(family)
    assert (record.outcome, record.reason) == (outcome, "")
    assert set(record.layers) - {"native"} == kinds - {"native"}
    assert kinds <= set(record.layers)
    assert record.unpatched == "exact"
    assert len(record.warnings) == (outcome != "sparse")
    assert record.distinct >= 8 and record.context_effect > 0.02  # a wrong attention would show


@pytest.mark.parametrize("family", REFUSED)
def test_refused(family):
    record = classify(family)
    assert record.outcome == "refused"
    assert REFUSED[family] in record.reason


def test_wrong_attention_is_called_wrong(monkeypatch):
    mask = attention.psa_mask
    monkeypatch.setattr(
        attention, "psa_mask", lambda *args, attention_mask=None, **kwargs: mask(*args, **kwargs)
    )
    record = classify("llama")
    assert record.outcome == "wrong"
    assert "difference" in record.reason


def test_error_from_inside_is_called_a_crash(monkeypatch):
    def broken(self, *args):
        return torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setattr(PSALayer, "_sparse_step", broken)
    record = classify("llama")
    assert record.outcome == "crash"
    assert "test_sample.py" in record.reason


def test_sweep_command(tmp_path, capsys):
    table, results = tmp_path / "table.md", tmp_path / "found" / "results.json"
    table.write_text(f"before\n{START}\nearlier text\n{END}\nafter\n")
    assert main(["--only", "llama,bloom", "--jobs", "2", "--json", str(results), "--table", str(table)]) == 0
    assert (
        "1 sparse, 0 dense, 0 native, 1 refused, 0 wrong, 0 crash, 0 unbuildable of 2"
        in capsys.readouterr().out
    )
    found = json.loads(results.read_text())
    assert [(record["family"], record["outcome"]) for record in found["families"]] == [
        ("bloom", "refused"),
        ("llama", "sparse"),
    ]
    assert table.read_text() == f"before\n{START}\n{render(found)}\n{END}\nafter\n"
    assert "| 1 | llama |" in table.read_text() and "earlier" not in table.read_text()


def test_sweep_command_refuses_unknown_families(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "llamma"])
    assert "llamma" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no markers", f"{END}\n{START}\n", f"{START}\n{START}\n{END}\n"])
def test_table_needs_its_markers(tmp_path, text):
    path = tmp_path / "table.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="needs one line"):
        write({"transformers": "5", "families": []}, path)
    assert path.read_text() == text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_sweeps(path):
    """What is recorded is whole, and nothing in it is wrong or a crash."""
    found = json.loads(path.read_text())
    assert found["transformers"].startswith(path.stem)
    outcomes = [record["outcome"] for record in found["families"]]
    assert set(outcomes) <= set(OUTCOMES) - {"wrong", "crash"}
    assert outcomes.count("unbuildable") < 0.1 * len(outcomes)
    assert outcomes.count("sparse") > 0.6 * len(outcomes)
    for record in found["families"]:
        assert record["outcome"] != "refused" or re.search(r"Use (it|transformers)", record["reason"])
        assert record["outcome"] not in ("sparse", "dense") or record["unpatched"] == "exact"
    refusals = [cause(record["reason"]) for record in found["families"] if record["outcome"] == "refused"]
    assert refusals.count(OTHER_CAUSE) < 10


def test_readme_has_the_newest_sweep():
    newest = max(RESULTS.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])
    assert render(json.loads(newest.read_text())) in README.read_text()
