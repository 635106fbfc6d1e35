"""Select kernel: which blocks to read, without sorting them.

A binary search over the bits of the blocks' shares finds the share above which enough mass is promised (or the budget is
used up). All blocks above it are read at once, so their order does not matter. A second, lower cut lists the blocks to
read next, should the masses really found fall short of the promise. The first TILE blocks of a row stay in registers;
usually they are all.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .append import forced_masses
from .overlap import let_next_start, wait_for_previous

# The search goes over this many octaves below the largest share and ends with bins of 1 / 21 octave, or 3 %.
OCTAVES = 24
STEPS = 9


@triton.jit
def _add4(a, b, c, e, u, v, w, x):
    return a + u, b + v, c + w, e + x


@triton.jit
def _above(share, cut, lower):
    """Number and sum of the shares whose bits are not below each of two cuts."""
    bits = share.to(tl.int32, bitcast=True)
    a, b = bits >= cut, bits >= lower
    return tl.reduce((a.to(tl.int32), tl.where(a, share, 0.0), b.to(tl.int32), tl.where(b, share, 0.0)), 0, _add4)


@triton.jit
def _shares(p, factor, LARGEST: tl.constexpr):
    """Masses [GP, TILE] relative to something, times a factor for each head: every block's share, [TILE]."""
    if LARGEST:
        return tl.max(p * factor[:, None], 0)
    else:
        return tl.sum(p * factor[:, None], 0)


@triton.jit
def _masses(rows, n, first, last, width):
    """Estimates [GP, TILE] of blocks n, -inf outside first.. below last. The load is wide because it is not masked by these."""
    e = tl.load(rows + n[None, :], mask=(n < width)[None, :], other=float("-inf"))
    return tl.where(((n >= first) & (n < last))[None, :], e, float("-inf"))


@triton.jit
def select_kernel(desc, MF, TOT, INFO, need1, need2, max_blocks, min_blocks, min_context, top_share,
                  H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr,
                  SINK: tl.constexpr, RECENT: tl.constexpr, PIECES: tl.constexpr, FP: tl.constexpr,
                  NEVER: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr, OCTAVES: tl.constexpr,
                  STEPS: tl.constexpr, OVERLAP: tl.constexpr):
    """One program a row and KV head.

    MF [B, H, PIECES, GP]: log2 mass of the always-read blocks. need1, need2: blocks are planned, and held in reserve, until
    the estimated coverage is this. NEVER: there is no stop rule. LARGEST: a block's share is the largest over the group's
    heads, so that what is left unread bounds every head's loss; else it is the mean.

    Writes TOT [B, H, GP]: log2 of the estimated total mass; INFO [B, H, 8] int32: blocks planned, candidates, always-read
    blocks, how many must be read and may be, blocks planned and in reserve, the bits of the share below which blocks are in
    neither; RANKED: the planned blocks, then those in reserve; SHARE.
    """
    let_next_start(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    U: tl.constexpr = P * UB
    BIN: tl.constexpr = OCTAVES << 23 >> STEPS
    lengths = d.address(desc, d.LENGTHS, tl.int64)
    length = tl.load(lengths + pid // H)
    new = length + 1
    start = tl.maximum(tl.minimum(length // U * UB, length // P - RECENT), SINK).to(tl.int32)
    candidates = start - SINK
    blocks = ((new + P - 1) // P).to(tl.int32)
    forced = blocks - candidates
    short = new < min_context
    budget = tl.minimum(max_blocks, tl.ceil(blocks * top_share).to(tl.int32))
    count = tl.minimum(candidates, tl.maximum(budget - forced, 0))
    count = tl.where(short, candidates, count)
    floor = tl.where(short, candidates, tl.minimum(tl.maximum(min_blocks - forced, 0), count))

    width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
    share = d.address(desc, d.SHARE, tl.float32) + pid * width
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * width
    rg, rt = tl.arange(0, GP), tl.arange(0, TILE)
    rows = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width + rg[:, None] * width

    wait_for_previous(OVERLAP)
    _, forced_mass = forced_masses(MF, pid, GP, PIECES, FP)
    e = _masses(rows, rt, SINK, start, width)
    first_top = tl.maximum(forced_mass, tl.max(e, 1))
    relative = tl.exp2(e - first_top[:, None])
    total, top = tl.exp2(forced_mass - first_top) + tl.sum(relative, 1), first_top
    for low in range(TILE, start, TILE):
        n = low + rt
        e = _masses(rows, n, SINK, start, width)
        peak = tl.maximum(top, tl.max(e, 1))
        total = total * tl.exp2(top - peak) + tl.sum(tl.exp2(e - peak[:, None]), 1)
        top = peak
    total = top + tl.log2(total)
    tl.store(TOT + pid * GP + rg, total)

    per_head = tl.where(rg < G, 1.0 if LARGEST else 1.0 / G, 0.0)
    held = _shares(relative, tl.exp2(first_top - total) * per_head, LARGEST)
    tl.store(share + rt, held, mask=rt < width)
    largest, everything = tl.max(held, 0), tl.sum(held, 0)
    for low in range(TILE, start, TILE):
        n = low + rt
        e = _masses(rows, n, SINK, start, width)
        s = _shares(tl.exp2(e - total[:, None]), per_head, LARGEST)
        tl.store(share + n, s, mask=n < width)
        largest = tl.maximum(largest, tl.max(s, 0))
        everything += tl.sum(s, 0)
    tl.debug_barrier()

    # The highest cuts, as bits, above which there is enough; 0, all blocks, if nothing in reach of the search is.
    most1, most2 = everything - (1.0 - need1), everything - (1.0 - need2)
    bottom = tl.maximum(largest.to(tl.int32, bitcast=True) + 1 - (OCTAVES << 23), 1)
    cut, lower = bottom, bottom
    step = OCTAVES << 23
    for k in range(STEPS):
        step = step // 2
        n1, m1, n2, m2 = _above(held, cut + step, lower + step)
        for low in range(TILE, start, TILE):
            s = tl.load(share + low + rt, mask=low + rt < start, other=0.0)
            a1, w1, a2, w2 = _above(s, cut + step, lower + step)
            n1, m1, n2, m2 = n1 + a1, m1 + w1, n2 + a2, m2 + w2
        rule = (short == 0) & (not NEVER)
        enough1 = (n1 >= count) | ((m1 >= most1) & (n1 >= floor) & rule)
        enough2 = (n2 >= count) | ((m2 >= most2) & (n2 >= floor) & rule)
        cut += tl.where(enough1, step, 0)
        lower += tl.where(enough2, step, 0)
    # Blocks above the bin of the cut are planned for certain, those in it as far as the budget goes, then the reserve.
    bar = tl.where(cut > bottom, cut + BIN, bottom)
    cut = tl.where(cut > bottom, cut, 0)
    lower = tl.where(lower > bottom, tl.minimum(lower, cut), 0)
    inside = (rt >= SINK) & (rt < start)
    bits = held.to(tl.int32, bitcast=True)
    certain = tl.sum((inside & (bits >= bar)).to(tl.int32), 0)
    planned = tl.sum((inside & (bits >= cut)).to(tl.int32), 0)
    for low in range(TILE, start, TILE):
        bits = tl.load(share + low + rt, mask=low + rt < start, other=0.0).to(tl.int32, bitcast=True)
        certain += tl.sum(((low + rt < start) & (bits >= bar)).to(tl.int32), 0)
        planned += tl.sum(((low + rt < start) & (bits >= cut)).to(tl.int32), 0)
    # Three counts in one scan, 20 bits each.
    before = tl.zeros([], tl.int64)
    s = held
    for low in range(0, start, TILE):
        n = low + rt
        if low > 0:
            s = tl.load(share + n, mask=n < start, other=0.0)
        bits = s.to(tl.int32, bitcast=True)
        inside = (n >= SINK) & (n < start)
        group = tl.where(bits >= bar, 0, tl.where(bits >= cut, 20, 40))
        inside = inside & (bits >= lower)
        one = tl.where(inside, tl.full([TILE], 1, tl.int64) << group, 0)
        seen = before + tl.cumsum(one, 0) - one
        place = ((seen >> group) & 0xFFFFF).to(tl.int32)
        place += tl.where(group == 0, 0, tl.where(group == 20, certain, planned))
        tl.store(ranked + place, n.to(tl.int64), mask=inside & (place < count))
        before += tl.sum(one, 0)
    listed = planned + (before >> 40).to(tl.int32)
    info = INFO + pid * 8
    tl.store(info, tl.minimum(planned, count))
    tl.store(info + 1, candidates)
    tl.store(info + 2, forced)
    tl.store(info + 3, floor)
    tl.store(info + 4, count)
    tl.store(info + 5, tl.minimum(listed, count))
    tl.store(info + 6, lower)
