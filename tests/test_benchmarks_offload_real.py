"""benchmarks/offload_real.py on a tiny model: the pool has the share it says, both answers are real, differences show."""
from __future__ import annotations

import functools
import json
import re

import pytest
import torch

from benchmarks import report
from hf_sparse import PSAConfig, patched
from hf_sparse.evaluation import DenseDecodeError, Haystack, Question, answer, build_samples, default_paragraphs, prefill
from hf_sparse.kernels.reference import fetch
from tests.text_model import save_text_model, text_model, text_tokenizer

pytest.importorskip("triton")

from benchmarks import offload_real  # noqa: E402

CONFIG = PSAConfig(threshold=0.6, min_context=0, block_size=4)


@functools.cache
def sample():
    (found,) = build_samples(["needles"], Haystack(default_paragraphs(), text_tokenizer()), 1500, 1, seed=2)
    return type(found)(found.task, found.seed, found.context, found.questions[:2])


@functools.cache
def measured():
    model = text_model()
    with patched(model, CONFIG):
        return offload_real.measure(model, sample(), CONFIG, share=0.4, chunk=400)


def test_a_pool_of_the_share_that_is_asked_for_answers_as_everything_resident():
    row = measured()
    assert row["same"] and row["tokens"] > 0 and row["logits_apart"] == 0.0
    assert row["questions"] == 2
    assert 0.37 < row["pool_fraction"] <= 0.4               # tables of a fork may be wider than the context's
    assert {answer["slots"] for answer in row["answers"]} == {row["slots"]}
    assert row["pool_fraction"] == row["slots"] * row["block_bytes"] / row["kv_bytes"]
    assert 0 < row["misses_per_step"] and 0 < row["hit_rate"] < 1 and 0 < row["kv_fraction"] < 1


def test_a_fetch_that_brings_the_wrong_block_shows(monkeypatch):
    right = fetch.fill
    monkeypatch.setattr(fetch, "fill", lambda tiers, blocks, slots: right(tiers, (blocks - 1).clamp(min=0), slots))
    with patched(text_model(), CONFIG):
        row = offload_real.measure(text_model(), sample(), CONFIG, share=0.4, chunk=400)
    assert row["logits_apart"] > 1e-3
    assert [answer["resident"] for answer in row["answers"]] == [answer["resident"] for answer in measured()["answers"]]


def test_resident_answers_are_those_of_the_steps_one_by_one():
    model, question = text_model(), sample().questions[0]
    config = CONFIG.replace(sparse_queries=True)
    with patched(model, config), torch.no_grad():
        cache = prefill(model, sample().context, config, 400).fork(sparse_queries=True)
        ids, tokens = list(question.prompt), []
        for _ in question.answer:
            logits = [model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits for token in ids][-1]
            tokens.append(int(logits[0, -1].argmax()))
            ids = tokens[-1:]
    assert measured()["answers"][0]["resident"] == tokens
    assert measured()["answers"][0]["steps"] == len(question.prompt) + len(tokens) - 1


def test_steps_that_are_dense_are_no_measurement():
    model, config = text_model(), CONFIG.replace(min_context=100_000)
    with patched(model, config), pytest.raises(DenseDecodeError):
        offload_real.measure(model, sample(), config, share=0.4, chunk=None)


def test_answers_that_differ_are_told():
    common = dict(slots=7, steps=9, kv_fraction=0.2, coverage=0.9, hits=3, misses=1)
    logits = torch.zeros(3, 5)
    other = logits.clone()
    other[1, 2], other[2, 0] = 0.5, 7.0                     # what comes after another token is not comparable
    found = offload_real.compare(Question("q", (1,), (1, 2, 3)), {"tokens": [1, 2, 3], "logits": logits},
                                 {"tokens": [1, 4, 3], "logits": other, **common})
    assert found["resident"] == [1, 2, 3] and found["offloaded"] == [1, 4, 3] and found["logits_apart"] == 0.5


# -- hit rates -------------------------------------------------------------------------------------------------

WARMUP, TOKENS = 5, 7


@functools.cache
def text():
    return Haystack(default_paragraphs(), text_tokenizer()).plain(1300, 1, extra=WARMUP + TOKENS)


@functools.cache
def rates():
    with patched(text_model(), CONFIG):
        return list(offload_real.hits(text_model(), text(), CONFIG, (0.3, 0.9), 0.5, WARMUP, TOKENS, 400))


def test_what_is_noted_is_what_steps_read():
    """Ids of the layer's own table, none that is always read, and as many as stats() counts beside those."""
    config, flat = CONFIG.replace(record_steps=1), []
    with patched(text_model(), config):
        cache = prefill(text_model(), text()[:-3], config, 400)
        with offload_real.reads_of(flat):
            fed = offload_real.decode(text_model(), cache, text()[-3:], more=2)
        decoded = len(flat)
        offload_real.decode(text_model(), cache, [7])
    layers, stats = cache.sparse_layers, cache.stats()["layers"]
    assert len(fed) == 5 and fed[:3] == list(text()[-3:])
    assert decoded == len(flat) == 5 * len(layers)          # nothing is noted any more once it has ended
    for order, layer in enumerate(layers):
        rounds = flat[order::len(layers)]
        assert all(1 <= len(ids) <= layer.heads * 32 for step in rounds for ids in step) and max(map(len, rounds)) > 2
        steps = [sum(step, []) for step in rounds]
        first = CONFIG.sink_blocks
        own = [set(layer.table[0, head, first:layer.columns].tolist()) for head in range(layer.heads)]
        forced = 0
        for step, ids in enumerate(steps):
            assert ids and len(ids) == len(set(ids)) and set(ids) <= set.union(*own)
            length = torch.tensor([len(text()) - 3 + step + 1])
            start = int(layer.tail_start(length))
            assert not set(ids) & set(layer.table[0, :, start:].reshape(-1).tolist())
            forced += layer.heads * (-(-int(length) // 4) - start + first)
        # The sixth token was not watched.
        length = torch.tensor([len(text()) + 3])
        last = layer.heads * (-(-int(length) // 4) - int(layer.tail_start(length)) + first)
        assert sum(map(len, steps)) < stats[order]["blocks_read"] - forced - last < sum(map(len, steps)) * 1.6


def test_greedy_tokens_are_the_likeliest():
    config = CONFIG.replace(record_steps=1, sparse_queries=True)
    with patched(text_model(), config), torch.no_grad():
        cache = prefill(text_model(), text()[:-3], config, 400)
        fed = offload_real.decode(text_model(), cache, text()[-3:], more=4)
        again = prefill(text_model(), text()[:-3], config, 400).fork(sparse_queries=True)
        logits = text_model()(input_ids=torch.tensor([fed]), past_key_values=again).logits
    assert fed[3:] == logits[0, 2:-1].argmax(-1).tolist()


def test_rows_of_hits_are_all_combinations():
    simulated = [row for row in rates() if row["how"] == "simulated from a real trace"]
    places = {(row["decoded"], row["pool"], row["eviction"], row["pool_fraction"]) for row in simulated}
    assert len(simulated) == len(places) == 2 * 2 * 3 * 2
    for row in simulated:
        assert 0 < row["hit_rate"] <= 1 and 0 < row["overlap"] < 1 and 0.1 < row["working_set"] < 0.9
        assert row["tokens"] == TOKENS and row["context"] == 1300
    rate = {place: next(row["hit_rate"] for row in simulated if (row["decoded"], row["pool"], row["eviction"],
                                                                  row["pool_fraction"]) == place) for place in places}
    assert all(rate[(*place, 0.3)] < rate[(*place, 0.9)] for *place, size in places)


def test_the_librarys_own_pools_hit_as_often_as_is_simulated():
    measured = [row for row in rates() if row["how"] == "measured"]
    assert [(row["decoded"], row["pool"]) for row in measured] == [("text", "unified"), ("text", "per_layer")]
    for row in measured:
        reads = row["hits"] + row["misses"]
        assert row["hit_rate"] == pytest.approx(row["hits"] / reads, abs=1e-4)
        blocks = next(other["slots"] for other in rates() if other["pool_fraction"] == 0.9) / 0.9
        assert reads / TOKENS / blocks == pytest.approx(row["working_set"], rel=2e-3)          # the same blocks were read
        assert row["slots"] / blocks == pytest.approx(0.5, abs=0.02)
        assert row["hit_rate"] == pytest.approx(row["simulated_in_rounds"], abs=0.01)
        assert row["hit_rate"] == pytest.approx(row["simulated"], abs=0.06) and 0.2 < row["hit_rate"] < 0.98


def test_hits_of_dense_steps_are_no_measurement():
    config = CONFIG.replace(min_context=100_000)
    with patched(text_model(), config), pytest.raises(DenseDecodeError):
        list(offload_real.hits(text_model(), text(), config, (0.1,), 0.5, WARMUP, TOKENS, None))


def test_command_writes_what_the_report_takes(tmp_path, monkeypatch):
    directory, out = tmp_path / "tiny", tmp_path / "out.json"
    save_text_model(directory)
    monkeypatch.setattr(offload_real, "PSAConfig", lambda: CONFIG)
    for name, value in (("CHECKED", 0.7), ("WARMUP", 4), ("TOKENS", 6)):
        monkeypatch.setattr(offload_real, name, value)
    arguments = [str(directory), "--name", "A tiny model", "--task", "passkey", "--length", "900",
                 "--samples", "2", "--pool", "0.5", "--out", str(out)]
    assert offload_real.main(arguments) == 0
    text = report.real_table(json.loads(out.read_text()))
    assert text.startswith("A tiny model, float32, threshold 0.6; ")
    rows = [line for line in text.splitlines() if line.startswith("| passkey")]
    assert len(rows) == 2 and all(re.search(r"\| (\d+) of \1 \| 0.0e\+00 \|", row) for row in rows)
    assert str(tmp_path) not in out.read_text()
    assert len(re.findall(r"^\| (?:text|greedy) \| (?:unified|per_layer) \| (?:lru|fifo|decayed) \| 900 \|", text, re.M)) == 12
    assert len(re.findall(r"^\| (?:unified|per_layer) \| decayed \| (?:69|70)\.\d% \|", text, re.M)) == 2

    before = json.loads(out.read_text())["rows"]
    monkeypatch.setattr(offload_real, "measure", lambda *_: {"name": "passkey", "same": False})
    assert offload_real.main([*arguments, "--rows", "answers", "--append"]) == 1
    after = json.loads(out.read_text())["rows"]
    assert after[:-2] == before and [row["same"] for row in after[-2:]] == [False, False]
    for more in (["--append", "--name", "Another model"], ["--rows", "answer"]):
        with pytest.raises(SystemExit):
            offload_real.main([*arguments, *more])
    assert json.loads(out.read_text())["rows"] == after


@pytest.mark.parametrize("eviction", ["decayed", "lru"])
def test_evaluation_through_a_small_pool_is_that_of_everything_resident(eviction):
    copy, kl = build_samples(["copy", "kl"], Haystack(default_paragraphs(), text_tokenizer()), 900, 1)
    assert copy.context == kl.context

    def readings(**settings):
        config = CONFIG.replace(**settings)
        with patched(text_model(), config) as model:
            cache = prefill(model, copy.context, config)
            return [answer(model, cache, question, dense) for question in copy.questions + kl.questions for dense in (False, True)]

    for pooled, resident in zip(readings(gpu_memory="300KiB", eviction=eviction), readings(), strict=True):
        assert torch.equal(pooled.log_probs, resident.log_probs)
        assert pooled.stats["blocks_read"] == resident.stats["blocks_read"]
    with pytest.raises(ValueError, match="gpu_memory='100KiB' is too small"):
        readings(gpu_memory="100KiB")
