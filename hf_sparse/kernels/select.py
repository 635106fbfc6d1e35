"""Select kernel: which blocks to read, without sorting them.

A binary search over the bits of the blocks' shares finds the share above which enough mass is promised (or the budget is
used up). All blocks above it are read at once, so their order does not matter; should the masses really found fall short of
the promise, `extend.py` chooses again. The first TILE blocks of a row stay in registers; usually they are all.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .append import forced_masses
from .overlap import let_next_start, wait_for_previous
from .residency import touch
from .reuse import keep, selects_anew, use


@triton.jit
def _add2(a, b, u, v):
    return a + u, b + v


@triton.jit
def max_add(a, b, u, v):
    return tl.maximum(a, u), b + v


@triton.jit
def above(share, cut):
    """Number and sum of the shares whose bits are not below a cut."""
    inside = share.to(tl.int32, bitcast=True) >= cut
    return tl.reduce((inside.to(tl.int32), tl.where(inside, share, 0.0)), 0, _add2)


@triton.jit
def _shares(p, factor, LARGEST: tl.constexpr):
    """Masses [GP, TILE] relative to something, times a factor for each head: every block's share, [TILE]."""
    if LARGEST:
        return tl.max(p * factor[:, None], 0)
    else:
        return tl.sum(p * factor[:, None], 0)


@triton.jit
def masses(rows, n, first, last, width):
    """Estimates [GP, TILE] of blocks n, -inf outside first.. below last. The load is wide because it is not masked by these."""
    e = tl.load(rows + n[None, :], mask=(n < width)[None, :], other=float("-inf"))
    return tl.where(((n >= first) & (n < last))[None, :], e, float("-inf"))


@triton.jit
def select_kernel(desc, Q, MF, TOT, INFO, q_b, q_h, need, max_blocks, min_blocks, min_context, floor_share,
                  top_share, top_least, H: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
                  D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr, TYPE: tl.constexpr,
                  SINK: tl.constexpr, RECENT: tl.constexpr, PIECES: tl.constexpr, FP: tl.constexpr,
                  NEVER: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr, OCTAVES: tl.constexpr,
                  STEPS: tl.constexpr, TIERED: tl.constexpr, POLICY: tl.constexpr, TOUCHED: tl.constexpr,
                  REMEMBER: tl.constexpr, AHEAD: tl.constexpr, REUSE: tl.constexpr, OVERLAP: tl.constexpr):
    """One program a row and KV head.

    MF [B, H, PIECES, GP]: log2 mass of the always-read blocks. need: blocks are planned until the estimated coverage is this.
    NEVER: there is no stop rule. LARGEST: a block's share is the largest over the group's heads, so that what is left unread
    bounds every head's loss; else it is the mean.

    Writes TOT [B, H, GP]: log2 of the estimated total mass; INFO [B, H, 8] int32: blocks planned, candidates, always-read
    blocks, how many candidates may be read, the bits of the share from which blocks are planned; RANKED: the planned blocks;
    SHARE. TIERED: what is planned is looked up in the pool, TOUCHED blocks at a time.
    REMEMBER: notes down what a selection ahead goes by. AHEAD: this is one, of `need` times as many blocks as the layer's last
    token has planned, whose always-read blocks stand in for those of the token to come.
    REUSE: tokens that share a selection; above 1, Q is kept with it.
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
    budget = tl.minimum(max_blocks, tl.maximum(tl.ceil(blocks * top_share).to(tl.int32), top_least))
    count = tl.minimum(candidates, tl.maximum(budget - forced, 0))
    count = tl.where(short, candidates, count)
    least = tl.maximum(min_blocks, tl.ceil(blocks * floor_share).to(tl.int32))
    floor = tl.where(short, candidates, tl.minimum(tl.maximum(least - forced, 0), count))

    if AHEAD:
        planned_before = tl.load(d.address(desc, d.PLANNED_BEFORE, tl.int32) + pid)
        count = tl.minimum(candidates, tl.ceil(planned_before * need).to(tl.int32))

    width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
    share = d.address(desc, d.SHARE, tl.float32) + pid * width
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * width
    rg, rt = tl.arange(0, GP), tl.arange(0, TILE)
    rows = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width + rg[:, None] * width

    wait_for_previous(OVERLAP)
    if REUSE > 1:
        if selects_anew(desc, pid) == 0:
            kept = tl.minimum(use(desc, pid), count)
            tl.store(INFO + pid * 8, kept)
            tl.store(INFO + pid * 8 + 1, candidates)
            tl.store(INFO + pid * 8 + 2, forced)
            tl.store(INFO + pid * 8 + 3, kept)
            if TIERED:
                touch(desc, d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS), ranked, kept, POLICY, TOUCHED)
            return
    if AHEAD:
        forced_mass = tl.load(d.address(desc, d.FORCED_BEFORE, tl.float32) + pid * GP + rg)
    else:
        _, forced_mass = forced_masses(MF, pid, GP, PIECES, FP)
    if REMEMBER:
        tl.store(d.address(desc, d.FORCED_BEFORE, tl.float32) + pid * GP + rg, forced_mass)
    e = masses(rows, rt, SINK, start, width)
    first_top = tl.maximum(forced_mass, tl.max(e, 1))
    relative = tl.exp2(e - first_top[:, None])
    total, top = tl.exp2(forced_mass - first_top) + tl.sum(relative, 1), first_top
    for low in range(TILE, start, TILE):
        n = low + rt
        e = masses(rows, n, SINK, start, width)
        peak = tl.maximum(top, tl.max(e, 1))
        total = total * tl.exp2(top - peak) + tl.sum(tl.exp2(e - peak[:, None]), 1)
        top = peak
    total = top + tl.log2(total)
    tl.store(TOT + pid * GP + rg, total)

    per_head = tl.where(rg < G, 1.0 if LARGEST else 1.0 / G, 0.0)
    held = _shares(relative, tl.exp2(first_top - total) * per_head, LARGEST)
    tl.store(share + rt, held, mask=rt < width)
    largest, everything = tl.reduce((held, held), 0, max_add)
    for low in range(TILE, start, TILE):
        n = low + rt
        e = masses(rows, n, SINK, start, width)
        s = _shares(tl.exp2(e - total[:, None]), per_head, LARGEST)
        tl.store(share + n, s, mask=n < width)
        most, sum = tl.reduce((s, s), 0, max_add)
        largest, everything = tl.maximum(largest, most), everything + sum
    tl.debug_barrier()

    # The highest cut, as bits, above which there is enough; 0, all blocks, if nothing in reach of the search is.
    most = everything - (1.0 - need)
    bottom = tl.maximum(largest.to(tl.int32, bitcast=True) + 1 - (OCTAVES << 23), 1)
    cut = bottom
    step = OCTAVES << 23
    for k in range(STEPS):
        step = step // 2
        number, mass = above(held, cut + step)
        for low in range(TILE, start, TILE):
            n1, m1 = above(tl.load(share + low + rt, mask=low + rt < start, other=0.0), cut + step)
            number, mass = number + n1, mass + m1
        enough = (number >= count) | ((mass >= most) & (number >= floor) & (short == 0) & (not NEVER))
        cut += tl.where(enough, step, 0)
    # Blocks above the bin of the cut are planned for certain, those in it as far as the budget goes.
    bar = tl.where(cut > bottom, cut + BIN, bottom)
    cut = tl.where(cut > bottom, cut, 0)
    inside = (rt >= SINK) & (rt < start)
    bits = held.to(tl.int32, bitcast=True)
    certain = tl.sum((inside & (bits >= bar)).to(tl.int32), 0)
    for low in range(TILE, start, TILE):
        bits = tl.load(share + low + rt, mask=low + rt < start, other=0.0).to(tl.int32, bitcast=True)
        certain += tl.sum(((low + rt < start) & (bits >= bar)).to(tl.int32), 0)
    # Two counts in one scan: certain ones, and those in the bin above bit 16.
    sure_before, bin_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    s = held
    for low in range(0, start, TILE):
        n = low + rt
        if low > 0:
            s = tl.load(share + n, mask=n < start, other=0.0)
        bits = s.to(tl.int32, bitcast=True)
        inside = (n >= SINK) & (n < start) & (bits >= cut)
        sure = bits >= bar
        one = tl.where(inside, tl.where(sure, 1, 1 << 16), 0)
        seen = tl.cumsum(one, 0) - one
        place = tl.where(sure, sure_before + (seen & 0xFFFF), certain + bin_before + (seen >> 16))
        tl.store(ranked + place, n.to(tl.int64), mask=inside & (place < count))
        both = tl.sum(one, 0)
        sure_before, bin_before = sure_before + (both & 0xFFFF), bin_before + (both >> 16)
    planned = tl.minimum(certain + bin_before, count)
    info = INFO + pid * 8
    tl.store(info, planned)
    tl.store(info + 1, candidates)
    tl.store(info + 2, forced)
    tl.store(info + 3, count)
    tl.store(info + 4, cut)
    if REUSE > 1:
        keep(desc, Q, q_b, q_h, pid, start, planned, short, H, MAPPED, G, GP, D, DP, TYPE)
    if REMEMBER:
        tl.store(d.address(desc, d.PLANNED_BEFORE, tl.int32) + pid, planned)
    if TIERED:
        row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
        touch(desc, row, ranked, planned, POLICY, TOUCHED, AHEAD)
