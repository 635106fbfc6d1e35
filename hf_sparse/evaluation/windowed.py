"""Contexts prefilled as a cache with streaming heads does: these see the first tokens and a window, while every key is kept.

A simulation wants all keys, to know what the heads miss. So an exact cache takes the prompt, and the outputs of its streaming
heads are computed again, with the window.
"""
from __future__ import annotations

import torch

from ..cache.psa_cache import PSACache
from ..config import PSAConfig
from ..kernels.prefill import streaming_attention
from .decoding import prefill


def sees_window(config: PSAConfig, tokens: int) -> bool:
    """Whether a prompt of so many tokens comes out otherwise with the streaming heads of `config`."""
    return bool(config.streaming_heads) and tokens > config.streaming_sink + config.streaming_prefill_window


def windowed_prefill(model, context: tuple[int, ...], config: PSAConfig, chunk: int | None = None) -> PSACache:
    """`decoding.prefill` into an exact cache, with streaming heads that see `streaming_prefill_window` tokens.

    Args:
        config: says which heads stream, and what they see; nothing else of it is used.

    Raises:
        NotImplementedError: a layer with streaming heads that attends by a pattern of its own.
    """
    def prepare(cache: PSACache) -> None:
        for layer in cache.sparse_layers:
            heads = [head for index, head in config.streaming_heads if index == layer.index]
            if heads:
                layer.attend = _attend(layer, heads, config)

    cache = prefill(model, context, PSAConfig(min_context=0), chunk, prepare)
    for layer in cache.sparse_layers:
        layer.__dict__.pop("attend", None)                  # the method again
    return cache


def _attend(layer, heads: list[int], config: PSAConfig):
    exact = layer.attend

    def attend(query, pending, valid, mask, scaling, softcap, sinks, dense_step):
        if mask is not None:
            raise NotImplementedError("the mask of this model's prompts is not plainly causal, so its heads can't stream")
        output = exact(query, pending, valid, mask, scaling, softcap, sinks, dense_step)
        keys, values = layer.padded()
        index = torch.tensor(heads, dtype=torch.int32, device=query.device)
        return streaming_attention(query, keys, values, index, config.streaming_sink, config.streaming_prefill_window, scaling,
                                   softcap, sinks, out=output)

    return attend
