"""The only door to the kernels: custom ops that are opaque to torch.compile, with the PyTorch reference behind them.

Every op takes tensors and plain numbers only. Pools and tables that an op writes are declared as mutated, so a
compiled step keeps the order of layers that share one pool.
"""
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.library import custom_op

from ..digests import get_digest
from .reference import append as _append
from .reference import attend as _attend
from .reference import forced as _forced
from .reference import select as _select


@lru_cache(maxsize=None)
def digest_of(kind: str, block_size: int, head_dim: int, bits: int):
    """The digest of a kind; `bits` matters to key_bits only."""
    options = {"bits": bits} if kind == "key_bits" else {}
    return get_digest(kind, block_size, head_dim, **options)


@custom_op("hf_sparse::append", mutates_args=("tiers", "lengths"))
def append(tiers: list[Tensor], table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, valid: Tensor,
           block_size: int, sink_blocks: int, tail_start: Tensor, eviction: str) -> None:
    _append.append(tiers, table, lengths, keys, values, valid, block_size, sink_blocks, tail_start, eviction)


@append.register_fake
def _(tiers, table, lengths, keys, values, valid, block_size, sink_blocks, tail_start, eviction):
    return None


@custom_op("hf_sparse::encode", mutates_args=("unit",))
def encode(unit: list[Tensor], row: list[Tensor], keys: Tensor, skip: Tensor, target: Tensor, kind: str,
           block_size: int, bits: int) -> None:
    """Digest units of keys [B, H, J, U, D] into `unit` at units `target` [B, J]."""
    digest = digest_of(kind, block_size, keys.shape[-1], bits)
    new = digest.encode(keys, dict(zip(digest.row_layout(), row)), skip)
    for name, store in zip(digest.unit_layout(keys.dtype), unit):
        index = target[:, None].expand(-1, keys.shape[1], -1)
        index = index.reshape(*index.shape, *([1] * (new[name].dim() - 3))).expand_as(new[name])
        store.scatter_(2, index, new[name].to(store.dtype))


@encode.register_fake
def _(unit, row, keys, skip, target, kind, block_size, bits):
    return None


@custom_op("hf_sparse::score", mutates_args=())
def score(query: Tensor, unit: list[Tensor], row: list[Tensor], kind: str, block_size: int, bits: int,
          softcap: float, dtype: torch.dtype) -> Tensor:
    """Estimated log mass of every block: query [B, H, G, D] fp32, scaled -> [B, H, G, N] fp32."""
    digest = digest_of(kind, block_size, query.shape[-1], bits)
    return digest.score(query, dict(zip(digest.unit_layout(dtype), unit)), dict(zip(digest.row_layout(), row)),
                        softcap)


@score.register_fake
def _(query, unit, row, kind, block_size, bits, softcap, dtype):
    digest = digest_of(kind, block_size, query.shape[-1], bits)
    return query.new_empty(*query.shape[:3], unit[0].shape[2] * digest.unit_blocks)


@custom_op("hf_sparse::select", mutates_args=())
def select(estimate: Tensor, captured: Tensor, first: int, last: Tensor, limit: int,
           reduction: str) -> tuple[Tensor, Tensor]:
    return _select.select(estimate, captured, first, last, limit, reduction)


@select.register_fake
def _(estimate, captured, first, last, limit, reduction):
    B, H, G, N = estimate.shape
    M = min(limit, N)
    return estimate.new_empty(B, H, M, dtype=torch.int64), estimate.new_empty(B, H, G, M + 1)


@custom_op("hf_sparse::attend_forced", mutates_args=("tiers",))
def attend_forced(tiers: list[Tensor], query: Tensor, table: Tensor, lengths: Tensor, tail_start: Tensor,
                  sink_blocks: int, tail_blocks: int, block_size: int, value_dim: int, softcap: float,
                  eviction: str) -> tuple[Tensor, Tensor, Tensor]:
    return _forced.attend_forced(tiers, query, table, lengths, tail_start, sink_blocks, tail_blocks, block_size,
                                 value_dim, softcap, eviction)


@attend_forced.register_fake
def _(tiers, query, table, lengths, tail_start, sink_blocks, tail_blocks, block_size, value_dim, softcap, eviction):
    B, H, G, _ = query.shape
    return query.new_empty(B, H, G, value_dim), query.new_empty(B, H, G), lengths.new_empty(B)


@custom_op("hf_sparse::attend", mutates_args=("tiers",))
def attend(tiers: list[Tensor], query: Tensor, table: Tensor, order: Tensor, rest: Tensor, candidates: Tensor,
           count: Tensor, floor: Tensor, output: Tensor, mass: Tensor, sinks: Tensor | None, bounds: list[int],
           policy: str, rule: str, threshold: float, window: int, group_min: bool, block_size: int, value_dim: int,
           softcap: float, eviction: str, by_rule: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _attend.attend(tiers, query, table, order, rest, candidates, count, floor, output, mass, sinks, bounds,
                          policy, rule, threshold, window, group_min, block_size, value_dim, softcap, eviction,
                          by_rule)


@attend.register_fake
def _(tiers, query, table, order, rest, candidates, count, floor, output, mass, sinks, bounds, policy, rule,
      threshold, window, group_min, block_size, value_dim, softcap, eviction, by_rule=False):
    B, H, G, _ = query.shape
    return (torch.empty_like(output), torch.empty_like(mass), count.new_empty(B, H), torch.empty_like(mass))
