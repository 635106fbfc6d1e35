"""Rank kernel: what needs nothing but the query and the new token. One launch, programs of one warp and of two kinds: the
first PIECES attend to the always-read blocks (and store the token), the others estimate the masses of all other blocks.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .append import append
from .overlap import let_next_start
from .reuse import decide, write_down
from .score import score
from .score_pages import score_pages


@triton.jit
def rank_kernel(desc, Q, K, V, OF, MF, q_b, q_h, k_b, k_h, v_b, v_h, scale, softcap, refresh,
                H: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                DV: tl.constexpr, DVP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr,
                RECENT: tl.constexpr, TAIL: tl.constexpr, R4: tl.constexpr, R2: tl.constexpr, PAGES: tl.constexpr,
                TB: tl.constexpr, REUSE: tl.constexpr, PIECES: tl.constexpr,
                FT: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr, CAP: tl.constexpr,
                KV_BITS: tl.constexpr, NEWEST: tl.constexpr, TIERED: tl.constexpr, POLICY: tl.constexpr, BYTES: tl.constexpr,
                WORD: tl.constexpr, COPY: tl.constexpr, LEAVING: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs (row and KV head, piece or stripe, HEADS query heads; all of them where PAGES, the logical pages of a block, is
    not 0). Arguments are those of `append`, `score` and `score_pages`, and of `decide` with REUSE, the tokens that share a
    selection, above 1."""
    let_next_start(OVERLAP)
    pid, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < PIECES:
        if tl.program_id(2) == 0:
            if REUSE > 1:
                if part == 0:
                    write_down(desc, pid, decide(desc, Q, q_b, q_h, pid, refresh, H, MAPPED, G, GP, D, DP, P, UB, SINK, RECENT,
                                                 TYPE, REUSE))
            append(desc, Q, K, V, OF, MF, q_b, q_h, k_b, k_h, v_b, v_h, scale, softcap, pid, part, H, MAPPED, G, GP, D, DP, DV,
                   DVP, P, UB, SINK, RECENT, TAIL, R4, R2, PAGES, PIECES, FT, TT, TYPE, CAP, KV_BITS, NEWEST, TIERED, POLICY,
                   BYTES, WORD, COPY, LEAVING)
    else:
        fresh = part >= PIECES
        if REUSE > 1:
            fresh = decide(desc, Q, q_b, q_h, pid, refresh, H, MAPPED, G, GP, D, DP, P, UB, SINK, RECENT, TYPE, REUSE)
        if fresh:
            if PAGES > 0:
                score_pages(desc, Q, q_b, q_h, scale, softcap, pid, part - PIECES, tl.num_programs(1) - PIECES, H, MAPPED, G, GP,
                            D, DP, P, PAGES, TB, TYPE, CAP)
            else:
                score(desc, Q, q_b, q_h, scale, softcap, pid, part - PIECES, tl.num_programs(1) - PIECES, H, MAPPED, G, GP, D, P,
                      UB, R4, R2, PTX, CAP)


@triton.jit
def score_kernel(desc, Q, q_b, q_h, scale, softcap, H: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr,
                 GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, UB: tl.constexpr,
                 R4: tl.constexpr, R2: tl.constexpr, PAGES: tl.constexpr, TB: tl.constexpr, TYPE: tl.constexpr,
                 PTX: tl.constexpr, CAP: tl.constexpr, OVERLAP: tl.constexpr):
    """The estimates by themselves. Programs (row and KV head, stripe, query heads)."""
    let_next_start(OVERLAP)
    pid, stripe, stripes = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if PAGES > 0:
        score_pages(desc, Q, q_b, q_h, scale, softcap, pid, stripe, stripes, H, MAPPED, G, GP, D, DP, P, PAGES, TB, TYPE, CAP)
    else:
        score(desc, Q, q_b, q_h, scale, softcap, pid, stripe, stripes, H, MAPPED, G, GP, D, P, UB, R4, R2, PTX, CAP)
