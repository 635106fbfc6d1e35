"""Streaming heads under generate(): every way to use a cache gives what a dense cache with a mask for these heads gives.

Prompts see the window of decoding here (`streaming_prefill_window`), so that the mask needs to know no history.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from hf_sparse import PSACache, patch_model, patched
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.split import SplitLayer
from hf_sparse.cache.streaming_ring import SLACK_TOKENS, StreamingRing
from hf_sparse.cache.window import WindowLayer
from hf_sparse.compat import AttentionInterface, AttentionMaskInterface, sdpa_mask
from hf_sparse.patches import checks
from tests.cache.test_interrupts import Fault
from tests.families.build import tiny_model
from tests.models import VOCAB_SIZE, get_draft_model, get_model
from tests.parity import assert_same_run, reference, upstream_failure
from tests.scenarios import PLAIN, SCENARIOS, make_prompt, pad_left, padded_prompts, run_generate

SINK, WINDOW = 5, 21
STREAMING = dict(streaming_sink=SINK, streaming_window=WINDOW, streaming_prefill_window=WINDOW)
SETTINGS = dict(digest="key_bits", threshold=1.0, block_size=4, min_context=0, round_blocks=4, **STREAMING)
ALL = tuple((layer, head) for layer in range(2) for head in range(2))
MASKED = "test_streaming_mask"
_STREAMS: dict[int, list[int]] = {}                         # heads by layer, of the masked model


def masked_attention(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Dense attention in float64, with a mask for the streaming heads: what a cache with such heads must give."""
    count, total, heads = query.shape[2], key.shape[2], key.shape[1]
    visible = torch.ones(count, total, dtype=torch.bool).tril(total - count).expand(query.shape[0], 1, -1, -1)
    if mask is not None:
        visible = mask[..., -total:] if mask.dtype == torch.bool else mask[..., -total:] > torch.finfo(mask.dtype).min / 2
    visible = visible.expand(query.shape[0], heads, -1, -1).clone()
    if module.layer_idx in _STREAMS:
        place = visible[:, :, -1].long().cumsum(-1) - 1     # of a token in its row; the last one sees all that are real
        own = place[..., -count:, None]
        near = (place[..., None, :] < SINK) | (place[..., None, :] > own - WINDOW)
        streaming = _STREAMS[module.layer_idx]
        visible[:, streaming] &= near[:, streaming]
    group = query.shape[1] // heads
    logits = query.double() @ key.repeat_interleave(group, 1).double().transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible.repeat_interleave(group, 1), -1e300)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., :total]
    return (weights @ value.repeat_interleave(group, 1).double()).to(query.dtype).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def masked(model, pairs):
    AttentionInterface.register(MASKED, masked_attention)
    AttentionMaskInterface.register(MASKED, sdpa_mask)
    for layer, head in pairs:
        _STREAMS.setdefault(layer, []).append(head)
    model.set_attn_implementation(MASKED)
    try:
        yield model
    finally:
        model.set_attn_implementation("eager")
        _STREAMS.clear()


def both(family: str, scenario: str, pairs, **settings):
    """What a scenario gives with streaming heads, and with a dense cache and masks."""
    model = get_model(family)
    run = (PLAIN if upstream_failure(family, scenario) else SCENARIOS)[scenario]
    with masked(model, pairs):
        want = run(model, lambda: DynamicCache(config=model.config))
    with patched(model, **SETTINGS, streaming_heads=pairs, **settings):
        got = SCENARIOS[scenario](model, lambda: PSACache(model.config, **SETTINGS, streaming_heads=pairs, **settings))
    return got, want


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_way_to_generate(scenario):
    got, want = both("llama", scenario, ((0, 1), (1, 0)))
    assert_same_run(got, want)
    assert [type(layer) for layer in got["cache"].layers] == [SplitLayer, SplitLayer]
    if scenario == "greedy":
        dense = reference("llama", scenario)
        assert float((dense["scores"] - want["scores"]).abs().max()) > 0.1  # or nothing has been tested


SAMPLE = [("llama", ALL), ("llama", ((1, 0), (1, 1))), ("qwen2", ((0, 0), (0, 1), (1, 1))), ("qwen3", ((1, 0),)),
          ("gpt_oss", ((1, 1),)), ("gpt_oss", ((1, 0), (1, 1))), ("gemma2", ((1, 0),))]


@pytest.mark.parametrize("scenario", ["padded", "beams", "chunked_prefill", "continued_after_end", "prompt_lookup"])
@pytest.mark.parametrize(("family", "pairs"), SAMPLE, ids=lambda value: value if isinstance(value, str) else str(len(value)))
def test_families(family, pairs, scenario):
    got, want = both(family, scenario, pairs)
    assert_same_run(got, want)
    if family in ("gpt_oss", "gemma2"):
        assert [type(layer) for layer in got["cache"].layers] == [WindowLayer, SplitLayer]


def test_a_hybrid_model():
    """Layers with streaming heads beside states of linear attention."""
    model = tiny_model("lfm2")
    full = [index for index, layer in enumerate(PSACache(model.config).layers) if isinstance(layer, PSALayer)]
    pairs = ((full[0], 0), (full[1], 0))
    ids, mask = make_prompt(60, seed=3)[None], torch.ones(1, 60, dtype=torch.long)
    with masked(model, pairs):
        want = run_generate(model, DynamicCache(config=model.config), input_ids=ids, attention_mask=mask)
    with patched(model, **SETTINGS, streaming_heads=pairs):
        got = run_generate(model, None, input_ids=ids, attention_mask=mask)
        assert isinstance(model.last_psa_cache.layers[full[0]], SplitLayer)
        with pytest.raises(ValueError, match="no full attention"):
            patch_model(model, **SETTINGS, streaming_heads=((0, 0),))
    assert_same_run(got, want)


@functools.cache
def prompts():
    return pad_left(padded_prompts(3))


def generate(cache, model=None, **more):
    ids, mask = prompts()
    return run_generate(model or get_model("llama"), cache, input_ids=ids, attention_mask=mask, **more)


def test_windows_of_the_default_size_are_dense():
    """The text is shorter than sink and window, and than min_context."""
    want = generate(DynamicCache(config=get_model("llama").config))
    for more in (dict(min_context=0), {}):
        settings = dict(threshold=1.0, digest="key_bits", block_size=16, streaming_heads=ALL[1:], **more)
        with patched(get_model("llama"), **settings):
            got = generate(None)
        assert_same_run(got, want)


def test_only_streaming_heads():
    """No pool, no digest, nothing to select: and the statistics say so."""
    model = get_model("llama")
    with patched(model, **SETTINGS, streaming_heads=ALL):
        generate(None)
        cache, model.last_psa_cache = model.last_psa_cache, None
    stats = cache.stats()
    assert not cache.state.pools and not cache.sparse_layers and stats["blocks_read"] == 0
    # Keys and values of three rows and four heads of 16 channels.
    assert stats["bytes"] == {"device": 3 * 4 * (SINK + WINDOW + SLACK_TOKENS) * 2 * 16 * 4, "host": 0, "digest": 0}


def test_a_host_tier_changes_nothing():
    outputs = []
    for more in ({}, dict(gpu_memory="190KiB", host_memory="1MiB")):
        settings = {**SETTINGS, "threshold": 0.6, "round_blocks": 1, **more}
        cache = PSACache(get_model("llama").config, **settings, streaming_heads=((0, 0), (1, 1)))
        with patched(get_model("llama"), **settings, streaming_heads=((0, 0), (1, 1))):
            outputs.append(generate(cache))
    assert cache.stats()["misses"] > 0
    assert torch.equal(outputs[0]["tokens"], outputs[1]["tokens"]) and torch.equal(outputs[0]["scores"], outputs[1]["scores"])


def test_nothing_is_left_of_many_calls():
    settings = dict(SETTINGS, streaming_heads=((0, 1),))
    cache, sizes = PSACache(get_model("llama").config, **settings), []
    with patched(get_model("llama"), **settings):
        for number in range(6):
            generate(cache, max_new_tokens=3, num_beams=1 + number % 2)
            pool = cache.sparse_layers[0].pool
            sizes.append((pool.ids, pool.kv.numel()))
            cache.reset()
            assert pool.blocks_in_use() == 0 and not pool.users
            assert all(layer.ring is None for layer in cache.layers if isinstance(layer, SplitLayer))
    assert sizes[-1] == sizes[1]


# Where, and in which calls: of the first layer, of the second, and of decoding.
POINTS = {
    "attend": (SplitLayer, "attend", (2, 4)), "blocks": (PSALayer, "attend", (2, 3)), "store": (StreamingRing, "store", (1, 2)),
    "step": (StreamingRing, "step", (1, 2)), "narrow": (StreamingRing, "_resize", (1, 2)), "take": (PSALayer, "take", (1, 2)),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_in_the_middle(point, after, monkeypatch):
    """The cache goes on rightly or says that it can't, and after reset() it is as new."""
    settings = dict(SETTINGS, streaming_heads=((0, 1), (1, 0)), streaming_prefill_window=WINDOW + 9)
    model, held = get_model("llama"), prompts()[0].shape[1]
    with patched(model, **settings):
        want = generate(None, max_new_tokens=4)
        model.last_psa_cache = None
        for at in POINTS[point][2]:
            cache = PSACache(model.config, **settings)
            fault = Fault(KeyboardInterrupt(), at, after)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                fault.into(patch, *POINTS[point][:2])
                generate(cache, max_new_tokens=4)
            assert fault.raised
            try:
                cache.check_whole()
            except RuntimeError as error:
                assert "cache.reset()" in str(error)
                with pytest.raises(RuntimeError, match="reset"):
                    generate(cache)
            else:
                assert cache.tokens in (0, *range(held, held + 4))
            cache.reset()
            assert_same_run(generate(cache, max_new_tokens=4), want, 1e-6)


@pytest.mark.parametrize("change", ["crop", "reorder", "fork"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_exception_between_the_layers_of_a_change(change, at, monkeypatch):
    settings = dict(SETTINGS, streaming_heads=((0, 1), (1, 0)))
    changes = {"crop": lambda cache: cache.crop(-3), "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0, 2])),
               "fork": lambda cache: cache.fork()}
    points = {"crop": (SplitLayer, "check_crop"), "reorder": (StreamingRing, "take_rows"), "fork": (StreamingRing, "clone")}
    with patched(get_model("llama"), **settings):
        cache = PSACache(get_model("llama").config, **settings)
        generate(cache, max_new_tokens=3)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            Fault(KeyboardInterrupt(), at, True).into(patch, *points[change])
            changes[change](cache)
        with pytest.raises(RuntimeError, match="reset"):
            generate(cache)
        cache.reset()
        assert_same_run(generate(cache, max_new_tokens=3), generate(None, max_new_tokens=3), 1e-6)


def test_padding_after_an_end_that_is_too_long_is_refused_before_any_change():
    settings = dict(SETTINGS, streaming_heads=((1, 0),))
    model, mask = get_model("llama"), prompts()[1]
    with patched(model, **settings):
        cache = PSACache(model.config, **settings)
        first = generate(cache, max_new_tokens=SLACK_TOKENS + 10)["tokens"]
        longer = torch.cat([first, make_prompt(6, seed=1).view(3, 2)], 1)
        seen = torch.cat([mask, torch.ones(3, SLACK_TOKENS + 12, dtype=torch.long)], 1)
        hidden = seen.clone()
        hidden[1, -SLACK_TOKENS - 9:-2] = 0
        with pytest.raises(ValueError, match="Nothing in the cache was changed"):
            run_generate(model, cache, input_ids=longer, attention_mask=hidden, max_new_tokens=2)
        other = PSACache(model.config, **settings)
        generate(other, max_new_tokens=SLACK_TOKENS + 10)
        got, want = (run_generate(model, one, input_ids=longer, attention_mask=seen, max_new_tokens=2)
                     for one in (cache, other))
        assert_same_run(got, want, 1e-6)


def test_a_model_that_is_not_patched():
    model = get_model("llama")
    cache = PSACache(model.config, **SETTINGS, streaming_heads=((0, 1),))
    with pytest.raises(NotImplementedError, match="Patch the model with hf_sparse.patch_model"):
        generate(cache)
    cache.reset()
    with patched(model, **SETTINGS, streaming_heads=((0, 1),)):
        generate(cache, max_new_tokens=2)


def test_a_mask_of_four_dimensions():
    model = get_model("llama")
    with patched(model, **SETTINGS, streaming_heads=((0, 1),)):
        cache = PSACache(model.config, **SETTINGS, streaming_heads=((0, 1),))
        mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
        with pytest.raises(NotImplementedError, match="not plainly causal"):
            model(make_prompt(30, seed=0)[None], attention_mask=mask, past_key_values=cache)


def test_a_model_that_needs_all_keys():
    model = tiny_model("diffllama")
    with pytest.raises(NotImplementedError, match="can't have streaming_heads"):
        patch_model(model, **SETTINGS, streaming_heads=((0, 0),))
    assert model.config._attn_implementation == "eager"


def test_layers_that_share_keys():
    model = tiny_model("gemma3n_text")
    full = [index for index, layer in enumerate(PSACache(model.config).layers) if isinstance(layer, PSALayer)]
    with patched(model, **SETTINGS, streaming_heads=((full[-1], 0),)):
        with pytest.raises(NotImplementedError, match="another layer"):
            model.generate(make_prompt(30, seed=0)[None], max_new_tokens=2)


def test_a_profile_of_another_model():
    model = get_model("qwen3")
    for pair, match in (((0, 1), "KV head 1 of layer 0, which has 1 KV heads"), ((2, 0), "layer 2, but this model has 2 layers")):
        with pytest.raises(ValueError, match=match):
            patch_model(model, **SETTINGS, streaming_heads=(pair,))
    assert model.config._attn_implementation == "eager"


def lookup(model, cache, tokens: int):
    """Drafts from the prompt, in which any token of the vocabulary is followed by many others; few of them are right."""
    options = dict(prompt_lookup_num_tokens=tokens, max_matching_ngram_size=1, eos_token_id=VOCAB_SIZE)
    return run_generate(model, cache, input_ids=make_prompt(400, seed=5)[None], max_new_tokens=16, **options)


def test_drafts_may_be_as_long_as_what_can_be_taken_back(monkeypatch):
    model, cropped, crop = get_model("llama"), [], SplitLayer.crop
    settings = dict(SETTINGS, streaming_heads=((0, 1), (1, 0)))
    with patched(model, **settings):
        plain = run_generate(model, None, input_ids=make_prompt(400, seed=5)[None], max_new_tokens=16, eos_token_id=VOCAB_SIZE)
        monkeypatch.setattr(SplitLayer, "crop", lambda layer, count: (cropped.append(int(count)), crop(layer, count))[1])
        assert_same_run(lookup(model, None, SLACK_TOKENS), plain)
        assert -min(cropped) == SLACK_TOKENS
        # One more would fail half way, which is why it is refused.
        monkeypatch.setattr(checks, "_check_drafts", lambda *args: None)
        with pytest.raises(ValueError, match=f"not {SLACK_TOKENS + 1}"):
            lookup(model, None, SLACK_TOKENS + 1)


def assistant(**settings) -> dict:
    draft = copy.deepcopy(get_draft_model("llama"))
    draft.generation_config.update(**settings)
    return dict(assistant_model=draft)


LONGER = SLACK_TOKENS + 1
LONG_DRAFTS = {
    "lookup": (lambda: dict(prompt_lookup_num_tokens=LONGER), f"prompt_lookup_num_tokens={LONGER}: .*up to {SLACK_TOKENS} .*Lower"),
    "lookup-by-config": (lambda: dict(generation_config=GenerationConfig(prompt_lookup_num_tokens=LONGER)), f"={LONGER}: .*Lower"),
    "assistant": (lambda: assistant(num_assistant_tokens=LONGER), f"num_assistant_tokens={LONGER}: .*up to {SLACK_TOKENS} .*Lower"),
    "growing": (lambda: assistant(num_assistant_tokens_schedule="heuristic"), "='heuristic' lets drafts grow.*'constant'"),
}


@pytest.mark.parametrize(("options", "message"), LONG_DRAFTS.values(), ids=LONG_DRAFTS)
def test_longer_drafts_are_refused_before_anything_is_computed(options, message):
    model, settings = get_model("llama"), dict(SETTINGS, streaming_heads=((0, 1),))
    with patched(model, **settings):
        cache = PSACache(model.config, **settings)
        for given in (dict(past_key_values=cache), {}):
            with pytest.raises(ValueError, match=message):
                model.generate(make_prompt(40, seed=5)[None], max_new_tokens=4, **options(), **given)
        assert cache.tokens == 0 and not cache.layers[0].is_initialized and model.last_psa_cache is None
    with patched(model, SETTINGS):                          # without streaming heads there is no such limit
        model.generate(make_prompt(40, seed=5)[None], max_new_tokens=2, **options())


def test_a_patched_assistant_drafts_no_more_than_its_own_cache_takes_back(monkeypatch):
    options = dict(input_ids=make_prompt(400, seed=5)[None], max_new_tokens=100, eos_token_id=VOCAB_SIZE)
    drafts = {tokens: assistant(num_assistant_tokens=tokens, assistant_confidence_threshold=0.0)
              for tokens in (LONGER - 1, LONGER)}
    plain = run_generate(get_model("llama"), None, **options)
    for draft in drafts.values():
        patch_model(draft["assistant_model"], **SETTINGS, streaming_heads=((0, 1),))
    assert_same_run(run_generate(get_model("llama"), None, **options, **drafts[LONGER - 1]), plain)
    with pytest.raises(ValueError, match=f"num_assistant_tokens={LONGER}: with streaming heads .*up to {SLACK_TOKENS} "):
        run_generate(get_model("llama"), None, **options, **drafts[LONGER])
    monkeypatch.setattr(checks, "_check_drafts", lambda *args: None)        # it would fail half way
    with pytest.raises(ValueError, match=f"not {LONGER}"):
        run_generate(get_model("llama"), None, **options, **drafts[LONGER])


def test_assistants_and_their_models():
    """A draft is half right: rejected tokens are taken back, and the rest is as without it."""
    model, draft = get_model("llama"), get_draft_model("llama")
    settings = dict(SETTINGS, streaming_heads=((0, 1), (1, 0)))
    with patched(model, **settings):
        plain = run_generate(model, None, input_ids=make_prompt(96, seed=5)[None], max_new_tokens=24)
        drafted = run_generate(model, None, input_ids=make_prompt(96, seed=5)[None], max_new_tokens=24, assistant_model=draft)
    assert_same_run(drafted, plain)
