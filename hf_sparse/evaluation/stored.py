"""Keys and values as a policy stores them: closed blocks may be quantised, always-read ones are exact.

Logits and outputs of many tokens are computed from the quantised blocks of the context, which all tokens share, and mended
where a token reads exactly: sink, tail and open block, which differ little from token to token. Blocks that close on the way
hold a row's own tokens, so they are quantised for each row.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.reference.quantise import packed_bytes
from .estimates import DENSE_BYTES, LayerKeys, through
from .policies import Policy


class Stored:
    """One layer of a context, as a policy reads it.

    Args:
        layer: the context's keys and values.
        streaming: bool [H], KV heads that read exactly whatever is stored, or None.

    Attributes:
        keys, values: [H, N, D] and [H, N, Dv] of the context; quantised in its closed blocks, if `bits` says so.
    """

    def __init__(self, policy: Policy, layer: LayerKeys, streaming: Tensor | None):
        self.layer, self.bits, self.block_size = layer, policy.config.kv_bits, policy.config.block_size
        self.sink_tokens = policy.config.sink_blocks * self.block_size
        self.keys, self.values = layer.keys[0], layer.values[0]
        self.closed = layer.length // self.block_size * self.block_size
        if self.bits < 16:
            self.keys, self.values = layer.quantised(self.block_size, self.bits)
            if streaming is not None:
                mine = streaming[:, None, None]
                self.keys = torch.where(mine, layer.keys[0], self.keys)
                self.values = torch.where(mine, layer.values[0], self.values)

    def block_bytes(self) -> tuple[int, int]:
        """(of an exact block of one KV head, for 16-bit keys and values; of one as it is stored otherwise)"""
        key_dim, value_dim = self.keys.shape[-1], self.values.shape[-1]
        exact = self.block_size * DENSE_BYTES * (key_dim + value_dim)
        return exact, exact if self.bits == 16 else packed_bytes(self.block_size, key_dim, value_dim, self.bits)

    def mend_logits(self, logits: Tensor, query: Tensor, exact: Tensor, new_keys: Tensor, new_values: Tensor, tail: int) -> Mending:
        """Logits of exactly read blocks become exact, those of blocks that have closed since the prefill quantised.

        Args:
            logits: [R * T, H, G, columns * P] of `keys` and of the rows' own tokens; changed in place.
            query: [R, T, H, G, D] fp32, scaled. new_keys, new_values: [R, H, A, D or Dv] fp32.
            exact: [R * T, H, columns] bool, blocks that are read exactly; open ones must be.
            tail: first block that any token reads exactly, beside the sink.

        Returns:
            The same for outputs.
        """
        R, T, H, G, _ = query.shape
        N, P, first = self.layer.length, self.block_size, self.closed
        by_token = exact.repeat_interleave(P, -1)[:, :, None]
        regions = []
        for low, high in ((0, min(self.sink_tokens, first)), (max(tail * P, min(self.sink_tokens, first)), first)):
            if low < high:
                regions.append((low, high))
                own = torch.einsum("rthgd,hnd->rthgn", query, self.layer.keys[0, :, low:high].float()).flatten(0, 1)
                logits[..., low:high] = torch.where(by_token[..., low:high], own, logits[..., low:high])
        blocks = (N - first + new_keys.shape[2]) // P
        late = None
        if blocks:
            keys, values = (torch.cat([part[:, :, first:].expand(R, -1, -1, -1).float(), new], 2)[:, :, :blocks * P]
                            for part, new in ((self.layer.keys, new_keys), (self.layer.values, new_values)))
            stored_keys, late = self._through(keys, values)
            coarse = torch.einsum("rthgd,rhnd->rthgn", query, stored_keys.float()).flatten(0, 1)
            high = first + blocks * P
            logits[..., first:high] = torch.where(by_token[..., first:high], logits[..., first:high], coarse)
            late = late.float() - values
        return Mending(self, by_token, regions, late)

    def _through(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return through(keys.to(self.keys.dtype), values.to(self.values.dtype), self.block_size, self.bits)


class Mending:
    """What `Stored.mend_logits` did to the logits, for outputs."""

    def __init__(self, stored: Stored, exact: Tensor, regions: list[tuple[int, int]], late: Tensor | None):
        self.stored, self.exact, self.regions, self.late = stored, exact, regions, late

    def output(self, weights: Tensor, R: int) -> Tensor:
        """What to add to [R, T, H, G, Dv], the sum of `values` and the rows' own under `weights` [R * T, H, G, columns * P]."""
        stored, total = self.stored, 0.0
        for low, high in self.regions:
            difference = stored.layer.values[0, :, low:high].float() - stored.values[:, low:high].float()
            mine = weights[..., low:high] * self.exact[..., low:high]
            total = total + torch.einsum("bhgn,hnd->bhgd", mine, difference).unflatten(0, (R, -1))
        if self.late is not None:
            low, high = stored.closed, stored.closed + self.late.shape[2]
            mine = weights[..., low:high] * ~self.exact[..., low:high]
            total = total + torch.einsum("rthgn,rhnd->rthgd", mine.unflatten(0, (R, -1)), self.late)
        return total
