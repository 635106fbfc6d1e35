"""The decode step of streaming heads: reference and kernel against float64 over a plain list of tokens."""
from __future__ import annotations

import pytest
import torch

from hf_sparse.kernels.reference import streaming as reference
from hf_sparse.kernels.streaming import ring_step

SHAPES = [
    # batch, KV heads of the model, streaming ones, group, D, Dv, sink, window, slack, past tokens, softcap, sinks
    pytest.param(2, 4, (0, 3), 2, 16, 16, 8, 24, 4, (3, 0), 0.0, False, id="short"),
    pytest.param(2, 3, (1,), 3, 24, 16, 5, 17, 6, (90, 41), 0.0, True, id="wrapped-sinks"),
    pytest.param(1, 2, (0, 1), 1, 20, 12, 0, 31, 3, (77,), 20.0, False, id="no-sink-softcap"),
    pytest.param(3, 5, (4, 0, 2), 7, 16, 16, 16, 16, 8, (15, 16, 47), 0.0, True, id="borders"),
]


def expected(query, keys, values, sink, window, scaling, softcap, logits):
    """One row and KV head: query [G, D], all its tokens [T, D] -> [G, Dv], float64."""
    token = torch.arange(keys.shape[0])
    seen = (token < sink) | (token >= keys.shape[0] - window)
    s = query.double() @ keys.double().T * scaling
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, -torch.inf)
    if logits is not None:
        s = torch.cat([s, logits.double()[:, None]], 1)
    return s.softmax(-1)[:, :keys.shape[0]] @ values.double()


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("min_context", [0, 60], ids=["windows", "short-rows-whole"])
@pytest.mark.parametrize("B, HM, heads, G, D, DV, sink, window, slack, past, softcap, sinks", SHAPES)
def test_steps_follow_the_window(B, HM, heads, G, D, DV, sink, window, slack, past, softcap, sinks, min_context, kernel):
    g = torch.Generator().manual_seed(7)
    new = lambda *size: torch.randn(*size, generator=g)  # noqa: E731
    columns = sink + max(window, min_context) + slack
    H, scaling = len(heads), D**-0.5
    index = torch.tensor(heads)
    history = [(new(HM, length, D), new(HM, length, DV)) for length in past]
    ring_k, ring_v = torch.full((B, H, columns, D), 99.0), torch.full((B, H, columns, DV), 99.0)
    lengths = torch.tensor(past)[:, None].repeat(1, H)
    for b, (k, v) in enumerate(history):
        token = torch.arange(past[b])
        token = token[(token < sink) | (token >= past[b] - (columns - sink))]
        at = reference.ring_columns(token, sink, columns)
        ring_k[b][:, at], ring_v[b][:, at] = k[index][:, token], v[index][:, token]
    logits = new(HM * G) if sinks else None
    for _ in range(5):
        q, k, v = new(B, HM * G, 1, D), new(B, HM, 1, D), new(B, HM, 1, DV)
        history = [(torch.cat([a, k[b]], 1), torch.cat([c, v[b]], 1)) for b, (a, c) in enumerate(history)]
        own = q.unflatten(1, (HM, G))[:, index].flatten(1, 2)
        own_logits = None if logits is None else logits.view(HM, G)[index].flatten()
        if kernel:
            out = torch.full((B, 1, HM * G, DV), 5.0)
            desc = torch.tensor([ring_k.data_ptr(), ring_v.data_ptr(), lengths.data_ptr(), columns])
            ring_step(desc, index.int(), HM, q, k, v, logits, out, sink, window, slack, min_context, scaling, softcap)
            others = [head for head in range(HM) if head not in heads]
            got = out.view(B, HM, G, DV)
            assert bool((got[:, others] == 5.0).all())
            got = got[:, index]
        else:
            got = reference.ring_step(ring_k, ring_v, lengths, own, k[:, index], v[:, index], sink, window, slack, min_context,
                                      scaling, softcap, own_logits).view(B, H, G, DV)
        for b, (keys, values) in enumerate(history):
            visible = columns - sink - slack if keys.shape[1] < min_context else window
            for i, head in enumerate(heads):
                want = expected(q[b, head * G:(head + 1) * G, 0], keys[head], values[head], sink, visible, scaling, softcap,
                                None if logits is None else logits[head * G:(head + 1) * G])
                torch.testing.assert_close(got[b, i].double(), want, atol=2e-5, rtol=2e-5)
    assert lengths.tolist() == [[length + 5] * H for length in past]
