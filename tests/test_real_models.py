"""Real models: what the evaluation finds on them, and the cache's figures recomputed in float64 from full attention.

Slow, and not in the default run: the models are built from packages (about 600 MB) below HF_SPARSE_MODELS, or below the
user's cache directory. `pytest -m slow tests/test_real_models.py`
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_sparse import PSAConfig, patched
from hf_sparse.evaluation import (
    CellFile,
    Haystack,
    Question,
    answer,
    build_samples,
    divergence,
    load_paragraphs,
    model_id,
    parse_policy,
    prefill,
    rows,
    run_grid,
    task_work,
)
from hf_sparse.kernels import ops
from hf_sparse.patches.attention import NAME

pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
MODELS = pathlib.Path(os.environ.get("HF_SPARSE_MODELS") or pathlib.Path.home() / ".cache" / "hf_sparse")


def load(name: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        directory = importlib.import_module("real_models").build(name, MODELS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2")


@pytest.fixture(scope="module")
def qwen():
    return load("qwen")


# -- what the cache reports, recomputed -----------------------------------------------------------------------------


class Witness:
    """Keys and queries as the model hands them to attention, and the blocks that the ops were told to read.

    Keys are collected here, not read back from the cache, so a cache that lost or mixed up tokens would show.
    """

    def __init__(self):
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.steps: dict[int, dict] = {}
        self.layer = None

    def attention(self, original):
        def witness(module, query, key, value, mask, scaling=None, **kwargs):
            self.layer = module.layer_idx
            self.keys.setdefault(self.layer, []).append(key.pending.keys.clone())
            self.steps[self.layer] = {"query": query.clone(), "scaling": scaling, "order": None}
            return original(module, query, key, value, mask, scaling=scaling, **kwargs)

        return witness

    def forced(self, original):
        def witness(tiers, query, table, lengths, tail_start, sink_blocks, *rest):
            self.steps[self.layer].update(tail_start=int(tail_start[0]), sink_blocks=sink_blocks)
            return original(tiers, query, table, lengths, tail_start, sink_blocks, *rest)

        return witness

    def ranked(self, original):
        def witness(tiers, query, table, order, *rest):
            result = original(tiers, query, table, order, *rest)
            self.steps[self.layer].update(order=order[0].clone(), read=result[2][0].clone())
            return result

        return witness


@contextlib.contextmanager
def watched(monkeypatch):
    witness = Witness()
    original = ALL_ATTENTION_FUNCTIONS[NAME]
    AttentionInterface.register(NAME, witness.attention(original))
    monkeypatch.setattr(ops, "attend_forced", witness.forced(ops.attend_forced))
    monkeypatch.setattr(ops, "attend", witness.ranked(ops.attend))
    try:
        yield witness
    finally:
        AttentionInterface.register(NAME, original)
        monkeypatch.undo()


def log_masses(step: dict, keys: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Float64 log mass of the tokens read and of all tokens, [query heads] each, and the number of blocks read."""
    heads, tokens = keys.shape[1:3]
    query = step["query"][0, :, 0].double().unflatten(0, (heads, -1)) * step["scaling"]          # [H, G, D]
    logits = query @ keys[0].double().transpose(1, 2)                                            # [H, G, T]
    blocks = torch.zeros(heads, -(-tokens // block_size), dtype=torch.bool)
    blocks[:, : step["sink_blocks"]] = True
    blocks[:, step["tail_start"] :] = True
    for head in range(heads):
        blocks[head, step["order"][head, : step["read"][head]]] = True
    read = blocks.repeat_interleave(block_size, 1)[:, None, :tokens]
    captured = logits.masked_fill(~read, -torch.inf).logsumexp(-1)
    return captured.flatten(), logits.logsumexp(-1).flatten(), int(blocks.sum())


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(threshold=0.85),
        dict(digest="cuboid_mean", stop_rule="window", threshold=0.9),
        dict(policy="top_k", top_k=0.1),
    ],
    ids=["channel_codes", "cuboid_mean_window", "top_k"],
)
@torch.no_grad()
def test_masses_and_coverage_are_those_of_full_attention(name, settings, request, monkeypatch):
    model, tokenizer = request.getfixturevalue(name)
    haystack = Haystack(load_paragraphs(), tokenizer)
    ids = haystack.plain(2048, seed=0, extra=2)
    config = PSAConfig(min_context=0, verify=True, **settings)
    estimated, true = [], []
    with patched(model, config), watched(monkeypatch) as witness:
        cache = prefill(model, ids[:2048], config)
        prompt = {layer: parts[:] for layer, parts in witness.keys.items()}
        for token in ids[2048:]:
            witness.keys = {layer: parts[:] for layer, parts in prompt.items()}
            fork = cache.fork()
            model(input_ids=torch.tensor([[token]]), past_key_values=fork)
            stats = fork.stats()
            skipped = 0
            for layer in stats["layers"]:
                step = witness.steps[layer["layer"]]
                keys = torch.cat(witness.keys[layer["layer"]], 2)
                assert keys.shape[2] == 2049
                captured, total, blocks = log_masses(step, keys, config.block_size)
                reported = torch.tensor(layer["captured_log_mass"][0], dtype=torch.float64)
                assert torch.allclose(reported, captured, atol=1e-4, rtol=0)
                coverage = torch.exp(captured - total)
                assert layer["coverage_true"] == pytest.approx(coverage.mean().item(), abs=1e-4)
                assert layer["blocks_read"] == blocks
                assert layer["blocks_held"] == keys.shape[1] * -(-2049 // config.block_size)
                skipped += layer["blocks_held"] - blocks
                estimated.append(layer["coverage"])
                true.append(coverage.mean().item())
            assert skipped > 0.3 * stats["blocks_held"]
    if config.digest == "channel_codes":
        # The digest's estimate of what was left out is nearly unbiased: research puts it within a few hundredths.
        error = torch.tensor(estimated) - torch.tensor(true)
        assert error.abs().mean() < 0.03 and error.abs().max() < 0.25


# -- stop rules -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rules(smollm2):
    """Figures of every stop rule over the same 16 tokens of continued text, blocks of 16 as in the measurements."""
    model, tokenizer = smollm2
    (sample,) = build_samples(["kl"], Haystack(load_paragraphs(), tokenizer), 2048, 1, seed=0)
    question = Question("continuation", sample.questions[0].prompt, sample.questions[0].answer[:16])
    found = {}
    for label, settings in {
        "paper": dict(digest="cuboid_mean", stop_rule="paper", threshold=0.95, round_blocks=1),
        "nleft": dict(digest="cuboid_mean", stop_rule="nleft", threshold=0.95, round_blocks=1),
        "window": dict(digest="cuboid_mean", stop_rule="window", threshold=0.95),
        "key_bits": dict(digest="key_bits", key_bits=2, threshold=0.9),
        "channel_codes": dict(digest="channel_codes", threshold=0.85),
    }.items():
        config = PSAConfig(block_size=16, min_context=0, verify=True, **settings)
        with patched(model, config):
            cache = prefill(model, sample.context, config)
            sparse, dense = answer(model, cache, question), answer(model, cache, question, dense=True)
        found[label] = {
            "read": sparse.stats["kv_fraction"],
            "coverage": sparse.stats["coverage_true"],
            "worst_layer": min(layer["coverage_true"] for layer in sparse.stats["layers"]),
            "kl": divergence(dense.log_probs, sparse.log_probs).mean().item(),
        }
    return found


def test_the_printed_rule_stops_after_a_few_blocks(rules):
    # Always read: the sink, and the newest two of 128. What is ranked adds 1 to 5 blocks.
    assert 3 / 129 < rules["paper"]["read"] < 8 / 129
    assert rules["paper"]["coverage"] < 0.8
    assert rules["paper"]["kl"] > 10 * rules["channel_codes"]["kl"]


def test_counting_the_unread_blocks_misses_its_threshold_with_a_cheap_digest(rules):
    assert 0.85 < rules["nleft"]["coverage"] < 0.96
    assert rules["nleft"]["worst_layer"] < 0.9


def test_the_window_rule_reaches_its_threshold_with_a_cheap_digest(rules):
    assert rules["window"]["coverage"] > 0.97 and rules["window"]["worst_layer"] > 0.95
    assert rules["window"]["read"] > 1.5 * rules["nleft"]["read"]


def test_estimates_reach_their_threshold_with_token_level_digests(rules):
    assert rules["key_bits"]["coverage"] > 0.9 and rules["key_bits"]["worst_layer"] > 0.9
    assert rules["channel_codes"]["coverage"] > 0.85 and rules["channel_codes"]["worst_layer"] > 0.85
    for digest in ("key_bits", "channel_codes"):
        assert rules[digest]["read"] < 0.6 * rules["window"]["read"]
        assert rules[digest]["kl"] < 0.02


# -- tasks ----------------------------------------------------------------------------------------------------------


def measured(model, tokenizer, tasks, samples, **settings):
    """The rows of these settings, by the cache's own step, and their mean estimated coverage."""
    cells = CellFile(None, model_id(model))
    work = task_work(tasks, [4096], Haystack(load_paragraphs(), tokenizer), samples)
    run_grid(model, tokenizer, work, [parse_policy("psa", PSAConfig(**settings))], cells, simulated=False)
    mine = [cell for cell in cells.cells.values() if cell.policy == "psa"]
    return [row for row in rows(cells.cells.values()) if row.policy == "psa"], sum(cell.coverage for cell in mine) / len(mine)


def test_smollm2_finds_the_passkey_sparsely(smollm2):
    (row,), coverage = measured(*smollm2, ["passkey"], 3, min_context=0)
    assert row.accuracy_dense == 1.0 and row.accuracy == 1.0
    assert row.kv_fraction < 0.3 and coverage > 0.85
    assert row.kl_mean < 0.05


def test_qwen_tells_eight_needles_apart_sparsely(qwen):
    (needles, copy), _ = measured(*qwen, ["needles", "copy"], 1)
    assert (needles.metric, needles.questions, copy.metric) == ("exact", 8, "tokens")
    assert needles.accuracy_dense == 1.0 and needles.accuracy == 1.0
    assert copy.accuracy > 0.95 * copy.accuracy_dense > 0.85
    for row in (needles, copy):
        assert 0.08 < row.kv_fraction < 0.3 and row.kl_mean < 0.03


def test_cheap_top_k_loses_what_the_default_keeps(qwen):
    """A negative control: the same needles with a digest and a budget that research found too weak."""
    (row,), _ = measured(*qwen, ["needles"], 1, min_context=0, digest="cuboid_mean", policy="top_k", top_k=0.08)
    assert row.accuracy_dense == 1.0 and row.accuracy < 0.9
    assert row.kl_mean > 0.1


# -- the README's first command -------------------------------------------------------------------------------------


def test_quickstart_finds_the_number(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    quickstart = importlib.import_module("quickstart")
    plot = tmp_path / "picture.png"
    assert quickstart.main(["--cache-dir", str(MODELS), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "dense: yes, sparse: yes" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
