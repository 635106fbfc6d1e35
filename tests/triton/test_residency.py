"""The kernels of a tiered pool, interpreted, against a plain model of who has a slot, who was used and what is where.

Programs run one after the other here, so that races don't show; residency.py says why there are none.
"""
from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_sparse.eviction import POLICIES as RULES
from hf_sparse.kernels import tiering
from hf_sparse.kernels.descriptor import FIELDS, HOST
from hf_sparse.kernels.residency import CURSOR, FAILED, MISSED, POLICIES, QUEUED, TICK, admit_kernel, settle_kernel, touch_kernel

P, UB, SINK, RECENT, TAIL = 2, 2, 1, 1, 2                   # tokens a block, blocks a unit, and of the forced blocks
EVICTION = ["lru", "fifo", "decayed"]


@pytest.fixture(autouse=True)
def small_launches(monkeypatch):
    small = tiering.Tuning(fetch_programs=3, victim_programs=3, count_tile=16, queue_tile=8, fetch_tile=64)
    monkeypatch.setattr(tiering, "TUNING", small)


def rule(policy: str, name: str, priority: torch.Tensor, clock: torch.Tensor) -> torch.Tensor:
    """A policy's function of one priority."""
    return getattr(RULES[policy], name)(priority.reshape(1), clock.reshape(1))[0]


def tail_start(length: int) -> int:
    """First block of the tail in the step that stores token `length` (LayerBlocks.tail_start of a row one longer)."""
    return max(min(length // (P * UB) * UB, length // P - RECENT), SINK)


class Tier:
    """Layers of one pool with random blocks in the host tier, and a step at a time through the kernels."""

    def __init__(self, slots: int, policy: str, batch=2, heads=2, layers=2, columns=24, length=21, block_bytes=48,
                 victims=16, seed=0, shared=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.policy, self.batch, self.heads, self.layers, self.columns = policy, batch, heads, layers, columns
        self.block_bytes = block_bytes
        rows = batch * heads
        ids = 1 + layers * rows * columns
        self.table = (1 + torch.randperm(ids - 1, generator=self.generator)).view(layers, batch, heads, columns)
        self.table[:, 1:, :, :shared] = self.table[:, :1, :, :shared]                   # rows of a beam search
        full = lambda size, value, dtype=torch.float64: torch.full((size,), value, dtype=dtype)  # noqa: E731
        self.pool = SimpleNamespace(
            slots=slots, kv=torch.zeros(slots, block_bytes, dtype=torch.uint8), host=self.random(ids),
            slot_of=full(ids, 0, torch.int64), block_in=full(slots, 0, torch.int64), priority=full(slots, -math.inf),
            pinned=full(slots, False, torch.bool), history=full(ids, -math.inf), clock=full(1, 3.0),
            counters=full(2, 0, torch.int64))
        self.pool.pinned[0] = True
        self.lengths = torch.full((layers, batch), length, dtype=torch.int64)
        self.ranked = torch.zeros(rows, columns, dtype=torch.int64)
        self.info = torch.zeros(rows, 8, dtype=torch.int32)
        self.work = tiering.TierWork(slots, rows * columns, victims, torch.device("cpu"))
        self.descs = torch.zeros(layers, FIELDS, dtype=torch.int64)
        for layer in range(layers):
            first = [self.table[layer].data_ptr(), self.lengths[layer].data_ptr(), self.pool.kv.data_ptr()]
            self.descs[layer, :3] = torch.tensor(first)
            self.descs[layer, 12] = self.ranked.data_ptr()
            self.descs[layer, 16], self.descs[layer, 19] = columns, columns
            numbers = self.work.numbers(self.pool)
            self.descs[layer, HOST.value:HOST.value + len(numbers)] = torch.tensor(numbers)
        self.unwritten: set = set()                                                    # just opened
        self.content = self.pool.host.clone()                                          # what every block should hold
        for layer in range(layers):                                                    # as prefill leaves it
            for b in range(batch):
                for n in [*range(SINK), *range(tail_start(length - 1), -(-length // P))]:
                    for block in self.table[layer, b, :, n].tolist():
                        self.place(block)

    def random(self, rows: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, self.block_bytes), generator=self.generator, dtype=torch.uint8)

    def place(self, block: int, pinned: bool = True) -> None:
        """Put a block into the first free slot."""
        pool = self.pool
        if pool.slot_of[block] == 0:
            slot = 1 + int((pool.block_in[1:] == 0).nonzero()[0])
            pool.slot_of[block], pool.block_in[slot] = slot, block
            pool.kv[slot], pool.pinned[slot] = self.content[block], pinned
            pool.priority[slot] = rule(self.policy, "on_load", pool.history[block], pool.clock)

    @property
    def resident(self) -> dict:
        """{block: slot}"""
        return {block: slot for slot, block in enumerate(self.pool.block_in.tolist()) if block}

    def state(self, field) -> int:
        return int(self.work.state[field.value])

    # -- the kernels --------------------------------------------------------------------------------------------------
    def queue(self) -> list[int]:
        tiering.queue_victims(self.descs[0], self.policy)
        return self.work.queue[:self.state(QUEUED)].tolist()

    def admit(self) -> None:
        for desc in self.descs:
            admit_kernel[(self.batch * self.heads,)](desc, H=self.heads, P=P, POLICY=POLICIES[self.policy])

    def settle(self, layer: int) -> None:
        settle_kernel[(self.batch * self.heads,)](
            self.descs[layer], H=self.heads, P=P, UB=UB, SINK=SINK, RECENT=RECENT, TAIL=TAIL,
            **tiering.copy_types(self.block_bytes), POLICY=POLICIES[self.policy])

    def touch(self, layer: int, wanted: list[list[int]]) -> None:
        """`wanted`: block numbers of each row and KV head."""
        for row, numbers in enumerate(wanted):
            self.ranked[row, :len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
            self.info[row, 0] = len(numbers)
        touch_kernel[(len(wanted),)](self.descs[layer], self.info, POLICY=POLICIES[self.policy], TILE=8)

    def fetch(self) -> None:
        tiering.Tier(self.block_bytes, self.policy, self.layers).fetch(self.descs[0])

    # -- what must hold -----------------------------------------------------------------------------------------------
    def draw(self, layer: int, most: int) -> list[list[int]]:
        """Up to `most` ranked blocks of each row and KV head, in any order."""
        wanted = []
        for b in range(self.batch):
            candidates = torch.arange(SINK, tail_start(int(self.lengths[layer, b])))
            for _ in range(self.heads):
                count = int(torch.randint(0, most + 1, (), generator=self.generator))
                wanted.append(candidates[torch.randperm(len(candidates), generator=self.generator)[:count]].tolist())
        return wanted

    def blocks(self, layer: int, wanted: list[list[int]]) -> list[int]:
        rows = self.table[layer].flatten(0, 1)
        return [int(rows[row, n]) for row, numbers in enumerate(wanted) for n in numbers]

    def check(self) -> None:
        """The maps are inverse, and every block is what it should be."""
        pool = self.pool
        assert {block: int(slot) for block, slot in enumerate(pool.slot_of) if slot != 0} == self.resident
        assert len(self.resident) == int((pool.block_in > 0).sum())                    # a block in one slot
        assert pool.block_in[0] == 0 and pool.slot_of[0] == 0
        assert torch.equal(pool.priority[1:] == -math.inf, pool.block_in[1:] == 0)
        written = {block: slot for block, slot in self.resident.items() if block not in self.unwritten}
        for block, slot in written.items():
            assert torch.equal(pool.kv[slot], self.content[block])

    def read(self, layer: int, wanted: list[list[int]]) -> tuple[list[int], list[int]]:
        """A layer's touch and fetch, checked; returns the blocks fetched and those evicted."""
        pool = self.pool
        blocks, before, counters = self.blocks(layer, wanted), self.resident, pool.counters.clone()
        priority, pinned, history, clock = (x.clone() for x in (pool.priority, pool.pinned, pool.history, pool.clock))
        tick, failed = self.state(TICK), self.state(FAILED)
        self.touch(layer, wanted)
        missing = sorted(set(blocks) - set(before))
        assert sorted(self.work.misses[:self.state(MISSED)].tolist()) == missing
        assert sorted((pool.slot_of < 0).nonzero().flatten().tolist()) == missing
        assert (pool.counters - counters).tolist() == [sum(block in before for block in blocks), len(missing)]
        used = {before[block] for block in blocks if block in before}
        assert {int(slot) for slot in (self.work.use == tick).nonzero()} >= used
        for slot in used:
            priority[slot] = rule(self.policy, "on_use", priority[slot], clock)
        torch.testing.assert_close(pool.priority, priority, rtol=1e-13, atol=0)

        self.fetch()
        now = self.resident
        fetched, evicted = sorted(set(now) - set(before)), sorted(set(before) - set(now))
        assert len(fetched) == len(missing) - (self.state(FAILED) - failed) and set(fetched) <= set(missing)
        assert all(now[block] == slot for block, slot in before.items() if block in now)
        assert not any(pinned[before[block]] or before[block] in used for block in evicted)
        assert torch.equal(pool.pinned, pinned)
        for block in evicted:
            history[block] = priority[before[block]]
        assert torch.equal(pool.history, history)
        for block in fetched:
            loaded = rule(self.policy, "on_load", history[block], clock)
            priority[now[block]] = rule(self.policy, "on_use", loaded, clock)
            assert self.work.use[now[block]] == tick
        torch.testing.assert_close(pool.priority, priority, rtol=1e-13, atol=0)
        assert (self.state(TICK), self.state(MISSED)) == (tick + 1, 0)
        assert pool.clock == clock + 1 / self.layers
        self.check()
        return fetched, evicted

    def store_token(self, layer: int) -> None:
        """What the append kernel does: its token, here new contents of the open block, and `settle`."""
        pool = self.pool
        for b in range(self.batch):
            length = int(self.lengths[layer, b])
            for block in self.table[layer, b, :, length // P].tolist():
                slot = int(pool.slot_of[block])
                assert slot > 0 and pool.pinned[slot]
                pool.kv[slot] = self.content[block] = self.random(1)[0]
                self.unwritten.discard(block)
        host, pinned = pool.host.clone(), pool.pinned.clone()
        self.settle(layer)
        for b in range(self.batch):
            length = int(self.lengths[layer, b])
            if (length + 1) % P == 0:
                for block in self.table[layer, b, :, length // P].tolist():
                    host[block] = self.content[block]
            for n in range(tail_start(length - 1), tail_start(length)):
                for block in self.table[layer, b, :, n].tolist():
                    pinned[pool.slot_of[block]] = False
        assert torch.equal(pool.host, host) and torch.equal(pool.pinned, pinned)

    def token(self, most: int) -> int:
        """A whole token; returns how many blocks were fetched."""
        self.queue()
        before = self.resident
        opened = {int(block) for layer in range(self.layers) for b in range(self.batch)
                  if self.lengths[layer, b] % P == 0 for block in self.table[layer, b, :, self.lengths[layer, b] // P]}
        pinned = {block for block, slot in before.items() if self.pool.pinned[slot]}
        self.unwritten = opened - set(before)
        self.admit()
        self.check()
        assert opened <= set(self.resident) and pinned <= set(self.resident)
        assert {block for block, slot in self.resident.items() if self.pool.pinned[slot]} == pinned | opened
        fetched = 0
        for layer in range(self.layers):
            self.store_token(layer)
            fetched += len(self.read(layer, self.draw(layer, most))[0])
            self.lengths[layer] += 1
        return fetched


def smallest(batch, heads, layers, most) -> int:
    """Slots of the smallest pool: scratch, sink, tail and an opening block of every row, and one layer's reads."""
    return 1 + batch * heads * (layers * (SINK + max(RECENT + 1, UB) + 1) + most)


@pytest.mark.parametrize("policy", EVICTION)
@pytest.mark.parametrize("extra", [0, 1, 13, 200], ids=["smallest", "one-more", "small", "all-fit"])
def test_random_tokens(policy, extra):
    tier = Tier(smallest(2, 2, 2, 5) + extra, policy, seed=extra)
    assert sum(tier.token(5) for _ in range(11)) > 20 and tier.state(FAILED) == 0


@pytest.mark.parametrize("policy", EVICTION)
def test_rows_that_share_blocks(policy):
    """Beams: what several rows want is fetched, used, unpinned and counted as one block."""
    tier = Tier(smallest(3, 1, 2, 6), policy, batch=3, heads=1, shared=10, length=20, seed=5)
    misses = sum(tier.token(6) for _ in range(9))
    assert int(tier.pool.counters[1]) == misses and tier.state(FAILED) == 0
    # One block for all of them, the first time and again.
    block = next(n for n in range(1, 9) if int(tier.table[0, 0, 0, n]) not in tier.resident)
    assert [len(tier.read(0, [[block]] * 3)[0]) for _ in range(2)] == [1, 0]


def test_a_shared_block_is_admitted_once():
    tier = Tier(60, "lru", batch=3, heads=2, layers=2, shared=11, length=20)
    before = set(tier.resident)
    tier.admit()
    tier.unwritten = set(tier.resident) - before
    assert tier.unwritten == set(tier.table[:, 0, :, 10].flatten().tolist())
    tier.check()


@pytest.mark.parametrize("block_bytes", [48, 208, 20, 14, 7], ids=["wide", "several-tiles", "int32", "int16", "int8"])
def test_any_size_of_block(block_bytes):
    tier = Tier(smallest(1, 2, 1, 4), "lru", batch=1, layers=1, block_bytes=block_bytes, seed=block_bytes)
    assert sum(tier.token(4) for _ in range(6)) > 5


def test_nothing_all_hits_and_all_misses():
    tier = Tier(60, "decayed", length=31)
    wanted = [[4, 2, 9], [1, 3, 5], [7, 2, 8], [6, 1, 10]]
    assert tier.read(0, [[], [], [], []]) == ([], [])
    assert len(tier.read(0, wanted)[0]) == 12
    assert tier.read(0, wanted) == ([], [])
    assert tier.pool.counters.tolist() == [12, 12]


@pytest.mark.parametrize("policy", EVICTION)
@pytest.mark.parametrize("room", [7, 64, 500], ids=["short", "medium", "all"])
def test_the_queue_holds_free_slots_and_then_the_lowest_priorities(policy, room):
    slots = 301
    tier = Tier(slots, policy, layers=1, columns=80, victims=room, seed=room)
    pool, generator = tier.pool, tier.generator
    pool.clock[0] = 1000.7
    for block in range(1, 240):
        tier.place(block, pinned=False)
    top = 1000.7 * (-math.log(0.9) if policy == "decayed" else 1.0)
    age = torch.exp(torch.rand(slots, generator=generator, dtype=torch.float64) * 14 - 5)
    age[20:60] = age[60:100]
    pool.priority[pool.block_in > 0] = (top - age)[pool.block_in > 0]
    pool.priority[5] = pool.priority[150] = -1e30                                       # never used
    pool.pinned[torch.randperm(slots, generator=generator)[:90]] = True
    queue = tier.queue()

    free = [slot for slot in range(1, slots) if pool.block_in[slot] == 0 and not pool.pinned[slot]]
    held = [slot for slot in range(1, slots) if pool.block_in[slot] != 0 and not pool.pinned[slot]]
    youngest = top + 3 if policy == "decayed" else top
    bits = np.maximum((youngest - pool.priority).to(torch.float32).numpy(), np.float32(2.0**-7)).view(np.int32) >> 19
    held.sort(key=lambda slot: (-min(bits[slot], bits.min() + 32 * 16), slot))
    assert queue == (free + held)[:room]
    # In terms of age: never out of order by more than a sixteenth of an octave's start.
    ages = [youngest - float(pool.priority[slot]) for slot in queue[len(free):]]
    assert all(later <= earlier * 17 / 16 or later <= 2**-6 for earlier, later in zip(ages, ages[1:]))
    # It is as good a queue the next time, and starts from its front.
    tier.work.state[CURSOR.value] = 5
    assert tier.queue() == queue and tier.state(CURSOR) == 0


@pytest.mark.parametrize("policy", EVICTION)
def test_victims_come_in_the_order_of_the_queue(policy):
    """What has been used or pinned since the queue was filled is passed over, later too; then the hand takes over."""
    tier = Tier(1 + 3 + 14, policy, batch=1, heads=1, layers=1, length=46, victims=9, seed=3)
    row = tier.table[0, 0, 0].tolist()
    for n in range(1, 15):
        tier.pool.clock += 1
        tier.read(0, [[n]])
        queue = tier.queue()
    assert [int(tier.pool.block_in[slot]) for slot in queue] == row[1:10]
    tier.read(0, [[2, 4]])                                  # used since
    tier.pool.pinned[queue[2]] = True                       # number 3
    stamp = int(tier.work.use[queue[2]])
    assert tier.read(0, [[15, 16]])[1] == sorted([row[1], row[5]])
    assert tier.read(0, [[17, 18, 6]])[1] == sorted([row[7], row[8]])
    evicted = tier.read(0, [[1, 5, 7]])[1]                  # one is left in the queue, number 9
    assert row[9] in evicted and len(evicted) == 3 and row[3] not in evicted
    assert tier.work.use[queue[2]] == stamp                 # proposed, and left as it was


def test_what_finds_no_slot_stays_in_the_host_tier():
    tier = Tier(1 + 3 + 4, "lru", batch=1, heads=1, layers=1, length=40)
    fetched, _ = tier.read(0, [[1, 2, 3, 4, 5, 6]])
    assert len(fetched) == 4 and tier.state(FAILED) == 2
    fetched, evicted = tier.read(0, [[7, 8, 9]])
    assert len(fetched) == len(evicted) == 3 and tier.state(FAILED) == 2


@pytest.mark.parametrize("policy", EVICTION)
def test_a_block_that_leaves_the_tail_counts_as_used_until_then(policy):
    """As the reference, which uses forced blocks at every step, would have it after many of them."""
    tier = Tier(60, policy, batch=1, heads=1, layers=1, length=8 * P * UB)
    block = int(tier.table[0, 0, 0, tail_start(8 * P * UB - 1)])
    slot, clock = tier.resident[block], 300
    times = torch.arange(clock, dtype=torch.float64)
    priority = rule(policy, "on_load", torch.tensor(-math.inf, dtype=torch.float64), times[0])
    for now in times:
        priority = rule(policy, "on_use", priority, now)
    tier.pool.clock[0] = clock
    tier.pool.priority[slot] = 0.0
    tier.admit()
    tier.store_token(0)
    assert not tier.pool.pinned[slot]
    expected = 0.0 if policy == "fifo" else priority.item()
    assert tier.pool.priority[slot].item() == pytest.approx(expected, abs=1e-9)


def test_admitting_a_block_that_is_resident_only_pins_it():
    tier = Tier(60, "lru", batch=1, heads=1, layers=1, length=20)
    block = int(tier.table[0, 0, 0, 20 // P])
    tier.place(block, pinned=False)
    slot, before = tier.resident[block], tier.resident
    tier.queue()
    tier.admit()
    tier.check()
    assert tier.resident == before and tier.pool.pinned[slot]


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.triton.compile_residency", str(capability)], text=True,
                          capture_output=True, timeout=600, check=False,
                          env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    built = re.findall(rf"sm_{capability} (\w+)_kernel (\d+) bytes \w+: (\d+) bytes(, wide loads)?", done.stdout)
    assert [name for name, *_ in built] == [
        "fetch", "fetch", "count_victims", "queue_victims", "admit", "order", "touch", "touch", "settle"] * 3
    assert all(int(size) > 1000 for *_, size, _ in built)
    assert [bool(wide) for name, *_, wide in built if name == "fetch"] == [
        True, True, True, True, False, False]               # 16 bytes a thread; the second is of a prefetch
