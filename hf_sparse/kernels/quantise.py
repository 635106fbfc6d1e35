"""Quantise blocks that close (reference/quantise.py has the format): one, within the step that closes it, and those of a prompt."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .reference.quantise import packed_bytes

# Adding and subtracting it rounds fp32 to the nearest integer, ties to even, in the interpreter and on the GPU alike.
ROUND = tl.constexpr(12582912.0)


@triton.jit
def round_even(x):
    return (x + ROUND) - ROUND


@triton.jit
def fp16_range(x):
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _codes(x, base, step, LEVELS: tl.constexpr):
    return tl.minimum(tl.maximum(round_even((x - base) / tl.where(step > 0, step, 1.0)), 0.0), LEVELS * 1.0).to(tl.int32)


@triton.jit
def quantise_block(source, target, P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BITS: tl.constexpr):
    """The block of keys [P, D] and values [P, DV] at `source` as packed bytes at `target`, a few channels or tokens at a time:
    one program in P steps comes here, and must not cost the others their registers."""
    FIELDS: tl.constexpr = 8 // BITS
    ROWS: tl.constexpr = P // FIELDS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    CHANNELS: tl.constexpr = 512 // P
    TOKENS: tl.constexpr = min(ROWS, max(1, 512 // DVP))
    ranges = (target + ROWS * (D + DV)).to(tl.pointer_type(tl.float16), bitcast=True)
    j = tl.arange(0, ROWS)
    for first in range(0, D, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        inside = c < D
        low = tl.full([CHANNELS], float("inf"), tl.float32)
        high = tl.full([CHANNELS], float("-inf"), tl.float32)
        for f in range(FIELDS):
            at = source + (f * ROWS + j)[:, None] * D + c[None, :]
            x = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
            low, high = tl.minimum(low, tl.min(x, 0)), tl.maximum(high, tl.max(x, 0))
        base = fp16_range(low)
        step = fp16_range(tl.maximum(high - base.to(tl.float32), 0.0) / LEVELS)
        tl.store(ranges + c, base, mask=inside)
        tl.store(ranges + D + c, step, mask=inside)
        packed = tl.zeros([ROWS, CHANNELS], tl.int32)
        for f in range(FIELDS):
            at = source + (f * ROWS + j)[:, None] * D + c[None, :]
            x = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
            code = _codes(x, base.to(tl.float32)[None, :], step.to(tl.float32)[None, :], LEVELS)
            packed = packed | (code << (BITS * f))
        tl.store(target + j[:, None] * D + c[None, :], packed.to(tl.uint8), mask=inside[None, :])

    values, codes = source + P * D, target + ROWS * D
    minima, steps = ranges + 2 * D, ranges + 2 * D + P
    c = tl.arange(0, DVP)
    for first in range(0, ROWS, TOKENS):
        t = first + tl.arange(0, TOKENS)
        here = (t < ROWS)[:, None] & (c < DV)[None, :]
        packed = tl.zeros([TOKENS, DVP], tl.int32)
        for f in range(FIELDS):
            token = f * ROWS + t
            x = tl.load(values + token[:, None] * DV + c[None, :], mask=here, other=0.0).to(tl.float32)
            base = fp16_range(tl.min(tl.where(here, x, float("inf")), 1))
            high = tl.max(tl.where(here, x, float("-inf")), 1)
            step = fp16_range(tl.maximum(high - base.to(tl.float32), 0.0) / LEVELS)
            tl.store(minima + token, base, mask=t < ROWS)
            tl.store(steps + token, step, mask=t < ROWS)
            packed = packed | (_codes(x, base.to(tl.float32)[:, None], step.to(tl.float32)[:, None], LEVELS) << (BITS * f))
        tl.store(codes + t[:, None] * DV + c[None, :], packed.to(tl.uint8), mask=here)


@triton.jit
def quantise_kernel(SOURCE, TARGET, ELEMENTS: tl.constexpr, BYTES: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
                    DV: tl.constexpr, DVP: tl.constexpr, BITS: tl.constexpr):
    """Programs (block)."""
    block = tl.program_id(0).to(tl.int64)
    quantise_block(SOURCE + block * ELEMENTS, TARGET + block * BYTES, P, D, DV, DVP, BITS)


def quantise_blocks(blocks: torch.Tensor, block_size: int, key_dim: int, value_dim: int, bits: int) -> torch.Tensor:
    """`reference.quantise.quantise_blocks` of blocks [..., block_size * (key_dim + value_dim)], a block's keys before its values."""
    size = packed_bytes(block_size, key_dim, value_dim, bits)
    packed = torch.zeros(*blocks.shape[:-1], size, dtype=torch.uint8, device=blocks.device)
    count = packed.numel() // size
    if count:
        with torch.cuda.device_of(blocks):
            quantise_kernel[(count,)](blocks.contiguous(), packed, ELEMENTS=blocks.shape[-1], BYTES=size, P=block_size, D=key_dim,
                                      DV=value_dim, DVP=triton.next_power_of_2(value_dim), BITS=bits, num_warps=1)
    return packed
