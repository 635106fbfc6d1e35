"""Blocks in the host tier, on the device: who needs a slot, who loses one, and the copy. Nothing of it reaches the CPU.

A layer's step, each line a launch that sees all of the one before:

    rank        `admit` and `settle`: the block that a token opens gets a slot, the one that it closes goes to the host
    select      its programs call `touch` with what they plan to read: slots are stamped, what has none is listed once
    fetch       a few programs give every listed block a slot and copy it in; the last one to finish ends the step
    attend      reads blocks from their slots; where kernels may overlap it starts with the fetch, and waits for each
                listed block that it comes to (`await_blocks`)

Between the steps of two layers, blocks that the next one is expected to read may be fetched ahead (prefetch.py): a touch and a
fetch that are a layer step of their own, but for what they count.

Beside the ranking, `append` calls `admit` for the slot that its token goes to, and `settle` for what follows from the token.
Once a token, between two fetches, the kernels of `victims.py` put slots in the order of eviction.

**Who may write what.** A slot is claimed by a compare-and-swap on its stamp `use`, which can succeed for one program
of a tick only; from then on all that is known of it belongs to that program. So the queue and the hand only propose
slots: whatever they hold, nothing pinned, needed or already claimed is evicted. Claims pass no data between programs
(all that is read was written by an earlier launch), so that relaxed atomics do, and loads in flight need not be waited
for.

**Branches.** Threads of a program must not disagree on a branch, so a number that another program may change meanwhile
is looked at by an atomic, whose result all threads share, and not by a load.

A block that finds no slot keeps none (`slot_of` 0) and has to be read from the host tier where it is: slow, not wrong.
"""
from __future__ import annotations

import triton
import triton.language as tl

from . import descriptor as d
from .overlap import let_next_start, wait_for_previous

# RESIDENCY, int64: this layer step's number, length of the miss list, next of the queue and its length, tick at which
# it was filled, the hand that goes round when the queue has run out, fetch programs that are done, blocks that got no
# slot, blocks that were fetched ahead.
TICK, MISSED, CURSOR, QUEUED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
BUILT, HAND, ARRIVED, FAILED = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
PREFETCHED = tl.constexpr(8)
FIELDS = 9

TRIES = tl.constexpr(4096)                                  # slots that the hand looks at for one block

# Eviction policies (hf_sparse/eviction) as constants of a kernel.
POLICIES = {"lru": 0, "fifo": 1, "decayed": 2}
LRU, DECAYED = tl.constexpr(0), tl.constexpr(2)
RATE = tl.constexpr(0.10536051565782628)                    # -log(0.9)
STEADY = tl.constexpr(2.1972245773362196)                   # log(0.9 + 0.9^2 + ...): a use at every token before this


@triton.jit
def _on_load(history, clock, POLICY: tl.constexpr):
    return tl.maximum(history, tl.full([], -1e30, tl.float64)) if POLICY == DECAYED else clock


@triton.jit
def _on_use(priority, clock, POLICY: tl.constexpr):
    if POLICY == DECAYED:
        now = clock * tl.full([], RATE, tl.float64)
        high = tl.maximum(priority, now)
        return high + tl.log(1.0 + tl.exp(tl.minimum(priority, now) - high))
    else:
        return clock if POLICY == LRU else priority


@triton.jit
def touch(desc, row, ranked, planned, POLICY: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr = False):
    """Blocks that a row and KV head is about to read: stamp those that have a slot, list the others.

    row: int64 ids of its blocks; ranked: int64 [planned] block numbers, all different, as this program has stored them.
    TILE: at least the program's threads, so that no two of them stand for the same element.
    Hits count for every row; a miss counts once, for the row that lists it.
    AHEAD: the blocks are only expected to be read. They are kept from being evicted, and nothing is counted.
    """
    state = d.address(desc, d.RESIDENCY, tl.int64)
    slot_of, use = d.address(desc, d.SLOT_OF, tl.int64), d.address(desc, d.USE, tl.int64)
    priority, misses = d.address(desc, d.PRIORITY, tl.float64), d.address(desc, d.MISSES, tl.int64)
    counters = d.address(desc, d.HITS, tl.int64)
    tick = tl.load(state + TICK)
    clock = tl.load(d.address(desc, d.CLOCK, tl.float64))
    tl.debug_barrier()                                      # other threads have stored the list
    for low in range(0, planned, TILE):
        r = low + tl.arange(0, TILE)
        n = tl.load(ranked + r, mask=r < planned, other=0)
        block = tl.load(row + n, mask=r < planned, other=0)
        slot = tl.load(slot_of + block, mask=block > 0, other=0)
        hit = slot > 0
        # 0 becomes -1 for one of those who miss it; to the others, and to whoever looks later, it is -1.
        miss = (block > 0) & (slot <= 0)
        # Asked for together, before any of it is looked at: each is a way to memory and back.
        state_before = tl.atomic_min(slot_of + block, tl.full([TILE], -1, tl.int64), mask=miss, sem="relaxed")
        stamp = tl.full([TILE], 0, tl.int64) + tick
        stamp_before = tl.atomic_xchg(use + slot, stamp, mask=hit, sem="relaxed")
        old = tl.load(priority + slot, mask=hit, other=0.0)
        lead = miss & (state_before == 0)
        if not AHEAD:
            # Rows may share blocks. The first to stamp a slot counts the use, for all of them.
            tl.store(priority + slot, _on_use(old, clock, POLICY), mask=hit & (stamp_before != tick))
        leads = tl.sum(lead.to(tl.int64), 0)
        at = tl.atomic_add(state + MISSED, leads, sem="relaxed")
        tl.store(misses + at + tl.cumsum(lead.to(tl.int64), 0) - 1, block, mask=lead)
        if not AHEAD:
            tl.atomic_add(counters, tl.sum(hit.to(tl.int64), 0), sem="relaxed")
            tl.atomic_add(counters + 1, leads, sem="relaxed")


@triton.jit
def touch_kernel(desc, INFO, POLICY: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr = False):
    """`touch` by itself, one program a row and KV head. INFO [B, H, 8] int32: blocks ranked, as select leaves it."""
    pid = tl.program_id(0).to(tl.int64)
    row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
    ranked = d.address(desc, d.RANKED, tl.int64) + pid * tl.load(desc + d.WIDTH)
    touch(desc, row, ranked, tl.load(INFO + pid * 8), POLICY, TILE, AHEAD)


@triton.jit
def _claim(use, pinned, slot, newest, tick):
    """The slot if it was last used at `newest` or before, is not pinned, and no other program has it; else 0."""
    won = tl.full([], 0, tl.int64)
    seen = tl.atomic_add(use + slot, tl.full([], 0, tl.int64), sem="relaxed")
    if seen <= newest:
        if tl.atomic_cas(use + slot, seen, tick, sem="relaxed") == seen:
            # Only now can nobody else be about to pin it.
            if tl.load(pinned + slot) == 0:
                won = slot
            else:
                tl.atomic_xchg(use + slot, seen, sem="relaxed")
    return won


@triton.jit
def _take_queued(desc, state, tick):
    """A slot of the queue that nothing has needed since it was filled, claimed; 0 if there is none."""
    use, pinned = d.address(desc, d.USE, tl.int64), d.address(desc, d.PINNED, tl.int8)
    queue = d.address(desc, d.QUEUE, tl.int64)
    queued = tl.load(state + QUEUED)
    newest = tl.load(state + BUILT) - 1                     # what was used since is not what the queue thinks it is
    one, taken = tl.full([], 1, tl.int64), tl.full([], 0, tl.int64)
    at = tl.atomic_add(state + CURSOR, one, sem="relaxed")
    while (taken == 0) & (at < queued):
        taken = _claim(use, pinned, tl.load(queue + at), newest, tick)
        if taken == 0:
            at = tl.atomic_add(state + CURSOR, one, sem="relaxed")
    return taken


@triton.jit
def _take(desc, state, tick):
    """A slot that nothing needs at this tick, claimed; 0 if there is none."""
    taken = _take_queued(desc, state, tick)
    use, pinned = d.address(desc, d.USE, tl.int64), d.address(desc, d.PINNED, tl.int8)
    others, one = tl.load(desc + d.SLOTS) - 1, tl.full([], 1, tl.int64)
    # One round of the hand, whoever moves it on, passes every slot; what can be claimed is claimed on the way. In a large
    # pool a program gives up sooner: the way to the host is shorter.
    tries = tl.full([], 0, tl.int64)
    while (taken == 0) & (tries < others) & (tries < TRIES):
        slot = 1 + tl.atomic_add(state + HAND, one, sem="relaxed") % others
        taken = _claim(use, pinned, slot, tick - 1, tick)
        tries += 1
    return taken


@triton.jit
def _assign(desc, state, block, slot, USED: tl.constexpr, POLICY: tl.constexpr):
    """Put a block into a slot that this program has claimed, in place of what was there; slot 0: it got none."""
    _make_room(desc, state, block, slot, USED, POLICY)
    tl.store(d.address(desc, d.SLOT_OF, tl.int64) + block, slot)


@triton.jit
def _make_room(desc, state, block, slot, USED: tl.constexpr, POLICY: tl.constexpr):
    """`_assign` but for the last step, which lets others find the block in its slot."""
    slot_of, block_in = d.address(desc, d.SLOT_OF, tl.int64), d.address(desc, d.BLOCK_IN, tl.int64)
    priority, history = d.address(desc, d.PRIORITY, tl.float64), d.address(desc, d.HISTORY, tl.float64)
    clock = tl.load(d.address(desc, d.CLOCK, tl.float64))
    there = slot > 0
    old = tl.load(block_in + slot)
    tl.store(history + old, tl.load(priority + slot), mask=there & (old > 0))
    tl.store(slot_of + old, 0, mask=there & (old > 0))
    new = _on_load(tl.load(history + block), clock, POLICY)
    if USED:
        new = _on_use(new, clock, POLICY)
    tl.store(priority + slot, new, mask=there)
    tl.store(block_in + slot, block, mask=there)
    tl.atomic_add(state + FAILED, (slot == 0).to(tl.int64), sem="relaxed")


@triton.jit
def end_step(desc, state, tick, LAYERS: tl.constexpr, AHEAD: tl.constexpr = False):
    """Called once by every program that gives out slots: the last one to come begins the next layer step.

    AHEAD: what ends was no layer's own step, and the clock stands still.
    """
    tl.debug_barrier()                                      # no thread has yet to read what the last program resets
    if tl.atomic_add(state + ARRIVED, tl.full([], 1, tl.int64), sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(state + ARRIVED, 0)
        tl.store(state + MISSED, 0)
        tl.store(state + TICK, tick + 1)
        if not AHEAD:
            clock = d.address(desc, d.CLOCK, tl.float64)
            tl.store(clock, tl.load(clock) + tl.full([], 1.0, tl.float64) / LAYERS)


@triton.jit
def fetch_kernel(desc, BYTES: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr, LAYERS: tl.constexpr,
                 POLICY: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr):
    """Every block of the miss list into a slot, by a few programs; the last one to finish begins the next layer step.

    BYTES: of a block. WORD: the type it is copied in, int32 where its bytes allow it. TILE: words in flight a program.
    AHEAD: 0, or the most blocks that are fetched ahead. They get slots of the queue only, half of it over all layers, so
    that those that are really read find theirs in the order of eviction; and they count as used when they are.
    The kernel after this one may start once the selection has ended and all programs of this one run, so that whoever
    waits for a listed block keeps no program of this one out. It has to wait for the end of this one before it ends itself.
    """
    WORDS: tl.constexpr = BYTES // (WORD.primitive_bitwidth // 8)
    state = d.address(desc, d.RESIDENCY, tl.int64)
    misses, slot_of = d.address(desc, d.MISSES, tl.int64), d.address(desc, d.SLOT_OF, tl.int64)
    host, kv = d.address(desc, d.HOST, WORD), d.address(desc, d.KV, WORD)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    missed, tick = tl.load(state + MISSED).to(tl.int32), tl.load(state + TICK)
    r = tl.arange(0, TILE)
    wanted = missed
    if AHEAD > 0:
        room = (tl.load(state + QUEUED) // (2 * LAYERS)).to(tl.int32)
        wanted = tl.minimum(missed, tl.minimum(room, AHEAD))
        for m in range(wanted + tl.program_id(0), missed, tl.num_programs(0)):
            tl.store(slot_of + tl.load(misses + m), 0)
        if tl.program_id(0) == 0:
            tl.store(state + PREFETCHED, tl.load(state + PREFETCHED) + wanted)
    for m in range(tl.program_id(0), wanted, tl.num_programs(0)):
        block = tl.load(misses + m)
        source = host + block * WORDS
        # The way to the host is long: look for a slot meanwhile.
        words = tl.load(source + r, mask=r < WORDS, other=0, cache_modifier=".cg")
        if AHEAD > 0:
            slot = _take_queued(desc, state, tick)
        else:
            slot = _take(desc, state, tick)
        _make_room(desc, state, block, slot, AHEAD == 0, POLICY)
        if slot > 0:
            target = kv + slot * WORDS
            tl.store(target + r, words, mask=r < WORDS)
            for low in range(TILE, WORDS, TILE):
                words = tl.load(source + low + r, mask=low + r < WORDS, other=0, cache_modifier=".cg")
                tl.store(target + low + r, words, mask=low + r < WORDS)
        tl.debug_barrier()                                  # all threads have stored their words
        tl.atomic_xchg(slot_of + block, slot, sem="release")
    end_step(desc, state, tick, LAYERS, AHEAD > 0)


@triton.jit
def await_blocks(desc, row, ranked, first, last, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Beside the fetch: until none of entries first.. below `last` of a list, at most COUNT, is on its way.

    THREADS: of the program, so that each stands for one element and none sees another number than its fellows.
    """
    slot_of = d.address(desc, d.SLOT_OF, tl.int64)
    entry = first + tl.arange(0, THREADS) % COUNT
    n = tl.load(ranked + entry, mask=entry < last, other=0)
    block = tl.load(row + n, mask=entry < last, other=0)
    slot = tl.load(slot_of + block, mask=entry < last, other=0, cache_modifier=".cg")
    if tl.min(slot, 0) < 0:
        for i in range(COUNT):
            if first + i < last:
                at = slot_of + tl.load(row + tl.load(ranked + first + i))
                none = tl.full([], 0, tl.int64)
                while tl.atomic_add(at, none, sem="acquire") < 0:
                    pass


@triton.jit
def admit(desc, block, opened, POLICY: tl.constexpr):
    """The slot of the block that a token is written to; it gets one, pinned, if the token opens it.

    Not in a launch in which others trust slots that are not pinned: they may be taken meanwhile.
    """
    slot_of, pinned = d.address(desc, d.SLOT_OF, tl.int64), d.address(desc, d.PINNED, tl.int8)
    slot = tl.load(slot_of + block)
    if opened & (slot <= 0):
        state = d.address(desc, d.RESIDENCY, tl.int64)
        slot = _take(desc, state, tl.load(state + TICK))
        _assign(desc, state, block, slot, False, POLICY)
    tl.store(pinned + slot, 1, mask=opened & (slot > 0))
    return slot


@triton.jit
def admit_kernel(desc, H: tl.constexpr, P: tl.constexpr, POLICY: tl.constexpr):
    """`admit` by itself, one program a row and KV head."""
    pid = tl.program_id(0).to(tl.int64)
    length = tl.load(d.address(desc, d.LENGTHS, tl.int64) + pid // H)
    row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
    admit(desc, tl.load(row + length // P), length % P == 0, POLICY)


@triton.jit
def first_of_tail(length, P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr):
    """First block of the always-read tail in the step that stores the token at `length`."""
    return tl.maximum(tl.minimum(length // (P * UB) * UB, length // P - RECENT), SINK)


@triton.jit
def settle(desc, row, length, P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
           TAIL: tl.constexpr, BYTES: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr, POLICY: tl.constexpr):
    """What follows from the token that this program has just stored at `length` of a row and KV head.

    A block that it closes is copied to the host tier, once; blocks that have left the tail may be evicted from now on.
    TAIL: power of two, at least the blocks that can leave at once. TILE: words in flight.
    """
    slot_of = d.address(desc, d.SLOT_OF, tl.int64)
    if (length + 1) % P == 0:
        WORDS: tl.constexpr = BYTES // (WORD.primitive_bitwidth // 8)
        block = tl.load(row + length // P)
        source = d.address(desc, d.KV, WORD) + tl.load(slot_of + block) * WORDS
        target = d.address(desc, d.HOST, WORD) + block * WORDS
        tl.debug_barrier()                                  # other threads have stored the token
        for low in range(0, WORDS, TILE):
            r = low + tl.arange(0, TILE)
            tl.store(target + r, tl.load(source + r, mask=r < WORDS, other=0), mask=r < WORDS)
    first, last = first_of_tail(length - 1, P, UB, SINK, RECENT), first_of_tail(length, P, UB, SINK, RECENT)
    if first < last:
        column = first + tl.arange(0, TAIL)
        block = tl.load(row + column, mask=column < last, other=0)
        slot = tl.load(slot_of + block, mask=block > 0, other=0)
        tl.store(d.address(desc, d.PINNED, tl.int8) + slot, 0, mask=slot > 0)
        # It was read at every token, which nobody has noted down while it was pinned.
        clock = tl.load(d.address(desc, d.CLOCK, tl.float64))
        priority = d.address(desc, d.PRIORITY, tl.float64) + slot
        if POLICY == DECAYED:
            now = clock * tl.full([], RATE, tl.float64) + tl.full([], STEADY, tl.float64)
            tl.store(priority, now, mask=slot > 0)
        elif POLICY == LRU:
            tl.store(priority, clock - 1.0, mask=slot > 0)


@triton.jit
def settle_kernel(desc, H: tl.constexpr, P: tl.constexpr, UB: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
                  TAIL: tl.constexpr, BYTES: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr,
                  POLICY: tl.constexpr):
    """`settle` by itself, one program a row and KV head."""
    pid = tl.program_id(0).to(tl.int64)
    row = d.address(desc, d.TABLE, tl.int64) + pid * tl.load(desc + d.COLUMNS)
    length = tl.load(d.address(desc, d.LENGTHS, tl.int64) + pid // H)
    settle(desc, row, length, P, UB, SINK, RECENT, TAIL, BYTES, WORD, TILE, POLICY)
