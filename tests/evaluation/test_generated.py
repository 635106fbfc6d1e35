"""Generated answers are greedy, come from the sparse step, and stop where they should."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_sparse import PSAConfig, patched
from hf_sparse.evaluation import DenseDecodeError, Haystack, default_paragraphs, generated, prefill
from hf_sparse.evaluation.generated import FreeQuestion, cut, generate_answer
from tests.text_model import text_model

SPARSE = dict(threshold=0.6, min_context=0, block_size=4)
TOKENS = 12


@pytest.fixture(scope="module")
def asked(tokenizer):
    haystack = Haystack(default_paragraphs(), tokenizer)
    question = FreeQuestion("q", tuple(haystack.encode("\n\nWhat is it? It is")), ("x",), "qa_f1", TOKENS)
    return haystack.plain(400, seed=0), question


def generate(tokenizer, context, question, dense=False, **overrides):
    model, config = text_model(), PSAConfig(**{**SPARSE, **overrides})
    with patched(model, config):
        cache = prefill(model, context, config)
        found = generate_answer(model, tokenizer, cache, question, dense)
        assert cache.get_seq_length() == len(context)
    return found


@torch.no_grad()
def greedy(context, question, dense):
    """The same by hand, a forward a token."""
    model, config = text_model(), PSAConfig(**SPARSE)
    with patched(model, config):
        fork = prefill(model, context, config).fork(sparse_queries=True, **({"threshold": 1.0} if dense else {}))
        found = []
        for ids in [*([token] for token in question.prompt), *([None] for _ in range(question.max_new_tokens - 1))]:
            ids = [found[-1]] if ids == [None] else ids
            logits = model(input_ids=torch.tensor([ids]), past_key_values=fork, use_cache=True).logits[0, -1]
            found.append(int(logits.argmax()))
    return tuple(found[len(question.prompt) - 1:])


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_answers_are_those_of_greedy_decoding_by_hand(tokenizer, asked, dense):
    found = generate(tokenizer, *asked, dense=dense)
    expected = greedy(*asked, dense=dense)
    assert found.tokens == expected[:len(found.tokens)] and len(found.tokens) == TOKENS
    assert found.text == tokenizer.decode(list(found.tokens), skip_special_tokens=True)


def test_dense_answers_are_those_of_the_unpatched_model(tokenizer, asked):
    context, question = asked
    ids = torch.tensor([context + question.prompt])
    expected = text_model().generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0, ids.shape[1]:]
    found = generate(tokenizer, *asked, dense=True)
    assert found.tokens == tuple(expected.tolist())
    assert found.stats["kv_fraction"] == 1.0


def test_sparse_answers_take_the_sparse_step_and_read_less(tokenizer, asked):
    stats = generate(tokenizer, *asked).stats
    assert stats["sparse_steps"] == len(asked[1].prompt) + TOKENS - 1
    assert 0 < stats["kv_fraction"] < 1


def test_questions_that_kernels_take_come_token_by_token(tokenizer, asked, monkeypatch):
    expected = generate(tokenizer, *asked)
    widths = []
    hook = text_model().register_forward_pre_hook(lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]),
                                                  with_kwargs=True)
    monkeypatch.setattr(generated, "by_kernels", lambda *args: True)
    try:
        found = generate(tokenizer, *asked)
    finally:
        hook.remove()
    assert set(widths[1:]) == {1} and len(widths) == 1 + len(asked[1].prompt) + TOKENS - 1      # the first is the prefill
    assert found.tokens == expected.tokens and found.stats["reading"] == expected.stats["reading"] == "rounds"
    assert found.stats["blocks_read"] == expected.stats["blocks_read"]


def test_settings_of_the_model_do_not_change_answers(tokenizer, asked):
    expected = generate(tokenizer, *asked)
    settings, model = text_model().generation_config, text_model()
    changed = type(settings).from_dict({**settings.to_dict(), "repetition_penalty": 9.0, "no_repeat_ngram_size": 1,
                                        "max_new_tokens": 2})
    model.generation_config = changed
    try:
        assert generate(tokenizer, *asked).tokens == expected.tokens
        assert model.generation_config is changed
    finally:
        model.generation_config = settings


def test_answers_end_at_a_stop_text_and_at_the_end_token(tokenizer, asked):
    context, question = asked
    free = generate(tokenizer, *asked)
    stop = tokenizer.decode(free.tokens[4:6])
    first = free.text.index(stop)
    stopped = generate(tokenizer, context, dataclasses.replace(question, stop=("never", stop)))
    assert stopped.text == free.text.lstrip("\n")[:first] and len(stopped.tokens) <= 6 < TOKENS
    model = text_model()
    settings = model.generation_config
    model.generation_config = type(settings).from_dict({**settings.to_dict(), "eos_token_id": [2, free.tokens[3]]})
    try:
        ended = generate(tokenizer, *asked)
    finally:
        model.generation_config = settings
    assert ended.tokens == free.tokens[:free.tokens.index(free.tokens[3]) + 1]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("\n\nFood\nmore", ("\n",), "Food"),
        ("Food", ("\n",), "Food"),
        ("\nFood\n", (), "\nFood\n"),
        ("a b c", ("c", "b"), "a "),
        ("", ("\n",), ""),
    ],
    ids=["breaks_before", "no_stop", "nothing_to_stop_at", "earliest", "empty"],
)
def test_cut(text, stop, expected):
    assert cut(text, stop) == expected


def test_a_context_below_min_context_is_no_measurement(tokenizer, asked):
    with pytest.raises(DenseDecodeError, match="min_context=100000"):
        generate(tokenizer, *asked, min_context=100_000)


def test_reading_every_block_is_no_measurement(tokenizer, asked):
    with pytest.raises(DenseDecodeError, match="all .* blocks were read"):
        generate(tokenizer, *asked, min_blocks=10_000)


def test_scores_are_those_of_the_metric():
    question = FreeQuestion("q", (1,), ("Food", "Date"), "classification", 5, classes=("Food", "Date", "Animal"))
    assert question.score("Date") == 1.0 and question.score("Date or Animal") == 0.5 and question.score("") == 0.0
    assert question.tokens == 6
