"""What is stored of a full-attention layer some of whose KV heads are streaming heads: blocks for the others, a ring for these.

Heads of both kinds go the same way through transformers; only storage and attention part.
"""
from __future__ import annotations

import weakref

import torch

from ..kernels.prefill import head_index
from .handle import KVLength, Pending
from .layer import PSALayer
from .owner import Change
from .protocol import LayerProtocol
from .state import CacheState
from .streaming_ring import SLACK_TOKENS, StreamingRing


class SplitStorage(LayerProtocol):
    """Tokens of a layer with streaming heads, and what happens to its rows.

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

    @property
    def version(self) -> int:
        """Another whenever something has moved that kernels hold the address of."""
        ring = self.ring.version if self.ring is not None else 0
        return ring if self.blocks is None else max(ring, self.blocks.version)

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
        self.others = head_index(tuple(others), self.device)
        if self.blocks is not None:
            self.blocks.model_heads, self.blocks.head_index = self.heads, self.others
        self.is_initialized = True

    def _announce(self, key_states, value_states) -> None:
        if self.blocks is not None:
            self.blocks.update(*(self._rest(part) for part in (key_states, value_states)))

    def _rest(self, part: torch.Tensor) -> torch.Tensor:
        """The other heads of keys or values [B, H, q, *]."""
        return part.index_select(1, self.others)

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
        return bool(((written > self.ring.columns) & (written - self.lengths + removed > SLACK_TOKENS)).any())

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
                             f"more than the last {SLACK_TOKENS} of a row, or some before them. Use a new cache. Nothing in the "
                             "cache was changed.")
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
            lost = self.highest > self.ring.columns and self.highest - self.length + count > SLACK_TOKENS
        else:
            lost = self._is_lost(self.valid[:, self.length - count:].sum(1))
        if lost:
            raise ValueError(f"Layer {self.index} has streaming heads, which keep {SLACK_TOKENS} tokens beside their windows so "
                             f"that as many can be taken back, not {count}. Call cache.reset() and feed the shorter text again. "
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

    def fork(self, state: CacheState) -> SplitStorage:
        """Another layer with the same tokens; the ring is copied."""
        self._flush()
        new = object.__new__(type(self))
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
