"""Many generate() calls on a tiny model: after any number of them device and host memory are where they were.

60 calls in the normal run; the long one is

    HF_SPARSE_SOAK=2000 python -m pytest tests/cache/test_soak.py
"""

from __future__ import annotations

import functools
import gc
import os
import random
import threading
import tracemalloc

import pytest
import torch
from transformers import LogitsProcessor

from hf_sparse import PSACache, patched
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.pool import BlockPool
from hf_sparse.kernels import ops
from hf_sparse.kernels.host_link import LINKS
from tests.models import VOCAB_SIZE, build

CALLS = int(os.environ.get("HF_SPARSE_SOAK", "60"))
SETTINGS = dict(min_context=0, block_size=4, digest="key_bits", threshold=0.6, round_blocks=1)
TIERS = {
    "tiered": dict(gpu_memory="400KiB", host_memory="1MiB"),
    "resident": {},
    "no-host": dict(gpu_memory="130KiB", host_memory=0),
}


@functools.cache
def model():
    return build("llama", num_hidden_layers=2)


class Interruption(LogitsProcessor):
    """Raises after some tokens, between two forwards."""

    def __init__(self, tokens: int):
        self.left = tokens

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return scores


class Soak:
    """Caches that live for a while, each alone or sharing a pool with its forks, and random calls with them."""

    def __init__(self, tiers: dict, seed: int, monkeypatch):
        self.settings, self.rng, self.monkeypatch = {**SETTINGS, **tiers}, random.Random(seed), monkeypatch
        self.caches: list[tuple[PSACache, torch.Tensor | None]] = []  # and the tokens that each holds, and one more
        self.generator = torch.Generator().manual_seed(seed)
        self.counts = dict.fromkeys(("done", "refused", "interrupted", "torn", "forks", "beams", "turns"), 0)

    def ids(self, rows: int, length: int) -> torch.Tensor:
        return torch.randint(3, VOCAB_SIZE, (rows, length), generator=self.generator)

    def call(self) -> None:
        rng = self.rng
        if len(self.caches) < 3:
            self.caches.append((PSACache(model().config, **self.settings), None))
        index = rng.randrange(len(self.caches))
        cache, held = self.caches[index]
        rows = rng.randint(1, 3)
        ids = self.ids(rows, rng.randint(1, 60))
        if held is not None:
            self.counts["turns"] += 1
            ids = torch.cat([held, self.ids(held.shape[0], rng.randint(1, 20))], 1)
        more = {}
        if held is None and rng.random() < 0.3:
            more = dict(num_beams=rng.randint(2, 3))
            self.counts["beams"] += 1
        elif rng.random() < 0.3:
            more = dict(prefill_chunk_size=rng.randint(3, 30))
        mask = torch.ones_like(ids)
        if held is None and ids.shape[1] > 4 and rng.random() < 0.3:
            mask[0, : rng.randrange(ids.shape[1] - 1)] = 0
        output = None
        try:
            with self.monkeypatch.context() as patch:
                if rng.random() < 0.3:
                    self.interrupt(patch, more)
                output = model().generate(
                    ids, attention_mask=mask, past_key_values=cache, max_new_tokens=rng.randint(1, 12), **more
                )
            self.counts["done"] += 1
        except ValueError as error:
            assert "Nothing in the cache was lost" in str(error)
            self.counts["refused"] += 1
        except (KeyboardInterrupt, ArithmeticError):
            self.counts["interrupted"] += 1
        self.afterwards(index, cache, output if more.get("num_beams") is None and mask.all() else None)

    def interrupt(self, patch, more: dict) -> None:
        """Now, in the middle of a layer, or between two tokens."""
        if self.rng.random() < 0.3:
            more["logits_processor"] = [Interruption(self.rng.randint(1, 6))]
            return
        owner, name = self.rng.choice(
            [(ops, "append"), (ops, "attend_forced"), (BlockPool, "allocate"), (BlockPool, "sweep"), (BlockPool, "resize"),
             (PSALayer, "attend"), (PSALayer, "_digest"), (type(model().model.layers[0].mlp), "forward")]
        )
        original, left, after = getattr(owner, name), self.rng.randint(1, 8), self.rng.random() < 0.5
        error = self.rng.choice([KeyboardInterrupt(), ArithmeticError()])

        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            result = original(*args, **kwargs) if left or after else None
            if left == 0:
                raise error
            return result

        patch.setattr(owner, name, call)

    def afterwards(self, index: int, cache: PSACache, output) -> None:
        rng = self.rng
        try:
            cache.check_whole()
        except RuntimeError:
            self.counts["torn"] += 1
            cache.reset()
            self.caches[index] = cache, None
        else:
            self.caches[index] = cache, output if output is not None and output.shape[1] == cache.tokens + 1 else None
            if self.caches[index][1] is None or rng.random() < 0.3:
                cache.reset()
                self.caches[index] = cache, None
            elif rng.random() < 0.4 and len(self.caches) < 5:
                try:
                    self.caches.append((cache.fork(), output))
                    self.counts["forks"] += 1
                except ValueError as error:
                    assert "Nothing in the cache was lost" in str(error)
        if rng.random() < 0.1:
            self.caches.pop(rng.randrange(len(self.caches)))
        # A fork of a cache that was torn says so too.
        for other, (one, _) in enumerate(self.caches):
            try:
                one.check_whole()
            except RuntimeError:
                one.reset()
                self.caches[other] = one, None

    def pools(self) -> list[BlockPool]:
        found = {id(pool): pool for cache, _ in self.caches for pool in cache.state.pools.values()}
        return list(found.values())


@pytest.mark.parametrize("tiers", TIERS)
def test_nothing_is_left(tiers, monkeypatch):
    threads, links = set(threading.enumerate()), dict(LINKS)
    tracemalloc.start()
    marks, biggest = [], {"slots": 0, "ids": 0, "host": 0}
    try:
        with patched(model(), **SETTINGS):
            soak = Soak(TIERS[tiers], 0, monkeypatch)
            for number in range(CALLS):
                soak.call()
                for pool in soak.pools():
                    check(pool, soak)
                    sizes = {"slots": pool.slots, "ids": pool.ids, "host": pool.host_capacity if pool.tiered else 0}
                    if number < CALLS // 2:
                        biggest = {name: max(size, biggest[name]) for name, size in sizes.items()}
                    elif tiers != "resident":
                        # Half again: the largest texts may come late.
                        assert all(size <= 1.5 * biggest[name] for name, size in sizes.items()), (sizes, biggest)
                if number in (CALLS // 2, CALLS - 1):
                    pools = soak.pools()
                    for cache, _ in soak.caches:
                        cache.reset()
                    for pool in pools:
                        assert pool.blocks_in_use() == 0 and not pool.users
                        pool.sweep()
                        assert pool.free.shape[0] == pool.ids - 1
                        if pool.tiered:
                            assert pool.pinned.sum() == pool.pinned[0] == 1
                            assert not pool.block_in.any() and not pool.slot_of.any()
                    soak.caches.clear()
                    del cache, pool, pools
                    gc.collect()
                    marks.append(left_over())
    finally:
        tracemalloc.stop()
    counts = soak.counts
    assert all(counts.values()) or CALLS < 60 or tiers == "resident" and counts["refused"] == 0, counts
    model().last_psa_cache = None
    before, after = marks
    assert after["tensors"] <= before["tensors"] and after["ours"] <= before["ours"]
    # Modules imported late and what Python remembers of classes come once, whatever the number of calls.
    assert after["bytes"] <= before["bytes"] + 1_500_000 + 100 * CALLS
    assert set(threading.enumerate()) == threads and LINKS == links


def check(pool: BlockPool, soak: Soak) -> None:
    """Tables, maps and pins of a pool agree with each other."""
    named = set()
    for layer in list(pool.users):
        if layer.table is not None:
            named |= set(layer.table.flatten().tolist())
    assert pool.blocks_in_use() == len(named - {0})
    if not pool.tiered or pool.torn:
        return
    slots = (pool.block_in > 0).nonzero().squeeze(1)
    assert torch.equal(pool.slot_of[pool.block_in[slots]], slots)
    assert int((pool.slot_of > 0).sum()) == slots.shape[0]
    # Forgotten blocks may keep their slots until the next sweep, but not more than those.
    if not pool.dirty:
        assert set(pool.block_in[pool.pinned].tolist()) <= named | {0}


def left_over() -> dict:
    kinds = (PSALayer, BlockPool, PSACache)
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in objects),
        "ours": sum(issubclass(type(one), kinds) for one in objects),
        "bytes": tracemalloc.get_traced_memory()[0],
    }
