"""The decode step as kernels see it: descriptors of a cache's layers, kept up to date between steps."""
from __future__ import annotations

import torch

from ..config import PSAConfig
from ..kernels.copy_engine import CopyEngineTier
from ..kernels.decode import FIELDS, NO_LIMIT, DecodePolicy, DecodeShape, DecodeWork, decode_layer
from ..kernels.descriptor import EXACT, FORCED_BEFORE, HEADS, KEPT, KEPT_QUERY, PLANNED_BEFORE, RANKED
from ..kernels.host_link import HostLink
from ..kernels.prefetch import prefetch_layer
from ..kernels.streaming import RING_FIELDS, ring_step
from ..kernels.tiering import Tier, TierWork
from .layer import PSALayer
from .pool import next_version
from .split import SplitLayer
from .streaming_ring import SLACK_TOKENS

VICTIMS = 1024                                              # length of the eviction queue, at least


def decode_policy(config: PSAConfig) -> DecodePolicy:
    threshold = config.top_p if config.policy == "top_p" else config.threshold
    floor, cap = config.bounds
    floor_share = floor if isinstance(floor, float) else 0.0
    limit, share = NO_LIMIT, 1.0
    for given in (cap, config.top_k if config.policy == "top_k" else None):
        if isinstance(given, float):
            share = min(share, given)
        elif given is not None:
            limit = min(limit, given)
    return DecodePolicy(
        threshold=threshold, never=config.policy == "top_k" or threshold >= 1.0,
        by_estimate=config.policy == "top_p", group_min=config.group_stop == "min", max_blocks=limit,
        min_blocks=0 if floor_share else floor, floor_share=floor_share, top_share=share,
        top_least=config.least_cap, min_context=config.min_context,
        sink_blocks=config.sink_blocks, recent_blocks=config.recent_blocks,
        reuse=config.reuse, reuse_refresh=float(config.reuse_refresh))


class StaticStep:
    """Descriptors and work buffers for decoding with one batch size.

    Their addresses never change, whichever cache is bound and however it grows, so a graph captured with them stays
    valid; `prepare` rewrites the numbers in them when something has moved.
    """

    def __init__(self, config: PSAConfig, layers: int):
        self.policy, self.eviction = decode_policy(config), config.eviction
        self.layers, self.per_layer = layers, config.pool == "per_layer"
        self.work: dict[tuple, DecodeWork] = {}             # by device and shape
        self.desc: dict[torch.device, torch.Tensor] = {}    # [layers, FIELDS]
        self.orders: dict[torch.device, set[int]] = {}      # which layers are there
        self.tier_work: dict[tuple, TierWork] = {}          # by pool: device, and layer if it has one of its own
        self.users: dict[tuple, int] = {}                   # layers of each pool
        self.known: list[tuple] = [()] * layers             # versions of what each row describes
        self.rings: dict[int, RingWork] = {}                # by the layer's index
        self.streams: dict[torch.device, HostLink] = {}     # beside which streaming heads attend
        self.prefetch = config.prefetch
        self.before: dict[int, tuple] = {}                  # of each layer: what its last token has read
        self.beside: HostLink | None = None                 # the stream on which blocks are fetched ahead

    def prepare(self, layers: list[PSALayer | SplitLayer]) -> None:
        """Point the descriptors at these layers."""
        for layer in layers:
            if isinstance(layer, SplitLayer):
                if layer.index not in self.rings:
                    self.rings[layer.index] = RingWork(layer)
                self.rings[layer.index].describe(layer.ring)
        for layer in [blocks for blocks in map(blocks_of, layers) if blocks is not None]:
            # Versions are unique over all layers and pools, so equal ones mean equal addresses.
            versions = (layer.version, layer.pool.version)
            if versions == self.known[layer.order]:
                continue
            work = self._work(layer)
            sizes = layer.batch, layer.heads, layer.group, layer.key_dim, work.width
            if self.policy.reuse > 1 and layer.kept.reserve(*sizes, layer.dtype, layer.device):
                layer.version = next_version()
                versions = (layer.version, layer.pool.version)
            self.known[layer.order] = versions
            if layer.device not in self.desc:
                self.desc[layer.device] = torch.zeros(self.layers, FIELDS, dtype=torch.int64, device=layer.device)
            self.orders.setdefault(layer.device, set()).add(layer.order)
            numbers = _describe(layer, work)
            if layer.pool.tiered:
                numbers += self._tier_work(layer, work).numbers(layer.pool)
            numbers += [0] * (FIELDS - len(numbers))
            if layer.head_index is not None:
                numbers[HEADS.value] = layer.head_index.data_ptr()
            if layer.exact is not None:
                numbers[EXACT.value] = layer.exact.rows[1:].data_ptr()
            if self.policy.reuse > 1:
                kept = layer.kept
                numbers[KEPT.value], numbers[KEPT_QUERY.value] = kept.state.data_ptr(), kept.query.data_ptr()
                numbers[RANKED.value] = kept.ranked.data_ptr()
            if self.prefetch and layer.pool.tiered:
                numbers[PLANNED_BEFORE.value], numbers[FORCED_BEFORE.value] = self._before(layer, work.shape)
            self.desc[layer.device][layer.order] = torch.tensor(numbers, dtype=torch.int64)

    def _work(self, layer: PSALayer) -> DecodeWork:
        shape = _shape(layer)
        if (layer.device, shape) not in self.work:
            self.work[layer.device, shape] = DecodeWork(shape, self.policy, layer.device)
        work = self.work[layer.device, shape]
        if work.reserve(layer.table.shape[2]):
            self._forget_others(layer)
        return work

    def _tier_work(self, layer: PSALayer, work: DecodeWork) -> TierWork:
        misses, slots = layer.batch * layer.heads * work.width, layer.pool.slots
        pool = self._pool_key(layer)
        self.users[pool] = sum(isinstance(other, PSALayer) and other.is_initialized and other.pool is layer.pool
                               for other in layer.state.live_layers())
        tier = self.tier_work.get(pool)
        if tier is None or tier.use.shape[0] != slots or tier.misses.shape[0] < misses:
            tier = self.tier_work[pool] = TierWork(slots, misses, max(VICTIMS, slots // 4), layer.device)
            if not self.per_layer:
                self._forget_others(layer)
        return tier

    def _before(self, layer: PSALayer, shape: DecodeShape) -> list[int]:
        """Addresses of what a prediction of this layer's reads goes by: nothing to fetch until it has taken a step."""
        if layer.order not in self.before or self.before[layer.order][1].shape != (shape.batch, shape.heads, shape.group_pad):
            sizes = shape.batch, shape.heads
            self.before[layer.order] = (torch.zeros(*sizes, dtype=torch.int32, device=layer.device),
                                        torch.zeros(*sizes, shape.group_pad, device=layer.device))
        return [tensor.data_ptr() for tensor in self.before[layer.order]]

    def _pool_key(self, layer: PSALayer) -> tuple:
        return layer.device, layer.order if self.per_layer else None

    def _forget_others(self, layer: PSALayer) -> None:
        # Every layer's row names the buffers that have just moved.
        self.known = [() if order != layer.order else row for order, row in enumerate(self.known)]

    def run(self, layer: PSALayer | SplitLayer, query, key, value, sinks, scaling: float, softcap: float) -> torch.Tensor:
        """The decode step of a prepared layer: [B, Hq, 1, D] -> [B, 1, Hq, Dv]."""
        if not isinstance(layer, SplitLayer):
            return self._run(layer, query, key, value, sinks, scaling, softcap)
        out = query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])
        ring = self.rings[layer.index]
        if layer.blocks is None:
            ring.step(query, key, value, sinks, out, scaling, softcap)
            return out
        # Few programs, and nothing that the other heads' kernels wait for.
        beside = self.streams.setdefault(layer.device, HostLink(layer.device))
        beside.run_beside(lambda: ring.step(query, key, value, sinks, out, scaling, softcap))
        self._run(layer.blocks, query, key, value, sinks, scaling, softcap, out)
        beside.join()
        return out

    def _run(self, layer: PSALayer, query, key, value, sinks, scaling, softcap, out=None) -> torch.Tensor:
        work, orders = self.work[layer.device, _shape(layer)], self.orders[layer.device]
        tier = self._tier(layer, work) if layer.pool.tiered else None
        self.join()
        return decode_layer(self.desc[layer.device][layer.order], work, query, key, value, sinks, scaling, softcap, tier,
                            first=self.per_layer or layer.order == min(orders), out=out)

    def look_ahead(self, layer: PSALayer | SplitLayer, query, scaling: float, softcap: float) -> None:
        """Fetch what a layer's step with about this query will read, beside what is launched before that step.

        Args:
            query: [B, Hq, 1, D], to be kept until then. scaling, softcap: of the layer's attention.
        """
        layer = blocks_of(layer)
        if layer is None:
            return
        if self.beside is None:
            self.beside = HostLink(layer.device)
        work = self.work[layer.device, _shape(layer)]
        self.beside.run_beside(lambda: prefetch_layer(self.desc[layer.device][layer.order], work, query, scaling, softcap,
                                                      self._tier(layer, work)))

    def join(self) -> None:
        """What is launched from now on comes after what is fetched ahead."""
        if self.beside is not None:
            self.beside.join()

    def _tier(self, layer: PSALayer, work: DecodeWork) -> Tier:
        common = layer.pool.block_bytes, self.eviction, self.users[self._pool_key(layer)]
        loader = layer.pool.host_tier.loader
        if loader is None:
            return Tier(*common, prefetch=self.prefetch)
        return CopyEngineTier(*common, loader=loader, kv=layer.pool.kv, host=layer.pool.host,
                              most=layer.batch * layer.heads * work.width)


class RingWork:
    """What the kernel of a layer's streaming heads reads: a ring's addresses, and which heads these are.

    It stays where it is, whichever cache's ring is described.
    """

    def __init__(self, layer: SplitLayer):
        ring, config = layer.ring, layer.config
        self.desc = torch.zeros(RING_FIELDS, dtype=torch.int64, device=layer.device)
        self.heads, self.model_heads = ring.head_index.clone(), ring.model_heads
        self.tokens = ring.sink, ring.window, SLACK_TOKENS, config.min_context
        self.known = 0                                      # version of the ring that is described

    def describe(self, ring) -> None:
        if ring.version != self.known:
            self.known = ring.version
            numbers = [tensor.data_ptr() for tensor in (ring.keys, ring.values, ring.lengths)] + [ring.columns]
            self.desc.copy_(torch.tensor(numbers, dtype=torch.int64))

    def step(self, query, key, value, sinks, out, scaling: float, softcap: float) -> None:
        ring_step(self.desc, self.heads, self.model_heads, query, key, value, sinks, out, *self.tokens, scaling, softcap)


def blocks_of(layer: PSALayer | SplitLayer) -> PSALayer | None:
    """The part of a layer that is in blocks: all of it, or the heads that don't stream, if any."""
    return layer.blocks if isinstance(layer, SplitLayer) else layer


def _shape(layer: PSALayer) -> DecodeShape:
    digest = layer.digests.digest
    return DecodeShape(layer.batch, layer.heads, layer.group, layer.key_dim, layer.value_dim, layer.config.block_size,
                       digest.unit_blocks, getattr(digest, "high_channels", 0), getattr(digest, "low_channels", 0), layer.dtype,
                       kv_bits=layer.config.kv_bits, pages=getattr(digest, "pages", 0), model_heads=layer.model_heads)


def _describe(layer: PSALayer, work: DecodeWork) -> list[int]:
    """A descriptor's first numbers, in the order of `kernels/descriptor.py`: all that it has without a host tier."""
    store = layer.digests
    unit = dict(zip(store.digest.unit_layout(store.dtype), store.unit))
    if "upper" in unit:
        unit |= {"high": unit["upper"], "low": unit["lower"]}
    row = dict(zip(store.digest.row_layout(), store.row))
    counters, captured = layer.stats.device_buffers(layer.batch, layer.heads, layer.group, work.shape.group_pad,
                                                        layer.device)
    tensors = [layer.table, layer.lengths, layer.pool.kv, unit["high"], unit["low"], unit.get("minimum"), unit.get("scale"),
               row.get("centre"), row.get("order"), counters, work.estimate, work.share, work.ranked, work.part,
               work.part_mass, work.part_left]
    numbers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    numbers += [layer.table.shape[2], unit["high"].shape[2], layer.pool.elements, work.width, work.chunks,
                captured.data_ptr()]
    return numbers
