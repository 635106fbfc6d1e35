"""Where the exact copies of a layer's always-read blocks are (cache/exact_blocks.py)."""
from __future__ import annotations

import torch
from torch import Tensor

# Blocks beyond the tail of a row: so many block borders back may a row be cropped and still be exact there.
SLACK_BLOCKS = 3


def exact_rows(column: Tensor, heads: int, sink_blocks: int, newest_blocks: int) -> Tensor:
    """Rows of `ExactBlocks` that hold blocks [B, C] of every KV head: [B, H, C] int64.

    The first `sink_blocks` blocks of a row have rows of their own, the others come round every `newest_blocks`. Row 0 is
    scratch.
    """
    place = torch.where(column < sink_blocks, column, sink_blocks + (column - sink_blocks) % newest_blocks)
    first = torch.arange(column.shape[0] * heads, device=column.device).view(-1, heads, 1) * (sink_blocks + newest_blocks)
    return 1 + first + place[:, None]
