"""benchmarks/offload_real.py on a tiny model: the pool has the share it says, both answers are real, differences show."""
from __future__ import annotations

import functools
import json
import re

import pytest
import torch

from benchmarks import report
from hf_sparse import PSAConfig, patched
from hf_sparse.evaluation import DenseDecodeError, Haystack, Question, build_samples, default_paragraphs, evaluate, prefill
from hf_sparse.kernels.reference import fetch
from tests.text_model import text_model, text_tokenizer

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


def test_command_writes_what_the_report_takes(tmp_path, monkeypatch):
    directory, out = tmp_path / "tiny", tmp_path / "out.json"
    text_model().save_pretrained(directory)
    text_tokenizer().save_pretrained(directory)
    monkeypatch.setattr(offload_real, "PSAConfig", lambda: CONFIG)
    arguments = [str(directory), "--name", "A tiny model", "--task", "passkey", "--length", "900",
                 "--samples", "2", "--pool", "0.5", "--out", str(out)]
    assert offload_real.main(arguments) == 0
    text = report.real_table(json.loads(out.read_text()))
    assert text.startswith("A tiny model, float32, threshold 0.6; ")
    rows = [line for line in text.splitlines() if line.startswith("| passkey")]
    assert len(rows) == 2 and all(re.search(r"\| (\d+) of \1 \| 0.0e\+00 \|", row) for row in rows)
    assert str(tmp_path) not in out.read_text()


@pytest.mark.parametrize("eviction", ["decayed", "lru"])
def test_evaluation_through_a_small_pool_is_that_of_everything_resident(eviction):
    settings = dict(tasks=["copy", "kl"], length=900, samples=1, threshold=0.6, min_context=0, block_size=4)
    resident = evaluate(text_model(), text_tokenizer(), **settings)
    pooled = evaluate(text_model(), text_tokenizer(), **settings, gpu_memory="300KiB", eviction=eviction)
    assert pooled.answers == resident.answers
    with pytest.raises(ValueError, match="gpu_memory='100KiB' is too small"):
        evaluate(text_model(), text_tokenizer(), **settings, gpu_memory="100KiB")
