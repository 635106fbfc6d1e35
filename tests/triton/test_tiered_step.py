"""The decode step over a pool in front of a host tier, interpreted: the same outputs, to the last bit, as with everything
resident, whatever the pool's size and eviction policy."""
from __future__ import annotations

import functools
import re

import pytest
import torch

from hf_sparse import PSAConfig
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.state import CacheState
from hf_sparse.kernels import tiering
from hf_sparse.sizes import parse_bytes

LAYERS, HEADS, GROUP, DIM = 2, 1, 2, 16


@pytest.fixture(autouse=True)
def small_launches(monkeypatch):
    small = tiering.Tuning(fetch_programs=3, victim_programs=2, count_tile=64, queue_tile=16, fetch_tile=1024, settle_tile=64,
                           touched=16)
    monkeypatch.setattr(tiering, "TUNING", small)


class Run:
    """Layers of one cache, and tokens that are the same for every run with a seed."""

    def __init__(self, tokens: int, pads=(0, 37), seed=0, **settings):
        self.config = PSAConfig(**{"min_context": 0, "block_size": 8, "round_blocks": 1, "threshold": 0.7, **settings})
        self.generator = torch.Generator().manual_seed(seed)
        state = CacheState(self.config, layers=LAYERS)
        valid = torch.arange(tokens) >= torch.tensor(pads)[:, None]
        self.layers = [PSALayer(state, order, order) for order in range(LAYERS)]
        bias = [self.draw(HEADS)[:1] for _ in self.layers]
        for layer, mean in zip(self.layers, bias):
            keys, values = (torch.randn(len(pads), HEADS, tokens, DIM, generator=self.generator) for _ in range(2))
            keys = keys * 1.5 + mean
            layer.lazy_initialization(keys, values)
            layer.group = GROUP
            layer.commit(Pending(keys, values, 0), None if valid.all() else valid)
            queries = torch.randn(len(pads), HEADS * GROUP, tokens, DIM, generator=self.generator)
            layer.digests.observe(queries, HEADS, valid)

    @property
    def pool(self):
        return self.layers[0].pool

    def draw(self, heads: int) -> torch.Tensor:
        rows = self.layers[0].batch if hasattr(self, "layers") and self.layers[0].batch else 1
        return torch.randn(rows, heads, 1, DIM, generator=self.generator)

    def decode(self, count: int) -> list[torch.Tensor]:
        outputs = []
        for _ in range(count):
            for layer in self.layers:
                query, key, value = self.draw(HEADS * GROUP) * 1.5, self.draw(HEADS), self.draw(HEADS)
                pending = Pending(key, value, layer.length)
                outputs.append(layer.attend(query, pending, None, None, DIM**-0.5, 0.0, None, None))
                assert pending.committed and layer.stats.reference_steps == 0
        return outputs

    def check_pool(self) -> None:
        """Slots and ids say the same of each other, what is always read has a slot, and closed blocks are in the host tier."""
        for layer in self.layers:
            pool, P = layer.pool, self.config.block_size
            held = pool.block_in.nonzero().squeeze(1)
            assert torch.equal(pool.slot_of[pool.block_in[held]], held)
            assert int((pool.slot_of > 0).sum()) == len(held) and int((pool.slot_of < 0).sum()) == 0
            assert torch.equal(torch.isinf(pool.priority[1:]), pool.block_in[1:] == 0)
            start = layer.tail_start(layer.lengths)
            for row, length in enumerate(layer.lengths.tolist()):
                closed = layer.table[row, :, :length // P]
                slots = pool.slot_of[closed]
                assert torch.equal(torch.where((slots > 0)[..., None], pool.kv[slots], pool.host[closed]), pool.host[closed])
                tail = [0, *range(int(start[row]), -(-length // P))]
                assert bool(pool.pinned[pool.slot_of[layer.table[row][:, tail]]].all())


TOKENS, STEPS = 380, 5                                      # past a unit of 128 tokens, and a block


@functools.cache
def resident(name: str) -> list[torch.Tensor]:
    return Run(TOKENS, **SETTINGS[name]).decode(STEPS)


SETTINGS = {
    "threshold": dict(threshold=0.7),
    "reads-on": dict(threshold=0.97),
    "top_k": dict(policy="top_k", top_k=24),
}


@functools.cache
def smallest(name: str) -> int:
    """Bytes of the smallest pool: what the refusal asks for."""
    with pytest.raises(ValueError, match="too small") as error:
        Run(TOKENS, gpu_memory=1, host_memory="4MiB", **SETTINGS[name])
    return parse_bytes(re.search(r"at least ([\d.]+\w*B)", str(error.value)).group(1))


@pytest.mark.parametrize(("factor", "eviction"), [(1.0, "lru"), (1.1, "fifo"), (3.0, "decayed")])
def test_every_pool_gives_the_same_outputs(factor, eviction):
    run = Run(TOKENS, gpu_memory=int(smallest("threshold") * factor), host_memory="4MiB", eviction=eviction)
    outputs = run.decode(STEPS)
    assert all(map(torch.equal, outputs, resident("threshold")))
    run.check_pool()
    hits, misses = run.pool.counters.tolist()
    assert misses > 0 and hits > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_way_to_stop_gives_the_same_outputs(name):
    run = Run(TOKENS, gpu_memory=smallest(name), host_memory="4MiB", **SETTINGS[name])
    outputs = run.decode(STEPS)
    assert all(map(torch.equal, outputs, resident(name)))
    run.check_pool()


def test_a_pool_for_each_layer_gives_the_same_outputs():
    with pytest.raises(ValueError, match="too small.*for each of 2 layers") as error:
        Run(TOKENS, gpu_memory=1, host_memory="8MiB", pool="per_layer")
    least = parse_bytes(re.search(r"at least ([\d.]+\w*B)", str(error.value)).group(1))
    run = Run(TOKENS, gpu_memory=least, host_memory="8MiB", pool="per_layer")
    assert all(map(torch.equal, run.decode(STEPS), resident("threshold")))
    run.check_pool()
    pools = [layer.pool for layer in run.layers]
    assert pools[0] is not pools[1]
    for pool in pools:
        assert pool.clock.item() == pytest.approx(STEPS) and all(count > 0 for count in pool.counters.tolist())
    for work in run.layers[0].state.static.tier_work.values():
        assert work.state[:2].tolist() == [1 + STEPS, 0]    # its own ticks, and nothing left to fetch


def test_a_pool_too_small_for_what_a_step_reads_reads_from_the_host():
    """Slots for the always-read blocks and two more."""
    run = Run(TOKENS, gpu_memory="16MiB", host_memory="4MiB")
    run.pool.resize(1 + sum(layer.pinned_blocks(2) for layer in run.layers) + 2)
    assert all(map(torch.equal, run.decode(STEPS), resident("threshold")))
    run.check_pool()
    work = run.layers[0].state.static.tier_work[torch.device("cpu"), None]
    assert int(work.state[7]) > 0                           # blocks that got no slot


def test_rows_that_share_blocks_part_and_go_on():
    runs = [Run(TOKENS, pads=(0, 0), seed=3, **memory) for memory in ({}, dict(gpu_memory="200KiB", host_memory="4MiB"))]
    outputs = []
    for run in runs:
        outputs.append(run.decode(2))
        for layer in run.layers:
            layer.reorder_cache(torch.tensor([1, 1]))
        outputs[-1] += run.decode(3)
        for layer in run.layers:
            layer.crop(-5)
        outputs[-1] += run.decode(2)
    runs[1].check_pool()
    assert all(map(torch.equal, *outputs))


def test_kernels_and_reference_take_turns():
    """A step of the reference between steps of the kernels finds the pool as it must be, and the other way round."""
    runs = [Run(TOKENS, pads=(0, 0), seed=4, **memory) for memory in ({}, dict(gpu_memory="200KiB", host_memory="4MiB"))]
    outputs = []
    for run in runs:
        outputs.append(run.decode(2))
        query = [run.draw(HEADS * GROUP) for _ in run.layers]
        new = [(run.draw(HEADS).expand(-1, -1, 9, -1), run.draw(HEADS).expand(-1, -1, 9, -1)) for _ in run.layers]
        for layer, q, (keys, values) in zip(run.layers, query, new):            # nine tokens at once: not the kernels'
            outputs[-1].append(layer.attend(q.expand(-1, -1, 9, -1), Pending(keys, values, layer.length), None, None,
                                            DIM**-0.5, 0.0, None, None))
        outputs[-1] += run.decode(3)
    runs[1].check_pool()
    assert all(map(torch.equal, *outputs))
