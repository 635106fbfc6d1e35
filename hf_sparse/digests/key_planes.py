"""key_planes: the upper halves of the 4-bit codes that blocks of `kv_bits=4` store their keys as."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Layout, TokenDigest, coded_logits, offset_logits
from .bitplanes import affine_codes, affine_range, pack_fields, unpack_fields

LEVELS = 15  # the largest whole code
SHARED = 4  # codes of one upper half, which stands for their middle


class KeyPlanesDigest(TokenDigest):
    """key ~ minimum + scale * (4 * upper + 1.5), upper = code // 4; the mass of a block is the sum of exp over its tokens'
    estimated logits.

    Codes, minimum and scale are those of a quantised block (`kernels/reference/quantise.py`), so that such a block could
    be ranked by a part of itself. A token's key is off by at most two scales, 2 / 15 of the block's range, also at the ends
    of the range, which no upper half stands for.

    Unit tensors:
        "upper": uint8 [P / 4, D], byte j holds tokens j, j + P / 4, j + P / 2, j + 3 P / 4, two bits each from bit 0.
        "minimum", "scale": float16 [D].
    9.4 % of K and V at P = 32 (16-bit K and V), if they are held beside the block.

    Raises:
        ValueError: if the block is not a multiple of 4 tokens.
    """

    name = "key_planes"

    def __init__(self, block_size: int, head_dim: int):
        super().__init__(block_size, head_dim)
        if block_size % 4:
            raise ValueError(f"key_planes packs 4 tokens to a byte: block_size={block_size} is not a multiple of 4")

    def unit_layout(self, dtype: torch.dtype) -> Layout:
        return {
            "upper": ((self.block_size // 4, self.head_dim), torch.uint8),
            "minimum": ((self.head_dim,), torch.float16),
            "scale": ((self.head_dim,), torch.float16),
        }

    def _encode(self, keys: Tensor, row: dict[str, Tensor], skip: Tensor | None) -> dict[str, Tensor]:
        keys = keys.float()
        minimum, scale = affine_range(keys, LEVELS, skip)
        codes = affine_codes(keys, minimum, scale, LEVELS, skip)
        return {"upper": pack_fields(codes // SHARED, 2), "minimum": minimum, "scale": scale}

    def _token_logits(self, query: Tensor, unit: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        scale = unit["scale"].float()
        middle = unit["minimum"].float() + (SHARED - 1) / 2 * scale
        codes = unpack_fields(unit["upper"], 2)
        return coded_logits(query, codes, SHARED * scale) + offset_logits(query, middle)
