"""Select kernel: which blocks to read, in which order, without sorting all of them.

A search over the bits of the shares, eight thresholds at a time, finds the share above which enough mass (or the budget) is
gathered. Only the blocks above are ranked exactly, against each other.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d

# The search covers this many octaves below the largest share, in 8^4 steps: 0.4% wide.
OCTAVES = 24


@triton.jit
def _add(mass_a, count_a, mass_b, count_b):
    return mass_a + mass_b, count_a + count_b


@triton.jit
def _above(s, bits, cuts):
    """Sum and number of the shares s [TILE] whose bits reach each of the cuts [K]."""
    over = bits[None, :] >= cuts[:, None]
    return tl.reduce((tl.where(over, s[None, :], 0.0), over.to(tl.int32)), 1, _add)


@triton.jit
def select_kernel(desc, MF, TOT, INFO, threshold, slack, max_blocks, min_blocks, min_context, top_share,
                  H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr,
                  SINK: tl.constexpr, RECENT: tl.constexpr, NEVER: tl.constexpr, TILE: tl.constexpr, TI: tl.constexpr,
                  TJ: tl.constexpr, OCTAVES: tl.constexpr):
    """One program a row and KV head.

    MF [B, H, GP]: log2 mass of the always-read blocks. Writes TOT [B, H, GP]: log2 of the estimated total mass;
    INFO [B, H, 4] int32: blocks ranked, candidates, always-read blocks, how many must be read; RANKED, SHARE.
    threshold, slack: blocks are ranked until the estimated coverage is threshold + slack. NEVER: there is no stop rule.
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
    share = d.address(desc, d.SHARE, tl.float32) + pid * 2 * width
    listed_share = share + width
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * 2 * width
    listed = ranked + width
    rg, rt = tl.arange(0, GP), tl.arange(0, TILE)

    # The first tile of blocks stays in registers, and usually is all there is.
    live = (rg < G)[:, None]
    there = (rt >= SINK) & (rt < start)
    e0 = tl.load(estimate + rg[:, None] * width + rt[None, :], mask=there[None, :], other=float("-inf"))
    forced_mass = tl.load(MF + pid * GP + rg)
    top = tl.maximum(forced_mass, tl.max(e0, 1))
    for low in range(TILE, start, TILE):
        n = low + rt
        e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=(n < start)[None, :], other=float("-inf"))
        top = tl.maximum(top, tl.max(e, 1))
    w0 = tl.exp2(e0 - top[:, None])
    total = tl.exp2(forced_mass - top) + tl.sum(w0, 1)
    for low in range(TILE, start, TILE):
        n = low + rt
        e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=(n < start)[None, :], other=float("-inf"))
        total += tl.sum(tl.exp2(e - top[:, None]), 1)
    tl.store(TOT + pid * GP + rg, top + tl.log2(total))

    part = 1.0 / (total * G)
    s0 = tl.sum(tl.where(live, w0 * part[:, None], 0.0), 0)
    tl.store(share + rt, s0, mask=rt < width)
    largest, everything = tl.max(s0, 0), tl.sum(s0, 0)
    for low in range(TILE, start, TILE):
        n = low + rt
        e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=(n < start)[None, :], other=float("-inf"))
        s = tl.sum(tl.where(live, tl.exp2(e - top[:, None]) * part[:, None], 0.0), 0)
        tl.store(share + n, s, mask=n < width)
        largest = tl.maximum(largest, tl.max(s, 0))
        everything += tl.sum(s, 0)
    bits0 = tl.where(there, s0.to(tl.int32, bitcast=True), -1)
    # Find the highest threshold, as bits, above which there is enough.
    need = everything - (1.0 - threshold - slack)
    bottom = tl.maximum(largest.to(tl.int32, bitcast=True) + 1 - (OCTAVES << 23), 1)
    unit = (largest.to(tl.int32, bitcast=True) + 1 - bottom + 4095) // 4096
    step = unit * 512
    cut = bottom
    rk = tl.arange(0, 8)
    for level in tl.static_range(4):
        cuts = cut + rk * step
        mass, above = _above(s0, bits0, cuts)
        for low in range(TILE, start, TILE):
            n = low + rt
            s = tl.load(share + n, mask=n < start, other=0.0)
            more_mass, more = _above(s, tl.where(n < start, s.to(tl.int32, bitcast=True), -1), cuts)
            mass += more_mass
            above += more
        by_mass = (mass >= need) & (above >= floor) & (short == 0)
        best = tl.max(tl.where((above >= count) | (by_mass & (not NEVER)), rk, -1), 0)
        if level == 0:
            # Not even the lowest threshold: everything is needed.
            cut, step = tl.where(best < 0, 0, cut), tl.where(best < 0, 0, step)
        cut += tl.maximum(best, 0) * step
        step = step // 8

    keep = bits0 >= cut
    seen = tl.cumsum(keep.to(tl.int32), 0)
    tl.store(listed + seen - 1, rt.to(tl.int64), mask=keep)
    tl.store(listed_share + seen - 1, s0, mask=keep)
    found = tl.max(seen, 0)
    for low in range(TILE, start, TILE):
        n = low + rt
        s = tl.load(share + n, mask=n < start, other=0.0)
        keep = (n < start) & (s.to(tl.int32, bitcast=True) >= cut)
        seen = tl.cumsum(keep.to(tl.int32), 0)
        tl.store(listed + found + seen - 1, n.to(tl.int64), mask=keep)
        tl.store(listed_share + found + seen - 1, s, mask=keep)
        found += tl.max(seen, 0)
    tl.debug_barrier()
    ri, rj = tl.arange(0, TI), tl.arange(0, TJ)
    in_order = (found <= count) & (short | NEVER)           # all are read, so their order says nothing
    for low in range(0, found, TI):
        i = low + ri
        ni = tl.load(listed + i, mask=i < found, other=0)
        rank = i
        if not in_order:
            si = tl.load(listed_share + i, mask=i < found, other=-1.0)
            rank = tl.zeros([TI], tl.int32)
            for other in range(0, found, TJ):
                j = other + rj
                sj = tl.load(listed_share + j, mask=j < found, other=-1.0)
                before = (sj[None, :] > si[:, None]) | ((sj[None, :] == si[:, None]) & (j[None, :] < i[:, None]))
                rank += tl.sum((before & (j < found)[None, :]).to(tl.int32), 1)
        tl.store(ranked + rank, ni, mask=(i < found) & (rank < count))
    info = INFO + pid * 4
    tl.store(info, tl.minimum(found, count))
    tl.store(info + 1, candidates)
    tl.store(info + 2, forced)
    tl.store(info + 3, floor)
