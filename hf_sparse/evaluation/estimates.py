"""Digests of a context, built once for all policies and questions, and what they estimate for many queries at once."""
from __future__ import annotations

import torch
from torch import Tensor

from ..config import PSAConfig
from ..digests import Digest
from ..kernels.ops import digest_of
from ..kernels.reference.quantise import dequantise_blocks, quantise_blocks
from .policies import Policy

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
        self._quantised: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def digest(self, digest: Digest, key: tuple, sink_tokens: int, keys: Tensor) -> tuple[dict, dict]:
        """(unit tensors, row tensors) of all complete units of the context.

        Args:
            key: by which it is found again. keys: [1, H, N, D], those of the context as they are stored.
        """
        if key not in self._digests:
            row: dict = {}
            if digest.needs_calibration:
                rest = keys[:, :, sink_tokens:].double()
                mean = rest.mean(2)
                variance = (rest.square().mean(2) - mean.square()).clamp(min=0)
                row = digest.calibrate(mean.float(), variance.float(), self.energy)
            units = self.length // digest.unit_tokens
            self._digests[key] = encode(digest, keys[:, :, :units * digest.unit_tokens], row, 0, sink_tokens), row
        return self._digests[key]

    def quantised(self, block_size: int, bits: int) -> tuple[Tensor, Tensor]:
        """Keys [H, N, D] and values [H, N, Dv] whose whole blocks have been quantised; the tokens after them are exact."""
        key = block_size, bits
        if key not in self._quantised:
            keys, values = self.keys[0], self.values[0]
            whole = self.length // block_size * block_size
            back = through(keys[:, :whole], values[:, :whole], block_size, bits)
            self._quantised[key] = tuple(torch.cat([part, exact[:, whole:]], 1) for part, exact in zip(back, (keys, values)))
        return self._quantised[key]


class Estimator:
    """What a policy ranks by: sizes, cost, and estimates for queries of many tokens of several rows.

    Raises:
        ValueError: the digest can't be made for this block size or head dimension.
    """

    def __init__(self, policy: Policy, head_dim: int):
        config = policy.config
        self.exact = policy.digest == "oracle"
        self.block_size, self.sink_tokens = config.block_size, config.sink_blocks * config.block_size
        kind = config.digest, config.block_size
        self.digest = None if self.exact else digest_of(*kind, head_dim, config.key_bits, config.logical_size)
        self.key = (*kind, config.key_bits, config.logical_size, self.sink_tokens, config.kv_bits)
        self.config = config
        self.unit_blocks = 1 if self.exact else self.digest.unit_blocks

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
        unit, row = layer.digest(self.digest, self.key, self.sink_tokens, self._stored(layer))
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

    def _stored(self, layer: LayerKeys) -> Tensor:
        """Keys [1, H, N, D] of the context as digests find them: at the first decode step, when the tail is still exact."""
        if self.config.kv_bits == 16:
            return layer.keys
        tail = tail_start(layer.length - 1, self.config, self.unit_blocks) * self.block_size
        keys = layer.quantised(self.block_size, self.config.kv_bits)[0][None]
        return torch.cat([keys[:, :, :tail], layer.keys[:, :, tail:]], 2)

    def _score(self, query: Tensor, unit: dict, row: dict, softcap: float) -> Tensor:
        digest, (R, H, Q, _) = self.digest, query.shape
        units = next(iter(unit.values())).shape[2]
        step = max(1, PIECE_ELEMENTS // (R * H * digest._score_elements(Q)))
        out = [digest._score(query, {name: part[:, :, low:low + step] for name, part in unit.items()}, row, softcap)
               for low in range(0, units, step)]
        return torch.cat(out, -1) if out else query.new_empty(R, H, Q, 0)


def tail_start(last: int, config: PSAConfig, unit_blocks: int) -> int:
    """First block that is always read beside the sink, where the newest token is in place `last`."""
    P = config.block_size
    return max(min(last // (P * unit_blocks) * unit_blocks, last // P - config.recent_blocks), config.sink_blocks)


def encode(digest: Digest, keys: Tensor, row: dict, first: int, sink_tokens: int) -> dict:
    """Unit tensors of keys [B, H, units * U, D] that begin at token `first` of their rows."""
    token = first + torch.arange(keys.shape[2], device=keys.device)
    keys = keys.unflatten(2, (-1, digest.unit_tokens))
    skip = (token < sink_tokens).view(1, 1, -1, digest.unit_tokens)
    return digest.encode(keys, row, skip)


def through(keys: Tensor, values: Tensor, block_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values [..., n * P, D or Dv] after being quantised in blocks of P tokens, in the dtype of the keys."""
    keys, values = (part.unflatten(-2, (-1, block_size)) for part in (keys, values))
    packed = quantise_blocks(keys, values, bits)
    back = dequantise_blocks(packed, block_size, keys.shape[-1], values.shape[-1], bits, keys.dtype)
    return back[0].flatten(-3, -2), back[1].flatten(-3, -2)
