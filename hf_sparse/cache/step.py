"""The decode step of PSA (arXiv 2503.00392, section 4) over the reference ops: forced blocks, ranking, progressive attention.

This is the whole algorithm in the order in which it happens; `kernels/decode.py` is the same step as GPU kernels.
"""
from __future__ import annotations

import torch

from ..kernels import ops
from ..selection.rounds import round_bounds


def sparse_step(layer, query, scaling: float, softcap: float, sinks, own: bool = True):
    """One token of every row, reading only the blocks that matter (design: the decode step).

    own: the queries are the layer's. Those of layers that share its keys and values select for themselves, and keep nothing.
    """
    config, P, store = layer.config, layer.config.block_size, layer.digests
    B, H, G = layer.batch, layer.heads, query.shape[1] // layer.heads
    tiers = layer.pool.tiers()
    q = query.float().squeeze(2).unflatten(1, (H, G)) * scaling
    sink_logits = None if sinks is None else sinks.float().view(H, G)
    start = layer.tail_start(layer.lengths)
    exact, table = tiers, layer.table
    if layer.exact is not None:                             # as resident blocks of a small pool of their own
        column = torch.arange(table.shape[2], device=layer.device).expand(B, -1)
        exact, table = [layer.exact.rows], layer.exact.ids(column)
    output, mass, forced = ops.attend_forced(exact, q, table, layer.lengths, start, config.sink_blocks,
                                             layer.tail_blocks, P, layer.value_dim, softcap, config.eviction)
    units = (layer.length - 1) // (P * store.unit_blocks)
    candidates = (start - config.sink_blocks).clamp(min=0)
    total = (layer.lengths + P - 1) // P
    read, coverage = torch.zeros(B, H, dtype=torch.int64, device=layer.device), torch.ones_like(mass)
    fresh = None                                            # [B, H] where the selection is this token's own; None: all
    if units:
        count, floor, limit = budget(config, layer.lengths, candidates, forced, total, units * store.unit_blocks)
        order, rest = ops.select(store.score(q, units, softcap), mass, config.sink_blocks, start, limit,
                                 config.group_reduction)
        if config.reuse > 1 and own:
            fresh = layer.kept.due(q, start, layer.length, config.reuse, config.reuse_refresh)
            order, count = layer.kept.plan(fresh, order, count)
        output, mass, read, coverage = ops.attend(
            tiers, q, layer.table, order, rest, candidates, count, floor, output, mass, sink_logits,
            round_bounds(order.shape[-1], config.round_blocks, config.round_growth), config.policy,
            _rule(layer), config.top_p if config.policy == "top_p" else config.threshold,
            config.stop_window, config.group_stop == "min", P, layer.value_dim, softcap, config.eviction,
            not store.digest.token_level, config.kv_bits, layer.dtype, None if fresh is None else ~fresh)
        if fresh is not None:
            layer.kept.keep(fresh, q, start, layer.length, read, layer.lengths < config.min_context)
    true = _true_mass(layer, q, softcap) if config.verify else None
    layer.stats.record(read + forced[:, None], total, mass, coverage, true, sink_logits, fresh)
    if layer.pool.tiered:
        layer.pool.clock += 1.0 / layer.state.pool_layers
    if sink_logits is not None:
        output = output * torch.sigmoid(mass - sink_logits)[..., None]
    return output.to(query.dtype).flatten(1, 2)[:, :, None]


def budget(config, lengths, candidates, forced, total, blocks):
    """[B] how many ranked blocks may be read, [B] how many must be, and how many to rank."""
    shares = lambda share: torch.ceil(total * share).long()  # noqa: E731
    floor, cap = config.bounds
    least = shares(floor) if isinstance(floor, float) else floor
    count, floor, most = candidates, (least - forced).clamp(min=0), None
    for given in (cap, config.top_k if config.policy == "top_k" else None):
        if isinstance(given, float):
            count = torch.minimum(count, (shares(given).clamp(min=config.least_cap) - forced).clamp(min=0))
        elif given is not None:
            most = min(given, most or given)
    limit = blocks
    if most is not None:
        count = torch.minimum(count, (most - forced).clamp(min=0))
        limit = min(limit, most)
    # Short rows of a long batch are read whole, as they would be alone.
    short = lengths < config.min_context
    limit = max(limit, min(blocks, config.min_context // config.block_size))
    count = torch.where(short, candidates, count)
    floor = torch.where(short, candidates, torch.minimum(floor, count))
    return count, floor, limit


def _rule(layer) -> str:
    """The stop rule, or for policies without one the rule that their coverage is reported by."""
    token_level = layer.digests.digest.token_level
    return "window" if layer.config.stop_rule == "estimate" and not token_level else layer.config.stop_rule


def _true_mass(layer, q, softcap):
    """[B, H, G] log mass of the whole row."""
    keys, _ = layer._compact()
    logits = torch.einsum("bhgd,bhtd->bhgt", q, keys.float())
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    token = torch.arange(keys.shape[2], device=layer.device)
    inside = (token < layer.lengths[:, None])[:, None, None]
    return torch.logsumexp(logits.masked_fill(~inside, -torch.inf), -1)
