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
    query: torch.Tensor                                     # [G, D] float64
    short: bool = False                                     # more was read than is kept, or the row was read whole


class Reader:
    """A layer with some tokens, decoded token by token; `check` compares each step with the rule."""

    def __init__(self, tokens: int, pads=(0, ), kernels: bool = False, seed: int = 0, sinks=None, dtype=torch.float32,
                 wander: float = 1.0, heads: int = HEADS, group: int = GROUP, dim: int = DIM, **settings):
        self.config = PSAConfig(**{"min_context": 0, "block_size": 8, "policy": "top_k", "top_k": 8, "digest": "pages",
                                   "logical_size": 2, **settings})
        self.generator = torch.Generator().manual_seed(seed)
        self.layer = PSALayer(CacheState(self.config, layers=1), 0, 0)
        self.kernels, self.sinks, self.dtype, self.wander = kernels, sinks, dtype, wander
        self.heads, self.group, self.dim = heads, group, dim
        rows = len(pads)
        keys, values = self.draw(rows, heads, tokens), self.draw(rows, heads, tokens)
        valid = torch.arange(tokens) >= torch.tensor(pads)[:, None]
        self.layer.lazy_initialization(keys, values)
        self.layer.group = group
        self.layer.commit(Pending(keys, values, 0), None if valid.all() else valid)
        self.layer.digests.observe(self.draw(rows, heads * group, tokens), heads, valid)
        if not kernels:
            self.layer.state.kernels = lambda device, dtype: False
        self.query = self.draw(rows, heads * group, 1)
        self.kept: dict[tuple[int, int], Kept] = {}
        self.fresh: list[list[bool]] = []                   # of each step, by row and head
        self.early: list[tuple[int, int, int]] = []         # (step, row, head) given up because a query had turned away

    def draw(self, rows, heads, tokens) -> torch.Tensor:
        return torch.randn(rows, heads, tokens, self.dim, generator=self.generator).to(self.dtype)

    def forget(self) -> None:
        self.kept = {}

    def take_rows(self, index) -> None:
        self.query = self.query[index]
        self.forget()

    def step(self) -> torch.Tensor:
        """One token, [B, H * G, Dv]; queries wander, so that a selection is good for some time."""
        layer = self.layer
        rows = layer.batch
        self.query = math.sqrt(1 - self.wander**2) * self.query + self.wander * self.draw(rows, self.heads * self.group, 1)
        pending = Pending(self.draw(rows, self.heads, 1), self.draw(rows, self.heads, 1), layer.length)
        self.asked = (self.query * 2.5).to(self.dtype)
        output = layer.attend(self.asked, pending, None, None, self.dim**-0.5, 0.0, self.sinks, None)
        return output.squeeze(2)

    def observed(self, row: int, head: int) -> tuple[tuple, bool]:
        """The list that the layer keeps, and whether it is this token's own selection."""
        kept = self.layer.kept
        if not self.kernels:
            return tuple(kept._order[row, head, :kept._read[row, head]].tolist()), bool(kept._age[row, head] == 1)
        _, _, planned, fresh, *_ = kept.state[row, head].tolist()
        return tuple(kept.ranked[row, head, :planned].tolist()), bool(fresh)

    def _room(self, blocks: int, forced: int) -> int:
        """How many ranked blocks the budget has room for."""
        given = (self.config.bounds[1], self.config.top_k if self.config.policy == "top_k" else None)
        return max(0, min([blocks if limit is None else math.ceil(limit * blocks) if isinstance(limit, float) else limit
                           for limit in given]) - forced)

    def check(self, steps: int, tolerance: float = 1e-5) -> None:
        """Steps that select anew exactly when they should, and attend to the kept and to the always-read blocks."""
        layer = self.layer
        for _ in range(steps):
            output = self.step()
            lengths, starts = layer.lengths.tolist(), layer.tail_start(layer.lengths).tolist()
            keys, values = (part.double() for part in layer._compact())
            query = self.asked.squeeze(2).unflatten(1, (self.heads, self.group)).double() * self.dim**-0.5
            self.fresh.append([])
            for row in range(layer.batch):
                for head in range(self.heads):
                    self._check_head(row, head, lengths[row], starts[row], query[row, head], keys[row, head],
                                     values[row, head], output[row].unflatten(0, (self.heads, self.group))[head], tolerance)

    def _turned(self, query, before) -> bool:
        """Whether one of the query heads has turned too far, in plain numbers."""
        for now, then in zip(query.tolist(), before.tolist(), strict=True):
            lengths = math.hypot(*now) * math.hypot(*then)
            if lengths and sum(map(math.prod, zip(now, then, strict=True))) / lengths < self.config.reuse_refresh:
                return self.config.reuse_refresh > 0
        return False

    def _check_head(self, row, head, length, start, query, keys, values, output, tolerance) -> None:
        config, P, sink = self.config, self.config.block_size, self.config.sink_blocks
        old = self.kept.get((row, head))
        late = old is None or old.age == config.reuse or old.start != start or old.short
        due = late or self._turned(query, old.query)
        chosen, fresh = self.observed(row, head)
        assert fresh == due, (row, head, length, old)
        self.fresh[-1].append(fresh)
        if self.kernels and bool(self.layer.state.static._work(self.layer).info[row, head, 5]):
            # The kernels have read on, beyond what they keep: it lasts no longer.
            assert due
            self.kept[row, head] = Kept((), start, 1, query, short=True)
            return
        if due and not late and old.chosen:
            self.early.append((len(self.fresh) - 1, row, head))
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
            extra = self.sinks.double().view(self.heads, self.group)[head]
            captured = torch.logaddexp(captured, extra)
            weights = weights * torch.exp(mass(seen) - captured)[:, None]
        torch.testing.assert_close(output.double(), weights @ values, rtol=10 * tolerance, atol=tolerance)
        old = Kept(chosen, start, 0, query) if due else old
        self.kept[row, head] = dataclasses.replace(old, age=old.age + 1, short=length < config.min_context)


# What one query becomes, along itself and at a right angle, and whether its group selects anew.
TURNS = {"turned": ((0.0, 1.0), True), "back": ((-1.0, 0.0), True), "less": ((0.9, 0.5), False), "longer": ((3.0, 0.0), False),
         "none": ((0.0, 0.0), False)}


def one_query_turns(turn: str, **settings) -> None:
    """A query head of the second KV head turns: its group selects anew at that very token, if it does, and no other head."""
    (along, aside), ends = TURNS[turn]
    reader = Reader(162, reuse=8, wander=0.0, reuse_refresh=0.85, **settings)
    reader.check(2)
    before, other = reader.query[0, reader.group + 1, 0], torch.randn(reader.dim, generator=reader.generator)
    other = other - (other @ before) / (before @ before) * before
    reader.query[0, reader.group + 1, 0] = along * before + aside * other * before.norm() / other.norm()
    reader.check(2)
    others = [False] * (reader.heads - 2)
    assert reader.fresh == [[True] * reader.heads, [False] * reader.heads, [False, ends, *others], [False] * reader.heads]


def a_row_that_was_read_whole(**settings) -> None:
    """A row below `min_context`, in a longer batch, keeps nothing: its list is of more blocks than the budget has."""
    reader = Reader(150, pads=(0, 70), reuse=16, reuse_refresh=0, top_k=6, min_context=84, **settings)
    reader.check(7)
    heads = range(reader.heads)
    assert [[step[reader.heads + head] for head in heads] for step in reader.fresh[:5]] == [[True for _ in heads]] * 4 + [
        [False for _ in heads]]
