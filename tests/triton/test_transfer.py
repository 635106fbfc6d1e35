"""Blocks between the tiers by kernels, interpreted: plain copies, and everything that goes through `read`, `acquire` and
`append` of a host tier that kernels reach, against the same through the CPU."""
from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import pytest
import torch

from hf_sparse.kernels import host_link, transfer
from hf_sparse.kernels.host_link import HostLink
from hf_sparse.kernels.reference import append as append_module
from hf_sparse.kernels.reference import fetch
from hf_sparse.kernels.reference.append import append, split, unpin
from tests.cache.drive import Text, decode, feed
from tests.kernels.pools import make_tiers
from tests.kernels.test_append import Rows

SLOT_OF, PINNED = 2, 5


@pytest.fixture(autouse=True)
def small_launches(monkeypatch):
    monkeypatch.setattr(transfer, "TUNING", transfer.Tuning(load_programs=3, store_programs=5, load_tile=64, store_tile=16))


@pytest.fixture
def reached(monkeypatch):
    """Kernels reach every host tier, and nothing may go through the CPU."""
    link = HostLink(torch.device("cpu"))
    monkeypatch.setattr(fetch, "link_of", lambda host: link)

    def refuse(*args):
        raise AssertionError("a copy through the CPU")

    monkeypatch.setattr(fetch, "from_host", refuse)
    monkeypatch.setattr(append_module, "_store_through_cpu", refuse)


def random_rows(rows: int, elements: int, dtype, seed=0) -> torch.Tensor:
    return torch.randn(rows, elements, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Elements and type of a block: whole tiles of words, part of one, and blocks that are made of smaller words only.
SIZES = [(48, torch.float32), (37, torch.float32), (16, torch.bfloat16), (50, torch.float16), (7, torch.float16)]


@pytest.mark.parametrize(("elements", "dtype"), SIZES, ids=[f"{elements}-{dtype}" for elements, dtype in SIZES])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_blocks_are_loaded_from_where_they_are(elements, dtype, count):
    kv, host = random_rows(9, elements, dtype, 1), random_rows(30, elements, dtype, 2)
    slot_of = torch.zeros(30, dtype=torch.int64)
    slot_of[[3, 8, 21, 29]] = torch.tensor([5, 1, 8, 2])
    slot_of[4] = -1                                         # on the miss list
    ids = torch.tensor([8, 3, 4, 29, 5, 21, 28, 1, 2, 8, 3, 3, 11, 12, 13, 14, 15, 16, 17, 18])[:count]
    got = transfer.load_blocks(kv, host, slot_of, ids)
    expected = [kv[slot_of[block]] if slot_of[block] > 0 else host[block] for block in ids]
    assert got.dtype == dtype and got.shape == (count, elements)
    assert count == 0 or torch.equal(got, torch.stack(expected))


@pytest.mark.parametrize(("elements", "dtype"), SIZES, ids=[f"{elements}-{dtype}" for elements, dtype in SIZES])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_blocks_are_copied_but_not_to_row_0(elements, dtype, count):
    source, target = random_rows(12, elements, dtype, 1), random_rows(10, elements, dtype, 2)
    rows, to = torch.tensor([4, 11, 4, 0, 7, 1, 2])[:count], torch.tensor([3, 0, 9, 1, 0, 5, 2])[:count]
    expected = target.clone()
    for row, place in zip(rows.tolist(), to.tolist()):
        if place:
            expected[place] = source[row]
    transfer.copy_blocks(source, target, rows, to)
    assert torch.equal(target, expected)


def stored(starts, counts, padding, heads, block_size, key_dim, value_dim, dtype, pool_dtype, without_slot=(), seed=0):
    """Stores tokens behind `starts` others with the kernel; returns what it left, and what a loop over tokens leaves.

    Everything that nobody wrote is NaN. All blocks touched have slots but those in the columns `without_slot`.
    """
    generator = torch.Generator().manual_seed(seed)
    P, batch, width = block_size, len(starts), max(counts) + padding
    columns = max(start + count for start, count in zip(starts, counts)) // P + 2
    ids = 1 + batch * heads * columns
    table = (1 + torch.randperm(ids - 1, generator=generator)).view(batch, heads, columns)
    kv = torch.full((ids, P * (key_dim + value_dim)), math.nan, dtype=pool_dtype)
    host = kv.clone()
    slot_of = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(ids - 1, generator=generator)])
    for column in without_slot:
        slot_of[table[:, :, column]] = 0
    # Token-major, as projections leave them.
    keys, values = (torch.randn(batch, width, heads, dim, generator=generator).to(dtype).transpose(1, 2)
                    for dim in (key_dim, value_dim))
    source = torch.stack([torch.randperm(width, generator=generator) for _ in range(batch)])
    for b, start in enumerate(starts):                      # an open block's older tokens
        for h in range(heads):
            old = kv[slot_of[table[b, h, start // P]]]
            for part in split(old, P, key_dim, value_dim):
                part[:start % P] = torch.randn(start % P, part.shape[-1], generator=generator).to(pool_dtype)
    expected_kv, expected_host = kv.clone(), host.clone()
    for b, (start, count) in enumerate(zip(starts, counts)):
        for h in range(heads):
            whole = {}
            for j in range(count):
                column, t = divmod(start + j, P)
                block = int(table[b, h, column])
                if column not in whole:
                    whole[column] = kv[slot_of[block]].clone()
                for part, new in zip(split(whole[column], P, key_dim, value_dim), (keys, values)):
                    part[t] = new[b, h, source[b, j]].to(pool_dtype)
                if slot_of[block] > 0:
                    for part, new in zip(split(expected_kv[slot_of[block]], P, key_dim, value_dim), (keys, values)):
                        part[t] = new[b, h, source[b, j]].to(pool_dtype)
                if t == P - 1:
                    expected_host[block] = whole[column]
    start = torch.tensor(starts)
    transfer.store_blocks(kv, host, slot_of, table, start, start + torch.tensor(counts), source, keys, values, P)
    return (kv, host), (expected_kv, expected_host)


def same(got, expected) -> None:
    for name, one, other in zip(("slots", "host"), got, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("starts", "counts", "without"), [
    ([0, 0], [8, 8], ()), ([0], [9], ()), ([3, 3], [1, 1], ()), ([3], [13], ()), ([4, 8], [10, 10], ()),
    ([5, 0, 2], [0, 3, 11], ()), ([6, 13], [22, 9], ()), ([0], [17], (0, 1, 3)), ([5], [22], (2, 3, 5)),
], ids=["whole", "whole+1", "closes-one", "from-open", "from-edges", "nothing-in-a-row", "ragged", "not-all-have-slots",
        "open-and-some-without-slots"])
def test_tokens_are_stored(starts, counts, without):
    same(*stored(starts, counts, 3, 2, 4, 8, 8, torch.float32, torch.float32, without))


@pytest.mark.parametrize(("key_dim", "value_dim", "block_size"), [(8, 16, 8), (5, 3, 4), (1, 7, 16), (33, 8, 4)],
                         ids=["powers", "odd", "one", "wide-keys"])
@pytest.mark.parametrize(("dtype", "pool_dtype"), [(torch.float32, torch.float32), (torch.float32, torch.float16),
                                                   (torch.float16, torch.float16)], ids=["fp32", "fp32-to-fp16", "fp16"])
def test_any_dims_and_types(key_dim, value_dim, block_size, dtype, pool_dtype):
    same(*stored([5, 9], [block_size * 3, 7], 1, 3, block_size, key_dim, value_dim, dtype, pool_dtype, seed=4))


def test_columns_apart():
    """Keys whose channels are not next to each other in memory."""
    keys = torch.randn(1, 2, 8, 6, generator=torch.Generator().manual_seed(0)).transpose(2, 3).contiguous().transpose(2, 3)
    assert keys.stride(3) != 1
    kv = torch.zeros(5, 4 * 12)
    row = torch.zeros(1, dtype=torch.int64)
    ids = torch.arange(1, 5).view(1, 2, 2)
    transfer.store_blocks(kv, kv.clone(), torch.arange(5), ids, row, row + 8, torch.arange(8)[None], keys, keys, 4)
    got = split(kv[ids], 4, 6, 6)
    assert all(torch.equal(part.flatten(2, 3), keys) for part in got)


# -- what goes through them ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("counts", [(4, 4), (3, 1, 1, 5), (23, 1, 1), (7, 8, 9), (30, 30)],
                         ids=lambda counts: "+".join(map(str, counts)))
def test_appending_whole_batches(counts, reached):
    torch.manual_seed(0)
    rows = Rows(2, 30)
    for count in counts:
        rows.append(torch.ones(2, count, dtype=torch.bool))
        rows.check()


@pytest.mark.parametrize(("sink_blocks", "recent"), [(0, 0), (1, 1), (2, 3)], ids=["none", "one", "several"])
def test_appending_around_padding(sink_blocks, recent, reached):
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    rows = Rows(3, 60)
    for count in (17, 1, 6, 30, 2, 1):
        rows.append(torch.rand(3, count, generator=generator) < 0.7, sink_blocks, recent)
        rows.check(sink_blocks, recent)


def test_an_open_block_that_leaves_the_tail_is_not_evicted_before_it_is_complete(reached):
    """Its slot is needed once more, however low its priority is by then."""
    heads, P, dim = 1, 4, 3
    tiers = make_tiers(torch.full((12, P * 2 * dim), math.nan), 1 + 1 + 2 + 1)
    slot_of, priority, pinned = tiers[SLOT_OF], tiers[4], tiers[PINNED]
    table, lengths = torch.arange(1, 12).view(1, heads, 11), torch.zeros(1, dtype=torch.int64)
    tokens = torch.randn(1, heads, 32, dim, generator=torch.Generator().manual_seed(0))
    for low, high, start, leaving in ((0, 10, 1, []), (10, 29, 6, [1, 2])):
        unpin(tiers, table[0, 0, leaving], torch.ones(len(leaving), dtype=torch.bool))
        if leaving:
            priority[slot_of[table[0, 0, 2]]] = -5.0        # holds tokens 8 and 9
        part, valid = tokens[:, :, low:high], torch.ones(1, high - low, dtype=torch.bool)
        append(tiers, table, lengths, part, part, valid, P, 1, torch.tensor([start]), "lru")
    keys, values = split(fetch.read(tiers, table[0, 0, :8]), P, dim, dim)
    for part in (keys, values):
        assert torch.equal(part.flatten(0, 1)[:29], tokens[0, 0, :29])
    assert pinned[slot_of[table[0, 0, [0, 6, 7]]]].all() and pinned.sum() == 1 + 3


def test_blocks_that_are_missing_are_fetched(reached):
    content = random_rows(40, 6, torch.float32)
    tiers = make_tiers(content, 9, resident=(1, 2), pinned=(1,))
    for ids in ([7, 2, 7, 9], [1, 10, 11, 12, 13], [7, 30, 31, 32, 33, 34, 35]):
        blocks, wanted = torch.tensor(ids), torch.tensor(ids) != 11
        slots = fetch.acquire(tiers, blocks, wanted, "lru", load=True, use=True)
        assert torch.equal(tiers[0][slots[wanted]], content[blocks[wanted]])
        assert tiers[SLOT_OF][11] == 0 and tiers[SLOT_OF][1] == 1
    assert torch.isnan(tiers[0][0]).all()                   # what is not wanted goes nowhere


@pytest.mark.parametrize("eviction", ["lru", "decayed"])
def test_a_cache_gives_the_same_through_kernels_and_through_the_cpu(eviction, monkeypatch):
    """Prompt, second turn and decoding in a pool that evicts, with padding in the prompt."""
    text = Text(rows=2, length=90, layers=2, key_dim=8, value_dim=12)
    valid = torch.ones(2, 41, dtype=torch.bool)
    valid[1, :9] = False
    outputs, stored_beside, link = [], [], HostLink(torch.device("cpu"))
    monkeypatch.setattr(link, "run_beside", lambda run, *tensors: stored_beside.append(1) or run())
    for links in (False, True):
        if links:
            monkeypatch.setattr(fetch, "link_of", lambda host: link)
        cache = text.cache(digest="key_bits", threshold=0.6, round_blocks=1, gpu_memory="72KiB", host_memory="1MiB",
                           eviction=eviction)
        parts = [feed(cache, text, 0, 41, valid), decode(cache, text, 41, 43), feed(cache, text, 43, 80),
                 decode(cache, text, 80, 84)]
        outputs.append(torch.cat(parts, 2))
        assert len(stored_beside) == (4 if links else 0)
        assert cache.stats()["misses"] > 0
    assert torch.equal(*outputs)


def test_a_link_is_found_by_the_tensor_of_its_tier(monkeypatch):
    host, other, link = torch.zeros(4, 6), torch.zeros(4, 6), HostLink(torch.device("cpu"))
    monkeypatch.setitem(host_link.LINKS, host.data_ptr(), link)
    tiers = make_tiers(torch.zeros(4, 6), 3)
    assert fetch.link_to_host(tiers) is None and fetch.link_to_host([tiers[0]]) is None
    assert fetch.link_to_host([tiers[0], host, *tiers[2:]]) is link
    assert fetch.link_to_host([tiers[0], other, *tiers[2:]]) is None
    monkeypatch.setattr(fetch, "transfer", lambda: None)    # a Triton that can't be imported
    assert fetch.link_to_host([tiers[0], host, *tiers[2:]]) is None


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.triton.compile_transfer", str(capability)], text=True,
                          capture_output=True, timeout=600, check=False,
                          env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    built = re.findall(rf"sm_{capability} (\w+)_kernel .*: (\d+) bytes(, wide)?", done.stdout)
    assert [name for name, *_ in built] == ["quantise"] * 2 + ["load_blocks", "copy_blocks", "store_blocks"] * 3
    assert all(int(size) > 1000 for _, size, _ in built)
    assert [bool(wide) for *_, wide in built[2:]] == [True] * 6 + [False] * 3                  # 16 bytes a thread
