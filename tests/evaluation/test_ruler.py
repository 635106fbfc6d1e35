"""RULER files become samples whose question is told from its context, with the published lengths and metrics."""

from __future__ import annotations

import json

import pytest

from hf_sparse.evaluation.ruler import load
from tests.text_model import text_tokenizer

HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n" * 4
NIAH = {
    "index": 0,
    "input": "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
    f"about the numbers afterwards.\n{HAY}What are all the special magic numbers for lucid mentioned in the provided text?",
    "outputs": ["7362183", "1234567"],
    "length": 300,
    "answer_prefix": " The special magic numbers for lucid mentioned in the provided text are",
}
ONE = {**NIAH, "input": f"A special magic number is hidden.\n{HAY}What is the special magic number for lucid mentioned?"}
VT = {"input": f"Memorize.\n\n{HAY}\nQuestion: Find all variables that are assigned the value 1 in the text above. "
      f"Answer: A B\n\nMemorize.\n\n{HAY}\nQuestion: Find all variables that are assigned the value 2 in the text above.", "outputs": ["A"]}
CWE = {"input": "Below is a numbered list of words.\n1. red 2. blue\nQuestion: What are the 10 most common words in the "
       "above list? Answer: The top 10 words that appear most often in the list are:", "outputs": ["red", "blue"]}
FWE = {"input": f"Read the following coded text. {HAY}\nQuestion: Do not provide any explanation. Please ignore the dots.",
       "outputs": ["abc"]}
QA = {"input": "Answer the question based on the given documents. Only give me the answer.\n\n"
      f"The following are given documents.\n\n{HAY}\n\nAnswer the question based on the given documents. Only give me "
      "the answer.\n\nQuestion: Who?",
      "outputs": ["Ada", "Ada Lovelace"], "answer_prefix": " Answer:"}


def write(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "record", "question", "tokens", "metric"),
    [
        ("niah_multivalue", NIAH, "What are all the special magic numbers for lucid", 128, "string_match_all"),
        ("niah_single_1", ONE, "What is the special magic number for lucid", 128, "string_match_all"),
        ("vt", VT, "Question: Find all variables that are assigned the value 2", 30, "string_match_all"),
        ("cwe", CWE, "Question: What are the 10 most", 120, "string_match_all"),
        ("fwe", FWE, "Question: Do not provide any", 50, "string_match_all"),
        ("qa_1", QA, "Answer the question based on the given documents", 32, "string_match_part"),
    ],
    ids=["niah", "niah_single", "vt", "cwe", "fwe", "qa"],
)
def test_context_and_question_are_the_input(tokenizer, tmp_path, name, record, question, tokens, metric):
    (sample,) = load(write(tmp_path / name / "validation.jsonl", record), tokenizer, 2000)
    (asked,) = sample.questions
    text = record["input"] + record.get("answer_prefix", "")
    assert sample.context + asked.prompt == tuple(tokenizer(text)["input_ids"])
    assert tokenizer.decode(list(asked.prompt)).lstrip().startswith(question)
    assert question not in tokenizer.decode(list(sample.context))[-len(question):]
    assert (asked.max_new_tokens, asked.metric, asked.references) == (tokens, metric, tuple(record["outputs"]))
    assert (sample.task, sample.seed, asked.name) == (f"ruler/{name}", 0, "line 1")


def test_answers_are_scored_as_published(tokenizer, tmp_path):
    write(tmp_path / "niah_multivalue.jsonl", NIAH)
    write(tmp_path / "qa_2.jsonl", QA)
    niah, qa = (sample.questions[0] for sample in load(tmp_path, tokenizer, 2000))
    assert niah.score("They are 7362183.") == 0.5 and niah.score("1234567, 7362183") == 1.0
    assert qa.score("ada") == 1.0 and qa.score("Grace") == 0.0


def test_a_question_behind_removed_line_breaks_is_found(tokenizer, tmp_path):
    record = {**NIAH, "input": " ".join(NIAH["input"].split())}
    (sample,) = load(write(tmp_path / "niah_single_2.jsonl", record), tokenizer, 2000)
    assert tokenizer.decode(list(sample.questions[0].prompt)).startswith(" What are all")


def test_the_token_that_begins_texts_comes_once(tmp_path):
    tokenizer = text_tokenizer(bos=True)
    templated = {**NIAH, "input": "<s>[user] " + NIAH["input"]}
    for sample in load(write(tmp_path / "niah_single_2.jsonl", NIAH, templated), tokenizer, 2000):
        assert sample.context[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in sample.context[1:] + sample.questions[0].prompt


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("niah_single_1", ["nonsense"], "line 1 is not JSON"),
        ("niah_single_1", [NIAH, {"input": "x"}], "line 2 has no key 'outputs'"),
        ("niah_single_1", [{"outputs": ["x"]}], "line 1 has no key 'input'"),
        ("niah_single_1", [], "is empty"),
        ("vt", [NIAH], "line 1: the input holds no question as RULER's task 'vt' asks it"),
        ("mine", [NIAH], "named after a RULER task"),
    ],
    ids=["not_json", "no_outputs", "no_input", "empty", "another_task", "unknown_task"],
)
def test_malformed_files_are_refused(tokenizer, tmp_path, name, lines, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "data" / f"{name}.jsonl", *lines), tokenizer, 2000)


def test_prompts_that_are_too_long_are_refused(tokenizer, tmp_path):
    path = write(tmp_path / "niah_single_1.jsonl", NIAH)
    with pytest.raises(ValueError, match=r"line 1: prompt and answer take (\d+) tokens") as error:
        load(path, tokenizer, 200)
    needed = int(str(error.value).split("take ")[1].split()[0])
    assert len(load(path, tokenizer, needed)) == 1
    with pytest.raises(ValueError, match="take"):
        load(path, tokenizer, needed - 1)
    with pytest.raises(ValueError, match="at least 1"):
        load(path, tokenizer, 0)


def test_files_that_are_not_there_are_refused(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="no dataset at"):
        load(tmp_path / "niah_single_1.jsonl", tokenizer, 2000)
