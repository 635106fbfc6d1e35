"""Exact attention with any mask, for layers and steps that read everything."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

# Logits of one piece of a prompt that are held at a time; the result does not depend on it.
LOGIT_ELEMENTS = 2**22


def exact_attention(query, keys, values, mask, scaling: float, softcap: float = 0.0, sinks=None, causal=False):
    """softmax(q k^T) v, exactly.

    Args:
        query: [B, Hq, Q, D]; keys: [B, H, T, D]; values: [B, H, T, Dv]; Hq a multiple of H.
        mask: None, bool (True: attend) or additive float, broadcastable to [B, 1, Q, T].
        causal: queries are those of the last tokens (Q <= T), and attend to no later key; `mask` is then None.
        sinks: [Hq] logits that take part in the normalisation only, or None.

    Returns:
        [B, Hq, Q, Dv] in the query's dtype. A query that may attend to nothing gives zeros or finite numbers.
    """
    group = query.shape[1] // keys.shape[1]
    if not softcap and sinks is None:
        if causal and query.shape[2] < keys.shape[2]:
            if query.is_cuda and query.shape[3] % 8 == 0 and \
                    can_use_flash_attention(SDPAParams(query, keys, values, None, 0.0, False, group > 1)):
                # To this op, causal means that the last query sees the last key; a mask would take it to a kernel that holds
                # all logits.
                return torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, is_causal=True, scale=scaling)[0]
            position = torch.arange(keys.shape[2], device=query.device)
            mask, causal = (position <= position[-query.shape[2]:, None])[None, None], False
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, is_causal=causal,
                                              enable_gqa=group > 1)
    B, Hq, Q, _ = query.shape
    H, T = keys.shape[1], keys.shape[2]
    output = query.new_empty(B, Hq, Q, values.shape[-1])
    keys, values = keys[:, :, None], values[:, :, None]
    step = max(1, LOGIT_ELEMENTS // max(T, 1))
    for low in range(0, Q, step):
        high = min(low + step, Q)
        part = query[:, :, low:high].unflatten(1, (H, group))
        logits = torch.matmul(part, keys.transpose(-1, -2)).float() * scaling                    # [B, H, G, q, T]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if causal:
            own = torch.arange(T - Q + low, T - Q + high, device=query.device)[:, None]
            ahead = torch.arange(T, device=query.device) > own
            logits = logits.masked_fill(ahead, -math.inf)
        elif mask is not None:
            rows = mask if mask.shape[-2] == 1 else mask[..., low:high, :]
            rows = rows[:, :, None] if rows.shape[1] == 1 else rows.unflatten(1, (H, group))
            logits = logits.masked_fill(~rows, -math.inf) if rows.dtype == torch.bool else logits + rows
        sink = None if sinks is None else sinks.float().view(1, H, group, 1, 1)
        output[:, :, low:high] = weighted(logits, values, sink).flatten(1, 2)
    return output


def weighted(logits, values, sinks):
    """softmax(logits) v with logits [..., q, T] fp32, -inf where hidden; sinks [..., 1, 1] take part in the normalisation only,
    or None. A query that sees nothing gives zeros."""
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = torch.where(torch.isinf(top), 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return torch.matmul((weights / total.clamp(min=1e-30)).to(values.dtype), values)
