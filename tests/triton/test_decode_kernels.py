"""The decode kernels, interpreted, against the PyTorch reference and float64.

Two layers start from the same tokens; one takes a step by the kernels, the other by the reference. What may differ is which
blocks are read: the kernels take those above a cut, the reference whole rounds of the ranking.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hf_sparse import PSAConfig
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.state import CacheState

LN2 = math.log(2.0)


@dataclasses.dataclass
class Twins:
    """A layer for the kernels and one for the reference, with the same tokens in both."""

    ours: PSALayer
    reference: PSALayer
    query_heads: int
    dtype: torch.dtype
    generator: torch.Generator

    def draw(self, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(self.ours.batch, heads, 1, dim, generator=self.generator).to(self.dtype)

    def step(self, softcap: float = 0.0, sinks=None, check_reference: bool = True):
        """One token through both; returns (query, ours, reference), outputs [B, Hq, 1, Dv]."""
        layer, dim = self.ours, self.ours.key_dim
        query = self.draw(self.query_heads, dim) * 1.5
        key, value = self.draw(layer.heads, dim), self.draw(layer.heads, layer.value_dim)
        ours = layer.attend(query, Pending(key, value, layer.length), None, None, dim**-0.5, softcap, sinks, None)
        pending = Pending(key, value, self.reference.length)
        if check_reference:
            want = self.reference.attend(query, pending, None, None, dim**-0.5, softcap, sinks, None)
        else:
            want = self.reference.commit(pending, None)
        return query, ours, want


def make_twins(query_heads=4, heads=2, dim=16, value_dim=None, tokens=300, pads=(0, 37), dtype=torch.float32, seed=0, scale=1.0,
               **settings) -> Twins:
    config = PSAConfig(**{"min_context": 0, "block_size": 16, "round_blocks": 2, "threshold": 0.7, **settings})
    generator = torch.Generator().manual_seed(seed)
    value_dim = value_dim or dim
    rows = len(pads)
    layers = []
    keys = (torch.randn(rows, heads, tokens, dim, generator=generator) * scale + torch.randn(1, heads, 1, dim, generator=generator)).to(dtype)
    values = torch.randn(rows, heads, tokens, value_dim, generator=generator).to(dtype)
    queries = torch.randn(rows, query_heads, tokens, dim, generator=generator).to(dtype)
    valid = torch.arange(tokens) >= torch.tensor(pads)[:, None]
    valid = None if valid.all() else valid
    for _ in range(2):
        layer = PSALayer(CacheState(config, layers=1), 0, 0)
        layer.lazy_initialization(keys, values)
        layer.group = query_heads // heads
        layer.commit(Pending(keys, values, 0), valid)
        layer.digests.observe(queries, heads, valid)
        layers.append(layer)
    layers[1].state.kernels = lambda device, dtype: False
    return Twins(*layers, query_heads, dtype, generator)


def float64_attention(layer: PSALayer, query, softcap=0.0, sinks=None) -> torch.Tensor:
    keys, values = (part.double() for part in layer.padded())
    group = query.shape[1] // layer.heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = query.double() @ keys.transpose(-1, -2) * layer.key_dim**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if layer.ragged:
        logits = logits.masked_fill(~layer.valid[:, None, None], -math.inf)
    if sinks is None:
        return torch.softmax(logits, -1) @ values
    extra = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.softmax(torch.cat([logits, extra], -1), -1)[..., :-1] @ values


SHAPES = [  # query heads, KV heads, key dim, value dim
    pytest.param(2, 2, 16, 16, id="group1"), pytest.param(6, 2, 16, 24, id="group3-wide-values"),
    pytest.param(5, 1, 20, 20, id="group5-dim20"), pytest.param(8, 1, 32, 32, id="group8"),
]


@pytest.mark.parametrize(("query_heads", "heads", "dim", "value_dim"), SHAPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_reading_everything_is_dense_attention(query_heads, heads, dim, value_dim, block_size):
    twins = make_twins(query_heads, heads, dim, value_dim, threshold=1.0, block_size=block_size)
    for _ in range(2):
        query, ours, _ = twins.step(check_reference=False)
        torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=1e-4, atol=1e-5)
    stats = twins.ours.stats.as_dict(0, "psa", False)
    assert stats["kv_fraction"] == 1.0 and stats["coverage"] == pytest.approx(1.0, abs=1e-4)
    assert torch.equal(twins.ours.lengths, twins.reference.lengths)


@pytest.mark.parametrize("settings", [dict(), dict(group_stop="min"), dict(reuse=4, reuse_refresh=0), dict(top_p=0.9999)],
                         ids=["mean", "min", "reuse", "below-one"])  # fmt: skip
def test_top_p_of_one_reads_everything(settings):
    """Also where attention is so peaked that most blocks hold nothing that a float could tell from no mass."""
    twins = make_twins(scale=12.0, **{"block_size": 8, "policy": "top_p", "top_p": 1.0, **settings})
    everything = twins.ours.config.top_p == 1.0
    for _ in range(2):
        query, ours, _ = twins.step()
        if everything:
            torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=1e-4, atol=1e-5)
    for layer in (twins.ours, twins.reference):
        assert (layer.stats.as_dict(0, "psa", False)["kv_fraction"] == 1.0) is everything


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (5.0, False), (0.0, True)], ids=["plain", "softcap", "sinks"])
def test_softcap_sinks_and_types(dtype, softcap, sinks):
    twins = make_twins(threshold=1.0, dtype=dtype)
    logits = torch.tensor([0.5, 3.0, -2.0, 1.0]) if sinks else None
    query, ours, _ = twins.step(softcap, logits, check_reference=False)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query, softcap, logits), rtol=10 * tolerance,
                               atol=tolerance)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["plain", "softcap"])
def test_estimates_are_the_digests(block_size, softcap):
    twins = make_twins(8, 2, 32, tokens=128 * 3 + 40, block_size=block_size)
    query, _, _ = twins.step(softcap)
    layer = twins.reference
    work = twins.ours.state.static._work(twins.ours)
    units = (layer.length - 1) // 128
    scaled = query.float().squeeze(2).unflatten(1, (2, 4)) * 32**-0.5
    want = layer.digests.score(scaled, units, softcap)
    last = int(layer.tail_start(layer.lengths).min())
    got = work.estimate[..., 1:last] * LN2
    difference = (got - want[..., 1:last]).abs()
    assert last > 4 and difference.max() < 0.01             # the query has 16 bits


@pytest.mark.parametrize("settings", [
    dict(threshold=0.5), dict(threshold=0.9), dict(threshold=0.7, group_stop="min"),
    dict(threshold=0.3, min_blocks=0.5),
    dict(threshold=0.99, max_blocks=0.6), dict(policy="top_k", top_k=8),
    dict(policy="top_k", top_k=0.4), dict(policy="top_p", top_p=0.7),
], ids=str)
def test_blocks_read_agree_with_the_reference(settings):
    twins = make_twins(tokens=400, block_size=8, scale=2.0, **settings)
    for _ in range(4):
        _, ours, _ = twins.step()
        assert torch.isfinite(ours).all()
    ours, want = (layer.stats.as_dict(0, "psa", False) for layer in (twins.ours, twins.reference))
    assert want["kv_fraction"] < 1.0                       # or there is nothing to agree on
    assert ours["blocks_held"] == want["blocks_held"]
    # The kernels plan a little beyond the threshold and drop nothing of it; the reference stops between rounds.
    assert 0.94 <= ours["blocks_read"] / want["blocks_read"] <= 1.15
    assert want["coverage"] - 0.02 <= ours["coverage"] <= want["coverage"] + 0.05


def test_captured_mass_is_that_of_the_blocks_read():
    twins = make_twins(threshold=1.0)
    query, _, _ = twins.step()
    got = torch.tensor(twins.ours.stats.as_dict(0, "psa", False)["captured_log_mass"])
    want = torch.tensor(twins.reference.stats.as_dict(0, "psa", False)["captured_log_mass"])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_unit_closed_by_the_kernels_has_the_digest_of_the_reference():
    twins = make_twins(tokens=128 * 2 - 3, pads=(0, 1))
    for _ in range(6):
        twins.step()
    ours, want = twins.ours.digests, twins.reference.digests
    assert int(twins.ours.lengths[0]) // 128 == 2 and int(twins.ours.lengths[1]) // 128 == 2
    for name, a, b in zip(ours.digest.unit_layout(torch.float32), ours.unit, want.unit):
        a, b = a[:, :, :2], b[:, :, :2]
        if a.dtype == torch.uint8:                          # a value on the edge of two codes may fall to either
            assert (a != b).float().mean() < 0.002, name
        else:
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-3, atol=1e-6)


def test_a_unit_that_is_reopened_gets_a_new_digest():
    twins, plain = make_twins(tokens=128 * 2 - 3, pads=(0, 0)), make_twins(tokens=128 * 2 - 3, pads=(0, 0))
    for _ in range(5):
        twins.step(check_reference=False)                  # closes the second unit with tokens that are taken back
    twins.ours.crop(-5)
    plain.step(check_reference=False)
    plain.ours.crop(-1)                                    # calibrated like the other, and nothing else
    key, value = torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(9)), torch.zeros(2, 2, 6, 16)
    query = torch.ones(2, 4, 1, 16)
    outputs = []
    for layer in (twins.ours, plain.ours):
        # At once, as a new turn comes: no step of the kernels sees the unit close.
        layer.attend(query.expand(-1, -1, 6, -1), Pending(key, value, layer.length), None, None, 0.25, 0.0, None, None)
        pending = Pending(key[:, :, :1], value[:, :, :1], layer.length)
        outputs.append(layer.attend(query, pending, None, None, 0.25, 0.0, None, None))
    for a, b in zip(twins.ours.digests.unit, plain.ours.digests.unit):
        assert torch.equal(a[:, :, :2], b[:, :, :2])
    torch.testing.assert_close(*outputs)


def test_masses_far_from_their_estimates_stay_finite():
    """Keys this large make estimates wrong by hundreds of bits; the result is still attention over what was read."""
    twins = make_twins(tokens=400, block_size=8, scale=12.0, threshold=0.85)
    for layer in (twins.ours, twins.reference):
        layer.pool.kv.mul_(4.0)
    for _ in range(3):
        _, ours, _ = twins.step()
        assert torch.isfinite(ours).all()
    stats = twins.ours.stats.as_dict(0, "psa", False)
    assert 0.0 <= stats["coverage"] <= 1.0


def test_the_threshold_holds_where_the_estimates_were_too_high():
    """Ranked blocks are planned by their estimates; where these gave too little, more is read."""
    twins = make_twins(tokens=700, block_size=8, threshold=0.9, max_blocks=None, pads=(0, 0))
    layer = twins.ours
    layer.begin_step()
    # Estimates that put all of the mass into the first candidates.
    for name, part in zip(layer.digests.digest.unit_layout(torch.float32), layer.digests.unit):
        if name == "minimum":
            part[:, :, 0] += 3.0
    for _ in range(2):
        query, ours, _ = twins.step(check_reference=False)
    keys, _ = layer.padded()
    logits = torch.einsum("bhgd,bhtd->bhgt", query.squeeze(2).unflatten(1, (2, 2)) * 0.25, keys)
    captured = torch.tensor(layer.stats.as_dict(0, "psa", False)["captured_log_mass"]).view(2, 2, 2)
    assert torch.isfinite(ours).all()
    assert (captured <= torch.logsumexp(logits, -1) + 1e-4).all()
    assert layer.stats.as_dict(0, "psa", False)["coverage"] >= 0.9 - 1e-3


@pytest.mark.parametrize("group_stop", ["mean", "min"])
def test_what_is_read_on_is_joined_to_what_was_planned(group_stop):
    """Estimates that are far too high for some blocks: little else is planned, and together with the rest it is dense."""
    twins = make_twins(query_heads=6, tokens=700, block_size=8, threshold=0.9999, pads=(0, 0), group_stop=group_stop)
    layer = twins.ours
    layer.begin_step()
    for name, part in zip(layer.digests.digest.unit_layout(torch.float32), layer.digests.unit):
        if name == "minimum":
            part[:, :, 1] += 6.0
    sinks, query, key = torch.randn(6, generator=twins.generator), twins.draw(6, 16).abs(), twins.draw(2, 16)
    ours = layer.attend(query, Pending(key, key, layer.length), None, None, 0.25, 0.0, sinks, None)
    twins.reference.commit(Pending(key, key, twins.reference.length), None)
    info = layer.state.static._work(layer).info
    short = (info[..., 5] == 1) & (info[..., 0] < info[..., 1] // 2)
    assert bool(short.any())                                # rows of which less than half was planned, and not enough
    assert int(info[..., 6].abs().max()) == 0               # ready for the next step
    torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query, sinks=sinks), rtol=2e-3, atol=2e-3)
    assert layer.stats.as_dict(0, "psa", False)["coverage"] >= 0.9999 - 1e-5


@pytest.mark.parametrize("settings", [dict(policy="top_k", top_k=12), dict(threshold=0.9, max_blocks=12)], ids=str)
def test_a_block_that_outweighs_the_others_is_read_wherever_it_is(settings):
    """The others' shares are too small for the search to tell apart, and there are more of them than the budget takes."""
    twins = make_twins(tokens=420, block_size=8, pads=(0, 0), **settings)
    for layer in (twins.ours, twins.reference):
        for row in range(2):
            layer.pool.kv[layer.table[row, :, 37], :8 * 16] = 8.0
    query, key = torch.ones(2, 4, 1, 16), torch.zeros(2, 2, 1, 16)
    ours = twins.ours.attend(query, Pending(key, key, twins.ours.length), None, None, 0.25, 0.0, None, None)
    twins.reference.commit(Pending(key, key, twins.reference.length), None)
    torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=1e-4, atol=1e-5)
    assert twins.ours.stats.as_dict(0, "psa", False)["kv_fraction"] < 0.7


def test_what_was_never_written_is_never_read():
    clean, dirty = make_twins(tokens=300), make_twins(tokens=300)
    layer = dirty.ours
    layer.begin_step()
    used = torch.zeros(layer.pool.slots, dtype=torch.bool)
    used[layer.table[:, :, : -(-300 // 16)].reshape(-1)] = True
    layer.pool.kv[~used] = math.nan
    for part in layer.digests.unit:
        if part.is_floating_point():
            part[:, :, 300 // 128 + 1:] = math.nan
    for _ in range(3):
        (_, a, _), (_, b, _) = clean.step(check_reference=False), dirty.step(check_reference=False)
        assert torch.isfinite(b).all() and torch.equal(a, b)


def test_a_row_reads_what_it_reads_alone():
    both, alone = make_twins(pads=(0, 60), tokens=360), make_twins(pads=(0, 60), tokens=360)
    alone.ours.batch_select_indices(torch.tensor([1]))
    layer = alone.ours
    for _ in range(2):
        query, ours, _ = both.step(check_reference=False)
        key = both.ours.padded()[0][1:, :, -1:], both.ours.padded()[1][1:, :, -1:]
        single = layer.attend(query[1:], Pending(*key, layer.length), None, None, layer.key_dim**-0.5, 0.0, None, None)
        torch.testing.assert_close(single, ours[1:], rtol=1e-5, atol=1e-6)


def test_growing_and_reordering_keep_the_kernels_on_the_right_buffers():
    twins = make_twins(threshold=1.0, tokens=125, block_size=16)
    for index in range(12):
        if index == 6:
            for layer in (twins.ours, twins.reference):
                layer.reorder_cache(torch.tensor([1, 0]))
        query, ours, _ = twins.step(check_reference=False)
    torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=1e-4, atol=1e-5)


def test_short_rows_of_a_long_batch_are_read_whole():
    twins = make_twins(pads=(0, 250), tokens=400, block_size=8, threshold=0.3, min_context=200)
    query, ours, _ = twins.step()
    torch.testing.assert_close(ours[1].double(), float64_attention(twins.reference, query)[1], rtol=1e-4, atol=1e-5)
    assert twins.ours.stats.as_dict(0, "psa", False)["kv_fraction"] < 1.0
