"""Attention to quantised blocks (reference/quantise.py has the format), which are dequantised in registers, a block at a time.

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
    """Bytes [DP, rows], step and minimum fp16 [DP] -> keys of type DOT [DP, rows], of low and high codes."""
    if PTX and DOT == tl.float16:
        return _half_values(x, tl.broadcast_to(step[:, None], x.shape), tl.broadcast_to(minimum[:, None], x.shape), BITS)
    else:
        low, high = _plain_codes(x, BITS)
        step, minimum = step.to(tl.float32)[:, None], minimum.to(tl.float32)[:, None]
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
def _logits(q, k, scale, softcap, CAP: tl.constexpr):
    s = tl.dot(q, k, input_precision="ieee") * scale
    if CAP:
        s = softcap_log2(s, softcap)
    return s


@triton.jit
def _weighted(p, minimum, step, codes, DOT: tl.constexpr):
    """Sum of values [n, DVP] weighted by p [RQ, n]; minimum and step fp16 [n]."""
    # Steps relative to the largest, so that fp16 loses none of a small one's.
    step = step.to(tl.float32)
    unit = tl.max(step, 0)
    relative = p * (step / tl.where(unit > 0, unit, 1.0))[None, :]
    least = tl.sum(p * minimum.to(tl.float32)[None, :], 1)
    return tl.dot(relative.to(DOT), codes, input_precision="ieee") * unit + least[:, None]


@triton.jit
def attend_packed(desc, kv, row, ranked, element, qq, scale, softcap, first, last, blocks, part, part_mass,
                  GP: tl.constexpr, RQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                  DVP: tl.constexpr, P: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr, BITS: tl.constexpr,
                  PTX: tl.constexpr, TIERED: tl.constexpr):
    """Attention over entries first.. below `last` of the list, at most `blocks`, into `part` [GP, DVP] and `part_mass` [GP].

    kv: the pool's bytes. element: bytes of a block. TYPE: of the model.
    """
    ROWS: tl.constexpr = P * BITS // 8
    DOT: tl.constexpr = tl.float32 if TYPE == tl.float32 else tl.float16
    # The low and the high codes of 4 bits are two tiles, unless they are too small for the tensor core.
    HALVES: tl.constexpr = BITS == 4 and ROWS >= 16
    TOKENS: tl.constexpr = ROWS if HALVES else P
    rd, rv, rp = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, TOKENS)
    rt, rq = tl.arange(0, ROWS), tl.arange(0, RQ)
    # Of bf16 queries beyond what fp16 holds only the sign would count, and there are none.
    qh = tl.minimum(tl.maximum(qq.to(tl.float32), -65504.0), 65504.0).to(DOT)
    top = tl.full([RQ], float("-inf"), tl.float32)
    weight = tl.zeros([RQ], tl.float32)
    acc = tl.zeros([RQ, DVP], tl.float32)
    to_host = host_offset(desc, tl.uint8, TIERED)
    for i in range(0, tl.minimum(last - first, blocks)):
        block = tl.load(row + tl.load(ranked + first + i))
        block = block_offset(desc, block, block >= 0, element, to_host, False, TIERED)
        at = tl.multiple_of(kv + block, 16)
        ranges = (at + ROWS * (D + DV)).to(tl.pointer_type(tl.float16), bitcast=True)
        k = tl.load(at + rt[None, :] * D + rd[:, None], mask=(rd < D)[:, None], other=0)
        v = tl.load(at + ROWS * D + rt[:, None] * DV + rv[None, :], mask=(rv < DV)[None, :], other=0)
        k_least = tl.load(ranges + rd, mask=rd < D, other=0.0)
        k_step = tl.load(ranges + D + rd, mask=rd < D, other=0.0)
        v_ranges = ranges + 2 * D + rp
        v_least, v_step = tl.load(v_ranges), tl.load(v_ranges + P)
        low, high = _keys(k, k_step, k_least, BITS, DOT, PTX)
        first_codes, second_codes = _value_codes(v, BITS, DOT, PTX)
        if HALVES:
            s, t = _logits(qh, low, scale, softcap, CAP), _logits(qh, high, scale, softcap, CAP)
            peak = tl.maximum(top, tl.maximum(tl.max(s, 1), tl.max(t, 1)))
            p, r = tl.exp2(s - peak[:, None]), tl.exp2(t - peak[:, None])
            total = tl.sum(p, 1) + tl.sum(r, 1)
            own = _weighted(p, v_least, v_step, first_codes, DOT)
            own += _weighted(r, tl.load(v_ranges + ROWS), tl.load(v_ranges + P + ROWS), second_codes, DOT)
        else:
            if BITS == 4:
                low = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [DP, P])
                first_codes = tl.reshape(tl.permute(tl.join(first_codes, second_codes), (2, 0, 1)), [P, DVP])
            s = _logits(qh, low, scale, softcap, CAP)
            peak = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - peak[:, None])
            total = tl.sum(p, 1)
            own = _weighted(p, v_least, v_step, first_codes, DOT)
        fade = tl.exp2(top - peak)
        acc = acc * fade[:, None] + own
        weight = weight * fade + total
        top = peak
    keep = rq < GP
    whole = tl.where(weight > 0, weight, 1.0)
    tl.store(part + rq[:, None] * DVP + rv[None, :], acc / whole[:, None], mask=keep[:, None])
    tl.store(part_mass + rq, tl.where(weight > 0, top + tl.log2(whole), float("-inf")), mask=keep)
