"""Rank kernel: estimated log2 mass of every block from its channel codes.

Codes are packed along tokens, so that a shift and a mask of a byte tile yields a run of U/4 tokens; integer tensor cores
multiply them with the query, which is rounded to int8 for each unit with the unit's scales folded in.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .append import softcap_log2


@triton.jit
def _field(codes, SHIFT: tl.constexpr, MASK: tl.constexpr, PTX: tl.constexpr):
    """(codes >> SHIFT) & MASK of packed bytes, four at a time where inline PTX runs."""
    if PTX:
        if SHIFT == 0:
            if MASK == 15:
                return tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [codes], dtype=tl.int8,
                                                 is_pure=True, pack=4)
            else:
                return tl.inline_asm_elementwise("and.b32 $0, $1, 0x03030303;", "=r,r", [codes], dtype=tl.int8,
                                                 is_pure=True, pack=4)
        elif SHIFT == 2:
            return tl.inline_asm_elementwise("{ .reg .b32 t; shr.u32 t, $1, 2; and.b32 $0, t, 0x03030303; }", "=r,r",
                                             [codes], dtype=tl.int8, is_pure=True, pack=4)
        elif SHIFT == 6:
            return tl.inline_asm_elementwise("{ .reg .b32 t; shr.u32 t, $1, 6; and.b32 $0, t, 0x03030303; }", "=r,r",
                                             [codes], dtype=tl.int8, is_pure=True, pack=4)
        elif MASK == 15:
            return tl.inline_asm_elementwise("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }", "=r,r",
                                             [codes], dtype=tl.int8, is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x03030303; }", "=r,r",
                                             [codes], dtype=tl.int8, is_pure=True, pack=4)
    else:
        return ((codes.to(tl.int32) >> SHIFT) & MASK).to(tl.int8)


@triton.jit
def _int8_query(q, step):
    """q [R, N] fp32 with the unit's scales [R] folded in, as int8 and its scale [N]."""
    w = q * step[:, None]
    top = tl.max(tl.abs(w), 0) + 1e-20
    w = w * (127.0 / top)[None, :]
    return (w + tl.where(w >= 0, 0.5, -0.5)).to(tl.int8), top * (1.0 / 127.0)


@triton.jit
def _store_masses(s, base, out, width, plane, softcap, carry, N: tl.constexpr, GP: tl.constexpr,
                  ROWS: tl.constexpr, P: tl.constexpr, CAP: tl.constexpr):
    """Logits [ROWS, N] of one run of tokens -> log2 mass of its blocks, head g at column g * (N / GP)."""
    y = s + base[None, :]
    if N // GP >= 2:
        y, _ = tl.split(tl.reshape(y, [ROWS, N // 2, 2]))
    if N // GP >= 4:
        y, _ = tl.split(tl.reshape(y, [ROWS, N // 4, 2]))
    if N // GP >= 8:
        y, _ = tl.split(tl.reshape(y, [ROWS, N // 8, 2]))
    if N // GP >= 16:
        y, _ = tl.split(tl.reshape(y, [ROWS, N // 16, 2]))
    if CAP:
        y = softcap_log2(y, softcap)
    rg = tl.arange(0, GP)
    if P <= ROWS:
        NB: tl.constexpr = ROWS // P
        y = tl.reshape(y, [NB, P, GP])
        m = tl.max(y, 1)
        mass = m + tl.log2(tl.sum(tl.exp2(y - m[:, None, :]), 1))
        rb = tl.arange(0, NB)
        tl.store(out + rg[None, :] * width + (plane * NB + rb)[:, None], mass)
        return carry
    else:
        # A block is several runs: gather them, and store with the last one.
        m = tl.max(y, 0)
        mass = m + tl.log2(tl.sum(tl.exp2(y - m[None, :]), 0))
        RUNS: tl.constexpr = P // ROWS
        if plane % RUNS == 0:
            joined = mass
        else:
            big = tl.maximum(carry, mass)
            joined = big + tl.log2(tl.exp2(carry - big) + tl.exp2(mass - big))
        if plane % RUNS == RUNS - 1:
            tl.store(out + rg * width + plane // RUNS, joined)
        return joined


@triton.jit
def score_kernel(desc, Q, q_b, q_h, scale, softcap, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
                 D: tl.constexpr, P: tl.constexpr, UB: tl.constexpr, R4: tl.constexpr, R4P: tl.constexpr,
                 R2: tl.constexpr, RA: tl.constexpr, RB: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr,
                 CAP: tl.constexpr):
    """Programs (row and KV head, stripe of units). R2 = RA + the rest, padded to RB; scale includes log2(e)."""
    pid = tl.program_id(0).to(tl.int64)
    U: tl.constexpr = P * UB
    ROWS: tl.constexpr = U // 4
    R: tl.constexpr = R4 + R2
    lengths = d.address(desc, d.LENGTHS, tl.int64)
    units = (tl.load(lengths + pid // H) // U).to(tl.int32)
    if tl.program_id(1) < units:
        capacity = tl.load(desc + d.UNITS)
        width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
        estimate = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width
        minimum = d.address(desc, d.MINIMUM, tl.float16) + pid * capacity * R
        steps = d.address(desc, d.SCALE, tl.float16) + pid * capacity * R
        high = d.address(desc, d.HIGH, tl.int8) + pid * capacity * (U // 2 * R4)
        low = d.address(desc, d.LOW, tl.int8) + pid * capacity * (U // 4 * R2)
        order = d.address(desc, d.ORDER, tl.int16) + pid * D
        centre = d.address(desc, d.CENTRE, tl.float32) + pid * D

        # The query in channel order, head g at column g * (N / GP), the other columns zero.
        rn = tl.arange(0, N)
        head = rn // (N // GP)
        real = (rn % (N // GP) == 0) & (head < G)
        r4, ra, rb = tl.arange(0, R4P), tl.arange(0, RA), tl.arange(0, RB)
        in4, inb = r4 < R4, rb < R2 - RA
        at = Q + pid // H * q_b + (pid % H * G + head)[None, :] * q_h
        c4 = tl.load(order + r4, mask=in4, other=0).to(tl.int32)
        ca = tl.load(order + R4 + ra).to(tl.int32)
        cb = tl.load(order + R4 + RA + rb, mask=inb, other=0).to(tl.int32)
        q4 = tl.load(at + c4[:, None], mask=in4[:, None] & real[None, :], other=0.0).to(tl.float32) * scale
        qa = tl.load(at + ca[:, None], mask=real[None, :], other=0.0).to(tl.float32) * scale
        qb = tl.load(at + cb[:, None], mask=inb[:, None] & real[None, :], other=0.0).to(tl.float32) * scale
        constant = tl.sum(q4 * tl.load(centre + c4)[:, None], 0) + tl.sum(qa * tl.load(centre + ca)[:, None], 0) \
            + tl.sum(qb * tl.load(centre + cb)[:, None], 0)
        rr = tl.arange(0, ROWS)
        for u in range(tl.program_id(1), units, tl.num_programs(1)):
            scales, minima = steps + u * R, minimum + u * R
            at4 = high + u * (U // 2 * R4) + rr[:, None] * R4 + r4[None, :]
            at2 = low + u * (U // 4 * R2) + rr[:, None] * R2
            if R4 == R4P:
                x0, x1 = tl.load(at4), tl.load(at4 + ROWS * R4)
            else:
                x0 = tl.load(at4, mask=in4[None, :], other=0)
                x1 = tl.load(at4 + ROWS * R4, mask=in4[None, :], other=0)
            y = tl.load(at2 + ra[None, :])
            if R2 == RA + RB:
                z = tl.load(at2 + RA + rb[None, :])
            else:
                z = tl.load(at2 + RA + rb[None, :], mask=inb[None, :], other=0)
            m4 = tl.load(minima + r4, mask=in4, other=0.0).to(tl.float32)
            ma = tl.load(minima + R4 + ra).to(tl.float32)
            mb = tl.load(minima + R4 + RA + rb, mask=inb, other=0.0).to(tl.float32)
            base = constant + tl.sum(q4 * m4[:, None], 0) + tl.sum(qa * ma[:, None], 0) + tl.sum(qb * mb[:, None], 0)
            i4, a4 = _int8_query(q4, tl.load(scales + r4, mask=in4, other=0.0).to(tl.float32))
            ia, aa = _int8_query(qa, tl.load(scales + R4 + ra).to(tl.float32))
            ib, ab = _int8_query(qb, tl.load(scales + R4 + RA + rb, mask=inb, other=0.0).to(tl.float32))
            out = estimate + u * UB
            s = tl.dot(_field(x0, 0, 15, PTX), i4).to(tl.float32) * a4[None, :]
            s += tl.dot(_field(y, 0, 3, PTX), ia).to(tl.float32) * aa[None, :]
            s += tl.dot(_field(z, 0, 3, PTX), ib).to(tl.float32) * ab[None, :]
            c = _store_masses(s, base, out, width, 0, softcap, tl.zeros([GP], tl.float32), N, GP, ROWS, P, CAP)
            s = tl.dot(_field(x1, 0, 15, PTX), i4).to(tl.float32) * a4[None, :]
            s += tl.dot(_field(y, 2, 3, PTX), ia).to(tl.float32) * aa[None, :]
            s += tl.dot(_field(z, 2, 3, PTX), ib).to(tl.float32) * ab[None, :]
            c = _store_masses(s, base, out, width, 1, softcap, c, N, GP, ROWS, P, CAP)
            s = tl.dot(_field(x0, 4, 15, PTX), i4).to(tl.float32) * a4[None, :]
            s += tl.dot(_field(y, 4, 3, PTX), ia).to(tl.float32) * aa[None, :]
            s += tl.dot(_field(z, 4, 3, PTX), ib).to(tl.float32) * ab[None, :]
            c = _store_masses(s, base, out, width, 2, softcap, c, N, GP, ROWS, P, CAP)
            s = tl.dot(_field(x1, 4, 15, PTX), i4).to(tl.float32) * a4[None, :]
            s += tl.dot(_field(y, 6, 3, PTX), ia).to(tl.float32) * aa[None, :]
            s += tl.dot(_field(z, 6, 3, PTX), ib).to(tl.float32) * ab[None, :]
            _store_masses(s, base, out, width, 3, softcap, c, N, GP, ROWS, P, CAP)
