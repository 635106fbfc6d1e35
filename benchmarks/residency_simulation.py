"""How often blocks are found in a pool: recorded reads played through eviction policies, in one pool or one a layer.

Plain Python on block ids, with the rules of `hf_sparse/eviction/`: what is asked is which organisation of a pool holds
more of what is read, not how fast it is.
"""
from __future__ import annotations

import heapq
from collections.abc import Sequence

EVICTIONS = ("lru", "fifo", "decayed")
DECAY = 0.9                                                 # a use's weight after a token


class SimulatedPool:
    """Who has a slot. Pinned blocks are none of its business: `slots` is what is left beside them."""

    def __init__(self, slots: int, eviction: str):
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction={eviction!r} is not known; choose one of {', '.join(EVICTIONS)}.")
        self.slots, self.eviction = slots, eviction
        self.priority: dict[int, float] = {}                # of blocks in the pool
        self.history: dict[int, float] = {}                 # of blocks that were evicted
        # One entry a block in the pool, with a priority that it has had. Priorities only grow, so that the present one
        # need not be known until the entry is the lowest.
        self.heap: list[tuple[float, int]] = []

    def read(self, blocks: Sequence[int], clock: float) -> int:
        """One layer's reads, all different and needed together; `clock` in tokens. Returns how many had a slot."""
        # 0.9^-t instead of 0.9^(now - t): the common factor changes no order. Runs are too short for it to overflow.
        worth = DECAY ** -clock
        missing = []
        for block in blocks:
            if block not in self.priority:
                missing.append(block)
            elif self.eviction == "decayed":
                self.priority[block] += worth
            elif self.eviction == "lru":
                self.priority[block] = clock
        self._evict(len(missing) - (self.slots - len(self.priority)), set(blocks))
        for block in missing[:self.slots - len(self.priority)]:         # what finds no room is read where it is
            value = self.history.get(block, 0.0) + worth if self.eviction == "decayed" else clock
            self.priority[block] = value
            heapq.heappush(self.heap, (value, block))
        return len(blocks) - len(missing)

    def _evict(self, count: int, needed: set) -> None:
        passed_over = []
        while count > 0 and self.heap:
            value, block = heapq.heappop(self.heap)
            present = self.priority[block]
            if block in needed:
                passed_over.append((present, block))
            elif present > value:
                heapq.heappush(self.heap, (present, block))
            else:
                self.history[block] = self.priority.pop(block)
                count -= 1
        for entry in passed_over:
            heapq.heappush(self.heap, entry)


def hit_rate(trace: Sequence[Sequence[Sequence[int]]], slots: int, eviction: str, per_layer: bool = False,
             warmup: int = 0) -> float:
    """Share of reads that find their block in the pool.

    Args:
        trace: trace[token][layer]: ids of the blocks that were read, unique over layers.
        slots: of all pools together. per_layer: every layer has a pool of its own, all equal.
        warmup: tokens that fill the pool and are not counted.
    """
    layers = len(trace[0])
    pools = [SimulatedPool(slots // layers, eviction) for _ in range(layers)] if per_layer \
        else [SimulatedPool(slots, eviction)] * layers
    hits = reads = 0
    for token, steps in enumerate(trace):
        for layer, blocks in enumerate(steps):
            found = pools[layer].read(blocks, token + layer / layers)
            if token >= warmup:
                hits, reads = hits + found, reads + len(blocks)
    return hits / reads if reads else 0.0


def overlap(trace: Sequence[Sequence[Sequence[int]]], warmup: int = 0) -> float:
    """Share of a token's blocks that the token before it read too, mean over layers and counted tokens."""
    shares = [len(set(now) & set(before)) / len(now)
              for token in range(max(warmup, 1), len(trace))
              for now, before in zip(trace[token], trace[token - 1]) if now]
    return sum(shares) / len(shares) if shares else 0.0
