"""key_bits: every key of a block at 1 to 4 bits a channel, a minimum and a scale per channel and block."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Layout, TokenDigest, coded_logits, offset_logits
from .bitplanes import affine_codes, affine_range, pack_planes, to_fp16, unpack_planes


class KeyBitsDigest(TokenDigest):
    """key ~ minimum + scale * code; the mass of a block is the sum of exp over its tokens' estimated logits.

    Two bits and more span the block's range, nothing is clipped: a token's key is off by at most half a
    scale, or half a float16 step of the stored minimum where that is coarser. One bit has two levels,
    mean -+ mean |key - mean|.

    Unit tensors:
        "planes": uint8 [bits, ceil(P / 8), D], plane b holds bit b of the codes (plane 0 the lowest), bit i
            of byte j is token j + i * ceil(P / 8).
        "minimum", "scale": float16 [D].
    9.4 % of K and V at 2 bits and P = 32 (16-bit K and V).

    Args:
        bits: 1, 2, 3 or 4.

    Raises:
        ValueError: for another number of bits.
    """

    name = "key_bits"

    def __init__(self, block_size: int, head_dim: int, *, bits: int = 2):
        super().__init__(block_size, head_dim)
        if isinstance(bits, bool) or bits not in (1, 2, 3, 4):
            raise ValueError(f"key_bits supports 1, 2, 3 or 4 bits, got {bits!r}")
        self.bits = bits
        self.levels = (1 << bits) - 1

    def unit_layout(self, dtype: torch.dtype) -> Layout:
        return {
            "planes": ((self.bits, -(-self.block_size // 8), self.head_dim), torch.uint8),
            "minimum": ((self.head_dim,), torch.float16),
            "scale": ((self.head_dim,), torch.float16),
        }

    def codes(self, unit: dict[str, Tensor]) -> Tensor:
        """The unpacked codes, uint8 [B, H, N, P, D], tokens in order."""
        return unpack_planes(unit["planes"], self.block_size)

    def _encode(self, keys: Tensor, row: dict[str, Tensor], skip: Tensor | None) -> dict[str, Tensor]:
        keys = keys.float()
        if self.bits == 1:
            minimum, scale = self._two_levels(keys, skip)
        else:
            minimum, scale = affine_range(keys, self.levels, skip)
        codes = affine_codes(keys, minimum, scale, self.levels, skip)
        return {"planes": pack_planes(codes, self.bits), "minimum": minimum, "scale": scale}

    @staticmethod
    def _two_levels(keys: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor]:
        if skip is None:
            mean = keys.mean(-2)
            spread = (keys - mean.unsqueeze(-2)).abs().mean(-2)
        else:
            mask = skip.unsqueeze(-1)
            count = (~mask).sum(-2).clamp_min(1)
            mean = keys.masked_fill(mask, 0.0).sum(-2) / count
            spread = (keys - mean.unsqueeze(-2)).abs().masked_fill(mask, 0.0).sum(-2) / count
        return to_fp16(mean - spread), to_fp16(2 * spread)

    def _token_logits(self, query: Tensor, unit: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        return coded_logits(query, self.codes(unit), unit["scale"]) + offset_logits(query, unit["minimum"])
