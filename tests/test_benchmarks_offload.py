"""benchmarks/offload.py as far as it goes without a GPU: what it feeds the step, what it simulates, what it reports."""
from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import random
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from benchmarks.residency_simulation import EVICTIONS, SimulatedPool, hit_rate, overlap
from hf_sparse import PSACache, PSAConfig
from hf_sparse.kernels.reference.fetch import acquire

pytest.importorskip("triton")

from benchmarks import offload, offload_check, synthetic  # noqa: E402
from benchmarks.synthetic import OBSERVED, Queries, Shape, shape_of  # noqa: E402
from hf_sparse.cache.static import StaticStep  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SMALL = Shape(layers=3, batch=2, query_heads=4, heads=2, dim=16, dtype=torch.float32, device=CPU)


# -- the simulation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_simulated_pool_evicts_as_the_reference_does(eviction):
    """One block at a time, so that no two have the same priority."""
    blocks, slots, generator = 30, 9, random.Random(3)
    full = lambda size, value, dtype=torch.float64: torch.full((size,), value, dtype=dtype)  # noqa: E731
    pinned = full(slots + 1, False, torch.bool)
    pinned[0] = True
    tiers = [full(slots + 1, 0.0)[:, None], full(blocks + 1, 0.0)[:, None], full(blocks + 1, 0, torch.int64),
             full(slots + 1, 0, torch.int64), full(slots + 1, -math.inf), pinned, full(1, 0.0),
             full(2, 0, torch.int64), full(blocks + 1, -math.inf)]
    pool = SimulatedPool(slots, eviction)
    hits = 0
    for step in range(400):
        block = 1 + min(int(generator.expovariate(0.12)), blocks - 1)
        tiers[6][0] = step / 7
        acquire(tiers, torch.tensor([block]), torch.tensor([True]), eviction, load=True, use=True, count=True)
        hits += pool.read([block], step / 7)
        assert hits == int(tiers[7][0])
        assert set(pool.priority) == set(tiers[3][tiers[3] > 0].tolist())
    assert 100 < hits < 390


def test_blocks_that_are_read_together_do_not_evict_each_other():
    pool = SimulatedPool(4, "fifo")
    assert pool.read([1, 2, 3], 0.0) == 0
    assert pool.read([1, 2, 4, 5], 1.0) == 2                # 1 and 2 came first, and are needed
    assert set(pool.priority) == {1, 2, 4, 5}
    assert pool.read([6, 7, 8, 9, 10, 11], 2.0) == 0        # more than there is room for
    assert len(pool.priority) == 4


def test_hit_rates_of_pools_and_of_what_is_counted():
    trace = [[[1, 2], [11, 12]], [[1, 2], [13, 14]], [[1, 3], [15, 16]], [[1, 3], [17, 18]]]
    assert hit_rate(trace, 8, "lru") == 4 / 16 + 1 / 16
    assert hit_rate(trace, 8, "lru", warmup=2) == 3 / 8
    assert hit_rate(trace, 4, "lru") == 0.25 + 1 / 16       # the last four that were read
    assert hit_rate(trace, 2, "lru") == 0.0                 # layers in a cycle
    assert hit_rate(trace, 4, "lru", per_layer=True) == 5 / 16
    alone = [hit_rate([[steps[layer]] for steps in trace], 2, "lru") for layer in (0, 1)]
    assert sum(alone) / 2 == 5 / 16
    assert overlap(trace) == (1.0 + 0.0 + 0.5 + 0.0 + 1.0 + 0.0) / 6
    assert overlap(trace, warmup=3) == 0.5
    with pytest.raises(ValueError, match="choose one of lru, fifo, decayed"):
        hit_rate(trace, 4, "random")


# -- keys, values and queries ----------------------------------------------------------------------------------


def test_shares_and_shared_blocks_by_hand():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 40, 16, generator=generator)
    queries = torch.randn(5, 4, 16, generator=generator)
    shares = synthetic.block_shares([keys[:, :24], keys[:, 24:]], queries, block_size=8)
    for t in range(5):
        for h in range(2):
            mass = torch.softmax(queries[t, 2 * h:2 * h + 2] @ keys[h].T / 4, -1).mean(0)
            torch.testing.assert_close(shares[t, h], mass.view(5, 8).sum(-1))
    best = [[set(shares[t, h].topk(2).indices.tolist()) for h in range(2)] for t in range(5)]
    expected = sum(len(best[t][h] & best[t - 1][h]) for t in range(1, 5) for h in range(2)) / 16
    assert 0.0 < expected < 1.0
    assert synthetic.shared_blocks(shares, 2) == pytest.approx(expected)


@pytest.mark.parametrize(("context", "blocks"), [(2050, 16), (4096, 32)], ids=["2K-odd", "4K"])
def test_calibration_reaches_the_overlap(context, blocks):
    persistence, shared = synthetic.calibrate(SMALL, context, blocks)
    assert 0.5 < persistence < 1.0 and 0.70 <= shared <= 0.80


def test_queries_are_a_walk_of_unit_variance():
    table = Queries(SMALL, 200, 0.9).table
    steps = (table[1:] * table[:-1]).mean() / table.square().mean()
    assert float(steps) == pytest.approx(0.9, abs=0.01) and float(table.std()) == pytest.approx(1.0, abs=0.05)


def test_predictions_find_the_blocks_that_they_should():
    """As many of the heaviest blocks of the query that each predicts as was asked for."""
    nearness, shared = synthetic.calibrate(SMALL, 4096, 16, target=synthetic.PREDICTED)
    assert shared == pytest.approx(synthetic.PREDICTED, abs=0.03)
    queries = Queries(SMALL, 40, 0.9, nearness)
    keys = [part[0] for part, _ in synthetic.pieces(SMALL, 0, 4096)]
    found = []
    for token in range(40):
        pair = torch.stack([table[OBSERVED + token, 0, 0, :, 0] for table in (queries.table, queries.predictions)])
        found.append(synthetic.shared_blocks(synthetic.block_shares(keys, pair, 32), 16))
    assert sum(found) / len(found) == pytest.approx(synthetic.PREDICTED, abs=0.04)
    assert queries.predictions.std() == pytest.approx(1.0, abs=0.05)


def test_the_step_gets_the_predictions_of_the_layer_and_token(monkeypatch):
    asked = []
    monkeypatch.setattr(StaticStep, "run", lambda self, layer, query, *rest: None)
    look_ahead = lambda self, layer, query, *rest: asked.append((layer.index, query.clone(), rest))  # noqa: E731
    monkeypatch.setattr(StaticStep, "look_ahead", look_ahead)
    queries, step = Queries(SMALL, 6, 0.9, 0.95), object.__new__(StaticStep)
    layers = [SimpleNamespace(index=order) for order in range(3)]
    with synthetic.synthetic_queries(queries):
        for _ in range(4):
            for layer in layers:
                step.run(layer, None, "key", "value")
                if layer.index < 2:
                    step.look_ahead(layers[layer.index + 1], torch.zeros(2, 4, 1, 16), 0.25, 0.0)
    assert [order for order, _, _ in asked] == [1, 2] * 4 and asked[0][2] == (0.25, 0.0)
    for i, (order, query, _) in enumerate(asked):
        assert torch.equal(query, queries.predictions[OBSERVED + i // 2, order])
        assert not torch.equal(query, queries.table[OBSERVED + i // 2, order])


def test_the_step_gets_the_queries_of_its_layer_and_token(monkeypatch):
    taken, seen = [], []
    run = lambda self, layer, query, *rest: taken.append((layer.order, query.clone(), rest))  # noqa: E731
    monkeypatch.setattr(StaticStep, "run", run)
    original, queries = StaticStep.run, Queries(SMALL, 6, 0.9)
    step, layers = object.__new__(StaticStep), [SimpleNamespace(order=order, index=order) for order in range(3)]
    for _ in range(2):                                      # from the start again
        queries.start()
        taken.clear()
        with pytest.raises(KeyError), synthetic.synthetic_queries(queries, lambda step, layer: seen.append(layer.order)):
            for _ in range(4):
                for layer in layers:
                    step.run(layer, torch.zeros(2, 4, 1, 16), "key", "value")
            raise KeyError
        assert queries.taken() == 4 and StaticStep.run is original
        assert [order for order, _, _ in taken] == [0, 1, 2] * 4 and taken[0][2] == ("key", "value")
        for i, (order, query, _) in enumerate(taken):
            assert torch.equal(query, queries.table[OBSERVED + i // 3, order])
            assert query.shape == (2, 4, 1, 16)
    assert seen == [0, 1, 2] * 8
    assert torch.equal(queries.observed(1)[0, 2], queries.table[:OBSERVED, 1, 0, 2, 0])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=16, vocab_size=50, bos_token_id=None, eos_token_id=None,
                         pad_token_id=None)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("budget", [{}, dict(gpu_memory=1_200_000, host_memory="8MiB")], ids=["resident", "tiered"])
def test_a_filled_cache_holds_the_keys_that_were_calibrated_with(model, monkeypatch, budget):
    shape = shape_of(model, 2)
    assert shape == SMALL
    monkeypatch.setattr(synthetic, "pieces", functools.partial(synthetic.pieces, size=384))
    queries = Queries(shape, 4, 0.9)
    cache = PSACache(model.config, **budget)
    synthetic.fill(cache, queries, 1000, room=70)
    assert cache.tokens == 1000 and cache.sparse_layers[0].pool.tiered == bool(budget)
    if budget:
        assert cache.sparse_layers[0].pool.slots < cache.sparse_layers[0].pool.blocks_in_use()
    for order, layer in enumerate(cache.sparse_layers):
        keys, values = (torch.cat(parts, 2) for parts in zip(*synthetic.pieces(shape, order, 1000)))
        assert torch.equal(layer.padded()[0], keys) and torch.equal(layer.padded()[1], values)
        assert layer.digests.calibrated and layer.digests.units_done.tolist() == [7, 7] and layer.columns >= 1070 / 32
    columns = cache.sparse_layers[0].columns
    cache.sparse_layers[0].reserve(1070)
    assert cache.sparse_layers[0].columns == columns


# -- the benchmark ---------------------------------------------------------------------------------------------


def test_options():
    args = offload.options(["--pool", "0.1,0.25", "--eviction", "lru,fifo", "--batches", "1,4", "--rows", "copy,hits"])
    assert (args.pool, args.eviction, args.batches, args.rows) == ([0.1, 0.25], ["lru", "fifo"], [1, 4], ["copy", "hits"])
    assert not args.prefetch and offload.options(["--prefetch"]).prefetch


@pytest.mark.parametrize("wrong", [["--rows", "psa"], ["--eviction", "random"], ["--warmup", "2"],
                                   ["--pools", "shared"]], ids=lambda words: words[0])
def test_options_that_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        offload.options(wrong)
    assert "error" in capsys.readouterr().err


def test_pools_are_as_large_as_asked_for(model):
    """The first from its config, the next by another budget of the same pool; and it never has more than that."""
    bench = offload.Bench(model, offload.options(["--pool", "0.35,0.6", "--warmup", "4", "--tokens", "4"]))
    shape = shape_of(model, 2)
    budgets = bench.budgets(shape, 4000)
    cache, row = bench.filled(bench.tiered(shape, 4000, budgets[0], "lru"), Queries(shape, 4, 0.9), 4000)
    pool = cache.sparse_layers[0].pool
    for fraction, budget in zip((0.35, 0.6), budgets):
        pool.budget = budget
        cache.state.fit(pool)
        assert pool.slots * pool.block_bytes / shape.kv_bytes(4000) == pytest.approx(fraction, rel=0.01)
        used = pool.slots * pool.block_bytes + sum(layer.side_bytes() for layer in cache.sparse_layers)
        assert used <= budget
    assert row["fill_s"] >= 0 and cache.tokens == 4000
    given = offload.Bench(model, offload.options(["--gpu-memory", "1MiB"]))
    assert given.budgets(shape, 4000) == [2**20]


def test_pools_of_layers_are_as_large_as_asked_for(model):
    bench = offload.Bench(model, offload.options(["--pool", "0.5", "--warmup", "4", "--tokens", "4"]))
    shape = shape_of(model, 2)
    budget, = bench.budgets(shape, 4000)
    cache, _ = bench.filled(bench.tiered(shape, 4000, budget, "lru", pool="per_layer"), Queries(shape, 4, 0.9), 4000)
    pools = offload.pools_of(cache)
    slots = sum(pool.slots for pool in pools)
    assert len(pools) == 3 and slots * pools[0].block_bytes / shape.kv_bytes(4000) == pytest.approx(0.5, rel=0.01)


def test_rows_of_hits_are_simulated_and_measured(model, monkeypatch):
    """For each pool that was asked for; measured with the pools of the library, at the sizes of the simulation."""
    bench = offload.Bench(model, offload.options(["--pool", "0.2,0.4", "--pools", "per_layer", "--warmup", "4", "--tokens", "4"]))
    layer = SimpleNamespace(pinned_blocks=lambda batch: 2, pool=SimpleNamespace(block_bytes=4096))
    cache = SimpleNamespace(sparse_layers=[layer])
    monkeypatch.setattr(bench, "queries", lambda shape, context: (None, 0.75))
    monkeypatch.setattr(bench, "filled", lambda *args: (cache, {}))

    def decoded(queries, watch):
        for step in range(24):
            watch(step, layer)
        return nullcontext()

    monkeypatch.setattr(offload, "synthetic_queries", decoded)
    monkeypatch.setattr(offload, "planned_ids", lambda step, _: [100 * (step % 3) + step // 3 % 2, 100 * (step % 3) + 7])
    monkeypatch.setattr(offload, "generate", lambda *args: None)
    given = []
    monkeypatch.setattr(bench, "psa_offload", lambda place, shape, pool: given.append(pool) or iter(
        {**place, "pool_fraction": rate / 2 + 1e-4, "hit_rate": rate} for rate in (0.5, 0.9)))
    rows = list(bench.rows("hits", 1, 4096))
    simulated, measured = ([row for row in rows if row["how"] == how] for how in ("simulated", "measured"))
    assert len(rows) == 2 * 3 + 2 and {row["pool"] for row in rows} == {"per_layer"} == set(given)
    assert [(row["pool_fraction"], row["hit_rate"]) for row in measured] == [(0.2, 0.5), (0.4, 0.9)]
    assert all(row["hit_rate"] > 0 and row["name"] == "hits" for row in simulated)


def test_rows_that_fail_are_rows(model, monkeypatch, capsys):
    bench = offload.Bench(model, offload.options([]))
    monkeypatch.setattr(bench, "psa_resident", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("too much")))
    assert list(bench.rows("psa-resident", 1, 4096)) == [
        {"name": "psa-resident", "batch": 1, "context": 4096, "error": "OutOfMemoryError: too much"}]
    assert "too much" in capsys.readouterr().err


def test_ids_of_planned_blocks():
    table = torch.arange(100, 124).view(1, 2, 12)
    info = torch.zeros(1, 2, 8, dtype=torch.int32)
    info[0, :, 0] = torch.tensor([2, 3])
    ranked = torch.full((1, 2, 12), 10**9)                  # beyond what is planned: anything
    ranked[0, 0, :2], ranked[0, 1, :3] = torch.tensor([7, 1]), torch.tensor([0, 11, 4])
    step = SimpleNamespace(work={"shape": SimpleNamespace(info=info, ranked=ranked)})
    assert offload.planned_ids(step, SimpleNamespace(table=table)) == [107, 101, 112, 123, 116]


def test_the_check_finds_equal_runs_and_differences(capsys, monkeypatch):
    found = offload_check.check("cpu", length=130, tokens=3)
    assert offload_check.failures(found) == [] and len(found) == 2 * (10 + 4 + 10 + 4 + 10 + 2)
    assert found["captured-0.6-lru-smallest"]["slots"] < found["captured-0.6-lru-everything"]["slots"]
    run = offload_check.Case.run

    def differs(self, **budget):
        tokens, logits, noted = run(self, **budget)
        return tokens, logits + 1e-6 * (budget.get("eviction") == "fifo"), noted

    monkeypatch.setattr(offload_check.Case, "run", differs)
    monkeypatch.setattr(offload_check, "EVICTIONS", ("lru", "fifo"))
    wrong = offload_check.failures(offload_check.check("cpu", length=130, tokens=3))
    assert len(wrong) == 2 * 12 and all("fifo" in name for name in wrong)
    assert "DIFFERENT" in capsys.readouterr().out


def test_the_smallest_budget_is_what_refusals_lead_to():
    def attempt(budget):
        if budget < 3 * 2**20:
            raise ValueError(f"it needs at least {'1.50MiB' if budget < 2**20 else '3.00MiB'}, and more")

    assert offload_check.smallest(attempt) == 3 * 2**20
    with pytest.raises(ValueError, match="no number"):
        offload_check.smallest(lambda budget: (_ for _ in ()).throw(ValueError("no number")))


def test_blocks_of_the_bandwidth_benchmark_arrive():
    code = """
from benchmarks.bandwidth import FetchBench, tiering
tiering.TUNING.victim_programs, tiering.TUNING.count_tile = 2, 16
bench = FetchBench(blocks=90, misses=7, elements=24, device="cpu")
for _ in range(6):
    blocks = bench.miss()
    bench.fetch()
    bench.check(blocks)
bench.pool.kv[bench.pool.slot_of[blocks[3]]] += 1
try:
    bench.check(blocks)
except RuntimeError:
    print("noticed", int((bench.pool.block_in > 0).sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=300, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"})
    assert done.stdout == "noticed 28\n"


# -- the report ------------------------------------------------------------------------------------------------

ROW = {"batch": 1, "context": 4096, "run_id": "aaaa", "ms_per_token": {"median": 6.0, "p20": 5.5, "p80": 7.0},
       "tokens_per_second": 166.7, "captured": True, "overlap": 0.75}
RESULT = {
    "versions": {"gpu": "NVIDIA X"},
    "check": {"captured-0.6-lru-smallest": {"equal": True, "apart": 0.0, "captured": True, "misses": 9, "slots": 33},
              "beams": {"equal": False, "error": "ValueError: no"}},
    "rows": [
        {"name": "copy", "run_id": "aaaa", "copy_engine_gb_s": 50.0, "fetch_gb_s": 45.0, "fetch_programs": 32,
         "by_programs": {"32": {"median": 45.0, "p20": 44.0, "p80": 46.0}, "8": {"median": 40.0, "p20": 39.0, "p80": 41.0}}},
        {**ROW, "name": "psa-resident", "pool_fraction": 1.0, "ms_per_token": {"median": 4.0, "p20": 4.0, "p80": 4.0}},
        {**ROW, "name": "psa-offload", "eviction": "lru", "pool_fraction": 0.1, "hit_rate": 0.7, "fetch_gb_s": 20.0},
        {**ROW, "name": "psa-offload", "eviction": "lru", "pool_fraction": 0.1, "run_id": "bbbb"},
        *({**ROW, "name": "psa-offload", "eviction": "decayed", "pool_fraction": 0.1, "prefetch": prefetch, "hit_rate": rate}
          for prefetch, rate in ((True, 0.9), (False, 0.8))),
        {"name": "psa-offload", "eviction": "fifo", "batch": 1, "context": 4096, "run_id": "aaaa", "error": "out of\nmemory"},
        {"name": "hits", "error": "no", "batch": 1, "context": 4096, "run_id": "aaaa"},
        *({"name": "hits", "how": how, "pool": pool, "eviction": "lru", "batch": 1, "context": 4096, "pool_fraction": fraction,
           "hit_rate": rate, "run_id": "aaaa"}
          for how, pool, fraction, rate in (("simulated", "unified", 0.2, 0.6), ("simulated", "unified", 0.1, 0.5),
                                            ("simulated", "per_layer", 0.1, 0.4), ("measured", "per_layer", 0.1, 0.45))),
    ],
}


def test_report_of_offloading(tmp_path):
    (tmp_path / "offload_h200.json").write_text(json.dumps(RESULT), encoding="utf-8")
    text = report.render((ROOT / "docs/performance.md").read_text(encoding="utf-8"), tmp_path)
    lines = [line for line in text.splitlines() if "aaaa" in line or "bbbb" in line]
    path = "| hf_sparse, KV in host memory "
    lru = path + "| lru | 1 | 4096 | 10.0% | 6.00 (5.50-7.00) "
    assert f"{lru}| 1.50 | 166.7 | 70.0% | 20.0 | - | 75.0% | - | - | - | yes | aaaa |" in lines
    assert f"{lru}| - | 166.7 | - | - | - | 75.0% | - | - | - | yes | bbbb |" in lines
    decayed = "| decayed | 1 | 4096 | 10.0% | 6.00 (5.50-7.00) | 1.50 | 166.7 | "
    assert any(line.startswith(f"{path}{decayed}80.0% |") for line in lines)
    assert any(line.startswith(f"{path.rstrip()}, prefetching {decayed}90.0% |") for line in lines)
    assert any(line.startswith(f"{path}| fifo | 1 | 4096 | - | failed: out of memory |") for line in lines)
    assert "| 8 | 40.0 (39.0-41.0) | 50.0 | 80% | aaaa |" in lines
    assert "| 32 (used) | 45.0 (44.0-46.0) | 50.0 | 90% | aaaa |" in lines
    assert "|  | pool | eviction | batch | context | 10% of KV | 20% of KV | run |" in text
    assert "| simulated | unified | lru | 1 | 4096 | 50.0% | 60.0% | aaaa |" in lines
    assert "| simulated | per_layer | lru | 1 | 4096 | 40.0% | - | aaaa |" in lines
    assert "| measured | per_layer | lru | 1 | 4096 | 45.0% | - | aaaa |" in lines
    assert "| captured-0.6-lru-smallest | yes | 0.0e+00 | yes | 33 | 9 |" in text
    assert "| beams | no | failed: ValueError: no | - | - | - |" in text
    heads = {line.count("|") for line in text.splitlines() if line.startswith("| path |") or line.startswith(path)}
    assert len(heads) == 1


def test_report_without_results_or_rows(tmp_path):
    document = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert report.render(document, tmp_path).count("Not measured yet") == 6
    (tmp_path / "offload_h200.json").write_text(json.dumps({"versions": {}, "check": None, "rows": []}), encoding="utf-8")
    text = report.render(document, tmp_path)
    assert text.count("Not measured yet") == 1              # the real model, which has a file of its own
    assert text.count("No such rows are among these runs") == 3
    assert text.count("The correctness check of this benchmark was skipped") == 1


def test_settings_that_rows_measure():
    """The budget of 4096 tokens, and the share that the walk is calibrated to."""
    assert offload.BLOCKS * PSAConfig().block_size == 4096 and 0.7 <= synthetic.TARGET <= 0.8


def test_rows_with_and_without_prefetch(model, monkeypatch):
    """Each budget of each eviction twice; other rows, and those of runs without the option, know nothing of it."""
    made = []

    def filled(config, queries, context):
        made.append((config.eviction, config.prefetch, queries.predictions is not None))
        pool = SimpleNamespace(budget=0, pools=1)
        layer = SimpleNamespace(pool=pool, on_device=lambda context: True)
        return SimpleNamespace(sparse_layers=[layer], state=SimpleNamespace(fit=lambda pool: None)), {}

    for words, name in ((["--prefetch"], "psa-offload"), ([], "psa-offload"), (["--prefetch"], "copy-engine")):
        bench = offload.Bench(model, offload.options([*words, "--eviction", "lru,decayed", "--pool", "0.3,0.6"]))
        monkeypatch.setattr(bench, "filled", filled)
        monkeypatch.setattr(bench, "decode", lambda cache, queries, ids: ({}, ids))
        made.clear()
        rows = list(bench.rows(name, 1, 1024))
        if name == "psa-offload" and words:
            assert [(row["eviction"], row["prefetch"], row["predicted"] is not None) for row in rows] == [
                (eviction, prefetch, prefetch) for eviction in ("lru", "decayed") for prefetch in (False, True) for _ in range(2)]
            assert made == [(eviction, prefetch, True) for eviction in ("lru", "decayed") for prefetch in (False, True)]
        else:
            assert len(rows) == 4 and not any("prefetch" in row for row in rows)
            assert made == [("lru", False, False), ("decayed", False, False)]
