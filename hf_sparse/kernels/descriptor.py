"""Where a layer's buffers are, as numbers on the device.

A captured CUDA graph replays fixed addresses, but tables, digests and pools grow, and one graph should serve many
caches. So the kernels of the decode step take one small int64 tensor per layer that holds the addresses and strides of
everything else; growing a buffer or changing the cache rewrites these numbers and leaves the graph alone.
"""
from __future__ import annotations

import triton
import triton.language as tl

# Fields of a layer's row. Addresses first, then sizes.
TABLE = tl.constexpr(0)             # int64 [B, H, N] block ids
LENGTHS = tl.constexpr(1)           # int64 [B] tokens stored
KV = tl.constexpr(2)                # [slots, E] the pool
HIGH = tl.constexpr(3)              # uint8 [B, H, units, U/2, R4]; or [B, H, blocks, L, D] maxima of logical pages
LOW = tl.constexpr(4)               # uint8 [B, H, units, U/4, R2]; or their minima
MINIMUM = tl.constexpr(5)           # fp16 [B, H, units, R4 + R2]
SCALE = tl.constexpr(6)             # fp16 [B, H, units, R4 + R2]
CENTRE = tl.constexpr(7)            # fp32 [B, H, D]
ORDER = tl.constexpr(8)             # int16 [B, H, D]
COUNTERS = tl.constexpr(9)          # fp64 [5]: blocks read, blocks held, coverage, steps, selections (cache/stats.py)
ESTIMATE = tl.constexpr(10)         # fp32 [B, H, GP, W] estimated log2 mass of every block
SHARE = tl.constexpr(11)            # fp32 [B, H, W] the group's mean share of every block
RANKED = tl.constexpr(12)           # int64 [B, H, W] blocks planned, then those in reserve
PART = tl.constexpr(13)             # fp32 [B, H, C, GP, DVP] outputs of chunks
PART_MASS = tl.constexpr(14)        # fp32 [B, H, C, GP] their log2 mass
PART_LEFT = tl.constexpr(15)        # fp32 [B, H, C, GP] estimated share that is in the chunk
COLUMNS = tl.constexpr(16)          # N
UNITS = tl.constexpr(17)            # units in the digest buffers
ELEMENTS = tl.constexpr(18)         # E, elements of a slot
WIDTH = tl.constexpr(19)            # W, blocks in the work buffers
CHUNKS = tl.constexpr(20)           # C
CAPTURED = tl.constexpr(21)         # fp32 [B, H, GP] captured log mass of the last step (natural)
# A pool with a host tier (residency.py); the same in the rows of all layers.
HOST = tl.constexpr(22)             # [C, E] every closed block, in host memory that kernels reach
SLOT_OF = tl.constexpr(23)          # int64 [C] slot of a block, 0 if it has none, -1 while it is on the miss list
BLOCK_IN = tl.constexpr(24)         # int64 [S] block in a slot, 0 if it is free
PRIORITY = tl.constexpr(25)         # fp64 [S] eviction priority of what is in a slot, -inf if and only if it is free
PINNED = tl.constexpr(26)           # int8 [S] 1: never evicted
HISTORY = tl.constexpr(27)          # fp64 [C] priority that a block had when it was last evicted
CLOCK = tl.constexpr(28)            # fp64 [1] tokens decoded, with fractions for layers
HITS = tl.constexpr(29)             # int64 [2] hits, misses
USE = tl.constexpr(30)              # int64 [S] tick at which a slot was last used
RESIDENCY = tl.constexpr(31)        # int64 [8] counters and cursors, see residency.py
MISSES = tl.constexpr(32)           # int64 [B * H * W] blocks to fetch
QUEUE = tl.constexpr(33)            # int64 [V] slots in the order of eviction
BINS = tl.constexpr(34)             # int32 [2, programs, bins] work buffer of the kernels that fill the queue
SLOTS = tl.constexpr(35)            # S
VICTIMS = tl.constexpr(36)          # V
HEADS = tl.constexpr(37)            # int32 [H] KV heads of the model that these are, where others stream (kernels/streaming.py)
# With reuse above 1 (reuse.py), where RANKED is the layer's own:
KEPT = tl.constexpr(38)             # int32 [B, H, 8] what is known of the selection that is kept
KEPT_QUERY = tl.constexpr(39)       # [B, H, G, D] the query that it was selected for
EXACT = tl.constexpr(45)            # [B, H, sink + ring, E] exact copies of the always-read blocks, where others are quantised
# With prefetch=True, of the layer's last token (prefetch.py):
PLANNED_BEFORE = tl.constexpr(46)   # int32 [B, H] blocks that it planned to read
FORCED_BEFORE = tl.constexpr(47)    # fp32 [B, H, GP] log2 mass of its always-read blocks
FIELDS = 48


@triton.jit
def address(desc, FIELD: tl.constexpr, TYPE: tl.constexpr):
    """The buffer in a field. Buffers start at multiples of 16 bytes; loads are wide only if the compiler knows."""
    return tl.multiple_of(tl.load(desc + FIELD).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def model_head(desc, h, MAPPED: tl.constexpr):
    """The model's KV head, in queries, new keys and outputs, that is head h of the layer's buffers."""
    if MAPPED:
        return tl.load(address(desc, HEADS, tl.int32) + h).to(tl.int64)
    else:
        return h
