"""A cache and, beside it, everything that it was given: what it returns is compared with float64 attention over that.

`Shadow` does every operation on both. The cache runs at threshold 1.0 through its blocks (`min_context=0`), so whatever
tables, tiers and rings do, the answer is dense attention over the visible tokens.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from hf_sparse import PSACache
from hf_sparse.patches.attention import psa_attention
from tests.cache.drive import attention_module

TOLERANCE = 3e-5


class Shadow:
    """A cache for layers of one shape, and its tokens: keys and values [layers, B, H, T, D], valid [B, T]."""

    def __init__(
        self, cache: PSACache, layers: int, heads=2, group=2, dim=8, window: int | None = None, seed=0
    ):
        self.cache, self.layers, self.heads, self.group, self.dim, self.window = (
            cache,
            layers,
            heads,
            group,
            dim,
            window,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.clear()

    def clear(self) -> None:
        self.keys = self.values = self.valid = None

    @property
    def length(self) -> int:
        return 0 if self.valid is None else self.valid.shape[1]

    @property
    def batch(self) -> int:
        return 0 if self.valid is None else self.valid.shape[0]

    # -- tokens ---------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def feed(self, count: int, batch: int | None = None, valid: Tensor | None = None, cache=None) -> None:
        """One forward of `count` random tokens a row; `valid` [B, count] says which are no padding.

        Everything is recorded only once the cache has taken all of it.
        """
        batch = self.batch or batch

        def draw(heads, gain=1.0):
            return gain * torch.randn(self.layers, batch, heads, count, self.dim, generator=self.generator)

        queries, keys, values = draw(self.heads * self.group, 2.5), draw(self.heads), draw(self.heads)
        flags = torch.ones(batch, count, dtype=torch.bool) if valid is None else valid
        total = self.length + count
        all_flags = flags if self.valid is None else torch.cat([self.valid, flags], 1)
        mask = None
        if not flags.all():
            mask = all_flags[:, None, None]
        elif count > 1:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(batch, 1, 1, total)
        outputs = []
        for layer in range(self.layers):
            handles = self.cache.update(keys[layer], values[layer], layer)
            layer_mask = mask if mask is None or self.window is None else mask[..., -handles[0].shape[2] :]
            outputs.append(
                psa_attention(
                    attention_module(self.group), queries[layer], *handles, layer_mask, scaling=self.dim**-0.5
                )[0]
            )
        self.valid = all_flags
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 3)
        self.values = values if self.values is None else torch.cat([self.values, values], 3)
        self.check(torch.stack(outputs), queries)

    def decode(self, count: int) -> None:
        for _ in range(count):
            self.feed(1)

    def check(self, outputs: Tensor, queries: Tensor) -> None:
        """`outputs` [layers, B, q, Hq, D] of the last q tokens, against float64; queries of padding are only finite."""
        count, total = outputs.shape[2], self.length
        own = torch.arange(total - count, total)[:, None]
        seen = torch.arange(total)
        visible = (seen <= own)[None] & self.valid[:, None]
        if self.window is not None:
            visible = visible & (seen > own - self.window)[None]
        q = queries.double().unflatten(2, (self.heads, self.group))
        logits = torch.einsum("lbhgqd,lbhtd->lbhgqt", q, self.keys.double()) * self.dim**-0.5
        logits = logits.masked_fill(~visible[None, :, None, None], -torch.inf)
        want = torch.einsum("lbhgqt,lbhtd->lbqhgd", logits.softmax(-1), self.values.double()).flatten(3, 4)
        real = self.valid[:, -count:]
        assert torch.isfinite(outputs).all()
        torch.testing.assert_close(outputs[:, real].double(), want[:, real], rtol=0, atol=TOLERANCE)

    # -- operations -----------------------------------------------------------------------------------------------
    def take(self, index: Tensor) -> None:
        self.keys, self.values, self.valid = self.keys[:, index], self.values[:, index], self.valid[index]

    def reorder(self, index: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(index))
        self.take(torch.tensor(index))

    def repeat(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)
        self.take(torch.arange(self.batch).repeat_interleave(times))

    def select(self, index: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(index))
        self.take(torch.tensor(index))

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        kept = max(0, self.length - count)
        self.keys, self.values, self.valid = (
            self.keys[..., :kept, :],
            self.values[..., :kept, :],
            self.valid[:, :kept],
        )

    def fork(self, how=copy.deepcopy) -> Shadow:
        new = copy.copy(self)
        new.cache = how(self.cache)
        new.generator = torch.Generator().manual_seed(
            int(torch.randint(2**31, (1,), generator=self.generator))
        )
        return new

    def reset(self) -> None:
        self.cache.reset()
        self.clear()
