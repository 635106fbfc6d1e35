"""Block pools as the kernels see them (the flat tensor lists of kernels/reference/fetch.py), built by hand.

Everything that no kernel may look at is NaN: the scratch slot, free slots, and tokens beyond the end of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Row:
    """One KV head of one row."""

    query: Tensor  # [G, D], scaled
    keys: Tensor  # [T, D]
    values: Tensor  # [T, Dv]


@dataclass
class Problem:
    """Rows of tokens laid out in blocks with shuffled ids. `content` [ids, P * (D + Dv)]; id 0 is scratch."""

    query: Tensor  # [B, H, G, D] fp32, scaled
    keys: list[Tensor]  # a row: [H, T, D]
    values: list[Tensor]  # a row: [H, T, Dv]
    lengths: Tensor  # [B]
    table: Tensor  # [B, H, N]
    content: Tensor
    block_size: int

    @property
    def value_dim(self) -> int:
        return self.values[0].shape[-1]

    def row(self, b: int, h: int) -> Row:
        return Row(self.query[b, h], self.keys[b][h], self.values[b][h])

    def resident(self) -> list[Tensor]:
        """Every block has a slot: ids are slots."""
        return [self.content.clone()]

    def tiered(self, slots: int, resident=(), pinned=()) -> list[Tensor]:
        """A pool of `slots` slots over a host tier that holds every block; `resident` ids are in slots 1, 2, ..."""
        return make_tiers(self.content, slots, resident, pinned)


def make_tiers(content: Tensor, slots: int, resident=(), pinned=()) -> list[Tensor]:
    kv = torch.full((slots, content.shape[1]), math.nan, dtype=content.dtype)
    slot_of = torch.zeros(content.shape[0], dtype=torch.int64)
    block_in = torch.zeros(slots, dtype=torch.int64)
    priority = torch.full((slots,), -math.inf, dtype=torch.float64)
    pins = torch.zeros(slots, dtype=torch.bool)
    pins[0] = True
    for slot, block in enumerate(resident, start=1):
        kv[slot], slot_of[block], block_in[slot], priority[slot] = content[block], slot, block, 0.0
        pins[slot] = block in pinned
    clock, counters = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    history = torch.full((content.shape[0],), -math.inf, dtype=torch.float64)
    return [kv, content.clone(), slot_of, block_in, priority, pins, clock, counters, history]


def make_problem(
    lengths,
    heads=2,
    group=2,
    key_dim=8,
    value_dim=None,
    block_size=4,
    dtype=torch.float32,
    seed=0,
    sharpness=2.5,
) -> Problem:
    """Random rows of the given lengths; logits have a standard deviation of about `sharpness`."""
    value_dim = value_dim or key_dim
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    batch, blocks = len(lengths), -(-max(lengths) // block_size) if lengths else 0
    query = draw(batch, heads, group, key_dim) * sharpness * key_dim**-0.5
    keys = [draw(heads, length, key_dim).to(dtype) for length in lengths]
    values = [draw(heads, length, value_dim).to(dtype) for length in lengths]
    ids = 1 + torch.randperm(batch * heads * blocks, generator=generator)
    table = ids.view(batch, heads, blocks)
    content = torch.full((1 + ids.numel(), block_size * (key_dim + value_dim)), math.nan, dtype=dtype)
    for b, length in enumerate(lengths):
        for h in range(heads):
            for n in range(-(-length // block_size)):
                part = slice(n * block_size, min(length, (n + 1) * block_size))
                write(content[table[b, h, n]], keys[b][h, part], values[b][h, part], block_size)
    return Problem(query, keys, values, torch.tensor(lengths), table, content, block_size)


def write(slot: Tensor, keys: Tensor, values: Tensor, block_size: int, offset: int = 0) -> None:
    """Put tokens into a slot [P * (D + Dv)]: all keys first, then all values."""
    count, key_dim = keys.shape
    value_dim = values.shape[-1]
    cut = block_size * key_dim
    slot[:cut].view(block_size, key_dim)[offset : offset + count] = keys
    slot[cut:].view(block_size, value_dim)[offset : offset + count] = values


def unpack(slot: Tensor, block_size: int, key_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [P, D] and values [P, Dv] of a slot."""
    cut = block_size * key_dim
    return slot[:cut].view(block_size, key_dim), slot[cut:].view(block_size, -1)
