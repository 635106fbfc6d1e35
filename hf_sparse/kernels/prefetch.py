"""Fetching ahead: blocks that a layer's step will probably read, while the layer before it is still at work.

The next layer's query is predicted before its time (patches/predict.py). What it says of the layer's blocks is ranked as
always; of the best, a few more than the layer's last token has planned are stamped, and those without a slot are fetched.
Its own step finds them there. A wrong prediction costs the bus and slots, and changes no result.

These are launches of a layer step (residency.py), so they must run between those of two layers. They use the work buffers
of the layer to come, which are free then.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from .decode import LOG2E, DecodeWork, launching, ranking, selection
from .rank import score_kernel
from .select import select_kernel
from .tiering import Tier


@dataclass
class Tuning:
    """Launch parameters."""

    over_fetch: float = 1.5         # blocks looked at, for each one that the layer's last token has planned
    most_bytes: int = 2**22         # fetched at most, about what the bus brings while the rest of a layer runs
    score_waves: int = 12           # programs of the ranking for each processor


TUNING = Tuning()


def prefetch_layer(desc: torch.Tensor, work: DecodeWork, query: torch.Tensor, scaling: float, softcap: float,
                   tier: Tier) -> None:
    """Bring blocks that a layer will probably read into the pool.

    Args:
        desc: int64 [FIELDS] of that layer. query: [B, Hq, 1, D], predicted. tier: of its pool.
    """
    policy, tune, rows = work.policy, TUNING, work.shape.batch * work.shape.heads
    processors, start = launching(work.device)
    grid, ranked = ranking(work, processors, tune.score_waves, 0, softcap, start)
    score_kernel[grid](desc, query, query.stride(0), query.stride(1), scaling * LOG2E, softcap, **ranked)
    select_kernel[(rows,)](
        desc, query, work.forced_mass, work.total, work.info, query.stride(0), query.stride(1), tune.over_fetch, 0, 0,
        policy.min_context, 0.0, 0.0, 0, **selection(work, start), PIECES=1, FP=1, NEVER=True, AHEAD=True, REUSE=1,
        **{**tier.select_constants(), "REMEMBER": False})
    tier.fetch(desc, ahead=max(1, tune.most_bytes // tier.block_bytes), **start)
