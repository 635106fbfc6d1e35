"""Everything that differs between versions of transformers (5.0 to 5.24) and of Triton (3.6 to 3.9) is in this file."""
from __future__ import annotations

import torch
import transformers
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

__all__ = [
    "AttentionInterface", "AttentionMaskInterface", "CACHE_ARGUMENT", "CACHE_NAMES", "Cache", "CacheLayerMixin",
    "RECORDS_PAST", "TURNS_IN_CHUNKS",
    "causal_mask_function", "chunk_of", "is_plain_layer", "is_sliding_layer", "nibble_rows", "query_length",
    "sdpa_attention_forward", "sdpa_mask", "template_layers",
]

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if VERSION < (5, 0):
    raise ImportError(f"hf_sparse needs transformers >= 5.0, found {transformers.__version__}: "
                      "pip install -U transformers")

# 5.24 renamed `past_key_values` to `cache` in every forward and in generate(); the old name still works there.
CACHE_NAMES = ("past_key_values", "cache")
CACHE_ARGUMENT = "cache" if VERSION >= (5, 24) else "past_key_values"
# Of a turn in chunks on a filled cache, 5.17 feeds the whole conversation again, or gives new tokens the mask of the first ones.
TURNS_IN_CHUNKS = VERSION >= (5, 24)
# Whether caches can be asked to keep what sliding layers would write drafts over, as generate() then does.
RECORDS_PAST = hasattr(Cache, "activate_past_recording")


def nibble_rows(triton_version: str) -> int:
    """How many rows of bytes, each of two tokens, Triton gives a thread of the tensor core together; only speed depends on it.

    Its operands are of 4 tokens a thread up to 3.7 and of 2 since.
    """
    return 2 if tuple(int(part) for part in triton_version.split(".")[:2]) < (3, 8) else 1


def query_length(args: tuple, kwargs: dict) -> int:
    """Query tokens of a mask function call: `q_length` since 5.4, a `cache_position` tensor before."""
    if "q_length" in kwargs:
        return kwargs["q_length"]
    position = kwargs.get("cache_position", args[0] if args else None)
    return position.shape[0] if torch.is_tensor(position) else position


def template_layers(config) -> list:
    """The layers that `DynamicCache(config=...)` builds: transformers knows the structure of each of its models."""
    return DynamicCache(config=config).layers


def is_plain_layer(layer) -> bool:
    """A full-attention layer and nothing more."""
    return type(layer) is DynamicLayer


def is_sliding_layer(layer) -> bool:
    """A sliding-window or chunked-attention layer and nothing more."""
    return type(layer) is DynamicSlidingWindowLayer


def layer_config(config, index: int):
    """The config of layer `index` of a text model: one of its own where layers differ in heads or their sizes (Gemma 4), where
    asking the model's may raise."""
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


def kv_heads(config, index: int) -> int:
    """KV heads of layer `index` of a text model."""
    config = layer_config(config, index)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def chunk_of(config, index: int) -> int | None:
    """The chunk length of layer `index`, if its window is chunked attention (Llama 4)."""
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is None:
        return None
    types = getattr(config, "layer_types", None)
    if types is not None:
        return chunk if types[index] == "chunked_attention" else None
    return chunk if getattr(config, "sliding_window", None) is None else None
