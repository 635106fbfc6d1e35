"""The rule by which a selection is kept for several tokens, once more in plain Python, beside a layer that follows it."""
from __future__ import annotations

import dataclasses
import math

import torch

from hf_sparse import PSAConfig
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.state import CacheState

HEADS, GROUP, DIM = 2, 3, 16


@dataclasses.dataclass
class Kept:
    """What one row and KV head should have kept."""

    chosen: tuple
    start: int
    age: int
    left: torch.Tensor                                      # [G] float64
    coverage: float
    fallen: bool = False


class Reader:
    """A layer with some tokens, decoded token by token; `check` compares each step with the rule."""

    def __init__(self, tokens: int, pads=(0, ), kernels: bool = False, seed: int = 0, sinks=None, dtype=torch.float32,
                 wander: float = 1.0, **settings):
        self.config = PSAConfig(**{"min_context": 0, "block_size": 8, "policy": "top_k", "top_k": 8, "digest": "pages",
                                   "logical_size": 2, **settings})
        self.generator = torch.Generator().manual_seed(seed)
        self.layer = PSALayer(CacheState(self.config, layers=1), 0, 0)
        self.kernels, self.sinks, self.dtype, self.wander = kernels, sinks, dtype, wander
        rows = len(pads)
        keys, values = self.draw(rows, HEADS, tokens), self.draw(rows, HEADS, tokens)
        valid = torch.arange(tokens) >= torch.tensor(pads)[:, None]
        self.layer.lazy_initialization(keys, values)
        self.layer.group = GROUP
        self.layer.commit(Pending(keys, values, 0), None if valid.all() else valid)
        self.layer.digests.observe(self.draw(rows, HEADS * GROUP, tokens), HEADS, valid)
        if not kernels:
            self.layer.state.kernels = lambda device, dtype: False
        self.query = self.draw(rows, HEADS * GROUP, 1)
        self.kept: dict[tuple[int, int], Kept] = {}
        self.fresh: list[list[bool]] = []                   # of each step, by row and head
        self.early = 0                                      # selections given up because their coverage had fallen

    def draw(self, rows, heads, tokens) -> torch.Tensor:
        return torch.randn(rows, heads, tokens, DIM, generator=self.generator).to(self.dtype)

    def forget(self) -> None:
        self.kept = {}

    def take_rows(self, index) -> None:
        self.query = self.query[index]
        self.forget()

    def step(self) -> torch.Tensor:
        """One token, [B, H * G, Dv]; queries wander, so that a selection is good for some time."""
        layer = self.layer
        rows = layer.batch
        self.query = math.sqrt(1 - self.wander**2) * self.query + self.wander * self.draw(rows, HEADS * GROUP, 1)
        pending = Pending(self.draw(rows, HEADS, 1), self.draw(rows, HEADS, 1), layer.length)
        self.asked = (self.query * 2.5).to(self.dtype)
        output = layer.attend(self.asked, pending, None, None, DIM**-0.5, 0.0, self.sinks, None)
        return output.squeeze(2)

    def observed(self, row: int, head: int) -> tuple[tuple, bool]:
        """The list that the layer keeps, and whether it is this token's own selection."""
        kept = self.layer.kept
        if not self.kernels:
            return tuple(kept._order[row, head, :kept._read[row, head]].tolist()), bool(kept._age[row, head] == 1)
        planned = int(kept.state[row, head, 2])
        info = self.layer.state.static._work(self.layer).info[row, head]
        return tuple(kept.ranked[row, head, :planned].tolist()), bool(info[7])

    def _room(self, blocks: int, forced: int) -> int:
        """How many ranked blocks the budget has room for."""
        given = (self.config.bounds[1], self.config.top_k if self.config.policy == "top_k" else None)
        return max(0, min([blocks if limit is None else math.ceil(limit * blocks) if isinstance(limit, float) else limit
                           for limit in given]) - forced)

    def check(self, steps: int, tolerance: float = 1e-5) -> None:
        """Steps that select anew exactly when they should, and attend to the kept and to the always-read blocks."""
        layer, P = self.layer, self.config.block_size
        for _ in range(steps):
            output = self.step()
            lengths, starts = layer.lengths.tolist(), layer.tail_start(layer.lengths).tolist()
            keys, values = (part.double() for part in layer._compact())
            query = self.asked.squeeze(2).unflatten(1, (HEADS, GROUP)).double() * DIM**-0.5
            units = (layer.length - 1) // (P * layer.digests.unit_blocks)
            estimate = layer.digests.score(query.float(), units, 0.0).double()
            self.fresh.append([])
            for row in range(layer.batch):
                for head in range(HEADS):
                    self._check_head(row, head, lengths[row], starts[row], query[row, head], keys[row, head],
                                     values[row, head], estimate[row, head], output[row].unflatten(0, (HEADS, GROUP))[head],
                                     tolerance)

    def _check_head(self, row, head, length, start, query, keys, values, estimate, output, tolerance) -> None:
        config, P, sink = self.config, self.config.block_size, self.config.sink_blocks
        old = self.kept.get((row, head))
        due = old is None or old.age == config.reuse or old.start != start or old.fallen
        chosen, fresh = self.observed(row, head)
        assert fresh == due, (row, head, length, old)
        self.fresh[-1].append(fresh)
        if self.kernels and bool(self.layer.state.static._work(self.layer).info[row, head, 5]):
            # The kernels have read on, beyond what they keep: it lasts no longer.
            assert due
            self.kept[row, head] = Kept((), start, 1, torch.zeros(GROUP), 0.0, fallen=True)
            return
        self.early += old is not None and old.fallen and bool(old.chosen)
        block = torch.arange(keys.shape[0]) // P
        token = torch.arange(keys.shape[0]) < length
        forced = ((block < sink) | (block >= start)) & token
        if due:
            assert all(sink <= n < start for n in chosen)
        else:
            assert chosen == old.chosen
            chosen = chosen[:self._room(-(-length // P), -(-length // P) - start + sink)]
        logits = query @ keys.T
        seen = forced | torch.isin(block, torch.tensor(sorted(chosen), dtype=torch.long)) & token
        mass = lambda kept: logits.masked_fill(~kept, -math.inf).logsumexp(-1)  # noqa: E731
        weights = torch.softmax(logits.masked_fill(~seen, -math.inf), -1)
        captured = mass(seen)
        if self.sinks is not None:
            extra = self.sinks.double().view(HEADS, GROUP)[head]
            captured = torch.logaddexp(captured, extra)
            weights = weights * torch.exp(mass(seen) - captured)[:, None]
        torch.testing.assert_close(output.double(), weights @ values, rtol=10 * tolerance, atol=tolerance)
        if due:
            unread = [n for n in range(sink, start) if n not in chosen]
            left = estimate[:, unread].logsumexp(-1) if unread else torch.full((GROUP, ), -math.inf).double()
            if not self.layer.digests.digest.token_level and chosen:
                promised = estimate[:, sorted(chosen)].logsumexp(-1)
                left = left + mass(seen & ~forced) - promised
            old = Kept(chosen, start, 0, left, 0.0)
        coverage = torch.exp(captured - torch.logaddexp(captured, old.left))
        now = float(coverage.min() if config.group_stop == "min" else coverage.mean())
        first = now if due else old.coverage
        self.kept[row, head] = dataclasses.replace(old, age=old.age + 1, coverage=first,
                                                   fallen=now < first - config.reuse_refresh)
