"""The decode kernels over quantised blocks, interpreted: against the reference and float64, and offloaded against resident."""
from __future__ import annotations

import re

import pytest
import torch

from hf_sparse.cache.handle import Pending
from hf_sparse.kernels import attend_packed, decode, tiering
from hf_sparse.sizes import parse_bytes
from tests.triton.test_decode_kernels import Twins, float64_attention, make_twins
from tests.triton.test_tiered_step import Run

CASES = {
    "bytes": dict(kv_bits=8, block_size=16),
    "halves": dict(kv_bits=4, block_size=32),
    "joined-odd": dict(kv_bits=4, block_size=16, query_heads=3, dim=15, value_dim=7),
    "odd": dict(kv_bits=8, block_size=32, query_heads=3, dim=20, value_dim=13),
    "pages": dict(kv_bits=4, block_size=64, digest="pages", policy="top_k", top_k=64, stop_rule="window"),
    "fp16": dict(kv_bits=4, block_size=16, dtype=torch.float16),
    "wide": dict(kv_bits=8, block_size=16, dim=160, value_dim=160),
}
EXACT = dict(query_heads=2, heads=1, threshold=1.0, pads=(0, 37))


def twins_of(name: str, **more) -> Twins:
    return make_twins(**{**EXACT, **CASES[name], **more})


def check_twins(twins: Twins) -> None:
    """Both hold the same: exact blocks, packed ones, digests."""
    ours, reference = twins.ours, twins.reference
    assert torch.equal(ours.lengths, reference.lengths)
    P = ours.config.block_size
    for row, length in enumerate(ours.lengths.tolist()):
        for h in range(ours.heads):
            closed = slice(1, length // P)
            codes = [layer.pool.kv[layer.table[row, h, closed]] for layer in (ours, reference)]
            assert torch.equal(*codes)
            column = torch.arange(max(1, -(-length // P) - ours.exact.newest_blocks), -(-length // P))
            copies = [layer.exact.rows[layer.exact.ids(column.expand(2, -1))[row, h]] for layer in (ours, reference)]
            part = length % P or P
            for whole, last in ((copy[:-1], copy[-1][: part * ours.key_dim]) for copy in copies):
                assert whole.any() and last.any()
            assert torch.equal(copies[0][:-1], copies[1][:-1])
            assert torch.equal(copies[0][-1][: part * ours.key_dim], copies[1][-1][: part * ours.key_dim])
    reference._digest()
    units = (ours.lengths // (P * ours.digests.unit_blocks)).tolist()
    for a, b in zip(ours.digests.unit, reference.digests.unit):
        for row, count in enumerate(units):
            torch.testing.assert_close(a[row, :, :count].float(), b[row, :, :count].float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name if name in ("bytes", "halves") else pytest.param(name, marks=pytest.mark.slow)
                                  for name in CASES])
def test_kernels_equal_the_reference(name):
    """From before a block, a unit of digests and a turn of the exact blocks end until after them."""
    twins = twins_of(name, tokens=253)
    tolerance = 3e-3 if name == "fp16" else 3e-5
    for _ in range(5):
        query, ours, reference = twins.step()
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=tolerance, atol=tolerance)
    check_twins(twins)
    assert twins.ours.stats.reference_steps == 0 and twins.reference.stats.reference_steps == 5


@pytest.mark.parametrize("name", ["joined-odd", "bytes"])
def test_a_chunk_of_fewer_blocks_than_a_program_reads_at_once(name, monkeypatch):
    monkeypatch.setattr(decode.TUNING, "reading_packed", decode.Reading(chunk_blocks=1, tile=64, warps=1, waves=2))
    twins = twins_of(name, tokens=253)
    query, ours, reference = twins.step()
    torch.testing.assert_close(ours, reference, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_order_of_value_rows_changes_nothing(rows, monkeypatch):
    """It is that of the installed Triton, and another one's elsewhere."""
    monkeypatch.setattr(attend_packed, "_NIBBLE_ROWS", rows)
    twins = twins_of("halves", tokens=190)
    query, ours, reference = twins.step()
    torch.testing.assert_close(ours, reference, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=3e-5, atol=3e-5)


def test_a_block_is_always_read_exactly_until_it_is_ranked():
    """A value far from all others, in the open block and then in the tail, keeps what its codes would lose."""
    twins = twins_of("halves", tokens=250)
    layer = twins.ours
    key, value = torch.zeros(2, 1, 1, 16), torch.full((2, 1, 1, 16), 0.3)
    value[..., 0] = 1000.0                                  # one outlier: the step of its token is 67
    query = torch.zeros(2, 2, 1, 16)
    before = layer._compact()[1][:, :, :, 1:].double()
    outputs = []
    for _ in range(6):                                      # closes the block, and in the first row the unit
        outputs.append(layer.attend(query, Pending(key, value, layer.length), None, None, 0.25, 0.0, None, None))
    count = layer.lengths.tolist()
    for row in range(2):
        total = before[row, :, : count[row] - 6].sum(1) + 6 * 0.3
        torch.testing.assert_close(outputs[-1][row, 0, :, 1:].double(), total / count[row], rtol=0, atol=1e-4)


@pytest.mark.parametrize("softcap", [0.0, 6.0])
def test_softcap_and_sinks(softcap):
    twins = twins_of("halves", tokens=190)
    sinks = torch.randn(2, generator=twins.generator)
    query, ours, reference = twins.step(softcap=softcap, sinks=sinks)
    torch.testing.assert_close(ours, reference, rtol=3e-5, atol=3e-5)
    want = float64_attention(twins.reference, query, softcap, sinks)
    torch.testing.assert_close(ours.double(), want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_read_on_is_quantised_too(bits):
    """Estimates far too high for some blocks: little else is planned, and what is then read on makes it dense."""
    twins = make_twins(query_heads=2, heads=1, tokens=500, block_size=16, threshold=0.9999, pads=(0, 0), kv_bits=bits)
    layer = twins.ours
    layer.begin_step()
    for name, part in zip(layer.digests.digest.unit_layout(torch.float32), layer.digests.unit):
        if name == "minimum":
            part[:, :, 1] += 6.0
    query, key = twins.draw(2, 16).abs(), twins.draw(1, 16)
    ours = layer.attend(query, Pending(key, key, layer.length), None, None, 0.25, 0.0, None, None)
    twins.reference.commit(Pending(key, key, twins.reference.length), None)
    info = layer.state.static._work(layer).info
    short = (info[:, 0, 5] == 1) & (info[:, 0, 0] < info[:, 0, 1] // 2)
    assert bool(short.any())
    want = float64_attention(twins.reference, query)[short]
    torch.testing.assert_close(ours[short].double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["bytes", "halves"])
def test_rows_and_lengths_change_between_steps(name):
    """Beams, shallow and deep crops, and prompts that go on, in both alike."""
    twins = twins_of(name, tokens=262)
    both = (twins.ours, twins.reference)

    def check(steps: int) -> None:
        for _ in range(steps):
            query, ours, reference = twins.step()
            torch.testing.assert_close(ours, reference, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=3e-5, atol=3e-5)
        check_twins(twins)

    check(1)
    for change in (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), lambda layer: layer.crop(-30),
                   lambda layer: layer.crop(-90)):
        for layer in both:
            change(layer)
        check(2)
    keys, values = (torch.randn(2, 1, 40, 16, generator=twins.generator) for _ in range(2))
    for layer in both:
        layer.commit(Pending(keys, values, layer.length), None)
    check(2)


def test_a_fork_goes_its_own_way():
    twins = twins_of("halves", tokens=250)
    twins.step()
    fork = twins.ours.fork(twins.ours.state)
    before = [part.clone() for part in fork.padded()]
    for _ in range(8):
        query, ours, reference = twins.step()
    torch.testing.assert_close(ours, reference, rtol=3e-5, atol=3e-5)
    assert all(map(torch.equal, fork.padded(), before))


# -- with a host tier ---------------------------------------------------------------------------------------------------
TOKENS, STEPS = 382, 3
SETTINGS = {"bytes": dict(kv_bits=8, block_size=16), "halves": dict(kv_bits=4, block_size=32, threshold=0.97)}


@pytest.fixture
def small_launches(monkeypatch):
    small = tiering.Tuning(fetch_programs=3, victim_programs=2, count_tile=64, queue_tile=16, fetch_tile=256, settle_tile=64,
                           touched=16)
    monkeypatch.setattr(tiering, "TUNING", small)


@pytest.mark.parametrize("name", ["halves", pytest.param("bytes", marks=pytest.mark.slow)])
def test_offloaded_equals_resident(name, small_launches):
    want = Run(TOKENS, **SETTINGS[name]).decode(STEPS)
    with pytest.raises(ValueError, match="too small") as error:
        Run(TOKENS, gpu_memory=1, host_memory="4MiB", **SETTINGS[name])
    least = parse_bytes(re.search(r"at least ([\d.]+\w*B)", str(error.value)).group(1))
    run = Run(TOKENS, gpu_memory=least, host_memory="4MiB", **SETTINGS[name])
    assert all(map(torch.equal, run.decode(STEPS), want))
    run.check_pool()
    assert run.pool.kv.dtype == torch.uint8 and run.pool.counters[1] > 0


def test_offloaded_rows_share_blocks_and_part(small_launches):
    runs = [Run(TOKENS, pads=(0, 0), seed=3, **SETTINGS["bytes"], **memory)
            for memory in ({}, dict(gpu_memory="250KiB", host_memory="4MiB"))]
    outputs = []
    for run in runs:
        outputs.append(run.decode(2))
        for layer in run.layers:
            layer.reorder_cache(torch.tensor([1, 1]))
        outputs[-1] += run.decode(1)
        for layer in run.layers:
            layer.crop(-40)
        outputs[-1] += run.decode(2)
    runs[1].check_pool()
    assert all(map(torch.equal, *outputs))
