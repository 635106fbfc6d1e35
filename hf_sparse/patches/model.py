"""patch_model, unpatch_model, patched: the one line that a user changes."""
from __future__ import annotations

import contextlib
import copy
import inspect
import types
import warnings
from dataclasses import dataclass, field
from functools import partial

import torch

from ..cache.psa_cache import PSACache
from ..compat import CACHE_ARGUMENT, CACHE_NAMES
from ..config import PSAConfig
from . import predict, support
from .attention import NAME, register
from .checks import check_generate, check_mask
from .graph import get_compiled_call, valid_auto_compile_criteria
from .prefill import in_chunks

_STATE = "_hf_sparse"


@dataclass
class PatchState:
    """What patch_model changed, so that unpatch_model can undo it."""

    config: PSAConfig
    implementations: dict                                   # attention implementation by sub-config, as it was
    hooks: tuple[int, int]                                  # ids of the hooks before and after a forward
    support: str
    own: dict = field(default_factory=dict)                 # methods that were set on the model itself before
    steps: dict = field(default_factory=dict)               # captured decode steps by batch size

    def __deepcopy__(self, memo) -> PatchState:
        # A copy of a patched model is patched, and captures steps of its own.
        return PatchState(self.config, dict(self.implementations), self.hooks, self.support,
                          copy.deepcopy(self.own, memo))


def patch_model(model, config: PSAConfig | str | dict | None = None, **overrides):
    """Make `model.generate()` decode sparsely; returns the same model.

    After this, `generate()` builds a PSACache by itself unless it is given a cache; the last one is
    `model.last_psa_cache`. The model computes exactly what it did with any other cache, without one, and in training.

    Args:
        model: a decoder-only transformers model, or a PEFT wrapper of one.
        config: PSAConfig, the name of a preset, a dict or None; `overrides` change fields of it. Patching a patched
            model replaces its config.

    Raises:
        TypeError: not a transformers model that generates.
        NotImplementedError: the model can't be served; the message says why and what to do.
    """
    config = PSAConfig.build(config, **overrides)
    target = _base(model)
    verdict = _check(target)
    if verdict.kind == "dense" and config.streaming_heads:
        raise NotImplementedError(f"{type(target).__name__} can't have streaming_heads, as its attention needs all keys and values: "
                                  f"{'; '.join(verdict.reasons)}. Leave them out.")
    sparse = _has_full_attention(target, config)            # builds a cache: what it refuses is refused before any change
    if config.prefetch:
        predict.following_layers(target)                    # or it is refused
    if getattr(target, _STATE, None) is not None:
        unpatch_model(target)
    register()
    implementations = _implementations(target)
    text = "text_config" in getattr(target.config, "sub_configs", {})
    target.set_attn_implementation({"text_config": NAME} if text else NAME)
    actual = target.config.get_text_config(decoder=True)._attn_implementation
    if actual != NAME:
        _restore(target, implementations)
        raise NotImplementedError(f"{type(target).__name__} does not let its attention be chosen (it stays "
                                  f"{actual!r}), so it can't be sparse. Use it unpatched.")
    if verdict.kind == "dense":
        stored = "" if config.kv_bits == 16 else f" And exact but for kv_bits={config.kv_bits}: it reads quantised blocks."
        warnings.warn(f"{type(target).__name__} will be exact but not sparse: {'; '.join(verdict.reasons)}.{stored}",
                      UserWarning, stacklevel=2)
    elif not sparse:
        warnings.warn(f"{type(target).__name__} has no full-attention layer, so there is nothing to make sparse.",
                      UserWarning, stacklevel=2)
    hooks = (target.register_forward_pre_hook(_check_call, with_kwargs=True).id,
             target.register_forward_hook(_leave_call, with_kwargs=True, always_call=True).id)
    if config.prefetch:
        predict.install(target)
    own = {name: target.__dict__[name] for name in _METHODS if name in target.__dict__}
    setattr(target, _STATE, PatchState(config, implementations, hooks, verdict.kind, own))
    target.last_psa_cache = None
    for name, function in _METHODS.items():
        if hasattr(type(target), name):
            setattr(target, name, types.MethodType(function, target))
    return model


def unpatch_model(model):
    """Undo patch_model exactly; a model that is not patched is left alone. Returns the same model."""
    target = _base(model)
    state = getattr(target, _STATE, None)
    if state is None:
        return model
    before, after = state.hooks
    for hooks in (target._forward_pre_hooks, target._forward_pre_hooks_with_kwargs):
        hooks.pop(before, None)
    for hooks in (target._forward_hooks, target._forward_hooks_with_kwargs, target._forward_hooks_always_called):
        hooks.pop(after, None)
    predict.remove(target)
    _restore(target, state.implementations)
    for name in (*_METHODS, "last_psa_cache", _STATE):
        target.__dict__.pop(name, None)
    target.__dict__.update(state.own)
    return model


@contextlib.contextmanager
def patched(model, config: PSAConfig | str | dict | None = None, **overrides):
    """`with patched(model, config): ...`; afterwards the model is what it was, patched with another config or not."""
    before, last = getattr(_base(model), _STATE, None), getattr(_base(model), "last_psa_cache", None)
    patch_model(model, config, **overrides)
    try:
        yield model
    finally:
        unpatch_model(model)
        if before is not None:
            patch_model(model, before.config)
            _base(model).last_psa_cache = last


def generate(self, *args, **kwargs):
    """`generate()` of a patched model: builds a PSACache where none is given."""
    state = getattr(self, _STATE)
    inner = state.own.get("generate") or types.MethodType(type(self).generate, self)
    named = {**kwargs, **dict(zip(("inputs", "generation_config"), args))}
    generation_config = named.get("generation_config") or getattr(self, "generation_config", None)
    given = [name for name in CACHE_NAMES if kwargs.get(name) is not None]
    use_cache = kwargs.get("use_cache", getattr(generation_config, "use_cache", True))
    if given:
        cache = kwargs.pop(given[0])
        if isinstance(cache, PSACache):
            if use_cache is False:
                raise ValueError("use_cache=False with a PSACache: every step would be stored twice. Leave out one "
                                 "of them.")
        for name in CACHE_NAMES:
            kwargs.pop(name, None)
        run = partial(inner, *args, **kwargs, **{CACHE_ARGUMENT: cache})
        return _generate_with(self, cache, named, generation_config, run) if isinstance(cache, PSACache) else run()
    if use_cache is False or kwargs.get("cache_implementation") is not None:
        return inner(*args, **kwargs)                       # the caller chose otherwise
    self.last_psa_cache = None                              # its memory is free again before the next one takes any
    cache = PSACache(self.config, state.config)
    kwargs.update({CACHE_ARGUMENT: cache})
    if getattr(generation_config, "cache_implementation", None) is not None:
        kwargs["cache_implementation"] = None               # the model's default gives way to ours
    for name in CACHE_NAMES:
        if name != CACHE_ARGUMENT:
            kwargs.pop(name, None)
    return _generate_with(self, cache, named, generation_config, partial(inner, *args, **kwargs))


def _generate_with(model, cache: PSACache, kwargs: dict, generation_config, run):
    def checked():
        check_generate(cache, kwargs, generation_config)
        model.last_psa_cache = cache
        with in_chunks(model, cache, kwargs, generation_config) as more:
            return run(**more)

    return cache.owner.run(checked)                         # one thread, from the first token to the last


_METHODS = {"generate": generate, "get_compiled_call": get_compiled_call,
            "_valid_auto_compile_criteria": valid_auto_compile_criteria}


def _check_call(module, args, kwargs):
    """Forward pre-hook: refuse before anything is computed, so that a cache never loses what it holds."""
    cache = _cache_of(args, kwargs)
    if cache is not None:
        _enter(module, cache, args, kwargs)


@torch.compiler.disable                                     # of a compiled model, too: it runs outside of the graph
def _enter(module, cache: PSACache, args, kwargs) -> None:
    state = getattr(module, _STATE, None)
    if kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False with a PSACache: it would be updated all the same. Leave out one of them.")
    if module.training:
        raise NotImplementedError("A PSACache is for inference: call model.eval(), or train without a cache.")
    if kwargs.get("output_attentions") or getattr(module.config.get_text_config(decoder=True), "output_attentions", False):
        raise NotImplementedError("output_attentions=True: sparse attention never has all attention weights. Use "
                                  "hf_sparse.unpatch_model(model) with attn_implementation='eager' for them.")
    cache.enter()
    cache.bind(module)
    held, inputs = cache.batch_size, kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    if inputs is None and args and torch.is_tensor(args[0]):
        inputs = args[0]
    if held > 0 and inputs is not None and inputs.shape[0] != held:
        raise ValueError(f"This cache holds {held} sequence(s) but the batch has {inputs.shape[0]}. Call "
                         "cache.batch_repeat_interleave(n) or cache.batch_select_indices(indices) to change the "
                         "batch, cache.reset() to start again, or use a new cache.")
    if inputs is not None:
        check_mask(cache, kwargs.get("attention_mask"), cache.tokens + inputs.shape[1])
    cache.state.devices = len(set(map(str, (getattr(module, "hf_device_map", None) or {"": "0"}).values())))
    cache.state.dense_expected = state is not None and state.support == "dense"


def _leave_call(module, args, kwargs, output) -> None:
    """Forward hook, also of forwards that have failed: they have no output."""
    cache = _cache_of(args, kwargs)
    if cache is not None:
        _leave(cache, output is not None)


@torch.compiler.disable
def _leave(cache: PSACache, finished: bool) -> None:
    cache.leave(finished)


def _cache_of(args, kwargs) -> PSACache | None:
    """The PSACache that a forward was given."""
    cache = next((kwargs[name] for name in CACHE_NAMES if isinstance(kwargs.get(name), PSACache)), None)
    return cache or next((arg for arg in args if isinstance(arg, PSACache)), None)


def _check(model) -> support.Support:
    if "_orig_mod" in getattr(model, "_modules", ()):
        raise TypeError("patch_model was given a compiled model: patch first, compile afterwards, as in "
                        "torch.compile(patch_model(model)).")
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise TypeError(f"patch_model takes a transformers model, got {type(model).__name__}.")
    if not hasattr(model, "generate"):
        raise TypeError(f"{type(model).__name__} does not generate; patch a model with a language-model head, such as "
                        "AutoModelForCausalLM gives.")
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{type(model).__name__} is an encoder-decoder model; hf_sparse serves decoder-only "
                                  "models. Use it unpatched.")
    if not set(CACHE_NAMES) & set(inspect.signature(type(model).forward).parameters):
        raise NotImplementedError(f"{type(model).__name__} can't be patched: its forward takes no {CACHE_ARGUMENT}, so "
                                  "it keeps no keys and values that a cache could hold. Use it unpatched.")
    verdict = support.check(model)
    if verdict.kind == "refused":
        raise NotImplementedError(f"{type(model).__name__} can't be patched: {'; '.join(verdict.reasons)}. Use it "
                                  "unpatched.")
    return verdict


def _has_full_attention(model, config: PSAConfig) -> bool:
    return bool(PSACache(model.config, config).step_layers)


def _base(model):
    """The transformers model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _implementations(model) -> dict:
    found = {"": model.config._attn_implementation}
    for name in getattr(model.config, "sub_configs", {}):
        sub = getattr(model.config, name, None)
        if sub is not None:
            found[name] = sub._attn_implementation
    return found


def _restore(model, implementations: dict) -> None:
    model.set_attn_implementation(dict(implementations))
