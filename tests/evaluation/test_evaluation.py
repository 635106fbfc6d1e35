"""Evaluation: samples are what they claim, answers come from the sparse step, and tables are aligned."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache

from hf_sparse import PSACache, PSAConfig, patched
from hf_sparse.evaluation import (
    TASKS,
    DenseDecodeError,
    Haystack,
    Question,
    answer,
    answers,
    build_samples,
    check_sparse,
    default_paragraphs,
    divergence,
    load_paragraphs,
    prefill,
)
from hf_sparse.evaluation.needles import COUNT
from hf_sparse.evaluation.table import format_table
from hf_sparse.evaluation.verbatim import COPIED, DEPTHS, LEAD
from tests.text_model import text_model, text_tokenizer

LENGTH = 1200
SPARSE = dict(threshold=0.6, min_context=0, block_size=4)


def words(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids))


# -- text -----------------------------------------------------------------------------------------------------------


def test_default_text_is_running_prose():
    paragraphs = default_paragraphs()
    assert sum(map(len, paragraphs)) > 100_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert paragraphs == default_paragraphs()
    for paragraph in paragraphs:
        assert "\n" not in paragraph and "::=" not in paragraph and ">>>" not in paragraph
        assert paragraph[-1] in ".!?"


def test_text_from_a_directory_is_read_in_sorted_order(tmp_path):
    (tmp_path / "b.md").write_text("third\nline\n\nfourth")
    (tmp_path / "a.txt").write_text("first\n\nsecond\n\nfirst")
    (tmp_path / "c.py").write_text("not text")
    assert load_paragraphs(tmp_path) == ["first", "second", "third line", "fourth"]
    assert load_paragraphs(tmp_path / "b.md") == ["third line", "fourth"]


@pytest.mark.parametrize("make", ["missing", "empty_directory", "empty_file"])
def test_text_that_is_not_there_is_refused(tmp_path, make):
    path = tmp_path / "text.txt"
    if make == "empty_directory":
        path = tmp_path
    elif make == "empty_file":
        path.write_text(" \n\n ")
    with pytest.raises((FileNotFoundError, ValueError), match="text"):
        load_paragraphs(path)


# -- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_the_seed_only(task, tokenizer):
    first, again = (
        build_samples([task], Haystack(default_paragraphs(), tokenizer), LENGTH, 3, seed=5) for _ in range(2)
    )
    assert first == again
    shifted = build_samples([task], Haystack(default_paragraphs(), tokenizer), LENGTH, 3, seed=6)
    assert first[1].context != shifted[1].context
    assert [s.seed for s in first] == [5, 6, 7]
    assert all(s.task == task for s in first)


@pytest.mark.parametrize("task", TASKS)
def test_contexts_have_the_wanted_length(task, haystack):
    for sample in build_samples([task], haystack, LENGTH, 4, seed=0):
        longest = max(len(haystack.encode(paragraph)) for paragraph in haystack.paragraphs)
        assert LENGTH - longest - 2 <= len(sample.context) <= LENGTH
        assert all(question.prompt and question.answer for question in sample.questions)


def test_passkey_stands_where_it_should(haystack, tokenizer):
    for index, sample in enumerate(build_samples(["passkey"], haystack, 4 * LENGTH, 5, seed=0)):
        (question,) = sample.questions
        text, key = words(tokenizer, sample.context), words(tokenizer, question.answer).strip()
        assert len(key) == 5 and key.isdigit()
        assert text.count(key) == 2 and text.rindex(key) - text.index(key) < 100
        assert question.depth == pytest.approx((index + 0.5) / 5)
        # Facts go between paragraphs, so a depth is met to within half of one, and the text around them.
        longest = max(len(haystack.encode(paragraph)) for paragraph in haystack.paragraphs)
        place = len(haystack.encode(text[: text.index(key)]))
        assert abs(place - question.depth * len(sample.context)) < longest / 2 + 50
        assert words(tokenizer, question.prompt).endswith("the treasure chest is")


def test_needles_are_told_apart_by_their_keys(haystack, tokenizer):
    (sample,) = build_samples(["needles"], haystack, LENGTH, 1, seed=3)
    text = words(tokenizer, sample.context)
    assert len(sample.questions) == COUNT == 8
    answers = {words(tokenizer, q.answer).strip() for q in sample.questions}
    assert len(answers) == COUNT and all(len(a) == 6 and a.isdigit() for a in answers)
    for question in sample.questions:
        fact = f"The special magic number for the {question.name} is{words(tokenizer, question.answer)}."
        assert text.count(fact) == 1
        assert words(tokenizer, question.prompt).endswith(f"The special magic number for the {question.name} is")
    places = [text.index(words(tokenizer, q.answer)) for q in sorted(sample.questions, key=lambda q: q.depth)]
    assert places == sorted(places)


def test_copied_passages_stand_in_the_context(haystack, tokenizer):
    (sample,) = build_samples(["copy"], haystack, LENGTH, 1, seed=1)
    gap = tuple(haystack.encode("\n\n"))
    for question, depth in zip(sample.questions, DEPTHS, strict=True):
        passage = question.prompt[len(gap) :] + question.answer
        at = int(depth * LENGTH)
        assert question.prompt[: len(gap)] == gap
        assert sample.context[at : at + LEAD + COPIED] == passage
        assert len(question.answer) == COPIED


def test_continuation_goes_on_where_the_context_ends(haystack):
    (sample,) = build_samples(["kl"], haystack, LENGTH, 1, seed=1)
    (question,) = sample.questions
    whole = haystack.plain(LENGTH + len(question.prompt) + len(question.answer), seed=1)
    assert sample.context + question.prompt + question.answer == whole


def test_copy_and_continuation_share_a_context(haystack):
    copy, kl = build_samples(["copy", "kl"], haystack, LENGTH, 1, seed=2)
    assert copy.context == kl.context


def test_texts_begin_with_the_token_that_the_tokenizer_puts_there():
    tokenizer = text_tokenizer(bos=True)
    haystack = Haystack(default_paragraphs(), tokenizer)
    for sample in build_samples(TASKS, haystack, LENGTH, 1, seed=0):
        assert sample.context[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in sample.context[1:]
        assert len(sample.context) <= LENGTH
        assert all(tokenizer.bos_token_id not in q.prompt + q.answer for q in sample.questions)


def test_question_and_answer_are_encoded_as_one_text(haystack):
    question = haystack.question("name", "The number is", " 42")
    assert question.prompt + question.answer == tuple(haystack.encode("The number is 42"))
    assert question.answer == tuple(haystack.encode(" 42"))


class MergingTokenizer:
    """Encodes "ab" as one token wherever it stands, so that a border between two texts may fall inside a token."""

    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        ids, i = [], 0
        while i < len(text):
            ids.append(1000 if text[i : i + 2] == "ab" else ord(text[i]))
            i += 2 if text[i : i + 2] == "ab" else 1
        return {"input_ids": ids}


def test_a_token_across_the_border_belongs_to_the_answer():
    question = Haystack(["text"], MergingTokenizer()).question("name", "xa", "by")
    assert question.prompt == (ord("x"),)
    assert question.answer == (1000, ord("y"))


@pytest.mark.parametrize(
    ("tasks", "length", "samples", "message"),
    [
        (["nothing"], 500, 1, "there is no task 'nothing'"),
        ([], 500, 1, "no task given"),
        (["passkey"], 0, 1, "length must be at least 1"),
        (["passkey"], 500, 0, "samples must be at least 1"),
        (["passkey"], 10_000_000, 1, "the text has"),
        (["kl"], 10_000_000, 1, "the text has"),
        (["needles"], 100, 1, "no room"),
        (["copy"], 100, 1, "at least"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_samples_that_make_no_sense_are_refused(haystack, tasks, length, samples, message):
    with pytest.raises(ValueError, match=message):
        build_samples(tasks, haystack, length, samples, seed=0)


# -- decoding -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tokenizer):
    """(context, question) of a few hundred tokens, so that 20 blocks of 4 are closed many times over."""
    haystack = Haystack(default_paragraphs(), tokenizer)
    context = haystack.plain(400, seed=0)
    return context, Question("q", tuple(haystack.encode("\n\nWhat is it? It is")), tuple(haystack.encode(" 123456")))


def ask(context, question, dense=False, one_forward=True, **overrides):
    model, config = text_model(), PSAConfig(**{**SPARSE, **overrides})
    with patched(model, config):
        cache = prefill(model, context, config)
        return answer(model, cache, question, dense=dense, one_forward=one_forward)


@torch.no_grad()
def reference(context, question):
    """Log-probabilities of the answer by transformers alone."""
    model = text_model()
    ids = torch.tensor([context + question.prompt + question.answer[:-1]])
    logits = model(input_ids=ids, past_key_values=DynamicCache(config=model.config)).logits
    return torch.log_softmax(logits[0, -len(question.answer) :].double(), -1)


def test_dense_answers_are_those_of_the_unpatched_model(short):
    assert torch.allclose(ask(*short, dense=True).log_probs, reference(*short), atol=1e-4)


def test_sparse_answers_are_others_and_read_less(short):
    reading = ask(*short)
    context, question = short
    assert reading.stats["sparse_steps"] == len(question.prompt) + len(question.answer) - 1
    assert 0 < reading.stats["kv_fraction"] < 1
    assert (reading.log_probs - reference(*short)).abs().max() > 1e-2


def test_threshold_one_is_dense(short):
    reading = ask(*short, threshold=1.0, verify=True)
    assert reading.stats["sparse_steps"] > 0 and reading.stats["kv_fraction"] == 1.0
    assert reading.stats["coverage_true"] == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(reading.log_probs, reference(*short), atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 64, 150], ids=["whole", "chunks_of_64", "chunks_of_150"])
def test_one_forward_equals_decoding_token_by_token(short, chunk):
    model, config = text_model(), PSAConfig(**SPARSE)
    context, question = short
    with patched(model, config):
        cache = prefill(model, context, config, chunk=chunk)
        together = answer(model, cache, question)
        one_by_one = answer(model, cache, question, one_forward=False)
        again = answer(model, cache, question)
    assert torch.allclose(together.log_probs, one_by_one.log_probs, atol=1e-5)
    assert together.stats["blocks_read"] == one_by_one.stats["blocks_read"]
    assert torch.equal(together.log_probs, again.log_probs)
    assert cache.get_seq_length() == len(context)


@pytest.mark.parametrize(
    "overrides",
    [
        dict(policy="top_k", top_k=0.3),
        dict(policy="top_p", top_p=0.6),
        dict(digest="cuboid_mean", stop_rule="window"),
        dict(digest="min_max", stop_rule="nleft", max_blocks=30),
    ],
    ids=["top_k", "top_p", "window", "nleft_capped"],
)
def test_other_policies_are_measured_sparsely_and_against_dense(short, overrides):
    assert ask(*short, **overrides).stats["kv_fraction"] < 1
    assert torch.allclose(ask(*short, dense=True, **overrides).log_probs, reference(*short), atol=1e-4)


def test_verify_reports_the_true_coverage(short):
    stats = ask(*short, verify=True).stats
    assert 0 < stats["coverage_true"] <= 1
    assert ask(*short).stats["coverage_true"] is None


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_questions_asked_together_are_answered_as_alone(short, haystack, dense):
    context, question = short
    others = [Question(f"q{i}", question.prompt, tuple(haystack.encode(f" {123457 + i}"))) for i in range(3)]
    asked = [question, *others, Question("long", question.prompt + question.prompt, question.answer)]
    model, config = text_model(), PSAConfig(**SPARSE)
    with patched(model, config):
        cache = prefill(model, context, config)
        alone = [answer(model, cache, one, dense=dense) for one in asked]
        gc.collect()
        pool = cache.sparse_layers[0].pool
        before = pool.blocks_in_use()
        together = answers(model, cache, asked, dense=dense)
        assert pool.blocks_in_use() == before and cache.batch_size == 1
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-5)
    lengths = [len(one.prompt) + len(one.answer) for one in asked]
    for reading, length in zip(together, lengths):
        same = [theirs.stats["blocks_read"] for theirs, other in zip(alone, lengths) if other == length]
        assert reading.stats["blocks_read"] == sum(same)
    with patched(model, config):
        cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match="2 rows"):
            answers(model, cache, asked)


def test_a_context_below_min_context_is_no_measurement(short):
    with pytest.raises(DenseDecodeError, match="min_context=100000"):
        ask(*short, min_context=100_000)


def test_a_step_that_becomes_sparse_half_way_is_no_measurement(short):
    context, question = short
    with pytest.raises(DenseDecodeError, match="only .* of .* tokens"):
        ask(*short, min_context=len(context) + len(question.prompt))


def test_reading_every_block_is_no_measurement(short):
    with pytest.raises(DenseDecodeError, match="all .* blocks were read"):
        ask(*short, min_blocks=10_000)


def test_an_unpatched_model_is_no_measurement(short):
    context, question = short
    model = text_model()
    with pytest.warns(UserWarning, match="dense"):
        cache = prefill(model, context, PSAConfig(**SPARSE))
        with pytest.raises(DenseDecodeError, match="not patched"):
            answer(model, cache, question)


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (dict(threshold=0.9), False),
        (dict(threshold=1.0), True),
        (dict(threshold=1.0, max_blocks=100), False),
        (dict(policy="top_k", top_k=50), False),
        (dict(policy="top_k", top_k=0.5), False),
        (dict(policy="top_k", top_k=1.0), True),
        (dict(policy="top_p", top_p=0.5), False),
        (dict(policy="top_p", top_p=1.0), True),
    ],
    ids=str,
)
def test_reading_everything_is_allowed_where_the_policy_says_so(overrides, allowed):
    stats = {"sparse_steps": 3, "blocks_read": 10.0, "blocks_held": 10.0}
    config = PSAConfig(**overrides)
    if allowed:
        check_sparse(stats, config, 3)
    else:
        with pytest.raises(DenseDecodeError):
            check_sparse(stats, config, 3)
        check_sparse({**stats, "blocks_read": 9.0}, config, 3)


def test_logits_that_are_not_numbers_are_refused(short):
    model, config = text_model(), PSAConfig(**SPARSE)
    context, question = short
    bad = model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
    try:
        with patched(model, config):
            cache = prefill(model, context, config)
            with pytest.raises(FloatingPointError, match="dense"):
                answer(model, cache, question, dense=True)
    finally:
        bad.remove()


def test_divergence_is_that_of_torch():
    dense, sparse = torch.randn(2, 5, 11, dtype=torch.float64).log_softmax(-1)
    expected = torch.nn.functional.kl_div(sparse, dense, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(divergence(dense, sparse), expected)
    assert torch.equal(divergence(dense, dense), torch.zeros(5, dtype=torch.float64))


def test_tables_are_aligned():
    assert format_table(("a", "bb"), [("xyz", "1"), ("x", "100")]).splitlines() == [
        "| a   |  bb |",
        "|-----|----:|",
        "| xyz |   1 |",
        "| x   | 100 |",
    ]


def test_the_cache_is_a_psa_cache(short):
    model, config = text_model(), PSAConfig(**SPARSE)
    with patched(model, config):
        cache = prefill(model, short[0], config)
    assert isinstance(cache, PSACache) and cache.stats()["sparse_steps"] == 0
