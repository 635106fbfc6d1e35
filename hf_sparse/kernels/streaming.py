"""The decode step of streaming heads: one program a row and KV head stores the token and attends to its ring.

reference/streaming.py says which token is in which column.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode import INTERPRETED, LOG2E, TYPES
from .online_softmax import add_tile

TILE_BYTES = 16384                                          # of keys at once

# Fields of a ring's descriptor, int64: addresses of keys [B, H, C, D], values [B, H, C, Dv] and lengths [B, H] int64, then C.
KEYS, VALUES, LENGTHS, COLUMNS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
RING_FIELDS = 4


@triton.jit
def ring_kernel(desc, HEADS, Q, K, V, SINK_LOGITS, OUT, q_b, q_h, k_b, k_h, v_b, v_h, sink, window, slack, min_context, scale,
                softcap, H: tl.constexpr, HM: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                DV: tl.constexpr, DVP: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr, CAP: tl.constexpr,
                SINKS: tl.constexpr):
    """Programs (row and streaming head). HEADS int32 [H]: which of the model's HM KV heads they are. `scale` includes log2(e).

    Q [B, HM * G, D], K [B, HM, D], V [B, HM, DV] with strides; OUT [B, HM * G, DV].
    """
    pid = tl.program_id(0).to(tl.int64)
    b = pid // H
    head = tl.load(HEADS + pid % H).to(tl.int64)
    columns = tl.load(desc + COLUMNS)
    keys = tl.multiple_of(tl.load(desc + KEYS).to(tl.pointer_type(TYPE)), 16) + pid * columns * D
    values = tl.multiple_of(tl.load(desc + VALUES).to(tl.pointer_type(TYPE)), 16) + pid * columns * DV
    lengths = tl.load(desc + LENGTHS).to(tl.pointer_type(tl.int64)) + pid
    RQ: tl.constexpr = 16 if GP < 16 else GP
    rd, rv, rt, rq = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, TT), tl.arange(0, RQ)
    newest = tl.load(lengths)
    new_key = tl.load(K + b * k_b + head * k_h + rd, mask=rd < D, other=0.0)
    new_value = tl.load(V + b * v_b + head * v_h + rv, mask=rv < DV, other=0.0)
    qq = tl.load(Q + b * q_b + (head * G + rq)[:, None] * q_h + rd[None, :], mask=(rq < G)[:, None] & (rd < D)[None, :],
                 other=0.0)
    ring = columns - sink
    place = tl.where(newest < sink, newest, sink + tl.maximum(newest - sink, 0) % ring)
    tl.store(keys + place * D + rd, new_key, mask=rd < D)
    tl.store(values + place * DV + rv, new_value, mask=rv < DV)
    tl.debug_barrier()                                      # all threads have read the length, and stored
    tl.store(lengths, newest + 1)
    first = newest + 1 - tl.where(newest + 1 < min_context, ring - slack, window)
    top = tl.full([RQ], float("-inf"), tl.float32)
    total = tl.zeros([RQ], tl.float32)
    acc = tl.zeros([RQ, DVP], tl.float32)
    for low in range(0, tl.minimum(columns, newest + 1), TT):
        column = low + rt
        # How long ago a column was written to: without a division, which would take longer than all the rest.
        age = place - column
        token = newest - tl.where(age < 0, age + ring, age)
        behind = (column < columns) & (token >= tl.maximum(first, sink))             # none as long as the sink has room
        seen = ((column < sink) & (column <= newest)) | ((column >= sink) & behind)
        k = tl.load(keys + column[None, :] * D + rd[:, None], mask=seen[None, :] & (rd < D)[:, None], other=0.0)
        v = tl.load(values + column[:, None] * DV + rv[None, :], mask=seen[:, None] & (rv < DV)[None, :], other=0.0)
        top, total, acc = add_tile(qq, k, v, seen, top, total, acc, scale, softcap, TYPE, CAP)
    if SINKS:
        logit = tl.load(SINK_LOGITS + head * G + rq, mask=rq < G, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(logit - top)
    out = OUT + ((b * HM + head) * G + rq)[:, None] * DV + rv[None, :]
    tl.store(out, (acc / total[:, None]).to(TYPE), mask=(rq < G)[:, None] & (rv < DV)[None, :])


def ring_step(desc: torch.Tensor, heads: torch.Tensor, model_heads: int, query, key, value, sinks, out, sink: int, window: int,
              slack: int, min_context: int, scaling: float, softcap: float) -> None:
    """Store one token of every row in the rings of a layer's streaming heads, and attend.

    Args:
        desc: int64 [RING_FIELDS]. heads: [n] int32, the streaming ones of the `model_heads` KV heads.
        query: [B, Hq, 1, D]; key: [B, model_heads, 1, D]; value: [B, model_heads, 1, Dv]; any strides but the last.
        sinks: [Hq] logits that take part in the normalisation only, or None.
        out: [B, 1, Hq, Dv], of which the query heads of `heads` are written.
        sink, window, slack, min_context: tokens, see reference/streaming.py.
    """
    B, Hq, _, D = query.shape
    DV, H, G = value.shape[3], heads.shape[0], Hq // model_heads
    GP, DP, DVP = (triton.next_power_of_2(size) for size in (G, D, DV))
    tile = max(16, TILE_BYTES // (DP * query.element_size())) if not INTERPRETED else 32
    ring_kernel[(B * H,)](
        desc, heads, query, key, value, query if sinks is None else sinks, out, query.stride(0), query.stride(1), key.stride(0),
        key.stride(1), value.stride(0), value.stride(1), sink, window, slack, min_context, scaling * LOG2E, float(softcap), H=H,
        HM=model_heads, G=G, GP=GP, D=D, DP=DP, DV=DV, DVP=DVP, TT=tile, TYPE=TYPES[query.dtype], CAP=softcap > 0,
        SINKS=sinks is not None, num_warps=4, num_stages=2)
