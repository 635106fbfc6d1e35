"""Extend kernel: where the mass gathered does not reach the threshold, read on until it does.

Knowing what was really gathered, one can say which blocks still matter: those whose estimates, taken together, would be too
much to leave unread. They are chosen by a second cut, as in `select.py`, and read by several programs a row at once; the
last one to finish joins all. So a row costs at most two passes over its blocks, however wrong its estimates are.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .attend import attend_stored, captured_mass, chunks_of, mean_coverage, queries, query_rows, row_of, sink_logits
from .overlap import wait_for_previous
from .select import masses


@triton.jit
def _unread(rows, shares, n, first, last, width, cut, seen, G: tl.constexpr, GROUP_MIN: tl.constexpr):
    """Estimates of blocks n [GP, TILE] over the mass gathered, 0 for those already read, and how much a block weighs: their
    mean or maximum over the group's heads [TILE]. seen: log2 mass gathered [GP], infinite for heads beyond the group."""
    p = tl.exp2(tl.minimum(masses(rows, n, first, last, width) - seen[:, None], 100.0))
    share = tl.load(shares + n, mask=n < last, other=0.0)
    p = tl.where((share.to(tl.int32, bitcast=True) < cut)[None, :], p, 0.0)
    if GROUP_MIN:
        return p, tl.max(p, 0)
    else:
        return p, tl.sum(p, 0) * (1.0 / G)


@triton.jit
def _below(p, weight, cut):
    """How many weights have bits not below a cut, and what the others leave unread [GP]."""
    inside = weight.to(tl.int32, bitcast=True) >= cut
    return tl.sum(inside.to(tl.int32), 0), tl.sum(tl.where(inside[None, :], 0.0, p), 1)


@triton.jit
def extend_kernel(desc, Q, INFO, MASS, SINK_LOGITS, OUT, q_b, q_h, scale, softcap, threshold, H: tl.constexpr,
                  HM: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
                  DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, P: tl.constexpr, TT: tl.constexpr,
                  TYPE: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, GROUP_MIN: tl.constexpr,
                  SINK: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, PP: tl.constexpr,
                  OCTAVES: tl.constexpr, STEPS: tl.constexpr, KV_BITS: tl.constexpr, PTX: tl.constexpr,
                  TIERED: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs (row and KV head, one of PROGRAMS stripes of the row); most return at once. Corrects OUT and the statistics.

    INFO[5]: whether the row needs more; INFO[6]: programs that are done. MASS: see `merge_kernel`.
    """
    pid, stripe = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(OVERLAP)
    info = INFO + pid * 8
    if tl.load(info + 5) != 0:
        b, head = pid // H, d.model_head(desc, pid % H, MAPPED)
        BIN: tl.constexpr = OCTAVES << 23 >> STEPS
        RQ: tl.constexpr = query_rows(GP, KV_BITS)
        kv, element, row, ranked, shares, estimate, width = row_of(desc, pid, GP, TYPE, KV_BITS)
        part, part_mass, part_left, capacity = chunks_of(desc, pid, GP, DVP)
        rg, rt, rv = tl.arange(0, GP), tl.arange(0, TILE), tl.arange(0, DVP)
        live = rg < G
        planned, candidates = tl.load(info), tl.load(info + 1)
        room, planned_cut = tl.load(info + 3) - planned, tl.load(info + 4)
        end = SINK + candidates
        mass = tl.load(MASS + pid * GP + rg)
        sink = sink_logits(SINK_LOGITS, head, G, GP, SINKS)
        seen = tl.where(live, captured_mass(mass, sink, SINKS), float("inf"))
        rows = estimate + rg[:, None] * width

        p, weight = _unread(rows, shares, rt, SINK, end, width, planned_cut, seen, G, GROUP_MIN)
        largest, unread = tl.max(weight, 0), tl.sum(p, 1)
        for low in range(TILE, end, TILE):
            p1, w1 = _unread(rows, shares, low + rt, SINK, end, width, planned_cut, seen, G, GROUP_MIN)
            largest, unread = tl.maximum(largest, tl.max(w1, 0)), unread + tl.sum(p1, 1)
        # The highest cut that leaves little enough, or as many blocks as may be read; 1, all blocks, if none in reach does.
        bottom = tl.maximum(largest.to(tl.int32, bitcast=True) + 1 - (OCTAVES << 23), 1)
        cut, number = bottom, tl.zeros([], tl.int32)
        step = OCTAVES << 23
        for k in range(STEPS + 1):
            step = step // 2
            tried = cut + step                              # in the last round `step` is 0: how many are in the bin too
            if k == STEPS:
                tried = tl.where(cut > bottom, cut, 1)
            number, left = _below(p, weight, tried)
            for low in range(TILE, end, TILE):
                p1, w1 = _unread(rows, shares, low + rt, SINK, end, width, planned_cut, seen, G, GROUP_MIN)
                n1, l1 = _below(p1, w1, tried)
                number, left = number + n1, left + l1
            if k < STEPS:
                cut = tl.where((number >= room) | (mean_coverage(left, live, G, GROUP_MIN) >= threshold), tried, cut)
        cut = tl.where(number > room, tl.where(cut > bottom, cut + BIN, bottom), tl.where(cut > bottom, cut, 1))

        # This program's share of them, listed in its own part of the list: what was planned has been read.
        span = (candidates + PROGRAMS - 1) // PROGRAMS
        first = SINK + stripe * span
        last = tl.minimum(first + span, end)
        mine = ranked + first
        listed = tl.zeros([], tl.int32)
        known = tl.zeros([GP], tl.float32)
        for low in range(0, span, TILE):
            n = first + low + rt
            p1, w1 = _unread(rows, shares, n, first, last, width, planned_cut, seen, G, GROUP_MIN)
            inside = w1.to(tl.int32, bitcast=True) >= cut
            place = listed + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(mine + place, n.to(tl.int64), mask=inside)
            known += tl.sum(tl.where(inside[None, :], p1, 0.0), 1)
            listed += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()
        attend_stored(desc, kv, row, mine, element, queries(desc, Q, pid, q_b, q_h, H, MAPPED, G, RQ, D, DP, KV_BITS), scale, softcap,
                      0, listed, listed, part + stripe * GP * DVP, part_mass + stripe * GP, GP, RQ, D, DP, DV, DVP, P, TT, TYPE,
                      CAP, KV_BITS, PTX, TIERED)
        tl.store(part_left + stripe * GP + rg, known)
        counters = d.address(desc, d.COUNTERS, tl.float64)
        tl.atomic_add(counters, listed.to(tl.float64))

        tl.debug_barrier()                                  # all threads of the program have stored
        if tl.atomic_add(info + 6, 1, sem="acq_rel") == PROGRAMS - 1:
            tl.store(info + 6, 0)
            rp = tl.arange(0, PP)
            at = rp[:, None] * GP + rg[None, :]
            there = (rp < PROGRAMS)[:, None]
            # Past the first-level cache, which may hold what was there before the other programs wrote.
            m = tl.load(part_mass + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            e1 = tl.load(part_left + at, mask=there, other=0.0, cache_modifier=".cg")
            big = tl.maximum(mass, tl.max(m, 0))
            new = big + tl.log2(tl.exp2(mass - big) + tl.sum(tl.exp2(m - big[None, :]), 0))
            now = captured_mass(new, sink, SINKS)
            for g in tl.static_range(G):
                one = rg == g
                before = tl.sum(tl.where(one, tl.exp2(seen - now), 0.0), 0)
                share = tl.sum(tl.where(one[None, :], tl.exp2(m - now[None, :]), 0.0), 1)
                o = tl.load(part + (rp * GP + g)[:, None] * DVP + rv[None, :], mask=there, other=0.0, cache_modifier=".cg")
                out = OUT + ((b * HM + head) * G + g) * DV + rv
                old = tl.load(out, mask=rv < DV, other=0.0).to(tl.float32)
                tl.store(out, (old * before + tl.sum(o * share[:, None], 0)).to(TYPE), mask=rv < DV)
            left = tl.maximum(unread - tl.sum(e1, 0), 0.0) * tl.where(live, tl.exp2(seen - now), 0.0)
            tl.atomic_add(counters + 2, mean_coverage(left, live, G, False).to(tl.float64))
            captured = d.address(desc, d.CAPTURED, tl.float32)
            tl.store(captured + pid * GP + rg, new * 0.6931471805599453)
