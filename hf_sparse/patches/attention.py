"""The registered attention function: the sparse step for our cache, exact attention for everything else."""
from __future__ import annotations

from functools import partial

import torch

from ..cache.handle import KVHandle, refuse_gradient
from ..compat import AttentionInterface, AttentionMaskInterface, sdpa_attention_forward
from ..kernels.prefill import causal_attention
from ..kernels.reference.dense import exact_attention
from .graph import StepHandle, decode
from .mask import psa_mask

# transformers gives meaning to names with "flash", "sdpa", "flex", "paged|" or "/" in them.
NAME = "psa"

_REFUSED = ("position_bias", "indices", "block_indices")


def psa_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None,
                  is_causal=None, sliding_window=None, **kwargs):
    """Attention of one layer; see transformers' AttentionInterface.

    Args:
        query: [B, Hq, q, D]. key, value: KVHandles of a PSACache, or tensors.
        s_aux: [Hq] sink logits (gpt-oss).

    Returns:
        ([B, q, Hq, Dv], None)

    Raises:
        NotImplementedError: an argument that changes what attention computes and that is not supported.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} passes {name}, which sparse attention does not "
                                      "support. Call hf_sparse.unpatch_model(model) and use transformers' own cache.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = softcap or 0.0
    if isinstance(key, StepHandle):
        output = decode(query, key.new, value.new, s_aux, key.predicted, key.held, key.number, key.order, float(scaling),
                        float(softcap))
        return output, None
    if isinstance(key, KVHandle) and isinstance(value, KVHandle) and key.pending is value.pending:
        if module.training and torch.is_grad_enabled():
            raise NotImplementedError("A PSACache is for inference: call model.eval(), or train without a cache "
                                      "(use_cache=False).")
        valid, pattern = read_mask(attention_mask, query.shape[2], key.pending)
        step = partial(dense_step, module, scaling=scaling, softcap=softcap, sinks=s_aux)
        output = key.layer.attend(query, key.pending, valid, pattern, scaling, softcap, s_aux, step)
        if key.pending.start > 0:
            output = refuse_gradient(output, query)
        return output.transpose(1, 2).contiguous(), None
    # No PSACache (training, vision towers, other caches), or keys and values that the model edited on the way.
    key = key.dense() if isinstance(key, KVHandle) else key
    value = value.dense() if isinstance(value, KVHandle) else value
    attention_mask = _expand_padding(attention_mask, query.shape[2], key.shape[2], sliding_window)
    if not softcap and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                                      is_causal=is_causal, **kwargs)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and query.shape[2] > 1 and is_causal:
        # No mask says that the first query is of the first key; behind the last one's are the empty places of a static cache.
        key, value = key[:, :, :query.shape[2]], value[:, :, :query.shape[2]]
        output = causal_attention(query, key, value, scaling, softcap, s_aux)
    else:
        output = exact_attention(query, key, value, attention_mask, scaling, softcap, s_aux)
    if dropout and module.training:
        raise NotImplementedError("Attention dropout with soft-capped or sink logits is not supported on a patched "
                                  "model: call hf_sparse.unpatch_model(model) to train it.")
    return output.transpose(1, 2).contiguous(), None


def dense_step(module, query, keys, values, mask, *, scaling: float, softcap: float, sinks):
    """A decode step over everything, by the kernel that transformers would use: [B, Hq, 1, Dv]."""
    if softcap or sinks is not None:
        return exact_attention(query, keys, values, mask, scaling, softcap, sinks)
    output, _ = sdpa_attention_forward(module, query, keys, values, mask, dropout=0.0, scaling=scaling,
                                       is_causal=False)
    return output.transpose(1, 2)


def read_mask(mask, count: int, pending):
    """What a mask says about `count` queries: (validity of the new tokens [B, new] or None, pattern or None).

    There are fewer queries than new tokens where a model asks for its last tokens only (layers that share keys and values). A
    [B, 1, 1, kv] mask of several new tokens is ours and speaks of padding only. Anything else is a pattern, from a model with
    special spans or from the user, and is applied exactly.
    """
    if mask is None:
        return None, None
    new = pending.count
    if mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == 1 and new > 1:
        if mask.stride(-1) == 0:
            return None, None
        return mask[:, 0, 0, -new:], None
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    valid = visible.flatten(1, 2).any(1)[:, -new:]
    valid = valid.expand(pending.keys.shape[0], -1)
    return (None if bool(valid.all()) else valid), mask[..., -count:, :]


def _expand_padding(mask, count: int, total: int, window: int | None):
    """Our padding-only mask as the causal 4-D mask that dense attention needs."""
    if mask is None or count == 1 or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] != 1:
        return mask
    own = torch.arange(total - count, total, device=mask.device)[:, None]
    seen = torch.arange(total, device=mask.device)
    pattern = seen <= own
    if window is not None:
        pattern = pattern & (seen > own - window)
    return (pattern & mask[..., -total:]) | (seen == own)


def register() -> None:
    """Make the implementation known to transformers: attention and mask, under one name."""
    AttentionInterface.register(NAME, psa_attention)
    AttentionMaskInterface.register(NAME, psa_mask)
