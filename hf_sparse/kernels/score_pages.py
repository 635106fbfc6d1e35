"""Ranking by logical pages: estimated log2 mass of every block from the boxes of its keys (digests/pages.py).

The best corner of a box is two products, since M is never below m: max(q M, q m) = max(q, 0) M + min(q, 0) m. So the tensor
core does it, for all heads of a group at once, and the pass costs little more than its bytes.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .online_softmax import softcap_log2


@triton.jit
def score_pages(desc, Q, q_b, q_h, scale, softcap, pid, stripe, stripes, H: tl.constexpr, MAPPED: tl.constexpr,
                G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
                PAGES: tl.constexpr, TB: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr):
    """A stripe of the blocks of a row and KV head, TB at once, for all query heads; scale includes log2(e)."""
    PT: tl.constexpr = TB * PAGES
    GQ: tl.constexpr = 16 if GP < 16 else GP
    length = tl.load(d.address(desc, d.LENGTHS, tl.int64) + pid // H)
    blocks = (length // P).to(tl.int32)
    if stripe * TB < blocks:
        capacity = tl.load(desc + d.UNITS)
        width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
        estimate = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width
        upper = d.address(desc, d.HIGH, TYPE) + pid * capacity * (PAGES * D)
        lower = d.address(desc, d.LOW, TYPE) + pid * capacity * (PAGES * D)
        rq, rd, rb, rp = tl.arange(0, GQ), tl.arange(0, DP), tl.arange(0, TB), tl.arange(0, PT)
        head = d.model_head(desc, pid % H, MAPPED) * G + rq
        q = tl.load(Q + pid // H * q_b + head[None, :] * q_h + rd[:, None], mask=(rq < G)[None, :] & (rd < D)[:, None],
                    other=0.0)
        rising, falling = tl.where(q > 0, q, 0.0).to(TYPE), tl.where(q < 0, q, 0.0).to(TYPE)
        for first in range(stripe * TB, blocks, stripes * TB):
            page = first * PAGES + rp
            at = page.to(tl.int64)[:, None] * D + rd[None, :]
            there = (page < blocks * PAGES)[:, None] & (rd < D)[None, :]
            high = tl.load(upper + at, mask=there, other=0.0)
            low = tl.load(lower + at, mask=there, other=0.0)
            s = tl.dot(high, rising, input_precision="ieee")
            s = tl.dot(low, falling, s, input_precision="ieee") * scale
            if PAGES > 1:
                s = tl.max(tl.reshape(s, [TB, PAGES, GQ]), 1)
            if CAP:
                s = softcap_log2(s, softcap)
            n = first + rb
            tl.store(estimate + rq[None, :] * width + n[:, None], s + tl.log2(tl.full([], P, tl.float32)),
                     mask=(rq < GP)[None, :] & (n < blocks)[:, None])
