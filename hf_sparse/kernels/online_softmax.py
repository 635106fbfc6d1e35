"""Softmax over tokens that come a tile at a time, for all query heads of a KV head."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softcap_log2(s, softcap):
    """Base-2 logits -> base-2 logits of softcap * tanh(natural logit / softcap)."""
    x = s * (0.6931471805599453 / softcap)
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t) * (softcap * 1.4426950408889634)


@triton.jit
def add_tile(qq, k, v, seen, top, total, acc, scale, softcap, TYPE: tl.constexpr, CAP: tl.constexpr):
    """Queries [R, D] attend to one more tile: k [D, T], v [T, Dv], of which the tokens `seen` [T] count.

    top, total [R], acc [R, Dv]: largest logit so far, sum of 2^(logit - top), and the same sum over values, not divided by it;
    at first -inf, 0 and 0. `scale` includes log2(e).

    Returns:
        (top, total, acc)
    """
    s = tl.dot(qq, k, input_precision="ieee") * scale
    if CAP:
        s = softcap_log2(s, softcap)
    s = tl.where(seen[None, :], s, float("-inf"))
    peak = tl.maximum(top, tl.max(s, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    acc = acc * fade[:, None] + tl.dot(p.to(TYPE), v, input_precision="ieee")
    return peak, total * fade + tl.sum(p, 1), acc
