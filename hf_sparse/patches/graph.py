"""The decode step as one compiled, captured CUDA graph, inside transformers' own generate().

The compiled call never sees the user's cache. It gets a `StepCache`, one per patched model and batch size, whose layers
only say which descriptor the kernels should read; the descriptors are pointed at the user's cache before each step.
So one graph serves every cache of that batch size, at every length.
"""
from __future__ import annotations

import itertools
import time
import warnings
import weakref

import torch
from torch.library import custom_op

from ..cache.layer import PSALayer
from ..cache.psa_cache import PSACache
from ..compat import CACHE_ARGUMENT, CACHE_NAMES, Cache, CacheLayerMixin

# `kv_length` of a StepCache: the mask function knows it and makes no mask.
STEP_LENGTH = 2**40 + 7

_STEPS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class StepHandle:
    """New keys (or values) of one token inside the compiled step, and the layer that they belong to."""

    __slots__ = ("number", "order", "new")

    def __init__(self, number: int, order: int, new: torch.Tensor):
        self.number, self.order, self.new = number, order, new


class StepLayer(CacheLayerMixin):
    """A layer of a `StepCache`: constants only, so that nothing in it makes a compiled step stale."""

    is_compileable = True
    is_croppable = False
    is_sliding = False

    def __init__(self, number: int, order: int, length: torch.Tensor):
        super().__init__()
        self.number, self.order, self.tokens = number, order, length
        self.is_initialized = True

    def lazy_initialization(self, *args) -> None:
        """Nothing to do."""

    def update(self, key_states, value_states, *args, **kwargs):
        return StepHandle(self.number, self.order, key_states), StepHandle(self.number, self.order, value_states)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return STEP_LENGTH, 0

    def get_seq_length(self) -> torch.Tensor:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class StepCache(Cache):
    """What the compiled step takes for a cache."""

    def __init__(self, number: int, layers: int, device: torch.device):
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        torch._dynamo.mark_static_address(self.tokens, guard=False)
        super().__init__(layers=[StepLayer(number, order, self.tokens) for order in range(layers)])


class GraphedStep:
    """Decoding with one batch size: the compiled call, its StepCache, and the kernels' StaticStep."""

    def __init__(self, model, static, layers: int, device: torch.device):
        self.number = next(_NUMBERS)
        _STEPS[self.number] = self
        self.static = static
        self.cache = StepCache(self.number, layers, device)
        self.compiled = torch.compile(model.__call__, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self.bound: list[PSALayer] = []
        self.calls = 0
        self.first_call_seconds = 0.0

    def __call__(self, cache: PSACache, inputs: dict):
        self.bound = layers = cache.sparse_layers
        for layer in layers:
            layer.begin_step()
        self.static.prepare(layers)
        self.cache.tokens.fill_(layers[0].length)
        started = time.perf_counter()
        outputs = self.compiled(**inputs, **{CACHE_ARGUMENT: self.cache})
        if self.calls < 2:
            torch.cuda.synchronize(self.cache.tokens.device)
            self.first_call_seconds += time.perf_counter() - started
        self.calls += 1
        for layer in layers:
            layer.end_step()
        for name in CACHE_NAMES:
            if name in outputs:
                outputs[name] = cache
        return outputs


@custom_op("hf_sparse::decode", mutates_args=())
def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, number: int,
           order: int, scaling: float, softcap: float) -> torch.Tensor:
    """The whole decode step of a layer, opaque: [B, Hq, 1, D] -> [B, 1, Hq, Dv].

    The buffers that it writes are reached through the step's descriptors, not through arguments, so that neither their
    number nor their addresses become part of the compiled graph.
    """
    step = _STEPS[number]
    return step.static.run(step.bound[order], query, key, value, sinks, scaling, softcap)


@decode.register_fake
def _(query, key, value, sinks, number, order, scaling, softcap):
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


def get_compiled_call(self, compile_config=None):
    """What generate() calls for each token of a patched model."""
    patch = self._hf_sparse
    trusted = False                                         # generate() only appends ones to a mask once checked

    def call(**inputs):
        nonlocal trusted
        cache = next((inputs[name] for name in CACHE_NAMES if isinstance(inputs.get(name), PSACache)), None)
        step = None if cache is None else _eligible(self, patch, cache, inputs, trusted)
        if step is None:
            return self(**inputs)
        trusted = True
        for name in (*CACHE_NAMES, "attention_mask"):
            inputs.pop(name, None)
        try:
            return step(cache, inputs)
        except (torch.OutOfMemoryError, torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
            if step.calls > 1:
                raise                                       # not the capture: a fault of the step itself
            patch.steps[_key(cache)] = None
            warnings.warn(f"The decode step could not be captured ({type(error).__name__}: {error}); decoding goes on "
                          "uncaptured, which is slower.", UserWarning, stacklevel=2)
            inputs[CACHE_ARGUMENT] = cache
            return self(**inputs)

    return call


def valid_auto_compile_criteria(self, model_kwargs, generation_config) -> bool:
    """Whether generate() should ask for `get_compiled_call`."""
    cache = next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
    if isinstance(cache, PSACache):
        return not generation_config.disable_compile and capturable(self, cache)
    return type(self)._valid_auto_compile_criteria(self, model_kwargs, generation_config)


def capturable(model, cache: PSACache) -> bool:
    """Whether every layer's decode step is the kernels', on one GPU."""
    return (cache.config.compile and model.device.type == "cuda" and model._hf_sparse.support == "sparse"
            and all(isinstance(layer, PSALayer) for layer in cache.layers)
            and cache.config.host_bytes == 0
            and len(set((getattr(model, "hf_device_map", None) or {"": 0}).values())) == 1
            and getattr(model, "hf_quantizer", None) is None
            and cache.state.kernels(model.device, model.dtype))


def _key(cache: PSACache) -> tuple:
    return cache.batch_size, cache.config


def _eligible(model, patch, cache: PSACache, inputs: dict, trusted: bool) -> GraphedStep | None:
    """The captured step for these inputs, or None if they need an eager one."""
    ids = inputs.get("input_ids")
    if ids is None or ids.shape[1] != 1 or not cache.tokens or not capturable(model, cache):
        return None
    layers, mask = cache.sparse_layers, inputs.get("attention_mask")
    if mask is not None:
        if mask.dim() != 2 or mask.shape[1] != layers[0].length + 1:
            return None
        if not trusted and not (layers[0].agrees(mask[:, :-1].bool()) and bool(mask[:, -1].all())):
            return None
    key = _key(cache)
    if key not in patch.steps:
        patch.steps[key] = GraphedStep(model, cache.state.step(), len(layers), model.device)
    step = patch.steps[key]
    if step is not None:
        cache.state.static = step.static
    return step
