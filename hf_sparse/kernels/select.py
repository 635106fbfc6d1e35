"""Select kernel: which blocks to read, in which order, without sorting all of them.

Two histograms of the shares' bits, 256 bins each and the second inside one bin of the first, say above which share enough
mass (or the budget) is gathered. Only the blocks above are ranked exactly, against each other.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d

# The first histogram covers this many octaves below the largest share in bins of an eighth, the second in 1/2048.
OCTAVES = 24


@triton.jit
def select_kernel(desc, MF, TOT, INFO, threshold, slack, max_blocks, min_blocks, min_context, top_share,
                  H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr,
                  SINK: tl.constexpr, RECENT: tl.constexpr, NEVER: tl.constexpr, PLAN_ALL: tl.constexpr,
                  TILE: tl.constexpr, TI: tl.constexpr, TJ: tl.constexpr, OCTAVES: tl.constexpr):
    """One program a row and KV head.

    MF [B, H, GP]: log2 mass of the always-read blocks. Writes TOT [B, H, GP]: log2 of the estimated total mass;
    INFO [B, H, 8] int32: blocks ranked, candidates, always-read blocks, how many must be read and may be, the bits of the
    share above which blocks are ranked; RANKED, SHARE.
    threshold, slack: blocks are ranked until the estimated coverage is threshold + slack. NEVER: there is no stop
    rule. PLAN_ALL: rank all that may be read.
    """
    pid = tl.program_id(0).to(tl.int64)
    U: tl.constexpr = P * UB
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

    top = tl.load(MF + pid * GP + rg)
    total = tl.full([GP], 1.0, tl.float32)
    for low in range(0, start, TILE):
        n = low + rt
        e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=((n >= SINK) & (n < start))[None, :],
                    other=float("-inf"))
        peak = tl.maximum(top, tl.max(e, 1))
        total = total * tl.exp2(top - peak) + tl.sum(tl.exp2(e - peak[:, None]), 1)
        top = peak
    total = top + tl.log2(total)
    tl.store(TOT + pid * GP + rg, total)

    live = (rg < G)[:, None]
    largest = 0.0
    everything = 0.0
    for low in range(0, start, TILE):
        n = low + rt
        e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=((n >= SINK) & (n < start))[None, :],
                    other=float("-inf"))
        s = tl.sum(tl.where(live, tl.exp2(e - total[:, None]), 0.0), 0) / G
        tl.store(share + n, s, mask=n < width)
        largest = tl.maximum(largest, tl.max(s, 0))
        everything += tl.sum(s, 0)
    tl.debug_barrier()
    # Find the highest threshold, as bits, above which there is enough.
    need = everything - (1.0 - threshold - slack)
    bottom = tl.maximum(largest.to(tl.int32, bitcast=True) + 1 - (OCTAVES << 23), 1)
    rb = tl.arange(0, 256)
    counts = tl.zeros([256], tl.int32)
    for low in range(0, start, TILE):
        n = low + rt
        bits = tl.load(share + n, mask=n < width, other=0.0).to(tl.int32, bitcast=True) - bottom
        counts += tl.histogram(tl.maximum(bits, 0) >> 20, 256, mask=bits >= 0)
    middle = (bottom + (rb << 20) + (1 << 19)).to(tl.float32, bitcast=True)
    middle = tl.where(counts > 0, counts * middle, 0.0)
    mass = tl.cumsum(middle, 0, reverse=True)
    above = tl.cumsum(counts, 0, reverse=True)
    by_mass = (mass >= need) & (above >= floor) & (short == 0)
    enough = (above >= count) | (by_mass & (not PLAN_ALL))
    best = tl.max(tl.where(enough, rb, -1), 0)
    if best >= 0:
        inside = rb == best
        mass_before = tl.sum(tl.where(inside, mass - middle, 0.0), 0)
        above_before = tl.sum(tl.where(inside, above - counts, 0), 0)
        edge = bottom + (best << 20)
        counts = tl.zeros([256], tl.int32)
        for low in range(0, start, TILE):
            n = low + rt
            bits = tl.load(share + n, mask=n < width, other=0.0).to(tl.int32, bitcast=True) - edge
            in_bin = (bits >= 0) & (bits < (1 << 20))
            counts += tl.histogram(tl.where(in_bin, bits, 0) >> 12, 256, mask=in_bin)
        middle = (edge + (rb << 12) + (1 << 11)).to(tl.float32, bitcast=True)
        mass = mass_before + tl.cumsum(counts * middle, 0, reverse=True)
        above = above_before + tl.cumsum(counts, 0, reverse=True)
        by_mass = (mass >= need) & (above >= floor) & (short == 0)
        enough = (above >= count) | (by_mass & (not PLAN_ALL))
        cut = edge + (tl.maximum(tl.max(tl.where(enough, rb, -1), 0), 0) << 12)
    else:
        cut = 0                                             # all of them are not enough

    found = 0
    for low in range(0, start, TILE):
        n = low + rt
        s = tl.load(share + n, mask=n < start, other=0.0)
        keep = (n >= SINK) & (n < start) & (s.to(tl.int32, bitcast=True) >= cut)
        place = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(listed + place, n.to(tl.int64), mask=keep)
        found += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    ri, rj = tl.arange(0, TI), tl.arange(0, TJ)
    in_order = (found <= count) & (short | NEVER)           # all are read, so their order says nothing
    for low in range(0, found, TI):
        i = low + ri
        ni = tl.load(listed + i, mask=i < found, other=0)
        rank = i
        if not in_order:
            si = tl.load(share + ni, mask=i < found, other=-1.0)
            rank = tl.zeros([TI], tl.int32)
            for other in range(0, found, TJ):
                j = other + rj
                nj = tl.load(listed + j, mask=j < found, other=0)
                sj = tl.load(share + nj, mask=j < found, other=-1.0)
                before = (sj[None, :] > si[:, None]) | ((sj[None, :] == si[:, None]) & (j[None, :] < i[:, None]))
                rank += tl.sum((before & (j < found)[None, :]).to(tl.int32), 1)
        tl.store(ranked + rank, ni, mask=(i < found) & (rank < count))
    info = INFO + pid * 8
    tl.store(info, tl.minimum(found, count))
    tl.store(info + 1, candidates)
    tl.store(info + 2, forced)
    tl.store(info + 3, floor)
    tl.store(info + 4, count)
    tl.store(info + 5, cut)
