"""Write new keys and values where closed blocks are quantised: tokens to the exact blocks, closing blocks to their slots."""
from __future__ import annotations

import torch

from .append import _pin, split
from .exact_blocks import exact_rows
from .fetch import acquire, is_tiered, link_to_host, transfer
from .quantise import quantise_blocks

# Elements that are quantised at a time, which bounds the memory that a prompt takes.
PIECE_ELEMENTS = 2**24


def append_packed(tiers, exact, table, lengths, keys, values, valid, block_size: int, sink_blocks: int, newest_blocks: int,
                  tail_start, policy: str, bits: int, quantise=None):
    """Append [B, H, Q, D] keys and values at each row's length; `lengths` [B] is advanced in place.

    A block is quantised once, when it closes, from its exact tokens; it is written to its slot, if it has one, and to the
    host tier. The open block and the blocks that are always read stay pinned in the pool, as in `append`.

    Args:
        tiers: see `fetch`; slots and rows of the host tier are uint8, packed blocks (quantise.py).
        exact: [1 + B * H * (sink_blocks + newest_blocks), E] blocks in the model's dtype, see exact_blocks.py.
        table, valid, sink_blocks, tail_start: see `append`. bits: of a code.
        quantise: a faster way (blocks [..., E], P, D, Dv, bits) -> packed bytes, with the result of `quantise_blocks`.
    """
    batch, heads, count, key_dim = keys.shape
    value_dim, P = values.shape[-1], block_size
    start = lengths.clone()
    lengths += valid.sum(1)
    newest = (lengths - 1) // P
    # Compact token order: the j-th valid token of a row.
    source = torch.where(valid, torch.arange(count, device=keys.device), count).argsort(dim=1, stable=True)
    touched = (count + P - 2) // P + 1
    piece = max(1, PIECE_ELEMENTS // (batch * heads * exact.shape[1]))
    for low in range(0, touched, piece):
        column = start[:, None] // P + torch.arange(low, min(low + piece, touched), device=keys.device)      # [B, C]
        exists = column * P < lengths[:, None]
        token = column[..., None] * P + torch.arange(P, device=keys.device) - start[:, None, None]           # [B, C, P]
        fresh = (token >= 0) & (token < (lengths - start)[:, None, None])
        pick = source.gather(1, torch.where(fresh, token, 0).flatten(1))                                     # [B, C * P]
        rows = exact_rows(column, heads, sink_blocks, newest_blocks)                                         # [B, H, C]
        content = exact.new_zeros(*rows.shape, exact.shape[1])
        if low == 0:                                        # the block that was open
            opened = exists[:, :1] & (column[:, :1] * P < start[:, None])
            content[:, :, :1] = exact[torch.where(opened[:, None], rows[:, :, :1], 0)]
        for old, new in zip(split(content, P, key_dim, value_dim), (keys, values)):
            picked = new.gather(2, pick[:, None, :, None].expand(-1, heads, -1, new.shape[-1])).to(exact.dtype)
            old.copy_(torch.where(fresh[:, None, ..., None], picked.view(old.shape), old))
        kept = exists & ((column < sink_blocks) | (column > newest[:, None] - newest_blocks))
        exact[torch.where(kept[:, None], rows, 0)] = content
        closed = exists & ((column + 1) * P <= lengths[:, None])
        if quantise is None:
            packed = quantise_blocks(*split(content, P, key_dim, value_dim), bits)
        else:
            packed = quantise(content, P, key_dim, value_dim, bits)
        column = torch.where(exists, column, 0)
        ids = table.gather(2, column[:, None].expand(-1, heads, -1))
        each = lambda flags, shape=ids.shape: flags[:, None].expand(shape).reshape(-1)  # noqa: E731
        pinned = exists & ((column >= tail_start[:, None]) | (column < sink_blocks))
        _store(tiers, packed.flatten(0, 2), ids.reshape(-1), each(exists), each(closed), each(pinned), policy)


def _store(tiers, packed, ids, exists, closed, pinned, policy: str):
    """Blocks `closed` of [n] into their slots and the host tier; slots for those to be pinned."""
    kv = tiers[0]
    if not is_tiered(tiers):
        kv[torch.where(closed, ids, 0)] = packed
        return
    resident = exists & (tiers[2][ids] > 0)
    slots = acquire(tiers, ids, pinned | resident, policy, load=False)
    kv[torch.where(closed, slots, 0)] = packed
    _pin(tiers, torch.where(pinned, slots, 0))
    to_host, host, link = torch.where(closed, ids, 0), tiers[1], link_to_host(tiers)
    if link is None:
        host.index_copy_(0, to_host.to(host.device), packed.to(host.device))
        return
    rows = torch.arange(ids.shape[0], device=ids.device)
    link.run_beside(lambda: transfer().copy_blocks(packed, host, rows, to_host), packed, rows, to_host)
