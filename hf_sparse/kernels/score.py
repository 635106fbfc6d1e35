"""Ranking: estimated log2 mass of every block from its channel codes.

Integer tensor cores multiply the codes, as they lie in memory, with the query. A program is one warp, and it places what
the tensor core wants by hand: lane l of the warp holds row l / 4 of the codes and column l / 4 of the query, each 4
channels wide, and gets rows l / 4 and heads l % 4 of the result (PTX ISA, fragments of mma.m16n8k32). So no operand has
to cross lanes. The order in which channels enter the sum is free; lane l % 4 takes those that it can load at once.

The query, with a unit's scales folded in, is rounded to 16 bits; its high and low bytes are two columns of the product.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .online_softmax import softcap_log2

# Adding it to a small float leaves the nearest integer in the low bits.
MAGIC = tl.constexpr(12582912.0)
HEADS = tl.constexpr(4)                                     # of a program: 8 columns, two a head


@triton.jit
def _four(x):
    """[32, 4] -> the four columns."""
    even, odd = tl.split(tl.reshape(x, [32, 2, 2]))
    a, c = tl.split(even)
    b, e = tl.split(odd)
    return a, b, c, e


@triton.jit
def _per_channel(at, c, R: tl.constexpr):
    """Numbers of R channels as each lane multiplies them: 8 tensors [32] for every 32 channels, zero beyond R."""
    i = tl.arange(0, 4)[None, :]
    out = ()
    for p in tl.static_range(R // 64):
        for j in tl.static_range(4):
            out = out + _four(tl.load(at + (p * 64 + j * 4 + c * 16)[:, None] + i))
    if R % 64 >= 32:
        for j in tl.static_range(2):
            out = out + _four(tl.load(at + (R // 64 * 64 + j * 4 + c * 8)[:, None] + i))
    if R % 32 > 0:
        for j in tl.static_range(2):
            n = (R // 32 * 32 + j * 16 + c * 4)[:, None] + i
            out = out + _four(tl.load(at + n, mask=n < R, other=0))
    return out


@triton.jit
def _is_channel(c, k: tl.constexpr, R: tl.constexpr):
    """Whether place k of `_per_channel` is a channel."""
    if k < R // 32 * 8:
        return c >= 0
    else:
        return R // 32 * 32 + (k - R // 32 * 8) // 4 * 16 + c * 4 + k % 4 < R


@triton.jit
def _block_masses(y, out, width, first_head, GP: tl.constexpr, P: tl.constexpr):
    """Logits of a block, tensors [8, HEADS], or of the two blocks of 4 in one -> log2 mass, stored at `out`."""
    rg = tl.arange(0, HEADS)
    if P == 4:
        pair = tl.reshape(y[0], [2, 4, HEADS])
        most = tl.max(pair, 1)
        mass = most + tl.log2(tl.sum(tl.exp2(pair - most[:, None, :]), 1))
        tl.store(out + rg[None, :] * width + tl.arange(0, 2)[:, None], mass, mask=first_head + rg[None, :] < GP)
    else:
        most = y[0]
        for k in tl.static_range(1, P // 8):
            most = tl.maximum(most, y[k])
        most = tl.max(most, 0)
        total = tl.exp2(y[0] - most[None, :])
        for k in tl.static_range(1, P // 8):
            total += tl.exp2(y[k] - most[None, :])
        tl.store(out + rg * width, most + tl.log2(tl.sum(total, 0)), mask=first_head + rg < GP)


@triton.jit
def _code_words(words, codes, row, c, R: tl.constexpr):
    """A row of packed codes, 4 channels a word, in the order of `_per_channel`: 2 tensors [32] for every 32 channels."""
    i = tl.arange(0, 4)[None, :]
    out = ()
    for p in tl.static_range(R // 64):
        out = out + _four(tl.load(words + (row * (R // 4) + p * 16 + c * 4)[:, None] + i))
    if R % 64 >= 32:
        at = words + (row * (R // 4) + R // 64 * 16 + c * 2)[:, None] + tl.arange(0, 2)[None, :]
        out = out + tl.split(tl.load(at))
    if R % 32 > 0:
        for j in tl.static_range(2):
            first = R // 32 * 32 + j * 16 + c * 4
            if R % 4 == 0:
                out = out + (tl.load(words + row * (R // 4) + first // 4, mask=first < R, other=0), )
            else:
                n = first[:, None] + i
                x = tl.load(codes + row[:, None] * R + n, mask=n < R, other=0).to(tl.int32) & 255
                out = out + (tl.sum(x << (8 * i), 1), )
    return out


@triton.jit
def _query_word(a, b, c, e, high, PTX: tl.constexpr):
    """One byte of each of four floats that MAGIC was added to, byte 1 where `high` else byte 0, as a word."""
    a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    c, e = c.to(tl.int32, bitcast=True), e.to(tl.int32, bitcast=True)
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; prmt.b32 t, $1, $2, $5; prmt.b32 u, $3, $4, $5; prmt.b32 $0, t, u, 0x5410; }", "=r,r,r,r,r,r",
            [a, b, c, e, tl.where(high, 0x51, 0x40)], dtype=tl.int32, is_pure=True, pack=1)
    else:
        shift = tl.where(high, 8, 0)
        return (a >> shift & 255) | (b >> shift & 255) << 8 | (c >> shift & 255) << 16 | (e >> shift & 255) << 24


@triton.jit
def _bytes(word):
    """Words [32] as bytes 0..255 [8, 16]."""
    i = tl.arange(0, 4)[None, :]
    return tl.reshape(word[:, None] >> (8 * i) & 255, [8, 16])


@triton.jit
def _mma(a0, a1, a2, a3, b0, b1, s0, s1, s2, s3, PTX: tl.constexpr):
    """mma.m16n8k32: unsigned codes times signed query, added to s."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};", "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1, s0, s1, s2, s3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        q0, q1 = _bytes(b0), _bytes(b1)
        q0, q1 = tl.where(q0 > 127, q0 - 256, q0)[None], tl.where(q1 > 127, q1 - 256, q1)[None]
        upper = tl.sum(_bytes(a0)[:, None] * q0 + _bytes(a2)[:, None] * q1, 2)
        lower = tl.sum(_bytes(a1)[:, None] * q0 + _bytes(a3)[:, None] * q1, 2)
        u0, u1 = tl.split(tl.reshape(upper, [8, 4, 2]))
        l0, l1 = tl.split(tl.reshape(lower, [8, 4, 2]))
        return s0 + tl.reshape(u0, [32]), s1 + tl.reshape(u1, [32]), s2 + tl.reshape(l0, [32]), s3 + tl.reshape(l1, [32])


@triton.jit
def _to_heads(column):
    """Numbers of the 8 columns -> those of the HEADS heads (both columns of a head have the same)."""
    head, _ = tl.split(tl.reshape(column, [HEADS, 2]))
    return head


@triton.jit
def _field(word, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Codes of a field, four channels at once, times 1, 4, 16 or 16 for the four quarters of a unit."""
    if BITS == 2:
        if FIELD == 3:
            return (word >> 2) & 0x30303030
        else:
            return word & (0x03030303 << (2 * FIELD))
    else:
        if FIELD == 0:
            return word & 0x0F0F0F0F
        elif FIELD == 1:
            return (word << 2) & 0x3C3C3C3C
        else:
            return word & 0xF0F0F0F0 - (1 << 32)


@triton.jit
def _sixteen_tokens(low, high, words, RUN: tl.constexpr, ROWS: tl.constexpr, T4: tl.constexpr, T2: tl.constexpr,
                    PTX: tl.constexpr):
    """Products of 16 tokens with the query, tokens 0-7 and 8-15 of run RUN of a unit: two int32 [8, HEADS], times 1, 4,
    16 or 16 for the four quarters of a unit."""
    QUARTER: tl.constexpr = RUN // (ROWS // 16)
    L: tl.constexpr = RUN % (ROWS // 16) * 4 * T2           # first word of the low part's row group
    H: tl.constexpr = (RUN % (ROWS // 16) * 2 + QUARTER % 2 * (ROWS // 8)) * 2 * T4
    s0, s1 = tl.zeros([32], tl.int32), tl.zeros([32], tl.int32)
    s2, s3 = tl.zeros([32], tl.int32), tl.zeros([32], tl.int32)
    for t in tl.static_range(T4):
        s0, s1, s2, s3 = _mma(_field(high[H + 2 * t], QUARTER, 4), _field(high[H + 2 * T4 + 2 * t], QUARTER, 4),
                              _field(high[H + 2 * t + 1], QUARTER, 4), _field(high[H + 2 * T4 + 2 * t + 1], QUARTER, 4),
                              words[2 * t], words[2 * t + 1], s0, s1, s2, s3, PTX)
    for t in tl.static_range(T2):
        s0, s1, s2, s3 = _mma(_field(low[L + 2 * t], QUARTER, 2), _field(low[L + 2 * T2 + 2 * t], QUARTER, 2),
                              _field(low[L + 2 * t + 1], QUARTER, 2), _field(low[L + 2 * T2 + 2 * t + 1], QUARTER, 2),
                              words[2 * (T4 + t)], words[2 * (T4 + t) + 1], s0, s1, s2, s3, PTX)
    return tl.reshape(s0 * 256 + s1, [8, HEADS]), tl.reshape(s2 * 256 + s3, [8, HEADS])


@triton.jit
def score(desc, Q, q_b, q_h, scale, softcap, pid, stripe, stripes, H: tl.constexpr, MAPPED: tl.constexpr,
          G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, UB: tl.constexpr, R4: tl.constexpr,
          R2: tl.constexpr, PTX: tl.constexpr, CAP: tl.constexpr):
    """A stripe of the units of a row and KV head, for HEADS query heads; scale includes log2(e)."""
    U: tl.constexpr = P * UB
    ROWS: tl.constexpr = U // 4
    R: tl.constexpr = R4 + R2
    T4: tl.constexpr = (R4 + 31) // 32
    T2: tl.constexpr = (R2 + 31) // 32
    LIMIT: tl.constexpr = 32500.0 if D <= 256 else 8000.0   # so that no sum leaves int32
    lengths = d.address(desc, d.LENGTHS, tl.int64)
    length = tl.load(lengths + pid // H)
    units = (length // U).to(tl.int32)
    if stripe < units:
        capacity = tl.load(desc + d.UNITS)
        width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
        first_head = tl.program_id(2) * HEADS
        estimate = d.address(desc, d.ESTIMATE, tl.float32) + (pid * GP + first_head) * width
        minima = d.address(desc, d.MINIMUM, tl.float16) + pid * capacity * R
        steps = d.address(desc, d.SCALE, tl.float16) + pid * capacity * R
        high4 = d.address(desc, d.HIGH, tl.int8) + pid * capacity * (U // 2 * R4)
        low2 = d.address(desc, d.LOW, tl.int8) + pid * capacity * (U // 4 * R2)
        high_words = d.address(desc, d.HIGH, tl.int32) + pid * capacity * (U // 8 * R4)
        low_words = d.address(desc, d.LOW, tl.int32) + pid * capacity * (U // 16 * R2)
        order = d.address(desc, d.ORDER, tl.int16) + pid * D
        centre = d.address(desc, d.CENTRE, tl.float32) + pid * D

        lane = tl.arange(0, 32)
        c, column = lane % 4, lane // 4
        high = column % 2 == 0
        magic = tl.where(high, MAGIC + 128.0, MAGIC)        # the low byte is signed, so the high one rounds
        head = first_head + column // 2
        at = Q + pid // H * q_b + (d.model_head(desc, pid % H, MAPPED) * G + head) * q_h
        places = _per_channel(order, c, R4) + _per_channel(order + R4, c, R2)
        query = ()
        constant = tl.zeros([32], tl.float32)
        for k in tl.static_range(8 * (T4 + T2)):
            place = places[k].to(tl.int32)
            if k < 8 * T4:
                real = _is_channel(c, k, R4)
            else:
                real = _is_channel(c, k - 8 * T4, R2)
            x = tl.load(at + place, mask=real & (head < G), other=0.0).to(tl.float32) * scale
            constant += x * tl.load(centre + place)
            query = query + (x, )
        for u in range(stripe, units, stripes):
            row = lane // 4
            low = _code_words(low_words + u * (U // 16 * R2), low2 + u * (U // 4 * R2), row, c, R2)
            for g in tl.static_range(1, ROWS // 8):
                low = low + _code_words(low_words + u * (U // 16 * R2), low2 + u * (U // 4 * R2), row + 8 * g, c, R2)
            top4 = _code_words(high_words + u * (U // 8 * R4), high4 + u * (U // 2 * R4), row, c, R4)
            for g in tl.static_range(1, ROWS // 4):
                top4 = top4 + _code_words(high_words + u * (U // 8 * R4), high4 + u * (U // 2 * R4), row + 8 * g, c, R4)
            step = _per_channel(steps + u * R, c, R4) + _per_channel(steps + u * R + R4, c, R2)
            least = _per_channel(minima + u * R, c, R4) + _per_channel(minima + u * R + R4, c, R2)

            base, largest = constant, tl.full([32], 1e-20, tl.float32)
            scaled = ()
            for k in tl.static_range(8 * (T4 + T2)):
                base += query[k] * least[k].to(tl.float32)
                w = query[k] * step[k].to(tl.float32)
                largest = tl.maximum(largest, tl.abs(w))
                scaled = scaled + (w, )
            base = tl.sum(tl.reshape(base, [8, 4]), 1)
            largest = tl.max(tl.reshape(largest, [8, 4]), 1)
            inverse = tl.reshape(tl.broadcast_to((LIMIT / largest)[:, None], [8, 4]), [32])
            words = ()
            for k in tl.static_range(2 * (T4 + T2)):
                words = words + (_query_word(scaled[4 * k] * inverse + magic, scaled[4 * k + 1] * inverse + magic,
                                             scaled[4 * k + 2] * inverse + magic, scaled[4 * k + 3] * inverse + magic,
                                             high, PTX), )
            base, unit = _to_heads(base)[None, :], (_to_heads(largest) * (1.0 / LIMIT))[None, :]

            # 16 tokens at a time, 8 in a tensor [8, HEADS]; a block is several such tensors.
            logits = ()
            for run in tl.static_range(U // 16):
                first, second = _sixteen_tokens(low, top4, words, run, ROWS, T4, T2, PTX)
                if run < U // 64:
                    by = unit
                elif run < U // 32:
                    by = unit * 0.25
                else:
                    by = unit * 0.0625
                for half in tl.static_range(2):
                    if half == 0:
                        y = first.to(tl.float32) * by + base
                    else:
                        y = second.to(tl.float32) * by + base
                    if CAP:
                        y = softcap_log2(y, softcap)
                    logits = logits + (y, )
                    if (2 * run + half + 1) % max(P // 8, 1) == 0:
                        block = (16 * run + 8 * half + 8 - max(P, 8)) // P
                        _block_masses(logits, estimate + u * UB + block, width, first_head, GP, P)
                        logits = ()
