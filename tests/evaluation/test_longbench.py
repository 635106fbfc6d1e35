"""LongBench files become samples whose parts are the published prompt, cut and scored as published."""

from __future__ import annotations

import importlib.util
import json

import pytest

from hf_sparse.evaluation import longbench
from hf_sparse.evaluation.generated import FreeQuestion
from hf_sparse.evaluation.longbench import DATASETS, load
from tests.text_model import text_tokenizer

RECORD = {
    "input": "Who wrote the {reference} manual?",
    "context": "The manual was written by Ada. It has {many} pages. " * 8,
    "answers": ["Ada", "Ada Lovelace"],
    "length": 90,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "f00d",
}
LONG = 10_000


@pytest.fixture
def plain(tokenizer, monkeypatch):
    """The tokenizer without a chat template."""
    monkeypatch.setattr(tokenizer, "chat_template", None)
    return tokenizer


def write(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def ids(sample):
    (question,) = sample.questions
    return sample.context + question.prompt


@pytest.mark.parametrize("name", DATASETS)
def test_context_and_question_are_the_published_prompt(name, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(longbench, "check_metric", lambda metric: None)  # jieba need not be there
    record = {**RECORD, "dataset": name, "all_classes": ["a", "b"]}
    (sample,) = load(write(tmp_path / "x.jsonl", record), plain, LONG)
    dataset = DATASETS[name]
    question = dataset.tail.replace("{input}", record["input"])
    text = dataset.head + record["context"] + question
    assert ids(sample) == tuple(plain(text)["input_ids"])
    assert plain.decode(list(sample.questions[0].prompt)).endswith(question.lstrip())
    assert record["context"].rstrip() in plain.decode(list(sample.context))
    assert sample.task == f"longbench/{name}" and sample.seed == 0


def test_questions_carry_answers_metric_and_bounds(plain, tmp_path):
    trec = {**RECORD, "dataset": "trec", "all_classes": ["Date", "Food"], "answers": ["Food"], "_id": "beef"}
    free, classed = (s.questions[0] for s in load(write(tmp_path / "x.jsonl", RECORD, trec), plain, LONG))
    assert (free.name, free.references, free.metric, free.max_new_tokens) == ("f00d", ("Ada", "Ada Lovelace"), "qa_f1", 32)
    assert free.stop == () and free.score("It was Ada") == pytest.approx(0.5)
    assert classed.stop == ("\n",) and classed.classes == ("Date", "Food") and classed.max_new_tokens == 64
    assert classed.score("Food") == 1.0
    assert isinstance(free, FreeQuestion) and free.tokens == len(free.prompt) + 32


def test_long_prompts_are_cut_in_the_middle(plain, tmp_path):
    record = {**RECORD, "context": " ".join(f"Fact number {i} is not the one." for i in range(200))}
    path = write(tmp_path / "x.jsonl", record)
    (whole,), (short,) = load(path, plain, LONG), load(path, plain, 301)
    assert len(ids(whole)) > 1000
    assert ids(short) == ids(whole)[:150] + ids(whole)[-150:]
    assert short.questions[0].prompt == whole.questions[0].prompt
    assert ids(load(path, plain, len(ids(whole)))[0]) == ids(whole)


def test_a_question_longer_than_what_is_kept_is_cut_too(plain, tmp_path):
    record = {**RECORD, "dataset": "repobench-p", "input": "x = 1\n" * 200}
    (whole,) = load(write(tmp_path / "x.jsonl", record), plain, LONG)
    (short,) = load(tmp_path / "x.jsonl", plain, 200)
    assert short.context == ids(whole)[:100]
    assert short.questions[0].prompt == ids(whole)[-100:]


def test_the_chat_template_goes_around_questions_but_not_around_examples_or_code(tokenizer, tmp_path):
    records = [{**RECORD, "dataset": name, "all_classes": ["a"]} for name in ("hotpotqa", "trec", "lcc")]
    chat, examples, code = load(write(tmp_path / "x.jsonl", *records), tokenizer, LONG)
    tail = DATASETS["hotpotqa"].tail.replace("{input}", RECORD["input"])
    text = "[user] " + DATASETS["hotpotqa"].head + RECORD["context"] + tail + "\n[assistant] "
    assert ids(chat) == tuple(tokenizer(text)["input_ids"])
    assert tokenizer.decode(list(chat.questions[0].prompt)).endswith("Answer:\n[assistant] ")
    for sample in (examples, code):
        assert "[user]" not in tokenizer.decode(list(ids(sample)))


def test_a_chat_template_that_strips_messages_is_followed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "<s>{{ messages[0]['content'] | trim }}</s>")
    record = {**RECORD, "dataset": "passage_retrieval_en", "answers": ["Paragraph 3"]}
    (sample,) = load(write(tmp_path / "x.jsonl", record), tokenizer, LONG)
    question = DATASETS["passage_retrieval_en"].tail.replace("{input}", RECORD["input"])
    assert ids(sample)[0] == tokenizer.bos_token_id and ids(sample)[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(list(sample.questions[0].prompt), skip_special_tokens=True)
    assert text.strip() == question.strip() and text.endswith("The answer is:")
    monkeypatch.setattr(tokenizer, "chat_template", "<s>nothing of it")
    with pytest.raises(ValueError, match="line 1: the tokenizer's chat template changes a message"):
        load(tmp_path / "x.jsonl", tokenizer, LONG)


def test_the_token_that_begins_texts_comes_once(tmp_path):
    tokenizer = text_tokenizer(bos=True)
    records = [{**RECORD, "dataset": name} for name in ("hotpotqa", "lcc")]
    for sample in load(write(tmp_path / "x.jsonl", *records), tokenizer, LONG):
        assert ids(sample)[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in ids(sample)[1:]


def test_directories_and_the_names_of_longbench_e_are_read(plain, tmp_path):
    write(tmp_path / "b.jsonl", {**RECORD, "dataset": "qasper_e"})
    write(tmp_path / "a.jsonl", RECORD, "", RECORD)
    samples = load(tmp_path, plain, LONG)
    assert [(s.task, s.seed) for s in samples] == [
        ("longbench/hotpotqa", 0), ("longbench/hotpotqa", 2), ("longbench/qasper", 0)]


def without(key):
    return {k: v for k, v in RECORD.items() if k != key}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], r"x.jsonl, line 1 is not JSON"),
        ([RECORD, '{"input": "cut o'], r"line 2 is not JSON"),
        (["[1]"], "line 1 is a JSON list"),
        ([RECORD, without("context")], r"line 2 has no key 'context'; .* this one has input, answers"),
        ([without("answers")], "no key 'answers'"),
        ([without("_id")], "no key '_id'"),
        ([{**RECORD, "answers": []}], r"'answers' must be a list of texts, at least one, got \[\]"),
        ([{**RECORD, "answers": "Ada"}], "'answers' must be a list"),
        ([{**RECORD, "input": 3}], "'input' must be a text, got int"),
        ([{**RECORD, "dataset": "nq"}], "line 1: LongBench has no dataset 'nq'; it has narrativeqa"),
        ([{**RECORD, "dataset": "trec"}], "'all_classes' must list the classes of 'trec'"),
        (["", " "], "x.jsonl is empty"),
    ],
    ids=["not_json", "cut_off", "not_an_object", "no_context", "no_answers", "no_id", "no_answer", "answers_a_text",
         "input_a_number", "unknown_dataset", "no_classes", "empty"],
)
def test_malformed_files_are_refused(plain, tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "x.jsonl", *lines), plain, LONG)


def test_files_that_are_not_there_are_refused(plain, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no dataset at .*missing.jsonl"):
        load(tmp_path / "missing.jsonl", plain, LONG)
    with pytest.raises(ValueError, match="holds no .jsonl file"):
        load(tmp_path, plain, LONG)
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load(tmp_path, plain, LONG)
    with pytest.raises(ValueError, match="length must be at least 64"):
        load(write(tmp_path / "x.jsonl", RECORD), plain, 10)


def test_chinese_datasets_need_a_package(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="line 1: the metric 'rouge_l_zh' .*pip install jieba"):
        load(write(tmp_path / "x.jsonl", {**RECORD, "dataset": "vcsum"}), plain, LONG)
