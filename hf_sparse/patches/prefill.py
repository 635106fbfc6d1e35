"""Prompts in chunks: as long as what is free holds the activations of one, beside the pool that the prompt will fill.

`chunk_size` decides, from numbers alone; the rest asks for these numbers.
"""
from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch

from ..cache.layer import PSALayer
from ..cache.psa_cache import PSACache
from ..cache.split import SplitLayer
from ..cache.state import auto_budget, free_bytes
from ..cache.window import WindowLayer
from ..compat import CACHE_NAMES, TURNS_IN_CHUNKS, layer_config

SMALLEST = 256                                              # tokens of a chunk, at least; fewer would win next to nothing
MARGIN = 1.25                                               # for what an estimate of activations leaves out
SIDE = 1.125                                                # digests and tables beside a pool that grows with the context
GATHERED = 2                                                # times a layer's KV, while a later chunk has it made dense
# Rotations that depend on the length seen so far: a chunk would not be rotated as in the whole prompt.
LENGTH_DEPENDENT = ("dynamic", "longrope")
# What may be in the way of cutting a prompt: tensors other than these.
PLAIN_INPUTS = ("inputs", "input_ids", "attention_mask", *CACHE_NAMES)


def kv_bytes(config, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in one layer. config: of the text model."""
    heads, dim = _heads(config)
    return 2 * (getattr(config, "num_key_value_heads", None) or heads) * dim * dtype.itemsize


def activation_bytes(config, dtype: torch.dtype, last_only: bool = True) -> int:
    """Bytes that the widest place of a forward holds for each token of a prompt, an estimate from above.

    Args:
        config: of the text model. last_only: logits are made of the last token alone.
    """
    heads, dim = _heads(config)
    hidden, size = config.hidden_size, dtype.itemsize
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    experts = getattr(config, "num_experts_per_tok", None) or 1
    routed = experts * (getattr(config, "moe_intermediate_size", None) or (inner if experts > 1 else 0))
    attention = size * (3 * hidden + 5 * heads * dim) + 2 * kv_bytes(config, dtype)    # query, rotated, on the way, output
    mlp = size * (3 * hidden + 3 * max(inner, routed + experts * hidden))              # gate, up and their product
    norm = 3 * size * hidden + 3 * 4 * hidden                                          # in fp32
    widest = max(attention, mlp, norm)
    if not last_only:
        widest = max(widest, config.vocab_size * size)
    return int(MARGIN * widest)


def chunk_size(free: int, config, tokens: int, dtype: torch.dtype, rows: int = 1, past: int = 0,
               last_only: bool = True) -> int | None:
    """Tokens of a prompt to feed at a time, so that a forward fits, or None: all of them.

    Args:
        free: bytes for all that is not weights and pool. config: of the text model.
        tokens: of a row, that are to be fed; past: that the cache holds already. rows: of the batch.

    Returns:
        None or a power of two from SMALLEST up. SMALLEST if nothing fits: then it is worth a try.
    """
    each = rows * activation_bytes(config, dtype, last_only)
    free -= rows * config.vocab_size * (dtype.itemsize + 4)
    gathered = GATHERED * rows * (past + tokens) * kv_bytes(config, dtype)
    if tokens <= SMALLEST or tokens * each + (gathered if past else 0) <= free:
        return None
    fits = max(free - gathered, 0) // each
    chunk = max(SMALLEST, 1 << max(fits.bit_length() - 1, 0))
    return None if chunk >= tokens else chunk


@contextlib.contextmanager
def in_chunks(model, cache: PSACache, kwargs: dict, generation_config) -> Iterator[dict]:
    """Around a generate(): gives the arguments to add to it, and tells the cache how long the prompt is.

    So room is made for all of it at its first chunk, and a single token that is left over is not taken for a decode step.

    The caller's own `prefill_chunk_size` stays as it is, None too if it is given by name.

    Args:
        kwargs: of generate(), all by name.
    """
    ids = _given(kwargs, None, "input_ids", "inputs")
    chunk, more = _given(kwargs, generation_config, "prefill_chunk_size"), {}
    if chunk is None and "prefill_chunk_size" not in kwargs:
        chunk = _automatic(model, cache, kwargs, generation_config, ids)
        more = {} if chunk is None else {"prefill_chunk_size": chunk}
    if chunk is not None and torch.is_tensor(ids) and ids.dim() == 2:
        mask = kwargs.get("attention_mask")                 # of the whole conversation, also where ids are of a new turn only
        cache.state.expected = max(ids.shape[1], mask.shape[1] if torch.is_tensor(mask) and mask.dim() == 2 else 0)
    try:
        yield more
    finally:
        cache.state.expected = 0


def _automatic(model, cache: PSACache, kwargs: dict, generation_config, ids) -> int | None:
    """`chunk_size` for this call; None also where a prompt must not be cut, or not by us."""
    first = next((layer.index for layer in cache.sparse_layers), 0)
    config, device = layer_config(model.config.get_text_config(decoder=True), first), model.device
    past = cache.tokens
    if device.type != "cuda" or not torch.is_tensor(ids) or ids.dim() != 2 or ids.shape[1] - past <= SMALLEST:
        return None
    if past and not TURNS_IN_CHUNKS:
        return None
    if len(set(map(str, (getattr(model, "hf_device_map", None) or {"": 0}).values()))) > 1:
        return None
    if not all(isinstance(layer, (PSALayer, SplitLayer, WindowLayer)) for layer in cache.layers) or _length_dependent(config):
        return None
    if any(torch.is_tensor(value) and name not in PLAIN_INPUTS for name, value in kwargs.items()):
        return None                                         # images, embeddings: what belongs to which chunk is not known here
    if _given(kwargs, generation_config, "assistant_model", "prompt_lookup_num_tokens") is not None:
        return None                                         # transformers feeds the prompt together with the first drafts
    if _given(kwargs, generation_config, "output_hidden_states"):
        return None                                         # of a prompt in chunks they would be the last chunk's
    rows = ids.shape[0] * max(_given(kwargs, generation_config, name) or 1 for name in ("num_beams", "num_return_sequences"))
    try:
        need = int(SIDE * len(cache.sparse_layers) * rows * ids.shape[1] * kv_bytes(config, model.dtype))
        budget = cache.config.gpu_bytes
        if budget is None and cache.config.host_bytes != 0:
            budget = auto_budget(device)
        held = sum(pool.kv.nbytes for pool in cache.state.pools.values())
        coming = max(0, (need if budget is None else min(need, budget)) - held)
        return chunk_size(free_bytes(device) - coming, config, ids.shape[1] - past, model.dtype, rows, past,
                          "logits_to_keep" in inspect.signature(model.forward).parameters)
    except AttributeError:
        return None                                         # an unusual config: nothing is known of its sizes


def _given(kwargs: dict, generation_config, *names: str):
    """The first of these arguments that is not None, as generate() looks for it."""
    found = (kwargs.get(name, getattr(generation_config, name, None)) for name in names)
    return next((value for value in found if value is not None), None)


def _heads(config) -> tuple[int, int]:
    heads = config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _length_dependent(config) -> bool:
    """Whether positions are rotated by the length seen so far."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [found, *(part for part in found.values() if isinstance(part, dict))]
    return any(kind.get("rope_type", kind.get("type")) in LENGTH_DEPENDENT for kind in kinds)
