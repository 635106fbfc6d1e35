"""Attention to quantised blocks (reference/quantise.py has the format), which are dequantised in registers, some blocks at a time.

Keys become fp16 (fp32 for fp32 models) channel by channel. Values stay codes: a token's step goes into its weight, and its
minimum is the same number for all channels. Two codes of 4 bits are loaded as the byte that they share.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .location import block_offset, host_offset
from .online_softmax import softcap_log2

# 1024 + code, as fp16, is 0x6400 | code: a byte and a constant put together, and no conversion. What follows is said not to be
# pure, lest the compiler move it behind the change of layout that the tensor core needs, which is wide for fp16 only.


@triton.jit
def _half_codes(x, BITS: tl.constexpr):
    """Bytes -> their codes as fp16, twice: low and high ones; of 8 bits, both the same."""
    if BITS == 8:
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, m, n; mov.b32 m, 0x64646464; mov.b32 n, 0x64006400; prmt.b32 a, $2, m, 0x4140; "
            "prmt.b32 b, $2, m, 0x4342; sub.f16x2 $0, a, n; sub.f16x2 $1, b, n; }", "=r,=r,r", [x], dtype=tl.float16,
            is_pure=False, pack=4)
        return low, low
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, m, n; mov.b32 m, 0x64646464; mov.b32 n, 0x64006400; and.b32 c, $4, 0x0F0F0F0F; "
            "prmt.b32 a, c, m, 0x4140; prmt.b32 b, c, m, 0x4342; sub.f16x2 $0, a, n; sub.f16x2 $1, b, n; "
            "shr.b32 c, $4, 4; and.b32 c, c, 0x0F0F0F0F; "
            "prmt.b32 a, c, m, 0x4140; prmt.b32 b, c, m, 0x4342; sub.f16x2 $2, a, n; sub.f16x2 $3, b, n; }",
            "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=False, pack=4)


@triton.jit
def _half_values(x, step, minimum, BITS: tl.constexpr):
    """Bytes -> minimum + step * code in fp16, of low and high codes as above; step and minimum fp16 of the same shape."""
    if BITS == 8:
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, m, n; mov.b32 m, 0x64646464; mov.b32 n, 0x64006400; prmt.b32 a, $2, m, 0x4140; "
            "prmt.b32 b, $2, m, 0x4342; sub.f16x2 a, a, n; sub.f16x2 b, b, n; "
            "fma.rn.f16x2 $0, a, $3, $5; fma.rn.f16x2 $1, b, $4, $6; }", "=r,=r,r,r,r,r,r", [x, step, minimum],
            dtype=tl.float16, is_pure=False, pack=4)
        return low, low
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, m, n; mov.b32 m, 0x64646464; mov.b32 n, 0x64006400; and.b32 c, $4, 0x0F0F0F0F; "
            "prmt.b32 a, c, m, 0x4140; prmt.b32 b, c, m, 0x4342; sub.f16x2 a, a, n; sub.f16x2 b, b, n; "
            "fma.rn.f16x2 $0, a, $5, $7; fma.rn.f16x2 $1, b, $6, $8; shr.b32 c, $4, 4; and.b32 c, c, 0x0F0F0F0F; "
            "prmt.b32 a, c, m, 0x4140; prmt.b32 b, c, m, 0x4342; sub.f16x2 a, a, n; sub.f16x2 b, b, n; "
            "fma.rn.f16x2 $2, a, $5, $7; fma.rn.f16x2 $3, b, $6, $8; }",
            "=r,=r,=r,=r,r,r,r,r,r", [x, step, minimum], dtype=(tl.float16, tl.float16), is_pure=False, pack=4)


@triton.jit
def _plain_codes(x, BITS: tl.constexpr):
    if BITS == 8:
        return x.to(tl.float32), x.to(tl.float32)
    else:
        return (x & 15).to(tl.float32), (x >> 4).to(tl.float32)


@triton.jit
def _keys(x, step, minimum, BITS: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """Bytes [N, rows, DP], step and minimum fp16 [N, DP] -> keys of type DOT [N, rows, DP], of low and high codes."""
    if PTX and DOT == tl.float16:
        return _half_values(x, tl.broadcast_to(step[:, None, :], x.shape), tl.broadcast_to(minimum[:, None, :], x.shape), BITS)
    else:
        low, high = _plain_codes(x, BITS)
        step, minimum = step.to(tl.float32)[:, None, :], minimum.to(tl.float32)[:, None, :]
        return (minimum + step * low).to(DOT), (minimum + step * high).to(DOT)


@triton.jit
def _value_codes(x, BITS: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """Bytes [rows, DVP] -> their codes as DOT [rows, DVP], low and high ones."""
    if PTX and DOT == tl.float16:
        return _half_codes(x, BITS)
    else:
        low, high = _plain_codes(x, BITS)
        return low.to(DOT), high.to(DOT)


@triton.jit
def _logits(q, k, seen, scale, softcap, CAP: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP:
        s = softcap_log2(s, softcap)
    return tl.where(seen[None, :], s, float("-inf"))


@triton.jit
def attend_packed(desc, kv, row, ranked, element, qq, scale, softcap, first, last, blocks, part, part_mass,
                  GP: tl.constexpr, RQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                  DVP: tl.constexpr, P: tl.constexpr, NB: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr,
                  BITS: tl.constexpr, PTX: tl.constexpr, TIERED: tl.constexpr):
    """Attention over entries first.. below `last` of the list, at most `blocks`, into `part` [GP, DVP] and `part_mass` [GP].

    kv: the pool's bytes. element: bytes of a block. NB: blocks at once. TYPE: of the model.
    """
    ROWS: tl.constexpr = P * BITS // 8
    DOT: tl.constexpr = tl.float32 if TYPE == tl.float32 else tl.float16
    rd, rv, rb = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, NB)
    rr, rq = tl.arange(0, NB * ROWS), tl.arange(0, RQ)
    # Of bf16 queries beyond what fp16 holds only the sign would count, and there are none.
    qh = tl.minimum(tl.maximum(qq.to(tl.float32), -65504.0), 65504.0).to(DOT)
    top = tl.full([RQ], float("-inf"), tl.float32)
    weight = tl.zeros([RQ], tl.float32)
    acc = tl.zeros([RQ, DVP], tl.float32)
    to_host = host_offset(desc, tl.uint8, TIERED)
    last = tl.minimum(last, first + blocks)                 # also where fewer than NB are asked for
    for low in range(0, blocks, NB):
        at, seen = _start(desc, kv, row, ranked, element, to_host, first + low + rr // ROWS, last, TIERED)
        at_b, seen_b = _start(desc, kv, row, ranked, element, to_host, first + low + rb, last, TIERED)
        k = tl.load((at + rr % ROWS * D)[:, None] + rd[None, :], mask=seen[:, None] & (rd < D)[None, :], other=0)
        v = tl.load((at + (ROWS * D + rr % ROWS * DV))[:, None] + rv[None, :], mask=seen[:, None] & (rv < DV)[None, :], other=0)
        k_ranges = (at_b + ROWS * (D + DV)).to(tl.pointer_type(tl.float16), bitcast=True)[:, None] + rd[None, :]
        k_seen = seen_b[:, None] & (rd < D)[None, :]
        k_least, k_step = tl.load(k_ranges, mask=k_seen, other=0.0), tl.load(k_ranges + D, mask=k_seen, other=0.0)
        v_ranges = (at + ROWS * (D + DV)).to(tl.pointer_type(tl.float16), bitcast=True) + 2 * D + rr % ROWS
        v_least = tl.load(v_ranges, mask=seen, other=0.0).to(tl.float32)
        v_step = tl.load(v_ranges + P, mask=seen, other=0.0).to(tl.float32)

        k_1, k_2 = _keys(tl.reshape(k, [NB, ROWS, DP]), k_step, k_least, BITS, DOT, PTX)
        v_1, v_2 = _value_codes(v, BITS, DOT, PTX)
        s = _logits(qh, tl.reshape(k_1, [NB * ROWS, DP]), seen, scale, softcap, CAP)
        if BITS == 4:                                       # tokens of the high codes
            t = _logits(qh, tl.reshape(k_2, [NB * ROWS, DP]), seen, scale, softcap, CAP)
            peak = tl.maximum(top, tl.max(tl.maximum(s, t), 1))
        else:
            peak = tl.maximum(top, tl.max(s, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        fade = tl.exp2(top - base)
        p = tl.exp2(s - base[:, None])
        sums, least = p, p * v_least[None, :]
        # Steps relative to the largest, so that fp16 loses none of a small one's.
        if BITS == 4:
            r = tl.exp2(t - base[:, None])
            w_least = tl.load(v_ranges + ROWS, mask=seen, other=0.0).to(tl.float32)
            w_step = tl.load(v_ranges + P + ROWS, mask=seen, other=0.0).to(tl.float32)
            sums, least = sums + r, least + r * w_least[None, :]
            unit = tl.max(tl.maximum(v_step, w_step), 0)
            each = 1.0 / tl.where(unit > 0, unit, 1.0)
            own = tl.dot((r * (w_step * each)[None, :]).to(DOT), v_2, input_precision="ieee")
            own = tl.dot((p * (v_step * each)[None, :]).to(DOT), v_1, own, input_precision="ieee")
        else:
            unit = tl.max(v_step, 0)
            each = 1.0 / tl.where(unit > 0, unit, 1.0)
            own = tl.dot((p * (v_step * each)[None, :]).to(DOT), v_1, input_precision="ieee")
        acc = acc * fade[:, None] + (own * unit + tl.sum(least, 1)[:, None])
        weight = weight * fade + tl.sum(sums, 1)
        top = peak
    keep = rq < GP
    whole = tl.where(weight > 0, weight, 1.0)
    tl.store(part + rq[:, None] * DVP + rv[None, :], acc / whole[:, None], mask=keep[:, None])
    tl.store(part_mass + rq, tl.where(weight > 0, top + tl.log2(whole), float("-inf")), mask=keep)


@triton.jit
def _start(desc, kv, row, ranked, element, to_host, n, last, TIERED: tl.constexpr):
    """Where the packed blocks of entries n of the list start, and which entries are below `last`."""
    seen = n < last
    block = tl.load(row + tl.load(ranked + n, mask=seen, other=0), mask=seen, other=0)
    return kv + tl.multiple_of(block_offset(desc, block, seen, element, to_host, False, TIERED), 16), seen
