"""Fetching by the copy engine: a kernel gives out slots, and orders copies from the thread of loader.py.

For comparison with `fetch_kernel`, in whose place this is launched. Eager only: the host takes part in the step.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl

from . import descriptor as d
from .loader import BLOCK_BITS, Loader
from .residency import MISSED, POLICIES, TICK, _assign, _take, end_step
from .tiering import Tier

PROGRAMS = 32


@triton.jit
def order_kernel(desc, ORDERS, LAYERS: tl.constexpr, POLICY: tl.constexpr, BITS: tl.constexpr):
    """A slot for every block of the miss list, by a few programs; the last one to finish begins the next layer step.

    ORDERS: int64 in host memory, zero: the stop flag, which is one more than the number of orders, then the orders, a slot
    (0: none) and the block in the BITS low bits. The host may look at them at any time: each is whole or not there.
    """
    state, misses = d.address(desc, d.RESIDENCY, tl.int64), d.address(desc, d.MISSES, tl.int64)
    missed, tick = tl.load(state + MISSED).to(tl.int32), tl.load(state + TICK)
    if tl.program_id(0) == 0:
        tl.store(ORDERS, missed.to(tl.int64) + 1, cache_modifier=".wt")
    for m in range(tl.program_id(0), missed, tl.num_programs(0)):
        block = tl.load(misses + m)
        slot = _take(desc, state, tick)
        _assign(desc, state, block, slot, True, POLICY)
        tl.store(ORDERS + 1 + m, (slot << BITS) | block, cache_modifier=".wt")
    end_step(desc, state, tick, LAYERS)


@dataclass(frozen=True, kw_only=True)
class CopyEngineTier(Tier):
    """A tier whose missing blocks a loader copies.

    kv: [S, E] slots. host: [C, E]. most: blocks that a layer step may miss.
    """

    beside: ClassVar[bool] = False
    loader: Loader
    kv: torch.Tensor
    host: torch.Tensor
    most: int

    def fetch(self, desc: torch.Tensor, **start) -> None:
        """See `Tier.fetch`. Returns when all copies are under way; what is launched next waits for them."""
        order_kernel[(PROGRAMS,)](desc, self.loader.orders(self.most), LAYERS=self.layers, POLICY=POLICIES[self.eviction],
                                  BITS=BLOCK_BITS, num_warps=1, num_stages=1)
        self.loader.follow(self.kv, self.host)
