"""Synthetic tasks hold in their contexts what their questions ask for, and say so in the gold answers."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from hf_sparse.evaluation import Haystack, common_words, default_paragraphs, multi_value, needles, variable_tracking
from hf_sparse.evaluation.words import NOUNS, alike
from tests.text_model import text_tokenizer

LENGTH = 1700
BUILDERS = {"multi_value": multi_value.build, "variable_tracking": variable_tracking.build,
            "common_words": common_words.build, "needles": needles.build}


def words(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids))


@pytest.mark.parametrize("name", BUILDERS)
def test_samples_depend_on_the_seed_only(name, haystack, tokenizer):
    build = BUILDERS[name]
    sample = build(haystack, LENGTH, 5, 0.5)
    assert sample == build(Haystack(default_paragraphs(), tokenizer), LENGTH, 5, 0.1)
    assert sample.context != build(haystack, LENGTH, 6, 0.5).context
    assert (sample.task, sample.seed) == (name, 5)
    assert len({question.name for question in sample.questions}) == len(sample.questions) > 1


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("length", [1501, 4096])
def test_contexts_have_the_wanted_length(name, length, haystack):
    longest = max(len(haystack.encode(paragraph)) for paragraph in haystack.paragraphs)
    for seed in range(3):
        sample = BUILDERS[name](haystack, length, seed, 0.5)
        assert length - longest - 2 <= len(sample.context) <= length
        assert all(question.prompt and question.answer for question in sample.questions)


@pytest.mark.parametrize("name", BUILDERS)
def test_texts_begin_with_the_token_that_the_tokenizer_puts_there(name):
    tokenizer = text_tokenizer(bos=True)
    sample = BUILDERS[name](Haystack(default_paragraphs(), tokenizer), LENGTH, 1, 0.5)
    assert sample.context[0] == tokenizer.bos_token_id and len(sample.context) <= LENGTH
    assert tokenizer.bos_token_id not in sample.context[1:]
    assert all(tokenizer.bos_token_id not in q.prompt + q.answer for q in sample.questions)


@pytest.mark.parametrize("name", BUILDERS)
def test_lengths_without_room_are_refused(name, haystack):
    with pytest.raises(ValueError, match="longer"):
        BUILDERS[name](haystack, 60, 0, 0.5)


def test_needles_have_questions_of_one_length(haystack):
    for seed in range(5):
        sample = needles.build(haystack, LENGTH, seed, 0.5)
        assert len({len(question.prompt) for question in sample.questions}) == 1
        assert len(sample.questions) == 8


def test_multi_value_questions_ask_for_the_value_that_is_missing(haystack, tokenizer):
    for seed in range(3):
        sample = multi_value.build(haystack, LENGTH, seed, 0.5)
        found = re.findall(r"The special magic number for the (\w+) is (\d{6})\.", words(tokenizer, sample.context))
        ((key, *_),) = {(key,) for key, _ in found}
        values = [value for _, value in found]
        assert len(values) == len(set(values)) == len(sample.questions) == multi_value.VALUES == 4
        for place, question in enumerate(sample.questions):
            others = ", ".join(value for value in values if value != values[place])
            assert words(tokenizer, question.answer) == f" {values[place]}"
            assert words(tokenizer, question.prompt).endswith(f"special magic numbers for the {key} are {others}, and")
        assert [q.depth for q in sample.questions] == sorted(q.depth for q in sample.questions)


def test_variables_lead_to_their_values_link_by_link(haystack, tokenizer):
    sample = variable_tracking.build(haystack, LENGTH, 3, 0.5)
    text = words(tokenizer, sample.context)
    links = variable_tracking.HOPS + 1
    assert len(sample.questions) == variable_tracking.CHAINS * links
    names = []
    for chain in range(variable_tracking.CHAINS):
        target, places = None, []
        for link, question in enumerate(sample.questions[chain * links:(chain + 1) * links]):
            assert question.name == f"chain {chain + 1} link {link + 1}"
            prompt, answer = words(tokenizer, question.prompt).strip(), words(tokenizer, question.answer)
            (variable,) = re.findall(r"The value of variable ([A-Z]{5}) is", prompt)
            assert target is None or answer != target and variable == target.strip()
            target = answer
            assert re.fullmatch(r" \d{5}" if link == links - 1 else r" [A-Z]{5}", answer)
            assert text.count(prompt + answer + ".") == 1
            places.append(text.index(prompt + answer))
            names.append(variable)
        assert places == sorted(places, reverse=True)
    assert len(set(names)) == len(names) == len(sample.questions)
    assert len({name[0] for name in names}) == len(names)
    assert len({len(haystack.encode(" " + name)) for name in names}) == 1


@pytest.mark.parametrize("length", [1500, 3100])
def test_common_words_are_the_most_common_of_their_kind(length, haystack, tokenizer):
    sample = common_words.build(haystack, length, 2, 0.5)
    lines = words(tokenizer, sample.context).removeprefix(common_words.HEAD).split("\n")
    counts = {kind: Counter() for kind in common_words.KINDS}
    for line in lines:
        kind, word = line.split(": ")
        assert word in common_words.KINDS[kind].split()
        counts[kind][word] += 1
    assert [question.name for question in sample.questions] == list(common_words.KINDS)
    for question in sample.questions:
        (first, most), (_, second) = counts[question.name].most_common(2)
        assert words(tokenizer, question.answer) == f" {first}"
        assert most == pytest.approx(common_words.SHARE * counts[question.name].total(), abs=1) and most > 4 * second
        assert words(tokenizer, question.prompt).endswith(f"Answer:\n{question.name}:")
    # Every kind is spread over the whole of the list.
    for kind in common_words.KINDS:
        assert all(kind in " ".join(lines[part * len(lines) // 4:(part + 1) * len(lines) // 4]) for part in range(4))


def test_kinds_have_words_of_their_own():
    every = " ".join(common_words.KINDS.values()).split()
    assert len(set(every)) == len(every) == 8 * len(common_words.KINDS)


# -- words ----------------------------------------------------------------------------------------------------------


class LetterTokenizer:
    """A token for every letter."""

    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}


def test_alike_words_take_the_same_number_of_tokens():
    haystack = Haystack(["text"], LetterTokenizer())
    assert alike(haystack, ["a", "bb", "cc", "d", "ee"], 2) == ["bb", "cc", "ee"]
    assert alike(haystack, ["a", "bb", "cc"], 3) == ["a", "bb", "cc"]
    assert alike(haystack, ["a", "bb", "c", "dd"], 2) == ["a", "c"]


def test_nouns_are_different_words():
    assert len(set(NOUNS)) == len(NOUNS) > 150
    assert all(re.fullmatch("[a-z]{4,10}", noun) for noun in NOUNS)
