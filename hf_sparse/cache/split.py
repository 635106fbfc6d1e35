"""The cache of a full-attention layer some of whose KV heads are streaming heads: blocks for the others, a ring for these.

Heads of both kinds go the same way through transformers; only storage and attention part.
"""
from __future__ import annotations

import contextlib
import weakref

import torch

from ..kernels.prefill import prefill_attention
from .handle import KVHandle, KVLength, Pending
from .layer import PSALayer
from .owner import Change
from .protocol import LayerProtocol
from .ring import SLACK, StreamingRing
from .state import CacheState


class SplitLayer(LayerProtocol):
    """A layer with streaming heads.

    Args:
        order: of the layer's blocks among the sparse layers; None: all heads stream, and there are none.
        streaming: KV heads that stream.

    Attributes:
        blocks: the other heads, a layer of their own; None without.
        ring: the streaming heads; None until the first tokens come.
    """

    kind = "split"

    def __init__(self, state: CacheState, index: int, order: int | None, streaming: tuple[int, ...]):
        super().__init__()
        self.state, self.index, self.streaming = state, index, streaming
        self.blocks = None if order is None else PSALayer(state, index, order)
        state.members.append(weakref.ref(self))
        self._clear()

    def _clear(self) -> None:
        self.length = self.batch = self.heads = 0
        self.stepped = 0                                    # padded length after the last token that was decoded
        self.valid: torch.Tensor | None = None              # [B, length] which tokens are no padding; None: all
        # Tokens up to which the ring has been written, those taken back included: of all rows, without padding; else [B], up to
        # when some were taken back last.
        self.highest, self.written = 0, None
        self.ring: StreamingRing | None = None
        self.pending: Pending | None = None
        self.is_initialized = False

    @property
    def config(self):
        return self.state.config

    @property
    def pool(self):
        """The pool of the other heads' blocks, None without."""
        return None if self.blocks is None else self.blocks.pool

    @property
    def lengths(self) -> torch.Tensor:
        """[B] tokens stored."""
        return self.ring.lengths[:, 0]

    def side_bytes(self) -> int:
        """Bytes of the ring; blocks and digests are counted by the layer of the other heads."""
        return self.ring.bytes() if self.is_initialized else 0

    # -- transformers' protocol -----------------------------------------------------------------------------------
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.device, self.dtype = key_states.device, key_states.dtype
        self.batch, self.heads = key_states.shape[:2]
        others = [head for head in range(self.heads) if head not in self.streaming]
        if self.streaming[-1] >= self.heads or (self.blocks is None) != (not others):
            raise ValueError(f"streaming_heads names KV head {self.streaming[-1]} of layer {self.index}, which has "
                             f"{self.heads} KV heads. Choose heads for this model (hf_sparse.heads).")
        self.ring = StreamingRing(self.config, self.streaming, self.heads, key_states, value_states)
        self.others = torch.tensor(others, dtype=torch.int32, device=self.device)
        if self.blocks is not None:
            self.blocks.model_heads, self.blocks.head_index = self.heads, self.others
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Accept new tokens [B, H, q, D]; they are stored when attention runs. Returns two `KVHandle`s."""
        self._flush()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.check_batch(key_states.shape[0])
        if self.blocks is not None:
            self.blocks.update(*(self._rest(part) for part in (key_states, value_states)))
        self.pending = Pending(key_states, value_states, self.length)
        total = self.length + key_states.shape[2]
        return KVHandle(self, "keys", self.pending, total), KVHandle(self, "values", self.pending, total)

    def _rest(self, part: torch.Tensor) -> torch.Tensor:
        """The other heads of keys or values [B, H, q, *]."""
        return part.index_select(1, self.others)

    def _rest_of_queries(self, query: torch.Tensor) -> torch.Tensor:
        """The queries of the other heads, of [B, Hq, q, D]."""
        return query.unflatten(1, (self.heads, -1)).index_select(1, self.others).flatten(1, 2)

    def _flush(self) -> None:
        self._extend_valid()
        if self.pending is not None and not self.pending.committed:
            # Attention never asked for the last tokens: they are stored as they are.
            pending, self.pending = self.pending, None
            with Change(self.state):
                self._store(pending, None)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        count = query_length.shape[0] if torch.is_tensor(query_length) else query_length
        if self.blocks is not None and self.is_initialized:
            self.blocks.get_mask_sizes(count)
        return KVLength(self.get_seq_length() + count, self), 0

    def materialise(self, which: str, pending: Pending) -> torch.Tensor:
        """Refused, always: what has left the ring is gone."""
        raise NotImplementedError(
            f"Layer {self.index} has streaming heads, which keep the first and the last tokens only, and something asks for "
            "all keys and values. Patch the model with hf_sparse.patch_model(model), or leave streaming_heads out.")

    # -- storing ------------------------------------------------------------------------------------------------------
    def _store(self, pending: Pending, valid: torch.Tensor | None) -> None:
        """The streaming heads' new tokens into the ring, and the count of all of them."""
        self.ring.store(pending.keys, pending.values, valid)
        self._end(pending, valid)

    def _end(self, pending: Pending, valid: torch.Tensor | None) -> None:
        """Count new tokens that the ring has taken."""
        if valid is not None or self.valid is not None:
            self._note_padding()
            flags = valid if valid is not None else torch.ones(self.batch, pending.count, dtype=torch.bool, device=self.device)
            self.valid = torch.cat([self.valid, flags], 1)
        self._count(pending.count)
        pending.committed = True

    def _note_padding(self) -> None:
        """From now on rows may differ in length."""
        if self.valid is None:
            self.valid = torch.ones(self.batch, self.length, dtype=torch.bool, device=self.device)
            self.written = torch.full((self.batch,), self.highest, device=self.device)

    def _count(self, tokens: int) -> None:
        self.length += tokens
        self.highest = max(self.highest, self.length)

    def _narrow(self) -> None:
        """Before a decode step."""
        held, length = self.ring.columns, self.length
        self.ring.narrow(length + 1)
        if self.ring.columns == held:
            return
        # Where nothing had left the ring, all that stays has been moved: what was taken back before does not matter any more.
        if self.highest <= held:
            self.highest = length
        if self.written is not None:
            self.written = torch.where(self.written <= held, self.lengths, self.written)

    def _is_lost(self, removed: torch.Tensor) -> bool:
        """Whether the ring lacks what a row that loses `removed` [B] tokens would see. Synchronises."""
        written = torch.maximum(self.written, self.lengths)
        return bool(((written > self.ring.columns) & (written - self.lengths + removed > SLACK)).any())

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

    @property
    def version(self) -> int:
        """Another whenever something has moved that kernels hold the address of."""
        ring = self.ring.version if self.ring is not None else 0
        return ring if self.blocks is None else max(ring, self.blocks.version)

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

    # -- padding that changes later -----------------------------------------------------------------------------------
    def agrees(self, valid: torch.Tensor) -> bool:
        """Whether [B, T] says of the stored tokens what was said when they came. Synchronises."""
        self._flush()
        if valid.shape[1] != self.length or not self.is_initialized:
            return True
        return bool(valid.all()) if self.valid is None else bool((valid.to(self.device) == self.valid).all())

    def _hidden(self, valid: torch.Tensor) -> torch.Tensor:
        """[B] tokens that [B, T] takes back at the end of each row.

        Raises:
            ValueError: it hides tokens that others stand behind, or more than the ring can take back.
        """
        valid = valid.to(self.device)
        self._note_padding()
        count = (self.valid & ~valid).sum(1)
        behind = (torch.cumsum(self.valid.flip(1), 1).flip(1) <= count[:, None]) & self.valid & valid
        if bool(behind.any()) or self._is_lost(count):
            raise ValueError(f"attention_mask hides tokens that the streaming heads of layer {self.index} can't take back: "
                             f"more than the last {SLACK} of a row, or some before them. Use a new cache. Nothing in the cache "
                             "was changed.")
        return count

    def shows_more(self, valid: torch.Tensor) -> bool:
        if not self.is_initialized or valid.shape[1] != self.length or self.agrees(valid):
            return False
        self._hidden(valid)                                 # refused now, before any layer has changed
        return self.valid is not None and bool((valid.to(self.device) & ~self.valid).any())

    def hide(self, valid: torch.Tensor) -> None:
        """From now on [B, T] says which stored tokens are real; the other heads are told by themselves."""
        if not self.is_initialized or self.agrees(valid):
            return
        count = self._hidden(valid)
        self.written = torch.maximum(self.written, self.lengths)
        self.ring.lengths -= count[:, None]
        self.valid = valid.to(self.device).clone()

    # -- rows -----------------------------------------------------------------------------------------------------------
    def _take_rows(self, index: torch.Tensor) -> None:
        self._flush()
        if not self.is_initialized:
            return
        with Change(self.state):
            if self.blocks is not None:
                self.blocks._take_rows(index)
            self._take(index)

    def _take(self, index: torch.Tensor) -> None:
        self.ring.take_rows(index)
        self.batch = index.shape[0]
        if self.valid is not None:
            self.valid, self.written = (part.index_select(0, index.to(self.device)) for part in (self.valid, self.written))

    def check_crop(self, tokens: int) -> None:
        """Raise if tokens can't be taken back because older ones have left the ring."""
        self._flush()
        count = self.to_remove(tokens)
        if not self.is_initialized or count in (0, self.length):
            return
        if self.valid is None:                              # known without waiting for the device
            lost = self.highest > self.ring.columns and self.highest - self.length + count > SLACK
        else:
            lost = self._is_lost(self.valid[:, self.length - count:].sum(1))
        if lost:
            raise ValueError(f"Layer {self.index} has streaming heads, which keep {SLACK} tokens beside their windows so that "
                             f"as many can be taken back, not {count}. Call cache.reset() and feed the shorter text again. "
                             "Nothing was changed.")

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        count = self.to_remove(tokens)
        if count == 0 or not self.is_initialized:
            return
        if self.blocks is not None:
            self.blocks.crop(-count)
        self.length -= count
        self.stepped = min(self.stepped, self.length)
        if self.length == 0:                                # the next tokens are a prompt again
            self.ring = StreamingRing(self.config, self.streaming, self.heads, self.ring.keys, self.ring.values)
            self.highest, self.written, self.valid = 0, None, None
        elif self.valid is None:
            self.ring.lengths -= count
        else:
            self.written = torch.maximum(self.written, self.lengths)
            self.ring.lengths -= self.valid[:, self.length:].sum(1)[:, None]
            self.valid = self.valid[:, :self.length]

    def fork(self, state: CacheState) -> SplitLayer:
        """Another layer with the same tokens; the ring is copied."""
        self._flush()
        new = object.__new__(SplitLayer)
        new.__dict__.update(self.__dict__)
        new.state, new.pending = state, None
        new.blocks = None if self.blocks is None else self.blocks.fork(state)
        new.ring = None if self.ring is None else self.ring.clone()
        if new.ring is not None:
            new.ring.follow(state.config)
        state.members.append(weakref.ref(new))
        return new

    def reset(self) -> None:
        if self.blocks is not None:
            self.blocks.reset()
        self._clear()
