"""What happens to the rows of a layer in blocks: reordered, repeated, selected, cropped, forked, padded in hindsight."""
from __future__ import annotations

import weakref

import torch

from ..kernels.reference.append import unpin
from ..kernels.reference.fetch import acquire, read
from ..kernels.reference.quantise import dequantise_blocks
from .blocks import LayerBlocks
from .kept import KeptSelection
from .owner import Change
from .pool import next_version
from .state import CacheState
from .stats import LayerStats


class LayerRows(LayerBlocks):
    """Blocks whose rows come and go: closed ones are shared between rows that go on from the same tokens, open ones copied."""

    # -- padding that changes later -----------------------------------------------------------------------------------
    def agrees(self, valid: torch.Tensor) -> bool:
        """Whether [B, T] says of the stored tokens what was said when they came. Synchronises."""
        self._flush()
        if valid.shape[1] != self.length or not self.is_initialized:
            return True
        return bool(valid.all()) if self.valid is None else bool((valid == self.valid).all())

    def shows_more(self, valid: torch.Tensor) -> bool:
        return self.valid is not None and valid.shape == self.valid.shape and bool((valid & ~self.valid).any())

    def hide(self, valid: torch.Tensor) -> None:
        """From now on [B, T] says which stored tokens are real: those after the first change are stored again."""
        if self.agrees(valid):
            return
        with Change(self.state, refusals=()):
            valid = valid.to(self.device)
            now = torch.ones_like(valid) if self.valid is None else self.valid
            first = int((valid != now).any(0).long().argmax())
            keys, values = (part[:, :, first:].clone() for part in self.padded())
            self.crop(first - self.length)
            self.reserve(first + keys.shape[2])
            self._append(keys, values, valid[:, first:])

    # -- which rows -----------------------------------------------------------------------------------------------------
    def _take_rows(self, index: torch.Tensor, release: bool = True) -> None:
        """Become rows `index` [B'] of itself: closed blocks are shared, open ones copied.

        `release`: the present rows go away (else they stay with another layer object, as in a fork).
        """
        self._flush()
        if self.is_initialized:
            with self.pool.lock, Change(self.state, self.pool):
                self._become(index.to(self.device), release)

    def _become(self, index: torch.Tensor, release: bool) -> None:
        self.digests.settle(self.lengths)
        self.kept.forget()
        P, H = self.config.block_size, self.heads
        tiers = self.pool.tiers()
        open_column = self.lengths // P
        first = int(open_column.min()) if self.ragged else self.length // P
        lengths, open_column = self.lengths.index_select(0, index), open_column.index_select(0, index)
        rows = index.shape[0]
        partial = lengths % P != 0
        column = torch.where(partial, open_column, 0)[:, None, None].expand(-1, H, -1)
        old = self.table.index_select(0, index)
        content = None if self.exact is not None else read(
            tiers, torch.where(partial[:, None], old.gather(2, column).squeeze(2), 0).reshape(-1))
        table = old.clone()
        table[:, :, self.columns:] = 0                      # after a crop: blocks that are given back
        width = self.columns - first
        more = self._asked_later(rows * H * max(0, width))
        if width > 0:
            fresh = self.pool.allocate(rows * H * width, more=more).view(rows, H, width)
            shared = torch.arange(first, self.columns, device=self.device) < open_column[:, None]
            table[:, :, first:self.columns] = torch.where(shared[:, None], old[:, :, first:self.columns], fresh)
        before = self.table, self.lengths, self.batch
        self.table, self.lengths, self.batch = table, lengths, rows
        try:
            self.state.fit(self.pool, more)
        except ValueError:
            self.table, self.lengths, self.batch = before
            raise
        self.version = next_version()
        if self.valid is not None:
            self.valid = self.valid.index_select(0, index)
        self.digests.take_rows(index)
        if self.exact is not None:
            self.exact = self.exact.take_rows(index)        # with what open blocks hold
        tiers = self.pool.tiers()
        if release:
            unpin(tiers, before[0].reshape(-1), torch.ones_like(before[0], dtype=torch.bool).reshape(-1))
        self._open(tiers, column, partial, content)

    def _open(self, tiers, column, partial, content) -> None:
        """Put `content`, if there is some, into the open block of rows that have one, and pin it and the sink."""
        ids = self.table.gather(2, column).reshape(-1)
        wanted = partial[:, None].expand(-1, self.heads).reshape(-1)
        slots = acquire(tiers, ids, wanted, self.config.eviction, load=False)
        if content is not None:
            tiers[0][slots] = content
        if self.pool.tiered:
            tiers[5][slots] = True
            tiers[5][tiers[2][self.table[:, :, :self.config.sink_blocks]]] = True
            self._hold_tail(tiers)

    def _hold_tail(self, tiers) -> None:
        """Slots for the always-read blocks of the present rows, pinned: else they come from the host tier at every token."""
        last = (self.lengths + self.config.block_size - 1) // self.config.block_size
        column = self.tail_start(self.lengths)[:, None] + torch.arange(self.tail_blocks + 1, device=self.device)
        wanted = (column < last[:, None])[:, None].expand(-1, self.heads, -1).reshape(-1)
        column = column.clamp(max=self.table.shape[2] - 1)[:, None].expand(-1, self.heads, -1)
        slots = acquire(tiers, self.table.gather(2, column).reshape(-1), wanted, self.config.eviction, load=True)
        tiers[5][slots] = True

    def crop(self, tokens: int) -> None:
        """Remove tokens at the end: negative, how many; positive, the length to keep. A closed block is reopened."""
        self._flush()
        count = self.to_remove(tokens)
        if count == 0 or not self.is_initialized:
            return
        self.digests.settle(self.lengths)
        before = self.length, self.lengths, self.valid, self.columns, self.digests.clone(), self.exact
        self.length -= count
        self.columns = min(self.columns, -(-self.length // self.config.block_size))
        if self.ragged:
            self.lengths = self.lengths - self.valid[:, self.length:].sum(1)
            self.valid = self.valid[:, :self.length]
        else:
            self.lengths = self.lengths - count
        self.digests.crop(self.lengths, self.length)
        if self.exact is not None:
            with self.pool.lock:
                self.exact = self.exact.cropped(before[1], self.lengths, self.config.block_size, self._dequantised)
        # The reopened block may be shared with a fork or another row, and so may those after it: fresh ids for both.
        try:
            self._take_rows(torch.arange(self.batch, device=self.device))
        except ValueError:
            self.length, self.lengths, self.valid, self.columns, self.digests, self.exact = before
            raise

    def _dequantised(self, column: torch.Tensor) -> torch.Tensor:
        """Contents [B, H, C, elements] of blocks [B, C] in the layout and dtype of those that are not quantised."""
        parts = dequantise_blocks(self._packed(column), self.config.block_size, self.key_dim, self.value_dim,
                                  self.config.kv_bits, self.dtype)
        return torch.cat([part.flatten(3) for part in parts], 3)

    def fork(self, state: CacheState) -> LayerRows:
        """Another layer with the same tokens, which shares closed blocks."""
        self._flush()
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.state, new.pending, new.stats = state, None, LayerStats(state.config.record_steps)
        new.kept = KeptSelection()
        state.members.append(weakref.ref(new))
        if self.is_initialized:
            new.digests = self.digests.clone()
            new.table = self.table.clone()
            self.pool.join(new)
            try:
                new._take_rows(torch.arange(self.batch, device=self.device), release=False)
            except BaseException:
                new.reset()
                raise
        return new
