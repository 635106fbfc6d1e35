"""The part of transformers' cache-layer protocol that is the same for all of our layers."""
from __future__ import annotations

import torch

from ..compat import CacheLayerMixin
from .handle import KVHandle, Pending


class LayerProtocol(CacheLayerMixin):
    """Flags and small methods that transformers asks of every layer, in every version since 5.0.

    Of a layer it needs `length` (padded tokens stored), `pending` (new ones that attention has not come to, or None), and of one
    that tells padding apart `valid` ([B, length] which tokens are none, or None: all).
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def update(self, key_states, value_states, *args, **kwargs):
        """Accept new tokens [B, H, q, D]; they are stored when attention runs. Returns two `KVHandle`s."""
        self._flush()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.check_batch(key_states.shape[0])
        self._announce(key_states, value_states)
        self.pending = Pending(key_states, value_states, self.length)
        total = self._past(self.length) + key_states.shape[2]
        return KVHandle(self, "keys", self.pending, total), KVHandle(self, "values", self.pending, total)

    def _announce(self, key_states, value_states) -> None:
        """New tokens, for layers within this one."""

    def _past(self, length: int) -> int:
        """Stored tokens that a next token could see."""
        return length

    def get_seq_length(self) -> int:
        waiting = self.pending is not None and not self.pending.committed
        return self.length + (self.pending.count if waiting else 0)

    def _extend_valid(self) -> None:
        # Steps on the device only count; what they stored was real.
        if self.valid is not None and self.valid.shape[1] < self.length:
            self.valid = torch.nn.functional.pad(self.valid, (0, self.length - self.valid.shape[1]), value=True)

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:                   # its name before transformers 5.20
        return -1

    def activate_past_recording(self) -> None:
        """Nothing to do: everything is kept."""

    def offload(self) -> None:
        """Nothing to do: the pool has its own tiers."""

    def prefetch(self) -> None:
        """Nothing to do: the pool has its own tiers."""

    def _take_rows(self, index: torch.Tensor) -> None:
        """Become rows `index` [B'] of itself."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch, device=self.device)[indices.to(self.device)])

    def check_batch(self, batch: int) -> None:
        if batch != self.batch:
            raise ValueError(
                f"This cache holds {self.batch} sequence(s) but the batch has {batch}. Call "
                "cache.batch_repeat_interleave(n) or cache.batch_select_indices(indices) to change the batch, "
                "cache.reset() to start again, or use a new cache.")

    def to_remove(self, tokens: int) -> int:
        """Tokens that `crop(tokens)` removes: up to 5.15 a positive length to keep, later a negative count."""
        length = self.get_seq_length()
        if torch.is_tensor(tokens):
            tokens = int(tokens)
        return min(length, -tokens) if tokens <= 0 else max(0, length - tokens)
