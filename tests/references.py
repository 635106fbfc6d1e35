"""Independent float64 references: what attention, digests, the stop rules and eviction must give, from their formulas.

Written for one row and one KV head at a time, with Python loops and sums of exponentials instead of the library's
batched log-domain tensor code. Nothing of the library is imported here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


def logits_of(query: Tensor, keys: Tensor, softcap: float = 0.0) -> Tensor:
    """[G, D] scaled queries and [T, D] keys -> [G, T] float64 logits."""
    return soft_cap(query.double() @ keys.double().T, softcap)


def attention(query, keys, values, keep=None, softcap=0.0, sinks=None) -> tuple[Tensor, Tensor]:
    """Attention of one KV head over the tokens `keep` [T] bool (None: all).

    Args:
        query: [G, D] scaled; keys: [T, D]; values: [T, Dv]; sinks: [G] logits without a value, or None.

    Returns:
        output [G, Dv] and log mass [G] of the kept tokens (sinks not counted), float64.
    """
    logits = logits_of(query, keys, softcap)
    if keep is None:
        keep = torch.ones(keys.shape[0], dtype=torch.bool)
    outputs, masses = [], []
    for head in range(query.shape[0]):
        row = logits[head][keep]
        if row.numel() == 0:
            outputs.append(torch.zeros(values.shape[1], dtype=torch.float64))
            masses.append(torch.tensor(-math.inf, dtype=torch.float64))
            continue
        top = row.max()
        weight = torch.exp(row - top)
        total = weight.sum()
        below = total if sinks is None else total + torch.exp(sinks[head].double() - top)
        outputs.append((weight / below) @ values.double()[keep])
        masses.append(top + torch.log(total))
    return torch.stack(outputs), torch.stack(masses)


def block_masses(query: Tensor, keys: Tensor, block_size: int, softcap: float = 0.0) -> Tensor:
    """[G, ceil(T / P)] true log mass of every block of [T, D] keys; the last block may be short."""
    parts = logits_of(query, keys, softcap).split(block_size, dim=-1)
    return torch.stack([torch.logsumexp(part, -1) for part in parts], -1)


def digest_masses(kind: str, query: Tensor, keys: Tensor, block_size: int, softcap: float = 0.0) -> Tensor:
    """[G, n] estimated log mass of the whole blocks of [n * P, D] keys, for the digests with one vector or two a block."""
    columns = []
    for block in keys.double().split(block_size, dim=0):
        if kind == "centroid":
            logit = query.double() @ block.mean(0)
        elif kind == "min_max":
            upper, lower = block.amax(0), block.amin(0)
            logit = torch.maximum(query.double() * upper, query.double() * lower).sum(-1)
        elif kind == "oracle":
            columns.append(torch.logsumexp(logits_of(query, block, softcap), -1))
            continue
        else:
            raise LookupError(kind)
        columns.append(soft_cap(logit, softcap) + math.log(block_size))
    return torch.stack(columns, -1)


def rank(estimates: Tensor, captured: Tensor) -> list[int]:
    """Blocks in descending mean share of the group's heads; equal ones in block order.

    `estimates`: [G, N] log masses; `captured`: [G] log mass that the shares are relative to as well.
    """
    shares = []
    for head in range(estimates.shape[0]):
        top = max(estimates[head].max().item(), captured[head].item())
        total = math.exp(captured[head].item() - top) + sum(math.exp(x - top) for x in estimates[head].tolist())
        shares.append([math.exp(x - top) / total for x in estimates[head].tolist()])
    means = [sum(column) / len(column) for column in zip(*shares)]
    return sorted(range(len(means)), key=lambda block: (-means[block], block))


def mass_left(rule: str, true: list[float], estimated: list[float], done: int, window: int) -> float:
    """Mass (not its logarithm) that a stop rule takes the unread blocks to hold, after `done` of the ranked blocks.

    `true` and `estimated` are the masses of all candidates in rank order.
    """
    left = len(true) - done
    if left == 0:
        return 0.0
    if rule == "estimate":
        return sum(estimated[done:])
    if rule == "nleft":
        return left * min(true[:done])
    if rule == "window":
        recent = true[max(0, done - window) : done]
        return left * sum(recent) / len(recent)
    if rule == "paper":
        return min(true[:done])
    raise LookupError(rule)


def blocks_read(
    *, true, estimated, captured, bounds, count, floor=0, policy="threshold", rule="estimate", threshold=0.9, window=16,
    group_stop="mean"
) -> int:
    """How many ranked candidates one KV head reads.

    Args:
        true, estimated: [G][N] masses (not logarithms) of the candidates in rank order.
        captured: [G] mass of the always-read blocks, and of the sink logits where there are any.
        bounds: numbers of blocks after which the rule is looked at; count, floor: most and fewest blocks.
    """
    heads = range(len(captured))
    for done in [0, *bounds]:
        read = min(done, count)
        if read == count:
            return count
        if policy == "top_k" or (policy == "threshold" and threshold >= 1.0) or read < floor:
            continue
        if policy == "top_p":
            coverage = [1 - sum(estimated[g][read:]) / (captured[g] + sum(estimated[g])) for g in heads]
        else:
            if read == 0 and rule != "estimate":
                continue
            coverage = []
            for g in heads:
                got = captured[g] + sum(true[g][:read])
                coverage.append(got / (got + mass_left(rule, true[g], estimated[g], read, window)))
        reached = min(coverage) if group_stop == "min" else sum(coverage) / len(coverage)
        if reached >= threshold:
            return read
    return count


def round_bounds(limit: int, first: int, growth: float, largest: int = 32) -> list[int]:
    """Numbers of blocks at which the stop rule is checked: `first` a round at least, growing by `growth` a check."""
    bounds = []
    while not bounds or bounds[-1] < limit:
        done = bounds[-1] if bounds else 0
        size = min(max(first, math.floor(done * (growth - 1))), max(first, largest))
        bounds.append(min(limit, done + size))
    return bounds
