"""Progressive attention: read blocks in rounds, merge, and stop when enough mass is gathered.

This is the loop of PSA (arXiv 2503.00392, section 4.2) for all rows and KV heads at once. A head that has stopped
reads nothing more; nothing leaves the device to decide it.
"""
from __future__ import annotations

import math

import torch

from ...selection.stop_rules import RULES
from .append import split
from .fetch import acquire
from .quantise import dequantise_blocks
from .softmax import block_attention, finite, merge


def attend(tiers, query, table, order, rest, candidates, count, floor, output, mass, sinks, bounds, policy: str,
           rule: str, threshold: float, window: int, group_min: bool, block_size: int, value_dim: int,
           softcap: float, eviction: str, by_rule: bool = False, bits: int = 16, dtype: torch.dtype | None = None,
           kept: torch.Tensor | None = None):
    """Read ranked blocks until the stop rule is satisfied.

    Args:
        tiers: see `fetch`. query: [B, H, G, D] fp32, scaled. table: [B, H, N] block ids.
        order: [B, H, M] ranked blocks; rest: [B, H, G, M + 1] estimated log mass left after each.
        candidates: [B] how many blocks could be read; count: [B] or [B, H] how many may be; floor: [B] how many must be.
        output, mass: [B, H, G, Dv] and [B, H, G], what the always-read blocks gave.
        sinks: [H, G] log mass of attention sinks that belong to no token, or None. It counts as captured.
        bounds: cumulative numbers of blocks at which the rule is checked.
        policy: "threshold", "top_k" (never stops before `count`) or "top_p" (stops on estimates alone).
        bits: of keys and values in blocks; below 16 slots hold packed blocks, of keys and values of the type `dtype`.
        by_rule: report the coverage that the rule sees, for digests that don't estimate masses; else by the digest.
        kept: [B, H] heads that read `count` blocks whatever they hold, or None.
        group_min: a KV head stops when all of its query heads have passed, else when their mean has.

    Returns:
        output [B, H, G, Dv] and mass [B, H, G] (without the sinks), read [B, H] int64 blocks, coverage [B, H, G]
        estimated from the digest, or by the rule.
    """
    B, H, G, D = query.shape
    M = order.shape[-1]
    count = count.reshape(B, -1)                                                                    # [B, 1 or H]
    output, mass = output.clone(), mass.clone()
    start = _with_sinks(mass, sinks)
    block_mass = torch.full((B, H, G, M), -math.inf, device=query.device)
    rank = torch.arange(M, device=query.device)
    read = torch.zeros(B, H, dtype=torch.int64, device=query.device)

    def covered(done: int):
        """[B, H, G] estimated coverage after `done` ranked blocks, or fewer where a row's budget has ended."""
        ranked = count.clamp(max=done)
        unread = rest.gather(-1, ranked[..., None, None].expand(-1, H, G, 1))                    # [B, H, G, 1]
        if policy == "top_p":
            return 1.0 - torch.exp(unread[..., 0] - finite(torch.logaddexp(start, rest[..., 0])))
        captured = _with_sinks(mass, sinks)
        if done == 0 and rule != "estimate":                         # these rules go by the blocks that they have seen
            return (candidates == 0)[:, None, None].expand_as(mass).to(mass.dtype)
        left = RULES[rule](rest=unread, done=0, block_mass=block_mass[..., :done],
                           read=(rank[:done] < ranked[..., None])[:, :, None],
                           left=(candidates[:, None] - ranked)[..., None], size=window)
        return torch.exp(captured - finite(torch.logaddexp(captured, left)))

    def passed(coverage, done: int):
        if policy == "top_k" or threshold >= 1.0:
            return torch.zeros(B, H, dtype=torch.bool, device=query.device)
        reached = coverage.amin(-1) if group_min else coverage.mean(-1)
        reached = (reached >= threshold) & (floor <= done)[:, None]
        return reached if kept is None else reached & ~kept

    coverage = covered(0)
    active = (count > 0) & ~passed(coverage, 0)
    low = 0
    for high in bounds:
        if query.device.type == "cpu" and not active.any():
            break                                                   # a saving where looking costs nothing
        wanted = active[..., None] & (rank[low:high] < count[..., None])                         # [B, H, R]
        blocks = table.gather(2, order[..., low:high])
        slots = acquire(tiers, blocks.reshape(-1), wanted.reshape(-1), eviction, load=True, use=True, count=True)
        rows = tiers[0][slots.view_as(blocks)]
        if bits < 16:
            keys, values = dequantise_blocks(rows, block_size, D, value_dim, bits, dtype)
        else:
            keys, values = split(rows, block_size, D, value_dim)
        part, part_mass, masses = block_attention(query, keys, values, wanted[:, :, None, :, None], softcap)
        output, mass = merge(output, mass, part, part_mass)
        block_mass[..., low:high] = masses
        read += wanted.sum(-1)
        coverage = torch.where(active[..., None], covered(high), coverage)
        active = active & ~passed(coverage, high) & (count > high)
        low = high
    if not by_rule:
        left = rest.gather(-1, read[:, :, None, None].expand(-1, -1, G, 1)).squeeze(-1)
        captured = _with_sinks(mass, sinks)
        coverage = torch.exp(captured - finite(torch.logaddexp(captured, left)))
    return output, mass, read, coverage


def _with_sinks(mass, sinks):
    return mass if sinks is None else torch.logaddexp(mass, sinks.float().expand_as(mass))
