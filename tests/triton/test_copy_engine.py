"""Fetching with the copy engine, interpreted: the kernel orders, the loader's thread copies, and outputs, slots and counters
are those of the fetch kernel to the last bit."""
from __future__ import annotations

import pytest
import torch

from hf_sparse.kernels import copy_engine, tiering
from hf_sparse.kernels.loader import Loader
from hf_sparse.kernels.residency import FAILED, MISSED, TICK
from tests.triton import test_residency
from tests.triton.test_tiered_step import SETTINGS, Run, small_launches  # noqa: F401

MEMORY = {"gpu_memory": "78KiB", "host_memory": "4MiB"}                 # of one row


@pytest.fixture(autouse=True)
def as_many_programs(small_launches, monkeypatch):  # noqa: F811
    monkeypatch.setattr(copy_engine, "PROGRAMS", tiering.TUNING.fetch_programs)


class Tier(test_residency.Tier):
    """The model of test_residency, with the other fetcher where `loader` is set."""

    loader = None

    def fetch(self) -> None:
        if self.loader is None:
            super().fetch()
        else:
            copy_engine.CopyEngineTier(self.block_bytes, self.policy, self.layers, loader=self.loader, kv=self.pool.kv,
                                       host=self.pool.host, most=self.work.misses.shape[0]).fetch(self.descs[0])


@pytest.mark.parametrize(("policy", "slots", "block_bytes"), [("lru", 40, 48), ("fifo", 26, 10), ("decayed", 60, 7)])
def test_slots_and_contents_are_those_of_the_fetch_kernel(policy, slots, block_bytes):
    """Also where some of what is missed finds no slot."""
    tiers = [Tier(slots, policy, layers=1, block_bytes=block_bytes) for _ in range(2)]
    tiers[1].loader = Loader(torch.device("cpu"), 2**20)
    missed = 0
    for _ in range(6):
        wanted = tiers[0].draw(0, 9)
        for tier in tiers:
            tier.queue()
            tier.touch(0, wanted)
            listed = tier.state(MISSED)
            tier.fetch()
        missed += listed
        tiers[1].check()
        for name in ("kv", "slot_of", "block_in", "priority", "history", "counters", "clock"):
            assert torch.equal(*(getattr(tier.pool, name)[1:] if name == "kv" else getattr(tier.pool, name)
                                 for tier in tiers)), name
        assert torch.equal(*(tier.work.state for tier in tiers)) and tiers[1].state(MISSED) == 0
        assert not bool(tiers[1].loader.orders(0).any())
    assert missed > 20 and tiers[1].state(TICK) == 7
    assert (tiers[1].state(FAILED) > 0) == (slots == 26)


@pytest.mark.parametrize(("name", "eviction"), [("reads-on", "lru"), ("top_k", "decayed")])
def test_a_step_gives_what_everything_resident_gives(name, eviction, monkeypatch):
    def fetched(*args, **kwargs):
        raise AssertionError("this is the other fetcher")

    monkeypatch.setattr(tiering.Tier, "fetch", fetched)
    run = Run(380, (37,), **MEMORY, eviction=eviction, fetcher="copy_engine", **SETTINGS[name])
    outputs, expected = run.decode(2), Run(380, (37,), **SETTINGS[name]).decode(2)
    assert len(outputs) == len(expected) == 4 and all(map(torch.equal, outputs, expected))
    run.check_pool()
    hits, misses = run.pool.counters.tolist()
    assert misses > 0 and hits > 0


def test_a_loader_that_fails_tears_the_pool(monkeypatch):
    """Slots are given out before their blocks are there, so that nothing in the pool holds any more."""
    run = Run(380, (37,), **MEMORY, fetcher="copy_engine")

    def fail(self, kv, host, pairs):
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(Loader, "_copy", fail)
    with pytest.raises(RuntimeError, match="the bus is gone"):
        run.decode(1)
    assert run.pool.torn and run.layers[0].state.torn
