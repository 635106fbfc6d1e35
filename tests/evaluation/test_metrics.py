"""Metrics are those of the published scripts; intervals are the exact ones of the tables."""

from __future__ import annotations

import importlib.util
import math

import pytest

from hf_sparse.evaluation import metrics
from hf_sparse.evaluation.metrics import METRICS, binomial_interval, score


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("It is the Eiffel Tower", "Eiffel Tower", 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("red red blue", "red", 2 * (1 / 3) / (1 / 3 + 1)),
        ("an apple", "the banana", 0.0),
        ("", "x", 0.0),
        ("the", "the", 0.0),
    ],
    ids=["articles_and_case", "more_words", "a_word_counts_once", "nothing_common", "empty", "only_an_article"],
)
def test_qa_f1(prediction, reference, expected):
    assert score("qa_f1", prediction, [reference]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "precision", "recall"),
    [
        ("the cat sat", "the cat sat", 3 / 3, 3 / 3),
        ("the cat sat on a mat", "a cat on the mat", 3 / 6, 3 / 5),
        ("a b. c d", "c d. a b", 4 / 4, 4 / 4),
        ("a b c d", "d c b a", 1 / 4, 1 / 4),
        ("a a a b", "a b", 2 / 2, 2 / 2),
        ("Cat", "cat", 0.0, 0.0),
    ],
    ids=["equal", "in_order", "by_sentences", "reversed", "sets_of_words", "case_counts"],
)
def test_rouge_l(prediction, reference, precision, recall):
    expected = 2 * precision * recall / (precision + recall + 1e-8)
    assert score("rouge_l", prediction, [reference]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("prediction", ["", "...", " . "], ids=["empty", "full_stops", "space"])
def test_rouge_l_of_nothing_is_zero(prediction):
    assert score("rouge_l", prediction, ["some text"]) == 0.0


def test_rouge_l_is_that_of_the_package():
    rouge = pytest.importorskip("rouge")
    for a, b in [("the cat. sat on. mat the", "a cat sat on the. mat"), ("x y z. . z y", "z z y x. y")]:
        assert metrics.rouge_l(a, b) == pytest.approx(rouge.Rouge().get_scores(a, b)[0]["rouge-l"]["f"], abs=1e-12)


CLASSES = ["Date", "Date of birth", "Food", "Animal"]


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("Food", "Food", 1.0),
        ("Food or Animal", "Food", 1 / 2),
        ("Animal", "Food", 0.0),
        ("Date of birth", "Date of birth", 1.0),
        ("Date of birth", "Date", 1 / 2),
        ("none", "Food", 0.0),
    ],
    ids=["right", "one_of_two", "wrong", "part_of_the_name_is_not_meant", "longer_name_is", "nothing_named"],
)
def test_classification(prediction, reference, expected):
    assert score("classification", prediction, [reference], CLASSES) == expected


def test_classification_never_looks_at_the_class_behind_a_removed_one():
    # As in the published script: "a" is removed, "b" stays although it is a part of "abc" too.
    assert score("classification", "abc", ["abc"], ["a", "b", "abc"]) == 1 / 2
    assert score("classification", "abc", ["abc"], ["a", "abc", "b"]) == 1.0


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "expected"),
    [
        ("retrieval", "Paragraph 12", "Paragraph 12", 1.0),
        ("retrieval", "12 or 3", "Paragraph 12", 1 / 2),
        ("retrieval", "Paragraph 1", "Paragraph 12", 0.0),
        ("retrieval", "none", "Paragraph 12", 0.0),
        ("retrieval_zh", "段落7", "段落7", 1.0),
        ("count", "There are 5 of 20", "5", 1 / 2),
        ("count", "five", "5", 0.0),
        ("string_match_part", "It is FALCON", "falcon", 1.0),
        ("string_match_part", "It is", "falcon", 0.0),
    ],
)
def test_numbers_and_strings(metric, prediction, reference, expected):
    assert score(metric, prediction, [reference]) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("return x", "return x", 1.0),
        ("\n# a comment\n// another\n```\nreturn x\nmore", "return x", 1.0),
        ("return y", "return x", 0.88),
        ("", "return x", 0.0),
        ("# only a comment", "return x", 0.0),
    ],
    ids=["equal", "first_line_of_code", "whole_percents", "empty", "no_code"],
)
def test_code_similarity(prediction, reference, expected):
    assert score("code_similarity", prediction, [reference]) == expected


def test_the_best_reference_counts_but_of_all_strings_the_share():
    references = ["alpha", "beta", "gamma"]
    assert score("qa_f1", "beta", references) == 1.0
    assert score("string_match_part", "only beta", references) == 1.0
    assert score("string_match_all", "beta and Gamma", references) == pytest.approx(2 / 3)


def test_scores_refuse_what_they_can_not_compute(monkeypatch):
    with pytest.raises(ValueError, match="no metric 'bleu'; choose from qa_f1"):
        score("bleu", "x", ["y"])
    with pytest.raises(ValueError, match="no gold answer"):
        score("qa_f1", "x", [])
    with pytest.raises(ValueError, match="by its number, got 'twelve'"):
        score("retrieval", "12", ["twelve"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install jieba"):
        score("rouge_l_zh", "x", ["y"])


def test_chinese_is_counted_by_words():
    pytest.importorskip("jieba")
    assert score("qa_f1_zh", "我们今天去北京。", ["我们今天去北京"]) == 1.0
    assert 0 < score("qa_f1_zh", "我们今天去北京。", ["他们明天去北京"]) < 1
    assert 0 < score("rouge_l_zh", "我们今天去北京", ["我们明天去北京"]) < 1


def test_every_metric_is_zero_to_one():
    for name in METRICS:
        if name in metrics.CHINESE and importlib.util.find_spec("jieba") is None:
            continue
        reference = {"retrieval": "Paragraph 3", "retrieval_zh": "段落3"}.get(name, "3 apples")
        for prediction in ("", "3", "some 3 words. 4", reference):
            assert 0.0 <= score(name, prediction, [reference], [reference, "other"]) <= 1.0


# -- intervals ------------------------------------------------------------------------------------------------------

# From scipy.stats.binomtest(k, n).proportion_ci(level, method="exact").
TABLE = [
    (0, 10, 0.95, 0.0, 0.3084971078187608),
    (5, 10, 0.95, 0.1870860284473984, 0.8129139715526016),
    (1, 1, 0.9, 0.05, 1.0),
    (198, 200, 0.95, 0.9643453316027608, 0.9987866509862635),
    (200, 200, 0.95, 0.9817246596448633, 1.0),
    (37, 400, 0.99, 0.05898241796224639, 0.13607950920769868),
]


@pytest.mark.parametrize(("successes", "trials", "level", "low", "high"), TABLE, ids=lambda value: str(value)[:6])
def test_intervals_are_those_of_the_tables(successes, trials, level, low, high):
    found = binomial_interval(successes, trials, level)
    assert found == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize(("successes", "trials"), [(3, 7), (11, 12), (150, 977)])
def test_intervals_leave_the_same_probability_on_both_sides(successes, trials):
    low, high = binomial_interval(successes, trials, 0.9)

    def at_least(k, p):
        return sum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(k, trials + 1))

    assert at_least(successes, low) == pytest.approx(0.05, abs=1e-9)
    assert 1 - at_least(successes + 1, high) == pytest.approx(0.05, abs=1e-9)


def test_intervals_of_nothing_know_nothing():
    assert binomial_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("successes", "trials", "level", "message"),
    [(-1, 5, 0.95, "between 0 and the trials"), (6, 5, 0.95, r"trials \(5\), got 6"), (1, 5, 1.0, "level")],
)
def test_intervals_that_make_no_sense_are_refused(successes, trials, level, message):
    with pytest.raises(ValueError, match=message):
        binomial_interval(successes, trials, level)
