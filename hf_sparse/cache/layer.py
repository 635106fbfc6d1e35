"""The cache of one full-attention layer: block tables, digests, and the decode step."""
from __future__ import annotations

import weakref

import torch

from ..kernels import ops
from ..kernels.reference.append import split, unpin
from ..kernels.reference.dense import exact_attention
from ..kernels.reference.fetch import acquire, read
from ..selection.rounds import round_bounds
from .digest_store import DigestStore
from .handle import KVHandle, KVLength, Pending
from .pool import next_version
from .protocol import LayerProtocol
from .state import CacheState
from .stats import LayerStats

# Queries of a chunk that attend together, which bounds the mask.
QUERY_CHUNK = 512


class PSALayer(LayerProtocol):
    """Keys and values of one layer in blocks of the shared pool.

    Tokens are stored without padding: block 0 of a row starts at its first real token, and `lengths` [B] counts
    what is stored. `length` is the padded length that transformers sees; `valid` [B, length] tells them apart once
    there has been padding, else it is None.
    """

    kind = "psa"

    def __init__(self, state: CacheState, index: int, order: int):
        super().__init__()
        self.state, self.index, self.order = state, index, order        # order: among the sparse layers
        state.members.append(weakref.ref(self))
        self.stats = LayerStats(state.config.record_steps)
        self._clear()

    def _clear(self) -> None:
        self.length = 0
        self.batch = self.heads = self.group = self.key_dim = self.value_dim = 0
        self.lengths = self.valid = self.table = self.pool = self.digests = None
        self.columns = 0                                    # blocks of a row that have ids
        self.pending: Pending | None = None
        self.version = next_version()                       # changes when a buffer moves
        self.is_initialized = False

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

    def pinned_blocks(self, batch: int) -> int:
        """The most slots this layer can have pinned: sink and tail, and the block that is being opened."""
        return batch * self.heads * (self.config.sink_blocks + self.tail_blocks + 1)

    def side_bytes(self, batch: int | None = None, columns: int | None = None) -> int:
        """Bytes on the device beside the slots, digests and tables: now, or for another batch and width of the table."""
        if self.table is None:
            return 0
        batch, columns = batch or self.batch, columns or self.table.shape[2]
        return (self.digests.bytes_for(batch, self.heads, columns)
                + batch * self.heads * columns * self.table.element_size())

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
        self.digests = DigestStore(config.digest, config.block_size, self.key_dim, config.key_bits, self.dtype)
        self.lengths = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        self.table = torch.zeros(self.batch, self.heads, 0, dtype=torch.int64, device=self.device)
        self.pool = self.state.pool(key_states, value_states)
        self.pool.join(self)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Accept new tokens [B, H, q, D]; they are stored when attention runs. Returns two `KVHandle`s."""
        self._flush()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.check_batch(key_states.shape[0])
        self.pending = Pending(key_states, value_states, self.length)
        total = self.length + key_states.shape[2]
        return KVHandle(self, "keys", self.pending, total), KVHandle(self, "values", self.pending, total)

    def _flush(self) -> None:
        self._extend_valid()
        # Attention never asked for the last tokens (or not through us): they are stored as they are.
        if self.pending is not None and not self.pending.committed:
            self.commit(self.pending, None)

    def _extend_valid(self) -> None:
        # Steps on the device only count; what they stored was real.
        if self.valid is not None and self.valid.shape[1] < self.length:
            self.valid = torch.nn.functional.pad(self.valid, (0, self.length - self.valid.shape[1]), value=True)

    def get_seq_length(self) -> int:
        waiting = self.pending is not None and not self.pending.committed
        return self.length + (self.pending.count if waiting else 0)

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
        """
        before = self.table, self.digests.unit
        try:
            self._reserve(length)
        except ValueError:
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
        needed = -(-length // P)
        capacity = self.table.shape[2]
        grown = capacity
        if needed > capacity:
            # A quarter more than needed, so that decoding rarely comes back here; whole units, so that no digest
            # speaks of a block that the table can't name.
            grown = -(-max(needed + 8, needed * 5 // 4 if capacity else needed) // ub) * ub
        target = min(needed + 1, grown) if needed > self.columns else self.columns
        count = self.batch * self.heads * (target - self.columns)
        more = count * self._layers_to_come()
        if grown > capacity:
            old = self.table
            self.table = torch.cat([old, old.new_zeros(self.batch, self.heads, grown - capacity)], 2)
            self.state.fit(self.pool, count + more)
            self.digests.reserve(self.batch, self.heads, grown, self.device)
            self.version = next_version()
        if count:
            fresh = self.pool.allocate(count, more=more)
            self.table[:, :, self.columns:target] = fresh.view(self.batch, self.heads, -1)
            self.columns = target

    def _layers_to_come(self) -> int:
        """Layers that change after this one; with several devices each pool has its own, and this is not known."""
        return self.state.layers - 1 - self.order if self.state.devices == 1 else 0

    def commit(self, pending: Pending, valid: torch.Tensor | None) -> None:
        """Store the new tokens; `valid` [B, q] bool, None: all of them are real."""
        if pending.committed:
            return
        self.reserve(self.length + pending.count)
        pending.committed = True
        self._append(pending.keys, pending.values, valid)

    def _append(self, keys, values, valid) -> None:
        count = keys.shape[2]
        self.digests.settle(self.lengths)
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
        ops.append(tiers, self.table, self.lengths, keys, values, flags, self.config.block_size,
                   self.config.sink_blocks, after, self.config.eviction)
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
        ids = self.table[:, :, :used]
        rows = read(self.pool.tiers(), ids.reshape(-1)).view(*ids.shape, -1)
        keys, values = split(rows, self.config.block_size, self.key_dim, self.value_dim)
        return keys.flatten(2, 3), values.flatten(2, 3)

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

    # -- attention ----------------------------------------------------------------------------------------------------
    def attend(self, query, pending: Pending, valid, mask, scaling: float, softcap: float, sinks, dense_step):
        """Store the new tokens and attend to the row.

        Args:
            query: [B, Hq, q, D]. valid: [B, q] bool or None. mask: a pattern that is not plainly causal, bool or
                additive [B, 1, q, T], or None.
            dense_step: callable (query, keys, values, mask) -> [B, Hq, 1, Dv], the stock dense decode step.

        Returns:
            [B, Hq, q, Dv]
        """
        count = query.shape[2]
        past = pending.start
        self.group = query.shape[1] // self.heads
        if self.config.sparse_queries and count > 1 and past > 0 and mask is None and not pending.committed:
            return self._attend_one_by_one(query, pending, valid, scaling, softcap, sinks, dense_step)
        if count == 1 and past > 0 and mask is None and valid is None and not pending.committed and self.on_device(past + 1):
            return self._device_step(query, pending, scaling, softcap, sinks)
        sparse = count == 1 and past > 0 and mask is None and self.is_sparse(past + 1)
        if sparse and not pending.committed:
            self._digest()
        self.commit(pending, valid)
        if not sparse:
            self.digests.observe(query, self.heads, valid)
        if mask is not None:
            keys, values = self.padded()
            if mask.dtype == torch.bool:
                mask = mask | ~mask.any(-1, keepdim=True)                  # queries of padding: finite, and unread
            return exact_attention(query, keys, values, mask[..., :keys.shape[2]], scaling, softcap, sinks)
        if count == 1 and past > 0:
            return self._decode(query, scaling, softcap, sinks, dense_step)
        if past == 0:
            return self._prefill(query, pending, scaling, softcap, sinks)
        return self._extend(query, past, scaling, softcap, sinks)

    def _attend_one_by_one(self, query, pending, valid, scaling, softcap, sinks, dense_step):
        self.reserve(self.length + pending.count)
        pending.committed = True
        outputs = []
        for i in range(query.shape[2]):
            one = slice(i, i + 1)
            flags = None if valid is None else valid[:, one]
            sparse = self.is_sparse(self.length + 1)
            if sparse:
                self._digest()
            self._append(pending.keys[:, :, one], pending.values[:, :, one], flags)
            if not sparse:
                self.digests.observe(query[:, :, one], self.heads, flags)
            outputs.append(self._decode(query[:, :, one], scaling, softcap, sinks, dense_step))
        return torch.cat(outputs, 2)

    def _prefill(self, query, pending, scaling, softcap, sinks):
        """The first tokens: causal attention among themselves, with the padding moved behind instead of masked."""
        keys, values = pending.keys, pending.values
        if not self.ragged:
            return exact_attention(query, keys, values, None, scaling, softcap, sinks, causal=True)
        order = (~self.valid).long().argsort(dim=1, stable=True)
        gather = lambda x: x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))  # noqa: E731
        output = exact_attention(gather(query), gather(keys), gather(values), None, scaling, softcap, sinks,
                                 causal=True)
        index = order[:, None, :, None].expand(-1, output.shape[1], -1, output.shape[3])
        return torch.empty_like(output).scatter_(2, index, output)

    def _extend(self, query, past, scaling, softcap, sinks):
        """Several new tokens on a filled cache (a chunk, a new turn, drafts): exact, over what the tiers hold."""
        keys, values = self.padded()
        outputs = []
        for low in range(0, query.shape[2], QUERY_CHUNK):
            high = min(low + QUERY_CHUNK, query.shape[2])
            visible = past + high
            position = torch.arange(visible, device=query.device)
            own = torch.arange(past + low, visible, device=query.device)[:, None]
            mask = (position <= own)[None, None]
            if self.ragged:
                mask = mask & self.valid[:, None, None, :visible] | (position == own)
            outputs.append(exact_attention(query[:, :, low:high], keys[:, :, :visible], values[:, :, :visible], mask,
                                           scaling, softcap, sinks))
        return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]

    def is_sparse(self, length: int) -> bool:
        """Whether the step that makes rows `length` tokens long is sparse."""
        return length >= self.config.min_context and self.index not in self.config.dense_layers

    def _digest(self) -> None:
        """Digest what has closed so far: before a step's own token, which no digest speaks of yet."""
        self.digests.update(self.pool.tiers(), self.table, self.lengths, self.length, self.ragged,
                            self.config.sink_blocks, self.key_dim, self.value_dim)

    def _decode(self, query, scaling, softcap, sinks, dense_step):
        self.stats.steps += 1
        if not self.is_sparse(self.length):
            keys, values = self.padded()
            mask = self.valid[:, None, None] if self.ragged else None
            return dense_step(query, keys, values, mask)
        return self._sparse_step(query, scaling, softcap, sinks)

    def _sparse_step(self, query, scaling, softcap, sinks):
        """One token of every row, reading only the blocks that matter (design: the decode step)."""
        config, P, store = self.config, self.config.block_size, self.digests
        B, H, G = self.batch, self.heads, query.shape[1] // self.heads
        tiers = self.pool.tiers()
        q = query.float().squeeze(2).unflatten(1, (H, G)) * scaling
        sink_logits = None if sinks is None else sinks.float().view(H, G)
        start = self.tail_start(self.lengths)
        output, mass, forced = ops.attend_forced(tiers, q, self.table, self.lengths, start, config.sink_blocks,
                                                 self.tail_blocks, P, self.value_dim, softcap, config.eviction)
        units = (self.length - 1) // (P * store.unit_blocks)
        candidates = (start - config.sink_blocks).clamp(min=0)
        total = (self.lengths + P - 1) // P
        read, coverage = torch.zeros(B, H, dtype=torch.int64, device=self.device), torch.ones_like(mass)
        if units:
            count, floor, limit = self._budget(candidates, forced, total, units * store.unit_blocks)
            order, rest = ops.select(store.score(q, units, softcap), mass, config.sink_blocks, start, limit,
                                     config.group_reduction)
            output, mass, read, coverage = ops.attend(
                tiers, q, self.table, order, rest, candidates, count, floor, output, mass, sink_logits,
                round_bounds(order.shape[-1], config.round_blocks, config.round_growth), config.policy,
                self._rule(), config.top_p if config.policy == "top_p" else config.threshold,
                config.stop_window, config.group_stop == "min", P, self.value_dim, softcap, config.eviction,
                not store.digest.token_level)
        true = self._true_mass(q, softcap) if config.verify else None
        self.stats.record(read + forced[:, None], total, mass, coverage, true, sink_logits)
        if self.pool.tiered:
            self.pool.clock += 1.0 / self.state.layers
        if sink_logits is not None:
            output = output * torch.sigmoid(mass - sink_logits)[..., None]
        return output.to(query.dtype).flatten(1, 2)[:, :, None]

    # -- the decode step as kernels -------------------------------------------------------------------------------------
    def on_device(self, length: int) -> bool:
        """Whether a step that makes the row `length` tokens long is the kernels' to take."""
        return self.state.kernels(self.device, self.dtype) and not self.pool.tiered and length >= self.config.min_context

    def begin_step(self) -> None:
        """Host work before a step of the kernels: room for one token, and digests of everything before it."""
        if self.pending is not None and not self.pending.committed:
            self._flush()
        self.reserve(self.length + 1)
        store = self.digests
        if store.provisional and self.length >= self.config.min_context:
            store.forget()                                  # what a few tokens said of the channels is not enough
        if not store.calibrated or store.length_done < self.length:
            calibrated = store.calibrated
            store.provisional = self.length < self.config.min_context
            self._digest()
            if not calibrated:
                self.version = next_version()

    def room(self) -> int:
        """Padded length up to which steps of the kernels need no host work."""
        room = self.columns * self.config.block_size
        return min(room, self.config.min_context) if self.digests.provisional else room

    def end_step(self) -> None:
        """Count the token that the kernels have stored (and digested)."""
        self.length += 1
        store, stats = self.digests, self.stats
        store.length_done, store.stale = self.length, True
        stats.steps += 1
        stats.sparse_steps += 1

    def _device_step(self, query, pending, scaling, softcap, sinks):
        pending.committed = True
        self.begin_step()
        step = self.state.step()
        step.prepare([self])
        output = step.run(self, query, pending.keys, pending.values, sinks, scaling, softcap)
        self.end_step()
        return output.transpose(1, 2)

    def _budget(self, candidates, forced, total, blocks):
        """[B] how many ranked blocks may be read, [B] how many must be, and how many to rank."""
        config = self.config
        count, floor = candidates, (config.min_blocks - forced).clamp(min=0)
        most = config.max_blocks
        if config.policy == "top_k":
            if isinstance(config.top_k, float):
                count = torch.minimum(count, (torch.ceil(total * config.top_k).long() - forced).clamp(min=0))
            else:
                most = min(config.top_k, most or config.top_k)
        limit = blocks
        if most is not None:
            count = torch.minimum(count, (most - forced).clamp(min=0))
            limit = min(limit, most)
        # Short rows of a long batch are read whole, as they would be alone.
        short = self.lengths < config.min_context
        limit = max(limit, min(blocks, config.min_context // config.block_size))
        count = torch.where(short, candidates, count)
        floor = torch.where(short, candidates, torch.minimum(floor, count))
        return count, floor, limit

    def _rule(self) -> str:
        """The stop rule, or for policies without one the rule that their coverage is reported by."""
        token_level = self.digests.digest.token_level
        return "window" if self.config.stop_rule == "estimate" and not token_level else self.config.stop_rule

    def _true_mass(self, q, softcap):
        """[B, H, G] log mass of the whole row."""
        keys, _ = self._compact()
        logits = torch.einsum("bhgd,bhtd->bhgt", q, keys.float())
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        token = torch.arange(keys.shape[2], device=self.device)
        inside = (token < self.lengths[:, None])[:, None, None]
        return torch.logsumexp(logits.masked_fill(~inside, -torch.inf), -1)

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
        valid = valid.to(self.device)
        now = torch.ones_like(valid) if self.valid is None else self.valid
        first = int((valid != now).any(0).long().argmax())
        keys, values = (part[:, :, first:].clone() for part in self.padded())
        self.crop(first - self.length)
        self.reserve(first + keys.shape[2])
        self._append(keys, values, valid[:, first:])

    # -- rows -----------------------------------------------------------------------------------------------------------
    def _take_rows(self, index: torch.Tensor, release: bool = True) -> None:
        """Become rows `index` [B'] of itself: closed blocks are shared, open ones copied.

        `release`: the present rows go away (else they stay with another layer object, as in a fork).
        """
        self._flush()
        if not self.is_initialized:
            return
        index = index.to(self.device)
        self.digests.settle(self.lengths)
        P, H = self.config.block_size, self.heads
        tiers = self.pool.tiers()
        open_column = self.lengths // P
        first = int(open_column.min()) if self.ragged else self.length // P
        lengths, open_column = self.lengths.index_select(0, index), open_column.index_select(0, index)
        rows = index.shape[0]
        partial = lengths % P != 0
        column = torch.where(partial, open_column, 0)[:, None, None].expand(-1, H, -1)
        old = self.table.index_select(0, index)
        content = read(tiers, torch.where(partial[:, None], old.gather(2, column).squeeze(2), 0).reshape(-1))
        table = old.clone()
        table[:, :, self.columns:] = 0                      # after a crop: blocks that are given back
        width = self.columns - first
        more = rows * H * max(0, width) * self._layers_to_come()
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
        tiers = self.pool.tiers()
        if release:
            unpin(tiers, before[0].reshape(-1), torch.ones_like(before[0], dtype=torch.bool).reshape(-1))
        self._open(tiers, column, partial, content)

    def _open(self, tiers, column, partial, content) -> None:
        """Put `content` into the open block of rows that have one, and pin it and the sink."""
        ids = self.table.gather(2, column).reshape(-1)
        wanted = partial[:, None].expand(-1, self.heads).reshape(-1)
        slots = acquire(tiers, ids, wanted, self.config.eviction, load=False)
        tiers[0][slots] = content
        if self.pool.tiered:
            tiers[5][slots] = True
            tiers[5][tiers[2][self.table[:, :, :self.config.sink_blocks]]] = True

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch, device=self.device)[indices.to(self.device)])

    def crop(self, tokens: int) -> None:
        """Remove tokens at the end: negative, how many; positive, the length to keep. A closed block is reopened."""
        self._flush()
        count = self.to_remove(tokens)
        if count == 0 or not self.is_initialized:
            return
        self.digests.settle(self.lengths)
        before = self.length, self.lengths, self.valid, self.columns, self.digests.clone()
        self.length -= count
        self.columns = min(self.columns, -(-self.length // self.config.block_size))
        if self.ragged:
            self.lengths = self.lengths - self.valid[:, self.length:].sum(1)
            self.valid = self.valid[:, :self.length]
        else:
            self.lengths = self.lengths - count
        self.digests.crop(self.lengths, self.length)
        # The reopened block may be shared with a fork or another row, and so may those after it: fresh ids for both.
        try:
            self._take_rows(torch.arange(self.batch, device=self.device))
        except ValueError:
            self.length, self.lengths, self.valid, self.columns, self.digests = before
            raise

    def fork(self, state: CacheState) -> PSALayer:
        """Another layer with the same tokens, which shares closed blocks."""
        self._flush()
        new = object.__new__(PSALayer)
        new.__dict__.update(self.__dict__)
        new.state, new.pending, new.stats = state, None, LayerStats(state.config.record_steps)
        state.members.append(weakref.ref(new))
        if self.is_initialized:
            new.digests = self.digests.clone()
            new.table = self.table.clone()
            self.pool.join(new)
            try:
                new._take_rows(torch.arange(self.batch, device=self.device), release=False)
            except ValueError:
                new.reset()
                raise
        return new

    def reset(self) -> None:
        """Forget everything and give the blocks back."""
        if self.is_initialized:
            self.pool.drop()
            self.pool.users.discard(self)
            if self.pool.tiered and not self.pool.users:
                self.pool.counters.zero_()
        self._clear()
        self.stats = LayerStats(self.config.record_steps)

    def __del__(self):
        pool = getattr(self, "pool", None)
        if pool is not None:
            pool.drop()
