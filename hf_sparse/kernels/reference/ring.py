"""Where the exact copies of a layer's always-read blocks are: rows of a ring (cache/exact_ring.py)."""
from __future__ import annotations

import torch
from torch import Tensor

# Blocks of the ring beyond the tail of a row: so many block borders back may a row be cropped and still be exact there.
SLACK = 3


def ring_rows(column: Tensor, heads: int, sink_blocks: int, ring_blocks: int) -> Tensor:
    """Rows of an `ExactRing` that hold blocks [B, C] of every KV head: [B, H, C] int64.

    The first `sink_blocks` blocks of a row have rows of their own, the others come round every `ring_blocks`. Row 0 is
    scratch.
    """
    place = torch.where(column < sink_blocks, column, sink_blocks + (column - sink_blocks) % ring_blocks)
    first = torch.arange(column.shape[0] * heads, device=column.device).view(-1, heads, 1) * (sink_blocks + ring_blocks)
    return 1 + first + place[:, None]
