"""A selection that several tokens share, on the device (cache/kept.py has the rule).

The selection leaves the list of blocks in a buffer of its layer, where later tokens find it, and the query beside it. Whether a
token selects anew is decided by the ranking, whose programs are what is saved: all of them compute it, in the same way. One
writes it down for the kernels after it, which add up in another order. What is kept is written by the selection, after the ranking has
ended.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .residency import first_of_tail

# KEPT, int32 [B, H, 8]: tokens that have had what is kept, 0 if nothing is; first block of the tail at the selection; blocks
# that are kept; whether the present token selects anew.
AGE, START, PLANNED, FRESH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _state(desc, pid):
    return d.address(desc, d.KEPT, tl.int32) + pid * 8


@triton.jit
def _queries(desc, Q, q_b, q_h, pid, H: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
             DP: tl.constexpr, TYPE: tl.constexpr):
    """The queries of a row and KV head [GP, DP], where those are kept that blocks are selected for, and the mask of both."""
    rg, rd = tl.arange(0, GP)[:, None], tl.arange(0, DP)[None, :]
    inside = (rg < G) & (rd < D)
    head = d.model_head(desc, pid % H, MAPPED) * G + rg
    now = tl.load(Q + pid // H * q_b + head * q_h + rd, mask=inside, other=0.0)
    return now, d.address(desc, d.KEPT_QUERY, TYPE) + (pid * G + rg) * D + rd, inside


@triton.jit
def decide(desc, Q, q_b, q_h, pid, refresh, H: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
           D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
           TYPE: tl.constexpr, REUSE: tl.constexpr):
    """Whether the token to be stored in a row and KV head selects anew. refresh: the cosine below which its query does not
    share another's selection, 0 for none."""
    length = tl.load(d.address(desc, d.LENGTHS, tl.int64) + pid // H)
    now, at, inside = _queries(desc, Q, q_b, q_h, pid, H, MAPPED, G, GP, D, DP, TYPE)
    now, then = now.to(tl.float32), tl.load(at, mask=inside, other=0.0).to(tl.float32)
    # Without a quotient, for heads beyond the group and queries of zeros.
    least = refresh * tl.sqrt(tl.sum(now * now, 1) * tl.sum(then * then, 1))
    turned = tl.max((tl.sum(now * then, 1) < least).to(tl.int32), 0)
    age, start = tl.load(_state(desc, pid) + AGE), tl.load(_state(desc, pid) + START)
    moved = start != first_of_tail(length, P, UB, SINK, RECENT).to(tl.int32)
    return (age == 0) | (age >= REUSE) | moved | ((turned != 0) & (refresh > 0))


@triton.jit
def write_down(desc, pid, fresh):
    tl.store(_state(desc, pid) + FRESH, fresh.to(tl.int32))


@triton.jit
def selects_anew(desc, pid):
    """What has been decided."""
    return tl.load(_state(desc, pid) + FRESH) != 0


@triton.jit
def keep(desc, Q, q_b, q_h, pid, start, planned, short, H: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
         D: tl.constexpr, DP: tl.constexpr, TYPE: tl.constexpr):
    """Note down what has been selected, and for what. short: the row is read whole, and its list is not kept."""
    now, at, inside = _queries(desc, Q, q_b, q_h, pid, H, MAPPED, G, GP, D, DP, TYPE)
    tl.store(at, now, mask=inside)
    tl.store(_state(desc, pid) + START, start)
    tl.store(_state(desc, pid) + PLANNED, planned)
    tl.store(_state(desc, pid) + AGE, tl.where(short, 0, 1))


@triton.jit
def use(desc, pid):
    """How many blocks are kept; one more token has them."""
    state = _state(desc, pid)
    tl.store(state + AGE, tl.load(state + AGE) + 1)
    return tl.load(state + PLANNED)


@triton.jit
def give_up(desc, pid, short):
    """Where a selection has turned out not to suffice, and more is read than it lists, the next token selects anew."""
    tl.store(_state(desc, pid) + AGE, 0, mask=short)
