"""What a query loses if only the sink and the newest tokens are read."""
from __future__ import annotations

import math

import torch
from torch import Tensor

METHODS = ("mass", "output")
# fp32 logits held at a time; results do not depend on it.
LOGIT_ELEMENTS = 2**24


def left_out(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, sink: int, window: int, scaling: float,
             softcap: float = 0.0, sinks: Tensor | None = None, method: str = "mass") -> Tensor:
    """What some queries of one row would lose, by query head.

    Args:
        query: [Hq, q, D], of the tokens at `positions` [q]. keys: [H, T, D]; values: [H, T, Dv]; Hq a multiple of H.
        sink, window: tokens that a streaming head reads: positions below `sink`, and the newest `window`, the query's own
            among them.
        sinks: [Hq] logits that take part in the normalisation only, and count as read; or None.
        method: "mass" (softmax mass of the tokens that are not read) or "output" (norm of the difference of the two outputs
            over that of the exact output, at most 1).

    Returns:
        [Hq, q] fp32 in [0, 1]
    """
    H, T, _ = keys.shape
    G = query.shape[0] // H
    keys, values = keys.float()[:, None], values.float()[:, None]
    sinks = None if sinks is None else sinks.float().view(H, G, 1)
    token = torch.arange(T, device=keys.device)
    step = max(1, LOGIT_ELEMENTS // (query.shape[0] * T))
    parts = []
    for low in range(0, query.shape[1], step):
        own = positions[low:low + step, None]
        logits = torch.matmul(query[:, low:low + step].float().unflatten(0, (H, G)), keys.transpose(-1, -2)) * scaling
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(token > own, -math.inf)                                  # [H, G, q, T]
        unread = (token >= sink) & (token <= own - window)
        weights = torch.exp(logits - _total(logits, sinks))
        if method == "mass":
            parts.append((weights * unread).sum(-1))
            continue
        exact = torch.matmul(weights, values)
        logits = logits.masked_fill(unread, -math.inf)
        streamed = torch.matmul(torch.exp(logits - _total(logits, sinks)), values)
        parts.append((exact - streamed).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-20))
    return torch.cat(parts, -1).clamp(0, 1).flatten(0, 1)


def _total(logits: Tensor, sinks: Tensor | None) -> Tensor:
    total = logits.logsumexp(-1)
    return (total if sinks is None else torch.logaddexp(total, sinks))[..., None]
