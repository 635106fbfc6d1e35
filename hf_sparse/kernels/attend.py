"""Attend kernel: read the ranked blocks in parallel chunks, then stop where the rule would have stopped.

A chunk is a part of a round. All chunks that the estimates call for are read at once; the last program of a row and KV
head to finish walks their masses in rank order, finds the first check of the stop rule that passes with the mass really
gathered, and merges the chunks up to there in a fixed order. What was read beyond it is dropped, so the result is that
of reading round by round. Where the estimates promised too much, and all that was planned does not reach the threshold,
that program reads on among the other candidates, in the order of the row, until it does.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .append import softcap_log2


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
def attend_kernel(desc, Q, OF, MF, TOT, INFO, BOUNDS, ARRIVED, SINK_LOGITS, OUT, q_b, q_h, scale, softcap, threshold,
                  H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                  DV: tl.constexpr, DVP: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, CT: tl.constexpr,
                  TT: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, NEVER: tl.constexpr,
                  BY_ESTIMATE: tl.constexpr, GROUP_MIN: tl.constexpr, SINK: tl.constexpr):
    """Programs (row and KV head, stripe of chunks).

    BOUNDS [chunks] int8: the stop rule is checked after this chunk. ARRIVED [B, H] int32, zero before and after.
    OUT [B, Hq, DV]. BY_ESTIMATE: coverage comes from the estimates alone (top_p).
    """
    pid = tl.program_id(0).to(tl.int64)
    b, h = pid // H, pid % H
    RQ: tl.constexpr = 16 if GP < 16 else GP
    rq, rg = tl.arange(0, RQ), tl.arange(0, GP)
    rd, rv = tl.arange(0, DP), tl.arange(0, DVP)
    planned = tl.load(INFO + pid * 8)
    chunks = (planned + CB - 1) // CB
    stripes = tl.num_programs(1)
    capacity = tl.load(desc + d.CHUNKS)
    part = d.address(desc, d.PART, tl.float32) + pid * capacity * GP * DVP
    part_mass = d.address(desc, d.PART_MASS, tl.float32) + pid * capacity * GP
    part_left = d.address(desc, d.PART_LEFT, tl.float32) + pid * capacity * GP
    total = tl.load(TOT + pid * GP + rg)
    width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
    kv = d.address(desc, d.KV, TYPE)
    element = tl.multiple_of(tl.load(desc + d.ELEMENTS), 16)
    row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * 2 * width
    share = d.address(desc, d.SHARE, tl.float32) + pid * width
    estimate = d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width
    qq = tl.load(Q + b * q_b + (h * G + rq)[:, None] * q_h + rd[None, :],
                 mask=(rq < G)[:, None] & (rd < D)[None, :], other=0.0)
    rc = tl.arange(0, CB)
    for chunk in range(tl.program_id(1), chunks, stripes):
        _blocks(kv, row, ranked, share, element, qq, scale, softcap, chunk * CB, planned, 0, part + chunk * GP * DVP,
                part_mass + chunk * GP, True, GP, RQ, D, DP, DV, DVP, P, CB, TT, TYPE, CAP)
        rank = chunk * CB + rc
        n = tl.load(ranked + rank, mask=rank < planned, other=0)
        e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=(rank < planned)[None, :], other=float("-inf"))
        tl.store(part_left + chunk * GP + rg, tl.sum(tl.exp2(e - total[:, None]), 1))
    tl.debug_barrier()
    arrived = tl.atomic_add(ARRIVED + pid, 1, sem="acq_rel")
    if arrived == stripes - 1:
        tl.store(ARRIVED + pid, 0)
        sink = tl.zeros([GP], tl.float32)
        if SINKS:
            sink = tl.load(SINK_LOGITS + h * G + rg, mask=rg < G, other=float("-inf")).to(tl.float32) \
                * 1.4426950408889634
        candidates = tl.load(INFO + pid * 8 + 1)
        forced = tl.load(INFO + pid * 8 + 2)
        floor = tl.load(INFO + pid * 8 + 3)
        count = tl.load(INFO + pid * 8 + 4)
        cut = tl.load(INFO + pid * 8 + 5)
        first = tl.load(MF + pid * GP + rg)
        acc = tl.load(OF + pid * GP * DVP + rg[:, None] * DVP + rv[None, :])
        live = rg < G
        # The first tile of chunks is loaded at once and usually is all there is.
        c = tl.arange(0, CT)
        at, there = c[:, None] * GP + rg[None, :], (c < chunks)[:, None]
        m0 = tl.load(part_mass + at, mask=there, other=float("-inf"))
        e0 = tl.load(part_left + at, mask=there, other=0.0)
        check0 = tl.load(BOUNDS + c, mask=c < chunks, other=0)
        o0 = tl.load(part + c[:, None, None] * GP * DVP + rg[None, :, None] * DVP + rv[None, None, :],
                     mask=there[:, :, None], other=0.0)
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
        acc = acc * have[:, None]
        w = tl.where(inside, tl.exp2(m0 - big[None, :]), 0.0)
        acc += tl.sum(o0 * w[:, :, None], 0)
        have += tl.sum(w, 0)
        known = tl.sum(tl.where(inside, e0, 0.0), 0)
        for low in range(CT, stop, CT):
            c = low + tl.arange(0, CT)
            there = (c < stop)[:, None]
            m = tl.load(part_mass + c[:, None] * GP + rg[None, :], mask=there, other=float("-inf"))
            e = tl.load(part_left + c[:, None] * GP + rg[None, :], mask=there, other=0.0)
            w = tl.exp2(m - big[None, :])
            o = tl.load(part + c[:, None, None] * GP * DVP + rg[None, :, None] * DVP + rv[None, None, :],
                        mask=there[:, :, None], other=0.0)
            acc += tl.sum(o * w[:, :, None], 0)
            have += tl.sum(w, 0)
            known += tl.sum(e, 0)
        read = tl.minimum(stop * CB, planned)

        # Seldom: the plan did not do. Read on in the order of the row.
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
                        part + chunks * GP * DVP, part_mass + chunks * GP, False, GP, RQ, D, DP, DV, DVP, P, CB, TT,
                        TYPE, CAP)
                tl.debug_barrier()
                m1 = tl.load(part_mass + chunks * GP + rg)
                o1 = tl.load(part + chunks * GP * DVP + rg[:, None] * DVP + rv[None, :])
                e1 = tl.load(estimate + rg[:, None] * width + n1[None, :], mask=fresh[None, :], other=float("-inf"))
                new_big = tl.maximum(big, m1)
                fade, w1 = tl.exp2(big - new_big), tl.exp2(m1 - new_big)
                acc = acc * fade[:, None] + o1 * w1[:, None]
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
        tl.store(OUT + (b * H + h) * G * DV + rg[:, None] * DV + rv[None, :],
                 (acc / have[:, None] * tl.exp2(mass - seen)[:, None]).to(TYPE), mask=live[:, None] & (rv < DV)[None, :])
        # Statistics, and the row's new length once its last reader is here.
        left = tl.maximum(unread - known, 0.0)
        cover = 1.0 / (1.0 + left * tl.exp2(tl.minimum(total - seen, 100.0)))
        cover = tl.sum(tl.where(live, cover, 0.0), 0) / G
        counters = d.address(desc, d.COUNTERS, tl.float64)
        tl.atomic_add(counters, (forced + read).to(tl.float64))
        tl.atomic_add(counters + 1, (forced + candidates).to(tl.float64))
        tl.atomic_add(counters + 2, cover.to(tl.float64))
        tl.atomic_add(counters + 3, 1.0)
        captured = d.address(desc, d.CAPTURED, tl.float32)
        tl.store(captured + pid * GP + rg, mass * 0.6931471805599453)
        if h == 0:
            lengths = d.address(desc, d.LENGTHS, tl.int64)
            tl.store(lengths + b, tl.load(lengths + b) + 1)
