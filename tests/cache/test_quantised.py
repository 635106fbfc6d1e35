"""A cache whose closed blocks are quantised: what it returns is attention over what it holds, and it holds few bytes.

Here the reference takes the steps; tests/triton/test_quantised_step.py compares the kernels with it.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_sparse import PSACache, PSAConfig
from hf_sparse.cache.exact_blocks import ExactBlocks
from hf_sparse.kernels.reference import append_packed
from hf_sparse.kernels.reference.exact_blocks import SLACK_BLOCKS
from hf_sparse.kernels.reference.quantise import dequantise_blocks, packed_bytes, quantise_blocks
from tests.cache.drive import Text, decode, feed, model_config, run, smallest_budget

P = 16
SETTINGS = dict(block_size=P, threshold=1.0, digest="key_bits", compile=False)
TIERED = dict(gpu_memory="420KiB", host_memory="4MiB")


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setattr("hf_sparse.cache.state.use_kernels", lambda *_: False)


def cache_of(text: Text, **settings) -> PSACache:
    """Of any dims: the configs of models don't take odd ones."""
    return PSACache(model_config(text.layers, text.heads, text.group), min_context=0, **settings)


def through_codes(keys: torch.Tensor, values: torch.Tensor, bits: int):
    """Keys [.., T, D] and values of which all closed blocks have been through their codes."""
    closed = keys.shape[-2] // P * P
    parts = [part[..., :closed, :].unflatten(-2, (-1, P)) for part in (keys, values)]
    parts = dequantise_blocks(quantise_blocks(*parts, bits), P, keys.shape[-1], values.shape[-1], bits, keys.dtype)
    return [torch.cat([part.flatten(-3, -2), old[..., closed:, :]], -2) for part, old in zip(parts, (keys, values))]


def expected(text: Text, low: int, high: int, bits: int, recent: int = 1, softcap=0.0, sinks=None):
    """What tokens low..high see in float64, [layers, B, high - low, Hq, Dv]: the first block, the open one and `recent` ones
    before it exactly, the others through their codes."""
    position, token = torch.arange(low, high)[:, None], torch.arange(high)
    coded = (token // P > 0) & (token // P < position // P - recent)                     # [q, T]
    outputs = []
    for query, keys, values in zip(text.queries, text.keys, text.values):
        plain = keys[:, :, :high], values[:, :, :high]
        packed = [part.double() for part in through_codes(*plain, bits)]
        plain = [part.double() for part in plain]
        q = query[:, :, low:high].double().unflatten(1, (text.heads, text.group))
        logits = [torch.einsum("bhgqd,bhtd->bhgqt", q, part[0]) * text.scaling for part in (packed, plain)]
        logits = torch.where(coded, *logits)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(token > position, -torch.inf)
        if sinks is not None:
            shape = (1, text.heads, text.group, 1, 1)
            logits = torch.cat([logits, sinks.double().view(shape).expand(*logits.shape[:-1], 1)], -1)
        weights = logits.softmax(-1)[..., :high]
        parts = [torch.einsum("bhgqt,bhtd->bqhgd", weights * flags, part[1])
                 for flags, part in ((coded, packed), (~coded, plain))]
        outputs.append(sum(parts).flatten(2, 3))
    return torch.stack(outputs)


def close(got, want, atol=2e-5):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


SHAPES = {"plain": {}, "odd": dict(heads=1, group=3, key_dim=15, value_dim=7), "wide-values": dict(key_dim=8, value_dim=24)}


@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_is_read_as_it_is_stored(shape, bits, memory):
    text = Text(rows=2, length=135, **SHAPES[shape])
    got = run(cache_of(text, **SETTINGS, kv_bits=bits, **memory), text, 90, 135)
    want = expected(text, 90, 135, bits)
    close(got, want)
    exact = expected(text, 90, 135, bits, recent=9)
    assert (got.double() - exact).abs().max() > 1e-3        # not merely within reach of what was never quantised


@pytest.mark.parametrize("bits", [8, 4])
def test_softcap_and_sinks(bits):
    text, sinks = Text(rows=1, length=100), torch.randn(4, generator=torch.Generator().manual_seed(1))
    got = run(cache_of(text, **SETTINGS, kv_bits=bits), text, 80, 100, softcap=8.0, sinks=sinks)
    close(got, expected(text, 80, 100, bits, softcap=8.0, sinks=sinks))


@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
def test_padded_rows_are_what_they_are_alone(memory):
    text = Text(rows=3, length=120)
    pads = [0, 21, 64]
    valid = torch.arange(120) >= torch.tensor(pads)[:, None]
    cache = cache_of(text, **SETTINGS, kv_bits=4, **memory)
    feed(cache, text, 0, 90, valid[:, :90])
    got = decode(cache, text, 90, 120, valid)
    for row, pad in enumerate(pads):
        alone = text.select([row], pad)
        close(got[:, row : row + 1], expected(alone, 90 - pad, 120 - pad, 4))


@pytest.mark.parametrize("chunks", [(1,) * 40, (7, 33), (16, 24), (40,), (3, 16, 1, 20)], ids=str)
@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
def test_however_tokens_come_they_are_stored_the_same(chunks, memory):
    text = Text(rows=2, length=131)
    caches = [cache_of(text, **SETTINGS, kv_bits=8, **memory) for _ in range(2)]
    feed(caches[0], text, 0, 130)
    feed(caches[1], text, 0, 90)
    at = 90
    for count in chunks:
        feed(caches[1], text, at, at + count)
        at += count
    for one, other in zip(caches[0].layers, caches[1].layers):
        for a, b in zip(one.padded(), other.padded()):
            assert torch.equal(a, b)
    assert torch.equal(decode(caches[0], text, 130, 131), decode(caches[1], text, 130, 131))


def test_a_prompt_is_quantised_piece_by_piece(monkeypatch):
    text = Text(rows=2, length=300)
    whole, pieces = (cache_of(text, **SETTINGS, kv_bits=4, **TIERED) for _ in range(2))
    feed(whole, text, 0, 300)
    monkeypatch.setattr(append_packed, "PIECE_ELEMENTS", 1)
    monkeypatch.setattr("hf_sparse.cache.blocks.PIECE_ELEMENTS", 1)
    feed(pieces, text, 0, 300)
    for one, other in zip(whole.layers, pieces.layers):
        assert all(map(torch.equal, one.padded(), other.padded()))


@pytest.mark.parametrize("name", ["key_bits", "channel_codes"])
def test_offloaded_equals_resident(name):
    """To the last bit, also where blocks are chosen, and evicted."""
    text = Text(rows=2, length=420)
    settings = {**SETTINGS, "digest": name, "threshold": 0.7, "round_blocks": 1, "kv_bits": 4}
    want = run(cache_of(text, **settings), text, 380, 420)
    make = lambda budget: cache_of(text, **settings, gpu_memory=budget, host_memory="4MiB")  # noqa: E731
    least = smallest_budget(lambda budget: run(make(budget), text, 380, 420))
    for factor in (1.0, 1.1, 2.0):
        cache = make(int(least * factor))
        assert torch.equal(run(cache, text, 380, 420), want)
        stats = cache.stats()
        assert stats["bytes"]["device"] <= least * factor and stats["kv_fraction"] < 0.95
        assert stats["misses"] > 0


def test_digests_of_the_always_read_blocks_are_made_from_exact_keys():
    """A unit that closes while decoding has the digest that it has in a cache that is not quantised; a prompt's has not."""
    text = Text(rows=1, length=200)
    settings = {**SETTINGS, "digest": "min_max", "stop_rule": "window", "policy": "top_k", "top_k": 4}
    ours, plain = cache_of(text, **settings, kv_bits=4), cache_of(text, **settings)
    for cache in (ours, plain):
        run(cache, text, 120, 200)
    for a, b in zip(ours.layers[0].digests.unit, plain.layers[0].digests.unit):
        closed = 200 // P
        same = (a[0, :, :closed] == b[0, :, :closed]).flatten(2).all(-1).all(0).tolist()
        assert same == [n == 0 or n >= 120 // P - 1 for n in range(closed)]


# -- going back, and parting ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
@pytest.mark.parametrize("count", [1, 5, P, 2 * P + 3, SLACK_BLOCKS * P])
def test_a_shallow_crop_is_exact(count, memory):
    """Blocks that are reopened, and those that are always read from now on, are as they were given."""
    text = Text(rows=2, length=170)
    cache = cache_of(text, **SETTINGS, kv_bits=4, **memory)
    run(cache, text, 100, 150)
    cache.crop(-count)
    close(decode(cache, text, 150 - count, 170), expected(text, 150 - count, 170, 4))


@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", [101, 37, 9, 96])
def test_a_deep_crop_goes_on_from_what_is_stored(length, bits, memory):
    text = Text(rows=2, length=220)
    cache = cache_of(text, **SETTINGS, kv_bits=bits, **memory)
    run(cache, text, 180, 200)
    cache.crop(length - 200)
    # All but the first block has been quantised.
    known = through_codes(text.keys[0][:, :, :200], text.values[0][:, :, :200], bits)
    for own, part in zip((text.keys[0], text.values[0]), known):
        own[:, :, P:length] = part[:, :, P:length]
    layer = cache.layers[0]
    for part, own in zip(layer.padded(), (text.keys[0], text.values[0])):
        close(part, own[:, :, :length].double(), atol=1e-6)
    got = decode(cache, text, length, 220)[0]
    # Blocks that were closed have the same codes as before, the one that is reopened has new ones.
    want = expected(text, length, 220, bits)[0]
    close(got, want, atol=1e-4)


def test_a_crop_that_is_refused_changes_nothing(monkeypatch):
    text = Text(rows=1, length=180)
    cache = cache_of(text, **SETTINGS, kv_bits=4)
    run(cache, text, 100, 170)
    layer = cache.layers[0]
    before = [part.clone() for part in layer.padded()]

    def refuse(*args, **kwargs):
        raise ValueError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(type(layer.pool), "allocate", refuse)
        with pytest.raises(ValueError, match="no room"):
            layer.crop(-85)
    assert all(map(torch.equal, layer.padded(), before))


@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
def test_rows_that_share_blocks_part(memory):
    """Beams: rows are exchanged and repeated in the middle of blocks, and each goes on with its own open block."""
    text = Text(rows=3, length=140)
    cache = cache_of(text, **SETTINGS, kv_bits=4, **memory)
    feed(cache, text, 0, 90)
    decode(cache, text, 90, 101)
    index = torch.tensor([2, 0, 2])
    cache.reorder_cache(index)
    mixed = text.select([0, 1, 2])
    for name in ("queries", "keys", "values"):
        setattr(mixed, name, [torch.cat([part[index, :, :101], part[:, :, 101:]], 2) for part in getattr(text, name)])
    close(decode(cache, mixed, 101, 140), expected(mixed, 101, 140, 4))


@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
def test_a_fork_goes_its_own_way(memory):
    text = Text(rows=2, length=150)
    other = text.select([1, 0])
    cache = cache_of(text, **SETTINGS, kv_bits=4, **memory)
    run(cache, text, 90, 105)
    fork = cache.fork()
    ours = [(decode(cache, text, at, at + 9), decode(fork, other, at, at + 9)) for at in (105, 114, 123)]
    for name in ("queries", "keys", "values"):
        setattr(other, name, [torch.cat([mine[:, :, :105], part[:, :, 105:]], 2)
                              for mine, part in zip(getattr(text, name), getattr(other, name))])
    close(torch.cat([pair[0] for pair in ours], 2), expected(text, 105, 132, 4))
    close(torch.cat([pair[1] for pair in ours], 2), expected(other, 105, 132, 4))


@pytest.mark.parametrize("memory", [{}, TIERED], ids=["resident", "tiered"])
def test_ids_come_back(memory):
    """Prompts, steps, crops, beams, forks and resets, over and over, in the blocks of the first round."""
    text = Text(rows=2, length=200)
    cache = cache_of(text, **SETTINGS, kv_bits=8, **memory)
    sizes = []
    for _ in range(4):
        feed(cache, text, 0, 100)
        decode(cache, text, 100, 120)
        cache.crop(-45)
        cache.reorder_cache(torch.tensor([1, 1]))
        fork = cache.fork()
        decode(fork, text, 75, 100)
        decode(cache, text, 75, 90)
        pool = cache.layers[0].pool
        sizes.append((pool.ids, pool.slots))
        del fork
        cache.reset()
        assert pool.blocks_in_use() == 0
    assert len(set(sizes)) == 1


# -- bytes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bits", "block_size", "dims"), [(8, 16, (16, 16)), (4, 32, (15, 7)), (4, 64, (16, 16))])
def test_bytes_are_those_of_the_tensors(bits, block_size, dims):
    text = Text(rows=2, length=300, key_dim=dims[0], value_dim=dims[1])
    stats = {}
    for kv_bits in (16, bits):
        cache = cache_of(text, **{**SETTINGS, "block_size": block_size}, kv_bits=kv_bits, gpu_memory="2MiB", host_memory="4MiB")
        run(cache, text, 290, 300)
        stats[kv_bits] = cache.stats()["bytes"]
        layer = cache.layers[0]
    pool = layer.pool
    packed = packed_bytes(block_size, *dims, bits)
    assert pool.kv.dtype == pool.host.dtype == torch.uint8 and pool.kv.shape[1] == pool.host.shape[1] == packed
    assert stats[bits]["host"] * block_size * sum(dims) * 4 == stats[16]["host"] * packed
    exact = layer.exact.rows.nbytes
    assert exact == (1 + 2 * 2 * (1 + 2 + SLACK_BLOCKS)) * block_size * sum(dims) * 4
    side = layer.table.nbytes + sum(part.nbytes for part in (*layer.digests.unit, *layer.digests.row))
    assert layer.side_bytes() == side + exact
    assert stats[bits]["device"] == pool.kv.nbytes + 2 * (side + exact)
    assert stats[bits]["digest"] == stats[16]["digest"]


def test_a_long_row_takes_a_quarter():
    """In bf16, with the exact blocks and the scales."""
    text = Text(rows=1, length=8200, layers=1, key_dim=64, dtype=torch.bfloat16)
    device = {}
    for bits in (16, 8, 4):
        cache = cache_of(text, **{**SETTINGS, "block_size": 32}, kv_bits=bits)
        feed(cache, text, 0, 8200)
        layer = cache.layers[0]
        device[bits] = layer.pool.blocks_in_use() * layer.pool.block_bytes + (layer.exact.rows.nbytes if layer.exact else 0)
    assert device[8] < 0.62 * device[16] and device[4] < 0.37 * device[16]


def test_the_smallest_budget_is_what_the_refusal_says():
    text = Text(rows=1, length=300)

    def attempt(budget: int, bits: int = 4):
        return run(cache_of(text, **SETTINGS, kv_bits=bits, gpu_memory=budget, host_memory="4MiB"), text, 270, 300)

    least = smallest_budget(attempt)
    with pytest.raises(ValueError, match="too small"):
        attempt(int(least * 0.95))
    assert least < smallest_budget(lambda budget: attempt(budget, 16))


def test_budget_without_a_host_tier_counts_the_exact_blocks():
    text = Text(rows=1, length=300)
    cache = cache_of(text, **SETTINGS, kv_bits=8, gpu_memory="1MiB", host_memory=0)
    run(cache, text, 290, 300)
    pool = cache.layers[0].pool
    assert pool.side == sum(layer.side_bytes() for layer in cache.layers)
    with pytest.raises(ValueError, match="gpu_memory is used up"):
        run(cache_of(text, **SETTINGS, kv_bits=8, gpu_memory=pool.side, host_memory=0), text, 290, 300)


# -- settings -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [3, 2, 0, 32, True, "8", None, 4.0])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match="kv_bits=.*choose 16"):
        PSAConfig(kv_bits=bits)


def test_small_blocks_are_refused():
    with pytest.raises(ValueError, match="blocks of at least 16 tokens"):
        PSAConfig(kv_bits=8, block_size=8)


def test_a_fork_can_not_change_how_blocks_are_stored():
    cache = PSACache(model_config(), kv_bits=8)
    with pytest.raises(ValueError, match="kv_bits"):
        cache.fork(kv_bits=4)


# -- the exact blocks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sink", "tail"), [(1, 2), (0, 1), (3, 5)])
def test_places_of_exact_blocks_are_apart(sink, tail):
    """Whatever a tail holds, and the sink, have places of their own, in rows of their own."""
    exact = ExactBlocks.new(2, 3, sink, tail, 4, torch.empty(0))
    for newest in range(40):
        column = sorted({*range(min(sink, newest + 1)), *range(max(0, newest - tail - SLACK_BLOCKS + 1), newest + 1)})
        ids = exact.ids(torch.tensor([column, column])).flatten().tolist()
        assert len(set(ids)) == len(ids) and min(ids) > 0 and max(ids) < exact.rows.shape[0]


def test_rows_of_exact_blocks():
    exact = ExactBlocks.new(3, 2, 1, 2, 4, torch.empty(0))
    column = torch.arange(8).expand(3, -1)
    exact.rows[1:] = torch.arange(1, exact.rows.shape[0])[:, None].float()
    taken = exact.take_rows(torch.tensor([2, 2, 0, 1]))
    for row, source in enumerate((2, 2, 0, 1)):
        ours = taken.rows[taken.ids(torch.arange(8).expand(4, -1))[row]]
        assert torch.equal(ours, exact.rows[exact.ids(column)[source]])
    assert list(itertools.chain(exact.rows[0])) == [0] * 4
