"""Blocks go back: dropped caches, forks and resets leave nothing behind, and long random lives stay exact."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import weakref

import pytest
import torch

from tests.cache.drive import Text, decode, feed
from tests.cache.shadow import Shadow

LAYERS = 2
TIERS = {
    "resident": {},
    "tiered": dict(host_memory="4MiB"),
    "small": dict(gpu_memory="120KiB", host_memory="1MiB"),
    "no-host": dict(gpu_memory="80KiB", host_memory=0),
}


def make(tiers: str, seed=0, **settings) -> Shadow:
    text = Text(layers=LAYERS, key_dim=8)
    return Shadow(
        text.cache(**{"threshold": 1.0, "digest": "key_bits", **TIERS[tiers], **settings}), LAYERS, seed=seed
    )


def pool_of(one: Shadow):
    return one.cache.sparse_layers[0].pool


def named(caches) -> int:
    """Distinct blocks in the tables of some caches, counted with a Python set."""
    ids = set()
    for cache in caches:
        for layer in cache.sparse_layers:
            if layer.table is not None:
                ids |= set(layer.table.flatten().tolist())
    return len(ids - {0})


@pytest.mark.parametrize("tiers", TIERS)
def test_a_prompt_is_held_once(tiers):
    """Its keys and values are in blocks after attention, and nowhere else."""
    one = make(tiers)
    one.feed(50, batch=2)
    assert all(layer.length == 50 and layer.pending is None for layer in one.cache.layers)
    turn = one.cache.fork(sparse_queries=True)              # its tokens are stored one by one
    feed(turn, Text(rows=2, length=9, layers=LAYERS, key_dim=8), 0, 9)
    assert all(layer.length == 59 and layer.pending is None for layer in turn.layers)


@pytest.mark.parametrize("tiers", TIERS)
def test_a_prompt_is_held_once_by_code_that_wants_dense_keys(tiers):
    cache = make(tiers).cache
    keys, _ = cache.update(torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8), 0)
    with pytest.warns(UserWarning, match="hands out dense keys"):
        assert keys.dense().shape == (1, 2, 30, 8)
    assert cache.layers[0].pending is None


@pytest.mark.parametrize("tiers", TIERS)
def test_a_dropped_fork_gives_its_blocks_back(tiers):
    one = make(tiers)
    one.feed(50, batch=2)
    pool, before = pool_of(one), pool_of(one).blocks_in_use()
    fork = one.fork()
    fork.decode(10)
    assert pool.blocks_in_use() > before
    del fork
    gc.collect()
    assert pool.blocks_in_use() == before
    one.decode(5)


@pytest.mark.parametrize("tiers", TIERS)
def test_the_original_may_go_first(tiers):
    one = make(tiers)
    one.feed(50, batch=2)
    pool, fork = pool_of(one), one.fork()
    one.decode(6)
    del one
    gc.collect()
    assert pool.blocks_in_use() == named([fork.cache])
    fork.decode(6)
    fork.reset()
    assert pool.blocks_in_use() == 0


@pytest.mark.parametrize("tiers", TIERS)
def test_reset_gives_everything_back_and_the_pool_does_not_grow(tiers):
    one = make(tiers)
    sizes = []
    for _ in range(6):
        one.feed(60, batch=2)
        one.decode(3)
        sizes.append(pool_of(one).ids)
        pool = pool_of(one)
        one.reset()
        assert pool.blocks_in_use() == 0
        assert len(pool.users) == 0
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("tiers", TIERS)
def test_a_dropped_cache_is_freed(tiers):
    """Pool, tables and host tier die with the last cache that uses them, without a garbage collection."""
    gc.disable()
    try:
        one = make(tiers)
        one.feed(50, batch=2)
        one.decode(2)
        fork = one.fork()
        watched = [
            weakref.ref(thing)
            for thing in (pool_of(one), pool_of(one).kv, one.cache.layers[0], one.cache.state)
        ]
        del one
        assert watched[0]() is not None
        del fork
        assert [ref() for ref in watched] == [None] * 4
    finally:
        gc.enable()


def test_beams_do_not_grow_the_pool():
    """Reordering every few tokens, as beam search does, recycles the blocks that no beam goes on with."""
    one = make("resident")
    one.feed(50, batch=4)
    rng = random.Random(0)
    sizes = []
    for _ in range(40):
        one.decode(1)
        one.reorder([rng.randrange(4) for _ in range(4)])
        one.crop(1)
        sizes.append(pool_of(one).ids)
    assert sizes[-1] == sizes[5]
    assert pool_of(one).blocks_in_use() == named([one.cache])


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("seed", range(2))
def test_random_lives(seed, tiers):
    """200 operations on up to 4 caches of one pool. Outputs stay exact after each, refusals lose nothing, nothing leaks."""
    rng = random.Random(seed)
    family = [make(tiers, seed=seed, **(dict(gpu_memory="45KiB") if tiers == "no-host" else {}))]
    family[0].feed(rng.randint(1, 30), batch=2)
    pool = pool_of(family[0])
    refused = 0
    for _ in range(200):
        one = rng.choice(family)
        rows = one.batch
        name = rng.choice(
            ["decode"] * 4
            + ["feed", "feed-padded", "reorder", "repeat", "select", "crop", "crop", "fork", "drop", "reset"]
        )
        try:
            if name == "decode" and one.length:
                one.decode(rng.randint(1, 2))
            elif name == "feed":
                one.feed(rng.randint(2, 12), batch=rows or rng.randint(1, 3))
            elif name == "feed-padded":
                count, rows = rng.randint(2, 12), rows or rng.randint(1, 3)
                valid = torch.tensor([[rng.random() < 0.7 for _ in range(count)] for _ in range(rows)])
                valid[:, -1] = True
                one.feed(count, batch=rows, valid=valid)
            elif name == "reorder" and rows:
                one.reorder([rng.randrange(rows) for _ in range(rows)])
            elif name == "repeat" and 0 < rows <= 2:
                one.repeat(2)
            elif name == "select" and rows:
                one.select([rng.randrange(rows) for _ in range(rng.randint(1, min(rows, 3)))])
            elif name == "crop" and one.length > 2:
                one.crop(rng.choice([1, 2, 3, 5, one.length // 2, one.length - 2]))
            elif name == "fork" and len(family) < 4:
                family.append(one.fork(rng.choice([copy.deepcopy, lambda cache: cache.fork()])))
            elif name == "drop" and len(family) > 1:
                family.remove(one)
            elif name == "reset" and rng.random() < 0.4:
                one.reset()
        except ValueError as error:
            assert "Nothing in the cache was lost" in str(error)
            refused += 1
            # A shorter text frees blocks; in a pool that is full to the last block even that may find no room.
            with contextlib.suppress(ValueError):
                if one.length:
                    one.crop(min(one.length - 1, 8))
        del one
        assert {other.cache.get_seq_length() for other in family} == {other.length for other in family}
        assert pool.blocks_in_use() == named([other.cache for other in family])
        used = pool.kv.numel() * 4 + sum(
            layer.side_bytes() for other in family for layer in other.cache.sparse_layers
        )
        assert used <= (pool.budget or used)
    if tiers in ("small", "no-host"):
        assert refused > 0
    family.clear()
    gc.collect()
    assert pool.blocks_in_use() == 0


@pytest.mark.parametrize("tiers", ["resident", "small"])
def test_stale_handles_keep_no_cache_alive(tiers):
    """What update() returned may be kept by the caller's graph; the blocks are the pool's all the same."""
    text = Text(rows=1, length=60, layers=LAYERS, key_dim=8)
    cache = text.cache(threshold=1.0, digest="key_bits", **TIERS[tiers])
    feed(cache, text, 0, 50)
    handles = cache.update(text.keys[0][:, :, 50:51], text.values[0][:, :, 50:51], 0)
    pool = cache.sparse_layers[0].pool
    cache.reset()
    assert pool.blocks_in_use() == 0
    assert handles[0].shape[2] == 51
    feed(cache, text, 0, 40)
    decode(cache, text, 40, 45)
