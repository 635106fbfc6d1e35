"""Low-bit codes of keys: affine quantisation over the tokens of a unit, and how codes are packed into bytes.

Codes are packed along tokens, never along channels, so that one shift and mask over a byte row yields a run
of consecutive tokens for every channel at once, and a byte tile with channels innermost loads contiguously.
Tensors here end in [..., T, R]: T tokens of a unit, R channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP16_MAX = 65504.0


def to_fp16(x: Tensor) -> Tensor:
    """Round to float16; large values saturate, not overflow (bfloat16 keys may exceed 65504)."""
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)


def affine_range(keys: Tensor, levels: int, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Minimum and step that span every kept key of a unit, per channel, with codes 0..levels.

    Args:
        keys: float32 [..., T, R].
        levels: the largest code, 2**bits - 1.
        skip: bool [..., T], tokens that enter neither the minimum nor the maximum.

    Returns:
        (minimum, scale), both float16 [..., R]; zeros where all tokens are skipped. Nothing is clipped on
        purpose: the outliers of a unit are what a digest has to find (KIVI-like per-channel ranges). The
            scale is measured from the
        minimum as stored, so that rounding the minimum to float16 does not push the maximum out of reach.
    """
    if skip is None:
        low, high = keys.amin(-2), keys.amax(-2)
    else:
        mask = skip.unsqueeze(-1)
        low = keys.masked_fill(mask, float("inf")).amin(-2)
        high = keys.masked_fill(mask, float("-inf")).amax(-2)
        empty = skip.all(-1, keepdim=True)
        low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    minimum = to_fp16(low)
    scale = to_fp16((high - minimum.float()).clamp_min(0.0) / levels)
    return minimum, scale


def affine_codes(
    keys: Tensor, minimum: Tensor, scale: Tensor, levels: int, skip: Tensor | None = None
) -> Tensor:
    """Nearest code (ties to even) of each key: key ~ minimum + scale * code.

    Args:
        keys: float32 [..., T, R].
        minimum, scale: float16 [..., R], from `affine_range`.
        levels: the largest code.
        skip: bool [..., T], tokens whose codes are set to 0 so that what they hold (it may be NaN) is never
            read.

    Returns:
        uint8 [..., T, R]. A scale of 0 (constant channel) gives code 0.
    """
    step = scale.float().unsqueeze(-2)
    step = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((keys - minimum.float().unsqueeze(-2)) / step).round().clamp(0, levels)
    if skip is not None:
        codes = codes.masked_fill(skip.unsqueeze(-1), 0.0)
    return codes.to(torch.uint8)


def pack_fields(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of `bits` (1, 2 or 4) bits, F = 8 // bits to a byte.

    Args:
        codes: uint8 [..., T, R], T a multiple of F.

    Returns:
        uint8 [..., T / F, R]; bits [k * bits, (k + 1) * bits) of byte j hold token j + k * T / F.
    """
    fields = 8 // bits
    parts = codes.unflatten(-2, (fields, codes.shape[-2] // fields))
    packed = parts[..., 0, :, :]
    for k in range(1, fields):
        packed = packed | (parts[..., k, :, :] << (k * bits))
    return packed


def unpack_fields(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_fields`: uint8 [..., T / F, R] -> uint8 [..., T, R], tokens in order."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (k * bits)) & mask for k in range(8 // bits)], dim=-2)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of any width as bit planes, 8 tokens to a byte, so that 3 bits cost 3 bits.

    Args:
        codes: uint8 [..., T, R].

    Returns:
        uint8 [..., bits, S, R] with S = ceil(T / 8). Plane b holds bit b of every code (plane 0 the lowest);
        bit i of byte j holds token j + i * S. Tokens from T to 8 S do not exist, their bits are 0.
    """
    tokens = codes.shape[-2]
    codes = F.pad(codes, (0, 0, 0, -tokens % 8))
    return torch.stack([pack_fields((codes >> b) & 1, 1) for b in range(bits)], dim=-3)


def unpack_planes(planes: Tensor, tokens: int) -> Tensor:
    """Inverse of `pack_planes`: uint8 [..., bits, S, R] -> uint8 [..., tokens, R]."""
    codes = unpack_fields(planes[..., 0, :, :], 1)
    for b in range(1, planes.shape[-3]):
        codes = codes | (unpack_fields(planes[..., b, :, :], 1) << b)
    return codes[..., :tokens, :]
