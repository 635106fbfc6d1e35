"""The only door to the kernels: custom ops that are opaque to torch.compile, with the PyTorch reference behind them.

Every op takes tensors and plain numbers only. Pools and tables that an op writes are declared as mutated, so a
compiled step keeps the order of layers that share one pool.
"""
from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch
from torch import Tensor
from torch.library import custom_op

from ..digests import get_digest
from .reference import append as _append
from .reference import append_packed as _append_packed
from .reference import attend as _attend
from .reference import forced as _forced
from .reference import prefill as _prefill
from .reference import select as _select


@lru_cache(maxsize=None)
def digest_of(kind: str, block_size: int, head_dim: int, bits: int, logical_size: int = 16):
    """The digest of a kind; `bits` matters to key_bits only, `logical_size` to pages only."""
    options = {"key_bits": {"bits": bits}, "pages": {"logical_size": logical_size}}.get(kind, {})
    return get_digest(kind, block_size, head_dim, **options)


@custom_op("hf_sparse::append", mutates_args=("tiers", "lengths"))
def append(tiers: list[Tensor], table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, valid: Tensor,
           block_size: int, sink_blocks: int, tail_start: Tensor, eviction: str) -> None:
    _append.append(tiers, table, lengths, keys, values, valid, block_size, sink_blocks, tail_start, eviction)


@append.register_fake
def _(tiers, table, lengths, keys, values, valid, block_size, sink_blocks, tail_start, eviction):
    return None


@lru_cache(maxsize=None)
def quantise_of(device: torch.device):
    """The kernel that quantises blocks where it runs, or None."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return None
    try:
        from .quantise import quantise_blocks
        return quantise_blocks
    except Exception:  # noqa: BLE001 - whatever is wrong with Triton, the reference still works
        return None


@custom_op("hf_sparse::append_packed", mutates_args=("tiers", "exact", "lengths"))
def append_packed(tiers: list[Tensor], exact: Tensor, table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor,
                  valid: Tensor, block_size: int, sink_blocks: int, newest_blocks: int, tail_start: Tensor, eviction: str,
                  bits: int) -> None:
    _append_packed.append_packed(tiers, exact, table, lengths, keys, values, valid, block_size, sink_blocks, newest_blocks,
                                 tail_start, eviction, bits, quantise_of(keys.device))


@append_packed.register_fake
def _(tiers, exact, table, lengths, keys, values, valid, block_size, sink_blocks, newest_blocks, tail_start, eviction, bits):
    return None


@custom_op("hf_sparse::encode", mutates_args=("unit",))
def encode(unit: list[Tensor], row: list[Tensor], keys: Tensor, skip: Tensor, target: Tensor, kind: str,
           block_size: int, bits: int, logical_size: int = 16) -> None:
    """Digest units of keys [B, H, J, U, D] into `unit` at units `target` [B, J]."""
    digest = digest_of(kind, block_size, keys.shape[-1], bits, logical_size)
    new = digest.encode(keys, dict(zip(digest.row_layout(), row)), skip)
    for name, store in zip(digest.unit_layout(keys.dtype), unit):
        index = target[:, None].expand(-1, keys.shape[1], -1)
        index = index.reshape(*index.shape, *([1] * (new[name].dim() - 3))).expand_as(new[name])
        store.scatter_(2, index, new[name].to(store.dtype))


@encode.register_fake
def _(unit, row, keys, skip, target, kind, block_size, bits, logical_size=16):
    return None


@custom_op("hf_sparse::score", mutates_args=())
def score(query: Tensor, unit: list[Tensor], row: list[Tensor], kind: str, block_size: int, bits: int,
          softcap: float, dtype: torch.dtype, logical_size: int = 16) -> Tensor:
    """Estimated log mass of every block: query [B, H, G, D] fp32, scaled -> [B, H, G, N] fp32."""
    digest = digest_of(kind, block_size, query.shape[-1], bits, logical_size)
    return digest.score(query, dict(zip(digest.unit_layout(dtype), unit)), dict(zip(digest.row_layout(), row)),
                        softcap)


@score.register_fake
def _(query, unit, row, kind, block_size, bits, softcap, dtype, logical_size=16):
    digest = digest_of(kind, block_size, query.shape[-1], bits, logical_size)
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
           softcap: float, eviction: str, by_rule: bool = False, bits: int = 16, dtype: torch.dtype | None = None,
           kept: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _attend.attend(tiers, query, table, order, rest, candidates, count, floor, output, mass, sinks, bounds,
                          policy, rule, threshold, window, group_min, block_size, value_dim, softcap, eviction,
                          by_rule, bits, dtype, kept)


@attend.register_fake
def _(tiers, query, table, order, rest, candidates, count, floor, output, mass, sinks, bounds, policy, rule,
      threshold, window, group_min, block_size, value_dim, softcap, eviction, by_rule=False, bits=16, dtype=None,
      kept=None):
    B, H, G, _ = query.shape
    return (torch.empty_like(output), torch.empty_like(mass), count.new_empty(B, H), torch.empty_like(mass))


@lru_cache(maxsize=None)
def prefill_of(device: torch.device, head_dim: int):
    """The prefill kernel where it runs, else its reference; `head_dim` is the larger one of keys and values."""
    reason = f"head size {head_dim} is above 256" if head_dim > 256 else None
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 0):
            reason = "compute capability is below 8.0"
    elif device.type != "cpu" or os.environ.get("TRITON_INTERPRET", "0") != "1":
        return _prefill.prefill
    if reason is None:
        try:
            from .prefill_kernel import launch
            return launch
        except Exception as error:  # noqa: BLE001 - whatever is wrong with Triton, the reference still works
            reason = f"the kernel can't be imported ({error})"
    if device.type == "cuda":
        warnings.warn(f"Prompts of layers with streaming heads go through PyTorch, which is slow on a GPU: {reason}.", UserWarning,
                      stacklevel=2)
    return _prefill.prefill


@custom_op("hf_sparse::prefill", mutates_args=("out",))
def prefill(out: Tensor, query: Tensor, keys: Tensor, values: Tensor, heads: Tensor | None, dense: int, sink: int,
            window: int, scaling: float, softcap: float, sinks: Tensor | None) -> None:
    """Attention of the last Q of T tokens into `out` [B, Hq, Q, Dv], for the KV heads `heads` [n] int32 (None: all).

    The first `dense` of them see all keys up to the query, the others see the first `sink` and the last `window`. See
    `streaming_attention` in prefill.py for the rest.
    """
    attend = prefill_of(query.device, max(query.shape[3], values.shape[3]))
    attend(out, query, keys, values, heads, dense, sink, window, scaling, softcap, sinks)


@prefill.register_fake
def _(out, query, keys, values, heads, dense, sink, window, scaling, softcap, sinks):
    return None
