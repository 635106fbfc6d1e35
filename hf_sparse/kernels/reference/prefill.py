"""Causal attention of prompts where some KV heads see only sinks and a window, and never all logits at once."""
from __future__ import annotations

import torch

from .dense import weighted

# Queries that attend together, and logits of one head that are held at a time; results depend on neither.
QUERY_CHUNK = 512
LOGIT_ELEMENTS = 2**22


def prefill(out, query, keys, values, heads, dense: int, sink: int, window: int, scaling: float, softcap: float, sinks) -> None:
    """`ops.prefill`, which says what the arguments are."""
    tokens = keys.shape[2]
    every = torch.arange(keys.shape[1], device=query.device) if heads is None else heads.long()
    settings = (scaling, softcap, sinks)
    _attend(out, query, keys, values, every[:dense], 0, tokens, *settings)
    _attend(out, query, keys, values, every[dense:], sink, window, *settings)


def _attend(out, query, keys, values, heads, sink, window, scaling, softcap, sinks):
    """One kind of heads [n] int64."""
    if not len(heads):
        return
    tokens, queries = keys.shape[2], query.shape[2]
    past = tokens - queries
    grouped = (keys.shape[1], query.shape[1] // keys.shape[1])
    sinks = None if sinks is None else sinks.float().view(grouped)[heads, :, None, None]
    step = max(1, min(QUERY_CHUNK, LOGIT_ELEMENTS // min(tokens, sink + window + QUERY_CHUNK)))
    for low in range(0, queries, step):
        high = min(low + step, queries)
        part = query[:, :, low:high].unflatten(1, grouped)[:, heads]
        t = torch.arange(past + low, past + high, device=query.device)
        begin = max(0, past + low - window + 1)             # of the first query's window
        position = torch.cat([torch.arange(min(sink, begin), device=query.device),
                              torch.arange(begin, past + high, device=query.device)])
        k, v = (torch.cat([x[:, :, :min(sink, begin)], x[:, :, begin:past + high]], 2)[:, heads] for x in (keys, values))
        seen = (position <= t[:, None]) & ((position < sink) | (position > t[:, None] - window))
        result = _masked(part, k, v, seen, scaling, softcap, sinks)
        out.unflatten(1, grouped)[:, heads, :, low:high] = result.to(out.dtype)


def _masked(query, keys, values, seen, scaling, softcap, sinks):
    """[B, n, G, q, D] over [B, n, T, D]; seen: [q, T]."""
    logits = torch.matmul(query, keys[:, :, None].transpose(-1, -2)).float() * scaling
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return weighted(logits.masked_fill(~seen, -torch.inf), values[:, :, None], sinks)
