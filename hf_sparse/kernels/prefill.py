"""Causal attention of prompts: of streaming heads, which see sinks and a window only, of heads that see everything, and of windows.

A streaming head's query at position t sees the keys j <= t with j < sink or j > t - window: the window counts the query itself.
Queries are those of the last tokens.
"""
from __future__ import annotations

from functools import lru_cache
from itertools import groupby

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from . import ops
from .reference.dense import exact_attention

# Queries at a time of PyTorch's attention where it holds a mask or all logits, and from how many on the kernel is faster than it.
QUERY_CHUNK = 512
MANY_QUERIES = 1024
FEW_QUERIES = 16


def streaming_attention(query, keys, values, heads: torch.Tensor | None, sink: int, window: int, scaling: float,
                        softcap: float = 0.0, sinks=None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of streaming heads.

    Args:
        query: [B, Hq, Q, D]; keys: [B, H, T, D]; values: [B, H, T, Dv]; Q <= T, Hq a multiple of H; any strides.
        heads: [n] int32, the streaming ones of the H KV heads, all different; None: all.
        sink, window: tokens.
        sinks: [Hq] logits that take part in the normalisation only, or None.
        out: [B, Hq, Q, Dv], its last dimension contiguous, of which the query heads of `heads` are written; None: a new one,
            zero elsewhere.

    Returns:
        `out`. A new one has the order [B, Q, Hq, Dv] in memory.

    Raises:
        ValueError: an empty window, more queries than keys, a scaling that isn't positive, or an `out` of another shape.
    """
    _check(query, keys, sink, window, scaling)
    if out is None:
        out = _new_output(query, values)
        if heads is not None:
            out.zero_()
    elif out.shape != (*query.shape[:3], values.shape[3]) or out.stride(3) != 1:
        raise ValueError(f"out has shape {tuple(out.shape)} and strides {out.stride()}: it must be "
                         f"{(*query.shape[:3], values.shape[3])}, contiguous in the last dimension")
    ops.prefill(out, query, keys, values, heads, 0, sink, window, scaling, softcap, sinks)
    return out


def causal_attention(query, keys, values, scaling: float, softcap: float = 0.0, sinks=None) -> torch.Tensor:
    """Attention of the last Q of T tokens, of heads that see everything before them, by what is fastest for it.

    Args:
        others: see `streaming_attention`.

    Returns:
        [B, Hq, Q, Dv]
    """
    count, past = query.shape[2], keys.shape[2] - query.shape[2]
    if _kernel_is_faster(query, keys, values, bool(softcap) or sinks is not None):
        out = _new_output(query, values)
        ops.prefill(out, query, keys, values, None, keys.shape[1], 0, keys.shape[2], scaling, softcap, sinks)
        return out
    if not past:
        return exact_attention(query, keys, values, None, scaling, softcap, sinks, causal=True)
    outputs = []
    for low in range(0, count, QUERY_CHUNK):
        high = min(low + QUERY_CHUNK, count)
        outputs.append(exact_attention(query[:, :, low:high], keys[:, :, :past + high], values[:, :, :past + high], None, scaling,
                                       softcap, sinks, causal=True))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def window_attention(query, keys, values, window: int, scaling: float, softcap: float = 0.0, sinks=None,
                     valid: torch.Tensor | None = None) -> torch.Tensor | None:
    """Attention of the last Q of T tokens within a sliding window: by the kernel, or None where PyTorch is to do it: without a
    GPU, in fp32, for few queries, and with padding elsewhere than on the left.

    Args:
        window: tokens that a query sees, its own among them.
        valid: [B, T] bool, of Q = T tokens: which are no padding, whose queries may get anything. Synchronises. None: all.
        others: see `streaming_attention`.
    """
    if query.shape[2] < FEW_QUERIES or not _kernel_runs(query, keys, values):
        return None
    if valid is None:
        return streaming_attention(query, keys, values, None, 0, window, scaling, softcap, sinks)
    if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
        return None                                         # it takes places of the window, which the kernel doesn't know
    # Behind the text, padding is seen by none of it, and distances within the text stay what they were.
    tokens = valid.shape[1]
    order = torch.arange(tokens, device=valid.device) + (tokens - valid.sum(1))[:, None]
    order = (order % tokens)[:, None, :, None]
    turned = [part.gather(2, order.expand(-1, part.shape[1], -1, part.shape[3])) for part in (query, keys, values)]
    output = streaming_attention(*turned, None, 0, window, scaling, softcap, sinks)
    return torch.empty_like(output).scatter_(2, order.expand_as(output), output)


def prefill_attention(query, keys, values, streaming: tuple[int, ...], sink: int, window: int, scaling: float,
                      softcap: float = 0.0, sinks=None) -> torch.Tensor:
    """Attention of all heads of a layer; dense heads go to scaled_dot_product_attention where that is faster.

    Args:
        streaming: the streaming ones of the H KV heads.
        others: see `streaming_attention`.

    Returns:
        [B, Hq, Q, Dv]

    Raises:
        ValueError: as there; heads that the layer does not have, or one of them twice.
    """
    heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
    streaming = tuple(sorted(streaming))
    if any(not 0 <= head < heads for head in streaming) or len(set(streaming)) < len(streaming):
        raise ValueError(f"streaming heads must be different ones of the layer's {heads} KV heads, not {streaming}")
    _check(query, keys, sink, window, scaling)
    if keys.shape[2] <= sink + window:
        streaming = ()                                      # nothing is hidden from them
    dense = tuple(head for head in range(heads) if head not in streaming)
    if softcap or sinks is not None or not _suits_sdpa(query, keys, values):
        out = _new_output(query, values)
        listed = head_index(dense + streaming, query.device)
        ops.prefill(out, query, keys, values, listed, len(dense), sink, window, scaling, softcap, sinks)
        return out
    if not streaming:
        return causal_attention(query, keys, values, scaling)
    out = _new_output(query, values)
    for first, end in _runs(dense):
        own = slice(first * group, end * group)
        out[:, own] = exact_attention(query[:, own], keys[:, first:end], values[:, first:end], None, scaling, causal=True)
    ops.prefill(out, query, keys, values, head_index(streaming, query.device), 0, sink, window, scaling, 0.0, None)
    return out


def _check(query, keys, sink: int, window: int, scaling: float) -> None:
    if sink < 0 or window < 1:
        raise ValueError(f"a streaming head needs a window of at least the query itself, not sink={sink}, window={window}")
    if query.shape[2] > keys.shape[2]:
        raise ValueError(f"{query.shape[2]} queries are more than {keys.shape[2]} keys: queries are those of the last tokens")
    if not scaling > 0:
        raise ValueError(f"scaling={scaling} must be positive")


def _suits_sdpa(query, keys, values) -> bool:
    """Whether causal attention by scaled_dot_product_attention needs no mask, and is fast."""
    if query.shape[2] == keys.shape[2]:
        return True
    if _kernel_is_faster(query, keys, values, False):
        return False
    params = SDPAParams(query, keys, values, None, 0.0, False, query.shape[1] > keys.shape[1])
    return query.is_cuda and query.shape[3] % 8 == 0 and can_use_flash_attention(params)


def _kernel_is_faster(query, keys, values, unusual: bool) -> bool:
    """Whether dense heads go to the kernel. unusual: softcap or sinks, for which PyTorch has no kernel.

    Of a whole prompt PyTorch's kernels are faster (cuDNN); where there is a past, they are not from some queries on.
    """
    if not _kernel_runs(query, keys, values):
        return False
    if unusual:
        return query.shape[2] >= FEW_QUERIES
    return torch.cuda.get_device_capability(query.device) >= (9, 0) and MANY_QUERIES <= query.shape[2] < keys.shape[2]


def _kernel_runs(query, keys, values) -> bool:
    return (query.is_cuda and query.dtype != torch.float32 and max(query.shape[3], values.shape[3]) <= 256
            and not (torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad))
            and torch.cuda.get_device_capability(query.device) >= (8, 0))


def _new_output(query, values):
    # The order that models want it in next.
    batch, heads, count, _ = query.shape
    return query.new_empty(batch, count, heads, values.shape[-1]).transpose(1, 2)


def _runs(heads: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, one behind the last) of neighbours: heads that are a view together."""
    runs = [[head for _, head in run] for _, run in groupby(enumerate(heads), lambda pair: pair[1] - pair[0])]
    return [(run[0], run[-1] + 1) for run in runs]


@lru_cache(maxsize=1024)
def head_index(heads: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Once: what is copied to a GPU is waited for.
    return torch.tensor(heads, dtype=torch.int32, device=device)
