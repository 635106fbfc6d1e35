"""Where a block's keys and values are: as an offset from the pool's first element, whichever tier holds them; or, of an
always-read block where others are quantised, among the exact copies (cache/exact_blocks.py)."""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d


@triton.jit
def host_offset(desc, TYPE: tl.constexpr, TIERED: tl.constexpr):
    """Elements from the first one of the pool to the first one of the host tier; kernels reach both."""
    if TIERED:
        away = tl.load(desc + d.HOST) - tl.load(desc + d.KV)
        return tl.multiple_of(away // (TYPE.primitive_bitwidth // 8), 16)
    else:
        return tl.zeros([], tl.int64)


@triton.jit
def block_offset(desc, block, seen, element, to_host, HELD: tl.constexpr, TIERED: tl.constexpr):
    """First element of blocks [n] int64 (0 where not `seen`), from that of the pool: their slot's, or else the host tier's.

    HELD: slots that are not pinned are about to be taken by others, and don't count.
    """
    if TIERED:
        slot = tl.load(d.address(desc, d.SLOT_OF, tl.int64) + block, mask=seen, other=0)
        resident = slot > 0
        if HELD:
            pinned = tl.load(d.address(desc, d.PINNED, tl.int8) + slot, mask=seen & resident, other=0)
            resident = pinned != 0
        return tl.where(resident, slot * element, block * element + to_host)
    else:
        return block * element


@triton.jit
def forced_base(desc, pid, TYPE: tl.constexpr, E: tl.constexpr, SINK: tl.constexpr, NEWEST: tl.constexpr, BITS: tl.constexpr):
    """What offsets of always-read blocks are counted from: the pool, or a row and KV head's exact copies: its first
    SINK blocks and NEWEST others, of E elements each."""
    if BITS < 16:
        return d.address(desc, d.EXACT, TYPE) + pid * ((SINK + NEWEST) * E)
    else:
        return d.address(desc, d.KV, TYPE)


@triton.jit
def exact_offset(column, E: tl.constexpr, SINK: tl.constexpr, NEWEST: tl.constexpr):
    """First elements of blocks [n] int64 among the exact copies of their row and KV head."""
    n = column.to(tl.int32)
    return tl.where(n < SINK, n, SINK + (n - SINK) % NEWEST).to(tl.int64) * E


@triton.jit
def forced_offset(desc, row, column, seen, element, to_host, E: tl.constexpr, SINK: tl.constexpr, NEWEST: tl.constexpr,
                  BITS: tl.constexpr, TIERED: tl.constexpr):
    """First elements of always-read blocks [n] of a row and KV head, from `forced_base`."""
    if BITS < 16:
        return exact_offset(column, E, SINK, NEWEST)
    else:
        return block_offset(desc, tl.load(row + column, mask=seen, other=0), seen, element, to_host, True, TIERED)
