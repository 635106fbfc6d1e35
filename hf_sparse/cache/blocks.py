"""The storage of one full-attention layer in blocks: room for tokens, storing them, and reading all of them."""
from __future__ import annotations

import weakref

import torch

from ..kernels import ops
from ..kernels.reference.append import split, unpin
from ..kernels.reference.fetch import read
from ..kernels.reference.quantise import dequantise_blocks
from .digest_store import DigestStore
from .exact_blocks import ExactBlocks
from .handle import KVLength, Pending
from .kept import KeptSelection
from .owner import Change
from .pool import next_version
from .protocol import LayerProtocol
from .state import CacheState
from .stats import LayerStats

# Elements that are dequantised at a time, which bounds the memory beside the dense keys and values.
PIECE_ELEMENTS = 2**24


class LayerBlocks(LayerProtocol):
    """Keys and values of one layer in blocks of the shared pool.

    Tokens are stored without padding: block 0 of a row starts at its first real token, and `lengths` [B] counts
    what is stored. `length` is the padded length that transformers sees; `valid` [B, length] tells them apart once
    there has been padding, else it is None.

    With `kv_bits` below 16 the pool holds closed blocks packed. The always-read ones are read from `exact`, which has them as
    the model gave them, and so are those of a dense read: it sees what a step sees that reads everything.
    """

    kind = "psa"

    def __init__(self, state: CacheState, index: int, order: int):
        super().__init__()
        self.state, self.index, self.order = state, index, order        # order: among the sparse layers
        state.members.append(weakref.ref(self))
        self.stats = LayerStats(state.config.record_steps)
        # Where other KV heads of the layer stream: how many the model has, and which are these (int32 [H]).
        self.model_heads: int | None = None
        self.head_index: torch.Tensor | None = None
        self._clear()

    def _clear(self) -> None:
        self.length = 0
        self.batch = self.heads = self.group = self.key_dim = self.value_dim = 0
        self.lengths = self.valid = self.table = self.pool = self.digests = None
        self.exact: ExactBlocks | None = None               # only with kv_bits below 16
        self.kept = KeptSelection()                         # only used with reuse above 1
        self.columns = 0                                    # blocks of a row that have ids
        self.pending: Pending | None = None
        self.version = next_version()                       # changes when a buffer moves
        self.is_initialized = False

    def reset(self) -> None:
        """Forget everything and give the blocks back."""
        if self.is_initialized:
            self.pool.leave(self)
        self._clear()
        self.stats = LayerStats(self.config.record_steps)

    def __del__(self):
        pool = getattr(self, "pool", None)
        if pool is not None:
            pool.drop()

    @property
    def config(self):
        return self.state.config

    @property
    def ragged(self) -> bool:
        return self.valid is not None

    # -- sizes --------------------------------------------------------------------------------------------------
    @property
    def tail_blocks(self) -> int:
        """The most blocks that are always read at the end of a row: recent ones, or those without final digests."""
        return max(self.config.recent_blocks + 1, self.digests.unit_blocks)

    @property
    def block_elements(self) -> int:
        """Elements of a block that is not quantised."""
        return self.config.block_size * (self.key_dim + self.value_dim)

    def pinned_blocks(self, batch: int) -> int:
        """The most slots this layer can have pinned: sink and tail, and the block that is being opened."""
        return batch * self.heads * (self.config.sink_blocks + self.tail_blocks + 1)

    def side_bytes(self, batch: int | None = None, columns: int | None = None) -> int:
        """Bytes on the device beside the slots, digests and tables: now, or for another batch and width of the table."""
        if self.table is None:
            return 0
        batch, columns = batch or self.batch, columns or self.table.shape[2]
        exact = 0 if self.config.kv_bits == 16 else ExactBlocks.bytes_for(
            batch, self.heads, self.config.sink_blocks, self.tail_blocks, self.block_elements, self.dtype.itemsize)
        lists = 2 if self.config.reuse > 1 else 1           # the table, and the kept selections
        return (self.digests.bytes_for(batch, self.heads, columns) + exact
                + lists * batch * self.heads * columns * self.table.element_size())

    def tail_start(self, lengths: torch.Tensor) -> torch.Tensor:
        """[B] first block of the always-read tail: everything before it, but the sink, is ranked.

        A unit is ranked from the token after the one that closes it, so that a step ranks while it stores.
        """
        P, config = self.config.block_size, self.config
        last = (lengths - 1).clamp(min=0)
        ub = self.digests.unit_blocks
        start = torch.minimum(last // (P * ub) * ub, last // P - config.recent_blocks)
        return start.clamp(min=config.sink_blocks)

    # -- transformers' protocol -----------------------------------------------------------------------------------
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.device, self.dtype = key_states.device, key_states.dtype
        self.batch, self.heads, _, self.key_dim = key_states.shape
        self.value_dim = value_states.shape[-1]
        config = self.config
        self.digests = DigestStore(config.digest, config.block_size, self.key_dim, config.key_bits, self.dtype,
                                   config.logical_size)
        self.lengths = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        self.table = torch.zeros(self.batch, self.heads, 0, dtype=torch.int64, device=self.device)
        self.pool = self.state.pool(key_states, value_states, self.order)
        self.pool.join(self)
        self.is_initialized = True

    def _flush(self) -> None:
        self._extend_valid()
        # Attention never asked for the last tokens (or not through us): they are stored as they are.
        if self.pending is not None and not self.pending.committed:
            self.commit(self.pending, None)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        count = query_length.shape[0] if torch.is_tensor(query_length) else query_length
        total = self.get_seq_length() + count
        if self.is_initialized and not torch.compiler.is_compiling():
            self.reserve(total)                             # what is refused is refused before any layer has stored anything
        return KVLength(total, self), 0

    # -- storing --------------------------------------------------------------------------------------------------
    def reserve(self, length: int) -> None:
        """Ids, tables and digests for `length` padded tokens a row.

        Raises:
            ValueError: the byte budget or the host tier is too small; nothing has changed then.
            torch.OutOfMemoryError: the device has no room; nothing has changed then.
        """
        refusals = (ValueError, torch.OutOfMemoryError)
        with self.pool.lock, Change(self.state, self.pool, refusals):
            self._reserve_or_restore(length, refusals)

    def _reserve_or_restore(self, length: int, refusals: tuple) -> None:
        before = self.table, self.digests.unit
        try:
            self._reserve(length)
        except refusals:
            self.pending = None                             # the tokens that there is no room for
            if self.length == 0:
                for other in self.state.live_layers():      # a prompt that some layers have taken and this one can't
                    other.reset()
            else:
                # The width goes back too: kept, it would count against the budget of shorter turns.
                self.table, self.digests.unit = before
                self.state.fit(self.pool)
            raise

    def _reserve(self, length: int) -> None:
        P, ub = self.config.block_size, self.digests.unit_blocks
        # All of a prompt that comes in chunks at once: what has no room is refused at the first, and nothing is copied.
        needed = -(-max(length, self.state.expected) // P)
        capacity = self.table.shape[2]
        grown = capacity
        if needed > capacity:
            # A quarter more than needed, so that decoding rarely comes back here; whole units, so that no digest
            # speaks of a block that the table can't name.
            grown = -(-max(needed + 8, needed * 5 // 4 if capacity else needed) // ub) * ub
        target = min(needed + 1, grown) if needed > self.columns else self.columns
        count = self.batch * self.heads * (target - self.columns)
        more = self._asked_later(count)
        if grown > capacity:
            old = self.table
            self.table = torch.cat([old, old.new_zeros(self.batch, self.heads, grown - capacity)], 2)
            self.state.fit(self.pool, count + more)
            self.digests.reserve(self.batch, self.heads, grown, self.device)
            if self.config.kv_bits < 16 and self.exact is None:
                like = torch.empty(0, dtype=self.dtype, device=self.device)
                self.exact = ExactBlocks.new(self.batch, self.heads, self.config.sink_blocks, self.tail_blocks,
                                             self.block_elements, like)
            self.version = next_version()
        if count:
            fresh = self.pool.allocate(count, more=more)
            self.table[:, :, self.columns:target] = fresh.view(self.batch, self.heads, -1)
            self.columns = target

    def _asked_later(self, count: int) -> int:
        """Blocks that the layers of this pool which change after this one will ask for, where this one asks for `count`; with
        several devices each has its own layers, and this is not known."""
        state = self.state
        if state.devices > 1 or self.pool.pools > 1:
            return 0
        return count // self.heads * (sum(state.heads[self.order + 1:]) if state.heads else
                                      self.heads * (state.layers - 1 - self.order))

    def commit(self, pending: Pending, valid: torch.Tensor | None) -> None:
        """Store the new tokens; `valid` [B, q] bool, None: all of them are real."""
        if pending.committed:
            return
        self.reserve(self.length + pending.count)
        pending.committed = True
        self._append(pending.keys, pending.values, valid)
        if self.pending is pending:
            self.pending = None

    def _append(self, keys, values, valid) -> None:
        with self.pool.lock, Change(self.state, self.pool, ()):
            self._store(keys, values, valid)

    def _store(self, keys, values, valid) -> None:
        count = keys.shape[2]
        self.digests.settle(self.lengths)
        self.kept.stored(count)
        if valid is None:
            flags = torch.ones(self.batch, count, dtype=torch.bool, device=self.device)
        else:
            flags = valid
        if valid is not None or self.ragged:
            past = self.valid
            if past is None:
                past = torch.ones(self.batch, self.length, dtype=torch.bool, device=self.device)
            self.valid = torch.cat([past, flags], 1)
        before = self.tail_start(self.lengths)
        after = self.tail_start(self.lengths + flags.sum(1))
        tiers = self.pool.tiers()
        self._unpin(tiers, before, after)
        config = self.config
        if self.exact is None:
            ops.append(tiers, self.table, self.lengths, keys, values, flags, config.block_size, config.sink_blocks, after,
                       config.eviction)
        else:
            ops.append_packed(tiers, self.exact.rows, self.table, self.lengths, keys, values, flags, config.block_size,
                              config.sink_blocks, self.exact.newest_blocks, after, config.eviction, config.kv_bits)
        self.length += count

    def _unpin(self, tiers, before, after) -> None:
        """Blocks that leave the tail may be evicted from now on; `before`, `after`: [B] starts of the tail."""
        if not self.pool.tiered or self.columns == 0:
            return
        column = before[:, None] + torch.arange(self.tail_blocks + 1, device=self.device)
        wanted = (column < after[:, None]) & (column < self.columns)
        ids = self.table.gather(2, torch.where(wanted, column, 0)[:, None].expand(-1, self.heads, -1))
        unpin(tiers, ids.reshape(-1), wanted[:, None].expand_as(ids).reshape(-1))

    # -- reading everything -----------------------------------------------------------------------------------------
    def _compact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored tokens without padding, [B, H, N * P, D] and [B, H, N * P, Dv]; beyond a row's length: anything."""
        used = -(-self.length // self.config.block_size)
        with self.pool.lock:
            column = torch.arange(used, device=self.device).expand(self.batch, -1)
            if self.exact is None:
                keys, values = self._blocks(column)
            else:
                shape = self.batch, self.heads, used, self.config.block_size
                new = lambda dim: torch.empty(*shape, dim, dtype=self.dtype, device=self.device)  # noqa: E731
                keys, values = new(self.key_dim), new(self.value_dim)
                piece = max(1, PIECE_ELEMENTS // (self.batch * self.heads * self.block_elements))
                for low in range(0, used, piece):
                    here = slice(low, low + piece)
                    keys[:, :, here], values[:, :, here] = self._blocks(column[:, here])
        return keys.flatten(2, 3), values.flatten(2, 3)

    def _blocks(self, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, H, C, P, D] and values [B, H, C, P, Dv] of blocks [B, C], as a step would read them."""
        rows, sizes = self._packed(column), (self.config.block_size, self.key_dim, self.value_dim)
        if self.exact is None:
            return split(rows, *sizes)
        stored = dequantise_blocks(rows, *sizes, self.config.kv_bits, self.dtype)
        always = (column < self.config.sink_blocks) | (column >= self.tail_start(self.lengths)[:, None])
        exact = split(self.exact.rows[self.exact.ids(column)], *sizes)
        keys, values = (torch.where(always[:, None, :, None, None], *both) for both in zip(exact, stored))
        return keys, values

    def _packed(self, column: torch.Tensor) -> torch.Tensor:
        """Contents [B, H, C, elements] of blocks [B, C] as the tiers hold them."""
        ids = self.table.gather(2, column[:, None].expand(-1, self.heads, -1))
        return read(self.pool.tiers(), ids.reshape(-1)).view(*ids.shape, -1)

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, T, D] as a dense cache would hold them; padding holds some real token."""
        keys, values = self._compact()
        self._extend_valid()
        if not self.ragged:
            return keys[:, :, :self.length], values[:, :, :self.length]
        index = (self.valid.long().cumsum(1) - 1).clamp(min=0)[:, None, :, None]
        return (keys.gather(2, index.expand(-1, self.heads, -1, self.key_dim)),
                values.gather(2, index.expand(-1, self.heads, -1, self.value_dim)))

    def materialise(self, which: str, pending: Pending) -> torch.Tensor:
        """Dense keys or values for code that is not ours."""
        self.commit(pending, None)
        self.state.warn_dense()
        self.stats.materialized += 1
        return self.padded()[0 if which == "keys" else 1]
