"""Beside the ranking: store the token, finish a digest that closes, attend to the always-read blocks."""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .location import exact_offset, forced_base, forced_offset, host_offset
from .online_softmax import add_tile
from .quantise import fp16_range, quantise_block, round_even
from .residency import admit, settle


@triton.jit
def _encode_part(desc, kv, row, centre, order, unit, out, minimum, scale, first, R: tl.constexpr, BITS: tl.constexpr,
                 element, to_host, P: tl.constexpr, D: tl.constexpr, U: tl.constexpr, SINK: tl.constexpr,
                 E: tl.constexpr, NEWEST: tl.constexpr, KV_BITS: tl.constexpr, TIERED: tl.constexpr):
    """Codes of channels order[first : first + R] of one unit (digests/channel_codes.py says how), a few at a time: one
    program in 128 steps comes here, and must not cost the others their registers."""
    FIELDS: tl.constexpr = 8 // BITS
    ROWS: tl.constexpr = U // FIELDS
    TILE: tl.constexpr = 8
    levels = (1 << BITS) - 1
    j = tl.arange(0, ROWS)
    for c in range(0, R, TILE):
        r = c + tl.arange(0, TILE)
        inside = r < R
        channel = tl.load(order + first + r, mask=inside, other=0).to(tl.int32)
        mid = tl.load(centre + channel, mask=inside, other=0.0)
        low = tl.full([TILE], float("inf"), tl.float32)
        high = tl.full([TILE], float("-inf"), tl.float32)
        for f in range(FIELDS):
            token = unit * U + f * ROWS + j
            block = forced_offset(desc, row, token // P, token >= 0, element, to_host, E, SINK, NEWEST, KV_BITS, TIERED)
            at = block[:, None] + (token % P)[:, None] * D + channel[None, :]
            k = tl.load(kv + at, mask=inside[None, :], other=0.0).to(tl.float32) - mid[None, :]
            kept = (token >= SINK * P)[:, None] & inside[None, :]
            low = tl.minimum(low, tl.min(tl.where(kept, k, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(kept, k, float("-inf")), 0))
        empty = low > high
        base = fp16_range(tl.where(empty, 0.0, low))
        step = fp16_range((tl.where(empty, 0.0, high) - base.to(tl.float32)) / levels)
        tl.store(minimum + first + r, base, mask=inside)
        tl.store(scale + first + r, step, mask=inside)
        start, width = base.to(tl.float32), step.to(tl.float32)
        inverse = tl.where(width > 0, 1.0 / tl.where(width > 0, width, 1.0), 0.0)
        packed = tl.zeros([ROWS, TILE], tl.int32)
        for f in range(FIELDS):
            token = unit * U + f * ROWS + j
            block = forced_offset(desc, row, token // P, token >= 0, element, to_host, E, SINK, NEWEST, KV_BITS, TIERED)
            at = block[:, None] + (token % P)[:, None] * D + channel[None, :]
            k = tl.load(kv + at, mask=inside[None, :], other=0.0).to(tl.float32) - mid[None, :]
            code = tl.minimum(tl.maximum(round_even((k - start[None, :]) * inverse[None, :]), 0.0), levels * 1.0).to(tl.int32)
            code = tl.where((token >= SINK * P)[:, None], code, 0)
            packed = packed | (code << (BITS * f))
        tl.store(out + j[:, None] * R + r[None, :], packed.to(tl.uint8), mask=inside[None, :])


@triton.jit
def _encode_pages(kv, slot, upper, lower, skip, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGES: tl.constexpr,
                  TYPE: tl.constexpr):
    """Channel-wise maximum and minimum of the keys of each logical page of the block in a slot (digests/pages.py); zeros if
    it is to be skipped."""
    TOKENS: tl.constexpr = P // PAGES
    ROWS: tl.constexpr = min(TOKENS, 8)
    rd, rt = tl.arange(0, DP), tl.arange(0, ROWS)
    for page in range(PAGES):
        high = tl.full([DP], float("-inf"), tl.float32)
        low = tl.full([DP], float("inf"), tl.float32)
        for first in range(0, TOKENS, ROWS):
            at = kv + slot + (page * TOKENS + first + rt)[:, None] * D + rd[None, :]
            k = tl.load(at, mask=(rd < D)[None, :] & (rt >= 0)[:, None], other=0.0).to(tl.float32)
            high, low = tl.maximum(high, tl.max(k, 0)), tl.minimum(low, tl.min(k, 0))
        tl.store(upper + page * D + rd, tl.where(skip, 0.0, high).to(TYPE), mask=rd < D)
        tl.store(lower + page * D + rd, tl.where(skip, 0.0, low).to(TYPE), mask=rd < D)


@triton.jit
def append(desc, Q, K, V, OF, MF, q_b, q_h, k_b, k_h, v_b, v_h, scale, softcap, pid, piece, H: tl.constexpr,
           MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           DV: tl.constexpr, DVP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr,
           RECENT: tl.constexpr, TAIL: tl.constexpr, R4: tl.constexpr, R2: tl.constexpr, PAGES: tl.constexpr,
           PIECES: tl.constexpr,
           FT: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr, KV_BITS: tl.constexpr,
           NEWEST: tl.constexpr, TIERED: tl.constexpr, POLICY: tl.constexpr, BYTES: tl.constexpr, WORD: tl.constexpr,
           COPY: tl.constexpr, LEAVING: tl.constexpr):
    """One piece, FT tokens, of the always-read blocks of a row and KV head (sink, then tail).

    Q [B, Hq, D], K [B, H, D], V [B, H, DV] with strides; OF [B, H, PIECES, GP, DVP], MF [B, H, PIECES, GP]: output and
    log2 mass of the piece. `scale` includes log2(e). TIERED: with a host tier, `residency.py` has the other arguments.
    KV_BITS: below 16, closed blocks are quantised; this reads and writes the exact copies, of NEWEST blocks beside the
    sink, and packs the block that the token closes.
    """
    b, h = pid // H, d.model_head(desc, pid % H, MAPPED)
    U: tl.constexpr = P * UB
    lengths = d.address(desc, d.LENGTHS, tl.int64)
    length = tl.load(lengths + b)
    row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
    E: tl.constexpr = P * (D + DV)
    kv = forced_base(desc, pid, TYPE, E, SINK, NEWEST, KV_BITS)
    element = tl.multiple_of(tl.load(desc + d.ELEMENTS), 16)
    to_host = host_offset(desc, TYPE, TIERED)
    new = length + 1
    start = tl.maximum(tl.minimum(length // U * UB, length // P - RECENT), SINK)
    rd, rv = tl.arange(0, DP), tl.arange(0, DVP)
    column = length // P
    place = tl.where(column < SINK, column, column - start + SINK) * P + length % P
    if place // FT == piece:
        # The token is in this piece, so nobody else has to see it stored.
        slot = tl.load(row + column)
        if TIERED:
            slot = admit(desc, slot, length % P == 0, POLICY)
        slot = slot * element
        packed = slot
        if KV_BITS < 16:
            slot = exact_offset(column, E, SINK, NEWEST)
        inside = length % P
        tl.store(kv + slot + inside * D + rd, tl.load(K + b * k_b + h * k_h + rd, mask=rd < D, other=0.0), mask=rd < D)
        tl.store(kv + slot + P * D + inside * DV + rv, tl.load(V + b * v_b + h * v_h + rv, mask=rv < DV, other=0.0),
                 mask=rv < DV)
        tl.debug_barrier()
        if PAGES > 0:
            if new % P == 0:
                at = (pid * tl.load(desc + d.UNITS) + column) * (PAGES * D)
                upper, lower = d.address(desc, d.HIGH, TYPE) + at, d.address(desc, d.LOW, TYPE) + at
                _encode_pages(kv, slot, upper, lower, column < SINK, P, D, DP, PAGES, TYPE)
        elif new % U == 0:
            centre = d.address(desc, d.CENTRE, tl.float32) + pid * D
            order = d.address(desc, d.ORDER, tl.int16) + pid * D
            unit = new // U - 1
            at = pid * tl.load(desc + d.UNITS) + unit
            minimum = d.address(desc, d.MINIMUM, tl.float16) + at * (R4 + R2)
            steps = d.address(desc, d.SCALE, tl.float16) + at * (R4 + R2)
            high = d.address(desc, d.HIGH, tl.uint8) + at * (U // 2 * R4)
            low = d.address(desc, d.LOW, tl.uint8) + at * (U // 4 * R2)
            _encode_part(desc, kv, row, centre, order, unit, high, minimum, steps, 0, R4, 4, element, to_host, P, D, U, SINK,
                         E, NEWEST, KV_BITS, TIERED)
            _encode_part(desc, kv, row, centre, order, unit, low, minimum, steps, R4, R2, 2, element, to_host, P, D, U, SINK,
                         E, NEWEST, KV_BITS, TIERED)
        if KV_BITS < 16:
            if new % P == 0:
                quantise_block(kv + slot, d.address(desc, d.KV, tl.uint8) + packed, P, D, DV, DVP, KV_BITS)
        if TIERED:
            settle(desc, row, length, P, UB, SINK, RECENT, LEAVING, BYTES, WORD, COPY, POLICY)

    RQ: tl.constexpr = 16 if GP < 16 else GP
    rq = tl.arange(0, RQ)
    rt = tl.arange(0, TT)
    qq = tl.load(Q + b * q_b + (h * G + rq)[:, None] * q_h + rd[None, :],
                 mask=(rq < G)[:, None] & (rd < D)[None, :], other=0.0)
    top = tl.full([RQ], float("-inf"), tl.float32)
    total = tl.zeros([RQ], tl.float32)
    acc = tl.zeros([RQ, DVP], tl.float32)
    for low in range(0, FT, TT):
        at = piece * FT + low + rt
        i = at // P
        block = tl.where(i < SINK, i, start + i - SINK)
        token = block * P + at % P
        seen = (token < new) & ((i < SINK) | (block >= SINK)) & (i < SINK + TAIL)
        slot = forced_offset(desc, row, block, seen, element, to_host, E, SINK, NEWEST, KV_BITS, TIERED)
        k = tl.load(kv + (slot + at % P * D)[None, :] + rd[:, None], mask=seen[None, :] & (rd < D)[:, None], other=0.0)
        v = tl.load(kv + (slot + P * D + at % P * DV)[:, None] + rv[None, :], mask=seen[:, None] & (rv < DV)[None, :],
                    other=0.0)
        top, total, acc = add_tile(qq, k, v, seen, top, total, acc, scale, softcap, TYPE, CAP)
    whole = tl.where(total > 0, total, 1.0)
    at = pid * PIECES + piece
    tl.store(OF + at * GP * DVP + rq[:, None] * DVP + rv[None, :], acc / whole[:, None], mask=(rq < GP)[:, None])
    tl.store(MF + at * GP + rq, tl.where(total > 0, top + tl.log2(whole), float("-inf")), mask=rq < GP)


@triton.jit
def forced_masses(MF, pid, GP: tl.constexpr, PIECES: tl.constexpr, FP: tl.constexpr):
    """Log2 masses of the pieces [FP, GP], -inf beyond PIECES, and of all together [GP]."""
    rf = tl.arange(0, FP)
    m = tl.load(MF + (pid * PIECES + rf)[:, None] * GP + tl.arange(0, GP)[None, :], mask=(rf < PIECES)[:, None],
                other=float("-inf"))
    top = tl.max(m, 0)
    return m, top + tl.log2(tl.sum(tl.exp2(m - top[None, :]), 0))
