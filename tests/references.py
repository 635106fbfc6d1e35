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


def half(x: Tensor) -> Tensor:
    """Rounded to float16 and back."""
    return x.clamp(-65504, 65504).half().double()


def quantised(tokens: Tensor, bits: int, keep: Tensor | None = None) -> Tensor:
    """[T, R] tokens as minimum + scale * code per channel, both float16; `keep` [T]: which of them set the range."""
    kept = tokens if keep is None else tokens[keep]
    if kept.shape[0] == 0:
        return torch.zeros_like(tokens)
    low = half(kept.amin(0))
    step = half((kept.amax(0) - low).clamp(min=0) / (2**bits - 1))
    code = torch.where(step > 0, (tokens - low) / torch.where(step > 0, step, 1.0), 0.0)
    return low + step * code.round().clamp(0, 2**bits - 1)


def key_bits_masses(query: Tensor, keys: Tensor, block_size: int, bits: int, softcap: float = 0.0) -> Tensor:
    """[G, n] estimated log mass of the whole blocks of [n * P, D] keys at 2 to 4 bits a channel."""
    stored = torch.cat([quantised(block, bits) for block in keys.double().split(block_size, 0)])
    return block_masses(query, stored, block_size, softcap)


class ChannelCodes:
    """The channel-code digest of one KV head of one row, from its description.

    Args:
        keys: [T, D] at the row's first decode step, whole row; queries: [S, G, D], the last queries (256 at most).
        sink_tokens: tokens at the start that enter no statistics.
    """

    def __init__(self, keys: Tensor, queries: Tensor, sink_tokens: int):
        inside = keys.double()[sink_tokens:]
        self.sink_tokens = sink_tokens
        self.centre = inside.mean(0) if len(inside) else torch.zeros(keys.shape[1], dtype=torch.float64)
        spread = (
            inside.var(0, unbiased=False) if len(inside) else torch.zeros(keys.shape[1], dtype=torch.float64)
        )
        weight = queries.double().square().mean((0, 1)) * spread
        self.order = sorted(range(keys.shape[1]), key=lambda channel: (-weight[channel].item(), channel))

    def masses(
        self, query: Tensor, keys: Tensor, block_size: int, softcap: float = 0.0, unit: int = 128
    ) -> Tensor:
        """[G, n] estimated log mass of the blocks in whole units of [T, D] keys."""
        strong = math.ceil(keys.shape[1] / 4)
        high, low = self.order[:strong], self.order[strong:]
        stored = []
        for start in range(0, keys.shape[0] // unit * unit, unit):
            tokens = keys[start : start + unit].double() - self.centre
            keep = torch.arange(start, start + unit) >= self.sink_tokens
            coded = torch.empty_like(tokens)
            coded[:, high] = quantised(tokens[:, high], 4, keep)
            coded[:, low] = quantised(tokens[:, low], 2, keep)
            stored.append(coded + self.centre)
        if not stored:
            return torch.empty(query.shape[0], 0, dtype=torch.float64)
        return block_masses(query, torch.cat(stored), block_size, softcap)


def rank(estimates: Tensor, captured: Tensor) -> list[int]:
    """Blocks in descending mean share of the group's heads; equal ones in block order.

    `estimates`: [G, N] log masses; `captured`: [G] log mass that the shares are relative to as well.
    """
    shares = []
    for head in range(estimates.shape[0]):
        top = max(estimates[head].max().item(), captured[head].item())
        total = math.exp(captured[head].item() - top) + sum(
            math.exp(x - top) for x in estimates[head].tolist()
        )
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
    *,
    true,
    estimated,
    captured,
    bounds,
    count,
    floor=0,
    policy="threshold",
    rule="estimate",
    threshold=0.9,
    window=16,
    group_stop="mean",
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
    """Numbers of blocks at which the stop rule is checked.

    A round has as many multiples of `first` as fit into `growth` - 1 times what has been read: at least one, and at most
    `largest` blocks.
    """
    bounds = []
    while not bounds or bounds[-1] < limit:
        done = bounds[-1] if bounds else 0
        multiples = max(1, min(math.floor(done * (growth - 1)) // first, largest // first))
        bounds.append(min(limit, done + multiples * first))
    return bounds


def sparse_step(
    query,
    keys,
    values,
    estimates,
    *,
    block_size,
    unit_blocks=1,
    sink_blocks=1,
    recent_blocks=1,
    policy="threshold",
    rule="estimate",
    threshold=0.85,
    window=16,
    group_stop="mean",
    min_blocks=0,
    max_blocks=None,
    top_k=None,
    top_p=0.9,
    min_context=0,
    round_blocks=8,
    round_growth=1.25,
    longest=None,
    softcap=0.0,
    sinks=None,
    estimates_masses=True,
) -> dict:
    """One decode step of one KV head of one row, its newest token included in `keys` [T, D] and `values` [T, Dv].

    Args:
        query: [G, D] scaled. estimates: [G, n] estimated log masses of the blocks that have a digest.
        estimates_masses: the digest's estimates are masses (token-level digests), not only a ranking.
        longest: tokens of the longest row of the batch, which sets how many blocks are ranked at most.

    Returns:
        output [G, Dv], mass [G] (without sinks), coverage [G] by the estimates, true [G] by all tokens, and read, the
        number of blocks read.
    """
    length = keys.shape[0]
    total = -(-length // block_size)
    newest = (length - 1) // block_size
    # A unit is ranked from the token after the one that closes it.
    whole = (length - 1) // (block_size * unit_blocks) * unit_blocks
    tail = max(min(whole, newest - recent_blocks), sink_blocks)
    block = torch.arange(length) // block_size
    always = (block < sink_blocks) | (block >= tail)
    forced = len(block[always].unique())
    candidates = list(range(sink_blocks, tail))
    true = block_masses(query, keys, block_size, softcap).exp()
    _, forced_mass = attention(query, keys, values, always, softcap)
    captured = forced_mass.exp() if sinks is None else forced_mass.exp() + sinks.double().exp()
    guess = estimates[:, sink_blocks:tail].double()
    ranked = [sink_blocks + i for i in rank(guess, forced_mass)] if candidates else []
    estimated = [[math.exp(row[n - sink_blocks]) for n in ranked] for row in guess.tolist()]
    count = len(candidates)
    floor = (math.ceil(min_blocks * total) if isinstance(min_blocks, float) else min_blocks) - forced
    if policy == "top_k":
        wanted = math.ceil(top_k * total) if isinstance(top_k, float) else top_k
        count = min(count, max(0, wanted - forced))
    if max_blocks is not None:
        most = math.ceil(max_blocks * total) if isinstance(max_blocks, float) else max_blocks
        count = min(count, max(0, most - forced))
    if length < min_context:
        count = floor = len(candidates)
    done = 0
    if candidates:
        bounds = round_bounds(
            max(len(candidates), (longest or length) // block_size), round_blocks, round_growth
        )
        done = blocks_read(
            true=true[:, ranked].tolist(),
            estimated=estimated,
            captured=captured.tolist(),
            bounds=bounds,
            count=count,
            floor=min(floor, count),
            policy=policy,
            rule=rule,
            threshold=top_p if policy == "top_p" else threshold,
            window=window,
            group_stop=group_stop,
        )
    keep = always | torch.isin(block, torch.tensor(ranked[:done], dtype=torch.int64))
    output, _ = attention(query, keys, values, keep, softcap, sinks)
    _, mass = attention(query, keys, values, keep, softcap)
    got = mass.exp() if sinks is None else mass.exp() + sinks.double().exp()
    everything = true.sum(-1) if sinks is None else true.sum(-1) + sinks.double().exp()
    left = (
        torch.tensor([sum(row[done:]) for row in estimated], dtype=torch.float64)
        if candidates
        else torch.zeros_like(got)
    )
    if not estimates_masses and candidates:
        # The digest only ranks: coverage is what the stop rule sees, which has nothing to go by before the first block.
        seen_by = "window" if rule == "estimate" else rule
        left = torch.tensor(
            [
                mass_left(seen_by, row, None, done, window) if done else math.inf
                for row in true[:, ranked].tolist()
            ],
            dtype=torch.float64,
        )
    return {
        "output": output,
        "mass": mass,
        "coverage": got / (got + left),
        "true": got / everything,
        "read": forced + done,
    }
