"""Prompts, for benchmarks/lserve.py: seconds of a whole forward, and microseconds of the attention of one layer."""
from __future__ import annotations

import time

import torch
from transformers import DynamicCache

from hf_sparse import PSACache, PSAConfig, patch_model, unpatch_model
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.kernels.prefill import prefill_attention
from hf_sparse.kernels.reference.dense import exact_attention

from . import prefill_kernel
from .common import quantiles
from .offload import synchronize
from .synthetic import Shape


def prompt_seconds(model, ids: torch.Tensor, config: PSAConfig | None) -> dict:
    """Of ids [B, T], by the model patched with `config`, or for None unpatched."""
    unpatch_model(model)
    if config is not None:
        patch_model(model, config)
    mask = None if config is None else torch.ones_like(ids)

    def seconds() -> float:
        cache = DynamicCache(config=model.config) if config is None else PSACache(model.config, config)
        synchronize(ids.device)
        started = time.perf_counter()
        with torch.no_grad():
            model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        synchronize(ids.device)
        return time.perf_counter() - started

    seconds()
    return {"seconds": quantiles([seconds() for _ in range(2)])}


def prompt_attention(shape: Shape, context: int, config: PSAConfig | None) -> dict:
    query, keys, values = prefill_kernel.draw(context)
    scaling = query.shape[-1] ** -0.5
    if config is None:
        function = lambda: exact_attention(query, keys, values, None, scaling, causal=True)  # noqa: E731
    else:
        heads = tuple(head for _, head in config.streaming_heads)
        function = lambda: prefill_attention(query, keys, values, heads, config.streaming_sink,  # noqa: E731
                                             config.streaming_prefill_window, scaling)
    return {"attention_us_per_layer": quantiles([ms * 1e3 for ms in prefill_kernel.times_of(function, 5)])}
