"""Exact attention with every kind of mask, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.kernels.reference import dense
from hf_sparse.kernels.reference.dense import exact_attention
from tests import references


def draw(heads=2, group=3, queries=9, tokens=9, dim=16, value_dim=24, dtype=torch.float32):
    return (
        torch.randn(2, heads * group, queries, dim).to(dtype),
        torch.randn(2, heads, tokens, dim).to(dtype),
        torch.randn(2, heads, tokens, value_dim).to(dtype),
    )


def expected(query, keys, values, visible, scaling, softcap=0.0, sinks=None, bias=None):
    """`visible` [B, Hq, Q, T] bool; `bias` the same shape, added to the logits (only without softcap)."""
    B, Hq, Q, _ = query.shape
    group = Hq // keys.shape[1]
    output = torch.zeros(B, Hq, Q, values.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(Hq):
            for i in range(Q):
                one, k, v = (
                    query[b, h, i : i + 1].double() * scaling,
                    keys[b, h // group].double(),
                    values[b, h // group],
                )
                if bias is not None:
                    # A bias on a logit is one more channel of the key that the query reads with weight 1.
                    one, k = (
                        torch.cat([one, torch.ones(1, 1)], 1),
                        torch.cat([k, bias[b, h, i, :, None].double()], 1),
                    )
                sink = None if sinks is None else sinks[h : h + 1]
                output[b, h, i] = references.attention(one, k, v, visible[b, h, i], softcap, sink)[0][0]
    return output


EXTRAS = [
    pytest.param(0.0, False, id="plain"),
    pytest.param(2.0, False, id="softcap"),
    pytest.param(0.0, True, id="sinks"),
    pytest.param(2.0, True, id="softcap-sinks"),
]


@pytest.mark.parametrize(("softcap", "with_sinks"), EXTRAS)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "bool-one-row", "bool-per-head"])
def test_masks(kind, softcap, with_sinks):
    query, keys, values = draw()
    sinks = torch.randn(6) if with_sinks else None
    mask = None
    visible = torch.ones(2, 6, 9, 9, dtype=torch.bool)
    if kind == "causal":
        visible = visible.tril()
    elif kind != "none":
        shape = {"bool": (2, 1, 9, 9), "bool-one-row": (2, 1, 1, 9), "bool-per-head": (2, 6, 9, 9)}[kind]
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True
        visible = mask.expand(2, 6, 9, 9)
    output = exact_attention(query, keys, values, mask, 0.3, softcap, sinks, causal=kind == "causal")
    reference = expected(query, keys, values, visible, 0.3, softcap, sinks)
    torch.testing.assert_close(output.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])
@pytest.mark.parametrize(("softcap", "with_sinks"), EXTRAS)
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_the_last_queries_of_a_row(queries, softcap, with_sinks, device):
    """Causal for fewer queries than keys: the last one sees everything. On a GPU in 16 bits, for its fast kernels."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    query, keys, values = draw(queries=queries, value_dim=16, dtype=dtype)
    sinks = torch.randn(6) if with_sinks else None
    on_device = lambda x: None if x is None else x.to(device)  # noqa: E731
    output = exact_attention(*map(on_device, (query, keys, values)), None, 0.3, softcap, on_device(sinks), causal=True)
    visible = torch.ones(2, 6, 9, 9, dtype=torch.bool).tril()[:, :, -queries:]
    reference = expected(query, keys, values, visible, 0.3, softcap, sinks)
    tolerance = 1e-5 if device == "cpu" else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.cpu().double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_additive_mask(with_sinks):
    query, keys, values = draw()
    sinks = torch.randn(6) if with_sinks else None
    visible = torch.rand(2, 1, 9, 9) < 0.6
    visible[..., 2] = True
    bias = torch.randn(2, 1, 9, 9)
    mask = bias.masked_fill(~visible, torch.finfo(torch.float32).min)
    output = exact_attention(query, keys, values, mask, 0.3, 0.0, sinks)
    reference = expected(
        query, keys, values, visible.expand(2, 6, 9, 9), 0.3, 0.0, sinks, bias.expand(2, 6, 9, 9)
    )
    torch.testing.assert_close(output.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("softcap", "with_sinks"), EXTRAS)
def test_half_precision(dtype, softcap, with_sinks):
    query, keys, values = draw(dtype=dtype)
    sinks = torch.randn(6) if with_sinks else None
    output = exact_attention(query, keys, values, None, 0.3, softcap, sinks, causal=True)
    visible = torch.ones(2, 6, 9, 9, dtype=torch.bool).tril()
    reference = expected(query, keys, values, visible, 0.3, softcap, sinks)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), reference, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("softcap", "with_sinks"), EXTRAS[1:])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mask"])
def test_long_prompts_in_pieces(monkeypatch, causal, softcap, with_sinks):
    """The bound on temporaries cuts the queries, which must not show."""
    query, keys, values = draw(queries=37, tokens=37)
    sinks = torch.randn(6) if with_sinks else None
    mask = None if causal else (torch.rand(2, 1, 37, 37) < 0.5) | torch.eye(37, dtype=torch.bool)
    settings = (query, keys, values, mask, 0.3, softcap, sinks)
    whole = exact_attention(*settings, causal=causal)
    monkeypatch.setattr(dense, "LOGIT_ELEMENTS", 5 * 37)
    pieces = exact_attention(*settings, causal=causal)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("softcap", "with_sinks"), EXTRAS[1:])
def test_a_query_that_sees_nothing_is_finite(softcap, with_sinks):
    query, keys, values = draw()
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[1, :, 4] = False
    output = exact_attention(query, keys, values, mask, 0.3, softcap, torch.randn(6) if with_sinks else None)
    assert torch.isfinite(output).all()
    assert (output[1, :, 4] == 0).all()


def test_sinks_take_their_share():
    """A sink logit as large as everything else together halves the output."""
    query, keys, values = draw(queries=1)
    plain = exact_attention(query, keys, values, None, 0.3)
    _, mass = references.attention(query[0, 0] * 0.3, keys[0, 0], values[0, 0])
    halved = exact_attention(
        query[:1, :3], keys[:1, :1], values[:1, :1], None, 0.3, 0.0, mass.float().repeat(3)
    )
    torch.testing.assert_close(halved[0, 0], plain[0, 0] / 2, rtol=1e-5, atol=1e-6)
    assert math.isfinite(mass.item())
