"""The decode step of one layer on the GPU: five kernels, no value of which the CPU ever sees."""
from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..selection.cut import OCTAVES, PLAN, STEPS
from .attend import attend_kernel, merge_kernel
from .descriptor import FIELDS
from .extend import extend_kernel
from .rank import rank_kernel
from .reference.exact_blocks import SLACK_BLOCKS
from .score import HEADS
from .select import select_kernel
from .tiering import RESIDENT_RANK, RESIDENT_SELECT, Tier

LOG2E = 1.4426950408889634
NO_LIMIT = 2**30
PIECE = 32                                                  # tokens of the always-read blocks for one program
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# Triton decides when a kernel is defined whether it is compiled or interpreted, on the CPU (TRITON_INTERPRET=1).
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class DecodeShape:
    """Sizes that kernels are compiled for. Blocks of P tokens; a digest unit is UB blocks."""

    batch: int
    heads: int
    group: int
    key_dim: int
    value_dim: int
    block_size: int
    unit_blocks: int
    high: int
    low: int
    dtype: torch.dtype
    kv_bits: int = 16                                       # of closed blocks
    pages: int = 0                                          # logical pages of a block, where those are ranked by
    model_heads: int | None = None                          # KV heads of the model, if some of them are not here

    @property
    def group_pad(self) -> int:
        return triton.next_power_of_2(self.group)


@dataclass(frozen=True)
class DecodePolicy:
    """When to stop, as plain numbers."""

    threshold: float
    never: bool
    by_estimate: bool
    group_min: bool
    max_blocks: int
    min_blocks: int
    floor_share: float
    top_share: float
    top_least: int
    min_context: int
    sink_blocks: int
    recent_blocks: int
    reuse: int = 1                                          # tokens that share a selection
    reuse_refresh: float = 0.0                              # cosine of queries below which they don't

    def tail_blocks(self, unit_blocks: int) -> int:
        """Most blocks that the always-read tail can have."""
        return max(self.recent_blocks + 1, unit_blocks)

    def newest_blocks(self, unit_blocks: int) -> int:
        """Blocks that exact copies of the tail take turns in, where closed blocks are quantised."""
        return self.tail_blocks(unit_blocks) + SLACK_BLOCKS

    def pieces(self, block_size: int, unit_blocks: int) -> int:
        """Programs that share the always-read blocks of a row and KV head."""
        return -(-(self.sink_blocks + self.tail_blocks(unit_blocks)) * block_size // max(block_size, PIECE))


class DecodeWork:
    """Buffers of fixed size that the layers of a step use one after the other."""

    def __init__(self, shape: DecodeShape, policy: DecodePolicy, device: torch.device):
        B, H, GP = shape.batch, shape.heads, shape.group_pad
        value_pad = triton.next_power_of_2(shape.value_dim)
        self.shape, self.policy, self.device = shape, policy, device
        new = lambda *size, dtype=torch.float32: torch.zeros(*size, dtype=dtype, device=device)  # noqa: E731
        pieces = policy.pieces(shape.block_size, shape.unit_blocks)
        self.forced, self.forced_mass = new(B, H, pieces, GP, value_pad), new(B, H, pieces, GP)
        self.total, self.info = new(B, H, GP), new(B, H, 8, dtype=torch.int32)
        self.mass = new(B, H, GP)
        self.width = 0
        self.reserve(1)

    def reserve(self, blocks: int) -> bool:
        """Room for rows of `blocks` blocks; True if addresses changed."""
        if blocks <= self.width:
            return False
        shape = self.shape
        B, H, GP = shape.batch, shape.heads, shape.group_pad
        width = -(-blocks // 256) * 256
        short = -(-self.policy.min_context // shape.block_size)     # rows that are read whole
        planned = min(width, max(self.policy.max_blocks, short))
        chunks = max(-(-planned // reading(B * H, shape).chunk_blocks), TUNING.extend_programs)
        value_pad = triton.next_power_of_2(shape.value_dim)
        new = lambda *size, dtype=torch.float32: torch.zeros(*size, dtype=dtype, device=self.device)  # noqa: E731
        self.estimate, self.share = new(B, H, GP, width), new(B, H, width)
        self.ranked = new(B, H, width, dtype=torch.int64)
        self.part, self.part_mass = new(B, H, chunks, GP, value_pad), new(B, H, chunks, GP)
        self.part_left = new(B, H, chunks, GP)
        self.width, self.chunks = width, chunks
        return True


@dataclass(frozen=True)
class Reading:
    """Launch parameters of the attention to planned blocks."""

    chunk_blocks: int                                       # blocks of a chunk, which one program reads
    tile: int                                               # tokens at once; quantised blocks are read one at a time
    warps: int
    waves: int                                              # programs for each processor


@dataclass
class Tuning:
    """Launch parameters, by measurement (benchmarks/kernels.py --sweep)."""

    score_waves: int = 12           # programs of the ranking for each processor
    rank_registers: int | None = 168
    page_tile: int = 16             # logical pages ranked at once
    select_tile: int = 4096
    select_warps: int = 8
    reading: Reading = Reading(chunk_blocks=4, tile=128, warps=4, waves=3)          # few rows: all loads of a chunk at once
    reading_many: Reading = Reading(chunk_blocks=2, tile=32, warps=2, waves=12)     # from MANY_ROWS on: small programs
    reading_packed: Reading = Reading(chunk_blocks=2, tile=32, warps=1, waves=16)           # of quantised blocks
    reading_packed_many: Reading = Reading(chunk_blocks=4, tile=32, warps=1, waves=8)
    merge_tile: int = 32            # chunks merged at once
    merge_warps: int = 4
    extend_programs: int = 32       # of a row and KV head, at most
    extend_tile: int = 1024         # short rows are those that read on most often
    extend_warps: int = 8
    overlap: bool = True            # kernels of the chain start before the one before them has ended


TUNING = Tuning()
MANY_ROWS = 32                                              # rows times KV heads


def reading(rows: int, shape: DecodeShape) -> Reading:
    many = rows >= MANY_ROWS
    if shape.kv_bits == 16:
        return TUNING.reading_many if many else TUNING.reading
    return TUNING.reading_packed_many if many else TUNING.reading_packed


def launching(device: torch.device) -> tuple[int, dict]:
    """The device's processors, and the constants of launches that may start before the one before them has ended."""
    if INTERPRETED:
        return 3, dict(OVERLAP=False)
    overlap = TUNING.overlap and torch.cuda.get_device_capability(device) >= (9, 0)
    return (torch.cuda.get_device_properties(device).multi_processor_count,
            dict(OVERLAP=overlap, **({"launch_pdl": True} if overlap else {})))


def _heads(shape: DecodeShape) -> dict:
    return dict(H=shape.heads, G=shape.group, GP=shape.group_pad, MAPPED=shape.model_heads is not None, D=shape.key_dim,
                DP=triton.next_power_of_2(shape.key_dim), P=shape.block_size, UB=shape.unit_blocks, TYPE=TYPES[shape.dtype])


def _search(tile: int) -> dict:
    return dict(TILE=64 if INTERPRETED else tile, OCTAVES=OCTAVES, STEPS=STEPS)


def ranking(work: DecodeWork, processors: int, waves: int, pieces: int, softcap: float, start: dict) -> tuple[tuple, dict]:
    """Grid and constants of a launch that ranks blocks, with `pieces` programs a row and KV head for something else."""
    shape, registers = work.shape, TUNING.rank_registers
    rows, tiles = shape.batch * shape.heads, 1 if shape.pages else -(-shape.group // HEADS.value)
    stripes = 2 if INTERPRETED else max(1, max(1, processors * waves // rows) // tiles - pieces)
    constants = dict(**_heads(shape), R4=shape.high, R2=shape.low, PAGES=shape.pages,
                     TB=max(1, TUNING.page_tile // max(shape.pages, 1)), PTX=not INTERPRETED, CAP=softcap > 0,
                     OVERLAP=start["OVERLAP"], num_warps=1, num_stages=1)
    if registers and not INTERPRETED:
        constants["maxnreg"] = registers
    return (rows, pieces + stripes, tiles), constants


def selection(work: DecodeWork, start: dict) -> dict:
    """Constants of a launch that selects blocks."""
    policy = work.policy
    return dict(**_heads(work.shape), SINK=policy.sink_blocks, RECENT=policy.recent_blocks, LARGEST=policy.group_min,
                **_search(TUNING.select_tile), **start, num_warps=TUNING.select_warps, num_stages=1)


def decode_layer(desc: torch.Tensor, work: DecodeWork, query: torch.Tensor, key: torch.Tensor,
                 value: torch.Tensor, sinks: torch.Tensor | None, scaling: float, softcap: float,
                 tier: Tier | None = None, first: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """Store one token of every row, and attend.

    Args:
        desc: int64 [FIELDS], see `descriptor`. query [B, Hq, 1, D], key [B, H, 1, D], value [B, H, 1, Dv].
        tier: of a pool with a host tier. first: this layer is the first of the token in its pool.
        out: [B, 1, Hq, Dv] to write to, of which the layer's heads are a part; None: they are all.

    Returns:
        [B, 1, Hq, Dv]
    """
    shape, policy = work.shape, work.policy
    B, H, G, GP = shape.batch, shape.heads, shape.group, shape.group_pad
    D, DV, P, UB = shape.key_dim, shape.value_dim, shape.block_size, shape.unit_blocks
    DP, DVP = triton.next_power_of_2(D), triton.next_power_of_2(DV)
    on_gpu, tune = not INTERPRETED, TUNING
    common, heads = dict(H=H, G=G, GP=GP), dict(MAPPED=shape.model_heads is not None)
    whole = dict(**heads, HM=shape.model_heads or H)
    cap, log2_scale = softcap > 0, scaling * LOG2E
    rows = B * H
    how = reading(rows, shape)
    CB = how.chunk_blocks
    processors, start = launching(work.device)
    overlap = start["OVERLAP"]
    per_row = lambda waves: max(1, processors * waves // rows)  # noqa: E731

    tiered = dict(TIERED=tier is not None)
    if tier is not None and first:
        tier.start_token(desc)
    pieces = policy.pieces(P, UB)
    grid, ranked = ranking(work, processors, tune.score_waves, pieces, softcap, start)
    rank_kernel[grid](
        desc, query, key, value, work.forced, work.forced_mass, query.stride(0), query.stride(1), key.stride(0),
        key.stride(1), value.stride(0), value.stride(1), log2_scale, softcap, policy.reuse_refresh, **ranked, DV=DV, DVP=DVP,
        SINK=policy.sink_blocks, RECENT=policy.recent_blocks, TAIL=policy.tail_blocks(UB), REUSE=policy.reuse, PIECES=pieces,
        FT=max(P, PIECE), TT=16, KV_BITS=shape.kv_bits, NEWEST=policy.newest_blocks(UB),
        **(RESIDENT_RANK if tier is None else tier.rank_constants(policy.tail_blocks(UB))))
    need = policy.threshold if policy.by_estimate else policy.threshold + PLAN * (1.0 - policy.threshold)
    select_kernel[(rows,)](
        desc, query, work.forced_mass, work.total, work.info, query.stride(0), query.stride(1), need, policy.max_blocks,
        policy.min_blocks, policy.min_context, policy.floor_share, policy.top_share, policy.top_least, **selection(work, start),
        PIECES=pieces, FP=triton.next_power_of_2(pieces), NEVER=policy.never, AHEAD=False, REUSE=policy.reuse,
        **(RESIDENT_SELECT if tier is None else tier.select_constants()))
    if tier is not None:
        tier.fetch(desc, **start)

    if out is None:
        out = torch.empty(B, 1, H * G, DV, dtype=query.dtype, device=query.device)
    sinks_given = sinks is not None
    sinks = sinks if sinks_given else work.total
    verify = not (policy.never or policy.by_estimate)
    read = dict(**common, D=D, DP=DP, DV=DV, DVP=DVP, P=P, TYPE=TYPES[shape.dtype], CAP=cap, KV_BITS=shape.kv_bits,
                PTX=on_gpu, **tiered, **start)
    attend_kernel[(rows, per_row(how.waves))](
        desc, query, work.total, work.info, query.stride(0), query.stride(1), log2_scale, softcap, **read, **heads, CB=CB,
        TT=max(P, min(how.tile, CB * P, 16384 // DP)), BESIDE=overlap and tier is not None and tier.beside,
        THREADS=32 * how.warps, num_warps=how.warps, num_stages=1)
    merge_kernel[(rows, G)](
        desc, work.forced, work.forced_mass, work.total, work.info, work.mass, sinks, out, policy.threshold, **common, **whole,
        DV=DV, DVP=DVP, CB=CB, CT=tune.merge_tile, TYPE=TYPES[shape.dtype], SINKS=sinks_given, VERIFY=verify,
        GROUP_MIN=policy.group_min, PIECES=pieces, FP=triton.next_power_of_2(pieces), BOXES=shape.pages > 0,
        REUSE=policy.reuse, **start, num_warps=tune.merge_warps, num_stages=1)
    if verify:
        programs = min(per_row(1), tune.extend_programs) if on_gpu else 3
        extend_kernel[(rows, programs)](
            desc, query, work.info, work.mass, sinks, out, query.stride(0), query.stride(1), log2_scale, softcap,
            policy.threshold, **read, **whole, TT=max(P, min(64, 8192 // DP), 16), SINKS=sinks_given,
            GROUP_MIN=policy.group_min, SINK=policy.sink_blocks, PROGRAMS=programs, PP=triton.next_power_of_2(programs),
            **_search(tune.extend_tile), num_warps=tune.extend_warps, num_stages=1)
    return out


__all__ = ["FIELDS", "DecodePolicy", "DecodeShape", "DecodeWork", "decode_layer"]
