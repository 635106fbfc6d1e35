"""Residency: who gets a slot, who is evicted, what is counted, against a plain simulation with lists and dicts."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_sparse.kernels.reference.fetch import acquire, read
from tests.kernels.pools import make_tiers

SLOT_OF, BLOCK_IN, PRIORITY, PINNED, CLOCK, COUNTERS = 2, 3, 4, 5, 6, 7
POLICIES = ["lru", "fifo", "decayed"]


class Simulated:
    """What a pool of `slots` slots does under a policy, from the policies' definitions."""

    def __init__(self, policy: str, slots: int):
        self.policy, self.now, self.hits, self.misses = policy, 0.0, 0, 0
        self.block_in = [None] * slots  # slot 0 stays empty
        self.loaded, self.uses, self.pinned = {}, {}, set()

    def worth(self, slot: int) -> tuple:
        """Sort key: the smallest is evicted, free slots first, ties by slot."""
        block = self.block_in[slot]
        if block is None:
            return (-math.inf, slot)
        if self.policy == "fifo":
            return (self.loaded[block], slot)
        if self.policy == "lru":
            return (max([self.loaded[block], *self.uses[block]]), slot)
        return (sum(0.9 ** (self.now - time) for time in self.uses[block]), slot)

    def acquire(self, wanted: list[int], use: bool) -> None:
        held = {self.block_in.index(block) for block in wanted if block in self.block_in} | self.pinned
        victims = sorted((slot for slot in range(1, len(self.block_in)) if slot not in held), key=self.worth)
        missing = [block for block in dict.fromkeys(wanted) if block not in self.block_in]
        self.hits += sum(block in self.block_in for block in wanted)
        self.misses += len(missing)
        for block, slot in zip(missing, victims):
            self.block_in[slot] = block
            self.loaded[block] = self.now
            self.uses.setdefault(block, [])  # counts outlive eviction
        if use:
            for block in set(wanted):
                self.uses[block].append(self.now)


def check_consistent(tiers) -> None:
    """slot_of and block_in are inverse to each other and the scratch pair is apart."""
    slot_of, block_in = tiers[SLOT_OF], tiers[BLOCK_IN]
    assert slot_of[0] == 0 and block_in[0] == 0
    for slot in range(1, block_in.shape[0]):
        if block_in[slot]:
            assert slot_of[block_in[slot]] == slot
    resident = (slot_of > 0).nonzero().flatten().tolist()
    assert sorted(resident) == sorted(block for block in block_in.tolist() if block)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_accesses_follow_the_policy(policy, seed):
    rng = random.Random(seed)
    blocks, slots = 40, 14
    content = torch.arange(1.0 + blocks)[:, None].repeat(1, 3)
    tiers = make_tiers(content, slots)
    simulated = Simulated(policy, slots)
    for step in range(120):
        wanted = [
            rng.choice(range(1, 12)) if rng.random() < 0.6 else rng.randint(1, blocks) for _ in range(6)
        ]
        flags = torch.tensor([rng.random() < 0.9 for _ in wanted])
        asked = [block for block, flag in zip(wanted, flags) if flag]
        got = acquire(tiers, torch.tensor(wanted), flags, policy, load=True, use=True, count=True)
        simulated.acquire(asked, use=True)
        assert (got[~flags] == 0).all()
        assert torch.equal(tiers[0][got[flags]], content[asked])
        assert [block or 0 for block in simulated.block_in] == tiers[BLOCK_IN].tolist(), f"step {step}"
        assert tiers[COUNTERS].tolist() == [simulated.hits, simulated.misses]
        check_consistent(tiers)
        tiers[CLOCK] += 0.5
        simulated.now += 0.5
    assert simulated.hits > 50 and simulated.misses > 50


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_slots_are_never_victims(policy):
    content = torch.arange(31.0)[:, None]
    pinned = (3, 4, 5)
    tiers = make_tiers(content, 10, resident=(1, 2, 3, 4, 5), pinned=pinned)
    for low in range(6, 30, 3):
        got = acquire(
            tiers, torch.arange(low, low + 3), torch.ones(3, dtype=torch.bool), policy, load=True, use=True
        )
        assert torch.equal(tiers[0][got].flatten(), content[low : low + 3].flatten())
        tiers[CLOCK] += 1
    for block in pinned:
        slot = tiers[SLOT_OF][block]
        assert slot > 0 and tiers[0][slot] == content[block]
    assert tiers[SLOT_OF][1] == 0 and tiers[SLOT_OF][2] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_what_one_call_wants_does_not_evict_itself(policy):
    """With exactly as many slots as blocks wanted, half of them resident at the lowest priority."""
    content = torch.arange(11.0)[:, None]
    tiers = make_tiers(content, 7, resident=(1, 2, 3))
    blocks = torch.tensor([8, 1, 9, 2, 10, 3])
    got = acquire(tiers, blocks, torch.ones(6, dtype=torch.bool), policy, load=True, use=True)
    assert len(set(got.tolist())) == 6 and 0 not in got
    assert torch.equal(tiers[0][got].flatten(), content[blocks].flatten())


def test_equal_blocks_share_a_slot():
    content = torch.arange(11.0)[:, None]
    tiers = make_tiers(content, 5, resident=(1,))
    blocks = torch.tensor([7, 1, 7, 7, 1, 9])
    got = acquire(tiers, blocks, torch.ones(6, dtype=torch.bool), "lru", load=True, count=True).tolist()
    assert got[0] == got[2] == got[3] and got[1] == got[4] == 1
    assert len({got[0], got[1], got[5]}) == 3
    assert tiers[COUNTERS].tolist() == [2, 2]  # two hits on block 1; 7 and 9 were fetched once each
    check_consistent(tiers)


def test_nothing_wanted_changes_nothing():
    tiers = make_tiers(torch.arange(11.0)[:, None], 5, resident=(1, 2))
    before = [part.clone() for part in tiers]
    got = acquire(
        tiers,
        torch.tensor([3, 4, 1]),
        torch.zeros(3, dtype=torch.bool),
        "lru",
        load=True,
        use=True,
        count=True,
    )
    assert got.tolist() == [0, 0, 0]
    for index in (SLOT_OF, BLOCK_IN, COUNTERS):
        assert torch.equal(tiers[index], before[index])
    torch.testing.assert_close(tiers[0][1:], before[0][1:], rtol=0, atol=0, equal_nan=True)


def test_without_load_the_content_is_the_callers():
    content = torch.arange(11.0)[:, None]
    tiers = make_tiers(content, 5)
    tiers[0].fill_(-1)
    got = acquire(tiers, torch.tensor([3]), torch.ones(1, dtype=torch.bool), "lru", load=False)
    assert tiers[0][got] == -1 and tiers[SLOT_OF][3] == got


def test_resident_pool_needs_no_lookup():
    kv = torch.arange(6.0)[:, None]
    got = acquire(
        [kv],
        torch.tensor([4, 2, 5]),
        torch.tensor([True, False, True]),
        "lru",
        load=True,
        use=True,
        count=True,
    )
    assert got.tolist() == [4, 0, 5]
    assert read([kv], torch.tensor([4, 2])).flatten().tolist() == [4.0, 2.0]


def test_read_prefers_the_slot_and_changes_nothing():
    content = torch.arange(11.0)[:, None]
    tiers = make_tiers(content, 5, resident=(1, 2))
    tiers[0][1] = 100.0  # an open block: its slot is ahead of the host tier
    before = [part.clone() for part in tiers]
    assert read(tiers, torch.tensor([1, 2, 7, 1])).flatten().tolist() == [100.0, 2.0, 7.0, 100.0]
    for part, old in zip(tiers[1:], before[1:]):
        assert torch.equal(part, old)
