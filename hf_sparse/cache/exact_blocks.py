"""The always-read blocks of a layer as the model gave them, where its closed blocks are quantised."""
from __future__ import annotations

import torch

from ..kernels.reference.exact_blocks import SLACK_BLOCKS, exact_rows


class ExactBlocks:
    """The first blocks of every row and KV head, and its newest ones in turn.

    Block n of a row is in its place `n` if it is one of the first `sink_blocks`, else in
    `sink_blocks + (n - sink_blocks) % newest_blocks`, until the block that comes there next. There are as many as a tail can
    have, and `SLACK_BLOCKS` more, which a row that is cropped goes back to.

    Attributes:
        rows: [1 + B * H * (sink_blocks + newest_blocks), elements], blocks laid out as in a pool that is not quantised; row 0
            is scratch.
    """

    def __init__(self, rows: torch.Tensor, heads: int, sink_blocks: int, newest_blocks: int):
        self.rows, self.heads, self.sink_blocks, self.newest_blocks = rows, heads, sink_blocks, newest_blocks

    @classmethod
    def new(cls, batch: int, heads: int, sink_blocks: int, tail_blocks: int, elements: int, like: torch.Tensor) -> ExactBlocks:
        """An empty one for tails of up to `tail_blocks`, of the type and on the device of `like`."""
        newest_blocks = tail_blocks + SLACK_BLOCKS
        rows = like.new_zeros(1 + batch * heads * (sink_blocks + newest_blocks), elements)
        return cls(rows, heads, sink_blocks, newest_blocks)

    @staticmethod
    def bytes_for(batch: int, heads: int, sink_blocks: int, tail_blocks: int, elements: int, itemsize: int) -> int:
        return (1 + batch * heads * (sink_blocks + tail_blocks + SLACK_BLOCKS)) * elements * itemsize

    def ids(self, column: torch.Tensor) -> torch.Tensor:
        """Rows of blocks [B, C]: [B, H, C] int64."""
        return exact_rows(column, self.heads, self.sink_blocks, self.newest_blocks)

    def take_rows(self, index: torch.Tensor) -> ExactBlocks:
        """Another one with rows `index` [B'] of the batch."""
        blocks = self.rows[1:].view(-1, self.heads * (self.sink_blocks + self.newest_blocks), self.rows.shape[1])
        taken = blocks.index_select(0, index).flatten(0, 1)
        return ExactBlocks(torch.cat([self.rows[:1], taken]), self.heads, self.sink_blocks, self.newest_blocks)

    def cropped(self, before: torch.Tensor, after: torch.Tensor, block_size: int, contents) -> ExactBlocks:
        """Another one for rows that have been cropped: what newer blocks had taken the place of is there again.

        Args:
            before, after: [B] int64, tokens of each row.
            contents: blocks [B, C] -> [B, H, C, elements], as the packed blocks have them.
        """
        last, newest = (before - 1)[:, None] // block_size, (after - 1)[:, None] // block_size
        column = newest - torch.arange(self.newest_blocks, device=newest.device)
        lost = (column >= self.sink_blocks) & (column <= last - self.newest_blocks)
        rows = self.rows.clone()
        target = torch.where(lost[:, None], self.ids(column.clamp(min=0)), 0)
        rows[target] = contents(torch.where(lost, column, 0)).to(rows.dtype)
        return ExactBlocks(rows, self.heads, self.sink_blocks, self.newest_blocks)
