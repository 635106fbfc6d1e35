"""pool="per_layer": an equal share of the memory for each layer; the same tokens, refusals and statistics as with one pool."""

from __future__ import annotations

import functools

import pytest
import torch

from hf_sparse import PSACache, PSAConfig
from hf_sparse.cache import state as state_module
from hf_sparse.cache.host import HostTier
from hf_sparse.cache.state import CacheState
from hf_sparse.sizes import parse_bytes
from tests.cache.drive import Text, decode, feed, model_config, required, smallest_budget
from tests.cache.shadow import Shadow
from tests.cache.test_host import CHUNK, ELEMENTS, GPU, ROW_BYTES, driver, settle  # noqa: F401
from tests.cache.test_tiers import REFUSED, check_untouched, generate, resident, used_bytes
from tests.models import get_model

HOST = "16MiB"


def pools_of(cache) -> list:
    return list({id(layer.pool): layer.pool for layer in cache.sparse_layers}.values())


@functools.cache
def minimum(family: str, name: str) -> int:
    return smallest_budget(lambda budget: generate(family, name, gpu_memory=budget, host_memory=HOST, pool="per_layer"))


@pytest.mark.parametrize("eviction", ["lru", "fifo", "decayed"])
@pytest.mark.parametrize(("family", "name"), [("llama", "key_bits"), ("llama", "channel_codes"), ("gpt_oss", "key_bits")])
def test_every_size_gives_the_tokens_of_a_resident_pool(family, name, eviction):
    tokens, logits = resident(family, name)
    misses = []
    for factor in (1.0, 1.1, 4.0):
        budget, peak = int(minimum(family, name) * factor), []
        got = generate(family, name, lambda cache, peak=peak: peak.append(used_bytes(cache)), gpu_memory=budget,
                       host_memory=HOST, eviction=eviction, pool="per_layer")
        assert torch.equal(got[0], tokens) and torch.equal(got[1], logits)
        assert max(peak) <= budget
        pools = pools_of(got[2])
        assert len(pools) == len(got[2].sparse_layers) and len({pool.slots for pool in pools}) == 1
        misses.append(got[2].stats()["misses"])
    assert misses[-1] <= misses[0] and misses[0] > 0


def test_with_the_copy_engine_too():
    tokens, logits = resident("llama", "key_bits")
    got = generate("llama", "key_bits", gpu_memory=minimum("llama", "key_bits"), host_memory=HOST, pool="per_layer",
                   fetcher="copy_engine")
    assert torch.equal(got[0], tokens) and torch.equal(got[1], logits)
    assert all(int(pool.counters[1]) > 0 for pool in pools_of(got[2]))


@pytest.mark.parametrize(("family", "name"), [("llama", "key_bits"), ("llama", "channel_codes")])
def test_too_small_is_refused_and_the_number_is_tight(family, name):
    least = minimum(family, name)
    layers = len(PSACache(get_model(family).config).sparse_layers)
    for budget in (least // 2, int(least * 0.97)):
        with pytest.raises(ValueError, match=f"gpu_memory=.*too small.*for each of {layers} layers"):
            generate(family, name, gpu_memory=budget, host_memory=HOST, pool="per_layer")


def test_a_budget_below_a_round_of_each_layer_is_refused_at_construction():
    """One pool needs a round of one layer; pools of their own need one each."""
    config = model_config(6, 2, 2, 16)
    sizes = []
    for pool in ("unified", "per_layer"):
        with pytest.raises(ValueError, match="too small even for one short sequence") as error:
            PSACache(config, gpu_memory=1, host_memory=HOST, pool=pool)
        sizes.append(required(error.value))
        PSACache(config, gpu_memory=sizes[-1], host_memory=HOST, pool=pool)
    slot = 32 * 2 * 16 * 2
    assert sizes[1] - sizes[0] == pytest.approx(5 * (1 + 2 * 32) * slot, rel=0.02)


def tiered(layers=3, gpu_memory="140KiB", **settings):
    text = Text(rows=2, length=130, layers=layers, key_dim=8)
    settings = {"digest": "key_bits", "threshold": 0.6, "round_blocks": 1, "gpu_memory": gpu_memory, "host_memory": HOST,
                "pool": "per_layer", **settings}
    return text, text.cache(**settings)


def test_statistics_are_sums_over_pools():
    text, cache = tiered()
    feed(cache, text, 0, 120)
    decode(cache, text, 120, 130)
    stats, pools = cache.stats(), pools_of(cache)
    counters = torch.stack([pool.counters for pool in pools])
    assert len(pools) == 3 and bool((counters > 0).all())
    assert [stats["hits"], stats["misses"]] == counters.sum(0).tolist()
    forced = sum(3 for _ in range(120, 130)) * 2 * 2 * 3    # sink, recent and open block: neither hit nor miss
    assert stats["hits"] + stats["misses"] == stats["blocks_read"] - forced
    assert stats["hit_rate"] == stats["hits"] / (stats["hits"] + stats["misses"])
    assert stats["bytes"]["device"] == used_bytes_of_all(cache) <= 140 * 1024
    assert stats["bytes"]["host"] == sum(pool.blocks_in_use() * pool.block_bytes for pool in pools)
    for pool in pools:                                      # a token is a token, whoever counts it
        assert float(pool.clock) == pytest.approx(10.0)


def used_bytes_of_all(cache) -> int:
    return sum(pool.kv.numel() * pool.kv.element_size() for pool in pools_of(cache)) \
        + sum(layer.side_bytes() for layer in cache.sparse_layers)


@pytest.mark.parametrize("memory", [dict(gpu_memory="180KiB", host_memory=HOST), dict()], ids=["tiered", "resident"])
def test_rows_crops_forks_and_resets_are_exact(memory):
    text = Text(layers=3, key_dim=8)
    one = Shadow(text.cache(threshold=1.0, digest="key_bits", pool="per_layer", **memory), 3)
    for _ in range(2):
        one.feed(61, batch=2)
        one.decode(3)
        one.reorder([1, 1])
        one.decode(2)
        one.crop(7)
        one.feed(9)
        other = one.fork()
        other.decode(3)
        one.decode(2)
        assert all(a.pool is b.pool for a, b in zip(one.cache.layers, other.cache.layers))
        del other
        one.reset()
    assert len(one.cache.state.pools) == 3 and sum(pool.blocks_in_use() for pool in one.cache.state.pools.values()) == 0


@pytest.mark.parametrize("operation", REFUSED)
@pytest.mark.parametrize("kind", ["gpu", "host", "no-host"])
def test_refusals_lose_nothing(kind, operation):
    budgets = {
        "gpu": dict(gpu_memory="140KiB", host_memory=HOST),
        "host": dict(gpu_memory="4MiB", host_memory=330 * 4 * 16 * 4),
        "no-host": dict(gpu_memory="130KiB", host_memory=0),
    }
    text = Text(layers=3, key_dim=8)
    one = Shadow(text.cache(threshold=1.0, digest="key_bits", pool="per_layer", **budgets[kind]), 3)
    one.feed(61, batch=2)
    one.decode(2)
    with pytest.raises(ValueError, match="Nothing in the cache was lost"):
        REFUSED[operation](one)
    check_untouched(one)


@pytest.mark.parametrize("settings", [dict(gpu_memory=40_000, host_memory=HOST), dict(gpu_memory="8MiB", host_memory=40_000),
                                      dict(gpu_memory=40_000, host_memory=0)], ids=["gpu", "host", "no-host"])
def test_the_number_in_a_refusal_is_enough(settings):
    name = "host_memory" if settings["host_memory"] == 40_000 else "gpu_memory"
    for _ in range(4):
        text, cache = tiered(**settings)
        try:
            feed(cache, text, 0, 120)
            break
        except ValueError as error:
            assert required(error) > parse_bytes(settings[name])
            settings = {**settings, name: required(error)}
    else:
        pytest.fail("the numbers do not lead to a working budget")
    assert parse_bytes(settings[name]) > 40_000


KEYS = torch.zeros(1, 2, 5, 8)


def test_pools_of_an_automatic_budget_are_equal(monkeypatch):
    """What is free shrinks while the first ones take theirs."""
    free = iter([90_000, 50_000])
    monkeypatch.setattr(state_module, "auto_budget", lambda device: next(free))
    state = CacheState(PSAConfig(block_size=4, host_memory="1MiB", pool="per_layer"), layers=3)
    pools = [state.pool(KEYS, KEYS, order) for order in range(3)]
    assert len(set(map(id, pools))) == 3 and state.pool(KEYS, KEYS, 1) is pools[1]
    assert [pool.budget for pool in pools] == [30_000] * 3
    assert [pool.host_capacity for pool in pools] == [2**20 // 3 // (4 * 16 * 4)] * 3
    assert len({id(pool.lock) for pool in pools}) == 1 and len({id(pool.host_tier.link) for pool in pools}) == 1


def test_tiers_of_layers_are_pinned_a_share_ahead(driver):  # noqa: F811
    """Together about as much, and as much at a time, as one tier."""
    tiers = [HostTier(3000, ELEMENTS, torch.float32, GPU, tiers=3) for _ in range(3)]
    for tier in tiers:
        tier.ensure(10)
        settle(tier)
    piece = -(-CHUNK // 3 // 4096) * 4096
    assert set(driver.regions.values()) == {piece}
    assert [driver.pinned(tier) for tier in tiers] == [-(-(10 * ROW_BYTES + CHUNK) // piece) * piece] * 3


def test_different_layers_under_one_budget_are_refused():
    state = CacheState(PSAConfig(block_size=4, gpu_memory=90_000, host_memory="1MiB", pool="per_layer"), layers=2)
    state.pool(KEYS, KEYS, 0)
    with pytest.raises(NotImplementedError, match="different key or value sizes"):
        state.pool(KEYS, KEYS[..., :4], 1)


def test_an_interruption_tears_all_pools_and_reset_makes_new_ones(monkeypatch):
    text, cache = tiered()
    feed(cache, text, 0, 120)
    before = pools_of(cache)
    layer = cache.sparse_layers[1]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "_digest", lambda: None)
        patch.setattr(layer, "_store", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            decode(cache, text, 120, 121)
    assert all(pool.torn for pool in before)
    with pytest.raises(RuntimeError, match="interrupted"):
        cache.check_whole()
    cache.reset()
    feed(cache, text, 0, 120)
    assert not set(map(id, pools_of(cache))) & set(map(id, before))
    assert [pool.budget for pool in pools_of(cache)] == [140 * 1024 // 3] * 3


def test_a_fork_can_not_change_it():
    text, cache = tiered()
    feed(cache, text, 0, 60)
    with pytest.raises(ValueError, match="'pool' can't change"):
        cache.fork(pool="unified")
