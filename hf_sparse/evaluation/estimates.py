"""Digests of a context, built once for all policies and questions, and what they estimate for many queries at once."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from ..digests import Digest
from ..kernels.ops import digest_of
from .policies import LOGICAL_TOKENS, Policy

# Elements of fp32 temporaries of one piece; the results do not depend on it.
PIECE_ELEMENTS = 1 << 27
DENSE_BYTES = 2                                             # of a key or value element that fractions of bytes relate to


class LayerKeys:
    """Keys and values of one full-attention layer after a prefill of one row, and their digests.

    Args:
        keys, values: [1, H, N, D] and [1, H, N, Dv].
        energy: [1, H, D] fp32, mean square of the last queries of the prompt, by which calibrated digests order channels.
    """

    def __init__(self, keys: Tensor, values: Tensor, energy: Tensor):
        self.keys, self.values, self.energy = keys, values, energy
        self._digests: dict[tuple, tuple[dict, dict]] = {}

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def digest(self, digest: Digest, key: tuple, sink_tokens: int) -> tuple[dict, dict]:
        """(unit tensors, row tensors) of all complete units of the context."""
        if key not in self._digests:
            row: dict = {}
            if digest.needs_calibration:
                rest = self.keys[:, :, sink_tokens:].double()
                mean = rest.mean(2)
                variance = (rest.square().mean(2) - mean.square()).clamp(min=0)
                row = digest.calibrate(mean.float(), variance.float(), self.energy)
            units = self.length // digest.unit_tokens
            self._digests[key] = encode(digest, self.keys[:, :, :units * digest.unit_tokens], row, 0, sink_tokens), row
        return self._digests[key]


class Estimator:
    """What a policy ranks by: sizes, cost, and estimates for queries of many tokens of several rows.

    Raises:
        ValueError: the digest can't be made for this block size or head dimension.
    """

    def __init__(self, policy: Policy, head_dim: int):
        config = policy.config
        self.pages = policy.digest == "pages"
        self.exact = policy.digest == "oracle"
        self.block_size, self.sink_tokens = config.block_size, config.sink_blocks * config.block_size
        size = LOGICAL_TOKENS if self.pages else config.block_size
        self.digest = None if self.exact else digest_of(config.digest, size, head_dim, config.key_bits)
        self.key = (config.digest, size, config.key_bits, self.sink_tokens)
        self.unit_blocks = 1 if self.exact or self.pages else self.digest.unit_blocks

    @property
    def unit_tokens(self) -> int:
        return self.unit_blocks * self.block_size

    def bytes_per_token(self) -> float:
        """Digest bytes a token of one KV head, for 16-bit keys."""
        return 0.0 if self.exact else self.digest.bytes_per_token(torch.float16)

    def score(self, query: Tensor, layer: LayerKeys, new_keys: Tensor, masses: Tensor, softcap: float) -> Tensor:
        """Estimated log mass of every block of every complete unit, those that the new tokens complete included.

        Args:
            query: [R, T, H, G, D] fp32, scaled: T tokens of R rows that share the context `layer`.
            new_keys: [R, H, A, D], the rows' own tokens after the context.
            masses: [R * T, H, G, N] true log masses.

        Returns:
            [R * T, H, G, units * unit_blocks]
        """
        R, T, H, G, D = query.shape
        total = (layer.length + new_keys.shape[2]) // self.unit_tokens
        if self.exact:
            return masses[..., :total]
        done = layer.length // self.unit_tokens
        unit, row = layer.digest(self.digest, self.key, self.sink_tokens)
        if self.pages:                                      # whole pages of the context
            kept = done * self.block_size // LOGICAL_TOKENS
            unit = {name: part[:, :, :kept] for name, part in unit.items()}
        known = self._score(query.permute(2, 0, 1, 3, 4).reshape(1, H, R * T * G, D), unit, row, softcap)
        parts = [known.view(H, R * T, G, -1).transpose(0, 1)]
        if total > done:
            first = done * self.unit_tokens
            keys = torch.cat([layer.keys[:, :, first:].expand(R, -1, -1, -1), new_keys.to(layer.keys.dtype)], 2)
            late_row = {name: part.expand(R, *part.shape[1:]) for name, part in row.items()}
            late = encode(self.digest, keys[:, :, :(total - done) * self.unit_tokens], late_row, first, self.sink_tokens)
            late = self._score(query.permute(0, 2, 1, 3, 4).reshape(R, H, T * G, D), late, late_row, softcap)
            parts.append(late.view(R, H, T, G, -1).transpose(1, 2).flatten(0, 1))
        return torch.cat(parts, -1)

    def _score(self, query: Tensor, unit: dict, row: dict, softcap: float) -> Tensor:
        digest, (R, H, Q, _) = self.digest, query.shape
        units = next(iter(unit.values())).shape[2]
        step = max(1, PIECE_ELEMENTS // (R * H * digest._score_elements(Q)))
        out = [digest._score(query, {name: part[:, :, low:low + step] for name, part in unit.items()}, row, softcap)
               for low in range(0, units, step)]
        out = torch.cat(out, -1) if out else query.new_empty(R, H, Q, 0)
        if self.pages:                                      # a page is worth its best logical page
            pages = self.block_size // LOGICAL_TOKENS
            out = out.unflatten(-1, (-1, pages)).amax(-1) + math.log(pages)
        return out


def encode(digest: Digest, keys: Tensor, row: dict, first: int, sink_tokens: int) -> dict:
    """Unit tensors of keys [B, H, units * U, D] that begin at token `first` of their rows."""
    token = first + torch.arange(keys.shape[2], device=keys.device)
    keys = keys.unflatten(2, (-1, digest.unit_tokens))
    skip = (token < sink_tokens).view(1, 1, -1, digest.unit_tokens)
    return digest.encode(keys, row, skip)
