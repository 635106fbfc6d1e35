"""The streaming heads of one layer (LServe, arXiv 2502.14866, section 3.3): the first tokens and the last ones, in a ring.

No digests, no host copy, and no more memory for a longer context. Tokens are stored without padding, as in blocks, so that a
padded row is what it is alone.
"""
from __future__ import annotations

import torch

from ..kernels.prefill import head_index, streaming_attention
from ..kernels.reference.streaming import ring_columns, ring_step, ring_tokens
from .pool import next_version

SLACK_TOKENS = 64                                           # tokens beyond the window, so that drafts can be taken back


class StreamingRing:
    """Keys [B, H, C, D] and values [B, H, C, Dv] of H streaming heads.

    A prompt is seen through `prefill_window`; the ring holds as much until tokens are decoded with `window` (`narrow`). Rows
    below `min_context` go on seeing all that they have.
    """

    def __init__(self, config, heads: tuple[int, ...], model_heads: int, keys: torch.Tensor, values: torch.Tensor):
        """keys, values: [B, model_heads, q, *], which the ring is to be like; nothing is stored yet."""
        self.sink, self.window = config.streaming_sink, config.streaming_window
        self.prefill_window = config.streaming_prefill_window
        self.heads, self.model_heads = heads, model_heads
        self.head_index = head_index(tuple(heads), keys.device)
        self.batch = keys.shape[0]
        self.narrowed = False
        self.follow(config)
        self._allocate(keys, values, self.sink + self.prefill_window + SLACK_TOKENS)
        self.lengths = torch.zeros(self.batch, len(heads), dtype=torch.int64, device=keys.device)

    def follow(self, config) -> None:
        """Settings that a fork may change."""
        self.min_context = config.min_context
        # Rows from so many tokens on need no more than decoding sees, also after what can be taken back has been.
        self.narrow_from = self.min_context + SLACK_TOKENS if self.min_context > self.sink + self.window else 0
        self.look_at = self.narrow_from                     # padded length at which all rows may be that long

    def _allocate(self, keys, values, columns: int) -> None:
        shape = self.batch, len(self.heads), columns
        self.keys, self.values = keys.new_zeros(*shape, keys.shape[-1]), values.new_zeros(*shape, values.shape[-1])
        self.version = next_version()                       # a buffer has moved

    @property
    def columns(self) -> int:
        return self.keys.shape[2]

    @property
    def reach(self) -> int:
        """Last tokens that the ring surely holds, beside the sink."""
        return self.columns - self.sink - SLACK_TOKENS

    def bytes(self) -> int:
        return (self.keys.numel() + self.values.numel()) * self.keys.element_size()

    def own(self, part: torch.Tensor) -> torch.Tensor:
        """These heads of keys or values [B, model_heads, q, *]."""
        return part.index_select(1, self.head_index)

    def own_queries(self, query: torch.Tensor) -> torch.Tensor:
        """The queries of these heads, of [B, Hq, q, D]."""
        return query.unflatten(1, (self.model_heads, -1)).index_select(1, self.head_index).flatten(1, 2)

    # -- storing ------------------------------------------------------------------------------------------------------
    def store(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None) -> None:
        """New tokens [B, model_heads, q, *]; `valid` [B, q] bool says which are no padding, None: all."""
        count, ring, before = keys.shape[2], self.columns - self.sink, self.lengths[:, 0]
        real = torch.full_like(before, count) if valid is None else valid.sum(1)
        # Of many new tokens only those that stay: the first ones up to the sink, and the last ones.
        number = torch.arange(min(count, self.sink), device=keys.device).expand(self.batch, -1)
        last = torch.arange(min(count, ring), device=keys.device) + (real - min(count, ring))[:, None]
        token = torch.cat([before[:, None] + number, before[:, None] + last], 1)
        wanted = torch.cat([(number < real[:, None]) & (before[:, None] + number < self.sink),
                            (last >= 0) & (before[:, None] + last >= self.sink)], 1)
        number = torch.cat([number, last], 1).clamp(0, count - 1)
        source = number if valid is None else (~valid).long().argsort(dim=1, stable=True).gather(1, number)
        # What is not wanted goes to a column of its own, which is cut off again.
        column = torch.where(wanted, ring_columns(token, self.sink, self.columns), self.columns)[:, None, :, None]
        for old, new in ((self.keys, keys), (self.values, values)):
            picked = self.own(new.gather(2, source[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])))
            wide = torch.cat([old, old[:, :, :1]], 2).scatter_(2, column.expand_as(picked), picked.to(old.dtype))
            old.copy_(wide[:, :, :-1])
        self.lengths += real[:, None]

    def narrow(self, length: int) -> None:
        """Before a token is decoded that makes rows `length` padded tokens long: keep no more than decoding sees, once no row
        needs more. Synchronises, but only when that may be so."""
        if self.narrowed or length < self.look_at:
            return
        shortest = int(self.lengths.min()) + 1
        if shortest < self.narrow_from:
            self.look_at = length + self.narrow_from - shortest
            return
        if self.window < self.prefill_window:
            self._resize(self.sink + self.window + SLACK_TOKENS)
        self.narrowed = True

    def _resize(self, columns: int) -> None:
        old, held = (self.keys, self.values), self.columns
        token = ring_tokens(self.lengths[:, 0], self.sink, columns)                              # of the new columns
        source = ring_columns(token.clamp(min=0), self.sink, held)[:, None, :, None]
        self._allocate(*old, columns)
        for ring, before in zip((self.keys, self.values), old):
            ring.copy_(before.gather(2, source.expand(-1, before.shape[1], -1, before.shape[3])))

    # -- attention ----------------------------------------------------------------------------------------------------
    def step(self, query, keys, values, valid, scaling: float, softcap: float, sinks) -> torch.Tensor:
        """Store and attend with one token of every row: query [B, H * G, 1, D] -> [B, H * G, 1, Dv]. valid: [B, 1] bool, rows
        whose token is no padding, or None; the others give zeros."""
        return ring_step(self.keys, self.values, self.lengths, query, keys, values, self.sink, self.window, SLACK_TOKENS,
                         self.min_context, scaling, softcap, sinks, None if valid is None else valid[:, 0])

    def extend(self, query, keys, values, rows: slice, length: int, window: int, scaling: float, softcap: float,
               sinks) -> torch.Tensor:
        """Attention of new tokens, not stored yet, of rows that all have `length` tokens.

        Args:
            query: [R, H * G, q, D]; keys, values: [R, H, q, *]; sinks: [H * G] or None.
            window: tokens that they see beside the sink, the ring's `reach` at most.

        Returns:
            [R, H * G, q, Dv]
        """
        device, first = self.keys.device, max(self.sink, length - self.reach)
        token = torch.cat([torch.arange(min(self.sink, length), device=device),
                           torch.arange(first, max(first, length), device=device)])
        column = ring_columns(token, self.sink, self.columns)
        # The tokens left out between sink and window don't count: what a query sees, it sees at the same distance.
        keys = torch.cat([self.keys[rows][:, :, column], keys], 2)
        values = torch.cat([self.values[rows][:, :, column], values], 2)
        return streaming_attention(query, keys, values, None, self.sink, window, scaling, softcap, sinks)

    # -- rows ---------------------------------------------------------------------------------------------------------
    def take_rows(self, index: torch.Tensor) -> None:
        index = index.to(self.keys.device)
        self.keys, self.values, self.lengths = self.keys[index], self.values[index], self.lengths[index]
        self.batch, self.version = index.shape[0], next_version()

    def clone(self) -> StreamingRing:
        new = object.__new__(StreamingRing)
        new.__dict__.update(self.__dict__)
        new.take_rows(torch.arange(self.batch, device=self.keys.device))
        return new
