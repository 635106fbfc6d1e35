"""Prompts that end just before, at and just after the boundaries of blocks and of the units that codes are made of."""

from __future__ import annotations

import pytest
import torch

from tests.cache.drive import Text, decode, feed
from tests.cache.shadow import Shadow
from tests.cache.test_step import check

SMALL = dict(rows=1, heads=1, group=2, layers=1, key_dim=8)


def around(block_size: int, blocks: int) -> list[int]:
    """Lengths with T mod P in {P-1, 0, 1, 2}."""
    return [blocks * block_size + offset for offset in (-1, 0, 1, 2)]


SWEEP = [
    (size, length)
    for size, blocks in ((4, 6), (8, 5), (16, 3), (32, 3), (64, 2))
    for length in around(size, blocks)
]


@pytest.mark.parametrize("tiered", [False, True], ids=["resident", "tiered"])
@pytest.mark.parametrize(("block_size", "length"), SWEEP, ids=lambda value: str(value))
def test_exact_at_block_boundaries(block_size, length, tiered):
    budget = dict(host_memory="4MiB") if tiered else {}
    for digest in ("channel_codes", "key_bits"):
        text = Text(layers=2, key_dim=8)
        shadow = Shadow(text.cache(threshold=1.0, digest=digest, block_size=block_size, **budget), 2)
        shadow.feed(length, batch=2)
        shadow.decode(3)
        shadow.feed(block_size)
        shadow.decode(2)
        stats = shadow.cache.stats()
        assert stats["kv_fraction"] == 1.0 and stats["sparse_steps"] == 5


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_of_a_few_tokens(length):
    shadow = Shadow(Text(layers=2, key_dim=8).cache(threshold=0.5), 2)
    shadow.feed(length, batch=2)
    shadow.decode(12)


@pytest.mark.parametrize("length", around(128, 2) + [256 + 3, 256 + 126] + around(128, 1))
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_sparse_around_units_of_codes(block_size, length):
    """The float64 step agrees block for block where a unit of 128 tokens has just closed, or is about to."""
    stats = check(
        Text(length=length + 4, **SMALL),
        length,
        length + 4,
        block_size=block_size,
        threshold=0.5,
        round_blocks=1,
    )
    assert stats["kv_fraction"] < 1.0 or length <= 130


@pytest.mark.parametrize("length", around(4, 10) + around(16, 4))
@pytest.mark.parametrize("digest", ["key_bits", "min_max"])
def test_sparse_around_blocks(digest, length):
    rule = "window" if digest == "min_max" else "estimate"
    stats = check(
        Text(length=length + 5, **SMALL),
        length,
        length + 5,
        digest=digest,
        stop_rule=rule,
        threshold=0.5,
        round_blocks=1,
    )
    assert stats["kv_fraction"] < 1.0


@pytest.mark.parametrize("digest", ["key_bits", "channel_codes"])
def test_units_close_while_decoding(digest):
    """From before the second unit's end to beyond it, in steps and in a chunk."""
    stats = check(Text(length=264, **SMALL), 250, 264, digest=digest, threshold=0.6, round_blocks=1)
    assert stats["kv_fraction"] < 0.9


CHUNKS = {
    "tokens-7": [7] * 35 + [5],
    "blocks": [4] * 62 + [2],
    "halves": [125, 125],
    "units": [128, 122],
    "odd": [3, 126, 2, 119],
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunked_prefill_is_one_shot(name):
    """In chunks of any size the stored blocks, their digests and so every later selection are those of one forward."""
    text = Text(rows=2, length=260, layers=2, key_dim=8)
    check_same_after(text, [250], CHUNKS[name], 260, threshold=0.6, round_blocks=1)


@pytest.mark.parametrize("sizes", [[67, 1, 1, 1], [30, 40], [13, 9, 8, 40]], ids=str)
@pytest.mark.parametrize("sparse_queries", [False, True], ids=["", "sparse-queries"])
def test_what_sparse_steps_store_is_the_same(sizes, sparse_queries):
    """A prompt that partly came through the sparse step, in chunks or single tokens, leaves the same blocks behind."""
    text = Text(rows=2, length=76, layers=2, key_dim=8)
    check_same_after(
        text, [70], sizes, 76, digest="key_bits", threshold=0.6, round_blocks=1, sparse_queries=sparse_queries
    )


def check_same_after(text, one_way, another, end, **settings):
    results = []
    for sizes in (one_way, another):
        cache = text.cache(**settings)
        position = 0
        for size in sizes:
            feed(cache, text, position, position + size)
            position += size
        before = cache.stats()
        output = decode(cache, text, position, end)
        after = cache.stats()
        results.append((output, *(after[name] - before[name] for name in ("blocks_read", "blocks_held"))))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=2e-5)
    assert results[0][1:] == results[1][1:] and results[0][1] < results[0][2]


@pytest.mark.parametrize("cuts", [(0, 180, 400), (0, 400), (0, 90, 398, 400)], ids=str)
def test_holes_between_turns_leave_the_rows_as_they_are_alone(cuts):
    """The queries that order the channels are a row's last real ones, wherever its padding is."""
    text = Text(rows=2, length=410, layers=1, key_dim=8)
    settings = dict(threshold=0.6, round_blocks=1)
    valid = torch.ones(2, 410, dtype=torch.bool)
    valid[0, 180:270] = False  # the second turn of row 0 is short
    valid[1, :55] = False
    cache = text.cache(**settings)
    for low, high in zip(cuts, cuts[1:]):
        feed(cache, text, low, high, valid[:, :high])
    output = decode(cache, text, 400, 410)
    for row in range(2):
        one = text.select([row])
        for name in ("queries", "keys", "values"):
            setattr(one, name, [part[:, :, valid[row]] for part in getattr(one, name)])
        length = int(valid[row].sum())
        single = one.cache(**settings)
        feed(single, one, 0, length - 10)
        torch.testing.assert_close(
            output[:, row], decode(single, one, length - 10, length)[:, 0], rtol=0, atol=2e-5
        )
    assert cache.stats()["kv_fraction"] < 0.9


@pytest.mark.parametrize("pads", [[0, 3], [1, 2], [4, 8], [125, 0]], ids=str)
def test_padded_rows_are_the_rows_alone(pads):
    text = Text(rows=2, length=262, layers=2, key_dim=8)
    settings = dict(threshold=0.6, round_blocks=1)
    valid = torch.arange(262) >= torch.tensor(pads)[:, None]
    cache = text.cache(**settings)
    feed(cache, text, 0, 254, valid[:, :254])
    output = decode(cache, text, 254, 262)
    for row, pad in enumerate(pads):
        one = text.select([row], low=pad)
        single = one.cache(**settings)
        feed(single, one, 0, 254 - pad)
        torch.testing.assert_close(
            output[:, row], decode(single, one, 254 - pad, 262 - pad)[:, 0], rtol=0, atol=2e-5
        )
    assert cache.stats()["kv_fraction"] < 0.95
