"""The cache of a full-attention layer some of whose KV heads are streaming heads: how both kinds attend."""
from __future__ import annotations

import contextlib

import torch

from ..kernels.prefill import prefill_attention
from .handle import Pending
from .owner import Change
from .split_storage import SplitStorage


class SplitLayer(SplitStorage):
    """Attention over the blocks of some heads and the ring of the others: a prompt as a whole, single tokens by their kinds."""

    # -- attention ----------------------------------------------------------------------------------------------------
    def attend(self, query, pending: Pending, valid, mask, scaling: float, softcap: float, sinks, dense_step):
        """Store the new tokens and attend to the row; see `PSALayer.attend`.

        Raises:
            NotImplementedError: a mask that is not plainly causal; tokens that have been attended to before.
        """
        if mask is not None and not self._says_padding(mask, valid):
            raise NotImplementedError(f"Layer {self.index} has streaming heads, and the mask of this forward is not plainly "
                                      "causal. Leave streaming_heads out for this model or input.")
        if pending.committed:
            raise NotImplementedError(f"Layer {self.index} has streaming heads, and another layer attends to its keys and values "
                                      "too. Leave it out of streaming_heads.")
        # Forks of this cache may be in other threads, and share the pool.
        with self.pool.lock if self.blocks is not None else contextlib.nullcontext(), Change(self.state):
            try:
                output = self._attend(query, pending, valid, mask, scaling, softcap, sinks, dense_step)
            except ValueError:
                self.pending = None                         # the blocks have no room for these tokens
                raise
        self.pending = None
        return output

    def _says_padding(self, mask: torch.Tensor, valid: torch.Tensor | None) -> bool:
        """Whether a mask of one new token says no more than which tokens are padding. Synchronises."""
        if mask.dtype != torch.bool or mask.shape[1:] != (1, 1, self.length + 1):
            return False
        real = torch.ones(self.batch, 1, dtype=torch.bool, device=self.device)
        past = real.expand(-1, self.length) if self.valid is None else self.valid
        return bool((mask[:, 0, 0] == torch.cat([past, real if valid is None else valid], 1)).all())

    def _attend(self, query, pending, valid, mask, scaling, softcap, sinks, dense_step):
        count, past = query.shape[2], pending.start
        # A single token left over from a prompt in chunks is of the prompt.
        single = count == 1 and past > 0 and past + 1 > self.state.expected
        if single and valid is None and mask is None and self.on_device(past + 1):
            return self._device_step(query, pending, scaling, softcap, sinks)
        if past == 0:
            return self._prefill(query, pending, valid, scaling, softcap, sinks)
        output = query.new_empty(*query.shape[:3], pending.values.shape[-1])
        whole = output.unflatten(1, (self.heads, -1))
        if self.blocks is not None:
            whole[:, self.others] = self._by_blocks(query, valid, mask, scaling, softcap, sinks, dense_step)
        with Change(self.state, refusals=()):               # the blocks have taken the tokens
            whole[:, self.ring.head_index] = self._by_ring(query, pending, valid, single, scaling, softcap, sinks)
        return output

    def _by_blocks(self, query, valid, mask, scaling, softcap, sinks, dense_step):
        """The other heads' attention, [B, heads, G, q, Dv]; stores their tokens."""
        blocks, group = self.blocks, query.shape[1] // self.heads
        sinks = None if sinks is None else sinks.view(self.heads, group).index_select(0, self.others).flatten()
        output = blocks.attend(self._rest_of_queries(query), blocks.pending, valid, mask, scaling, softcap, sinks, dense_step)
        return output.unflatten(1, (-1, group))

    def _by_ring(self, query, pending, valid, single: bool, scaling, softcap, sinks):
        """The streaming heads' attention, [B, heads, G, q, Dv]; stores their tokens."""
        ring, group = self.ring, query.shape[1] // self.heads
        query, keys, values = ring.own_queries(query), ring.own(pending.keys), ring.own(pending.values)
        sinks = None if sinks is None else sinks.view(self.heads, group).index_select(0, ring.head_index).flatten()
        if single:
            self._narrow()
            self.stepped = self.length + 1
            output = ring.step(query, keys, values, valid, scaling, softcap, sinks)
            self._end(pending, valid)
        else:
            output = self._extend(query, keys, values, valid, scaling, softcap, sinks)
            self._store(pending, valid)
        return output.unflatten(1, (-1, group))

    def _extend(self, query, keys, values, valid, scaling, softcap, sinks):
        """Several new tokens on a filled ring. Queries of padding give zeros."""
        more = scaling, softcap, sinks
        if valid is None and self.valid is None:
            return self.ring.extend(query, keys, values, slice(None), self.length, self._turn_window(self.stepped), *more)
        output = query.new_zeros(*query.shape[:3], values.shape[-1])
        # Of prompts and turns in pieces only: a decoded token never comes here, so the host may wait for the lengths.
        lengths = self.lengths.tolist()
        decoded = [self.stepped] * self.batch if self.valid is None else self.valid[:, :self.stepped].sum(1).tolist()
        for row, length in enumerate(lengths):
            real = torch.arange(query.shape[2], device=self.device) if valid is None else valid[row].nonzero().squeeze(1)
            here = slice(row, row + 1)
            if len(real):
                output[here, :, real] = self.ring.extend(query[here, :, real], keys[here, :, real], values[here, :, real], here,
                                                         length, self._turn_window(decoded[row]), *more)
        return output

    def _turn_window(self, decoded: int) -> int:
        """Tokens that several new ones see in a row whose first `decoded` tokens were there when its last one was decoded.

        Those of a prompt see the prefill window. Once the row has been decoded with less, the others between may be gone; then
        it is the window of decoding, for drafts, turns and chunks of any length alike.
        """
        ring = self.ring
        return ring.window if ring.narrowed or self.stepped and decoded >= ring.narrow_from else ring.prefill_window

    def _prefill(self, query, pending, valid, scaling, softcap, sinks):
        """The first tokens."""
        if self.blocks is not None:
            self.blocks.take(self._rest_of_queries(query), self.blocks.pending, valid)
        with Change(self.state, refusals=()):               # the blocks have taken the tokens
            return self._prefill_all(query, pending, valid, scaling, softcap, sinks)

    def _prefill_all(self, query, pending, valid, scaling, softcap, sinks):
        """All heads at once, with the padding moved behind instead of masked."""
        ring, keys, values = self.ring, pending.keys, pending.values
        self._store(pending, valid)
        settings = self.streaming, ring.sink, ring.prefill_window, scaling, softcap, sinks
        if valid is None:
            return prefill_attention(query, keys, values, *settings)
        order = (~valid).long().argsort(dim=1, stable=True)[:, None, :, None]
        gather = lambda x: x.gather(2, order.expand(-1, x.shape[1], -1, x.shape[3]))  # noqa: E731
        output = prefill_attention(gather(query), gather(keys), gather(values), *settings)
        return torch.empty_like(output).scatter_(2, order.expand_as(output), output)

    # -- the decode step as kernels -----------------------------------------------------------------------------------
    def on_device(self, length: int) -> bool:
        """Whether a step that makes the row `length` tokens long is the kernels' to take."""
        if self.blocks is not None:
            return self.blocks.on_device(length)
        return length >= self.config.min_context and self.state.kernels(self.device, self.dtype)

    def in_reach(self) -> bool:
        return self.blocks is None or self.blocks.in_reach()

    def begin_step(self) -> None:
        """Host work before a step of the kernels."""
        if self.pending is not None and not self.pending.committed:
            self._flush()
        if self.blocks is not None:
            self.blocks.begin_step()
        self._narrow()

    def room(self) -> int:
        """Padded length up to which steps of the kernels need no host work."""
        room = 2**62 if self.blocks is None else self.blocks.room()
        return room if self.ring.narrowed else min(room, self.ring.look_at - 1)

    def end_step(self) -> None:
        """Count the token that the kernels have stored."""
        self._count(1)
        self.stepped = self.length
        if self.blocks is not None:
            self.blocks.end_step()

    def _device_step(self, query, pending, scaling, softcap, sinks):
        with Change(self.state, self.pool):
            pending.committed = True
            if self.blocks is not None:
                self.blocks.pending.committed = True
                self.blocks.group = query.shape[1] // self.heads
            self.begin_step()
            step = self.state.step()
            step.prepare([self])
            output = step.run(self, query, pending.keys, pending.values, sinks, scaling, softcap)
            self.end_step()
            if self.blocks is not None:
                self.blocks.pending = None
        return output.transpose(1, 2)

    def _rest_of_queries(self, query: torch.Tensor) -> torch.Tensor:
        """The queries of the other heads, of [B, Hq, q, D]."""
        return query.unflatten(1, (self.heads, -1)).index_select(1, self.others).flatten(1, 2)
