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
import triton

from ..selection.cut import OCTAVES, STEPS
from . import decode
from .decode import INTERPRETED, LOG2E, TYPES, DecodeWork
from .rank import score_kernel
from .score import HEADS
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
    shape, policy, tune = work.shape, work.policy, TUNING
    B, H, G, GP, P, UB = shape.batch, shape.heads, shape.group, shape.group_pad, shape.block_size, shape.unit_blocks
    rows, on_gpu = B * H, not INTERPRETED
    overlap = on_gpu and decode.TUNING.overlap and torch.cuda.get_device_capability(work.device) >= (9, 0)
    start = dict(OVERLAP=overlap, **({"launch_pdl": True} if overlap else {}))
    processors = torch.cuda.get_device_properties(work.device).multi_processor_count if on_gpu else 3
    tiles = 1 if shape.pages else -(-G // HEADS.value)
    stripes = max(1, processors * tune.score_waves // rows // tiles) if on_gpu else 2
    registers = decode.TUNING.rank_registers
    score_kernel[(rows, stripes, tiles)](
        desc, query, query.stride(0), query.stride(1), scaling * LOG2E, softcap, H=H, MAPPED=shape.model_heads is not None, G=G,
        GP=GP, D=shape.key_dim, DP=triton.next_power_of_2(shape.key_dim), P=P, UB=UB, R4=shape.high, R2=shape.low,
        PAGES=shape.pages, TB=max(1, decode.TUNING.page_tile // max(shape.pages, 1)), TYPE=TYPES[shape.dtype], PTX=on_gpu,
        CAP=softcap > 0, OVERLAP=overlap, num_warps=1, num_stages=1, **({"maxnreg": registers} if registers and on_gpu else {}))
    constants = {**tier.select_constants(), "REMEMBER": False}
    select_kernel[(rows,)](
        desc, query, work.forced_mass, work.total, work.info, query.stride(0), query.stride(1), tune.over_fetch, 0, 0,
        policy.min_context, 0.0, 0.0, 0, H=H, MAPPED=shape.model_heads is not None, G=G, GP=GP, D=shape.key_dim,
        DP=triton.next_power_of_2(shape.key_dim), P=P, UB=UB, TYPE=TYPES[shape.dtype], SINK=policy.sink_blocks,
        RECENT=policy.recent_blocks, PIECES=1, FP=1, NEVER=True,
        LARGEST=policy.group_min, TILE=decode.TUNING.select_tile if on_gpu else 64, OCTAVES=OCTAVES, STEPS=STEPS, **constants,
        AHEAD=True, REUSE=1, **start, num_warps=decode.TUNING.select_warps, num_stages=1)
    tier.fetch(desc, ahead=max(1, tune.most_bytes // tier.block_bytes), **start)
