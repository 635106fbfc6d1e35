"""Prefill kernel: causal attention of many queries, with dense and streaming heads in one launch.

A program is a tile of queries of one query head. Which tiles of keys it goes through follows from its head:

    sinks        window                          keys of the program's queries, in tiles
    [0  0] . . . [#  0  0  0  0  #]              0: seen by all queries, no mask;  #: an edge, masked;  .: not visited

A dense head is one whose window is the whole row. Tiles without a mask come first, in one loop, then the edges in another.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .online_softmax import softcap_log2

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """Launch parameters. `descriptors`: whole tiles of keys and values come by TMA."""

    queries: int
    keys: int
    warps: int
    stages: int
    descriptors: bool = False


# By the larger head dim, padded to a power of two, up to which they hold.
HOPPER_TILES = {64: Tile(128, 64, 4, 3), 128: Tile(64, 64, 4, 3, True), 256: Tile(128, 64, 8, 2, True)}  # 200 KiB of shared memory
LARGE_TILES = {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)}     # 160 KiB
SMALL_TILES = {64: Tile(128, 64, 4, 2), 128: Tile(128, 32, 8, 2), 256: Tile(64, 16, 4, 2)}      # 99 KiB
FLOAT_TILES = {64: Tile(32, 32, 4, 2), 128: Tile(32, 16, 4, 2), 256: Tile(32, 16, 4, 1)}        # fp32
HOPPER_MEMORY, LARGE_MEMORY = 200 * 1024, 160 * 1024


@triton.jit
def tile_number(i, count_1, from_1, count_2, from_2, from_3):
    """The i-th of three runs of tiles: count_1 from number `from_1` on, count_2 from `from_2` on, the rest from `from_3` on."""
    i_2, i_3 = i - count_1, i - count_1 - count_2
    return tl.where(i_2 < 0, from_1 + i, tl.where(i_3 < 0, from_2 + i_2, from_3 + i_3))


@triton.jit
def attend_tiles(acc, top, weight, q, K, V, KD, VD, b, h, t, count, count_1, from_1, count_2, from_2, from_3, end,
                 k_t, v_t, scale, softcap, sink, window, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
                 N: tl.constexpr, CAP: tl.constexpr, EDGE: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Online softmax over `count` tiles (`tile_number` says which). EDGE: a mask, and no key from `end` on is read.

    acc [M, DVP] is relative to 2^top [M], as weight [M] is; t [M] the queries' positions.
    """
    rn, rd, rv = tl.arange(0, N), tl.arange(0, DP), tl.arange(0, DVP)
    k_tile, v_tile = K + rn[:, None] * k_t + rd[None, :], V + rn[:, None] * v_t + rv[None, :]
    for i in range(0, count):
        low = tile_number(i, count_1, from_1, count_2, from_2, from_3) * N
        j = low + rn
        if DESCRIPTORS and not EDGE:
            k = tl.reshape(KD.load([b, h, low, 0]), [N, DP])
            v = tl.reshape(VD.load([b, h, low, 0]), [N, DVP])
        else:
            k_at, v_at = k_tile + tl.cast(low, tl.int64) * k_t, v_tile + tl.cast(low, tl.int64) * v_t
            if EDGE:
                k = tl.load(k_at, mask=(j < end)[:, None] & (rd < D)[None, :], other=0.0)
                v = tl.load(v_at, mask=(j < end)[:, None] & (rv < DV)[None, :], other=0.0)
            else:
                k = tl.load(k_at) if D == DP else tl.load(k_at, mask=(rd < D)[None, :], other=0.0)
                v = tl.load(v_at) if DV == DVP else tl.load(v_at, mask=(rv < DV)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP:
            s = softcap_log2(s * scale, softcap)
        if EDGE:
            seen = (j[None, :] <= t[:, None]) & ((j < sink)[None, :] | (j[None, :] > t[:, None] - window))
            s = tl.where(seen, s, float("-inf"))
        # Scaled after the maximum, which makes one instruction of scaling and subtracting.
        factor = 1.0 if CAP else scale
        peak = tl.maximum(top, tl.max(s, 1) * factor)
        base = tl.where(peak == float("-inf"), 0.0, peak) if EDGE else peak
        p = tl.exp2(s * factor - base[:, None])
        fade = tl.exp2(top - base)
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = peak
    return acc, top, weight


# Lengths differ from call to call, and must not compile a kernel each.
@triton.jit(do_not_specialize=["queries", "tokens", "sink", "window", "listed", "dense"])
def prefill_kernel(OUT, Q, K, V, KD, VD, HEADS, SINKS, o_b, o_h, o_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
                   queries, tokens, sink, window, listed, dense, scale, softcap, G: tl.constexpr, D: tl.constexpr,
                   DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                   CAP: tl.constexpr, HAS_HEADS: tl.constexpr, HAS_SINKS: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Programs (tile of queries, listed KV head, query head of its group; row), the last queries first: they take longest.

    See `launch`. KD, VD: tensor descriptors of K and V, else unused.
    """
    pid, b = tl.program_id(0), tl.program_id(1)
    tile = (queries + M - 1) // M - 1 - pid // (listed * G)
    place = pid // G % listed
    h = place
    if HAS_HEADS:
        h = tl.load(HEADS + place)
    own = h * G + pid % G
    sink = tl.where(place < dense, 0, sink)
    window = tl.where(place < dense, tokens, window)

    rm, rd, rv = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, DVP)
    past = tokens - queries
    first = past + tile * M                                 # position of the tile's first query, and behind its last one
    last = tl.minimum(first + M, tokens)
    t = first + rm
    wide_b, wide_h, wide_own = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(own, tl.int64)
    wide_t = (t - past).to(tl.int64)
    q = tl.load(Q + wide_b * q_b + wide_own * q_h + wide_t[:, None] * q_t + rd[None, :],
                mask=(t < last)[:, None] & (rd < D)[None, :], other=0.0)
    keys, values = K + wide_b * k_b + wide_h * k_h, V + wide_b * v_b + wide_h * v_h

    # In tiles: the window of the first query begins in `edge`, that of the last in the one before `inner`; all queries see
    # everything from `inner` to before `diagonal`. A window that begins within the sinks has no edge.
    begin = tl.maximum(last - window, 0)
    edge = tl.maximum(first - window + 1, 0) // N
    stop = (last + N - 1) // N
    inner = tl.where(begin > sink, tl.minimum((begin + N - 1) // N, stop), edge)
    diagonal = tl.maximum((first + 1) // N, inner)
    sinks = tl.minimum(sink // N, edge)
    cut = tl.minimum((sink + N - 1) // N, edge) - sinks     # a tile that the sinks end in
    whole = sinks + diagonal - inner
    masked = cut + inner - edge + stop - diagonal

    acc = tl.zeros([M, DVP], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    acc, top, weight = attend_tiles(acc, top, weight, q, keys, values, KD, VD, b, h, t, whole, sinks, 0, diagonal - inner,
                                    inner, 0, tokens, k_t, v_t, scale, softcap, sink, window, D, DP, DV, DVP, N, CAP, False,
                                    DESCRIPTORS)
    acc, top, weight = attend_tiles(acc, top, weight, q, keys, values, KD, VD, b, h, t, masked, cut, sinks, inner - edge, edge,
                                    diagonal, tokens, k_t, v_t, scale, softcap, sink, window, D, DP, DV, DVP, N, CAP, True,
                                    DESCRIPTORS)
    if HAS_SINKS:
        logit = tl.load(SINKS + own).to(tl.float32) * 1.4426950408889634
        weight += tl.exp2(logit - top)
    seen = t < last
    out = tl.where(seen[:, None], acc / tl.where(seen, weight, 1.0)[:, None], 0.0)
    tl.store(OUT + wide_b * o_b + wide_own * o_h + wide_t[:, None] * o_t + rv[None, :], out.to(OUT.dtype.element_ty),
             mask=(t < tokens)[:, None] & (rv < DV)[None, :])


def launch(out, query, keys, values, heads, dense: int, sink: int, window: int, scaling: float, softcap: float, sinks,
           tile: Tile | None = None) -> None:
    """`ops.prefill`, which says what the arguments are, as a kernel. `tile`: launch parameters, for measurements."""
    batch, query_heads, queries, key_dim = query.shape
    tokens, value_dim = values.shape[2:]
    group = query_heads // keys.shape[1]
    listed = keys.shape[1] if heads is None else heads.shape[0]
    if not batch * listed * queries:
        return
    DP, DVP = max(16, triton.next_power_of_2(key_dim)), max(16, triton.next_power_of_2(value_dim))
    tile = tile or tile_for(max(DP, DVP), query.dtype, query.device)
    query, keys, values = (_with_last_contiguous(part) for part in (query, keys, values))
    heads, sinks = (part if part is None else part.contiguous() for part in (heads, sinks))
    descriptors = tile.descriptors and _describable(keys) and _describable(values)
    described = [keys, values]
    if descriptors:
        described = [_describe(part, [1, 1, tile.keys, padded]) for part, padded in ((keys, DP), (values, DVP))]
    M = min(tile.queries, max(16, triton.next_power_of_2(queries)))
    # No more than a row has: what is beyond 32 bits is another type.
    sink, window = min(sink, tokens), min(window, tokens)
    with torch.cuda.device_of(query):
        prefill_kernel[(triton.cdiv(queries, M) * listed * group, batch)](
            out, query, keys, values, *described, heads, sinks, *out.stride()[:3], *query.stride()[:3],
            *keys.stride()[:3], *values.stride()[:3], queries, tokens, sink, window, listed, dense, scaling * LOG2E, softcap,
            G=group, D=key_dim, DP=DP, DV=value_dim, DVP=DVP, M=M, N=tile.keys, CAP=softcap > 0, HAS_HEADS=heads is not None,
            HAS_SINKS=sinks is not None, DESCRIPTORS=descriptors,
            num_warps=tile.warps if M > 64 else 4, num_stages=tile.stages)


def tile_for(width: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Launch parameters for the larger head dim, padded to a power of two. Beyond 256 there is none.

    Raises:
        NotImplementedError: a wider head.
    """
    if width > 256:
        raise NotImplementedError(f"the prefill kernel has head dims up to 256, not {width}")
    tiles = FLOAT_TILES
    if dtype != torch.float32:
        cuda = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if cuda else HOPPER_MEMORY
        hopper = memory >= HOPPER_MEMORY and (not cuda or torch.cuda.get_device_capability(device) >= (9, 0))
        tiles = HOPPER_TILES if hopper else LARGE_TILES if memory >= LARGE_MEMORY else SMALL_TILES
    return tiles[max(width, 64)]


def _with_last_contiguous(x):
    # Within a tile offsets have 32 bits.
    return x if x.stride(3) == 1 and x.stride(2) < 2**22 else x.contiguous()


def _describable(x) -> bool:
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:3])


def _describe(x, block: list[int]):
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, block)
