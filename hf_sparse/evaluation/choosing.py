"""Which blocks a policy reads, for many tokens at once: the rounds of the reference, and the cut of the kernels.

The library chooses step by step, because it must not read what it doesn't need. Here all masses are known, so what each step
would have read follows from cumulative sums. A "row" of these tensors is one token of one row of the batch: B of them, H KV
heads, G query heads a KV head, N blocks that a digest speaks of.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.step import budget
from ..kernels.reference.select import select
from ..kernels.reference.softmax import finite
from ..selection.cut import OCTAVES, PLAN, STEPS
from ..selection.rounds import round_bounds
from .policies import TOKEN_LEVEL, Policy

BIN = OCTAVES << 23 >> STEPS


@dataclass(frozen=True)
class Seen:
    """What a step knows, and what it would find.

    Args:
        estimate: [B, H, G, N] fp32 estimated log mass of every block. masses: [B, H, G, N] the true ones.
        forced_mass: [B, H, G] log mass of the always-read blocks. sinks: [H, G] log mass of attention sinks, or None.
        lengths: [B] tokens of the row, its own included. start: [B] first block of the always-read tail.
        forced: [B] how many blocks are always read. total: [B] blocks there are.
    """

    estimate: Tensor
    masses: Tensor
    forced_mass: Tensor
    sinks: Tensor | None
    lengths: Tensor
    start: Tensor
    forced: Tensor
    total: Tensor


def choose(policy: Policy, seen: Seen) -> tuple[Tensor, Tensor]:
    """Blocks that are read beside the always-read ones, bool [B, H, N], and the estimated coverage [B, H, G]."""
    config = policy.config
    candidates = (seen.start - config.sink_blocks).clamp(min=0)
    # Every row here is long enough to be sparse, whatever min_context says.
    count, floor, limit = budget(config.replace(min_context=0), seen.lengths, candidates, seen.forced, seen.total,
                                 seen.estimate.shape[-1])
    pick = _by_cut if policy.reading == "cut" else _by_rounds
    return pick(policy, seen, candidates, count, floor, limit)


def candidate_blocks(policy: Policy, seen: Seen) -> Tensor:
    """Bool [B, 1, 1, N]: blocks that are ranked."""
    block = torch.arange(seen.estimate.shape[-1], device=seen.estimate.device)
    return ((block >= policy.config.sink_blocks) & (block < seen.start[:, None]))[:, None, None]


def _never_stops(config) -> bool:
    """Whether blocks are read up to the limit, whatever mass they hold."""
    return config.policy == "top_k" or (config.top_p if config.policy == "top_p" else config.threshold) >= 1.0


def _with_sinks(mass: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return mass
    return torch.logaddexp(mass, sinks.reshape(1, *sinks.shape, *([1] * (mass.dim() - 3))).expand_as(mass))


def _coverage(captured: Tensor, left: Tensor) -> Tensor:
    return torch.exp(captured - finite(torch.logaddexp(captured, left)))


# -- rounds ---------------------------------------------------------------------------------------------------------------
def _by_rounds(policy, seen, candidates, count, floor, limit):
    """The reference's loop: the rule is checked at every bound, and a KV head stops at the first at which it passes."""
    config = policy.config
    B, H, G, N = seen.estimate.shape
    order, rest = select(seen.estimate, seen.forced_mass, config.sink_blocks, seen.start, limit, config.group_reduction)
    M = order.shape[-1]
    rank = torch.arange(M, device=order.device)
    masses = seen.masses.gather(-1, order[:, :, None].expand(-1, -1, G, -1))
    masses = masses.masked_fill((rank >= count[:, None])[:, None, None], -math.inf)
    gathered = torch.logcumsumexp(torch.cat([seen.forced_mass[..., None], masses], -1), -1)                  # [B, H, G, M + 1]
    bounds = torch.tensor([0, *round_bounds(M, config.round_blocks, config.round_growth)], device=order.device)
    ranked = torch.minimum(bounds, count[:, None])                                                           # [B, J]
    at = lambda x, index: x.gather(-1, index[:, None, None].expand(-1, H, G, -1))  # noqa: E731
    captured = _with_sinks(at(gathered, ranked), seen.sinks)
    unread = at(rest, ranked)
    if config.policy == "top_p":
        all_of_it = torch.logaddexp(_with_sinks(seen.forced_mass, seen.sinks), rest[..., 0])
        coverage = 1.0 - torch.exp(unread - finite(all_of_it)[..., None])
    else:
        left = _left(policy, seen, order, masses, unread, ranked, candidates, at)
        coverage = _coverage(captured, left)
        if policy.stop_rule not in ("estimate", "true"):                 # these go by the blocks that they have seen
            nothing = (candidates == 0)[:, None, None].to(coverage.dtype).expand(B, H, G)
            coverage = torch.cat([nothing[..., None], coverage[..., 1:]], -1)
    stops = (bounds >= count[:, None])[:, None]                                                              # [B, 1, J]
    if not _never_stops(config):
        reached = coverage.amin(2) if config.group_stop == "min" else coverage.mean(2)
        wanted = config.top_p if config.policy == "top_p" else config.threshold
        stops = stops | (reached >= wanted) & (floor[:, None] <= bounds)[:, None]
    stop = stops.expand(B, H, -1).to(torch.uint8).argmax(-1)                                                 # first of them
    read = ranked[:, None].expand(-1, H, -1).gather(-1, stop[..., None])                                     # [B, H, 1]
    chosen = torch.zeros(B, H, N, dtype=torch.bool, device=order.device).scatter(-1, order, rank < read)
    if policy.digest in TOKEN_LEVEL:
        pick = read[:, :, None].expand(-1, -1, G, -1)
        captured, left = _with_sinks(gathered.gather(-1, pick)[..., 0], seen.sinks), rest.gather(-1, pick)[..., 0]
        return chosen, _coverage(captured, left)
    return chosen, coverage.gather(-1, stop[:, :, None, None].expand(-1, -1, G, -1))[..., 0]


def _left(policy, seen, order, masses, unread, ranked, candidates, at):
    """[B, H, G, J] log mass that the stop rule takes the unread blocks to hold (selection/stop_rules.py)."""
    if policy.stop_rule == "estimate":
        return unread
    if policy.stop_rule == "true":
        block = candidate_blocks(policy, seen)
        every = torch.where(block, seen.masses, -math.inf)
        every = every.gather(-1, order[:, :, None].expand_as(masses)).flip(-1).logcumsumexp(-1).flip(-1)
        return at(torch.cat([every, torch.full_like(every[..., :1], -math.inf)], -1), ranked)
    last = (ranked - 1).clamp(min=0)
    blocks = (candidates[:, None] - ranked).clamp(min=0)[:, None, None]                                      # [B, 1, 1, J]
    if policy.stop_rule == "window":
        size = policy.config.stop_window
        padded = torch.cat([torch.full_like(masses[..., :1], -math.inf).expand(*masses.shape[:-1], size - 1), masses], -1)
        recent = padded.unfold(-1, size, 1).logsumexp(-1)                                                    # [B, H, G, M]
        held = ranked.clamp(max=size).clamp(min=1)[:, None, None]
        return at(recent, last) - held.log() + blocks.log()
    lightest = at(torch.where(torch.isinf(masses), math.inf, masses).cummin(-1).values, last)
    if policy.stop_rule == "nleft":
        return lightest + blocks.log()
    return torch.where(blocks > 0, lightest, -math.inf)


# -- cut ------------------------------------------------------------------------------------------------------------------
def _by_cut(policy, seen, candidates, count, floor, limit):
    """The kernels' choice: every block above a cut, planned from the estimates; a second cut where they promised too much."""
    config = policy.config
    largest = config.group_stop == "min"
    by_estimate = config.policy == "top_p"
    wanted = config.top_p if by_estimate else config.threshold
    need = wanted if by_estimate or policy.digest == "oracle" else wanted + PLAN * (1.0 - wanted)
    inside = candidate_blocks(policy, seen)
    estimate = torch.where(inside, seen.estimate, -math.inf)
    total = torch.logaddexp(seen.forced_mass, estimate.logsumexp(-1))
    shares = torch.exp(estimate - total[..., None])
    share = shares.amax(2) if largest else shares.mean(2)
    must = share.sum(-1, keepdim=True) - (1.0 - need)
    limits = count[:, None, None]
    never = _never_stops(config)
    if never:
        def enough(order):
            return torch.zeros_like(order, dtype=torch.bool)
    else:
        def enough(order):
            number = torch.arange(1, order.shape[-1] + 1, device=order.device)
            return (share.gather(-1, order).cumsum(-1) >= must) & (number >= floor[:, None, None])
    chosen = _above_cut(share, inside[:, :, 0], limits, enough)
    chosen &= (must > 0) | (floor > 0)[:, None, None] if not never else True
    captured, left = _gathered(seen, estimate, chosen)
    if config.policy != "threshold" or never:
        return chosen, _coverage(captured, left)
    reached = _coverage(captured, left)
    reached = reached.amin(-1) if largest else reached.mean(-1)
    room = limits - chosen.sum(-1, keepdim=True)
    unread = torch.where(chosen[:, :, None], 0.0, torch.exp((estimate - captured[..., None]).clamp(max=69.0)))
    weight = unread.amax(2) if largest else unread.mean(2)

    def enough_more(order):
        ranked = unread.gather(-1, order[:, :, None].expand_as(unread))
        after = (unread.sum(-1, keepdim=True) - ranked.cumsum(-1)).clamp(min=0)
        coverage = 1.0 / (1.0 + after)
        return (coverage.amin(2) if largest else coverage.mean(2)) >= config.threshold

    more = _above_cut(weight, inside[:, :, 0] & ~chosen, room, enough_more)
    chosen = chosen | more & ((reached < config.threshold)[..., None] & (room > 0))
    captured, left = _gathered(seen, estimate, chosen)
    return chosen, _coverage(captured, left)


def _gathered(seen, estimate, chosen):
    found = torch.where(chosen[:, :, None], seen.masses, -math.inf).logsumexp(-1)
    left = torch.where(chosen[:, :, None], -math.inf, estimate).logsumexp(-1)
    return _with_sinks(torch.logaddexp(seen.forced_mass, found), seen.sinks), left


def _above_cut(weight: Tensor, inside: Tensor, limit: Tensor, enough) -> Tensor:
    """Blocks in bins of weight down to the first at the end of which there is enough, at most `limit` of them.

    The kernels search for the cut over the bits of the weights, and stop at bins of 3 %.

    Args:
        weight, inside: [B, H, N] (inside may broadcast over H). limit: [B, H or 1, 1].
        enough: takes blocks in descending order [B, H, N] and says of each whether there is enough with it.
    """
    weight = torch.where(inside, weight, 0.0)
    bits = weight.contiguous().view(torch.int32).long()
    bottom = (bits.amax(-1, keepdim=True) + 1 - (OCTAVES << 23)).clamp(min=1)
    bins = torch.where(inside, torch.div(bits - bottom, BIN, rounding_mode="floor").clamp(min=-1), -2)
    order = bins.sort(dim=-1, descending=True, stable=True).indices
    number = torch.arange(1, weight.shape[-1] + 1, device=weight.device)
    satisfied = enough(order) | (number >= limit)
    first = satisfied.to(torch.uint8).argmax(-1, keepdim=True)
    floor = torch.where(satisfied.any(-1, keepdim=True), bins.gather(-1, order.gather(-1, first)), -1)
    floor = torch.where(floor <= 0, -1, floor)              # below the search's reach: all of them
    ranked_in = (bins.gather(-1, order) >= floor) & (number <= limit)
    return torch.zeros_like(inside.expand_as(weight)).scatter(-1, order, ranked_in) & inside
