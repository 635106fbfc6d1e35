"""centroid: the mean key of a block (the baseline digest of ArkVale, NeurIPS 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import BlockDigest, Layout


class CentroidDigest(BlockDigest):
    """Score q . mean(K) + log P: never above the true log mass (Jensen), up to the rounding of the mean.

    Unit tensor: "mean", [D] in the model's dtype; zeros for a block of skipped tokens. 1.6 % of K and V at
    P = 32.
    """

    name = "centroid"

    def unit_layout(self, dtype: torch.dtype) -> Layout:
        return {"mean": ((self.head_dim,), dtype)}

    def _encode(self, keys: Tensor, row: dict[str, Tensor], skip: Tensor | None) -> dict[str, Tensor]:
        keys = keys.float()
        if skip is None:
            return {"mean": keys.mean(-2)}
        mask = skip.unsqueeze(-1)
        return {"mean": keys.masked_fill(mask, 0.0).sum(-2) / (~mask).sum(-2).clamp_min(1)}

    def _block_logit(self, query: Tensor, unit: dict[str, Tensor]) -> Tensor:
        return (query * unit["mean"].float().unsqueeze(2)).sum(-1)
