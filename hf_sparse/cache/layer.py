"""The cache of one full-attention layer: which way a forward's queries attend to what is stored."""
from __future__ import annotations

import torch

from ..kernels.prefill import causal_attention
from ..kernels.reference.dense import exact_attention
from .backend import warn_reference
from .handle import Pending
from .owner import Change
from .pool import next_version
from .rows import LayerRows
from .step import sparse_step


class PSALayer(LayerRows):
    """Attention over the blocks of one layer: prompts exactly, single tokens sparsely (step.py, or the same as kernels)."""

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
        # Forks of this cache may be in other threads, and share the pool.
        with self.pool.lock, Change(self.state):
            output = self._attend(query, pending, valid, mask, scaling, softcap, sinks, dense_step)
        self.pending = None                                 # stored by now: kept, every layer would hold its prompt twice
        return output

    def _attend(self, query, pending, valid, mask, scaling, softcap, sinks, dense_step):
        count = query.shape[2]
        past = pending.start
        self.group = query.shape[1] // self.heads
        if self.config.sparse_queries and count > 1 and past > 0 and mask is None and not pending.committed:
            return self._attend_one_by_one(query, pending, valid, scaling, softcap, sinks, dense_step)
        # A single token on a filled cache is a decode step, unless it is left over from a prompt in chunks, or the last of several
        # that are new, the others' queries being of no use.
        single = count == pending.count == 1 and past > 0 and not self._is_of_prompt(past + 1)
        if single and mask is None and valid is None and not pending.committed and self.on_device(past + 1):
            with Change(self.state, self.pool):
                return self._device_step(query, pending, scaling, softcap, sinks)
        sparse = single and mask is None and self.is_sparse(past + 1)
        if sparse and not pending.committed:
            self._digest()
        own = not pending.committed                         # else another layer's, which shares its keys and values
        self.commit(pending, valid)
        if not sparse:
            self.digests.observe(query, self.heads, None if valid is None else valid[:, -count:])
        if mask is not None:
            keys, values = self.padded()
            if mask.dtype == torch.bool:
                mask = mask | ~mask.any(-1, keepdim=True)                  # queries of padding: finite, and unread
            return exact_attention(query, keys, values, mask[..., :keys.shape[2]], scaling, softcap, sinks)
        if single:
            return self._decode(query, scaling, softcap, sinks, dense_step, own)
        if past == 0 and count == pending.count:
            return self._prefill(query, pending, scaling, softcap, sinks)
        return self._extend(query, scaling, softcap, sinks)

    def take(self, query, pending: Pending, valid) -> None:
        """Store the first tokens of a row, whose attention somebody else computes: query [B, Hq, q, D], see `attend`."""
        with self.pool.lock, Change(self.state):
            self.group = query.shape[1] // self.heads
            self.commit(pending, valid)
            self.digests.observe(query, self.heads, valid)
        self.pending = None

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
            return causal_attention(query, keys, values, scaling, softcap, sinks)
        order = (~self.valid).long().argsort(dim=1, stable=True)
        gather = lambda x: x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))  # noqa: E731
        output = causal_attention(gather(query), gather(keys), gather(values), scaling, softcap, sinks)
        index = order[:, None, :, None].expand(-1, output.shape[1], -1, output.shape[3])
        return torch.empty_like(output).scatter_(2, index, output)

    def _extend(self, query, scaling, softcap, sinks):
        """Several new tokens on a filled cache (a chunk, a new turn, drafts): exact, over what the tiers hold.

        One layer's keys and values are made dense for it, without padding, so that a row needs no mask but the causal one.
        Queries of padding give zeros.
        """
        keys, values = self._compact()
        if not self.ragged:
            return causal_attention(query, keys[:, :, :self.length], values[:, :, :self.length], scaling, softcap, sinks)
        output = query.new_zeros(*query.shape[:3], self.value_dim)
        # Of prompts and turns in pieces only: a step of one token never comes here, so the host may wait for the lengths.
        for row, length in enumerate(self.lengths.tolist()):
            real, here = self.valid[row, -query.shape[2]:].nonzero().squeeze(1), slice(row, row + 1)
            if len(real):
                output[here, :, real] = causal_attention(query[here, :, real], keys[here, :, :length], values[here, :, :length],
                                                          scaling, softcap, sinks)
        return output

    def _is_of_prompt(self, length: int) -> bool:
        """Whether tokens up to the padded length `length` are of a prompt that comes in chunks, to be attended exactly."""
        return length <= self.state.expected and not self.config.sparse_queries

    def is_sparse(self, length: int) -> bool:
        """Whether the step that makes rows `length` tokens long is sparse."""
        return length >= self.config.min_context and self.index not in self.config.dense_layers

    def _digest(self) -> None:
        """Digest what has closed so far: before a step's own token, which no digest speaks of yet."""
        with torch.autocast(self.device.type, enabled=False):
            self.digests.update(self.pool.tiers(), self.table, self.lengths, self.length, self.ragged,
                                self.config.sink_blocks, self.key_dim, self.value_dim,
                                None if self.exact is None else self._blocks)

    def _decode(self, query, scaling, softcap, sinks, dense_step, own=True):
        self.stats.steps += 1
        if not self.is_sparse(self.length):
            keys, values = self.padded()
            mask = self.valid[:, None, None] if self.ragged else None
            return dense_step(query, keys, values, mask)
        return self._sparse_step(query, scaling, softcap, sinks, own)

    def _sparse_step(self, query, scaling, softcap, sinks, own):
        with Change(self.state, self.pool, ()), torch.autocast(self.device.type, enabled=False):
            return sparse_step(self, query, scaling, softcap, sinks, own)

    # -- the decode step as kernels -------------------------------------------------------------------------------------
    def on_device(self, length: int) -> bool:
        """Whether a step that makes the row `length` tokens long is the kernels' to take."""
        return length >= self.config.min_context and self.state.kernels(self.device, self.dtype) and self.in_reach()

    def in_reach(self) -> bool:
        """Whether kernels can read all blocks where they are."""
        reached = not self.pool.tiered or self.device.type == "cpu" or self.pool.host_tier.pinned
        if not reached:
            warn_reference("host memory could not be pinned", self.device)
        return reached

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
            try:
                self._digest()
            finally:
                if not calibrated:
                    self.version = next_version()           # calibrating moves buffers, also if what follows fails
        self.pool.wait()

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
