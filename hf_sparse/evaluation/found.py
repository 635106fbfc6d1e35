"""What a simulated policy read and gathered, token by token, and the figures that follow from it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Found:
    """What the full-attention layers of one policy read and gathered, token by token (those of padding are left out)."""

    def __init__(self):
        self._parts: dict[int, list[tuple]] = {}
        self.digest_bytes = 0.0                             # a token of one KV head, for 16-bit keys
        self.dense_bytes = 0.0                              # of its key and value, likewise
        self.block_size = 0

    def record(self, layer: int, *figures: Tensor) -> None:
        """read [B, H], held [B], mass [B, H, G], coverage [B, H, G], scanned [B, H] and kv_bytes [B, H] of B tokens, see
        `Layer`."""
        self._parts.setdefault(layer, []).append(figures)

    @classmethod
    def joined(cls, found: Sequence[Found]) -> Found:
        """Several of the same policy and model as one."""
        whole = cls()
        whole.__dict__.update({**found[0].__dict__, "_parts": {}})
        for one in found:
            for layer, parts in one._parts.items():
                whole._parts.setdefault(layer, []).extend(parts)
        return whole

    def layers(self) -> list[Layer]:
        """The figures of each layer, in the order of the model's full-attention layers."""
        return [Layer(*(torch.cat(parts) for parts in zip(*self._parts[index]))) for index in sorted(self._parts)]

    def stats(self) -> dict:
        """Figures like those of `PSACache.stats()`, and what only a simulation knows. Synchronises.

        Returns:
            blocks_read and blocks_held (summed over tokens, KV heads and layers), kv_fraction, coverage (estimated) and
            coverage_true (means), hbm_fraction (bytes read of digests, keys and values over those of all keys and values, at
            16 bits), selected (share of tokens and KV heads that ranked blocks), sparse_steps (tokens).
        """
        layers = self.layers()
        heads = layers[0].read.shape[1]
        figures = torch.stack([torch.stack([
            layer.read.double().sum(), layer.held.double().sum() * heads, layer.scanned.double().sum(),
            layer.kv_bytes.double().sum(), layer.coverage.double().mean(), layer.mass.double().mean(),
            (layer.scanned > 0).double().mean()]) for layer in layers])
        read, held, scanned, kv_bytes = figures[:, :4].sum(0).tolist()
        coverage, mass, selected = figures[:, 4:].mean(0).tolist()
        hbm = (kv_bytes + scanned * self.digest_bytes) / (held * self.block_size * self.dense_bytes)
        return {"sparse_steps": layers[0].held.shape[0], "blocks_read": read, "blocks_held": held, "kv_fraction": read / held,
                "hbm_fraction": hbm, "coverage": coverage, "coverage_true": mass, "selected": selected}


@dataclass(frozen=True)
class Layer:
    """read [B, H] and held [B]: blocks (those of a streaming head: tokens over tokens a block). mass [B, H, G]: true share of the
    attention mass that was gathered (sinks of the model count as gathered; from the keys as they are stored); coverage: the same
    as estimated (of a reused selection: of the one that the token would have made itself). scanned [B, H]: tokens whose digests
    were read. kv_bytes [B, H]: bytes of the keys and values that were read."""

    read: Tensor
    held: Tensor
    mass: Tensor
    coverage: Tensor
    scanned: Tensor
    kv_bytes: Tensor
