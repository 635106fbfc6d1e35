"""Select kernel: which blocks to read, in which order, without sorting all of them.

A search over the bits of the shares says above which share enough mass (or the budget) is gathered. Only the blocks
above are ranked exactly, against each other. The first TILE blocks of a row stay in registers; usually they are all.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .append import forced_masses
from .overlap import let_next_start, wait_for_previous

# The search goes over this many octaves below the largest share, and ends with bins of 1 / 128 octave.
OCTAVES = 32
STEPS = 6                                                   # each divides by four


@triton.jit
def _add(a, b, c, e, f, g, u, v, w, x, y, z):
    return a + u, b + v, c + w, e + x, f + y, g + z


@triton.jit
def _above(share, cut, step):
    """Number and sum of the shares whose bits are not below each of the cuts cut, cut + step and cut + 2 step."""
    bits = share.to(tl.int32, bitcast=True)
    a, b, c = bits >= cut, bits >= cut + step, bits >= cut + 2 * step
    return tl.reduce((a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), tl.where(a, share, 0.0), tl.where(b, share, 0.0),
                      tl.where(c, share, 0.0)), 0, _add)


@triton.jit
def _shares(p, factor):
    """Masses [GP, TILE] relative to something, times a factor for each head: the mean share of each block, [TILE]."""
    return tl.sum(p * factor[:, None], 0)


@triton.jit
def select_kernel(desc, MF, TOT, INFO, threshold, slack, max_blocks, min_blocks, min_context, top_share,
                  H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr,
                  SINK: tl.constexpr, RECENT: tl.constexpr, PIECES: tl.constexpr, FP: tl.constexpr, NEVER: tl.constexpr, PLAN_ALL: tl.constexpr,
                  TILE: tl.constexpr, TI: tl.constexpr, TJ: tl.constexpr,
                  OCTAVES: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr):
    """One program a row and KV head.

    MF [B, H, PIECES, GP]: log2 mass of the always-read blocks. Writes TOT [B, H, GP]: log2 of the estimated total mass;
    INFO [B, H, 8] int32: blocks ranked, candidates, always-read blocks, how many must be read and may be, the bits of the
    share above which blocks are ranked; RANKED, SHARE.
    threshold, slack: blocks are ranked until the estimated coverage is threshold + slack. NEVER: there is no stop
    rule. PLAN_ALL: rank all that may be read.
    """
    let_next_start(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    U: tl.constexpr = P * UB
    LAST: tl.constexpr = 2147483647
    lengths = d.address(desc, d.LENGTHS, tl.int64)
    length = tl.load(lengths + pid // H)
    new = length + 1
    start = tl.maximum(tl.minimum(length // U * UB, length // P - RECENT), SINK).to(tl.int32)
    candidates = start - SINK
    blocks = ((new + P - 1) // P).to(tl.int32)
    forced = blocks - tl.maximum(candidates, 0)
    candidates = tl.maximum(candidates, 0)
    short = new < min_context
    budget = tl.minimum(max_blocks, tl.ceil(blocks * top_share).to(tl.int32))
    count = tl.minimum(candidates, tl.maximum(budget - forced, 0))
    count = tl.where(short, candidates, count)
    floor = tl.where(short, candidates, tl.minimum(tl.maximum(min_blocks - forced, 0), count))

    width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
    estimate = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width
    share = d.address(desc, d.SHARE, tl.float32) + pid * width
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * 2 * width
    listed = ranked + width
    rg, rt = tl.arange(0, GP), tl.arange(0, TILE)

    wait_for_previous(OVERLAP)
    _, forced_mass = forced_masses(MF, pid, GP, PIECES, FP)
    rows = estimate + rg[:, None] * width
    e0 = tl.load(rows + rt[None, :], mask=((rt >= SINK) & (rt < start))[None, :], other=float("-inf"))
    top = tl.maximum(forced_mass, tl.max(e0, 1))
    first_top = top
    p0 = tl.exp2(e0 - top[:, None])
    total = tl.exp2(forced_mass - top) + tl.sum(p0, 1)
    for low in range(TILE, start, TILE):
        n = low + rt
        e = tl.load(rows + n[None, :], mask=(n < start)[None, :], other=float("-inf"))
        peak = tl.maximum(top, tl.max(e, 1))
        total = total * tl.exp2(top - peak) + tl.sum(tl.exp2(e - peak[:, None]), 1)
        top = peak
    total = top + tl.log2(total)
    tl.store(TOT + pid * GP + rg, total)

    per_head = tl.where(rg < G, 1.0 / G, 0.0)
    held = _shares(p0, tl.exp2(first_top - total) * per_head)
    tl.store(share + rt, held, mask=rt < width)
    largest = tl.max(held, 0)
    everything = tl.sum(held, 0)
    for low in range(TILE, start, TILE):
        n = low + rt
        e = tl.load(rows + n[None, :], mask=(n < start)[None, :], other=float("-inf"))
        s = _shares(tl.exp2(e - total[:, None]), per_head)
        tl.store(share + n, s, mask=n < width)
        largest = tl.maximum(largest, tl.max(s, 0))
        everything += tl.sum(s, 0)
    tl.debug_barrier()

    # The highest cut, as bits, above which there is enough; 0, all of them, if nothing else is.
    need = everything - (1.0 - threshold - slack)
    bottom = tl.maximum(largest.to(tl.int32, bitcast=True) + 1 - (OCTAVES << 23), 1)
    cut = bottom
    for k in range(STEPS):
        step = (OCTAVES << 23) >> (2 * k + 2)
        n1, n2, n3, m1, m2, m3 = _above(held, cut + step, step)
        for low in range(TILE, start, TILE):
            s = tl.load(share + low + rt, mask=low + rt < start, other=0.0)
            a1, a2, a3, w1, w2, w3 = _above(s, cut + step, step)
            n1, n2, n3 = n1 + a1, n2 + a2, n3 + a3
            m1, m2, m3 = m1 + w1, m2 + w2, m3 + w3
        enough1 = (n1 >= count) | ((m1 >= need) & (n1 >= floor) & (short == 0) & (not PLAN_ALL))
        enough2 = (n2 >= count) | ((m2 >= need) & (n2 >= floor) & (short == 0) & (not PLAN_ALL))
        enough3 = (n3 >= count) | ((m3 >= need) & (n3 >= floor) & (short == 0) & (not PLAN_ALL))
        cut += step * (enough1.to(tl.int32) + enough2.to(tl.int32) + enough3.to(tl.int32))
    cut = tl.where(cut > bottom, cut, 0)

    # Keys that sort by share, then by block: the share's bits above, the block counted downwards below.
    found = 0
    s = held
    for low in range(0, start, TILE):
        n = low + rt
        if low > 0:
            s = tl.load(share + n, mask=n < start, other=0.0)
        bits = s.to(tl.int32, bitcast=True)
        keep = (n >= SINK) & (n < start) & (bits >= cut)
        at = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(listed + at, (bits.to(tl.int64) << 32) | (LAST - n).to(tl.int64), mask=keep)
        found += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    ri, rj = tl.arange(0, TI), tl.arange(0, TJ)
    in_order = (found <= count) & (short | NEVER)           # all are read, so their order says nothing
    for low in range(0, found, TI):
        i = low + ri
        key = tl.load(listed + i, mask=i < found, other=0)
        rank = i
        if not in_order:
            rank = tl.zeros([TI], tl.int32)
            for other in range(0, found, TJ):
                j = other + rj
                rival = tl.load(listed + j, mask=j < found, other=0)
                rank += tl.sum((rival[:, None] > key[None, :]).to(tl.int32), 0)
        tl.store(ranked + rank, LAST - (key & LAST), mask=(i < found) & (rank < count))
    info = INFO + pid * 8
    tl.store(info, tl.minimum(found, count))
    tl.store(info + 1, candidates)
    tl.store(info + 2, forced)
    tl.store(info + 3, floor)
    tl.store(info + 4, count)
    tl.store(info + 5, cut)
