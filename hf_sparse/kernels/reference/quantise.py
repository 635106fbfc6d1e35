"""Keys and values of closed blocks in 8 or 4 bits: the specification of the packed block, and its arithmetic.

Keys have a range for each channel of a block, since their outliers are whole channels; values have one for each token, since
theirs are not. Both are affine, code 0 at the minimum, and nothing is clipped on purpose.

A packed block, in bytes and in this order:

    key codes       [P * bits / 8, D]  uint8     (P tokens, D and Dv channels of keys and values)
    value codes     [P * bits / 8, Dv] uint8
    key minimum     [D]  float16, of each channel
    key step        [D]  float16
    value minimum   [P]  float16, of each token
    value step      [P]  float16
    zeros up to a multiple of 16 bytes

Two codes of 4 bits share a byte: byte row j holds token j in its low and token j + P / 2 in its high bits, of keys as of values
(`bitplanes.pack_fields`).
"""
from __future__ import annotations

import torch
from torch import Tensor

from ...digests.bitplanes import affine_codes, affine_range, pack_fields, unpack_fields

ALIGNMENT = 16                                              # bytes, of packed blocks
BITS = (8, 4)


def packed_bytes(block_size: int, key_dim: int, value_dim: int, bits: int) -> int:
    """Bytes of a packed block of one KV head.

    Raises:
        ValueError: `bits` other than 8 and 4, or an odd block size.
    """
    if bits not in BITS:
        raise ValueError(f"blocks are quantised to 8 or 4 bits, not {bits}")
    if block_size % 2:
        raise ValueError(f"two tokens share a byte of 4 bits, so block_size must be even, not {block_size}")
    used = block_size * bits // 8 * (key_dim + value_dim) + 4 * (key_dim + block_size)
    return -(-used // ALIGNMENT) * ALIGNMENT


def quantise_blocks(keys: Tensor, values: Tensor, bits: int) -> Tensor:
    """Blocks as bytes.

    Args:
        keys: [..., P, D] of a floating dtype, finite. values: [..., P, Dv]. The arithmetic is that of float32.
        bits: 8 or 4.

    Returns:
        uint8 [..., packed_bytes(P, D, Dv, bits)]. Minima and steps beyond float16 saturate.

    Raises:
        ValueError: see `packed_bytes`.
    """
    block_size, levels = keys.shape[-2], (1 << bits) - 1
    total = packed_bytes(block_size, keys.shape[-1], values.shape[-1], bits)
    keys, values = keys.float(), values.float()
    key_range = affine_range(keys, levels)
    value_range = affine_range(values.mT, levels)           # a token's channels
    key_codes = affine_codes(keys, *key_range, levels)
    value_codes = affine_codes(values.mT, *value_range, levels).mT
    if bits < 8:
        key_codes, value_codes = pack_fields(key_codes, bits), pack_fields(value_codes, bits)
    parts = [key_codes.flatten(-2), value_codes.flatten(-2), *(_as_bytes(part) for part in (*key_range, *value_range))]
    packed = torch.cat(parts, -1)
    return torch.nn.functional.pad(packed, (0, total - packed.shape[-1]))


def dequantise_blocks(packed: Tensor, block_size: int, key_dim: int, value_dim: int, bits: int,
                      dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks from their bytes: minimum + step * code in float32, then rounded to `dtype`.

    Args:
        packed: uint8 [..., packed_bytes(...)].

    Returns:
        (keys [..., P, D], values [..., P, Dv]).

    Raises:
        ValueError: see `packed_bytes`, or `packed` is not of that size.
    """
    P, D, Dv = block_size, key_dim, value_dim
    total = packed_bytes(P, D, Dv, bits)
    if packed.shape[-1] != total:
        raise ValueError(f"a packed block of this shape has {total} bytes, got {packed.shape[-1]}")
    rows = P * bits // 8
    used = (rows * D, rows * Dv, 2 * D, 2 * D, 2 * P, 2 * P)
    parts = packed[..., :sum(used)].split(used, -1)
    key_codes, value_codes = parts[0].unflatten(-1, (rows, D)), parts[1].unflatten(-1, (rows, Dv))
    if bits < 8:
        key_codes, value_codes = unpack_fields(key_codes, bits), unpack_fields(value_codes, bits)
    key_minimum, key_step, value_minimum, value_step = (_as_half(part).float() for part in parts[2:])
    keys = key_minimum[..., None, :] + key_step[..., None, :] * key_codes
    values = value_minimum[..., None] + value_step[..., None] * value_codes
    return keys.to(dtype), values.to(dtype)


def _as_bytes(half: Tensor) -> Tensor:
    return half.contiguous().view(torch.uint8)


def _as_half(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.float16)
