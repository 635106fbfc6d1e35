"""benchmarks/lserve.py as far as it goes without a GPU: its settings, what it fills and measures, what it reports."""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import lserve_report, report
from hf_sparse import PSACache, PSAConfig
from hf_sparse.config import PRESETS

pytest.importorskip("triton")

from benchmarks import lserve, lserve_chain, lserve_check, memory, prefill_kernel, synthetic  # noqa: E402
from benchmarks.lserve_settings import (  # noqa: E402
    BATCHES,
    BUDGET,
    CONTEXTS,
    LSERVE,
    PAGES,
    REUSE,
    SETTINGS,
    WITH_MODEL,
    described,
    streaming_heads,
    with_streaming,
)
from benchmarks.synthetic import Queries, Shape, shape_of  # noqa: E402
from hf_sparse.cache.split import SplitLayer  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SMALL = Shape(layers=4, batch=2, query_heads=8, heads=4, dim=16, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
                         head_dim=16, vocab_size=50, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return LlamaForCausalLM(config).eval()


# -- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "counts"), [(0.5, [4, 2, 6, 4]), (0.25, [2, 1, 3, 2]), (1.0, [8] * 4), (0.0, [0] * 4)])
def test_profiles_have_the_share_of_heads_that_was_asked_for(share, counts):
    pairs = streaming_heads(32, 8, share)
    assert len(pairs) == len(set(pairs)) == share * 32 * 8 and pairs == streaming_heads(32, 8, share)
    assert [sum(layer == index for layer, _ in pairs) for index in range(32)] == counts * 8
    assert all(0 <= head < 8 for _, head in pairs)
    if share:
        assert PSAConfig(streaming_heads=pairs).streaming_heads == pairs


def test_layers_have_different_heads():
    heads = {tuple(head for layer, head in streaming_heads(32, 8, 0.5) if layer == index) for index in range(0, 32, 4)}
    assert len(heads) > 4


def test_settings_that_rows_measure():
    """Both paths read as many tokens, with LServe's own preset; a graph has whole selections."""
    psa, ours = SETTINGS["psa"][0], SETTINGS["lserve"][0]
    assert ours.to_dict() == PSAConfig(**PRESETS["lserve"]).to_dict() and ours.reuse == 4
    assert psa.max_blocks * psa.block_size == ours.top_k * ours.block_size == BUDGET
    assert all(lserve_chain.CHAIN_TOKENS % tokens == 0 for tokens in REUSE)
    assert all(physical % logical == 0 and BUDGET % physical == 0 for logical, physical in PAGES)
    assert set(SETTINGS) <= set(lserve_report.LSERVE)
    assert SETTINGS["lserve-half-kv4"][0].kv_bits == 4 and SETTINGS["lserve-half-kv4"][1] == 0.5


def test_rows_say_what_they_were_measured_with():
    config = with_streaming(LSERVE.replace(kv_bits=4), SMALL, 0.25)
    assert described(config, SMALL) == {"streaming": 0.25, "kv_bits": 4, "reuse": 4, "reuse_refresh": 0.9, "digest": "pages",
                                        "block_size": 64, "logical_size": 16}
    assert described(None, SMALL) == {"streaming": 0.0, "kv_bits": 32, "reuse": 1}


def test_options():
    args = lserve.options(["--rows", "decode,reuse", "--settings", "psa,lserve", "--contexts", "4096,8192", "--batches", "2"])
    assert (args.rows, args.settings, args.contexts, args.batches) == (["decode", "reuse"], ["psa", "lserve"], [4096, 8192], [2])
    assert lserve.options([]).contexts is None and set(WITH_MODEL) < set(lserve.options([]).rows)


@pytest.mark.parametrize("wrong", [["--rows", "psa"], ["--settings", "quest"], ["--prompts", "quest"], ["--tokens", "2"]], ids=lambda words: words[0])
def test_options_that_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        lserve.options(wrong)
    assert "error" in capsys.readouterr().err


# -- what is filled --------------------------------------------------------------------------------------------

STREAMING = {"streaming_heads": ((0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 3)), "streaming_sink": 5, "streaming_window": 40,
             "streaming_prefill_window": 70, "min_context": 60, "block_size": 16}


@pytest.mark.parametrize("settings", [{}, {"digest": "pages", "policy": "top_k", "top_k": 4}, {"kv_bits": 8}, {"kv_bits": 4}],
                         ids=["default", "pages", "kv8", "kv4"])
def test_filled_caches_are_those_of_the_same_tokens_in_one_piece(model, monkeypatch, settings):
    """Blocks, digests and rings, one layer with streaming heads only, against layers that store the whole row at once."""
    shape, config, context = shape_of(model, 2), PSAConfig(**STREAMING, **settings), 300
    assert shape == SMALL
    queries = Queries(shape, 4, 0.9)
    whole = PSACache(model.config, config)
    synthetic.fill(whole, queries, context, room=70)
    given = synthetic.pieces
    monkeypatch.setattr(synthetic, "pieces", lambda *args: iter(
        [(keys[:, :, low:low + 64], values[:, :, low:low + 64]) for keys, values in given(*args) for low in range(0, context, 64)]))
    cache = PSACache(model.config, config)
    synthetic.fill(cache, queries, context, room=70)
    assert cache.tokens == whole.tokens == context
    for order, (layer, other) in enumerate(zip(cache.step_layers, whole.step_layers)):
        keys, values = next(given(shape, order, context))
        if isinstance(layer, SplitLayer):
            assert torch.equal(layer.ring.keys, other.ring.keys) and torch.equal(layer.ring.values, other.ring.values)
            held = layer.ring.keys.shape[2] - layer.ring.sink
            last = [layer.ring.sink + (token - layer.ring.sink) % held for token in range(context - 40, context)]
            assert torch.equal(layer.ring.keys[:, :, last], keys[:, list(layer.streaming), -40:])
            assert layer.lengths.tolist() == [context] * 2 and layer.ring.narrowed
            keys, values = (part[:, layer.others.long()] for part in (keys, values))
            layer, other = layer.blocks, other.blocks
            if layer is None:
                assert order == 1
                continue
        for own, same, true in zip(layer.padded(), other.padded(), (keys, values)):
            assert torch.equal(own, same)
            if config.kv_bits == 16:
                assert torch.equal(own, true)
            else:
                assert 0 < float((own - true).abs().max()) < 0.6
        assert layer.digests.units_done.tolist() == other.digests.units_done.tolist() != [0, 0]
        for part, same in zip([*layer.digests.unit, *layer.digests.row], [*other.digests.unit, *other.digests.row]):
            done = layer.digests.units_done[0]
            pair = (part, same) if part.dim() < 4 else (part[:, :, :done], same[:, :, :done])
            assert torch.equal(*pair)
        assert layer.columns * layer.config.block_size >= context + 70


def test_memory_of_half_streaming_and_4_bits_is_what_was_wanted():
    """From the sizes of the 8B shape, as the benchmark measures it, without tables and rings."""
    shape = dataclasses.replace(lserve_chain.CHAIN, device=CPU)
    config = LSERVE.replace(kv_bits=4)
    kept = (memory.block_bytes(config, shape) + 64 // 16 * 2 * 128 * 2) / memory.block_bytes(LSERVE, shape)
    assert 0.14 < kept / 2 < 0.18


@pytest.mark.parametrize("bits", [16, 4])
def test_offloaded_pools_have_slots_for_their_share_of_the_blocks(model, bits):
    shape, context = shape_of(model, 2), 6000
    config = PSAConfig(kv_bits=bits, max_blocks=40, host_memory="64MiB")
    config = config.replace(gpu_memory=memory.pool_budget(config, shape, 0.5, context, context + 100))
    cache = PSACache(model.config, config)
    synthetic.fill(cache, Queries(shape, 4, 0.9), context, room=100)
    pool = cache.sparse_layers[0].pool
    assert pool.block_bytes == memory.block_bytes(config, shape)
    blocks = shape.layers * shape.batch * shape.heads * (context // 32)
    assert pool.slots / blocks == pytest.approx(0.5, rel=0.02)
    used = pool.slots * pool.block_bytes + sum(layer.side_bytes() for layer in cache.sparse_layers)
    assert used <= config.gpu_bytes
    assert memory.all_blocks(config, shape, context) == blocks * pool.block_bytes


# -- rows ------------------------------------------------------------------------------------------------------


def bench_of(model, *words: str) -> lserve.Bench:
    return lserve.Bench(model, lserve.options(["--tokens", "4", "--warmup", "4", *words]))


def test_rows_of_prompts(model):
    names = "stock", "psa", "streaming-narrow", "streaming-kv4"
    rows = list(bench_of(model, "--prompts", ",".join(names)).rows("prefill", 1, [200, 300]))
    assert [(row["name"], row["context"]) for row in rows[:4]] == [(f"prefill-{name}", 200) for name in names] and len(rows) == 8
    assert all(row["phase"] == "prefill" and row["seconds"]["median"] > 0 for row in rows)
    assert [row["streaming"] for row in rows[:4]] == [0.0, 0.0, 0.5, 0.5] and rows[3]["kv_bits"] == 4
    assert not hasattr(model, "_hf_sparse")


def test_rows_of_a_prompts_attention(monkeypatch):
    monkeypatch.setattr(prefill_kernel, "DEVICE", "cpu")
    monkeypatch.setattr(prefill_kernel, "times_of", lambda function, repeats: [function().shape[2] * 1e-3] * repeats)
    rows = list(bench_of(None).rows("attention", 1, [160]))
    assert [(row["name"], row["streaming"], row["attention_us_per_layer"]["median"]) for row in rows] == [
        ("attention-dense", 0.0, 160.0), ("attention-streaming", 0.5, 160.0)]


def test_rows_that_fail_are_rows(model, monkeypatch, capsys):
    monkeypatch.setattr(lserve, "fill", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("too much")))
    rows = list(bench_of(model, "--settings", "psa,lserve-half").rows("decode", 1, [300]))
    assert [(row["name"], row["streaming"], row["error"]) for row in rows] == [
        ("psa", 0.0, "OutOfMemoryError: too much"), ("lserve-half", 0.5, "OutOfMemoryError: too much")]
    assert "too much" in capsys.readouterr().err


def test_every_row_is_written_at_once_and_appended(monkeypatch, tmp_path):
    out, seen = tmp_path / "lserve.json", []

    def rows(self, name, batch, contexts):
        for context in contexts:
            seen.append(json.loads(out.read_text())["rows"] if out.exists() else [])
            yield {"name": name, "batch": batch, "context": context}

    monkeypatch.setattr(lserve.Bench, "rows", rows)
    monkeypatch.setattr(lserve, "check", lambda: {"kv8": {"equal": True}, "kv4": {"equal": False}})
    assert lserve.main(["--rows", "chain,reuse", "--out", str(out)]) == 1              # the check has failed
    assert lserve.main(["--rows", "ablation", "--contexts", "64,128", "--batches", "3", "--append", "--skip-check", "--run", "abc",
                        "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert [(row["name"], row["batch"], row["context"]) for row in found["rows"]] == [
        ("chain", 8, 32768), ("reuse", 1, 131072), ("ablation", 3, 64), ("ablation", 3, 128)]
    assert [len(rows) for rows in seen] == [0, 1, 2, 3] and found["rows"][3]["run_id"] == "abc" and "kv4" in found["check"]


INTERPRETED = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from benchmarks import lserve, lserve_chain
from benchmarks.synthetic import Shape
from hf_sparse.kernels import decode
from tests.triton.interpreter import hasten

hasten()
launched = []

class Counted:
    def __init__(self, name):
        self.name, self.kernel = name, getattr(decode, name)
    def __getitem__(self, grid):
        launched.append(self.name)
        return self.kernel[grid]

for name in ("rank_kernel", "select_kernel", "merge_kernel"):
    setattr(decode, name, Counted(name))

def times(chain, repeats):
    launched.clear()
    before = [lengths.tolist() for lengths in chain.lengths]
    chain()
    after = [lengths.tolist() for lengths in chain.lengths]
    moved = after[0][0] - before[0][0]
    return [float(moved + 100 * launched.count("select_kernel") + 10000 * launched.count("merge_kernel"))]

lserve_chain.graph_times = times
lserve_chain.kernel_times = lambda chain: {"rank_kernel": 1.0, "select_kernel": 2.0}
lserve.CHAIN = Shape(1, 1, 4, 2, 16, torch.float32, torch.device("cpu"))
lserve_chain.CHAIN_TOKENS, lserve.ROOM, lserve_chain.ROOM = 2, 64, 64
lserve.PSA = lserve.PSA.replace(min_context=0, block_size=16, max_blocks=5)
lserve.LSERVE = lserve.LSERVE.replace(min_context=0, block_size=16, top_k=5)
lserve.SETTINGS = {"lserve-half-kv4": (lserve.LSERVE.replace(kv_bits=4), 0.5)}
lserve.REUSE = (2,)
torch.cuda.synchronize = lambda *args: None
torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                     head_dim=16, vocab_size=50, bos_token_id=None, eos_token_id=None, pad_token_id=None)
bench = lserve.Bench(LlamaForCausalLM(config).eval(), lserve.options(["--tokens", "4", "--warmup", "4"]))
print(json.dumps([row for name in ("decode", "reuse") for row in bench.rows(name, 1, [130])]))
"""


def test_rows_of_decoding_by_the_kernels():
    """Interpreted, in the chain and in generate(). A chain's "time" is how far rows have gone, and what was launched."""
    done = subprocess.run([sys.executable, "-c", INTERPRETED], cwd=ROOT, text=True, capture_output=True, timeout=500,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    generated, reuse, refreshed = json.loads(done.stdout.splitlines()[-1])
    assert not any("error" in row for row in (generated, reuse, refreshed)), done.stderr[-2000:]
    assert (reuse["reuse_refresh"], refreshed["reuse_refresh"]) == (0.0, 0.9) and refreshed["selected"] >= reuse["selected"]
    assert (generated["name"], generated["streaming"], generated["kv_bits"], generated["reuse"]) == ("lserve-half-kv4", 0.5, 4, 4)
    assert generated["ms_per_token"]["median"] > 0 and 0 < generated["kv_fraction"] < 1 and generated["kv_ratio"] > 0
    each = 1e3 / 2                                          # of two tokens through one layer
    # Tokens are counted, and each is selected for and merged; and where nothing is selected the rows go back.
    assert reuse["attention_us_per_layer"]["median"] == (2 + 200 + 20000) * each
    assert reuse["kept_us_per_layer"]["median"] == 20000 * each and reuse["selector_us_per_layer"] == 202 * each
    assert reuse["kernels_us"] == {"rank_kernel": 1.0, "select_kernel": 2.0} and 0.5 <= reuse["selected"] <= 1

def test_settings_of_the_rows_of_attention_alone(monkeypatch):
    given = []
    monkeypatch.setattr(lserve.offload.Bench, "queries", lambda self, shape, context: (None, 1.0))
    monkeypatch.setattr(lserve, "attention_alone", lambda queries, context, config: given.append(config) or {})
    monkeypatch.setattr(lserve, "selecting", lambda queries, context, config: given.append(config) or {})
    monkeypatch.setattr(lserve, "settle", lambda: None)
    found = {name: list(bench_of(None).rows(name, 2, [512])) for name in ("chain", "ablation", "reuse", "pages")}
    assert [(row["name"], row["kv_bits"]) for row in found["chain"]] == [
        (name, bits) for name in ("chain-psa", "chain-lserve") for bits in (16, 8, 4)]
    assert [(row["name"], row["streaming"], row["digest"]) for row in found["ablation"]] == [
        ("ablation-dense", 0.0, "channel_codes"), ("ablation-static", 0.5, "channel_codes"), ("ablation-dynamic", 0.0, "pages"),
        ("ablation-both", 0.5, "pages")]
    assert [config.threshold for config in given[6:8]] == [1.0, 1.0]
    assert [(row["reuse"], row.get("reuse_refresh")) for row in found["reuse"]] == [
        (1, None), (2, 0.0), (4, 0.0), (8, 0.0), (16, 0.0), (4, 0.9)]
    assert [(row["logical_size"], row["block_size"], config.top_k) for row, config in zip(found["pages"], given[-5:])] == [
        (16, 32, 128), (32, 32, 128), (16, 64, 64), (32, 64, 64), (64, 64, 64)]
    assert {row["batch"] for rows in found.values() for row in rows} == {2}


# -- the check -------------------------------------------------------------------------------------------------


def test_the_check_finds_equal_runs_and_differences(capsys, monkeypatch):
    monkeypatch.setattr(lserve_check, "CASES", {name: lserve_check.CASES[name] for name in ("streaming-wide", "lserve")})
    found = lserve_check.check("cpu", length=400, tokens=3)
    assert lserve_check.failures(found) == [] and list(found) == ["streaming-wide", "lserve"]
    assert found["streaming-wide"]["from_dense"] < 1e-5 < 0.1 < found["lserve"]["from_dense"]
    narrow = {**lserve_check.CASES["streaming-wide"][0], "streaming_window": 64, "streaming_prefill_window": 64}
    wrong = {"streaming-wide": (narrow, lserve_check.EXACT), "kv8": ({"kv_bits": 3}, lserve_check.CLOSE)}
    monkeypatch.setattr(lserve_check, "CASES", wrong)
    found = lserve_check.check("cpu", length=400, tokens=3)
    assert lserve_check.failures(found) == ["streaming-wide", "kv8"] and "kv_bits=3" in found["kv8"]["error"]
    assert "DIFFERENT" in capsys.readouterr().out


# -- the report ------------------------------------------------------------------------------------------------


def us(median: float) -> dict:
    return {"median": median, "p20": median, "p80": median}


PLACE = {"batch": 1, "context": 131072, "streaming": 0.0, "kv_bits": 16, "reuse": 1, "run_id": "aaaa"}
SELECTING = {**PLACE, "name": "reuse", "block_size": 64, "logical_size": 16, "attention_us_per_layer": us(30.0)}
RESULT = {
    "versions": {"gpu": "NVIDIA X"},
    "check": {"kv4": {"equal": True, "captured": True, "captured_equals_eager": True, "from_cpu": 1e-3, "from_dense": 0.1},
              "pages": {"equal": False, "error": "ValueError: no"}},
    "rows": [
        {**PLACE, "name": "prefill-stock", "phase": "prefill", "seconds": us(12.0)},
        {**PLACE, "name": "prefill-psa", "phase": "prefill", "seconds": us(11.0)},
        {**PLACE, "name": "prefill-streaming", "phase": "prefill", "streaming": 0.5, "seconds": us(8.0)},
        {**PLACE, "name": "attention-dense", "phase": "prefill", "attention_us_per_layer": us(300.0)},
        {**PLACE, "name": "attention-streaming", "phase": "prefill", "streaming": 0.5, "attention_us_per_layer": us(150.0)},
        {**PLACE, "name": "psa", "ms_per_token": us(7.0), "kv_gb": 17.0, "kv_ratio": 1.08, "captured": True, "kv_fraction": 0.03},
        {**PLACE, "name": "lserve", "reuse": 4, "ms_per_token": us(6.0), "run_id": "bbbb"},
        {**PLACE, "name": "lserve", "reuse": 4, "ms_per_token": us(7.7)},
        {**PLACE, "name": "lserve-half-kv4", "streaming": 0.5, "kv_bits": 4, "reuse": 4, "error": "out of\nmemory"},
        {**SELECTING, "selector_us_per_layer": 20.0, "kernels_us": {"rank_kernel": 14.0, "select_kernel": 9.0}},
        {**SELECTING, "reuse": 4, "reuse_refresh": 0.0, "selector_us_per_layer": 6.0, "selected": 0.25},
        *({**PLACE, "name": "offload", "kv_bits": bits, "ms_per_token": us(9.0), "misses_per_token": 1000.0, "fetch_bytes": count}
          for bits, count in ((16, 16384000), (4, 4736000))),
        *({**PLACE, "name": "chain-psa", "batch": 8, "context": 32768, "kv_bits": bits, "attention_us_per_layer": us(time)}
          for bits, time in ((16, 60.0), (8, 48.0), (4, 55.0))),
        *({**PLACE, "name": f"ablation-{name}", "attention_us_per_layer": us(time)}
          for name, time in (("dense", 200.0), ("both", 40.0))),
        {**SELECTING, "name": "pages", "block_size": 32, "selector_us_per_layer": 21.0},
    ],
}


def test_report_of_lserve(tmp_path):
    (tmp_path / "lserve_h200.json").write_text(json.dumps(RESULT), encoding="utf-8")
    text = report.render((ROOT / "docs/performance.md").read_text(encoding="utf-8"), tmp_path)
    lines = text.splitlines()
    for line in (
        "| prompt, half of the heads streaming, whole | 1 | 131072 | at least 1.45 x | 1.38 x | no | aaaa |",
        "| prompt, half of the heads streaming, attention alone | 1 | 131072 | at least 1.70 x | 2.00 x | yes | aaaa |",
        "| time of a token, LServe of PSA | 1 | 131072 | at most 1.00 x | 1.10 x | no | aaaa |",
        "| selection shared by 4 tokens, of by none | 1 | 131072 | at most 0.35 x | 0.30 x | yes | aaaa |",
        "| attention of a token, 8 bits | 8 | 32768 | at least 1.10 x | 1.25 x | yes | aaaa |",
        "| attention of a token, 4 bits | 8 | 32768 | at least 1.20 x | 1.09 x | no | aaaa |",
        "| bytes fetched a token, 4 bits of 16 | 1 | 131072 | at most 0.32 x | 0.29 x | yes | aaaa |",
        "| hf_sparse, streaming heads | 1 | 131072 | 50% | 16 | 1 | 8.00 (8.00-8.00) | - | 1.38 | aaaa |",
        "| attention alone, streaming heads | 1 | 131072 | 50% | 16 | 1 | - | 150 (150-150) | 2.00 | aaaa |",
        "| LServe | 1 | 131072 | 0% | 16 | 4 | 6.00 (6.00-6.00) | - | - | - | - | - | - | bbbb |",
        "| LServe | 1 | 131072 | 0% | 16 | 4 | 7.70 (7.70-7.70) | 0.91 | - | - | - | - | - | aaaa |",
        "| PSA | 1 | 131072 | 0% | 16 | 1 | 7.00 (7.00-7.00) | 1.00 | - | 3.0% | 17.00 | 1.080 | yes | aaaa |",
        "| LServe | 1 | 131072 | 50% | 4 | 4 | failed: out of memory | - | - | - | - | - | - | aaaa |",
        "| LServe | 1 | 131072 | 0% | 16 | 4 | 16 of 64 | 30.0 (30.0-30.0) | 6.00 | 0.30 | - | - | 25.0% | - | aaaa |",
        "| LServe | 1 | 131072 | 0% | 16 | 1 | 16 of 32 | 30.0 (30.0-30.0) | 21.00 | - | - | - | - | - | aaaa |",
        "| PSA | 8 | 32768 | 0% | 4 | 1 | 55.0 (55.0-55.0) | 1.09 | - | - | aaaa |",
        "| both | 1 | 131072 | 0% | 16 | 1 | 40.0 (40.0-40.0) | 5.00 | - | - | aaaa |",
        "| PSA | 1 | 131072 | 0% | 4 | 1 | 9.00 (9.00-9.00) | - | - | 1000.0 | 4.74 | - | - | aaaa |",
        "| kv4 | yes | yes | yes | 1.0e-03 | 1.0e-01 |",
        "| pages | no | failed: ValueError: no | - | - | - |",
    ):
        assert line in lines, line
    start = lines.index("<!-- lserve-goals:start -->")
    goals = lines[start + 3:lines.index("<!-- lserve-goals:end -->")]
    assert len(goals) == 7 and not any("bbbb" in line or "KV memory" in line for line in goals)
    for name in report.SECTIONS:
        if name.startswith("lserve"):
            section = lines[lines.index(f"<!-- {name}:start -->"):lines.index(f"<!-- {name}:end -->")]
            assert len({line.count("|") for line in section if line.startswith("|")}) <= 1, name


def test_report_without_results_or_rows(tmp_path):
    document = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    sections = sum(name.startswith("lserve") for name in report.SECTIONS)
    assert report.render(document, tmp_path).count("No run yet") == sections == 10
    (tmp_path / "lserve_h200.json").write_text(json.dumps({"versions": {}, "check": None, "rows": []}), encoding="utf-8")
    text = report.render(document, tmp_path)
    assert "No run yet" not in text and text.count("`python -m benchmarks.lserve --rows") == 8


def test_every_goal_is_of_rows_that_are_measured():
    """Names, batches and contexts of the goals are those of the benchmark; and every row has a place in the tables."""
    for _, which, base, _, batch, context, _, _ in lserve_report.WANTED:
        for row in filter(None, (which, base)):
            name = row.get("name", "prefill-stock")
            group = next((group for group in CONTEXTS if name.split("-")[0] == group), "decode")
            assert name in lserve_report.LSERVE and context in CONTEXTS[group] and batch == BATCHES.get(group, 1)
            assert group != "decode" or name in SETTINGS
