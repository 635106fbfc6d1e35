"""The registered mask function: padding as [B, 1, 1, kv], never an O(n^2) mask for plain causal attention.

Without a mask function of its own, an attention implementation gets no mask at all from transformers and padding is
silently attended to; `register` therefore always registers both.
"""
from __future__ import annotations

import torch

from ..cache.handle import KVLength
from ..cache.owner import Change
from ..compat import causal_mask_function, query_length, sdpa_mask
from .graph import STEP_LENGTH

_OVERLAYS = ("sliding_window_overlay.<locals>.inner_mask", "chunked_overlay.<locals>.inner_mask")


def psa_mask(batch_size: int, *args, attention_mask=None, mask_function=causal_mask_function, **kwargs):
    """What transformers hands to the attention function.

    Returns:
        For a cache that is not ours: the stock sdpa mask. For ours: None (one new token, nothing of it masked), an
        all-true [B, 1, 1, kv] of stride 0 (several new tokens, no padding), a [B, 1, 1, kv] padding mask, or a dense
        4-D mask for patterns that the layers don't know by themselves (image blocks, bidirectional spans).
    """
    length = kwargs["kv_length"]
    if length == STEP_LENGTH:                               # the captured step knows its own lengths
        return None
    if not isinstance(length, KVLength):
        return sdpa_mask(batch_size, *args, attention_mask=attention_mask, mask_function=mask_function, **kwargs)
    count = query_length(args, kwargs)
    total = int(length) + int(kwargs.get("kv_offset", 0))
    def dense():
        return sdpa_mask(batch_size, *args, attention_mask=attention_mask, mask_function=mask_function,
                         **dict(kwargs, kv_length=int(length), allow_is_causal_skip=False))

    if not is_plain(mask_function) and not (count == 1 and hides_nothing(mask_function, length.layer)):
        return dense()
    padding = None
    if attention_mask is not None and attention_mask.dim() == 2:
        padding = attention_mask[:, :total].bool()
        if padding.shape[1] < total:
            raise ValueError(f"attention_mask covers {padding.shape[1]} of {total} tokens: it must speak of those in the cache and "
                             "of the new ones. Give it all of them, or leave it out if none is padding. Nothing in the cache was "
                             "changed.")
        check_past(length.layer, padding, total - count)
        # One look before the step: a mask of ones is no padding, and costs nothing from here on. Where the model edits
        # keys on the way, attention is dense and needs the padding of the whole row.
        seen = padding if length.layer.state.dense_expected else padding[:, total - count:]
        if bool(seen.all()):
            padding = None
    if padding is not None:
        # Of one token it is taken for the whole pattern (see `read_mask`), and a chunk is less than what a ring shows.
        chunked = getattr(length.layer, "chunk", None) is not None
        return dense() if count == 1 and chunked else padding[:, None, None]
    if count == 1:
        return None
    # Not None: that means something else to stock sdpa when code of the model edits keys on the way.
    flag = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=kwargs.get("device", "cpu"))
    return flag.expand(batch_size, 1, 1, total)


def check_past(layer, padding: torch.Tensor, past: int) -> None:
    """Follow a mask that hides stored tokens from now on, as the padding after an early end is in the next turn.

    Raises:
        ValueError: the mask shows tokens that were padding when they came, so that they were never stored.
    """
    if past == 0 or layer.agrees(padding[:, :past]):
        return
    layers = layer.state.live_layers()
    if any(other.shows_more(padding[:, :past]) for other in layers):
        raise ValueError("attention_mask shows tokens that were masked when the PSACache received them, and that it "
                         "therefore never stored. Keep the padding of earlier turns masked, or use a new cache. "
                         "Nothing in the cache was changed.")
    with Change(layer.state, refusals=()):
        for other in layers:
            other.hide(padding[:, :past])


def is_plain(mask_function) -> bool:
    """Exactly causal, or causal within a sliding window or chunk: what the layers reproduce from their own settings."""
    if mask_function is causal_mask_function:
        return True
    if getattr(mask_function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return False
    parts = mask_function.__closure__[0].cell_contents
    return len(parts) == 2 and parts[1] is causal_mask_function and parts[0].__qualname__ in _OVERLAYS


def hides_nothing(mask_function, layer) -> bool:
    """For a single new token of a full-attention row: causal, or causal widened by something else, is everything."""
    if getattr(layer, "kind", None) not in ("psa", "split") or getattr(mask_function, "__qualname__", "") != "or_masks.<locals>.or_mask":
        return False
    return causal_mask_function in mask_function.__closure__[0].cell_contents
