"""Rows that are reordered, repeated, selected, cropped and forked go on as if they had always been what they are now."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.cache.drive import Text, decode, feed
from tests.cache.shadow import Shadow

P = 4
TIERS = {
    "resident": {},
    "tiered": dict(gpu_memory="90KiB", host_memory="4MiB"),
}
OPERATIONS = {
    "reorder": lambda shadow: shadow.reorder([2, 0, 0]),
    "reorder-same": lambda shadow: shadow.reorder([0, 1, 2]),
    "repeat": lambda shadow: shadow.repeat(2),
    "select": lambda shadow: shadow.select([2, 0]),
    "select-one": lambda shadow: shadow.select([1]),
    "select-more": lambda shadow: shadow.select([0, 1, 2, 1, 0]),
    "crop-1": lambda shadow: shadow.crop(1),
    "crop-in-block": lambda shadow: shadow.crop(2),
    "crop-blocks": lambda shadow: shadow.crop(11),
    "crop-most": lambda shadow: shadow.crop(shadow.length - 1),
    "repeat-select": lambda shadow: (shadow.repeat(3), shadow.select([8, 0, 4])),
    "reorder-crop-reorder": lambda shadow: (
        shadow.reorder([1, 1, 0]),
        shadow.crop(5),
        shadow.reorder([0, 2, 1]),
    ),
}


def make(tiers: str, layers=2, **settings) -> Shadow:
    text = Text(layers=layers, key_dim=8)
    settings = {"threshold": 1.0, "digest": "key_bits", **TIERS[tiers], **settings}
    return Shadow(text.cache(**settings), layers)


@pytest.mark.parametrize(
    ("length", "ragged"), [(39, False), (40, False), (41, True)], ids=["open-3", "boundary", "ragged"]
)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name, tiers, length, ragged):
    grows = name in ("repeat", "select-more", "repeat-select")
    shadow = make(tiers, **(dict(gpu_memory="240KiB") if tiers == "tiered" and grows else {}))
    valid = torch.arange(length) >= torch.tensor([[0], [7], [22]]) if ragged else None
    shadow.feed(length, batch=3, valid=valid)
    shadow.decode(2)
    OPERATIONS[name](shadow)
    shadow.decode(3)
    shadow.feed(6)
    shadow.decode(2)  # by now every block that the operation left open has closed
    assert shadow.cache.stats()["sparse_steps"] > 0
    assert shadow.cache.get_seq_length() == shadow.length and shadow.cache.batch_size == shadow.batch


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda cache: cache.fork()], ids=["deepcopy", "fork"])
@pytest.mark.parametrize("length", [39, 40, 41], ids=["open-3", "boundary", "open-1"])
def test_forks_go_their_own_ways(length, how, tiers):
    first = make(tiers, gpu_memory="200KiB" if tiers == "tiered" else "auto")
    first.feed(length, batch=2)
    first.decode(1)
    second = first.fork(how)
    third = second.fork(how)
    for _ in range(3):
        for shadow in (first, second, third):
            shadow.decode(3)
    second.crop(10)
    first.reorder([1, 0])
    third.repeat(2)
    for _ in range(2):
        for shadow in (third, first, second):
            shadow.decode(2)
    del first
    second.decode(5)
    third.feed(7)
    third.decode(2)


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_shares_closed_blocks(tiers):
    """A fork of a long prefix costs open blocks only."""
    shadow = make(tiers, gpu_memory="200KiB" if tiers == "tiered" else "auto")
    shadow.feed(42, batch=2)
    pool = shadow.cache.sparse_layers[0].pool
    before = pool.blocks_in_use()
    fork = shadow.fork()
    columns = shadow.cache.sparse_layers[0].columns
    assert before == 2 * 2 * 2 * columns
    assert pool.blocks_in_use() - before == 2 * 2 * 2 * (columns - 42 // P)
    fork.decode(1)
    shadow.decode(1)


@pytest.mark.parametrize("tiers", TIERS)
def test_select_by_flags(tiers):
    shadow = make(tiers)
    shadow.feed(41, batch=3)
    shadow.cache.batch_select_indices(torch.tensor([True, False, True]))
    shadow.take(torch.tensor([0, 2]))
    shadow.decode(5)


@pytest.mark.parametrize("tiers", TIERS)
def test_crop_to_nothing_and_start_again(tiers):
    shadow = make(tiers)
    shadow.feed(41, batch=2)
    shadow.crop(41)
    assert shadow.cache.get_seq_length() == 0
    shadow.feed(30)
    shadow.decode(3)


@pytest.mark.parametrize("tiers", TIERS)
def test_crop_by_more_than_there_is(tiers):
    shadow = make(tiers)
    shadow.feed(20, batch=2)
    shadow.crop(1000)
    assert shadow.cache.get_seq_length() == 0
    shadow.feed(20)


def test_crop_by_nothing_changes_nothing():
    shadow = make("resident")
    shadow.feed(41, batch=2)
    table = shadow.cache.sparse_layers[0].table
    shadow.crop(0)
    assert shadow.cache.sparse_layers[0].table is table
    shadow.decode(2)


def test_crop_with_a_length_to_keep():
    """Up to transformers 5.15 generate() gives crop() the length to keep, as a positive number."""
    shadow = make("resident")
    shadow.feed(41, batch=2)
    shadow.cache.crop(30)
    shadow.keys, shadow.values, shadow.valid = (
        shadow.keys[..., :30, :],
        shadow.values[..., :30, :],
        shadow.valid[:, :30],
    )
    shadow.decode(5)
    shadow.cache.crop(1000)
    assert shadow.cache.get_seq_length() == 35
    shadow.decode(1)


def test_crop_takes_tensors():
    shadow = make("resident")
    shadow.feed(41, batch=2)
    shadow.cache.crop(torch.tensor(-3))
    shadow.keys, shadow.values, shadow.valid = (
        shadow.keys[..., :38, :],
        shadow.values[..., :38, :],
        shadow.valid[:, :38],
    )
    shadow.decode(3)


@pytest.mark.parametrize("tiers", TIERS)
def test_crop_gives_blocks_back(tiers):
    shadow = make(tiers)
    shadow.feed(120, batch=2)
    pool = shadow.cache.sparse_layers[0].pool
    shadow.crop(100)
    assert pool.blocks_in_use() == 2 * 2 * 2 * (20 // P)
    shadow.decode(2)


@pytest.mark.parametrize("name", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_operations_on_an_empty_cache(name):
    shadow = make("resident")
    getattr(shadow.cache, name)(2 if name == "batch_repeat_interleave" else torch.tensor([0]))
    shadow.feed(20, batch=2)


def test_many_rows_selected_down_in_a_small_pool():
    """What dropped rows had pinned must not take the place of what is kept, in any layer."""
    text = Text(rows=150, length=60, layers=4, key_dim=8)
    one = text.select([149])
    settings = dict(threshold=1.0, digest="key_bits", host_memory="8MiB")
    alone = one.cache(**settings)
    feed(alone, one, 0, 42)
    expected = decode(alone, one, 42, 58)
    cache = text.cache(**settings)
    feed(cache, text, 0, 42)
    cache.batch_select_indices(torch.tensor([149]))
    torch.testing.assert_close(decode(cache, one, 42, 58), expected, rtol=0, atol=1e-5)


def test_cropping_into_the_first_block_again_and_again():
    """A reopened sink block is pinned; the ones before it must not stay so."""
    long = make("tiered")
    long.feed(150, batch=1)
    long.reset()
    shadow = make("tiered")
    shadow.feed(3, batch=1)
    pool = shadow.cache.sparse_layers[0].pool
    for _ in range(100):
        shadow.feed(4)
        shadow.crop(4)
    assert int(pool.pinned.sum()) <= 1 + sum(layer.pinned_blocks(1) for layer in shadow.cache.sparse_layers)
    shadow.feed(60)
    shadow.decode(5)


def test_reordering_again_and_again_pins_no_more():
    """What a beam leaves behind may be evicted: in a small pool its open blocks would soon fill all slots."""
    shadow = make("tiered")
    shadow.feed(41, batch=3)
    pool = shadow.cache.sparse_layers[0].pool
    for index in ([0, 0, 1], [2, 1, 0], [1, 1, 1], [0, 1, 2]) * 4:
        shadow.reorder(index)
        assert int(pool.pinned.sum()) <= 1 + sum(
            layer.pinned_blocks(3) for layer in shadow.cache.sparse_layers
        )
        shadow.decode(1)


# -- below threshold 1: which blocks are read depends on digests, and those travel with the rows ---------------------


def alone(text: Text, row: int, prompt: int, end: int, settings: dict) -> torch.Tensor:
    one = text.select([row])
    cache = one.cache(**settings)
    feed(cache, one, 0, prompt)
    return decode(cache, one, prompt, end)


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("digest", ["channel_codes", "key_bits", "min_max"])
@pytest.mark.parametrize("operation", ["reorder", "repeat", "select", "fork", "crop"])
def test_sparse_rows_keep_their_selection(operation, digest, tiers):
    """After every operation each row gives what it gives alone, skipping blocks; units of codes close in between."""
    prompt, middle, end = 240, 243, 264
    text = Text(rows=3, length=end, layers=2, key_dim=8)
    budget = dict(gpu_memory="360KiB", host_memory="8MiB") if tiers == "tiered" else {}
    settings = dict(
        threshold=0.7,
        digest=digest,
        stop_rule="window" if digest == "min_max" else "estimate",
        round_blocks=2,
        **budget,
    )
    expected = {
        row: alone(text, row, prompt, end, settings) for row in ((2, 0) if operation == "reorder" else (1,))
    }
    cache = text.cache(**settings)
    feed(cache, text, 0, prompt)
    decode(cache, text, prompt, middle)
    rows = [0, 1, 2]
    if operation == "reorder":
        rows = [2, 0, 0]
        cache.reorder_cache(torch.tensor(rows))
    elif operation == "repeat":
        cache.batch_repeat_interleave(2)
        rows = [0, 0, 1, 1, 2, 2]
    elif operation == "select":
        rows = [1]
        cache.batch_select_indices(torch.tensor(rows))
    elif operation == "fork":
        fork = cache.fork()
        other = Text(rows=3, length=end, layers=2, key_dim=8, seed=9)
        decode(
            cache, other, middle, end
        )  # the original goes on with other tokens and closes units of its own
        cache = fork
    else:
        other = Text(rows=3, length=end, layers=2, key_dim=8, seed=9)
        decode(
            cache, other, middle, middle + 15
        )  # closes the unit at token 256 with tokens that are taken back
        cache.crop(-15)
        feed(cache, text, middle, middle + 15)  # the right tokens, in one go, close the unit again
        middle += 15
    output = decode(cache, text.select(rows), middle, end)
    for i, row in enumerate(rows):
        if row not in expected:
            continue
        torch.testing.assert_close(output[:, i], expected[row][:, 0, middle - prompt :], rtol=0, atol=2e-5)
    assert cache.stats()["kv_fraction"] < 0.8
