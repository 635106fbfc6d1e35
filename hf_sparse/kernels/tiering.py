"""What the kernels of a tiered pool need beside the pool, and their launches (residency.py, victims.py)."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl

from .residency import FIELDS, POLICIES, fetch_kernel
from .victims import BIN_COUNT, count_victims_kernel, queue_victims_kernel


@dataclass
class Tuning:
    """Launch parameters."""

    fetch_programs: int = 32        # more would take processors from the step, fewer would not fill the bus
    fetch_warps: int = 4
    fetch_tile: int = 16384         # bytes in flight a program
    settle_tile: int = 512          # words in flight of the one warp that copies a closed block to the host
    touched: int = 256              # planned blocks looked up at once, at least the threads of the selection
    victim_programs: int = 64
    victim_warps: int = 4
    count_tile: int = 1024
    queue_tile: int = 64


TUNING = Tuning()


def copy_types(block_bytes: int) -> dict:
    """How a block of so many bytes is copied: constants of `fetch_kernel` and `settle`."""
    words = ((tl.int32, 4), (tl.int16, 2), (tl.int8, 1))
    word, size = next((word, size) for word, size in words if block_bytes % size == 0)
    return {"BYTES": block_bytes, "WORD": word,
            "TILE": min(triton.next_power_of_2(block_bytes // size), TUNING.fetch_tile // size)}


@dataclass(frozen=True)
class Tier:
    """What kernels are compiled for when blocks live in the host tier too."""

    block_bytes: int
    eviction: str
    layers: int                                             # of the pool
    prefetch: bool = False                                  # selections are remembered, to fetch ahead by
    beside: ClassVar[bool] = True                           # attention may start with the fetch, where kernels overlap

    def rank_constants(self, leaving: int) -> dict:
        """Constants of `append`; `leaving`: the most blocks that leave the tail at once."""
        types = copy_types(self.block_bytes)
        return {"TIERED": True, "POLICY": POLICIES[self.eviction], "BYTES": self.block_bytes, "WORD": types["WORD"],
                "COPY": min(types["TILE"], TUNING.settle_tile), "LEAVING": triton.next_power_of_2(leaving)}

    def select_constants(self) -> dict:
        return {"TIERED": True, "POLICY": POLICIES[self.eviction], "TOUCHED": TUNING.touched, "REMEMBER": self.prefetch}

    def start_token(self, desc: torch.Tensor) -> None:
        """Once a token, before its first layer: who is evicted next. desc: int64 [FIELDS] of any layer of the pool."""
        queue_victims(desc, self.eviction)

    def fetch(self, desc: torch.Tensor, ahead: int = 0, **start) -> None:
        """Slots and contents for what the selection has listed; ends the layer step. `start`: how it is launched.

        ahead: 0, or the most blocks to fetch ahead of the step that will read them.
        """
        fetch_kernel[(TUNING.fetch_programs,)](
            desc, **copy_types(self.block_bytes), LAYERS=self.layers, POLICY=POLICIES[self.eviction], AHEAD=ahead,
            **{"OVERLAP": False, **start}, num_warps=TUNING.fetch_warps, num_stages=1)


# Without a host tier.
RESIDENT_RANK = {"TIERED": False, "POLICY": 0, "BYTES": 0, "WORD": tl.int8, "COPY": 1, "LEAVING": 1}
RESIDENT_SELECT = {"TIERED": False, "POLICY": 0, "TOUCHED": 1, "REMEMBER": False}


class TierWork:
    """Buffers of one pool of this many slots: stamps, the miss list and the queue.

    Args:
        slots: of the pool. misses: the most blocks that a layer step may ask for, rows * KV heads * ranked blocks.
        victims: length of the queue, about what a token evicts; when it has run out, a hand goes round the slots.
    """

    def __init__(self, slots: int, misses: int, victims: int, device: torch.device):
        new = lambda size, dtype=torch.int64: torch.zeros(size, dtype=dtype, device=device)  # noqa: E731
        self.use, self.state = new(slots), new(FIELDS)
        self.state[0] = 1                                   # no stamp is of the first tick
        self.misses, self.queue = new(misses), new(victims)
        self.bins = new(2 * TUNING.victim_programs * BIN_COUNT.value, torch.int32)

    def numbers(self, pool) -> list[int]:
        """Fields HOST to VICTIMS of a descriptor, in their order. The host tier is pinned memory."""
        tensors = [pool.host, pool.slot_of, pool.block_in, pool.priority, pool.pinned, pool.history, pool.clock,
                   pool.counters, self.use, self.state, self.misses, self.queue, self.bins]
        return [tensor.data_ptr() for tensor in tensors] + [pool.slots, self.queue.shape[0]]


def queue_victims(desc: torch.Tensor, policy: str) -> None:
    """Once a token, between two fetches: who is evicted next."""
    grid = (TUNING.victim_programs,)
    common = {"POLICY": POLICIES[policy], "num_warps": TUNING.victim_warps, "num_stages": 1}
    count_victims_kernel[grid](desc, T=TUNING.count_tile, **common)
    queue_victims_kernel[grid](desc, T=TUNING.queue_tile, **common)
