"""Attend kernel: read the ranked blocks in parallel chunks. Merge kernel: stop where the rule would have stopped.

A chunk is a part of a round. All chunks that the estimates call for are read at once; then the merge walks their masses
in rank order, finds the first check of the stop rule that passes with the mass really gathered, and joins the chunks up
to there in a fixed order. What was read beyond it is dropped, so the result is that of reading round by round. Where the
estimates promised too much, and all that was planned does not reach the threshold, the merge reads on among the other
candidates, in the order of the row, until it does.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .append import forced_masses, softcap_log2
from .overlap import let_next_start, wait_for_previous


@triton.jit
def _blocks(kv, row, ranked, share, element, qq, scale, softcap, first, last, cut, part, part_mass,
            BY_RANK: tl.constexpr, GP: tl.constexpr, RQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
            DV: tl.constexpr, DVP: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr,
            CAP: tl.constexpr):
    """Attention over CB blocks into `part` and `part_mass`: those of ranks first.. below `last`, or, not BY_RANK, the
    blocks first.. below `last` whose share is under the cut, which no rank was given."""
    rd, rv = tl.arange(0, DP), tl.arange(0, DVP)
    rt, rq = tl.arange(0, TT), tl.arange(0, RQ)
    top = tl.full([RQ], float("-inf"), tl.float32)
    weight = tl.zeros([RQ], tl.float32)
    acc = tl.zeros([RQ, DVP], tl.float32)
    for low in range(0, CB * P, TT):
        n = first + (low + rt) // P
        seen = n < last
        if BY_RANK:
            n = tl.load(ranked + n, mask=seen, other=0)
        else:
            bits = tl.load(share + n, mask=seen, other=0.0).to(tl.int32, bitcast=True)
            seen = seen & (bits < cut)
            n = tl.where(seen, n, 0).to(tl.int64)
        slot = tl.load(row + n, mask=seen, other=0) * element
        inside = (low + rt) % P
        k_at = kv + (slot + inside * D)[None, :] + rd[:, None]
        v_at = kv + (slot + P * D + inside * DV)[:, None] + rv[None, :]
        k = tl.load(k_at, mask=seen[None, :] & (rd < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=seen[:, None] & (rv < DV)[None, :], other=0.0)
        s = tl.dot(qq, k, input_precision="ieee") * scale
        if CAP:
            s = softcap_log2(s, softcap)
        s = tl.where(seen[None, :], s, float("-inf"))
        peak = tl.maximum(top, tl.max(s, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        acc = acc * fade[:, None] + tl.dot(p.to(TYPE), v, input_precision="ieee")
        weight = weight * fade + tl.sum(p, 1)
        top = peak
    keep = rq < GP
    whole = tl.where(weight > 0, weight, 1.0)
    tl.store(part + rq[:, None] * DVP + rv[None, :], acc / whole[:, None], mask=keep[:, None])
    tl.store(part_mass + rq, tl.where(weight > 0, top + tl.log2(whole), float("-inf")), mask=keep)


@triton.jit
def _captured(mass, sink, SINKS: tl.constexpr):
    """log2(2^mass + 2^sink): sinks count as gathered."""
    if SINKS:
        big = tl.maximum(mass, sink)
        return big + tl.log2(tl.exp2(mass - big) + tl.exp2(sink - big))
    else:
        return mass


@triton.jit
def _one(x, mine):
    """The number of one head out of those of all [GP] or [n, GP]: scalar or [n]."""
    if len(x.shape) == 2:
        return tl.sum(tl.where(mine[None, :], x, 0.0), 1)
    else:
        return tl.sum(tl.where(mine, x, 0.0), 0)


@triton.jit
def attend_kernel(desc, Q, TOT, INFO, q_b, q_h, scale, softcap, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
                  D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, P: tl.constexpr,
                  CB: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs (row and KV head, stripe of chunks). Writes PART, PART_MASS and PART_LEFT of each chunk."""
    let_next_start(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
    kv = d.address(desc, d.KV, TYPE)
    element = tl.multiple_of(tl.load(desc + d.ELEMENTS), 16)
    row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * 2 * width
    share = d.address(desc, d.SHARE, tl.float32) + pid * width
    estimate = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width
    capacity = tl.load(desc + d.CHUNKS)
    part = d.address(desc, d.PART, tl.float32) + pid * capacity * GP * DVP
    part_mass = d.address(desc, d.PART_MASS, tl.float32) + pid * capacity * GP
    part_left = d.address(desc, d.PART_LEFT, tl.float32) + pid * capacity * GP
    RQ: tl.constexpr = 16 if GP < 16 else GP
    rq, rg, rc, rd = tl.arange(0, RQ), tl.arange(0, GP), tl.arange(0, CB), tl.arange(0, DP)
    qq = tl.load(Q + pid // H * q_b + (pid % H * G + rq)[:, None] * q_h + rd[None, :],
                 mask=(rq < G)[:, None] & (rd < D)[None, :], other=0.0)
    wait_for_previous(OVERLAP)
    planned = tl.load(INFO + pid * 8)
    chunks = (planned + CB - 1) // CB
    if tl.program_id(1) < chunks:
        total = tl.load(TOT + pid * GP + rg)
        for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
            rank = chunk * CB + rc
            n = tl.load(ranked + rank, mask=rank < planned, other=0)
            e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=(rank < planned)[None, :], other=float("-inf"))
            _blocks(kv, row, ranked, share, element, qq, scale, softcap, chunk * CB, planned, 0, part + chunk * GP * DVP,
                    part_mass + chunk * GP, True, GP, RQ, D, DP, DV, DVP, P, CB, TT, TYPE, CAP)
            tl.store(part_left + chunk * GP + rg, tl.sum(tl.exp2(e - total[:, None]), 1))


@triton.jit
def merge_kernel(desc, Q, OF, MF, TOT, INFO, BOUNDS, SINK_LOGITS, OUT, q_b, q_h, scale, softcap, threshold,
                 H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                 DV: tl.constexpr, DVP: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, CT: tl.constexpr,
                 TT: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, NEVER: tl.constexpr,
                 BY_ESTIMATE: tl.constexpr, GROUP_MIN: tl.constexpr, SINK: tl.constexpr, PIECES: tl.constexpr,
                 FP: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs (row and KV head, query head of the group): all walk the same masses, each joins its own output.

    BOUNDS [chunks] int8: the stop rule is checked after this chunk. OUT [B, Hq, DV]. BY_ESTIMATE: coverage comes from the
    estimates alone (top_p).
    """
    pid, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = pid // H, pid % H
    RQ: tl.constexpr = 16 if GP < 16 else GP
    rq, rg, rc = tl.arange(0, RQ), tl.arange(0, GP), tl.arange(0, CB)
    rd, rv = tl.arange(0, DP), tl.arange(0, DVP)
    capacity = tl.load(desc + d.CHUNKS)
    part = d.address(desc, d.PART, tl.float32) + pid * capacity * GP * DVP
    part_mass = d.address(desc, d.PART_MASS, tl.float32) + pid * capacity * GP
    part_left = d.address(desc, d.PART_LEFT, tl.float32) + pid * capacity * GP
    wait_for_previous(OVERLAP)
    info = INFO + pid * 8
    planned, candidates, forced = tl.load(info), tl.load(info + 1), tl.load(info + 2)
    floor, count, cut = tl.load(info + 3), tl.load(info + 4), tl.load(info + 5)
    chunks = (planned + CB - 1) // CB
    total = tl.load(TOT + pid * GP + rg)
    sink = tl.zeros([GP], tl.float32)
    if SINKS:
        sink = tl.load(SINK_LOGITS + h * G + rg, mask=rg < G, other=float("-inf")).to(tl.float32) \
            * 1.4426950408889634
    pieces, first = forced_masses(MF, pid, GP, PIECES, FP)
    mine = rg == own
    rf = tl.arange(0, FP)
    acc = tl.load(OF + ((pid * PIECES + rf) * GP + own)[:, None] * DVP + rv[None, :], mask=(rf < PIECES)[:, None], other=0.0)
    acc = tl.sum(acc * _one(tl.exp2(pieces - first[None, :]), mine)[:, None], 0)
    live = rg < G
    # The first tile of chunks is loaded at once and usually is all there is.
    c = tl.arange(0, CT)
    at, there = c[:, None] * GP + rg[None, :], (c < chunks)[:, None]
    m0 = tl.load(part_mass + at, mask=there, other=float("-inf"))
    e0 = tl.load(part_left + at, mask=there, other=0.0)
    check0 = tl.load(BOUNDS + c, mask=c < chunks, other=0)
    o0 = tl.load(part + (c * GP + own)[:, None] * DVP + rv[None, :], mask=there, other=0.0)
    # Masses are relative to `big`, the largest gathered; estimates are shares of their own total, because they may
    # be wrong by more than a float can hold. `unread` is the estimated share of all candidates.
    held = _captured(first, sink, SINKS)
    big = tl.maximum(held, tl.max(m0, 0))
    for low in range(CT, chunks, CT):
        c = low + tl.arange(0, CT)
        m = tl.load(part_mass + c[:, None] * GP + rg[None, :], mask=(c < chunks)[:, None], other=float("-inf"))
        big = tl.maximum(big, tl.max(m, 0))
    base = tl.exp2(held - big)
    whole = tl.exp2(tl.minimum(total - big, 100.0))
    unread = tl.maximum(1.0 - tl.exp2(tl.minimum(first - total, 0.0)), 0.0)
    stop = chunks + 1                                   # chunks to merge; one too many: the rule has not passed
    if NEVER:
        stop = chunks
    else:
        cover = 1.0 - unread if BY_ESTIMATE else base / tl.maximum(base + unread * whole, 1e-30)
        reached = tl.min(tl.where(live, cover, 1.0), 0) if GROUP_MIN else \
            tl.sum(tl.where(live, cover, 0.0), 0) / G
        if (reached >= threshold) & (floor == 0):
            stop = 0
        gathered, known = tl.zeros([GP], tl.float32), tl.zeros([GP], tl.float32)
        m, e, check = m0, e0, check0
        for low in range(0, chunks, CT):
            c = low + tl.arange(0, CT)
            if low > 0:
                there = (c < chunks)[:, None]
                m = tl.load(part_mass + c[:, None] * GP + rg[None, :], mask=there, other=float("-inf"))
                e = tl.load(part_left + c[:, None] * GP + rg[None, :], mask=there, other=0.0)
                check = tl.load(BOUNDS + c, mask=c < chunks, other=0)
            if stop > chunks:
                w = tl.exp2(m - big[None, :])
                have = base[None, :] + gathered[None, :] + tl.cumsum(w, 0)
                left = tl.maximum(unread[None, :] - known[None, :] - tl.cumsum(e, 0), 0.0)
                covers = 1.0 - left if BY_ESTIMATE else have / tl.maximum(have + left * whole[None, :], 1e-30)
                reach = tl.min(tl.where(live[None, :], covers, 1.0), 1) if GROUP_MIN else \
                    tl.sum(tl.where(live[None, :], covers, 0.0), 1) / G
                # The rule is also looked at where the plan ends, which may be inside a round.
                ok = (c < chunks) & ((check > 0) | (c == chunks - 1)) & (reach >= threshold) & ((c + 1) * CB >= floor)
                stop = tl.min(tl.where(ok, c + 1, stop), 0)
                gathered += tl.sum(w, 0)
                known += tl.sum(e, 0)
    more = stop > chunks
    stop = tl.minimum(stop, chunks)

    # Merge in rank order, relative to the largest mass that is merged.
    inside = (tl.arange(0, CT) < stop)[:, None]
    big = tl.maximum(first, tl.max(tl.where(inside, m0, float("-inf")), 0))
    for low in range(CT, stop, CT):
        c = low + tl.arange(0, CT)
        m = tl.load(part_mass + c[:, None] * GP + rg[None, :], mask=(c < stop)[:, None], other=float("-inf"))
        big = tl.maximum(big, tl.max(m, 0))
    have = tl.exp2(first - big)
    acc = acc * _one(have, mine)
    w = tl.where(inside, tl.exp2(m0 - big[None, :]), 0.0)
    acc += tl.sum(o0 * _one(w, mine)[:, None], 0)
    have += tl.sum(w, 0)
    known = tl.sum(tl.where(inside, e0, 0.0), 0)
    for low in range(CT, stop, CT):
        c = low + tl.arange(0, CT)
        there = (c < stop)[:, None]
        m = tl.load(part_mass + c[:, None] * GP + rg[None, :], mask=there, other=float("-inf"))
        e = tl.load(part_left + c[:, None] * GP + rg[None, :], mask=there, other=0.0)
        w = tl.exp2(m - big[None, :])
        o = tl.load(part + (c * GP + own)[:, None] * DVP + rv[None, :], mask=there, other=0.0)
        acc += tl.sum(o * _one(w, mine)[:, None], 0)
        have += tl.sum(w, 0)
        known += tl.sum(e, 0)
    read = tl.minimum(stop * CB, planned)

    # Seldom: the plan did not do. Read on in the order of the row; every head's program does, for all heads.
    width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
    kv = d.address(desc, d.KV, TYPE)
    element = tl.multiple_of(tl.load(desc + d.ELEMENTS), 16)
    row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * 2 * width
    share = d.address(desc, d.SHARE, tl.float32) + pid * width
    estimate = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width
    qq = tl.load(Q + b * q_b + (h * G + rq)[:, None] * q_h + rd[None, :],
                 mask=(rq < G)[:, None] & (rd < D)[None, :], other=0.0)
    spare = capacity - GP + own                             # a chunk of its own for each program
    at_block = 0
    while more & (at_block < forced + candidates) & (read + CB <= count):
        tl.debug_barrier()
        n1 = at_block + rc
        last = tl.minimum(at_block + CB, SINK + candidates)
        fresh = (n1 >= SINK) & (n1 < last)
        bits = tl.load(share + n1, mask=fresh, other=0.0).to(tl.int32, bitcast=True)
        fresh = fresh & (bits < cut)
        number = tl.sum(fresh.to(tl.int32), 0)
        if number > 0:
            _blocks(kv, row, ranked, share, element, qq, scale, softcap, tl.maximum(at_block, SINK), last, cut,
                    part + spare * GP * DVP, part_mass + spare * GP, False, GP, RQ, D, DP, DV, DVP, P, CB, TT,
                    TYPE, CAP)
            tl.debug_barrier()
            m1 = tl.load(part_mass + spare * GP + rg)
            o1 = tl.load(part + (spare * GP + own) * DVP + rv)
            e1 = tl.load(estimate + rg[:, None] * width + n1[None, :], mask=fresh[None, :], other=float("-inf"))
            new_big = tl.maximum(big, m1)
            fade, w1 = tl.exp2(big - new_big), tl.exp2(m1 - new_big)
            acc = acc * _one(fade, mine) + o1 * _one(w1, mine)
            have = have * fade + w1
            big = new_big
            known += tl.sum(tl.exp2(e1 - total[:, None]), 1)
            read += number
            left1 = tl.maximum(unread - known, 0.0)
            held1 = _captured(big + tl.log2(have), sink, SINKS)
            cover1 = 1.0 - left1 if BY_ESTIMATE else \
                1.0 / (1.0 + left1 * tl.exp2(tl.minimum(total - held1, 100.0)))
            reach1 = tl.min(tl.where(live, cover1, 1.0), 0) if GROUP_MIN else \
                tl.sum(tl.where(live, cover1, 0.0), 0) / G
            more = (reach1 < threshold) | (read < floor)
        at_block += CB

    mass = big + tl.log2(have)
    seen = _captured(mass, sink, SINKS)
    # The sinks take part in the normalisation only.
    scaled = acc * _one(tl.exp2(mass - seen) / have, mine)
    tl.store(OUT + ((b * H + h) * G + own) * DV + rv, scaled.to(TYPE), mask=rv < DV)
    if own == 0:
        # Statistics, and the row's new length: the next to read it is the next step.
        left = tl.maximum(unread - known, 0.0)
        covered = 1.0 / (1.0 + left * tl.exp2(tl.minimum(total - seen, 100.0)))
        counters = d.address(desc, d.COUNTERS, tl.float64)
        tl.atomic_add(counters, (forced + read).to(tl.float64))
        tl.atomic_add(counters + 1, (forced + candidates).to(tl.float64))
        tl.atomic_add(counters + 2, (tl.sum(tl.where(live, covered, 0.0), 0) / G).to(tl.float64))
        tl.atomic_add(counters + 3, 1.0)
        captured = d.address(desc, d.CAPTURED, tl.float32)
        tl.store(captured + pid * GP + rg, mass * 0.6931471805599453)
        if h == 0:
            lengths = d.address(desc, d.LENGTHS, tl.int64)
            tl.store(lengths + b, tl.load(lengths + b) + 1)
