"""Offloading: the same tokens from every pool size and eviction policy, within the byte budget, and counted right."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from hf_sparse import PSACache, PSAConfig, patched
from tests.cache.drive import Text, decode, feed, required, smallest_budget
from tests.cache.shadow import Shadow
from tests.models import get_model
from tests.scenarios import make_prompt, pad_left

NEW_TOKENS = 10
SETTINGS = {
    "key_bits": dict(block_size=4, digest="key_bits", threshold=0.6, round_blocks=1),
    "channel_codes": dict(block_size=16, threshold=0.6, round_blocks=1),
    "exact": dict(block_size=4, digest="key_bits", threshold=1.0),
    "top_p": dict(block_size=4, digest="key_bits", policy="top_p", top_p=0.6, round_blocks=1),
}
PROMPTS = {
    ("llama", "channel_codes"): (300, 280),
    ("gemma3", "key_bits"): (200, 175),
    ("gpt_oss", "key_bits"): (200, 175),
}


def config_of(name: str, **budget) -> PSAConfig:
    return PSAConfig(min_context=0, **SETTINGS[name], **budget)


def inputs_of(family: str, name: str) -> dict:
    ids, mask = pad_left(
        [make_prompt(length, seed=length) for length in PROMPTS.get((family, name), (110, 88))]
    )
    return dict(input_ids=ids, attention_mask=mask)


@torch.no_grad()
def generate(family: str, name: str, watch=None, **budget):
    """Tokens, logits and cache of a greedy run; `watch(cache)` is called after every forward."""
    model = get_model(family)
    config = config_of(name, **budget)
    cache = PSACache(model.config, config)
    with patched(model, config):
        hook = model.register_forward_hook(lambda *_: watch(cache) if watch else None)
        try:
            output = model.generate(
                **inputs_of(family, name),
                past_key_values=cache,
                max_new_tokens=NEW_TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
        finally:
            hook.remove()
    return output.sequences, torch.stack(output.logits), cache


@functools.cache
def resident(family: str, name: str):
    return generate(family, name)[:2]


@functools.cache
def minimum(family: str, name: str) -> int:
    return smallest_budget(lambda budget: generate(family, name, gpu_memory=budget, host_memory="8MiB"))


def used_bytes(cache) -> int:
    """What the slots, digests and tables of a cache take on the device, counted from the tensors themselves."""
    tensors = {}
    for layer in cache.sparse_layers:
        if layer.table is not None:
            for tensor in (layer.pool.kv, layer.table, *layer.digests.unit, *layer.digests.row):
                tensors[id(tensor)] = tensor
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


CASES = [
    ("llama", "key_bits"),
    ("llama", "channel_codes"),
    ("llama", "exact"),
    ("llama", "top_p"),
    ("gemma3", "key_bits"),
    ("gpt_oss", "key_bits"),
]

# In the other cases so few blocks are worth reading that the smallest pool there can be holds them all.
EVICTING = {("llama", "key_bits"), ("llama", "exact"), ("llama", "top_p"), ("gemma3", "key_bits")}


@pytest.mark.parametrize("eviction", ["lru", "fifo", "decayed"])
@pytest.mark.parametrize(("family", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_every_pool_size_gives_the_same_tokens(family, name, eviction):
    """From the minimum up to where everything fits: same tokens, same logits to the last bit, never over budget."""
    tokens, logits = resident(family, name)
    least = minimum(family, name)
    misses = []
    for factor in (1.0, 1.02, 1.1, 1.3, 4.0):
        budget = int(least * factor)
        peak = []
        got = generate(
            family,
            name,
            lambda cache, peak=peak: peak.append(used_bytes(cache)),
            gpu_memory=budget,
            host_memory="8MiB",
            eviction=eviction,
        )
        assert torch.equal(got[0], tokens)
        assert torch.equal(got[1], logits)
        assert max(peak) <= budget
        stats = got[2].stats()
        assert (
            stats["bytes"]["device"] <= budget or family != "llama"
        )  # windows of sliding layers are no part of the pool
        assert name == "exact" or stats["kv_fraction"] < 0.95
        misses.append(stats["misses"])
    if (family, name) in EVICTING:
        assert misses[-1] < misses[0]
    assert (
        misses == sorted(misses, reverse=True) or eviction == "fifo"
    )  # a larger FIFO pool may miss more (Belady)


@pytest.mark.parametrize(("family", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_too_small_is_refused_and_the_number_is_tight(family, name):
    least = minimum(family, name)
    for budget in (least // 2, int(least * 0.97)):
        with pytest.raises(ValueError, match="gpu_memory=.*too small") as error:
            generate(family, name, gpu_memory=budget, host_memory="8MiB")
        assert required(error.value) <= least


@pytest.mark.parametrize("eviction", ["lru", "fifo", "decayed"])
def test_hits_and_misses_add_up(eviction):
    """Every ranked block that is read is a hit or a miss; always-read blocks are neither."""
    text = Text(rows=2, length=110, layers=2, key_dim=8)
    cache = text.cache(
        digest="key_bits",
        threshold=0.6,
        round_blocks=1,
        gpu_memory="60KiB",
        host_memory="4MiB",
        eviction=eviction,
    )
    feed(cache, text, 0, 100)
    decode(cache, text, 100, 110)
    stats = cache.stats()
    # Sink, recent and open block; the recent one counts once more while the newest block has just opened.
    forced = sum(3 for _ in range(100, 110)) * 2 * 2 * 2
    assert stats["hits"] + stats["misses"] == stats["blocks_read"] - forced
    assert stats["hits"] > 0 and stats["misses"] > 0
    assert stats["hit_rate"] == stats["hits"] / (stats["hits"] + stats["misses"])


def test_when_all_fits_a_block_is_missed_once():
    text = Text(rows=1, length=130, layers=2, key_dim=8)
    cache = text.cache(threshold=1.0, digest="key_bits", host_memory="4MiB")
    feed(cache, text, 0, 100)
    decode(cache, text, 100, 101)
    # Of the 26 blocks of 101 tokens 3 are always read; a fourth was until this token, and still has its slot.
    heads = 2 * 2
    assert cache.stats()["misses"] == 22 * heads and cache.stats()["hits"] == 1 * heads
    decode(cache, text, 101, 104)
    assert cache.stats()["misses"] == 22 * heads and cache.stats()["hits"] == (1 + 3 * 23) * heads


def test_no_tiers_no_counts():
    text = Text(rows=1, length=60)
    cache = text.cache(threshold=1.0)
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 55)
    stats = cache.stats()
    assert stats["hits"] == stats["misses"] == 0 and stats["hit_rate"] is None and stats["bytes"]["host"] == 0


def test_budget_without_a_host_tier():
    """Refused or within budget, at every size and after every token; and the number in the refusal is enough."""
    text = Text(rows=2, length=250, layers=3, key_dim=8)
    refused = passed = 0
    for budget in range(60_000, 420_000, 20_000):
        cache = text.cache(threshold=1.0, digest="min_max", gpu_memory=budget, host_memory=0)
        try:
            for low, high in ((0, 90), (90, 91), (91, 140), (140, 250)):
                feed(cache, text, low, high)
                assert used_bytes(cache) <= budget
                assert cache.stats()["bytes"]["device"] <= budget
            passed += 1
        except ValueError as error:
            refused += 1
            assert re.search("gpu_memory is used up.*Nothing in the cache was lost", str(error))
            more = text.cache(threshold=1.0, digest="min_max", gpu_memory=required(error), host_memory=0)
            feed(more, text, 0, high)
    assert refused > 3 and passed > 3


SMALL = dict(threshold=1.0, digest="key_bits")


def shadow(gpu_memory="70KiB", host_memory="4MiB", layers=3) -> Shadow:
    text = Text(layers=layers, key_dim=8)
    return Shadow(text.cache(gpu_memory=gpu_memory, host_memory=host_memory, **SMALL), layers)


def check_untouched(one: Shadow) -> None:
    """All layers hold the same, and go on exactly."""
    assert {layer.get_seq_length() for layer in one.cache.layers} == {one.length}
    assert {layer.batch for layer in one.cache.layers} == {one.batch}
    one.crop(3)
    one.decode(2)
    one.reorder(list(range(one.batch))[::-1])
    one.decode(1)


REFUSED = {
    "repeat": lambda one: one.repeat(8),
    "select-more": lambda one: one.select([0, 1] * 9),
    "fork": lambda one: [one.fork() for _ in range(20)],
    "long-chunk": lambda one: one.feed(1000),
    "decode": lambda one: one.decode(150),
}


@pytest.mark.parametrize("operation", REFUSED)
@pytest.mark.parametrize("kind", ["gpu", "host", "no-host"])
def test_refusals_lose_nothing(kind, operation):
    """Whatever is refused for want of room is refused for all layers alike, and the cache goes on as it was."""
    budgets = {
        "gpu": dict(gpu_memory="70KiB"),
        "host": dict(gpu_memory="4MiB", host_memory=330 * 4 * 16 * 4),
        "no-host": dict(gpu_memory="130KiB", host_memory=0),
    }
    one = shadow(**budgets[kind])
    one.feed(61, batch=2)
    one.decode(2)
    with pytest.raises(ValueError, match="Nothing in the cache was lost"):
        REFUSED[operation](one)
    check_untouched(one)


def test_the_number_in_a_later_refusal_is_enough():
    """The cache was big enough for the prompt and a while of decoding; the error says what the next step takes."""
    one = shadow()
    one.feed(61, batch=2)
    with pytest.raises(ValueError, match="too small") as error:
        one.decode(200)
    longer = one.length
    again = shadow(gpu_memory=required(error.value))
    again.feed(61, batch=2)
    again.decode(longer + 1 - 61)
    assert again.length > longer


def test_a_refused_first_prompt_leaves_an_empty_cache():
    one = shadow(gpu_memory="30KiB")
    with pytest.raises(ValueError, match="too small"):
        one.feed(400, batch=4)
    assert one.cache.get_seq_length() == 0 and one.cache.batch_size == -1
    one.feed(9, batch=1)
    one.decode(3)


def test_decoding_after_a_refusal_in_generate():
    """In a model with sliding layers too: what raised stored nothing in any layer."""
    model = get_model("gemma3")
    ids = make_prompt(60, seed=3)[None]
    with patched(model, min_context=0, block_size=4, threshold=1.0):
        probe = PSACache(model.config, min_context=0, block_size=4, threshold=1.0, digest="key_bits")
        model(ids, past_key_values=probe)
        config = dict(
            min_context=0,
            block_size=4,
            threshold=1.0,
            digest="key_bits",
            gpu_memory="130KiB",
            host_memory="1MiB",
        )
        cache = PSACache(model.config, **config)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="too small"):
            model(make_prompt(3000, seed=4)[None], past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {60}
        more = make_prompt(5, seed=5)[None]
        torch.testing.assert_close(
            model(more, past_key_values=cache).logits,
            model(more, past_key_values=probe).logits,
            rtol=0,
            atol=1e-5,
        )
