"""Attention to quantised blocks (reference/quantise.py has the format), one block at a time, dequantised in registers.

    logits [tokens, heads]    = codes of K [tokens, channels] @ (query * step of each channel) + query . minimum of each channel
    outputs [channels, heads] = codes of V [channels, tokens] @ (weight * step of each token)  + weight . minimum of each token

So codes go to the tensor core as they are. As fp16 they are subnormal numbers, code * 2^-24, which are exact there, and need no
arithmetic: a byte beside a zero. Two codes of 4 bits are loaded as the byte that they share.

Both products take codes as their first operand, and the order in which channels and tokens are added up is free. It is chosen so
that a thread loads 16 bytes in a row which are its own share of the operand: nothing has to change threads. That is only about
speed, and about programs of one warp: whatever the compiler makes of it, the arithmetic is the same.
"""
from __future__ import annotations

import triton
import triton.language as tl

from ..compat import nibble_rows
from .location import block_offset, host_offset
from .online_softmax import softcap_log2

_NIBBLE_ROWS = nibble_rows(triton.__version__)


@triton.constexpr_function
def rows_together(BITS):
    """Byte rows in a row that are one thread's part of the operand."""
    return _NIBBLE_ROWS if BITS == 4 else 4


@triton.jit
def channel_order(n, DP: tl.constexpr):
    """Which channel of keys is the n-th one of the product, of DP.

    Of 64 channels a thread of four loads 16; the operand gives it four of every sixteen.
    """
    C: tl.constexpr = min(64, DP)
    return n // C * C + n % 16 // 4 * (C // 4) + n % C // 16 * 4 + n % 4


@triton.jit
def _key_codes(x, BITS: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """Bytes -> their codes as DOT, those of fp16 * 2^-24: low ones, and 16 times the high ones; of 8 bits, the same twice."""
    if DOT == tl.float32:
        return (x & (15 if BITS == 4 else 255)).to(tl.float32), (x & 240).to(tl.float32)
    elif not PTX:
        return ((x & (15 if BITS == 4 else 255)).to(tl.int16).to(tl.float16, bitcast=True),
                (x & 240).to(tl.int16).to(tl.float16, bitcast=True))
    elif BITS == 8:
        low = tl.inline_asm_elementwise("prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;", "=r,=r,r", [x],
                                        dtype=tl.float16, is_pure=True, pack=4)
        return low, low
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c; and.b32 c, $4, 0x0F0F0F0F; prmt.b32 $0, c, 0, 0x4140; prmt.b32 $1, c, 0, 0x4342; "
            "and.b32 c, $4, 0xF0F0F0F0; prmt.b32 $2, c, 0, 0x4140; prmt.b32 $3, c, 0, 0x4342; }",
            "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)


@triton.jit
def _value_codes(x, BITS: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """Bytes -> their codes as DOT, those of fp16 * 2^-24; of 4 bits as one more dimension of low and high ones."""
    if BITS == 8:
        return _key_codes(x, BITS, DOT, PTX)[0]
    elif PTX and DOT == tl.float16:
        # Both in 32 bits: what a thread of the tensor core takes for two tokens. Not pure, lest it be moved to where a thread
        # has four tokens' bytes of a channel instead of four channels' bytes of a token.
        pair = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; and.b32 a, $4, 0x0F0F0F0F; shr.b32 b, $4, 4; and.b32 b, b, 0x0F0F0F0F; "
            "prmt.b32 $0, a, b, 0x8480; prmt.b32 $1, a, b, 0x9591; prmt.b32 $2, a, b, 0xA6A2; prmt.b32 $3, a, b, 0xB7B3; }",
            "=r,=r,=r,=r,r", [x], dtype=tl.int32, is_pure=False, pack=4)
        return tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        low, high = x & 15, x >> 4
        if DOT == tl.float32:
            return tl.join(low.to(tl.float32), high.to(tl.float32))
        else:
            return tl.join(low.to(tl.int16), high.to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def attend_packed(desc, kv, row, ranked, element, qq, scale, softcap, first, last, blocks, part, part_mass,
                  GP: tl.constexpr, RQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                  DVP: tl.constexpr, P: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr,
                  BITS: tl.constexpr, PTX: tl.constexpr, TIERED: tl.constexpr):
    """Attention over entries first.. below `last` of the list, at most `blocks`, into `part` [GP, DVP] and `part_mass` [GP].

    kv: the pool's bytes. element: bytes of a block. qq [RQ, DP]: channels in `channel_order`. TYPE: of the model.
    """
    ROWS: tl.constexpr = P * BITS // 8                      # of bytes
    DOT: tl.constexpr = tl.float32 if TYPE == tl.float32 else tl.float16
    C: tl.constexpr = min(64, DP)
    X: tl.constexpr = DVP // 8
    L: tl.constexpr = rows_together(BITS)
    # Factors that keep fp16 far from its limits: of queries times steps, of weights times steps, and of codes as said above.
    SMALL: tl.constexpr = 1.0 if DOT == tl.float32 else 0.015625
    LARGE: tl.constexpr = 1.0 if DOT == tl.float32 else (16.0 if BITS == 4 else 256.0)
    UNIT: tl.constexpr = 1.0 if DOT == tl.float32 else 16777216.0
    rk, rr, rq = channel_order(tl.arange(0, DP), DP), tl.arange(0, ROWS), tl.arange(0, RQ)
    # As they are loaded: keys [DP / C * ROWS, C], values [ROWS / 4 * 8 * 4, X].
    nk, nv = tl.arange(0, DP // C * ROWS), tl.arange(0, ROWS * 8)
    k_channel = (nk // ROWS * C)[:, None] + tl.arange(0, C)[None, :]
    v_channel = (nv // 4 % 8 * X)[:, None] + tl.arange(0, X)[None, :]
    v_row = nv // (32 * L) * (4 * L) + nv % 4 * L + nv // 32 % L
    k_at, v_at = (nk % ROWS * D)[:, None] + k_channel, ROWS * D + (v_row * DV)[:, None] + v_channel
    # Of bf16 queries beyond what fp16 holds only the sign would count, and there are none.
    q = tl.trans(tl.minimum(tl.maximum(qq.to(tl.float32), -65504.0), 65504.0))
    whole_q, small_q = q.to(DOT), (q * SMALL).to(DOT)
    top = tl.full([RQ], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS, RQ], tl.float32)
    least = tl.zeros([ROWS, RQ], tl.float32)
    acc = tl.zeros([DVP, RQ], tl.float32)
    to_host = host_offset(desc, tl.uint8, TIERED)
    last = tl.minimum(last, first + blocks)
    following = _start(desc, row, ranked, element, to_host, first, last, TIERED)
    for n in range(first, last):
        at = kv + tl.multiple_of(following, 16)
        following = _start(desc, row, ranked, element, to_host, n + 1, last, TIERED)        # known when its turn comes
        k = tl.load(at + k_at, mask=k_channel < D, other=0)
        v = tl.load(at + v_at, mask=v_channel < DV, other=0)
        ranges = (at + ROWS * (D + DV)).to(tl.pointer_type(tl.float16), bitcast=True)
        k_least = tl.load(ranges + rk, mask=rk < D, other=0.0).to(DOT)
        k_step = tl.load(ranges + D + rk, mask=rk < D, other=0.0).to(DOT)
        v_ranges = ranges + 2 * D + rr
        v_least = tl.load(v_ranges).to(tl.float32)[:, None]
        v_step = tl.load(v_ranges + P).to(tl.float32)[:, None] * LARGE
        k_1, k_2 = _key_codes(k, BITS, DOT, PTX)
        stepped = small_q * k_step[:, None]
        offset = tl.dot(tl.broadcast_to(k_least[None, :], [ROWS, DP]), whole_q, input_precision="ieee") * scale
        s = tl.dot(_key_operand(k_1, ROWS, DP, C), stepped, input_precision="ieee") * (scale * (UNIT / SMALL)) + offset
        if CAP:
            s = softcap_log2(s, softcap)
        if BITS == 4:
            t = tl.dot(_key_operand(k_2, ROWS, DP, C), stepped, input_precision="ieee") * (scale * (UNIT / SMALL / 16)) + offset
            if CAP:
                t = softcap_log2(t, softcap)
            peak = tl.maximum(top, tl.max(tl.maximum(s, t), 0))
        else:
            peak = tl.maximum(top, tl.max(s, 0))
        fade = tl.exp2(top - peak)[None, :]
        p = tl.exp2(s - peak[None, :])
        weight, least = weight * fade + p, least * fade + p * v_least
        w = (p * v_step).to(DOT)
        codes = _value_codes(v, BITS, DOT, PTX)
        if BITS == 4:
            r = tl.exp2(t - peak[None, :])
            weight, least = weight + r, least + r * tl.load(v_ranges + ROWS).to(tl.float32)[:, None]
            w = tl.join(w, (r * (tl.load(v_ranges + P + ROWS).to(tl.float32)[:, None] * LARGE)).to(DOT))
            w = tl.reshape(tl.permute(w, (0, 2, 1)), [P, RQ])
            codes = tl.permute(tl.reshape(codes, [ROWS // (4 * L), L, 8, 4, X, 2]), (4, 2, 0, 3, 1, 5))
        else:
            codes = tl.permute(tl.reshape(codes, [ROWS // (4 * L), L, 8, 4, X]), (4, 2, 0, 3, 1))
        acc = tl.dot(tl.reshape(codes, [DVP, P]), w, acc * fade, input_precision="ieee")
        top = peak
    keep = rq < GP
    mass = tl.sum(weight, 0)
    whole = 1.0 / tl.where(mass > 0, mass, 1.0)
    rv = tl.arange(0, DVP)
    acc = acc * (whole * (UNIT / LARGE))[None, :] + (tl.sum(least, 0) * whole)[None, :]
    tl.store(part + rq[None, :] * DVP + (rv % 8 * X + rv // 8)[:, None], acc, mask=keep[None, :])
    tl.store(part_mass + rq, tl.where(mass > 0, top + tl.log2(mass), float("-inf")), mask=keep)


@triton.jit
def _key_operand(x, ROWS: tl.constexpr, DP: tl.constexpr, C: tl.constexpr):
    """Codes as loaded [DP / C * ROWS, C] -> [ROWS, DP], channels in `channel_order`."""
    x = tl.permute(tl.reshape(x, [DP // C, ROWS, 4, C // 16, 4]), (1, 0, 3, 2, 4))
    return tl.reshape(x, [ROWS, DP])


@triton.jit
def _start(desc, row, ranked, element, to_host, n, last, TIERED: tl.constexpr):
    """Where the packed block of entry n of the list starts, from the pool's first byte."""
    there = n < last
    block = tl.load(row + tl.load(ranked + n, mask=there, other=0), mask=there, other=0)
    return block_offset(desc, block, there, element, to_host, False, TIERED)
