"""What calibrated digests start from: the statistics of a row's keys, taken a bounded piece at a time."""

from __future__ import annotations

import pytest
import torch

from hf_sparse.cache import digest_store
from hf_sparse.cache.digest_store import DigestStore

P, HEADS, DIM, SINK = 16, 2, 8, 1


def problem(lengths, seed=0, dtype=torch.float32):
    """A resident pool with rows of keys far from 0, garbage where no token is, and a store that has seen queries."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-max(lengths) // P)
    table = (1 + torch.randperm(len(lengths) * HEADS * columns, generator=generator)).view(-1, HEADS, columns)
    bias = 200 * torch.randn(len(lengths), HEADS, 1, DIM, generator=generator)
    spread = torch.rand(len(lengths), HEADS, 1, DIM, generator=generator) + 0.1
    keys = (bias + spread * torch.randn(len(lengths), HEADS, columns * P, DIM, generator=generator)).to(dtype)
    for b, length in enumerate(lengths):
        keys[b, :, length:] = torch.nan
    kv = torch.full((1 + table.numel(), P * 2 * DIM), torch.nan, dtype=dtype)
    kv[table.flatten(), : P * DIM] = keys.unflatten(2, (columns, P)).flatten(0, 2).flatten(1)
    store = DigestStore("channel_codes", P, DIM, 2, dtype)
    store.reserve(len(lengths), HEADS, -(-columns // store.unit_blocks) * store.unit_blocks, torch.device("cpu"))
    store.observe(torch.randn(len(lengths), HEADS * 3, 50, DIM, generator=generator), HEADS, None)
    return store, kv, table, keys


@pytest.fixture
def calibrated(monkeypatch):
    """What `calibrate` was given."""
    given = []
    kind = type(digest_store.ops.digest_of("channel_codes", P, DIM, 2))
    calibrate = kind.calibrate
    monkeypatch.setattr(kind, "calibrate", lambda self, *numbers: given.append(numbers) or calibrate(self, *numbers))
    return given


def update(store, kv, table, lengths) -> None:
    ragged = len(set(lengths)) > 1
    store.update([kv], table, torch.tensor(lengths), max(lengths), ragged, SINK, DIM, DIM)


@pytest.mark.parametrize("lengths", [[40], [700], [1500, 1500], [1500, 130, 20]], ids=["one-unit", "units", "rows", "ragged"])
@pytest.mark.parametrize("segment", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_those_of_the_whole_row(lengths, segment, dtype, calibrated, monkeypatch):
    monkeypatch.setattr(digest_store, "SEGMENT", segment)
    store, kv, table, keys = problem(lengths, dtype=dtype)
    squares = store.tail.clone()
    update(store, kv, table, lengths)
    (mean, variance, energy), = calibrated
    for b, length in enumerate(lengths):
        row = keys[b, :, SINK * P : length].double()
        torch.testing.assert_close(mean[b].double(), row.mean(1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(variance[b].double(), row.var(1, unbiased=False), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(energy, squares.mean(2))


def test_a_row_that_is_all_sink(calibrated):
    store, kv, table, _ = problem([200, 9])
    update(store, kv, table, [200, 9])
    (mean, variance, _), = calibrated
    assert (mean[1] == 0).all() and (variance[1] == 0).all()


def test_digests_do_not_depend_on_the_pieces(monkeypatch):
    results = []
    for segment in (1, 2, 64):
        monkeypatch.setattr(digest_store, "SEGMENT", segment)
        store, kv, table, _ = problem([1500, 900])
        update(store, kv, table, [1500, 900])
        units = store.units_done
        assert units.tolist() == [1500 // 128, 900 // 128]
        results.append([part[b, :, : units[b]] for part in store.unit for b in range(2)] + store.row)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_bounded_piece_is_read_at_a_time(rows, monkeypatch):
    """At most SEGMENT units, of all rows together, however long they are."""
    monkeypatch.setattr(digest_store, "SEGMENT", 4)
    sizes = []
    monkeypatch.setattr(
        digest_store, "read", lambda tiers, blocks: sizes.append(blocks.shape[0]) or tiers[0][blocks]
    )
    store, kv, table, _ = problem([3000] * rows)
    update(store, kv, table, [3000] * rows)
    assert max(sizes) == 4 * store.unit_blocks * HEADS and len(sizes) > 2 * 5
