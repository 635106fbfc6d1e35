"""Decayed use count: every use counts 1 and fades by 0.9 a token.

Plain LRU over one pool for all layers collapses when the pool is smaller than a token's working set, because layers
are visited in a cycle; counting uses does not. The count at time t is sum of 0.9^(t - t_use). Comparing counts at the
same t, the common factor 0.9^t drops out, so the sum of 0.9^(-t_use) is kept, as a logarithm that never overflows.
Counts outlive eviction: started anew at each load, all blocks of a pool that is too small would look alike, and it
would do what LRU does.
"""
from __future__ import annotations

import math

import torch

_RATE = -math.log(0.9)


def on_load(priority: torch.Tensor, clock: torch.Tensor) -> torch.Tensor:
    # The use that caused the load is counted by on_use; until then the slot must not look empty.
    return priority.clamp(min=-1e30)


def on_use(priority: torch.Tensor, clock: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(priority, (clock * _RATE).expand_as(priority))
