"""The digests of one layer: buffers, which units are encoded, and the statistics that calibrated digests start from."""
from __future__ import annotations

import torch

from ..kernels import ops
from ..kernels.reference.append import split
from ..kernels.reference.fetch import read

# Queries of the end of the prompt that set a calibrated digest's channel order (research: the last 256).
TAIL_QUERIES = 256
# Units read from the tiers at a time, of all rows together, when many are encoded or calibrated with.
SEGMENT = 64


class DigestStore:
    """Digest buffers of one layer, [B, H, units, ...] each, and their bookkeeping."""

    def __init__(self, kind: str, block_size: int, head_dim: int, bits: int, dtype: torch.dtype, logical_size: int = 16):
        self.kind, self.block_size, self.bits, self.dtype = kind, block_size, bits, dtype
        self.logical_size = logical_size
        self.digest = ops.digest_of(kind, block_size, head_dim, bits, logical_size)
        self.unit: list[torch.Tensor] = []
        self.row: list[torch.Tensor] = []
        self.calibrated = not self.digest.needs_calibration
        self.units_done: torch.Tensor | None = None         # [B] int64, units encoded of each row
        self.length_done = 0                                # padded length at the last `update`
        self.tail = self.tail_valid = None
        self.provisional = False                            # calibrated on a short row; to be done again
        self.stale = False                                  # kernels have encoded more, up to length_done

    @property
    def unit_blocks(self) -> int:
        return self.digest.unit_blocks

    def bytes_for(self, batch: int, heads: int, columns: int) -> int:
        """Bytes of the buffers for `columns` blocks a row and head."""
        count = 0
        for layout, times in ((self.digest.unit_layout(self.dtype), columns // self.unit_blocks + 1),
                              (self.digest.row_layout(), 1)):
            for shape, dtype in layout.values():
                count += batch * heads * times * torch.Size(shape).numel() * dtype.itemsize
        return count

    def reserve(self, batch: int, heads: int, columns: int, device: torch.device) -> None:
        """Room for `columns` blocks, a multiple of `unit_blocks`."""
        units = columns // self.unit_blocks
        if self.units_done is None:
            self.units_done = torch.zeros(batch, dtype=torch.int64, device=device)
            self.row = [torch.zeros(batch, heads, *shape, dtype=dtype, device=device)
                        for shape, dtype in self.digest.row_layout().values()]
        layout = self.digest.unit_layout(self.dtype).values()
        have = self.unit[0].shape[2] if self.unit else 0
        units += 1                                          # the last one takes what must not be written
        if units <= have:
            return
        fresh = [torch.zeros(batch, heads, units - have, *shape, dtype=dtype, device=device)
                 for shape, dtype in layout]
        self.unit = [torch.cat([old, new], 2) for old, new in zip(self.unit, fresh)] if self.unit else fresh

    # -- statistics ---------------------------------------------------------------------------------------------
    def observe(self, query: torch.Tensor, heads: int, valid: torch.Tensor | None) -> None:
        """Remember the squares of the last queries of every row: query [B, Hq, Q, D], valid [B, Q] or None (all)."""
        if self.calibrated and not self.provisional:
            return
        query = query.detach() if valid is not None else query[:, :, -TAIL_QUERIES:].detach()
        if valid is None:
            valid = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        query, valid = _last(query, valid)
        squares = query.float().square().unflatten(1, (heads, -1)).mean(2)                       # [B, H, Q, D]
        if self.tail is not None:
            squares, valid = _last(torch.cat([self.tail, squares], 2), torch.cat([self.tail_valid, valid], 1))
        self.tail, self.tail_valid = squares, valid

    @staticmethod
    def _segment(batch: int) -> int:
        """Units of a row read at a time."""
        return max(1, SEGMENT // batch)

    def _calibrate(self, keys_of, columns: int, skip: int, lengths: torch.Tensor) -> None:
        """Row tensors from the tokens of the row, without the first `skip`, and from the queries remembered.

        A segment at a time, as the keys of a long row don't fit beside it. In fp64, where sums of squares are good
        enough to take variances from, and the order of a sum, which depends on the batch that a row is in, is below what
        the result in fp32 shows.

        Args:
            keys_of: columns of blocks [B, C] -> keys [B, H, C * P, D]. columns: blocks of the longest row.
        """
        P, batch = self.block_size, lengths.shape[0]
        total = squares = 0.0
        for column in torch.arange(columns, device=lengths.device).split(self._segment(batch) * self.unit_blocks):
            token = (column[:, None] * P + torch.arange(P, device=lengths.device)).flatten()
            valid = (token >= skip) & (token < lengths[:, None])
            keys = keys_of(column.expand(batch, -1))
            keys = torch.where(valid[:, None, :, None], keys, 0).double()
            total = total + keys.sum(2)
            squares = squares + keys.square_().sum(2)
        count = (lengths - skip).clamp(min=1)[:, None, None]
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        weight = self.tail_valid[:, None, :, None].float()
        energy = (self.tail * weight).sum(2) / weight.sum(2).clamp(min=1.0)
        row = self.digest.calibrate(mean.float(), variance.float(), energy)
        self.row = [row[name].to(dtype) for name, (_, dtype) in self.digest.row_layout().items()]
        self.calibrated = True
        if not self.provisional:
            self.tail = self.tail_valid = None

    def forget(self) -> None:
        """Calibrate and encode again at the next `update`, from the queries remembered so far."""
        self.calibrated, self.provisional, self.length_done, self.stale = False, False, 0, False
        self.units_done = torch.zeros_like(self.units_done)

    # -- encoding -----------------------------------------------------------------------------------------------
    def update(self, tiers, table: torch.Tensor, lengths: torch.Tensor, length: int, ragged: bool,
               sink_blocks: int, key_dim: int, value_dim: int, blocks_of=None) -> None:
        """Encode every unit that has closed since the last call. `length` is the padded length.

        blocks_of: callable, blocks [B, C] -> keys [B, H, C, P, D] and values, where the tiers hold packed blocks.
        """
        P, ub = self.block_size, self.unit_blocks
        U = P * ub
        batch, heads = table.shape[:2]

        def keys_of(columns):                                                                  # [B, C] -> [B, H, C*P, D]
            if blocks_of is not None:
                return blocks_of(columns)[0].flatten(2, 3)
            ids = table.gather(2, columns[:, None].expand(-1, heads, -1))
            keys, _ = split(read(tiers, ids.reshape(-1)), P, key_dim, value_dim)
            return keys.reshape(batch, heads, -1, key_dim)

        if not self.calibrated:
            self._calibrate(keys_of, -(-length // P), sink_blocks * P, lengths)
        if not ragged and length // U == self.length_done // U:
            self.length_done = length
            return
        pending = (length - self.length_done) // U + 2
        for unit in torch.arange(pending, device=table.device).split(self._segment(batch)):
            target = self.units_done[:, None] + unit
            write = (target + 1) * U <= lengths[:, None]
            target = torch.where(write, target, 0)
            columns = (target[..., None] * ub + torch.arange(ub, device=table.device)).flatten(1)
            keys = keys_of(columns).unflatten(2, (-1, U))
            token = target[..., None] * U + torch.arange(U, device=table.device)
            skip = (token < sink_blocks * P)[:, None].expand(-1, heads, -1, -1)
            target = torch.where(write, target, self.unit[0].shape[2] - 1)
            ops.encode(self.unit, self.row, keys, skip, target, self.kind, P, self.bits, self.logical_size)
        self.units_done = lengths // U
        self.length_done = length

    def score(self, query: torch.Tensor, units: int, softcap: float) -> torch.Tensor:
        """[B, H, G, D] -> [B, H, G, units * unit_blocks] estimated log mass."""
        return ops.score(query, [part[:, :, :units] for part in self.unit], self.row, self.kind, self.block_size,
                         self.bits, softcap, self.dtype, self.logical_size)

    def settle(self, lengths: torch.Tensor) -> None:
        """Before `lengths` change by other hands: note how far the kernels have come."""
        if self.stale:
            self.units_done, self.stale = lengths // (self.block_size * self.unit_blocks), False

    # -- rows ---------------------------------------------------------------------------------------------------
    def take_rows(self, index: torch.Tensor) -> None:
        self.unit = [part.index_select(0, index) for part in self.unit]
        self.row = [part.index_select(0, index) for part in self.row]
        if self.units_done is not None:
            self.units_done = self.units_done.index_select(0, index)
        if self.tail is not None:
            self.tail, self.tail_valid = self.tail.index_select(0, index), self.tail_valid.index_select(0, index)

    def crop(self, lengths: torch.Tensor, length: int) -> None:
        """Forget units beyond the new lengths."""
        if self.units_done is not None:
            self.units_done = torch.minimum(self.units_done, lengths // (self.block_size * self.unit_blocks))
        self.length_done = min(self.length_done, length)

    def clone(self) -> DigestStore:
        new = object.__new__(DigestStore)
        new.__dict__.update(self.__dict__)
        new.unit = [part.clone() for part in self.unit]
        new.row = list(self.row)
        return new


def _last(rows: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `TAIL_QUERIES` columns of [B, H, Q, D], valid ones to the right and in order.

    Sorting by validity is what makes a padded row keep what it would keep alone.
    """
    index = valid.long().argsort(dim=1, stable=True)[:, -TAIL_QUERIES:]
    picked = rows.gather(2, index[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[-1]))
    return picked, valid.gather(1, index)
