"""A selection of blocks that several tokens share (LServe, arXiv 2502.14866, section 3.5), and when it is given up."""
from __future__ import annotations

import torch

from ..kernels.reference.softmax import finite


class KeptSelection:
    """What a layer keeps of its selection: ranked blocks only, as the always-read ones are read anew at each token.

    A row and KV head selects anew when
    - nothing is kept, or `reuse` tokens have had what is;
    - its always-read tail begins elsewhere, since blocks that have left it were in no selection;
    - the estimated coverage has fallen by more than `reuse_refresh` below what it was at the selection. Coverage is the mass
      gathered over that and the mass left unread, as it was estimated at the selection, in absolute terms.

    Everything but decoding token by token makes the layer forget.
    """

    def __init__(self):
        self.state = self.left_log2 = self.ranked = None    # the kernels': see `reserve`
        self._length = None                                 # padded length at which the reference's was last used
        self._order = self._read = self._start = self._age = self._left = self._coverage = self._fallen = None

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
    def reserve(self, batch: int, heads: int, group: int, width: int, device: torch.device) -> bool:
        """Buffers for rows of `width` blocks: `state` int32 [B, H, 8] (kernels/reuse.py), `left_log2` fp32 [B, H, group] and
        `ranked` int64 [B, H, width]. Returns whether one has moved."""
        if self.state is not None and self.left_log2.shape == (batch, heads, group):
            if self.ranked.shape[2] == width:
                return False
            old = self.ranked[:, :, :width]
            self.ranked = torch.nn.functional.pad(old, (0, width - old.shape[2]))
            return True
        self.state = torch.zeros(batch, heads, 8, dtype=torch.int32, device=device)
        self.left_log2 = torch.zeros(batch, heads, group, device=device)
        self.ranked = torch.zeros(batch, heads, width, dtype=torch.int64, device=device)
        return True

    # -- the reference's ------------------------------------------------------------------------------------------------
    def due(self, start: torch.Tensor, heads: int, length: int, reuse: int) -> torch.Tensor:
        """[B, H] which heads select anew at the token that has made rows `length` tokens long; start [B] of the tail."""
        if self._length != length - 1:
            return torch.ones(start.shape[0], heads, dtype=torch.bool, device=start.device)
        return (self._age >= reuse) | (start != self._start)[:, None] | self._fallen

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

    def watch(self, fresh: torch.Tensor, start: torch.Tensor, length: int, read: torch.Tensor, left: torch.Tensor,
              captured: torch.Tensor, drop: float, smallest: bool) -> torch.Tensor:
        """After a token: keep what is new, and see whether the next one is to select anew.

        Args:
            read: [B, H] ranked blocks read. left: [B, H, G] log mass that `fresh` selections have left unread.
            captured: [B, H, G] log mass gathered. smallest: the smallest coverage of a group's heads counts, else their mean.

        Returns:
            [B, H, G] coverage, by what was left at the selection.
        """
        if self._left is None or self._left.shape != left.shape:
            self._left = left
        self._left = torch.where(fresh[..., None], left, self._left)
        coverage = torch.exp(captured - finite(torch.logaddexp(captured, self._left)))
        now = coverage.amin(-1) if smallest else coverage.mean(-1)
        if self._length is None or self._coverage.shape != now.shape:
            self._age, self._coverage, self._read = torch.zeros_like(read), now, read
        self._age = torch.where(fresh, 1, self._age + 1)
        self._coverage = torch.where(fresh, now, self._coverage)
        self._read = torch.where(fresh, read, self._read)
        self._fallen = now < self._coverage - drop
        self._start, self._length = start, length
        return coverage


def calibrated(left: torch.Tensor, all_of_it: torch.Tensor, forced: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Estimates that only rank, as the log mass left unread: unread blocks hold as much of theirs as those read did.

    left, all_of_it: [B, H, G] log of the estimates of unread blocks, and of all candidates. forced, mass: log masses of the
    always-read blocks, and of everything gathered.
    """
    held = mass + torch.log(-torch.expm1((forced - mass).clamp(max=0.0)))
    promised = all_of_it + torch.log(-torch.expm1((left - finite(all_of_it)).clamp(max=0.0)))
    return torch.where(torch.isfinite(promised), left + held - finite(promised), left)
