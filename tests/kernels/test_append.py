"""Appending tokens to blocks, against plain lists of tokens a row."""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.kernels.reference.append import append, split, unpin
from hf_sparse.kernels.reference.fetch import read
from tests.kernels.pools import make_tiers, unpack

SLOT_OF, PINNED = 2, 5
HEADS, P, KEY_DIM, VALUE_DIM, COLUMNS = 2, 4, 3, 5, 40


class Rows:
    """A table and empty tiers for `batch` rows, and the tokens that should be in them."""

    def __init__(self, batch: int, slots: int | None, dtype=torch.float32):
        ids = batch * HEADS * COLUMNS
        content = torch.full((1 + ids, P * (KEY_DIM + VALUE_DIM)), math.nan, dtype=dtype)
        self.tiers = [content] if slots is None else make_tiers(content, slots)
        self.table = (1 + torch.randperm(ids)).view(batch, HEADS, COLUMNS)
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.keys = [[[] for _ in range(HEADS)] for _ in range(batch)]
        self.values = [[[] for _ in range(HEADS)] for _ in range(batch)]

    def append(self, valid, sink_blocks=1, recent=1, policy="lru", dtype=torch.float32) -> None:
        """Append random tokens [B, q] of which `valid` count, as a layer does: unpin what leaves the tail, then write."""
        batch, count = valid.shape
        keys = torch.randn(batch, HEADS, count, KEY_DIM, dtype=dtype)
        values = torch.randn(batch, HEADS, count, VALUE_DIM, dtype=dtype)
        for b in range(batch):
            for h in range(HEADS):
                self.keys[b][h] += [keys[b, h, i] for i in range(count) if valid[b, i]]
                self.values[b][h] += [values[b, h, i] for i in range(count) if valid[b, i]]
        before, after = (
            self.tail_start(lengths, sink_blocks, recent)
            for lengths in (self.lengths, self.lengths + valid.sum(1))
        )
        column = torch.arange(COLUMNS)
        leaving = (column >= before[:, None]) & (column < after[:, None])
        unpin(self.tiers, self.table.flatten(), leaving[:, None].expand_as(self.table).flatten())
        append(self.tiers, self.table, self.lengths, keys, values, valid, P, sink_blocks, after, policy)

    @staticmethod
    def tail_start(lengths, sink_blocks, recent):
        return ((lengths - 1).clamp(min=0) // P - recent).clamp(min=sink_blocks)

    def check(self, sink_blocks=1, recent=1) -> None:
        dtype = self.tiers[0].dtype
        for b, (keys, values) in enumerate(zip(self.keys, self.values)):
            length = len(keys[0])
            assert self.lengths[b] == length
            for h in range(HEADS):
                rows = read(self.tiers, self.table[b, h])
                got_keys, got_values = split(rows, P, KEY_DIM, VALUE_DIM)
                if length:
                    assert torch.equal(got_keys.flatten(0, 1)[:length], torch.stack(keys[h]).to(dtype))
                    assert torch.equal(got_values.flatten(0, 1)[:length], torch.stack(values[h]).to(dtype))
        if len(self.tiers) > 1:
            self.check_tiers(sink_blocks, recent)

    def check_tiers(self, sink_blocks, recent) -> None:
        """Closed blocks are in the host tier; exactly the sink and the tail are pinned, in slots of their own."""
        host, slot_of, pinned = self.tiers[1], self.tiers[SLOT_OF], self.tiers[PINNED]
        expected = {0}
        for b, keys in enumerate(self.keys):
            length = len(keys[0])
            start = int(self.tail_start(self.lengths[b], sink_blocks, recent))
            for h in range(HEADS):
                for n in range(-(-length // P)):
                    block = self.table[b, h, n]
                    if (n + 1) * P <= length:
                        assert torch.equal(
                            unpack(host[block], P, KEY_DIM)[0], torch.stack(keys[h][n * P : (n + 1) * P])
                        )
                    if n < sink_blocks or n >= start:
                        assert slot_of[block] > 0, f"block {n} of row {b} should be pinned in a slot"
                        expected.add(int(slot_of[block]))
        assert set(pinned.nonzero().flatten().tolist()) == expected


SLOTS = [pytest.param(None, id="resident"), pytest.param(48, id="tiered")]


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize(
    "counts",
    [(1,) * 9, (4, 4), (3, 1, 1, 5), (23, 1, 1), (7, 8, 9), (90, 30)],
    ids=lambda counts: "+".join(map(str, counts)),
)
def test_whole_batches(slots, counts):
    rows = Rows(3, slots)
    for count in counts:
        rows.append(torch.ones(3, count, dtype=torch.bool))
        rows.check()


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("seed", range(3))
def test_padding_anywhere_is_not_stored(slots, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = Rows(3, slots)
    for count in (17, 1, 1, 6, 1, 30, 2, 1):
        rows.append(torch.rand(3, count, generator=generator) < 0.7)
        rows.check()
    assert len({len(keys[0]) for keys in rows.keys}) > 1


@pytest.mark.parametrize("slots", SLOTS)
def test_a_row_of_nothing_but_padding(slots):
    rows = Rows(2, slots)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[1] = False
    rows.append(valid)
    rows.check()
    rows.append(torch.ones(2, 1, dtype=torch.bool))
    rows.check()


@pytest.mark.parametrize("slots", SLOTS)
def test_tokens_beyond_a_row_are_not_written(slots):
    rows = Rows(1, slots)
    rows.append(torch.ones(1, 6, dtype=torch.bool))
    content = read(rows.tiers, rows.table[0, 0, 1:3])
    keys, values = split(content, P, KEY_DIM, VALUE_DIM)
    assert torch.isnan(keys[0, 2:]).all() and torch.isnan(values[0, 2:]).all()
    assert torch.isnan(content[1]).all()


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("count", [1, 9])
def test_tokens_take_the_pools_dtype(slots, count):
    rows = Rows(2, slots, dtype=torch.float16)
    rows.append(torch.ones(2, count, dtype=torch.bool))
    assert rows.tiers[0].dtype == torch.float16
    got = split(read(rows.tiers, rows.table[0, 0, :1]), P, KEY_DIM, VALUE_DIM)[0][0, 0]
    assert torch.equal(got, rows.keys[0][0][0].to(torch.float16))


@pytest.mark.parametrize("count", [1, 30])
def test_a_closed_block_is_written_through_once(count):
    """A later change of the slot (there is none in use) never reaches the host tier again."""
    rows = Rows(1, 48)
    for _ in range(30 // count):
        rows.append(torch.ones(1, count, dtype=torch.bool))
    block = rows.table[0, 0, 0]  # the sink: closed, and pinned in a slot
    before = rows.tiers[1][block].clone()
    rows.tiers[0][rows.tiers[SLOT_OF][block]] = -7.0
    for more in (1, 1, 9):
        rows.append(torch.ones(1, more, dtype=torch.bool))
    assert torch.equal(rows.tiers[1][block], before)
    assert (rows.tiers[0][rows.tiers[SLOT_OF][block]] == -7.0).all()


@pytest.mark.parametrize("recent", [0, 1, 3])
@pytest.mark.parametrize("sink_blocks", [0, 1, 2])
def test_what_is_pinned(sink_blocks, recent):
    rows = Rows(2, 60)
    for count in (5, 1, 1, 14, 1, 1, 1, 9):
        rows.append(torch.ones(2, count, dtype=torch.bool), sink_blocks, recent)
        rows.check(sink_blocks, recent)


def test_split_is_a_view():
    slots = torch.zeros(2, P * (KEY_DIM + VALUE_DIM))
    keys, values = split(slots, P, KEY_DIM, VALUE_DIM)
    keys[1, 2] = 1.0
    values[0, 3] = 2.0
    assert slots[1].sum() == KEY_DIM and slots[0].sum() == 2 * VALUE_DIM
    assert slots[1, 2 * KEY_DIM : 3 * KEY_DIM].eq(1).all()
