"""The cache of a sliding-window or chunked-attention layer: a ring of the last tokens, read densely."""
from __future__ import annotations

import weakref

import torch

from ..compat import RECORDS_PAST
from ..kernels.prefill import window_attention
from ..kernels.reference.dense import exact_attention
from .handle import KVLength, Pending
from .owner import Change
from .protocol import LayerProtocol
from .state import CacheState

# Tokens beyond the window that the ring keeps, so that drafts can be taken back.
SLACK = 64
QUERY_CHUNK = 512


class WindowLayer(LayerProtocol):
    """Keys and values of the last tokens, padding included, at index `position % capacity`.

    Positions are padded ones, as transformers counts its windows. `window` tokens are visible to a query, its own
    among them; with `chunk`, those of its own chunk of the row.
    """

    kind = "window"
    is_sliding = True

    def __init__(self, state: CacheState, index: int, window: int, chunk: int | None = None):
        super().__init__()
        self.state, self.index, self.window, self.chunk = state, index, window, chunk
        self.sliding_window = window
        state.members.append(weakref.ref(self))
        self.materialized = 0
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.length, self.batch, self.capacity = 0, 0, 0
        self.oldest = 0                                     # first position that has not been overwritten
        self.ring_keys = self.ring_values = self.ring_valid = self.first = None
        self.padded = False                                 # no padding has come so far
        self.pending: Pending | None = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.device, self.dtype = key_states.device, key_states.dtype
        self.batch = key_states.shape[0]
        self.capacity = self.window + SLACK
        batch, heads, _, dim = key_states.shape
        self.ring_keys = key_states.new_zeros(batch, heads, self.capacity, dim)
        self.ring_values = key_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.ring_valid = torch.zeros(batch, self.capacity, dtype=torch.bool, device=self.device)
        # Padded position of each row's first real token, from which chunks are counted; -1: none yet.
        self.first = torch.full((batch,), -1, dtype=torch.int64, device=self.device)
        self.is_initialized = True

    def side_bytes(self) -> int:
        if not self.is_initialized:
            return 0
        return (self.ring_keys.numel() + self.ring_values.numel()) * self.ring_keys.element_size()

    # -- transformers' protocol -----------------------------------------------------------------------------------
    def _flush(self) -> None:
        if self.pending is not None and not self.pending.committed:
            self._store(self.pending, None)

    def _past(self, length: int) -> int:
        return min(length, self.window - 1)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        count = query_length.shape[0] if torch.is_tensor(query_length) else query_length
        length = self.get_seq_length()
        past = self._past(length)
        return KVLength(past + count, self), length - past

    def activate_past_recording(self) -> None:
        self.record_past = True

    # -- storing --------------------------------------------------------------------------------------------------
    def _indices(self, low: int, high: int) -> torch.Tensor:
        return torch.arange(low, high, device=self.device) % self.capacity

    def _before(self, pending: Pending) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and validity of the tokens before `pending` that it may see."""
        if pending.past is not None:                        # stored: the new tokens may lie where these were
            return pending.past
        index = self._indices(pending.start - self._past(pending.start), pending.start)
        return self.ring_keys[:, :, index], self.ring_values[:, :, index], self.ring_valid[:, index]

    def _store(self, pending: Pending, valid: torch.Tensor | None):
        """Put the new tokens into the ring; returns everything they may see, themselves included."""
        with Change(self.state, refusals=()):
            return self._write(pending, valid)

    def _write(self, pending: Pending, valid: torch.Tensor | None):
        keys, values, flags = self._before(pending)
        count = pending.count
        self.padded = self.padded or valid is not None
        if valid is None:
            valid = torch.ones(self.batch, count, dtype=torch.bool, device=self.device)
        everything = (torch.cat([keys, pending.keys], 2), torch.cat([values, pending.values], 2),
                      torch.cat([flags, valid], 1))
        if pending.committed:
            return everything
        if self.record_past and self.window + count > self.capacity:
            self._enlarge(self.window + count)
        first = pending.start + valid.long().argmax(1)
        self.first = torch.where((self.first < 0) & valid.any(1), first, self.first)
        kept = min(count, self.capacity)
        index = self._indices(pending.start + count - kept, pending.start + count)
        # Without gradients: a ring would hold the graphs of all forwards.
        self.ring_keys[:, :, index] = pending.keys[:, :, count - kept:].detach()
        self.ring_values[:, :, index] = pending.values[:, :, count - kept:].detach()
        self.ring_valid[:, index] = valid[:, count - kept:]
        self.length = pending.start + count
        self.oldest = max(self.oldest, self.length - self.capacity)
        pending.committed, pending.past = True, (keys, values, flags)
        if self.pending is pending:
            self.pending = None                             # the ring holds what is needed of it
        return everything

    def _enlarge(self, capacity: int) -> None:
        old = self._indices(max(0, self.length - self.capacity), self.length)
        kept = (self.ring_keys[:, :, old], self.ring_values[:, :, old], self.ring_valid[:, old])
        low, self.capacity = max(0, self.length - self.capacity), capacity
        new = self._indices(low, self.length)
        for name, part in zip(("ring_keys", "ring_values"), kept):
            ring = part.new_zeros(*part.shape[:2], capacity, part.shape[3])
            ring[:, :, new] = part
            setattr(self, name, ring)
        self.ring_valid = kept[2].new_zeros(self.batch, capacity)
        self.ring_valid[:, new] = kept[2]

    def materialise(self, which: str, pending: Pending) -> torch.Tensor:
        """Dense keys or values for code that is not ours: the visible past and the new tokens."""
        keys, values, _ = self._store(pending, None)
        self.state.warn_dense()
        self.materialized += 1
        return keys if which == "keys" else values

    # -- attention ----------------------------------------------------------------------------------------------------
    def attend(self, query, pending: Pending, valid, mask, scaling: float, softcap: float, sinks, dense_step):
        """Store the new tokens and attend within the window; see `PSALayer.attend`."""
        start, count = pending.start, query.shape[2]
        keys, values, flags = self._store(pending, valid)
        past = keys.shape[2] - count
        first = start + pending.count - keys.shape[2]       # position of the first key
        if mask is not None:
            mask = mask[..., -keys.shape[2]:]
            if mask.dtype == torch.bool:
                mask = mask | ~mask.any(-1, keepdim=True)
            return exact_attention(query, keys, values, mask, scaling, softcap, sinks)
        first_ones = valid is not None and keys.shape[2] == count      # later, padding lies between what the window holds
        if self.chunk is None and (first_ones or not self.padded):
            output = window_attention(query, keys, values, self.window, scaling, softcap, sinks, valid)
            if output is not None:
                return output
        outputs = []
        for low in range(0, count, QUERY_CHUNK):
            high = min(low + QUERY_CHUNK, count)
            left = max(0, past + low - self.window + 1)
            seen = torch.arange(left, past + high, device=query.device)
            own = torch.arange(past + low, past + high, device=query.device)[:, None]
            pattern = ((seen <= own) & (seen > own - self.window))[None]
            if self.chunk is not None:
                pattern = pattern & self._same_chunk(first + seen, first + own)
            pattern = (pattern & flags[:, None, left:past + high]) | (seen == own)
            outputs.append(exact_attention(query[:, :, low:high], keys[:, :, left:past + high],
                                           values[:, :, left:past + high], pattern[:, None], scaling, softcap, sinks))
        return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]

    def _same_chunk(self, seen: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        first = self.first.clamp(min=0).view(-1, 1, 1)
        chunk = lambda position: torch.div(position - first, self.chunk, rounding_mode="floor")  # noqa: E731
        return chunk(seen) == chunk(own)

    # -- padding that changes later -----------------------------------------------------------------------------------
    def _visible(self, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return valid[:, self.oldest:].to(self.device), self._indices(self.oldest, self.length)

    def agrees(self, valid: torch.Tensor) -> bool:
        """Whether [B, T] says of the tokens in the ring what was said when they came. Synchronises."""
        self._flush()
        if valid.shape[1] != self.length or not self.is_initialized:
            return True
        seen, index = self._visible(valid)
        return bool((seen == self.ring_valid[:, index]).all())

    def shows_more(self, valid: torch.Tensor) -> bool:
        return False                                        # the ring holds padding too

    def hide(self, valid: torch.Tensor) -> None:
        """From now on [B, T] says which tokens of the ring are real."""
        if self.is_initialized and valid.shape[1] == self.length:
            seen, index = self._visible(valid)
            self.ring_valid[:, index] = seen
            self.padded = True

    # -- rows -----------------------------------------------------------------------------------------------------------
    def _take_rows(self, index: torch.Tensor) -> None:
        self._flush()
        if not self.is_initialized:
            return
        index = index.to(self.device)
        self.ring_keys, self.ring_values = self.ring_keys[index], self.ring_values[index]
        self.ring_valid, self.first, self.batch = self.ring_valid[index], self.first[index], index.shape[0]

    def check_crop(self, tokens: int) -> None:
        """Raise if tokens can't be taken back because older ones have left the ring."""
        count = self.to_remove(tokens)
        length = self.get_seq_length()
        kept, oldest = length - count, max(self.oldest, length - self.capacity)
        if self.is_initialized and count and kept and kept - self._past(kept) < oldest:
            recording = ", or call cache.activate_past_recording() before feeding the tokens that may be cropped"
            raise ValueError(
                f"Layer {self.index} has a window of {self.window} tokens and can take back "
                f"{max(0, length - oldest - self.window + 1)} tokens, not {count}. Call cache.reset() and feed the shorter text "
                f"again{recording if RECORDS_PAST else ''}. Nothing was changed.")

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        self._flush()
        self.length -= self.to_remove(tokens)
        if self.length == 0:
            self.oldest, self.padded = 0, False

    def fork(self, state: CacheState) -> WindowLayer:
        self._flush()
        new = object.__new__(WindowLayer)
        new.__dict__.update(self.__dict__)
        new.state, new.pending = state, None
        state.members.append(weakref.ref(new))
        if self.is_initialized:
            new._take_rows(torch.arange(self.batch, device=self.device))
        return new

    def reset(self) -> None:
        self._clear()
