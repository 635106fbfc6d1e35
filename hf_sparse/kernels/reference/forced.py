"""Attention over the blocks that are always read: the sink, the newest ones and the open one."""
from __future__ import annotations

import torch

from .append import split
from .fetch import acquire
from .softmax import block_attention


def attend_forced(tiers, query, table, lengths, tail_start, sink_blocks: int, tail_blocks: int, block_size: int,
                  value_dim: int, softcap: float, eviction: str):
    """Exact attention over blocks [0, sink_blocks) and [tail_start, end of the row).

    Args:
        query: [B, H, G, D] fp32, scaled. table: [B, H, N]. lengths, tail_start: [B] int64.
        tail_blocks: the most blocks that a tail can hold.

    Returns:
        output [B, H, G, Dv] fp32, log mass [B, H, G], and read [B] int64, the number of these blocks.
    """
    B, H, G, D = query.shape
    P = block_size
    sink = torch.arange(sink_blocks, device=query.device).expand(B, -1)
    tail = tail_start[:, None] + torch.arange(tail_blocks, device=query.device)
    column = torch.cat([sink, tail], 1)                                                          # [B, F]
    exists = column * P < lengths[:, None]
    # A short row's tail may begin inside the sink; each block counts once.
    exists = exists & torch.cat([torch.ones_like(sink, dtype=torch.bool), tail >= sink_blocks], 1)
    column = torch.where(exists, column, 0)
    blocks = table.gather(2, column[:, None].expand(-1, H, -1))
    wanted = exists[:, None].expand_as(blocks)
    slots = acquire(tiers, blocks.reshape(-1), wanted.reshape(-1), eviction, load=True, use=True)
    keys, values = split(tiers[0][slots.view_as(blocks)], P, D, value_dim)
    token = column[..., None] * P + torch.arange(P, device=query.device)                         # [B, F, P]
    valid = (exists[..., None] & (token < lengths[:, None, None]))[:, None, None]
    output, mass, _ = block_attention(query, keys, values, valid, softcap)
    return output, mass, exists.sum(1)
