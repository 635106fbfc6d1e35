"""A selection of blocks that several tokens share (LServe, arXiv 2502.14866, section 3.5), and when it is given up."""
from __future__ import annotations

import torch

from ..selection.drift import due


class KeptSelection:
    """What a layer keeps of its selection: ranked blocks only, as the always-read ones are read anew at each token.

    A row and KV head selects anew when
    - nothing is kept, or `reuse` tokens have had what is. Nothing is kept of rows below `min_context`, which are read whole;
    - its always-read tail begins elsewhere, since blocks that have left it were in no selection;
    - a query head of its group has turned away from the query that the selection was made for, so that the cosine is below
      `reuse_refresh`.

    Everything but decoding token by token makes the layer forget.
    """

    def __init__(self):
        self.state = self.query = self.ranked = None        # the kernels': see `reserve`
        self._length = None                                 # padded length at which the reference's was last used
        self._order = self._read = self._start = self._short = self._age = self._query = None

    # -- what makes it void -----------------------------------------------------------------------------------------
    def forget(self) -> None:
        """Rows are others than before."""
        self._length = None
        if self.state is not None:
            self.state.zero_()

    def stored(self, count: int) -> None:
        """Tokens were stored by other hands than the kernels'; a single one may be the reference's own step."""
        if count > 1:
            self._length = None
        if self.state is not None:
            self.state.zero_()

    # -- the kernels' -------------------------------------------------------------------------------------------------
    def reserve(self, batch: int, heads: int, group: int, dim: int, width: int, dtype: torch.dtype,
                device: torch.device) -> bool:
        """Buffers for rows of `width` blocks: `state` int32 [B, H, 8] (kernels/reuse.py), `query` [B, H, group, dim] of the
        model's `dtype` and `ranked` int64 [B, H, width]. Returns whether one has moved."""
        if self.state is not None and self.query.shape == (batch, heads, group, dim):
            if self.ranked.shape[2] == width:
                return False
            old = self.ranked[:, :, :width]
            self.ranked = torch.nn.functional.pad(old, (0, width - old.shape[2]))
            return True
        self.state = torch.zeros(batch, heads, 8, dtype=torch.int32, device=device)
        self.query = torch.zeros(batch, heads, group, dim, dtype=dtype, device=device)
        self.ranked = torch.zeros(batch, heads, width, dtype=torch.int64, device=device)
        return True

    # -- the reference's ------------------------------------------------------------------------------------------------
    def due(self, query: torch.Tensor, start: torch.Tensor, length: int, reuse: int, refresh: float) -> torch.Tensor:
        """[B, H] which heads select anew at the token that has made rows `length` tokens long; query [B, H, G, D], start [B] of
        the tail."""
        if self._length != length - 1:
            return torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
        return due(self._age, reuse, self._short | (start != self._start), query, self._query, refresh)

    def plan(self, fresh: torch.Tensor, order: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks in the order in which they may be read [B, H, M], and how many of them [B, H]: this token's own ranking and
        budget `order`, `count` [B] where it is `fresh`, else what is kept, within the budget."""
        count = count[:, None].expand_as(fresh)
        if self._length is not None:
            M = order.shape[-1]
            old = torch.nn.functional.pad(self._order[..., :M], (0, max(0, M - self._order.shape[-1])))
            order = torch.where(fresh[..., None], order, old)
            count = torch.where(fresh, count, torch.minimum(count, self._read))
        self._order = order
        return order, count

    def keep(self, fresh: torch.Tensor, query: torch.Tensor, start: torch.Tensor, length: int, read: torch.Tensor,
             short: torch.Tensor) -> None:
        """After a token, with the arguments of `due`: what is `fresh` is kept. read: [B, H] ranked blocks that were read. short:
        [B] rows that are read whole, of which nothing is kept: their list is of more than a budget."""
        if self._length is None:
            self._age, self._query, self._read = torch.zeros_like(read), query, read
        self._age = torch.where(fresh, 1, self._age + 1)
        self._query = torch.where(fresh[..., None, None], query, self._query)
        self._read = torch.where(fresh, read, self._read)
        self._start, self._short, self._length = start, short, length
