"""The next layer's query, predicted: by its own norm and projection, from the residual stream that enters this layer.

A layer adds little to the stream, so the prediction is near; blocks that it finds are fetched while this layer is at work
(kernels/prefetch.py). It is traced into the compiled step, and happens nowhere else.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..compat import CACHE_NAMES

_INSTEAD = "Patch it without prefetch=True; everything else works"


@dataclass
class Following:
    """A decoder layer, and what its attention does with its query.

    rotate: the modeling file's apply_rotary_pos_emb. norm_first: its q_norm takes all heads at once, not each by itself.
    """

    layer: torch.nn.Module
    rotate: Callable
    norm_first: bool


def look_ahead(layer, args, kwargs) -> None:
    """Forward pre-hook of a decoder layer: in the compiled step, predict the query of the one after it."""
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    following = getattr(cache, "following", ())
    if not following:
        return
    index = layer.self_attn.layer_idx
    query = predicted_query(following[index], args[0] if args else kwargs["hidden_states"], *kwargs["position_embeddings"])
    cache.layers[index].predicted = cache.layers[index + 1].held = query


def predicted_query(following: Following, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The query of a layer, were `hidden` its input.

    Args:
        hidden: [B, 1, hidden size]. cos, sin: as the layer gets them, of the same token.

    Returns:
        [B, Hq, 1, D]
    """
    attention = following.layer.self_attn
    norm = getattr(attention, "q_norm", None)
    query = attention.q_proj(following.layer.input_layernorm(hidden))
    if norm is not None and following.norm_first:
        query = norm(query)
    query = query.view(*hidden.shape[:-1], -1, attention.head_dim)
    if norm is not None and not following.norm_first:
        query = norm(query)
    query = query.transpose(1, 2)
    return following.rotate(query, query, cos, sin)[0]


def following_layers(model) -> tuple[Following, ...]:
    """What `look_ahead` predicts with: for each decoder layer but the last, the one after it.

    Raises:
        NotImplementedError: the layers are not built in the way that a prediction needs.
    """
    return tuple(_following(model, layer) for layer in _layers(model)[1:])


def install(model) -> None:
    """Set the hooks.

    Raises:
        NotImplementedError: see `following_layers`; nothing is changed then.
    """
    following_layers(model)
    for layer in _layers(model)[:-1]:
        layer.register_forward_pre_hook(look_ahead, with_kwargs=True)


def remove(model) -> None:
    """Take the hooks away, if there are any, of a copied model too."""
    for module in model.modules():
        for number in [number for number, hook in module._forward_pre_hooks.items() if hook is look_ahead]:
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _layers(model) -> list:
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None or not all(hasattr(getattr(layer, "self_attn", None), "layer_idx") for layer in layers):
        raise _refusal(model, "its decoder has no `layers` with `self_attn`")
    return list(layers)


def _following(model, layer) -> Following:
    attention, name = layer.self_attn, f"layer {layer.self_attn.layer_idx}"
    for owner, part in ((layer, "input_layernorm"), (attention, "q_proj"), (attention, "head_dim")):
        if not hasattr(owner, part):
            raise _refusal(model, f"{name} has no {part}")
    heads = attention.config.num_attention_heads
    if attention.q_proj.out_features != heads * attention.head_dim:
        raise _refusal(model, f"q_proj of {name} gives more than the query")
    norm, norm_first = getattr(attention, "q_norm", None), False
    if norm is not None:
        sizes = getattr(getattr(norm, "weight", None), "shape", (0,))
        norm_first = sizes[-1] != attention.head_dim
        if norm_first and sizes[-1] != heads * attention.head_dim:
            raise _refusal(model, f"q_norm of {name} is of another size than a head or all of them")
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    rotary = next((module for module in model.get_decoder().modules() if hasattr(module, "inv_freq")), None)
    if rotate is None or rotary is None:
        raise _refusal(model, "its queries are not rotated by position (apply_rotary_pos_emb)")
    angles = rotary.inv_freq.shape[-1]
    if not any(_rotates(rotate, attention.head_dim, sizes) for sizes in (2 * angles, angles)):
        raise _refusal(model, "it rotates its queries in a way of its own")
    return Following(layer, rotate, norm_first)


def _rotates(rotate: Callable, dim: int, angles: int) -> bool:
    """Whether whole heads can be given to this function, with so many cosines."""
    query, cos = torch.zeros(1, 1, 1, dim), torch.zeros(1, 1, angles)
    try:
        return rotate(query, query, cos, cos)[0].shape == query.shape
    except Exception:  # noqa: BLE001 - of another signature, or for another shape
        return False


def _refusal(model, reason: str) -> NotImplementedError:
    return NotImplementedError(f"prefetch=True can't predict the queries of {type(model).__name__}: {reason}. {_INSTEAD}.")
