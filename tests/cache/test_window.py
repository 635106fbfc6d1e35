"""Sliding-window layers: a ring of the last tokens against float64 attention over the window, whatever happens to the rows."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from transformers import DynamicCache, MistralConfig

from hf_sparse import PSACache, patched
from hf_sparse.cache import window as window_module
from hf_sparse.cache.window import SLACK, WindowLayer
from hf_sparse.kernels import prefill
from hf_sparse.kernels.reference.dense import exact_attention
from hf_sparse.patches import checks
from hf_sparse.patches.attention import psa_attention
from tests.cache.drive import attention_module
from tests.cache.shadow import Shadow
from tests.models import VOCAB_SIZE, get_draft_model, get_model
from tests.parity import assert_same_run
from tests.scenarios import make_prompt, run_generate

WINDOW = 6
CAPACITY = WINDOW + SLACK


def make(window: int = WINDOW, layers: int = 2) -> Shadow:
    config = MistralConfig(
        hidden_size=32,
        head_dim=8,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    cache = PSACache(config, min_context=0, block_size=4)
    assert all(isinstance(layer, WindowLayer) for layer in cache.layers)
    return Shadow(cache, layers, window=window)


@pytest.mark.parametrize("window", [1, 2, 6, 40])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 69, 70, 71, 200])
def test_prompt_and_decode(length, window):
    one = make(window)
    one.feed(length, batch=2)
    one.decode(3)
    assert one.cache.get_seq_length() == length + 3


@pytest.mark.parametrize(
    "sizes",
    [(1,) * 90, (30, 1, 30, 1, 30, 1), (69, 1, 1, 1), (200, 5, 100), (7, 64, 65, 66)],
    ids=lambda sizes: f"{len(sizes)}-pieces",
)
def test_the_ring_wraps(sizes):
    one = make(layers=1)
    for size in sizes:
        one.feed(size, batch=2)


def test_padding_takes_places_in_the_window():
    """transformers counts padded positions: a window reaches less far back where there was padding."""
    one = make()
    one.feed(20, batch=3, valid=torch.arange(20) >= torch.tensor([[0], [9], [17]]))
    one.decode(3)
    holes = torch.ones(3, 9, dtype=torch.bool)
    holes[0, :4] = holes[1, 2:5] = False
    one.feed(9, valid=holes)
    one.decode(8)


@pytest.fixture
def kernel_calls(monkeypatch) -> list[int]:
    """Prompts go as on a GPU to the kernel, whose reference stands in for it; the lengths that did."""
    calls: list[int] = []

    def spied(query, *args):
        output = prefill.window_attention(query, *args)
        if output is not None:
            calls.append(query.shape[2])
        return output

    monkeypatch.setattr(prefill, "_kernel_runs", lambda *parts: True)
    monkeypatch.setattr(window_module, "window_attention", spied)
    return calls


@pytest.mark.parametrize("window", [1, 6, 40])
def test_prompts_go_to_the_kernel(window, kernel_calls):
    one = make(window, layers=1)
    for size in (100, 5, 71, 16):
        one.feed(size, batch=2)
        one.decode(2)
    one.crop(9)
    one.reorder([1, 0])
    one.feed(33)
    assert kernel_calls == [100, 71, 16, 33]


@pytest.mark.parametrize("window", [1, 6, 40])
def test_a_first_prompt_with_padding_on_the_left_goes_there_too(window, kernel_calls):
    one = make(window, layers=1)
    one.feed(50, batch=4, valid=torch.arange(50) >= torch.tensor([[0], [9], [33], [49]]))
    one.decode(3)
    assert kernel_calls == [50]


def test_other_padding_does_not(kernel_calls):
    """What the ring has of it may be seen for a long time, and holes take places of the window."""
    one = make(layers=1)
    one.feed(20, batch=2)
    one.feed(30, valid=torch.arange(30) >= torch.tensor([[0], [19]]))
    fork = one.fork()
    one.feed(40)
    fork.feed(41)
    assert kernel_calls == [20]
    one.crop(one.length)
    one.feed(17, batch=2)
    assert kernel_calls == [20, 17]
    one.crop(one.length)
    holes = torch.ones(2, 50, dtype=torch.bool)
    holes[0, :3] = holes[1, 20:24] = False
    one.feed(50, batch=2, valid=holes)
    assert kernel_calls == [20, 17]
    one.cache.reset()
    one.clear()
    one.feed(51, batch=1)
    assert kernel_calls == [20, 17, 51]


def test_what_is_hidden_later_is_not_seen_by_the_kernel(kernel_calls):
    model = get_model("mistral")
    ids = torch.randint(3, VOCAB_SIZE, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 20:40] = 0                                      # said only in the second turn
    logits = []
    for cache in (DynamicCache(config=model.config), None):
        with torch.no_grad(), patched(model, min_context=0) if cache is None else contextlib.nullcontext():
            cache = cache if cache is not None else PSACache(model.config, min_context=0)
            model(ids[:, :40], attention_mask=torch.ones_like(ids[:, :40]), past_key_values=cache)
            logits.append(model(ids[:, 40:], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert kernel_calls and set(kernel_calls) == {40}


OPERATIONS = {
    "reorder": lambda one: one.reorder([2, 0, 0]),
    "repeat": lambda one: one.repeat(2),
    "select": lambda one: one.select([2, 0]),
    "crop": lambda one: one.crop(7),
    "crop-one": lambda one: one.crop(1),
    "crop-reorder": lambda one: (one.crop(3), one.reorder([1, 2, 0])),
    "crop-all": lambda one: one.crop(one.length),
}


@pytest.mark.parametrize("length", [4, 68, 100])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, length):
    one = make()
    one.feed(length, batch=3)
    one.decode(3)
    OPERATIONS[name](one)
    one.feed(5, batch=3)
    one.decode(3)
    if one.batch >= 3:
        OPERATIONS[name](one)
        one.feed(70, batch=3)
        one.decode(3)


def test_forks_share_nothing():
    first = make()
    first.feed(100, batch=2)
    second = first.fork()
    for _ in range(3):
        first.decode(2)
        second.feed(3)
    second.crop(5)
    first.decode(1)
    second.decode(2)


@pytest.mark.parametrize("count", [1, SLACK, SLACK + 1])
def test_as_many_tokens_can_be_taken_back_as_the_ring_keeps(count):
    one = make()
    one.feed(200, batch=2)
    one.crop(count)
    one.decode(8)


@pytest.mark.parametrize("first", [SLACK + 2, SLACK + 1, 40, 1])
def test_more_is_refused_and_nothing_changes(first):
    """The allowance is used up by one crop or by several; new tokens give it back."""
    one = make()
    one.feed(200, batch=2)
    if first > SLACK + 1:
        with pytest.raises(
            ValueError,
            match=f"window of 6 tokens and can take back {SLACK + 1} tokens, not {first}.*Nothing was changed",
        ):
            one.cache.crop(-first)
    else:
        one.crop(first)
        with pytest.raises(
            ValueError, match=f"can take back {SLACK + 1 - first} tokens, not {SLACK + 2 - first}"
        ):
            one.cache.crop(-(SLACK + 2 - first))
        one.crop(SLACK + 1 - first)
    one.decode(3)
    one.crop(3)
    one.feed(100)
    one.crop(SLACK + 1)
    one.decode(4)


def test_a_short_text_can_be_cropped_anywhere():
    for kept in range(0, 60, 7):
        one = make(layers=1)
        one.feed(CAPACITY, batch=2)
        one.crop(CAPACITY - kept)
        one.feed(5, batch=2)
        one.decode(2)


def test_everything_can_always_be_cropped():
    one = make()
    one.feed(300, batch=2)
    one.crop(300)
    assert one.cache.get_seq_length() == 0
    one.feed(100)
    one.decode(2)


def test_recording_the_past_allows_longer_crops():
    one = make()
    one.cache.activate_past_recording()
    one.feed(100, batch=2)
    one.feed(150)
    one.crop(150)
    one.decode(4)


@pytest.mark.parametrize("records", [True, False])
def test_a_refused_crop_advises_what_this_transformers_has(monkeypatch, records):
    monkeypatch.setattr(window_module, "RECORDS_PAST", records)
    one = make()
    one.feed(200, batch=2)
    with pytest.raises(ValueError, match=r"cache\.reset\(\) and feed the shorter text again.*Nothing was changed") as error:
        one.crop(150)
    assert ("activate_past_recording" in str(error.value)) is records


def test_a_crop_that_one_layer_refuses_changes_no_other():
    """In a model with full and sliding layers both keep their tokens."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=32,
        head_dim=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
    )
    cache = PSACache(config, min_context=0, block_size=4)
    keys = torch.randn(1, 2, 200, 8)
    for layer in range(2):
        cache.update(keys, keys, layer)
    with pytest.raises(ValueError, match="Nothing was changed"):
        cache.crop(-100)
    assert [layer.get_seq_length() for layer in cache.layers] == [200, 200]


def test_reset_forgets():
    one = make()
    one.feed(200, batch=2)
    one.reset()
    assert one.cache.get_seq_length() == 0 and one.cache.batch_size == -1
    one.feed(9, batch=3)
    one.decode(2)


@pytest.mark.parametrize("chunk", [4, 8])
def test_chunked_attention(chunk):
    """Llama 4: a token sees its own chunk of its row, counted from the row's first real token."""
    from hf_sparse.cache.state import CacheState
    from hf_sparse.config import PSAConfig

    torch.manual_seed(0)
    layer = WindowLayer(CacheState(PSAConfig(), layers=0), 0, chunk, chunk)
    pads = torch.tensor([0, 3])
    total = 30
    queries, keys, values = (torch.randn(2, 2, total, 8) for _ in range(3))
    valid = torch.arange(total) >= pads[:, None]
    outputs = []
    for low, high in ((0, 13), (13, 14), (14, 15), (15, 25), (25, 26), (26, 30)):
        key, _ = layer.update(keys[:, :, low:high], values[:, :, low:high])
        outputs.append(
            layer.attend(
                queries[:, :, low:high], key.pending, valid[:, low:high], None, 0.35, 0.0, None, None
            )
        )
    position = torch.arange(total) - pads[:, None]
    same = torch.div(position[:, :, None], chunk, rounding_mode="floor") == torch.div(
        position[:, None], chunk, rounding_mode="floor"
    )
    visible = same & (position[:, None] <= position[:, :, None]) & valid[:, None]
    visible = visible | torch.eye(total, dtype=torch.bool)
    expected = exact_attention(queries.double(), keys.double(), values.double(), visible[:, None], 0.35)
    real = valid[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(torch.cat(outputs, 2)[real].double(), expected[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("first", ["keys", "values", "attention"])
@pytest.mark.parametrize("count", [3, SLACK + 1, SLACK + 2, 200])
def test_keys_and_values_can_be_had_after_they_are_stored(count, first):
    """In any order, also where the new tokens have taken the places of those before them."""
    one = make(9)
    one.feed(70, batch=2)
    keys, values = (torch.randn(2, 2, count, 8, generator=one.generator) for _ in range(2))
    handles = dict(zip(("keys", "values"), one.cache.update(keys, values, 0)))
    if first == "attention":
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(2, 1, 1, 8 + count)
        query = torch.randn(2, 4, count, 8, generator=one.generator)
        again = [psa_attention(attention_module(2), query, *handles.values(), mask, scaling=1.0)[0] for _ in range(2)]
        assert torch.equal(*again)
    else:
        handles[first].dense()
    assert torch.equal(handles["keys"].dense(), torch.cat([one.keys[0], keys], 2)[:, :, -8 - count:])
    assert torch.equal(handles["values"].dense(), torch.cat([one.values[0], values], 2)[:, :, -8 - count:])


@pytest.mark.filterwarnings("ignore:This PSACache hands out dense keys")
@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss"])
@torch.no_grad()
def test_long_turns_on_a_model_that_is_not_patched(family):
    """Keys are asked for first, then values, when the ring has been written."""
    model, ids = get_model(family), torch.randint(3, 101, (2, 260), generator=torch.Generator().manual_seed(4))
    logits = []
    for cache in (DynamicCache(config=model.config), PSACache(model.config, min_context=0, block_size=4)):
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([30, 150, 80], 1)]
        logits.append(torch.cat(parts, 1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


# -- drafts -----------------------------------------------------------------------------------------------------------
DENSE = dict(min_context=0, block_size=4, threshold=1.0)


def drafted(model, **options) -> dict:
    options |= dict(max_new_tokens=80, eos_token_id=VOCAB_SIZE)
    return run_generate(model, None, input_ids=make_prompt(100, seed=5)[None], **options)


def looked_up(model, tokens: int) -> dict:
    """Drafts from the prompt, in which any token of the vocabulary is followed by many others; few of them are right."""
    return drafted(model, prompt_lookup_num_tokens=tokens, max_matching_ngram_size=1)


def assisted(model, tokens: int) -> dict:
    """Drafts of a patched model with sliding layers: its own cache takes them back."""
    draft = copy.deepcopy(get_draft_model("mistral"))
    draft.generation_config.update(num_assistant_tokens=tokens, assistant_confidence_threshold=0.0)
    with pytest.warns(UserWarning, match="no full-attention layer"), patched(draft, **DENSE):
        return drafted(model, assistant_model=draft)


@pytest.fixture
def cropped(monkeypatch) -> list[int]:
    """How many tokens a sliding layer was told to take back, each time."""
    counts, crop = [], WindowLayer.crop

    def noted(layer, tokens):
        counts.append(layer.to_remove(tokens))
        crop(layer, tokens)

    monkeypatch.setattr(WindowLayer, "crop", noted)
    return counts


@pytest.mark.parametrize("drafts", [
    pytest.param(("gemma3", looked_up, "prompt_lookup_num_tokens", "update transformers"), id="lookup-before-past-is-recorded"),
    pytest.param(("llama", assisted, "num_assistant_tokens", "unpatch the assistant"), id="patched-assistant"),
])
def test_drafts_may_be_as_long_as_what_the_ring_gives_back(drafts, cropped, monkeypatch):
    family, make, name, remedy = drafts
    limit, model, computed = checks.WINDOW_TOKENS, get_model(family), []
    monkeypatch.setattr(checks, "RECORDS_PAST", False)      # as transformers was up to 5.12 at least
    monkeypatch.setattr(WindowLayer, "activate_past_recording", lambda layer: None)
    plain = drafted(model)
    with patched(model, **DENSE):
        assert_same_run(make(model, limit), plain)
        assert max(cropped) == limit
        message = f"{name}={limit + 1}: .*up to {limit} tokens.*Lower it, or {remedy}"
        with model.register_forward_hook(lambda *_: computed.append(1)), pytest.raises(ValueError, match=message):
            make(model, limit + 1)
        assert not computed
        # It would fail half way, which is why it is refused.
        monkeypatch.setattr(checks, "_check_drafts", lambda *args: None)
        with pytest.raises(ValueError, match=f"can take back {limit} tokens, not {limit + 1}"):
            make(model, limit + 1)


@pytest.mark.skipif(not checks.RECORDS_PAST, reason="this transformers does not ask caches to record it")
def test_drafts_of_any_length_where_the_past_is_recorded(cropped):
    model = get_model("gemma3")
    plain = drafted(model)
    with patched(model, **DENSE):
        assert_same_run(looked_up(model, 79), plain)
    assert max(cropped) > checks.WINDOW_TOKENS
