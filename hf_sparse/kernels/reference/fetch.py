"""Residency: give blocks slots in the pool, evict, and read blocks from the host tier.

All of it is static-shape tensor code, as the kernels that replace it decide on the device. Slot 0 and block 0 are a
scratch pair: whatever must not happen is sent there. `tiers` is the flat list that `BlockPool.tiers()` makes:
[kv] when everything is resident (block ids are slots), else
[kv, host, slot_of, block_in, priority, pinned, clock, counters, history]:
    kv [S, E] slots; host [C, E] blocks; slot_of [C] int64, 0 = not resident; block_in [S] int64, 0 = free;
    priority [S] fp64; pinned [S] bool; clock [1] fp64; counters [2] int64 (hits, misses);
    history [C] fp64, the priority that a block had when it was last evicted.
"""
from __future__ import annotations

import math
from functools import lru_cache

import torch

from ...eviction import POLICIES
from ..host_link import link_of
from ..loader import loader_of


def is_tiered(tiers) -> bool:
    return len(tiers) > 1


def link_to_host(tiers):
    """The `HostLink` of tiers between which kernels move blocks (kernels/transfer.py); None: the CPU does."""
    link = link_of(tiers[1]) if is_tiered(tiers) else None
    return link if link is not None and transfer() is not None else None


@lru_cache(maxsize=None)
def transfer():
    """kernels/transfer.py, or None without a Triton that can import it."""
    try:
        from .. import transfer as module
    except Exception:  # noqa: BLE001 - whatever is wrong with it, copies through the CPU still work
        return None
    return module


def from_host(host, blocks, device):
    """Rows of the host tier on the pool's device, through the CPU."""
    return host.index_select(0, blocks.to(host.device)).to(device)


def fill(tiers, blocks, slots):
    """Contents of blocks [n] from the host tier into slots [n]; slot 0: nowhere."""
    kv, host = tiers[:2]
    if link_to_host(tiers):
        transfer().copy_blocks(host, kv, blocks, slots)
    else:
        kv[slots] = from_host(host, torch.where(slots > 0, blocks, 0), kv.device)


def acquire(tiers, blocks, wanted, policy: str, load: bool, use: bool = False, count: bool = False):
    """Slots for blocks, evicting the lowest priorities.

    Args:
        blocks: [n] int64 block ids; wanted: [n] bool, the others get slot 0. The same block may appear twice.
        policy: name of the eviction policy.
        load: copy the content of blocks that were missing from the host tier (else the caller writes it).
        use: tell the policy that the blocks are used now. count: count hits and misses.

    Returns:
        slots [n] int64. The caller guarantees that the pool has room for `n` blocks beside the pinned ones.
    """
    if not is_tiered(tiers):
        return torch.where(wanted, blocks, 0)
    kv, host, slot_of, block_in, priority, pinned, clock, counters, history = tiers
    n = blocks.shape[0]
    blocks = torch.where(wanted, blocks, 0)
    slots = slot_of[blocks]
    missing = wanted & (slots == 0)
    # The first of several equal missing blocks leads; the others share its slot.
    position = torch.arange(n, device=blocks.device)
    leader = torch.full_like(slot_of, n).scatter_reduce(0, blocks, torch.where(missing, position, n), "amin")
    lead = missing & (leader[blocks] == position)

    held = pinned.clone()
    held[slots] = True                                          # resident blocks of this call are no victims
    held[0] = True
    victims = torch.argsort(torch.where(held, math.inf, priority), stable=True)
    target = torch.where(lead, victims[(lead.cumsum(0) - 1).clamp(min=0, max=victims.shape[0] - 1)], 0)

    slot_of[block_in[target]] = 0
    history[block_in[target]] = priority[target]
    block_in[target] = torch.where(lead, blocks, 0)
    slot_of[torch.where(lead, blocks, 0)] = target
    block_in[0] = 0
    slot_of[0] = 0
    rules = POLICIES[policy]
    priority[target] = rules.on_load(history[torch.where(lead, blocks, 0)], clock)
    if load:
        loader = loader_of(host)
        if loader is not None:
            loader.load(kv, host, blocks, target)
        else:
            fill(tiers, blocks, target)
    slots = slot_of[blocks]
    if use:
        priority[slots] = rules.on_use(priority[slots], clock)
    if count:
        counters[0] += (wanted & ~missing).sum()
        counters[1] += lead.sum()
    return slots


def read(tiers, blocks):
    """Contents of blocks [n, E] wherever they are; changes nothing."""
    kv = tiers[0]
    if not is_tiered(tiers):
        return kv[blocks]
    host, slot_of = tiers[1], tiers[2]
    if link_to_host(tiers):
        return transfer().load_blocks(kv, host, slot_of, blocks)
    slots = slot_of[blocks]
    return torch.where((slots > 0)[:, None], kv[slots], from_host(host, blocks, kv.device))
