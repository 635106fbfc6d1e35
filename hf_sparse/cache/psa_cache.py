"""PSACache: the cache that a user builds, one layer object per layer of the model."""
from __future__ import annotations

import copy
import weakref
from collections import Counter

import torch

from ..compat import Cache, chunk_of, is_plain_layer, is_sliding_layer, kv_heads, layer_config, template_layers
from ..config import FORK_FIELDS, PSAConfig
from ..kernels.reference.exact_blocks import SLACK_BLOCKS
from ..kernels.reference.quantise import packed_bytes
from ..selection.rounds import largest_round
from ..sizes import format_bytes
from .layer import PSALayer
from .owner import Owner, alone
from .split import SplitLayer
from .state import CacheState
from .window import WindowLayer


class PSACache(Cache):
    """A KV cache whose decode step reads only the blocks that matter.

    Pass it to `generate()` or to a model's forward as `past_key_values=` (any version of transformers) or `cache=`
    (from 5.24). On a model patched with `patch_model` decoding is sparse; on any other it is exact, dense, and says
    so once.

    Args:
        model_config: `model.config`.
        config: PSAConfig, a preset's name, a dict or None; `overrides` change fields of it.

    Raises:
        TypeError, ValueError: settings that make no sense, a byte budget that is too small for one sequence.
        NotImplementedError: a model with cache layers that are neither attention nor transformers' own state.
    """

    def __init__(self, model_config, config: PSAConfig | str | dict | None = None, **overrides):
        if not hasattr(model_config, "get_text_config"):
            raise TypeError(f"PSACache takes a model's config first (model.config), got {type(model_config).__name__}.")
        if getattr(model_config, "is_encoder_decoder", False):
            raise NotImplementedError("Encoder-decoder models are not supported: PSACache serves decoder-only models. "
                                      "Use transformers' own cache for this model.")
        self.config = PSAConfig.build(config, **overrides)
        text = model_config.get_text_config(decoder=True)
        templates = template_layers(text)
        if not templates:
            raise ValueError("The config names no layers (num_hidden_layers); PSACache needs a language model's config.")
        wrong = [index for index in self.config.dense_layers if index >= len(templates)]
        if wrong:
            raise ValueError(f"dense_layers names layer {wrong[0]}, but this model has {len(templates)} layers, counted from 0.")
        streaming = self._streaming(text, templates)
        full = sum(map(is_plain_layer, templates))
        heads: tuple[int, ...] = ()
        if streaming:
            found = (kv_heads(text, index) - len(streaming.get(index, ())) for index, layer in enumerate(templates)
                     if is_plain_layer(layer))
            heads = tuple(count for count in found if count)
        self.state = CacheState(self.config, layers=len(heads) if streaming else full, heads=heads)
        layers = [self._mirror(text, index, layer, streaming.get(index)) for index, layer in enumerate(templates)]
        self.fingerprint = model_fingerprint(text)
        if full:
            self._check_budget(text, full, next(index for index, layer in enumerate(templates) if is_plain_layer(layer)))
        self._model = None
        self.owner = Owner()
        self._entered: list | None = None                   # what layers held when a forward began that has not ended
        super().__init__(layers=layers)

    def _streaming(self, config, templates: list) -> dict[int, tuple[int, ...]]:
        """Streaming heads by layer.

        Raises:
            ValueError: the model does not have them, or not in a full-attention layer.
        """
        found: dict[int, tuple[int, ...]] = {}
        for index, head in self.config.streaming_heads:
            if index >= len(templates):
                raise ValueError(f"streaming_heads names layer {index}, but this model has {len(templates)} layers, counted from 0. "
                                 "Choose heads for this model.")
            if head >= kv_heads(config, index):
                raise ValueError(f"streaming_heads names KV head {head} of layer {index}, which has {kv_heads(config, index)} KV "
                                 "heads, counted from 0. Choose heads for this model.")
            if not is_plain_layer(templates[index]):
                raise ValueError(f"streaming_heads names layer {index}, which has no full attention. Leave it out.")
            found[index] = (*found.get(index, ()), head)
        return found

    def _mirror(self, config, index: int, layer, streaming: tuple[int, ...] | None):
        if is_plain_layer(layer):
            order = sum(isinstance(member(), PSALayer) for member in self.state.members)
            if streaming is not None:
                return SplitLayer(self.state, index, order if len(streaming) < kv_heads(config, index) else None, streaming)
            return PSALayer(self.state, index, order)
        if is_sliding_layer(layer):
            return WindowLayer(self.state, index, layer.sliding_window, chunk_of(config, index))
        if hasattr(layer, "conv_states") and not hasattr(layer, "keys") or getattr(layer, "is_dummy", False) \
                or type(layer).__name__ in ("DummyLayer", "LinearAttentionLayer"):
            return layer                                    # no keys and values: transformers' own state
        raise NotImplementedError(
            f"Layer {index} of this model needs a {type(layer).__name__}, which PSACache can't replace. Use "
            "transformers' own cache for this model.")

    def _check_budget(self, text, full_layers: int, first: int) -> None:
        """first: the index of a full-attention layer, which the others are like."""
        budget = self.config.gpu_bytes
        if budget is None or self.config.host_bytes == 0 or not self.state.layers:
            return
        try:
            least = self._least_bytes(layer_config(text, first), full_layers, torch.float16, 1)
        except AttributeError:
            return                                          # unusual config: checked when the first tokens arrive
        if budget < least:
            raise ValueError(f"gpu_memory={self.config.gpu_memory!r} is too small even for one short sequence of this "
                             f"model in 16 bits; it needs at least {format_bytes(least)}, and more for longer contexts, "
                             "wider types and batches.")

    def _least_bytes(self, text, full_layers: int, dtype: torch.dtype, batch: int) -> int:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        config = self.config
        pools = self.state.layers // self.state.pool_layers
        held = full_layers * heads - len(config.streaming_heads)                 # heads with blocks, in all layers
        streaming = Counter(layer for layer, _ in config.streaming_heads)
        widest = heads - min(streaming.values()) if len(streaming) == full_layers else heads
        pinned = batch * held * (config.sink_blocks + config.recent_blocks + 2)
        slots = pinned + pools * (1 + batch * widest * largest_round(config.round_blocks))
        block = config.block_size * 2 * dim * dtype.itemsize
        if config.kv_bits == 16:
            return slots * block
        exact = batch * held * (config.sink_blocks + config.recent_blocks + 1 + SLACK_BLOCKS)
        return slots * packed_bytes(config.block_size, dim, dim, config.kv_bits) + exact * block

    @property
    def tokens(self) -> int:
        """Padded tokens of a row, 0 for a cache whose layers keep no tokens."""
        attending = [layer for layer in self.layers if isinstance(layer, (PSALayer, SplitLayer, WindowLayer))]
        return attending[0].get_seq_length() if attending else 0

    # -- what transformers asks -------------------------------------------------------------------------------------
    @property
    def sparse_layers(self) -> list[PSALayer]:
        """Layers in blocks; of a layer with streaming heads the part that does not stream."""
        found = [layer.blocks if isinstance(layer, SplitLayer) else layer for layer in self.layers]
        return [layer for layer in found if isinstance(layer, PSALayer)]

    @property
    def step_layers(self) -> list[PSALayer | SplitLayer]:
        """Full-attention layers, those with streaming heads as a whole."""
        return [layer for layer in self.layers if isinstance(layer, (PSALayer, SplitLayer))]

    @alone
    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end of every row; a negative number says how many.

        Raises:
            ValueError: a sliding layer no longer has the tokens before them; nothing is changed then.
        """
        for layer in self.layers:
            if isinstance(layer, (SplitLayer, WindowLayer)):
                layer.check_crop(tokens_to_remove)
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    @property
    def batch_size(self) -> int:
        """Rows that the cache holds, -1 while it is empty."""
        for layer in self.layers:
            if getattr(layer, "is_initialized", False) and hasattr(layer, "batch"):
                return layer.batch
        return -1

    def reset(self) -> None:
        """Forget everything and give the blocks back; a cache that was interrupted is usable again."""
        self.owner.run(self._reset)

    def _reset(self) -> None:
        self.state.torn = True                              # until all layers have let go
        super().reset()
        self._model = self._entered = None
        self.state.renew()

    reorder_cache = alone(Cache.reorder_cache)
    batch_repeat_interleave = alone(Cache.batch_repeat_interleave)
    batch_select_indices = alone(Cache.batch_select_indices)

    # -- forks ------------------------------------------------------------------------------------------------------
    @alone
    def fork(self, **overrides) -> PSACache:
        """A second cache that starts from the same tokens and shares their blocks; only open blocks are copied.

        Args:
            overrides: fields of the config that say how blocks are chosen (threshold, policy, ...).

        Raises:
            ValueError: a field that says how blocks are stored, which the two caches share.
        """
        for name in overrides:
            if name not in FORK_FIELDS:
                raise ValueError(f"A fork shares its blocks, so {name!r} can't change. It can change: "
                                 f"{', '.join(FORK_FIELDS)}.")
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.owner = Owner()
        new.config = self.config.replace(**overrides) if overrides else self.config
        new.state = CacheState(new.config, self.state.layers, self.state.pools, self.state.heads, self.state.devices,
                               self.state.dense_expected, self.state.warned)
        new.layers = []
        try:
            for layer in self.layers:
                new.layers.append(layer.fork(new.state) if hasattr(layer, "fork") else copy.deepcopy(layer))
        except BaseException:
            new.reset()                                     # half a fork must not hold on to blocks
            raise
        return new

    def __deepcopy__(self, memo) -> PSACache:
        # transformers' recipe for reusing a prefix is copy.deepcopy(cache); it must not copy the pool.
        new = self.fork()
        memo[id(self)] = new
        return new

    def __copy__(self):
        raise TypeError("copy.copy(cache) would share the layers' state between two caches; use cache.fork().")

    def __reduce__(self):
        raise TypeError("A PSACache can't be pickled: its blocks live in a pool that other caches may share.")

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True                                         # an empty cache is still a cache

    def __repr__(self) -> str:
        return (f"PSACache(layers={len(self.layers)}, sparse={len(self.sparse_layers)}, "
                f"tokens={self.tokens}, batch={self.batch_size})")

    # -- belonging to a model -----------------------------------------------------------------------------------------
    def bind(self, model) -> None:
        """Remember whose keys these are.

        Raises:
            ValueError: the cache was built for another architecture, or holds another model's tokens.
        """
        fingerprint = model_fingerprint(model.config.get_text_config(decoder=True))
        if fingerprint != self.fingerprint:
            raise ValueError(f"This PSACache was built for {self.fingerprint}, the model is {fingerprint}. Build one "
                             "with PSACache(model.config).")
        owner = self._model() if self._model is not None else None
        if owner is not None and owner is not model and self.tokens > 0:
            raise ValueError("This PSACache holds the keys and values of another model. Use a new cache, or call "
                             "cache.reset() first.")
        self._model = weakref.ref(model)

    def check_whole(self) -> None:
        """Raise if a forward, or a change of all layers, was interrupted and has left something half done.

        Raises:
            RuntimeError: says so; `reset()` makes the cache usable again.
        """
        held = self._held()
        lengths = {length for length in held if length is not None}
        torn = len(lengths) > 1 or self.state.torn or any(
            layer.pool.torn for layer in self.sparse_layers if layer.pool is not None)
        # Layers that hold nothing yet, and tokens that attention has not come to (so that nobody said which are padding),
        # tell of an interruption only if it is known that a forward did not end.
        if self._entered is not None and held != self._entered:
            torn = torn or None in held or any(getattr(layer, "pending", None) is not None for layer in self.layers)
        if torn:
            lengths = {length or 0 for length in held}
            raise RuntimeError("The last use of this PSACache, or of a fork that shares its blocks, was interrupted (layers "
                               f"hold {min(lengths)} to {max(lengths)} tokens). Call cache.reset() and feed the text again, "
                               "or use a new cache.")
        self._entered = None

    def _held(self) -> list:
        """Tokens in each layer; None: none yet."""
        return [layer.get_seq_length() if layer.is_initialized else None for layer in self.layers
                if isinstance(layer, (PSALayer, SplitLayer, WindowLayer))]

    def enter(self) -> None:
        """A forward begins.

        Raises:
            RuntimeError: another thread is inside a call with this cache, or the last one has left it half changed.
        """
        self.owner.take()
        self.check_whole()
        self._entered = self._held()

    def leave(self, finished: bool) -> None:
        """A forward ends; if it failed, the next one looks at what it has left."""
        if finished:
            self._entered = None
        self.owner.give_back()

    # -- statistics -----------------------------------------------------------------------------------------------------
    def stats(self) -> dict:
        """What decoding has read so far. Synchronises with the device.

        Returns:
            A dict: steps and sparse_steps (decoded tokens, of which sparse), blocks_read and blocks_held (summed over
            rows, KV heads, layers and sparse steps), kv_fraction (their ratio, None before the first sparse step),
            coverage (mean estimated share of the attention mass gathered), selected (share of tokens, rows and KV heads whose
            selection was their own and not a kept one; coverage is the mean over these), coverage_true (with verify=True), hits,
            misses and hit_rate of the pool, bytes by tier, materialized (times that dense keys or values were handed
            out), and layers, a dict for each with the same figures, captured_log_mass [B][Hq] of the last step and,
            with record_steps, the history of blocks read a row and KV head.
        """
        layers, sparse = [], []
        materialized = 0
        for index, layer in enumerate(self.layers):
            blocks = layer.blocks if isinstance(layer, SplitLayer) else layer
            if isinstance(blocks, PSALayer):
                layers.append(blocks.stats.as_dict(index, layer.kind, self.config.verify))
                sparse.append(layers[-1])
                materialized += blocks.stats.materialized
            else:
                layers.append({"layer": index, "kind": getattr(layer, "kind", "native")})
                materialized += getattr(layer, "materialized", 0)
        read, held = (sum(entry[name] for entry in sparse) for name in ("blocks_read", "blocks_held"))
        hits, misses = 0, 0
        device = host = digest = 0
        pools = {id(layer.pool): layer.pool for layer in self.sparse_layers if layer.pool is not None}
        for pool in pools.values():
            device += pool.kv.numel() * pool.dtype.itemsize
            if pool.tiered:
                counted = pool.counters.tolist()
                hits, misses = hits + counted[0], misses + counted[1]
                host += pool.blocks_in_use() * pool.block_bytes
        for layer in [*self.layers, *(layer.blocks for layer in self.layers if isinstance(layer, SplitLayer))]:
            if getattr(layer, "is_initialized", False) and hasattr(layer, "side_bytes"):
                device += layer.side_bytes()
                if isinstance(layer, PSALayer):
                    digest += layer.digests.bytes_for(layer.batch, layer.heads, layer.table.shape[2])
        return {
            "steps": max((entry["steps"] for entry in sparse), default=0),
            "sparse_steps": max((entry["sparse_steps"] for entry in sparse), default=0),
            "blocks_read": read, "blocks_held": held, "kv_fraction": read / held if held else None,
            "coverage": _mean(sparse, "coverage"), "coverage_true": _mean(sparse, "coverage_true"),
            "selected": _mean(sparse, "selected"),
            "hits": hits, "misses": misses, "hit_rate": hits / (hits + misses) if hits + misses else None,
            "bytes": {"device": device, "host": host, "digest": digest},
            "materialized": materialized,
            "layers": layers,
        }


def model_fingerprint(config) -> str:
    """What must be equal for a cache of one model to fit another."""
    first = layer_config(config, 0)
    heads = getattr(first, "num_key_value_heads", None) or getattr(first, "num_attention_heads", None)
    return (f"{getattr(config, 'model_type', '?')} with {getattr(config, 'num_hidden_layers', '?')} layers, "
            f"hidden size {getattr(config, 'hidden_size', '?')}, {heads} KV heads")


def _mean(entries: list[dict], name: str) -> float | None:
    values = [entry[name] for entry in entries if entry[name] is not None]
    return sum(values) / len(values) if values else None
