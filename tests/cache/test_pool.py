"""The block pool: ids, sweeping, growth, budgets, and residency when the number of slots changes."""

from __future__ import annotations

import math
import re

import pytest
import torch

import hf_sparse.cache.pool as pool_module
from hf_sparse.cache.host import available_host_bytes, reserve_host
from hf_sparse.cache.pool import BlockPool
from hf_sparse.kernels.reference.fetch import acquire, read
from hf_sparse.sizes import parse_bytes

ELEMENTS = 6
BLOCK_BYTES = 4 * ELEMENTS


class Layer:
    """What a pool needs to know of a layer: its table of block ids."""

    def __init__(self, pool: BlockPool, blocks: int = 0):
        self.table = None
        pool.join(self)
        if blocks:
            self.take(pool, blocks)

    def take(self, pool: BlockPool, blocks: int) -> torch.Tensor:
        fresh = pool.allocate(blocks)
        self.table = fresh if self.table is None else torch.cat([self.table, fresh])
        return fresh


def make_pool(budget=None, host=0) -> BlockPool:
    return BlockPool(torch.device("cpu"), torch.float32, ELEMENTS, budget, host)


POOLS = [pytest.param({}, id="resident"), pytest.param(dict(host=10**5), id="tiered")]


@pytest.mark.parametrize("settings", POOLS)
def test_ids_are_distinct_and_never_scratch(settings):
    pool = make_pool(**settings)
    layers = [Layer(pool) for _ in range(3)]
    for count in (1, 7, 20, 3, 100):
        for layer in layers:
            layer.take(pool, count)
    ids = torch.cat([layer.table for layer in layers]).tolist()
    assert len(ids) == len(set(ids)) == 3 * 131 and 0 not in ids
    assert max(ids) < pool.ids
    assert pool.blocks_in_use() == len(ids)


@pytest.mark.parametrize("settings", POOLS)
def test_dropped_blocks_come_back(settings):
    pool = make_pool(**settings)
    kept, dropped = Layer(pool, 30), Layer(pool, 50)
    size = pool.ids
    gone = set(dropped.table.tolist())
    del dropped
    pool.drop()
    assert pool.blocks_in_use() == 30
    again = Layer(pool).take(pool, 50).tolist()
    assert pool.ids == size
    assert not set(again) & set(kept.table.tolist())
    assert len(set(again) & gone) > 30


@pytest.mark.parametrize("settings", POOLS)
def test_a_live_id_is_never_given_again(settings):
    generator = torch.Generator().manual_seed(0)
    pool = make_pool(**settings)
    layers = [Layer(pool, 5) for _ in range(4)]
    for _ in range(200):
        index = int(torch.randint(4, (1,), generator=generator))
        if torch.rand(1, generator=generator) < 0.4:
            layers[index].table = layers[index].table[: int(torch.randint(1, 6, (1,), generator=generator))]
            pool.drop()
        else:
            before = torch.cat([layer.table for layer in layers]).tolist()
            fresh = layers[index].take(pool, int(torch.randint(1, 9, (1,), generator=generator))).tolist()
            assert not set(fresh) & set(before) and len(set(fresh)) == len(fresh)
        assert pool.blocks_in_use() == sum(len(layer.table) for layer in layers)


def test_a_row_that_two_layers_name_counts_once():
    pool = make_pool()
    first, second = Layer(pool, 10), Layer(pool)
    second.table = first.table[:4].clone()
    assert pool.blocks_in_use() == 10
    del first
    pool.drop()
    assert pool.blocks_in_use() == 4


def test_growth_keeps_content():
    pool = make_pool()
    layer = Layer(pool, 3)
    pool.kv[layer.table] = torch.arange(3.0)[:, None].expand(-1, ELEMENTS)
    layer.take(pool, 1000)
    assert torch.equal(pool.kv[layer.table[:3], 0], torch.arange(3.0))


@pytest.mark.parametrize("room", [True, False], ids=["room-for-one", "no-room"])
def test_growth_where_the_device_cannot_hold_both_copies(room, monkeypatch):
    """The old slots wait in host memory; if the new ones still do not fit, they come back."""
    pool = make_pool()
    layer = Layer(pool, 20)
    pool.kv[layer.table] = torch.arange(20.0)[:, None].expand(-1, ELEMENTS)
    before, empty = pool.slots, torch.empty

    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(pool_module, "_extend", no_room)
    monkeypatch.setattr(torch, "empty", empty if room else no_room)
    if room:
        layer.take(pool, 500)
        assert pool.slots > before and not pool.kv[before:].any()
    else:
        with pytest.raises(torch.OutOfMemoryError):
            layer.take(pool, 500)
        assert pool.slots == before
    assert pool.kv[layer.table[:20], 0].tolist() == list(range(20))


def test_no_more_than_the_host_tier_holds():
    pool = make_pool(host=21 * BLOCK_BYTES)
    layer = Layer(pool, 15)
    ids = pool.ids
    with pytest.raises(
        ValueError, match="host tier is full.*host_memory at least .*Nothing in the cache was lost"
    ) as error:
        pool.allocate(6)
    assert pool.ids >= ids and pool.blocks_in_use() == 15
    assert len(layer.take(pool, 5)) == 5
    needed = parse_bytes(re.search(r"at least ([\d.]+\w+)", str(error.value)).group(1))
    bigger = make_pool(host=needed)
    Layer(bigger, 15).take(bigger, 6)


def test_room_for_the_layers_to_come():
    """A change of several layers that only the first has room for is refused at the first."""
    pool = make_pool(host=21 * BLOCK_BYTES)
    layer = Layer(pool)
    with pytest.raises(ValueError, match="host tier is full"):
        pool.allocate(7, more=14)
    assert len(pool.allocate(7, more=13)) == 7
    layer.take(pool, 13)


def test_no_more_than_the_budget_without_a_host_tier():
    pool = make_pool(budget=20 * BLOCK_BYTES + 100)
    pool.side = 100
    layer = Layer(pool, 12)
    with pytest.raises(
        ValueError, match="gpu_memory is used up.*no host tier.*Nothing in the cache was lost"
    ) as error:
        pool.allocate(8)
    assert (
        parse_bytes(re.search(r"at least ([\d.]+\w+)", str(error.value)).group(1)) == 21 * BLOCK_BYTES + 100
    )
    layer.take(pool, 7)
    assert pool.kv.numel() * 4 + pool.side <= pool.budget


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, 2 * BLOCK_BYTES - 1])
def test_a_host_tier_of_less_than_a_block(size):
    with pytest.raises(ValueError, match=f"host_memory={size} bytes holds no block of {BLOCK_BYTES} bytes"):
        make_pool(host=size)


def test_a_host_tier_that_the_system_refuses():
    with pytest.raises(ValueError, match="host_memory: the system refuses to reserve .* bytes"):
        reserve_host(2**50, 2**12, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_host_memory_starts_as_zeros_and_is_writable(dtype):
    host = reserve_host(1000, 48, dtype)
    assert host.shape == (1000, 48) and host.dtype == dtype and not host.any()
    host[999, 47] = 2.5
    assert host[999, 47] == 2.5


def test_reserving_takes_address_space_and_not_memory():
    """Only pages that are written are committed; the tier of host_memory="auto" is half of what the machine has left."""
    before = resident_bytes()
    blocks = available_host_bytes() // 2 // 4096
    host = reserve_host(blocks, 2**10, torch.float32)
    host[blocks // 3] = 1.0
    assert blocks * 4096 > 128 * 2**20
    assert resident_bytes() - before < 64 * 2**20


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        pytest.skip("no /proc here")


# -- slots of a tiered pool --------------------------------------------------------------------------------------


def filled_pool(slots: int, blocks: int):
    """A tiered pool with `blocks` blocks in the host tier, number n of which holds n everywhere."""
    pool = make_pool(budget=10**6, host=10**5)
    layer = Layer(pool, blocks)
    pool.resize(slots)
    pool.host[layer.table] = layer.table[:, None].float().expand(-1, ELEMENTS)
    return pool, layer


def load(pool, blocks, use=True) -> torch.Tensor:
    blocks = torch.as_tensor(blocks)
    return acquire(pool.tiers(), blocks, torch.ones_like(blocks, dtype=torch.bool), "lru", load=True, use=use)


def check_residency(pool) -> None:
    for slot, block in enumerate(pool.block_in.tolist()):
        if block:
            assert pool.slot_of[block] == slot and (pool.kv[slot] == block).all()
    assert int((pool.slot_of > 0).sum()) == int((pool.block_in > 0).sum())
    assert pool.slot_of[0] == 0 and pool.block_in[0] == 0


@pytest.mark.parametrize("slots", [5, 9, 10, 11, 30])
def test_resizing_keeps_what_is_worth_most(slots):
    pool, layer = filled_pool(10, 20)
    ids = layer.table
    for block in ids[:9].tolist():
        load(pool, [block])
        pool.clock += 1
    pool.pinned[pool.slot_of[ids[0]]] = True  # the oldest, but pinned
    pool.resize(slots)
    check_residency(pool)
    assert pool.slots == slots
    kept = {block for block in pool.block_in.tolist() if block}
    newest = ids[1:9].flip(0).tolist()
    assert kept == {int(ids[0]), *newest[: max(0, min(8, slots - 2))]}
    assert pool.pinned[pool.slot_of[ids[0]]]
    assert torch.equal(read(pool.tiers(), ids)[:, 0], ids.float())


def test_what_resizing_evicts_is_remembered():
    """A block's use count outlives the smaller pool, as it outlives any other eviction."""
    pool, layer = filled_pool(10, 8)
    flags = torch.ones(8, dtype=torch.bool)
    acquire(pool.tiers(), layer.table, flags, "decayed", load=True, use=True)
    before = pool.priority[pool.slot_of[layer.table]].clone()
    pool.resize(4)
    pool.resize(10)
    slots = acquire(pool.tiers(), layer.table, flags, "decayed", load=True)
    assert torch.equal(pool.priority[slots], before)


def test_resizing_prefers_live_pinned_blocks_to_dead_ones():
    pool, layer = filled_pool(12, 5)
    dead = Layer(pool, 6)
    pool.host[dead.table] = dead.table[:, None].float().expand(-1, ELEMENTS)
    pool.pinned[load(pool, dead.table)] = True
    slots = load(pool, layer.table)
    pool.pinned[slots] = True
    pool.kv[slots] = -1.0  # open blocks: only the slot knows their content
    dead.table = None
    pool.resize(6)
    assert (pool.slot_of[layer.table] > 0).all()
    assert (pool.kv[pool.slot_of[layer.table]] == -1.0).all()


def test_sweeping_frees_the_slots_of_dead_blocks():
    pool, layer = filled_pool(10, 4)
    dead = Layer(pool, 4)
    load(pool, layer.table)
    pool.pinned[load(pool, dead.table)] = True
    gone = dead.table.clone()
    dead.table = None
    pool.drop()
    pool.sweep()
    assert (pool.slot_of[gone] == 0).all() and int(pool.pinned.sum()) == 1
    assert (pool.slot_of[layer.table] > 0).all()
    assert int((pool.priority == -math.inf).sum()) == pool.slots - 4


def test_a_recycled_id_does_not_show_old_content():
    pool, layer = filled_pool(10, 4)
    load(pool, layer.table)
    layer.table = None
    pool.drop()
    fresh = Layer(pool, 4).table
    assert (pool.slot_of[fresh] == 0).all()
