"""A selection that several tokens share, on the device (cache/kept.py has the rule).

The selection leaves the list of blocks in a buffer of its layer, where later tokens find it. What decides whether the next
token selects anew is written by the merge, the last to know a token's masses; so the programs of the next ranking, which are
what is saved, have two numbers to look at.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .residency import first_of_tail

# KEPT, int32 [B, H, 8]: tokens that have had what is kept, 0 if the next one selects anew; first block of the tail at the
# selection; blocks that are kept; the bits of the coverage at the selection (fp32).
AGE, START, PLANNED, COVERAGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def selects_anew(desc, pid, start):
    """Whether a row and KV head whose tail begins at block `start` selects anew."""
    state = d.address(desc, d.KEPT, tl.int32) + pid * 8
    return (tl.load(state + AGE) == 0) | (tl.load(state + START) != start)


@triton.jit
def units_to_rank(desc, pid, length, units, P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr):
    """`units`, or none if the token at `length` does not select anew."""
    return tl.where(selects_anew(desc, pid, first_of_tail(length, P, UB, SINK, RECENT).to(tl.int32)), units, 0)


@triton.jit
def keep(desc, pid, start, planned):
    """Note down what has been selected."""
    state = d.address(desc, d.KEPT, tl.int32) + pid * 8
    tl.store(state + START, start)
    tl.store(state + PLANNED, planned)


@triton.jit
def kept_blocks(desc, pid):
    return tl.load(d.address(desc, d.KEPT, tl.int32) + pid * 8 + PLANNED)


@triton.jit
def grow_old(desc, pid, fresh, coverage, short, drop, REUSE: tl.constexpr):
    """After a token: count it, and see whether the next one selects anew.

    fresh: whether the selection is its own. coverage: its estimate. short: the selection has turned out not to suffice, so that
    more was read than it lists.
    """
    state = d.address(desc, d.KEPT, tl.int32) + pid * 8
    first = tl.where(fresh, coverage, tl.load(state + COVERAGE).to(tl.float32, bitcast=True))
    age = tl.where(fresh, 1, tl.load(state + AGE) + 1)
    tl.store(state + AGE, tl.where((coverage < first - drop) | (age >= REUSE) | short, 0, age))
    tl.store(state + COVERAGE, first.to(tl.int32, bitcast=True))
