"""channel_codes, the default: keys at 2 or 4 bits, the more where queries are strong and keys vary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Layout, TokenDigest, check_size, coded_logits, offset_logits
from .bitplanes import affine_codes, affine_range, pack_fields, unpack_fields


class ChannelCodesDigest(TokenDigest):
    """Centred keys with their channels in order of E[q^2] var(k): the first at 4 bits, the rest at 2.

    key ~ centre + minimum + scale * code, the minimum and the scale per channel and per unit of U =
    max(group, P) tokens (whole blocks), nothing clipped. Only complete units can be encoded; the tokens
    after the last complete unit must be attended without an estimate. 8.6 % of K and V at D = 128 (16-bit K
    and V) with the default options.

    Row tensors: "centre", float32 [D]; "order", int16 [D], order[r] is the channel at place r.

    Unit tensors, R4 = ceil(D * high_fraction) and R2 = D - R4 - floor(D * drop_fraction) channels in that
    order ("high" or "low" is absent if it has no channels):
        "high": uint8 [U / 2, R4], byte j holds token j in bits 0-3 and token j + U / 2 in bits 4-7.
        "low": uint8 [U / 4, R2], byte j holds tokens j, j + U / 4, j + U / 2, j + 3 U / 4, two bits each
            from bit 0.
        "minimum", "scale": float16 [R4 + R2], of the centred keys.

    Args:
        group: tokens that share a minimum and a scale; rounded down to whole blocks, at least one block.
        high_fraction: share of the channels at 4 bits, in [0, 1].
        drop_fraction: share of the channels left out, the last in order. Without a rotation of the channels
            this loses single-token spikes; it is here for experiments.

    Raises:
        ValueError: if the unit is not a multiple of 4 tokens, or the fractions leave no channels or overlap.
    """

    name = "channel_codes"
    needs_calibration = True

    def __init__(
        self,
        block_size: int,
        head_dim: int,
        *,
        group: int = 128,
        high_fraction: float = 0.25,
        drop_fraction: float = 0.0,
    ):
        super().__init__(block_size, head_dim)
        self.group = check_size("group", group)
        self.unit_blocks = max(1, group // block_size)
        if self.unit_tokens % 4:
            raise ValueError(
                f"channel_codes packs 4 tokens to a byte: {self.unit_blocks} blocks of {block_size} tokens "
                f"are not a multiple of 4; use a block_size of 16, 32 or 64"
            )
        for label, fraction in (("high_fraction", high_fraction), ("drop_fraction", drop_fraction)):
            if not 0.0 <= fraction <= 1.0:
                raise ValueError(f"{label} must be in [0, 1], got {fraction!r}")
        # The tolerance keeps a fraction like 0.1 of 30 channels at 3.
        self.high_channels = math.ceil(head_dim * high_fraction - 1e-9)
        self.low_channels = head_dim - self.high_channels - math.floor(head_dim * drop_fraction + 1e-9)
        if self.low_channels < 0 or self.high_channels + self.low_channels == 0:
            raise ValueError(
                f"high_fraction {high_fraction} and drop_fraction {drop_fraction} must leave channels and "
                f"not overlap"
            )
        self.channels = self.high_channels + self.low_channels
        # (tensor name, bits, first channel in order, end)
        parts = (("high", 4, 0, self.high_channels), ("low", 2, self.high_channels, self.channels))
        self.parts = tuple(part for part in parts if part[3] > part[2])

    def unit_layout(self, dtype: torch.dtype) -> Layout:
        layout: Layout = {
            name: ((self.unit_tokens * bits // 8, end - start), torch.uint8)
            for name, bits, start, end in self.parts
        }
        layout["minimum"] = ((self.channels,), torch.float16)
        layout["scale"] = ((self.channels,), torch.float16)
        return layout

    def row_layout(self) -> Layout:
        return {"centre": ((self.head_dim,), torch.float32), "order": ((self.head_dim,), torch.int16)}

    def calibrate(self, key_mean: Tensor, key_var: Tensor, query_sq: Tensor) -> dict[str, Tensor]:
        """Centre and channel order of each (row, KV head); ties keep the order of the channels.

        Args:
            key_mean, key_var, query_sq: float32 [B, H, D], see `Digest.calibrate`.

        Returns:
            {"centre": float32 [B, H, D], "order": int16 [B, H, D]}.
        """
        weight = (query_sq.float() * key_var.float()).nan_to_num()
        order = weight.sort(dim=-1, descending=True, stable=True).indices
        return {"centre": key_mean.float(), "order": order.to(torch.int16)}

    def codes(self, unit: dict[str, Tensor]) -> dict[str, Tensor]:
        """The unpacked codes, uint8: "high" [B, H, N, U, R4] and "low" [B, H, N, U, R2], tokens in order."""
        return {name: unpack_fields(unit[name], bits) for name, bits, _, _ in self.parts}

    def _in_order(self, x: Tensor, order: Tensor) -> Tensor:
        """Channels of x [B, H, ..., D] in order [B, H, D], the dropped ones left out."""
        index = order[..., : self.channels].long()
        index = index.reshape(*index.shape[:2], *([1] * (x.dim() - 3)), self.channels)
        return x.gather(-1, index.expand(*x.shape[:-1], self.channels))

    def _encode(self, keys: Tensor, row: dict[str, Tensor], skip: Tensor | None) -> dict[str, Tensor]:
        centre = self._in_order(row["centre"], row["order"])
        keys = self._in_order(keys, row["order"]).float() - centre[:, :, None, None]
        out, minima, scales = {}, [], []
        for name, bits, start, end in self.parts:
            part, levels = keys[..., start:end], (1 << bits) - 1
            minimum, scale = affine_range(part, levels, skip)
            out[name] = pack_fields(affine_codes(part, minimum, scale, levels, skip), bits)
            minima.append(minimum)
            scales.append(scale)
        return {**out, "minimum": torch.cat(minima, -1), "scale": torch.cat(scales, -1)}

    def _token_logits(self, query: Tensor, unit: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        # The centre is added back over all D channels, so that the estimate is an absolute log mass.
        absolute = (query * row["centre"].unsqueeze(2)).sum(-1)[:, :, None, :, None]
        query = self._in_order(query, row["order"])
        logits = absolute + offset_logits(query, unit["minimum"])
        for (name, _, start, end), codes in zip(self.parts, self.codes(unit).values()):
            logits = logits + coded_logits(query[..., start:end], codes, unit["scale"][..., start:end])
        return logits
