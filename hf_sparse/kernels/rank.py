"""Rank kernel: what needs nothing but the query and the new token. One launch, programs of one warp and of two kinds: the
first PIECES attend to the always-read blocks (and store the token), the others estimate the masses of all other blocks.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .append import append
from .overlap import let_next_start
from .score import score


@triton.jit
def rank_kernel(desc, Q, K, V, OF, MF, q_b, q_h, k_b, k_h, v_b, v_h, scale, softcap, H: tl.constexpr, G: tl.constexpr,
                GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
                P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, TAIL: tl.constexpr,
                R4: tl.constexpr, R2: tl.constexpr, PIECES: tl.constexpr,
                FT: tl.constexpr, TT: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr, CAP: tl.constexpr,
                TIERED: tl.constexpr, POLICY: tl.constexpr, BYTES: tl.constexpr, WORD: tl.constexpr, COPY: tl.constexpr,
                LEAVING: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs (row and KV head, piece or stripe, HEADS query heads). Arguments are those of `append` and `score`."""
    let_next_start(OVERLAP)
    pid, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < PIECES:
        if tl.program_id(2) == 0:
            append(desc, Q, K, V, OF, MF, q_b, q_h, k_b, k_h, v_b, v_h, scale, softcap, pid, part, H, G, GP, D, DP, DV, DVP,
                   P, UB, SINK, RECENT, TAIL, R4, R2, PIECES, FT, TT, TYPE, CAP, TIERED, POLICY, BYTES, WORD, COPY, LEAVING)
    else:
        score(desc, Q, q_b, q_h, scale, softcap, pid, part - PIECES, tl.num_programs(1) - PIECES, H, G, GP, D, P, UB, R4, R2,
              PTX, CAP)
