"""The attention of one layer under a policy, for many tokens at once (simulated.py)."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.handle import Pending
from .choosing import Seen, choose
from .estimates import Estimator, LayerKeys, tail_start
from .found import Found
from .policies import Policy
from .reuse import Reuse
from .stored import Stored

# fp32 logits held at a time; results do not depend on it.
LOGIT_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Places:
    """Which blocks there are at each of B tokens: lengths, total and start (first block of the always-read tail) [B]; exists and
    forced bool [B, columns]."""

    lengths: Tensor
    total: Tensor
    start: Tensor
    exists: Tensor
    forced: Tensor


class SimulatedLayer:
    """Attention of one layer under a policy; takes the place of a PSALayer's `attend` in a fork of the cache.

    Args:
        layer: the context's keys, values and digests.
        found: where to say what was read.

    Attributes:
        counted: set before a forward; takes a slice of its rows and says which of their tokens are no padding, as indices into
            the flattened [rows, T].
    """

    def __init__(self, layer: LayerKeys, policy: Policy, index: int, found: Found):
        self.layer, self.policy, self.found, self.index = layer, policy, found, index
        self.dense = policy.reads_all or index in policy.config.dense_layers
        self.estimator = Estimator(policy, layer.keys.shape[-1])
        mine = [head for place, head in policy.config.streaming_heads if place == index]
        self.streaming: Tensor | None = None                # bool [H]
        if mine:
            self.streaming = torch.zeros(layer.keys.shape[1], dtype=torch.bool)
            self.streaming[mine] = True
            self.streaming = self.streaming.to(layer.keys.device)
        self.stored = Stored(policy, layer, self.streaming)
        self.counted: Callable[[int, int], Tensor] | None = None
        self.keys = self.values = None                      # the rows' own tokens, [R, H, A, D]
        self.reuse = Reuse(policy.config) if policy.config.reuse > 1 else None

    def attend(self, query, pending: Pending, valid, mask, scaling: float, softcap: float, sinks, dense_step):
        """See `PSALayer.attend`: query [R, Hq, T, D] -> [R, Hq, T, Dv]."""
        if mask is not None or valid is not None:
            raise NotImplementedError("this model attends to new tokens by a pattern that a simulated answer does not know; "
                                      "measure it with the cache's own step")
        self.keys = pending.keys if self.keys is None else torch.cat([self.keys, pending.keys], 2)
        self.values = pending.values if self.values is None else torch.cat([self.values, pending.values], 2)
        rows, tokens = query.shape[0], query.shape[2]
        size = query.shape[1] * tokens * (self.layer.length + self.keys.shape[2])
        step = max(1, LOGIT_ELEMENTS // size)
        if self.reuse is not None:                          # which knows the rows by their numbers
            step = rows
        parts = [self._attend(query[low:low + step], slice(low, low + step), self.counted(low, min(low + step, rows)), scaling,
                              softcap, sinks) for low in range(0, rows, step)]
        return torch.cat(parts)

    def _attend(self, query, rows: slice, counted, scaling, softcap, sinks):
        config, layer = self.policy.config, self.layer
        P, N0 = config.block_size, layer.length
        new_keys, new_values = self.keys[rows].float(), self.values[rows].float()
        R, Hq, T, D = query.shape
        H, A = new_keys.shape[1:3]
        G, B = Hq // H, R * T
        sinks = None if sinks is None else sinks.float().view(H, G)
        q = query.float().mul(scaling).unflatten(1, (H, G)).permute(0, 3, 1, 2, 4)                       # [R, T, H, G, D]
        columns = -(-(N0 + A) // P)
        places = self._places(N0 + A - T, T, R, columns, q.device)
        logits = torch.full((B, H, G, columns * P), -math.inf, device=q.device)
        logits[..., :N0] = torch.einsum("bhgd,hnd->bhgn", q.flatten(0, 1), self.stored.keys.float())
        own = torch.einsum("rthgd,rhad->rthga", q, new_keys)
        place = torch.arange(A - T, A, device=q.device)
        logits[..., N0:N0 + A] = own.flatten(0, 1)
        mending = None
        if config.kv_bits < 16:
            exact = places.forced[:, None].expand(-1, H, -1)
            exact = exact if self.streaming is None else exact | self.streaming[:, None]
            tail = tail_start(N0 + A - T, config, self.estimator.unit_blocks)
            mending = self.stored.mend_logits(logits, q, exact, new_keys, new_values, tail)
        if softcap:
            logits[..., :N0 + A] = softcap * torch.tanh(logits[..., :N0 + A] / softcap)
        ahead = torch.arange(A, device=q.device) > place[:, None]                                       # [T, A]
        logits[..., N0:N0 + A].masked_fill_(ahead.repeat(R, 1)[:, None, None], -math.inf)

        masses = logits.unflatten(-1, (columns, P)).logsumexp(-1)
        everything = masses.logsumexp(-1)
        coverage = None
        if self.dense:
            chosen, scanned = places.exists[:, None].expand(-1, H, -1), torch.zeros(B, H, dtype=torch.long, device=q.device)
        else:
            chosen, coverage, scanned = self._choose(q, masses, places, softcap, sinks, new_keys)
        read = chosen.sum(-1)
        whole, packed = self.stored.block_bytes()
        kv_bytes = read * packed + (chosen & places.forced[:, None]).sum(-1) * (whole - packed)
        captured = torch.where(chosen[:, :, None], masses, -math.inf).logsumexp(-1)
        if self.streaming is not None:
            near = self._near(places.lengths, columns * P)
            logits.masked_fill_(~near[:, None, None] & self.streaming[:, None, None], -math.inf)
            chosen = chosen | self.streaming[:, None]
            captured = torch.where(self.streaming[:, None], logits.logsumexp(-1), captured)
            tokens = near.sum(-1, keepdim=True)
            read = torch.where(self.streaming, tokens / P, read)
            kv_bytes = torch.where(self.streaming, tokens * (whole // P), kv_bytes)
            scanned = scanned.masked_fill(self.streaming, 0)
            if coverage is not None:
                coverage = coverage.masked_fill(self.streaming[:, None], 1.0)
        self._record(counted, read, places.total, captured, everything, coverage, sinks, scanned, kv_bytes)

        weights = logits.unflatten(-1, (columns, P)).masked_fill_(~chosen[:, :, None, :, None], -math.inf).flatten(-2)
        weights = weights.sub_(captured[..., None]).exp_()
        output = torch.einsum("bhgn,hnd->bhgd", weights[..., :N0], self.stored.values.float()).unflatten(0, (R, T))
        output += torch.einsum("rthga,rhad->rthgd", weights[..., N0:N0 + A].unflatten(0, (R, T)), new_values)
        if mending is not None:
            output += mending.output(weights, R)
        if sinks is not None:
            output = output * torch.sigmoid(captured - sinks)[..., None].unflatten(0, (R, T))
        return output.permute(0, 2, 3, 1, 4).flatten(1, 2).to(query.dtype)

    def _places(self, first: int, tokens: int, rows: int, columns: int, device) -> Places:
        """Of `tokens` tokens from place `first` on, of all rows."""
        config, P, ub = self.policy.config, self.policy.config.block_size, self.estimator.unit_blocks
        last = torch.arange(first, first + tokens, device=device).repeat(rows)
        start = torch.minimum(last // (P * ub) * ub, last // P - config.recent_blocks).clamp(min=config.sink_blocks)
        block = torch.arange(columns, device=device)
        exists = block <= (last // P)[:, None]
        forced = exists & ((block < config.sink_blocks) | (block >= start[:, None]))
        return Places(last + 1, last // P + 1, start, exists, forced)

    def _near(self, lengths: Tensor, columns: int) -> Tensor:
        """Tokens that a streaming head reads, bool [B, columns]."""
        place, config = torch.arange(columns, device=lengths.device), self.policy.config
        near = (place < config.streaming_sink) | (place >= lengths[:, None] - config.streaming_window)
        return near & (place < lengths[:, None])

    def _choose(self, q, masses, places: Places, softcap, sinks, new_keys):
        """Blocks that are attended to [B, H, N], estimated coverage [B, H, G], tokens whose digests were read [B, H]."""
        estimator, forced, H = self.estimator, places.forced, masses.shape[1]
        forced_mass = torch.where(forced[:, None, None], masses, -math.inf).logsumexp(-1)
        estimate = estimator.score(q, self.layer, new_keys, masses, softcap)
        ranked = estimate.shape[-1]
        scanned = ((places.lengths - 1) // estimator.unit_tokens * estimator.unit_tokens)[:, None].expand(-1, H)
        if ranked == 0:
            return forced[:, None].expand(-1, H, -1), torch.ones_like(forced_mass), torch.zeros_like(scanned)
        seen = Seen(estimate, masses[..., :ranked], forced_mass, sinks, places.lengths, places.start, forced.sum(1), places.total)
        chosen, coverage = choose(self.policy, seen)
        if self.reuse is not None:
            chosen, fresh = self.reuse(chosen, places.start, q)
            scanned = scanned * fresh
        chosen = torch.nn.functional.pad(chosen, (0, masses.shape[-1] - ranked))
        return chosen | forced[:, None], coverage, scanned

    def _record(self, counted, read, total, captured, everything, coverage, sinks, scanned, kv_bytes) -> None:
        if sinks is not None:
            captured, everything = torch.logaddexp(captured, sinks), torch.logaddexp(everything, sinks)
        found = self.found
        mass = torch.exp(captured - everything).clamp(max=1.0)
        coverage = torch.ones_like(mass) if coverage is None else coverage
        figures = read, total, mass, coverage, scanned, kv_bytes
        found.record(self.index, *(part.index_select(0, counted) for part in figures))
        found.digest_bytes, found.block_size = self.estimator.bytes_per_token(), self.policy.config.block_size
        found.dense_bytes = self.stored.block_bytes()[0] / found.block_size
