"""The order of eviction, once a token: a queue of slots, those of the lowest priority first, without sorting all.

Two launches over the whole pool. The first counts the slots in each of 512 bins of age, a share of the pool a program;
from these counts every program of the second knows where its slots go. Within a bin, a sixteenth of an octave of age,
the order is that of the slots. Each launch reads 9 bytes a slot.

They run between two launches that take slots (rank and fetch), beside anything else: what is in the
queue is a proposal and is looked at again when its turn comes, so a priority that changes meanwhile costs order only.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .residency import BUILT, CURSOR, DECAYED, QUEUED, RATE, TICK

# Bins of the queue: 16 for each octave of age from 2^-7 up; the first is of free slots, the second of all that is
# older.
BIN_COUNT = tl.constexpr(512)
BIN_SHIFT = tl.constexpr(19)
BIN_LOWEST = tl.constexpr((127 - 7) << 4)


@triton.jit
def _bin(desc, slot, clock, POLICY: tl.constexpr):
    """Bins of slots, in the order of eviction; BIN_COUNT: never, or there is no such slot."""
    live = (slot > 0) & (slot < tl.load(desc + d.SLOTS))
    priority = tl.load(d.address(desc, d.PRIORITY, tl.float64) + slot, mask=live, other=0.0)
    pinned = tl.load(d.address(desc, d.PINNED, tl.int8) + slot, mask=live, other=1)
    # About what a block has that is used all the time; the few above it share the last bin.
    youngest = clock * tl.full([], RATE, tl.float64) + 3.0 if POLICY == DECAYED else clock
    age = tl.maximum((youngest - priority).to(tl.float32), 0.0)
    octaves = (age.to(tl.int32, bitcast=True) >> BIN_SHIFT) - BIN_LOWEST
    place = BIN_COUNT - 1 - tl.minimum(tl.maximum(octaves, 0), BIN_COUNT - 2)
    return tl.where(pinned != 0, BIN_COUNT, tl.where(priority == float("-inf"), 0, place))


@triton.jit
def count_victims_kernel(desc, T: tl.constexpr, POLICY: tl.constexpr):
    """How many slots of each bin there are in this program's share of the pool."""
    slots = tl.load(desc + d.SLOTS)
    share = (slots + tl.num_programs(0) - 1) // tl.num_programs(0)
    clock = tl.load(d.address(desc, d.CLOCK, tl.float64))
    begin = tl.program_id(0) * share
    counts = tl.zeros([BIN_COUNT], tl.int32)
    for low in range(0, share, T):
        r = low + tl.arange(0, T)
        place = _bin(desc, tl.where(r < share, begin + r, 0), clock, POLICY)
        counts += tl.histogram(tl.minimum(place, BIN_COUNT - 1), BIN_COUNT, mask=place < BIN_COUNT)
    tl.store(d.address(desc, d.BINS, tl.int32) + tl.program_id(0) * BIN_COUNT + tl.arange(0, BIN_COUNT), counts)


@triton.jit
def queue_victims_kernel(desc, T: tl.constexpr, POLICY: tl.constexpr):
    """Slots into the queue in the order of their bins, within a bin in their own, whichever program comes first."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    slots, room = tl.load(desc + d.SLOTS), tl.load(desc + d.VICTIMS)
    share = (slots + programs - 1) // programs
    clock = tl.load(d.address(desc, d.CLOCK, tl.float64))
    bins, queue = d.address(desc, d.BINS, tl.int32), d.address(desc, d.QUEUE, tl.int64)
    rb = tl.arange(0, BIN_COUNT)
    total, before = tl.zeros([BIN_COUNT], tl.int32), tl.zeros([BIN_COUNT], tl.int32)
    for other in range(0, programs):
        counts = tl.load(bins + other * BIN_COUNT + rb)
        total += counts
        before += tl.where(other < pid, counts, 0)
    start = tl.cumsum(total, 0) - total
    last = tl.max(tl.where((start < room) & (total > 0), rb, -1), 0)
    place_of = bins + (programs + pid) * BIN_COUNT
    tl.store(place_of + rb, start + before)
    rt = tl.arange(0, T)
    for low in range(0, share, T):
        r = low + rt
        slot = tl.where(r < share, pid * share + r, 0)
        bin = _bin(desc, slot, clock, POLICY)
        inside = bin <= last
        if tl.max(inside.to(tl.int32), 0) > 0:
            same = (bin[:, None] == bin[None, :])
            rank = tl.sum((same & (rt[None, :] < rt[:, None])).to(tl.int32), 1)
            later = tl.sum((same & (rt[None, :] > rt[:, None])).to(tl.int32), 1)
            tl.debug_barrier()
            place = tl.load(place_of + bin, mask=inside, other=0) + rank
            tl.debug_barrier()
            tl.store(place_of + bin, place + 1, mask=inside & (later == 0))
            tl.store(queue + place, slot, mask=inside & (place < room))
    if pid == 0:
        state = d.address(desc, d.RESIDENCY, tl.int64)
        tl.store(state + QUEUED, tl.minimum(tl.sum(total, 0).to(tl.int64), room))
        tl.store(state + CURSOR, 0)
        tl.store(state + BUILT, tl.load(state + TICK))
