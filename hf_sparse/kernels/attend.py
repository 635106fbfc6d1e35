"""Attend kernel: read the planned blocks in parallel chunks. Merge kernel: join them, and see whether they suffice.

Chunks are joined in a fixed order, so that the result depends on no timing. Where the estimates promised too much, and the
mass really gathered does not reach the threshold, the merge says so, and `extend.py` reads on.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .append import forced_masses
from .attend_packed import attend_packed, channel_order
from .location import block_offset, host_offset
from .online_softmax import add_tile
from .overlap import let_next_start, wait_for_previous
from .residency import await_blocks
from .reuse import give_up, selects_anew


@triton.jit
def attend_blocks(desc, kv, row, ranked, element, qq, scale, softcap, first, last, tokens, part, part_mass,
                  GP: tl.constexpr, RQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                  DVP: tl.constexpr, P: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr,
                  TIERED: tl.constexpr):
    """Attention over entries first.. below `last` of the list, at most `tokens`, into `part` [GP, DVP] and `part_mass` [GP]."""
    rd, rv = tl.arange(0, DP), tl.arange(0, DVP)
    rt, rq = tl.arange(0, TT), tl.arange(0, RQ)
    top = tl.full([RQ], float("-inf"), tl.float32)
    weight = tl.zeros([RQ], tl.float32)
    acc = tl.zeros([RQ, DVP], tl.float32)
    to_host = host_offset(desc, TYPE, TIERED)
    for low in range(0, tokens, TT):
        n = first + (low + rt) // P
        seen = n < last
        n = tl.load(ranked + n, mask=seen, other=0)
        block = block_offset(desc, tl.load(row + n, mask=seen, other=0), seen, element, to_host, False, TIERED)
        inside = (low + rt) % P
        k_at = kv + (block + inside * D)[None, :] + rd[:, None]
        v_at = kv + (block + P * D + inside * DV)[:, None] + rv[None, :]
        k = tl.load(k_at, mask=seen[None, :] & (rd < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=seen[:, None] & (rv < DV)[None, :], other=0.0)
        top, weight, acc = add_tile(qq, k, v, seen, top, weight, acc, scale, softcap, TYPE, CAP)
    keep = rq < GP
    whole = tl.where(weight > 0, weight, 1.0)
    tl.store(part + rq[:, None] * DVP + rv[None, :], acc / whole[:, None], mask=keep[:, None])
    tl.store(part_mass + rq, tl.where(weight > 0, top + tl.log2(whole), float("-inf")), mask=keep)


@triton.jit
def attend_stored(desc, kv, row, ranked, element, qq, scale, softcap, first, last, blocks, part, part_mass,
                  GP: tl.constexpr, RQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                  DVP: tl.constexpr, P: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr,
                  KV_BITS: tl.constexpr, PTX: tl.constexpr, TIERED: tl.constexpr):
    """`attend_blocks` or `attend_packed`, for at most `blocks` entries."""
    if KV_BITS == 16:
        attend_blocks(desc, kv, row, ranked, element, qq, scale, softcap, first, last, blocks * P, part, part_mass, GP, RQ, D,
                      DP, DV, DVP, P, TT, TYPE, CAP, TIERED)
    else:
        attend_packed(desc, kv, row, ranked, element, qq, scale, softcap, first, last, blocks, part, part_mass, GP, RQ, D, DP,
                      DV, DVP, P, TYPE, CAP, KV_BITS, PTX, TIERED)


@triton.jit
def captured_mass(mass, sink, SINKS: tl.constexpr):
    """log2(2^mass + 2^sink): sinks count as gathered."""
    if SINKS:
        big = tl.maximum(mass, sink)
        return big + tl.log2(tl.exp2(mass - big) + tl.exp2(sink - big))
    else:
        return mass


@triton.jit
def mean_coverage(left, live, G: tl.constexpr, GROUP_MIN: tl.constexpr):
    """Mass gathered over all mass, the group's heads together; left [GP]: estimated mass unread over mass gathered."""
    cover = 1.0 / (1.0 + left)
    if GROUP_MIN:
        return tl.min(tl.where(live, cover, 1.0), 0)
    else:
        return tl.sum(tl.where(live, cover, 0.0), 0) / G


@triton.jit
def one_head(x, mine):
    """The number of one head out of those of all [GP] or [n, GP]: scalar or [n]."""
    if len(x.shape) == 2:
        return tl.sum(tl.where(mine[None, :], x, 0.0), 1)
    else:
        return tl.sum(tl.where(mine, x, 0.0), 0)


@triton.jit
def row_of(desc, pid, GP: tl.constexpr, TYPE: tl.constexpr, KV_BITS: tl.constexpr):
    """A row and KV head's keys and values, and what the selection said of them."""
    STORED: tl.constexpr = TYPE if KV_BITS == 16 else tl.uint8
    width = tl.multiple_of(tl.load(desc + d.WIDTH), 16)
    return (d.address(desc, d.KV, STORED), tl.multiple_of(tl.load(desc + d.ELEMENTS), 16),
            d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS),
            d.address(desc, d.RANKED, tl.int64) + pid * width, d.address(desc, d.SHARE, tl.float32) + pid * width,
            d.address(desc, d.ESTIMATE, tl.float32) + pid * GP * width, width)


@triton.jit
def chunks_of(desc, pid, GP: tl.constexpr, DVP: tl.constexpr):
    """Outputs, masses and estimated shares of its chunks, and for how many there is room."""
    capacity = tl.load(desc + d.CHUNKS)
    return (d.address(desc, d.PART, tl.float32) + pid * capacity * GP * DVP,
            d.address(desc, d.PART_MASS, tl.float32) + pid * capacity * GP,
            d.address(desc, d.PART_LEFT, tl.float32) + pid * capacity * GP, capacity)


@triton.constexpr_function
def query_rows(GP, KV_BITS):
    """Queries in a tile: what the tensor core needs as the first operand, or as the second one."""
    return max(GP, 16 if KV_BITS == 16 else 8)


@triton.jit
def queries(desc, Q, pid, q_b, q_h, H: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr, RQ: tl.constexpr,
            D: tl.constexpr, DP: tl.constexpr, KV_BITS: tl.constexpr):
    """Queries of the group [RQ, DP], zero beyond it."""
    rq, rd = tl.arange(0, RQ), tl.arange(0, DP)
    if KV_BITS < 16:
        rd = channel_order(rd, DP)
    first = d.model_head(desc, pid % H, MAPPED) * G
    return tl.load(Q + pid // H * q_b + (first + rq)[:, None] * q_h + rd[None, :],
                   mask=(rq < G)[:, None] & (rd < D)[None, :], other=0.0)


@triton.jit
def attend_kernel(desc, Q, TOT, INFO, q_b, q_h, scale, softcap, H: tl.constexpr, MAPPED: tl.constexpr,
                  G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                  DVP: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr,
                  CAP: tl.constexpr, KV_BITS: tl.constexpr, PTX: tl.constexpr, TIERED: tl.constexpr,
                  BESIDE: tl.constexpr, THREADS: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs (row and KV head, stripe of chunks). Writes PART, PART_MASS and PART_LEFT of each chunk.

    BESIDE: run beside the fetch, which has seen to it that the selection has ended.
    """
    let_next_start(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    kv, element, row, ranked, share, estimate, width = row_of(desc, pid, GP, TYPE, KV_BITS)
    part, part_mass, part_left, capacity = chunks_of(desc, pid, GP, DVP)
    RQ: tl.constexpr = query_rows(GP, KV_BITS)
    rg, rc = tl.arange(0, GP), tl.arange(0, CB)
    qq = queries(desc, Q, pid, q_b, q_h, H, MAPPED, G, RQ, D, DP, KV_BITS)
    if not BESIDE:
        wait_for_previous(OVERLAP)
    planned = tl.load(INFO + pid * 8)
    chunks = (planned + CB - 1) // CB
    if tl.program_id(1) < chunks:
        total = tl.load(TOT + pid * GP + rg)
        for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
            if BESIDE:
                await_blocks(desc, row, ranked, chunk * CB, planned, CB, THREADS)
            rank = chunk * CB + rc
            n = tl.load(ranked + rank, mask=rank < planned, other=0)
            e = tl.load(estimate + rg[:, None] * width + n[None, :], mask=(rank < planned)[None, :], other=float("-inf"))
            attend_stored(desc, kv, row, ranked, element, qq, scale, softcap, chunk * CB, planned, CB,
                          part + chunk * GP * DVP, part_mass + chunk * GP, GP, RQ, D, DP, DV, DVP, P, TT, TYPE, CAP, KV_BITS,
                          PTX, TIERED)
            tl.store(part_left + chunk * GP + rg, tl.sum(tl.exp2(e - total[:, None]), 1))
    if BESIDE:
        wait_for_previous(OVERLAP)                          # those after this one count on the fetch, too


@triton.jit
def sink_logits(SINK_LOGITS, h, G: tl.constexpr, GP: tl.constexpr, SINKS: tl.constexpr):
    """Base-2 logits of the attention sinks of a KV head's group [GP], zero without."""
    if SINKS:
        rg = tl.arange(0, GP)
        return tl.load(SINK_LOGITS + h * G + rg, mask=rg < G, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    else:
        return tl.zeros([GP], tl.float32)


@triton.jit
def merge_kernel(desc, OF, MF, TOT, INFO, MASS, SINK_LOGITS, OUT, threshold, H: tl.constexpr, HM: tl.constexpr,
                 MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
                 CB: tl.constexpr, CT: tl.constexpr, TYPE: tl.constexpr, SINKS: tl.constexpr, VERIFY: tl.constexpr,
                 GROUP_MIN: tl.constexpr, PIECES: tl.constexpr, FP: tl.constexpr, BOXES: tl.constexpr, REUSE: tl.constexpr,
                 OVERLAP: tl.constexpr):
    """Programs (row and KV head, query head of the group): all add up the same masses, each joins its own output.

    OUT [B, HM * G, DV]: of the model's HM KV heads. VERIFY: the threshold holds for the mass really gathered; INFO says where
    it does not yet, and MASS [B, H, GP] what was gathered (log2). BOXES: estimates only rank, so unread blocks are taken to
    hold as much of theirs as those read did. REUSE: tokens that share a selection; estimates are known to
    those that select.
    """
    let_next_start(OVERLAP)
    pid, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = pid // H, pid % H
    rg, rv, rf = tl.arange(0, GP), tl.arange(0, DVP), tl.arange(0, FP)
    mine, live = rg == own, rg < G
    part, part_mass, part_left, capacity = chunks_of(desc, pid, GP, DVP)
    head = d.model_head(desc, h, MAPPED)
    sink = sink_logits(SINK_LOGITS, head, G, GP, SINKS)
    wait_for_previous(OVERLAP)
    info = INFO + pid * 8
    planned, candidates, forced, count = tl.load(info), tl.load(info + 1), tl.load(info + 2), tl.load(info + 3)
    chunks = (planned + CB - 1) // CB
    total = tl.load(TOT + pid * GP + rg)
    pieces, first = forced_masses(MF, pid, GP, PIECES, FP)
    acc = tl.load(OF + ((pid * PIECES + rf) * GP + own)[:, None] * DVP + rv[None, :], mask=(rf < PIECES)[:, None], other=0.0)
    acc = tl.sum(acc * one_head(tl.exp2(pieces - first[None, :]), mine)[:, None], 0)
    big, have, known = first, tl.full([GP], 1.0, tl.float32), tl.zeros([GP], tl.float32)
    for low in range(0, chunks, CT):
        c = low + tl.arange(0, CT)
        there = (c < chunks)[:, None]
        m = tl.load(part_mass + c[:, None] * GP + rg[None, :], mask=there, other=float("-inf"))
        e = tl.load(part_left + c[:, None] * GP + rg[None, :], mask=there, other=0.0)
        o = tl.load(part + (c * GP + own)[:, None] * DVP + rv[None, :], mask=there, other=0.0)
        higher = tl.maximum(big, tl.max(m, 0))
        fade, w = tl.exp2(big - higher), tl.exp2(m - higher[None, :])
        have = have * fade + tl.sum(w, 0)
        known += tl.sum(e, 0)
        acc = acc * one_head(fade, mine) + tl.sum(o * one_head(w, mine)[:, None], 0)
        big = higher
    mass = big + tl.log2(have)
    seen = captured_mass(mass, sink, SINKS)
    # The sinks take part in the normalisation only.
    out = acc * one_head(tl.exp2(mass - seen) / have, mine)
    tl.store(OUT + ((b * HM + head) * G + own) * DV + rv, out.to(TYPE), mask=rv < DV)
    if own == 0:
        # Estimates are shares of their own total, because they may be wrong by more than a float can hold.
        left = tl.maximum(1.0 - tl.exp2(tl.minimum(first - total, 0.0)) - known, 0.0)
        over_gathered = left * tl.exp2(tl.minimum(total - seen, 100.0))
        if BOXES:
            ranked = tl.maximum(1.0 - tl.exp2(first - mass), 0.0) * tl.exp2(mass - seen)
            over_gathered = tl.where(known > 0, left * ranked / tl.where(known > 0, known, 1.0), over_gathered)
        more, fresh = planned < 0, planned >= 0
        if VERIFY:
            more = (mean_coverage(over_gathered, live, G, GROUP_MIN) < threshold) & (planned < count)
            tl.store(MASS + pid * GP + rg, mass)
        tl.store(info + 5, more.to(tl.int32))
        if REUSE > 1:
            fresh = selects_anew(desc, pid)
            give_up(desc, pid, more)
        # Statistics, and the row's new length: the next to read it is the next step.
        covered = mean_coverage(over_gathered, live, G, False)
        counters = d.address(desc, d.COUNTERS, tl.float64)
        tl.atomic_add(counters, (forced + planned).to(tl.float64))
        tl.atomic_add(counters + 1, (forced + candidates).to(tl.float64))
        tl.atomic_add(counters + 2, tl.where(fresh & (more == 0), covered, 0.0).to(tl.float64))
        tl.atomic_add(counters + 3, 1.0)
        tl.atomic_add(counters + 4, fresh.to(tl.float64))
        captured = d.address(desc, d.CAPTURED, tl.float32)
        tl.store(captured + pid * GP + rg, mass * 0.6931471805599453)
        if h == 0:
            lengths = d.address(desc, d.LENGTHS, tl.int64)
            tl.store(lengths + b, tl.load(lengths + b) + 1)
