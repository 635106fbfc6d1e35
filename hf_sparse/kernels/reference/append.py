"""Write new keys and values into the blocks of a layer, without the padding."""
from __future__ import annotations

import functools

import torch

from .fetch import acquire, is_tiered, link_to_host, read, transfer


def split(rows, block_size: int, key_dim: int, value_dim: int):
    """Slots [..., E] -> keys [..., P, D] and values [..., P, Dv], as views."""
    cut = block_size * key_dim
    keys = rows[..., :cut].unflatten(-1, (block_size, key_dim))
    values = rows[..., cut:cut + block_size * value_dim].unflatten(-1, (block_size, value_dim))
    return keys, values


def append(tiers, table, lengths, keys, values, valid, block_size: int, sink_blocks: int, tail_start, policy: str):
    """Append [B, H, Q, D] keys and values at each row's length; `lengths` [B] is advanced in place.

    A block that closes is written to the host tier once and never again; the open block and the blocks that are
    always read stay pinned in the pool.

    Args:
        table: [B, H, N] int64 block ids, assigned for every block that is written.
        valid: [B, Q] bool; tokens that are padding are not stored at all.
        sink_blocks: blocks at the start that stay pinned.
        tail_start: [B] int64, first block of the pinned tail once these tokens are in.
    """
    batch, heads, count, key_dim = keys.shape
    value_dim = values.shape[-1]
    P = block_size
    offset = valid.long().cumsum(1) - 1
    start = lengths.clone()
    lengths += valid.sum(1)
    if count == 1 or not is_tiered(tiers):
        position = start[:, None] + offset                                          # [B, Q]
        blocks = torch.where(valid, position // P, 0)
        ids = table.gather(2, blocks[:, None].expand(-1, heads, -1))                # [B, H, Q]
        wanted = valid[:, None].expand_as(ids)
        slots = acquire(tiers, ids.reshape(-1), wanted.reshape(-1), policy, load=False).view_as(ids)
        kv = tiers[0]
        slot_keys, slot_values = split(kv, P, key_dim, value_dim)
        inside = (position % P)[:, None].expand_as(ids)
        slot_keys[slots, inside] = keys.to(kv.dtype)
        slot_values[slots, inside] = values.to(kv.dtype)
        if is_tiered(tiers):
            closing = wanted & (inside == P - 1)
            _pin(tiers, slots.reshape(-1))
            _write_through(tiers, ids.reshape(-1), slots.reshape(-1), closing.reshape(-1))
        return
    # Compact token order: the j-th valid token of a row.
    source = torch.where(valid, torch.arange(count, device=keys.device), count).argsort(dim=1, stable=True)
    link = link_to_host(tiers)
    store = _store_through_cpu if link is None else functools.partial(_store_beside, link)
    store(tiers, table, start, lengths, keys, values, source, P, sink_blocks, tail_start, policy)


def _store_beside(link, tiers, table, start, end, keys, values, source, P, sink_blocks, tail_start, policy):
    """Many tokens into a tiered pool, by one kernel: closed blocks to the host tier, only the pinned ones take slots."""
    kv, host, slot_of = tiers[:3]
    heads, count = keys.shape[1:3]
    column = start[:, None] // P + torch.arange((count + P - 1) // P + 1, device=keys.device)
    exists = column * P < end[:, None]                                                            # [B, C]
    ids = table.gather(2, torch.where(exists, column, 0)[:, None].expand(-1, heads, -1))          # [B, H, C]
    tail = (exists & ((column >= tail_start[:, None]) | (column < sink_blocks)))[:, None].expand_as(ids)
    # The block that was open has left the tail, perhaps; its slot is needed once more.
    opened = (exists & (column * P < start[:, None]))[:, None].expand_as(ids)
    slots = acquire(tiers, ids.reshape(-1), (tail | opened).reshape(-1), policy, load=False)
    _pin(tiers, torch.where(tail.reshape(-1), slots, 0))
    end = end.clone()                                       # `lengths`, which the next token changes
    link.run_beside(lambda: transfer().store_blocks(kv, host, slot_of, table, start, end, source, keys, values, P),
                    kv, slot_of, table, start, end, source, keys, values)         # a dropped cache frees the pool, too


def _store_through_cpu(tiers, table, start, end, keys, values, source, P, sink_blocks, tail_start, policy):
    """The same, for a host tier that only the CPU reaches."""
    batch, heads, count, key_dim = keys.shape
    value_dim = values.shape[-1]
    kv, host = tiers[0], tiers[1]
    blocks_touched = (count + P - 1) // P + 1
    for low in range(0, blocks_touched, 64):                       # bounded staging, whatever the prompt's length
        column = start[:, None] // P + torch.arange(low, min(low + 64, blocks_touched), device=keys.device)
        exists = column * P < end[:, None]                                                        # [B, C]
        column = torch.where(exists, column, 0)
        ids = table.gather(2, column[:, None].expand(-1, heads, -1))                              # [B, H, C]
        token = column[..., None] * P + torch.arange(P, device=keys.device) - start[:, None, None]   # [B, C, P]
        fresh = (token >= 0) & (token < (end - start)[:, None, None]) & exists[..., None]
        pick = source.gather(1, torch.where(fresh, token, 0).flatten(1))                          # [B, C * P]
        shape = (batch, heads, column.shape[1], P)
        content = read(tiers, torch.where(exists[:, None], ids, 0).reshape(-1)).view(*shape[:3], -1).clone()
        old_keys, old_values = split(content, P, key_dim, value_dim)
        for old, new in ((old_keys, keys), (old_values, values)):
            picked = new.gather(2, pick[:, None, :, None].expand(-1, heads, -1, new.shape[-1]))
            old.copy_(torch.where(fresh[:, None, ..., None], picked.view(*shape, -1).to(kv.dtype), old))
        flat = content.reshape(-1, content.shape[-1])
        closed = (exists & ((column + 1) * P <= end[:, None]))[:, None].expand_as(ids).reshape(-1)
        to_host = torch.where(closed, ids.reshape(-1), 0)
        host.index_copy_(0, to_host.to(host.device), flat.to(host.device))
        # A block that has a slot keeps it up to date; the pinned tail gets slots.
        tail = exists & ((column >= tail_start[:, None]) | (column < sink_blocks))
        resident = (tiers[2][ids] > 0) & exists[:, None]
        wanted = (tail[:, None] | resident).reshape(-1)
        slots = acquire(tiers, ids.reshape(-1), wanted, policy, load=False)
        kv[slots] = flat
        _pin(tiers, torch.where(tail[:, None].expand_as(ids).reshape(-1), slots, 0))


def _pin(tiers, slots):
    pinned = tiers[5]
    pinned[slots] = True
    pinned[0] = True


def _write_through(tiers, ids, slots, closing):
    kv, host = tiers[0], tiers[1]
    if link_to_host(tiers):
        transfer().copy_blocks(kv, host, slots, torch.where(closing, ids, 0))
        return
    target = torch.where(closing, ids, 0).to(host.device)
    host.index_copy_(0, target, kv[torch.where(closing, slots, 0)].to(host.device))


def unpin(tiers, blocks, wanted):
    """Let go of blocks that have left the pinned tail."""
    if not is_tiered(tiers):
        return
    slot_of, pinned = tiers[2], tiers[5]
    pinned[slot_of[torch.where(wanted, blocks, 0)]] = False
    pinned[0] = True
