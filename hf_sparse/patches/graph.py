"""The decode step as one compiled, captured CUDA graph, inside transformers' own generate().

The compiled call never sees the user's cache. It gets a `StepCache`, one per patched model and batch size, whose layers
only say which descriptor the kernels should read; the descriptors are pointed at the user's cache before each step.
So one graph serves every cache of that batch size, at every length.
"""
from __future__ import annotations

import itertools
import threading
import time
import warnings
import weakref
from functools import lru_cache

import torch
from torch.library import custom_op

from ..cache.layer import PSALayer
from ..cache.owner import Change
from ..cache.psa_cache import PSACache
from ..cache.split import SplitLayer
from ..compat import CACHE_ARGUMENT, CACHE_NAMES, Cache, CacheLayerMixin
from . import predict
from .capture import CapturedCall, fingerprint, signature

# `kv_length` of a StepCache: the mask function knows it and makes no mask.
STEP_LENGTH = 2**40 + 7

_STEPS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
# Threads take turns in making steps, and in compiling them, which is done under settings of the whole process.
_MAKING = threading.Lock()


class StepHandle:
    """New keys (or values) of one token inside the compiled step, and the layer that they belong to.

    predicted: the next layer's query, or None. held: what was predicted of this layer's, which has been read by now.
    """

    __slots__ = ("number", "order", "new", "predicted", "held")

    def __init__(self, number: int, order: int, new: torch.Tensor, predicted: torch.Tensor | None = None,
                 held: torch.Tensor | None = None):
        self.number, self.order, self.new, self.predicted, self.held = number, order, new, predicted, held


class StepLayer(CacheLayerMixin):
    """A layer of a `StepCache`: constants only, so that nothing in it makes a compiled step stale."""

    is_compileable = True
    is_croppable = False
    is_sliding = False

    def __init__(self, number: int, order: int, length: torch.Tensor):
        super().__init__()
        self.number, self.order, self.tokens = number, order, length
        self.is_initialized = True
        self.predicted = self.held = None                   # of the token that is being traced (predict.py)

    def lazy_initialization(self, *args) -> None:
        """Nothing to do."""

    def update(self, key_states, value_states, *args, **kwargs):
        predicted, held = self.predicted, self.held
        self.predicted = self.held = None
        return (StepHandle(self.number, self.order, key_states, predicted, held),
                StepHandle(self.number, self.order, value_states))

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return STEP_LENGTH, 0

    def get_seq_length(self) -> torch.Tensor:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class StepCache(Cache):
    """What the compiled step takes for a cache. following: see `predict.following_layers`."""

    def __init__(self, number: int, layers: int, device: torch.device, following: tuple = ()):
        self.following = following
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__(layers=[StepLayer(number, order, self.tokens) for order in range(layers)])


class GraphedStep:
    """Decoding with one batch size: the compiled call, its StepCache, the kernels' StaticStep, and the captures.

    Threads take turns, a token each, as descriptors and work buffers are one cache's at a time.
    """

    def __init__(self, model, static, layers: int, device: torch.device):
        self.lock = threading.Lock()
        self.ended: tuple | None = None                     # stream of the last call, and the event of its end
        self.number = next(_NUMBERS)
        _STEPS[self.number] = self
        self.static, self.device = static, device
        self.fingerprint = fingerprint(model)
        prefetch = static.prefetch and model._hf_sparse.config.prefetch
        self.cache = StepCache(self.number, layers, device, predict.following_layers(model) if prefetch else ())
        self.compiled = torch.compile(model.__call__, fullgraph=True, dynamic=False)
        self.captures: dict[tuple, CapturedCall] = {}       # by the signature of a call
        self.bound: list[PSALayer] = []
        self.cache_in_use = lambda: None                    # weak: a step must not keep a cache's memory
        self.room = 0                                       # tokens up to which nothing needs to be prepared
        self.version = 0                                    # of all that the descriptors name
        self.tokens = -1                                    # what the device's token count is
        self.first_call_seconds = 0.0

    @property
    def captured(self) -> bool:
        return any(call.replay is not None for call in self.captures.values())

    def use(self, cache: PSACache) -> None:
        """Decode with this cache from now on."""
        self.cache_in_use, self.room = weakref.ref(cache), 0

    def _run(self, **inputs):
        outputs = self.compiled(**inputs, **{CACHE_ARGUMENT: self.cache})
        self.cache.tokens += 1
        return outputs

    def __call__(self, cache: PSACache, inputs: dict, key: tuple):
        layers = cache.step_layers
        # The pool is also its forks', which must not move it between the preparation and the launch.
        with self.lock, _pool(layers).lock:
            self._wait()
            outputs = self._decode(cache, layers, inputs, key)
            if self.device.type == "cuda":
                self.ended = torch.cuda.current_stream(self.device), torch.cuda.Event()
                self.ended[1].record(self.ended[0])
        for name in CACHE_NAMES:
            if name in outputs:
                outputs[name] = cache
        return outputs

    def _wait(self) -> None:
        """For the last call, if it was another stream's."""
        if self.ended is not None:
            here = torch.cuda.current_stream(self.device)
            if here != self.ended[0]:
                here.wait_event(self.ended[1])

    def _decode(self, cache: PSACache, layers: list[PSALayer], inputs: dict, key: tuple):
        if self.cache_in_use() is not cache:
            self.use(cache)
        pool, length = _pool(layers), layers[0].length
        # Seldom: the step itself must not wait for Python.
        if length >= self.room or length != self.tokens or _version(layers) != self.version:
            with Change(cache.state, pool, (ValueError, torch.OutOfMemoryError)):
                for layer in layers:
                    layer.begin_step()
                self.static.prepare(layers)
            self.room, self.version = min(layer.room() for layer in layers), _version(layers)
        if length != self.tokens:
            self.cache.tokens.fill_(length)
        pool.wait()                                         # for what a fork's prompt stores beside
        call = self.captures.get(key)
        first = call is None or call.replay is None
        self.tokens = -1                                    # until it is through
        if first:
            outputs = self._first_calls(layers, key, inputs)
        # What an exception leaves from here on, the layers can't tell.
        with Change(cache.state, pool, ()):
            if not first:
                outputs = call(inputs)
            for layer in layers:
                layer.end_step()
        self.tokens = length + 1
        return outputs

    def _first_calls(self, layers: list[PSALayer], key: tuple, inputs: dict):
        """The calls that compile and capture: waited for, to report what they cost, and undone if they fail."""
        started = time.perf_counter()
        lengths = [(held, held.clone()) for layer in layers for held in _lengths(layer)]
        call = self.captures.setdefault(key, CapturedCall(self._run, inputs, self.device))
        self.bound = layers
        try:
            # Every batch size compiles the same code anew, on purpose.
            with _MAKING, torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
                outputs = call(inputs)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except BaseException:
            for held, before in lengths:
                held.copy_(before)
            self.static.join()
            raise
        finally:
            self.bound = []                                 # whatever happened, the cache's memory is its owner's
        self.first_call_seconds += time.perf_counter() - started
        return outputs


def _lengths(layer: PSALayer | SplitLayer) -> list[torch.Tensor]:
    """What the kernels count a layer's tokens in."""
    if not isinstance(layer, SplitLayer):
        return [layer.lengths]
    return [layer.ring.lengths] + ([] if layer.blocks is None else [layer.blocks.lengths])


def _version(layers: list[PSALayer | SplitLayer]) -> int:
    """Versions only grow: this one is another whenever something of a layer or its pool has moved."""
    return max(max(layer.version, layer.pool.version if layer.pool is not None else 0) for layer in layers)


def _pool(layers: list):
    """The pool of the blocks of a step's layers."""
    return next(layer.pool for layer in layers if layer.pool is not None)


@custom_op("hf_sparse::decode", mutates_args=())
def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None,
           predicted: torch.Tensor | None, held: torch.Tensor | None, number: int, order: int, scaling: float,
           softcap: float) -> torch.Tensor:
    """The whole decode step of a layer, opaque: [B, Hq, 1, D] -> [B, 1, Hq, Dv].

    The buffers that it writes are reached through the step's descriptors, not through arguments, so that neither their
    number nor their addresses become part of the compiled graph.

    predicted: [B, Hq, 1, D], the next layer's query; what it asks for is fetched beside all that comes before that layer's
    step. held: what was predicted of this layer; an argument so that its memory is nobody else's until here.
    """
    step = _STEPS[number]
    output = step.static.run(step.bound[order], query, key, value, sinks, scaling, softcap)
    if predicted is not None:
        step.static.look_ahead(step.bound[order + 1], predicted, scaling, softcap)
    return output


@decode.register_fake
def _(query, key, value, sinks, predicted, held, number, order, scaling, softcap):
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


def get_compiled_call(self, compile_config=None):
    """What generate() calls for each token of a patched model."""
    patch = self._hf_sparse
    step, looked_for = None, lambda: None                   # the step of a cache, and which cache that is

    def call(**inputs):
        nonlocal step, looked_for
        cache = next((inputs[name] for name in CACHE_NAMES if isinstance(inputs.get(name), PSACache)), None)
        if cache is None or not _one_token(cache, inputs):
            return self(**inputs)
        if looked_for() is not cache:                       # once a generate(): it waits for the device
            step, looked_for = _find_step(self, patch, cache, inputs), weakref.ref(cache)
        key = None
        if step is not None:
            plain = {name: value for name, value in inputs.items() if name not in (*CACHE_NAMES, "attention_mask")}
            key = signature(plain)
        if key is None:
            return self(**inputs)
        try:
            return step(cache, plain, key)
        except (torch.OutOfMemoryError, torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
            if key in step.captures and step.captures[key].replay is not None:
                raise                                       # not the capture: a fault of the step itself
            patch.steps[_key(cache)] = step = None
            warnings.warn(f"The decode step could not be captured ({type(error).__name__}: {error}); decoding goes on "
                          "uncaptured, which is slower.", UserWarning, stacklevel=2)
        return self(**inputs)

    return call


def valid_auto_compile_criteria(self, model_kwargs, generation_config) -> bool:
    """Whether generate() should ask for `get_compiled_call`."""
    cache = next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
    if isinstance(cache, PSACache):
        captured = not generation_config.disable_compile and capturable(self, cache)
        if cache.config.prefetch and not (captured and self._hf_sparse.config.prefetch):
            _warn_no_prefetch()
        return captured
    return type(self)._valid_auto_compile_criteria(self, model_kwargs, generation_config)


def capturable(model, cache: PSACache) -> bool:
    """Whether every layer's decode step is the kernels' alone, on one GPU. If it is not for the fetcher, says so once."""
    kernels = (cache.config.compile and model.device.type == "cuda" and model._hf_sparse.support == "sparse"
               and len(cache.step_layers) == len(cache.layers) and bool(cache.sparse_layers)
               and len(set((getattr(model, "hf_device_map", None) or {"": 0}).values())) == 1
               and getattr(model, "hf_quantizer", None) is None
               and cache.state.kernels(model.device, model.dtype))
    if kernels and cache.config.fetcher != "kernel":
        _warn_uncaptured(cache.config.fetcher)
        return False
    return kernels


@lru_cache(maxsize=None)
def _warn_uncaptured(fetcher: str) -> None:
    warnings.warn(f"fetcher={fetcher!r} decodes uncaptured: the host takes part in every layer's step. compile=False says that "
                  "this is meant.", UserWarning, stacklevel=2)


@lru_cache(maxsize=None)
def _warn_no_prefetch() -> None:
    warnings.warn("prefetch=True does nothing here: it takes patch_model(..., prefetch=True) and a captured decode step (on a "
                  "GPU, with compile=True and settings that the kernels have).", UserWarning, stacklevel=2)


def _key(cache: PSACache) -> tuple:
    return cache.batch_size, cache.config


def _one_token(cache: PSACache, inputs: dict) -> bool:
    """Whether these inputs are the next token of every row, as generate() passes it."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or ids.shape[1] != 1 or not cache.tokens or cache.tokens < cache.state.expected:
        return False                                        # several tokens, or what is left over from a prompt in chunks
    return mask is None or (mask.dim() == 2 and mask.shape[1] == cache.tokens + 1)


def _find_step(model, patch, cache: PSACache, inputs: dict) -> GraphedStep | None:
    """The captured step for this cache, or None if it needs an eager one."""
    if not capturable(model, cache):
        return None
    key, layers, mask = _key(cache), cache.step_layers, inputs.get("attention_mask")
    if not all(layer.in_reach() for layer in layers):
        return None
    if key in patch.steps and patch.steps[key] is None:     # it could not be captured
        return None
    # Looked at once: from here on generate() only appends ones.
    if mask is not None and not (layers[0].agrees(mask[:, :-1].bool()) and bool(mask[:, -1].all())):
        return None
    with _MAKING:
        step = patch.steps.get(key)
        if step is None or step.fingerprint != fingerprint(model):
            # Buffers of its own: those of the cache serve steps that are taken outside of it.
            step = patch.steps[key] = GraphedStep(model, cache.state.new_step(), len(layers), model.device)
    return step
