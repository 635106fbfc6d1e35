"""Blocks between the pool and a host tier that kernels reach: many at a time, with no CPU work and no synchronisation.

What decoding fetches goes through `fetch_kernel` (residency.py). These are for prompts, for whole rows, and for the
reference step.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass
class Tuning:
    """Launch parameters. Few programs fill the bus, and leave the processors to the stream beside which blocks are stored."""

    load_programs: int = 64
    store_programs: int = 32
    warps: int = 4
    load_tile: int = 16384          # bytes in flight a program
    store_tile: int = 4096          # elements in flight a program


TUNING = Tuning()


@triton.jit
def _copy_words(target, source, WORDS: tl.constexpr, TILE: tl.constexpr):
    r = tl.arange(0, TILE)
    for low in range(0, WORDS, TILE):
        words = tl.load(source + low + r, mask=low + r < WORDS, other=0, cache_modifier=".cg")
        tl.store(target + low + r, words, mask=low + r < WORDS)


# Numbers of blocks and tokens differ from call to call, and must not compile a kernel each.
@triton.jit(do_not_specialize=["count"])
def load_blocks_kernel(KV, HOST, SLOT_OF, IDS, OUT, count, WORDS: tl.constexpr, TILE: tl.constexpr):
    """OUT [count, WORDS]: the blocks IDS [count], from their slots if they have some."""
    for m in range(tl.program_id(0), count, tl.num_programs(0)):
        block = tl.load(IDS + m)
        slot = tl.load(SLOT_OF + block)
        target = OUT + tl.cast(m, tl.int64) * WORDS
        if slot > 0:
            _copy_words(target, KV + slot * WORDS, WORDS, TILE)
        else:
            _copy_words(target, HOST + block * WORDS, WORDS, TILE)


@triton.jit(do_not_specialize=["count"])
def copy_blocks_kernel(SOURCE, TARGET, FROM, TO, count, WORDS: tl.constexpr, TILE: tl.constexpr):
    """TARGET[TO[m]] = SOURCE[FROM[m]] for all m < count, but those where TO[m] is 0."""
    for m in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(TO + m)
        if row > 0:
            _copy_words(TARGET + row * WORDS, SOURCE + tl.load(FROM + m) * WORDS, WORDS, TILE)


@triton.jit
def _store_half(slot, resident, host, closed, X, source, x_q, first, count,
                P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """The keys, or the values, of one block, from where they are to begin in its slot and in its row of the host tier.

    The block's token t is token first + t of the new ones; those before 0 are in the slot already.
    """
    d = tl.arange(0, DP)
    for low in range(0, P, T):
        t = low + tl.arange(0, T)
        token = first + t
        inside = (t < P)[:, None] & (d < D)[None, :]
        fresh = inside & ((token >= 0) & (token < count))[:, None]
        pick = tl.load(source + token, mask=(t < P) & (token >= 0) & (token < count), other=0)
        new = tl.load(X + pick[:, None] * x_q + d[None, :], mask=fresh, other=0.0).to(slot.dtype.element_ty)
        at = t[:, None] * D + d[None, :]
        if resident > 0:
            tl.store(slot + at, new, mask=fresh)
        if closed:
            old = tl.load(slot + at, mask=inside & (token < 0)[:, None], other=0.0)
            tl.store(host + at, tl.where(fresh, new, old), mask=inside)


@triton.jit(do_not_specialize=["columns", "queries", "touched", "items"])
def store_blocks_kernel(KV, HOST, SLOT_OF, TABLE, START, END, SOURCE, K, V, k_b, k_h, k_q, v_b, v_h, v_q, columns,
                        queries, touched, items, H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                        TD: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, TV: tl.constexpr):
    """See `store_blocks`. An item is one of the `touched` blocks of a row and KV head."""
    E: tl.constexpr = P * (D + DV)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.cast(item, tl.int64) // touched
        b, h = row // H, row % H
        start, end = tl.load(START + b), tl.load(END + b)
        column = start // P + item % touched
        if column * P < end:
            block = tl.load(TABLE + row * columns + column)
            slot = tl.load(SLOT_OF + block)
            closed = (column + 1) * P <= end
            to_slot, to_host, source = KV + slot * E, HOST + block * E, SOURCE + b * queries
            first, count = column * P - start, end - start
            _store_half(to_slot, slot, to_host, closed, K + b * k_b + h * k_h, source, k_q, first, count, P, D, DP, TD)
            _store_half(to_slot + P * D, slot, to_host + P * D, closed, V + b * v_b + h * v_h, source, v_q, first, count,
                        P, DV, DVP, TV)


def load_blocks(kv, host, slot_of, ids) -> torch.Tensor:
    """Contents of blocks wherever they are.

    Args:
        kv: [S, E] slots. host: [C, E], in memory that kernels reach. slot_of: [C] int64, no slot: 0 or less.
        ids: [n] int64.

    Returns:
        [n, E], a copy.
    """
    out = kv.new_empty(ids.shape[0], kv.shape[1])
    if ids.shape[0]:
        with torch.cuda.device_of(kv):
            load_blocks_kernel[(TUNING.load_programs,)](_words(kv), _words(host), slot_of, ids.contiguous(), _words(out),
                                                        ids.shape[0], **_copy_shape(kv))
    return out


def copy_blocks(source, target, rows, to) -> None:
    """target[to[m]] = source[rows[m]], but where to[m] is 0.

    Args:
        source, target: [*, E], one of them the pool and the other the host tier. rows, to: [n] int64 on the pool's
            device, the `to` that are not 0 all different.
    """
    if rows.shape[0]:
        with torch.cuda.device_of(rows):
            copy_blocks_kernel[(TUNING.load_programs,)](_words(source), _words(target), rows.contiguous(), to.contiguous(),
                                                        rows.shape[0], **_copy_shape(source))


def store_blocks(kv, host, slot_of, table, start, end, source, keys, values, block_size: int) -> None:
    """New tokens of a layer into its blocks: into the slot of a block that has one, and into the host tier if it closes.

    Every block touched is its row's own. One that is open has a slot, with the tokens it had before in it.

    Args:
        kv: [S, E] slots, a block's keys [P, D] and then its values [P, Dv]. host: [C, E], in memory that kernels reach.
        slot_of: [C] int64, no slot: 0 or less. table: [B, H, N] int64 block ids.
        start, end: [B] int64, tokens of each row before and after.
        source: [B, Q] int64, column of keys and values that holds the row's j-th new token.
        keys, values: [B, H, Q, D] and [B, H, Q, Dv], any strides and floating type.
    """
    batch, heads, count, key_dim = keys.shape
    value_dim = values.shape[-1]
    touched = (count + block_size - 1) // block_size + 1
    items = batch * heads * touched
    shape = {"H": heads, "P": block_size}
    for dim, names in ((key_dim, ("D", "DP", "TD")), (value_dim, ("DV", "DVP", "TV"))):
        padded = triton.next_power_of_2(dim)
        tokens = min(triton.next_power_of_2(block_size), max(1, TUNING.store_tile // padded))
        shape.update(zip(names, (dim, padded, tokens)))
    table, source = table.contiguous(), source.contiguous()
    keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (keys, values))
    with torch.cuda.device_of(kv):
        store_blocks_kernel[(min(items, TUNING.store_programs),)](
            kv, host, slot_of, table, start, end, source, keys, values, *keys.stride()[:3],
            *values.stride()[:3], table.shape[2], source.shape[1], touched, items, **shape, num_warps=TUNING.warps,
            num_stages=1)


def _words(rows):
    """Rows of elements as rows of the widest integers that fit."""
    size = rows.shape[1] * rows.element_size()
    return rows.view(torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.int8)


def _copy_shape(rows) -> dict:
    words = _words(rows)
    tile = min(triton.next_power_of_2(words.shape[1]), TUNING.load_tile // words.element_size())
    return {"WORDS": words.shape[1], "TILE": tile, "num_warps": TUNING.warps, "num_stages": 1}
