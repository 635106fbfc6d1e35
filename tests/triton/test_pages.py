"""The kernels that rank by logical pages, interpreted, against the digest and the reference step."""
from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.cache.backend import unsupported
from tests.triton.test_decode_kernels import float64_attention, make_twins

LN2 = math.log(2.0)
TOP = dict(policy="top_k", top_k=5)
SIZES = [pytest.param(64, 16, 0.0, id="64-16"), pytest.param(64, 64, 5.0, id="64-64-softcap"), pytest.param(64, 4, 0.0, id="64-4"),
         pytest.param(32, 16, 5.0, id="32-16-softcap"), pytest.param(8, 2, 0.0, id="8-2"), pytest.param(16, 1, 0.0, id="16-1")]


BIN = 2 ** (24 / 512)                                   # shares that the cut may take for equal (hf_sparse/selection/cut.py)


def check_step(twins, tolerance):
    """A step of the kernels: the blocks that it chose are the best by the digest, and the output is attention over them."""
    layer = twins.ours
    start = layer.tail_start(layer.lengths + 1)
    query, ours, _ = twins.step()
    config, P, dim = layer.config, layer.config.block_size, layer.key_dim
    work = layer.state.static._work(layer)
    q = query.float().squeeze(2).unflatten(1, (layer.heads, -1)) * dim**-0.5
    estimate = twins.reference.digests.score(q, int(start.max()), 0.0).double()
    keys, values = (part.double() for part in layer._compact())
    logits = torch.einsum("bhgd,bhtd->bhgt", q.double(), keys)
    block = torch.arange(keys.shape[2]) // P
    for row in range(layer.batch):
        length, first = int(layer.lengths[row]), int(start[row])
        count = min(first - 1, config.top_k - 1 - (-(-length // P) - first))
        for head in range(layer.heads):
            assert int(work.info[row, head, 0]) == count > 0
            chosen = work.ranked[row, head, :count].tolist()
            token = torch.arange(len(block)) < length
            forced = torch.logsumexp(logits[row, head][:, ((block == 0) | (block >= first)) & token], -1)
            total = torch.logaddexp(forced, torch.logsumexp(estimate[row, head, :, 1:first], -1))
            share = torch.exp(estimate[row, head] - total[:, None]).mean(0)
            others = [n for n in range(1, first) if n not in chosen]
            assert len(set(chosen)) == count and min(chosen) >= 1 and max(chosen) < first
            assert min(share[chosen]) >= max(share[others]) / BIN * (1 - 1e-4)
            seen = ((block == 0) | (block >= first) | torch.isin(block, torch.tensor(chosen))) & token
            want = torch.softmax(logits[row, head].masked_fill(~seen, -math.inf), -1) @ values[row, head]
            got = ours[row].squeeze(1).unflatten(0, (layer.heads, -1))[head].double()
            torch.testing.assert_close(got, want, rtol=10 * tolerance, atol=tolerance)


def taken(twins):
    """Twins whose layer has taken a step by the kernels."""
    assert unsupported(twins.ours.config) is None
    query, ours, want = twins.step()
    assert twins.ours.stats.reference_steps == 0 and twins.ours.stats.sparse_steps == 1
    return query, ours, want


@pytest.mark.parametrize(("block_size", "logical_size", "softcap"), SIZES)
def test_estimates_are_the_digests(block_size, logical_size, softcap):
    twins = make_twins(6, 2, 20, tokens=7 * block_size + 3, pads=(0, block_size + 2), digest="pages", block_size=block_size,
                       logical_size=logical_size, **TOP)
    query, _, _ = twins.step(softcap)
    layer = twins.reference
    work = twins.ours.state.static._work(twins.ours)
    want = layer.digests.score(query.float().squeeze(2).unflatten(1, (2, 3)) * 20**-0.5, 7, softcap)
    got = work.estimate[:, :, :3] * LN2
    for row, blocks in enumerate((7, 6)):
        torch.testing.assert_close(got[row, ..., 1:blocks], want[row, ..., 1:blocks], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("query_heads", "heads", "dim"), [(2, 2, 16), (5, 1, 20), (8, 1, 32), (34, 2, 16)],
                         ids=["group1", "group5-dim20", "group8", "group17"])
def test_shapes_and_types(query_heads, heads, dim, dtype):
    twins = make_twins(query_heads, heads, dim, tokens=500, dtype=dtype, digest="pages", block_size=16, logical_size=4,
                       scale=2.0, policy="top_k", top_k=9)
    for _ in range(2):
        check_step(twins, 1e-5 if dtype == torch.float32 else 2e-3)
    ours, want = (layer.stats.as_dict(0, "psa", False) for layer in (twins.ours, twins.reference))
    assert ours["blocks_read"] == want["blocks_read"] and want["kv_fraction"] < 0.5


@pytest.mark.parametrize("digest", ["pages", "min_max"])
def test_the_best_blocks_by_the_digest_are_read(digest):
    twins = make_twins(tokens=420, digest=digest, block_size=8, logical_size=2, scale=2.0, policy="top_k", top_k=15)
    taken(twins)
    for _ in range(9 if digest == "pages" else 2):          # over the end of a block
        check_step(twins, 1e-5)
    assert twins.ours.stats.as_dict(0, "psa", False)["kv_fraction"] < 0.4


def test_scores_below_zero_lose_to_no_block_without_one():
    """Rows of different lengths, keys against which every query stands: what lies behind a row's end has no score, not 0."""
    twins = make_twins(6, 2, tokens=420, pads=(0, 300, 370), digest="pages", block_size=8, logical_size=2, **TOP)
    for layer in (twins.ours, twins.reference):
        layer.pool.kv.abs_().neg_().sub_(1.0)
    draw = twins.draw
    twins.draw = lambda heads, dim: draw(heads, dim).abs() if heads == 6 else -draw(heads, dim).abs() - 1
    for _ in range(3):
        check_step(twins, 1e-5)
    assert twins.ours.state.static._work(twins.ours).estimate[:, :, :3, 1:4].max() < 0


def test_scores_beyond_half_precision():
    twins = make_twins(4, 2, 32, tokens=200, dtype=torch.float16, digest="pages", block_size=16, logical_size=4, scale=3000.0,
                       **TOP)
    query, ours, _ = twins.step()
    layer, work = twins.reference, twins.ours.state.static._work(twins.ours)
    want = layer.digests.score(query.float().squeeze(2).unflatten(1, (2, 2)) * 32**-0.5, 11, 0.0)
    assert torch.isfinite(ours).all() and want.max() > 65504 * 32**-0.5
    torch.testing.assert_close(work.estimate[0, ..., 1:11] * LN2, want[0, ..., 1:11], rtol=1e-5, atol=1e-3)


def test_the_digests_choose_differently():
    """Or the tests above would not tell them apart."""
    reads = []
    for digest in ("pages", "min_max"):
        twins = make_twins(tokens=420, digest=digest, block_size=8, logical_size=2, scale=2.0, policy="top_k", top_k=0.3)
        reads.append(taken(twins)[1])
    assert not torch.allclose(*reads, rtol=1e-3, atol=1e-3)


def test_reading_everything_is_dense_attention():
    twins = make_twins(digest="pages", block_size=16, logical_size=8, threshold=1.0)
    for _ in range(3):
        query, ours, _ = twins.step(check_reference=False)
        torch.testing.assert_close(ours.double(), float64_attention(twins.reference, query), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_a_block_closed_by_the_kernels_has_the_digest_of_the_reference(dtype):
    twins = make_twins(tokens=61, pads=(0, 5), dim=20, dtype=dtype, digest="pages", block_size=16, logical_size=4, **TOP)
    twins.ours.begin_step()
    for part in twins.ours.digests.unit:                    # what was there before must not get into a new page
        part[:, :, 3:] = 1e4
    for _ in range(30):
        twins.step()
    for a, b in zip(twins.ours.digests.unit, twins.reference.digests.unit):
        for row, length in enumerate(twins.ours.lengths.tolist()):
            closed = length // 16
            assert closed >= 5 and a.dtype == dtype
            assert torch.equal(a[row, :, :closed], b[row, :, :closed])


def test_a_sink_block_closed_by_the_kernels_is_kept_out():
    twins = make_twins(tokens=20, pads=(0, 0), digest="pages", block_size=16, logical_size=4, sink_blocks=3, **TOP)
    for _ in range(46):
        twins.step(check_reference=False)
    for part in twins.ours.digests.unit:
        assert not part[:, :, :3].any() and part[:, :, 3].any()     # the third block was closed by the kernels


def test_a_block_that_is_never_closed_is_never_ranked():
    """Room for digests that nobody has written holds anything."""
    clean, dirty = (make_twins(tokens=300, digest="pages", block_size=16, logical_size=4, **TOP) for _ in range(2))
    dirty.ours.begin_step()
    for part in dirty.ours.digests.unit:
        for row, length in enumerate(dirty.ours.lengths.tolist()):
            part[row, :, length // 16:] = math.nan
    for _ in range(3):
        (_, a, _), (_, b, _) = clean.step(check_reference=False), dirty.step(check_reference=False)
        assert torch.isfinite(b).all() and torch.equal(a, b)
