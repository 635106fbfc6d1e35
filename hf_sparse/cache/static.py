"""The decode step as kernels see it: descriptors of a cache's layers, kept up to date between steps."""
from __future__ import annotations

import torch

from ..config import PSAConfig
from ..kernels.copy_engine import CopyEngineTier
from ..kernels.decode import FIELDS, NO_LIMIT, DecodePolicy, DecodeShape, DecodeWork, decode_layer
from ..kernels.tiering import Tier, TierWork
from .layer import PSALayer

VICTIMS = 1024                                              # length of the eviction queue, at least


def decode_policy(config: PSAConfig) -> DecodePolicy:
    never = config.policy == "top_k" or (config.policy == "threshold" and config.threshold >= 1.0)
    floor_share = config.min_blocks if isinstance(config.min_blocks, float) else 0.0
    limit, share = NO_LIMIT, 1.0
    for given in (config.max_blocks, config.top_k if config.policy == "top_k" else None):
        if isinstance(given, float):
            share = min(share, given)
        elif given is not None:
            limit = min(limit, given)
    return DecodePolicy(
        threshold=config.top_p if config.policy == "top_p" else config.threshold, never=never,
        by_estimate=config.policy == "top_p", group_min=config.group_stop == "min", max_blocks=limit,
        min_blocks=0 if floor_share else config.min_blocks, floor_share=floor_share, top_share=share, min_context=config.min_context,
        sink_blocks=config.sink_blocks, recent_blocks=config.recent_blocks)


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

    def prepare(self, layers: list[PSALayer]) -> None:
        """Point the descriptors at these layers."""
        for layer in layers:
            # Versions are unique over all layers and pools, so equal ones mean equal addresses.
            versions = (layer.version, layer.pool.version)
            if versions == self.known[layer.order]:
                continue
            self.known[layer.order] = versions
            work = self._work(layer)
            if layer.device not in self.desc:
                self.desc[layer.device] = torch.zeros(self.layers, FIELDS, dtype=torch.int64, device=layer.device)
            self.orders.setdefault(layer.device, set()).add(layer.order)
            numbers = _describe(layer, work)
            if layer.pool.tiered:
                numbers += self._tier_work(layer, work).numbers(layer.pool)
            numbers += [0] * (FIELDS - len(numbers))
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
        self.users[pool] = sum(other.is_initialized and other.pool is layer.pool for other in layer.state.live_layers())
        tier = self.tier_work.get(pool)
        if tier is None or tier.use.shape[0] != slots or tier.misses.shape[0] < misses:
            tier = self.tier_work[pool] = TierWork(slots, misses, max(VICTIMS, slots // 4), layer.device)
            if not self.per_layer:
                self._forget_others(layer)
        return tier

    def _pool_key(self, layer: PSALayer) -> tuple:
        return layer.device, layer.order if self.per_layer else None

    def _forget_others(self, layer: PSALayer) -> None:
        # Every layer's row names the buffers that have just moved.
        self.known = [() if order != layer.order else row for order, row in enumerate(self.known)]

    def run(self, layer: PSALayer, query, key, value, sinks, scaling: float, softcap: float) -> torch.Tensor:
        """The decode step of a prepared layer: [B, Hq, 1, D] -> [B, 1, Hq, Dv]."""
        work, tier = self.work[layer.device, _shape(layer)], None
        orders = self.orders[layer.device]
        if layer.pool.tiered:
            common = layer.pool.block_bytes, self.eviction, self.users[self._pool_key(layer)]
            loader = layer.pool.host_tier.loader
            tier = Tier(*common) if loader is None else CopyEngineTier(
                *common, loader=loader, kv=layer.pool.kv, host=layer.pool.host, most=layer.batch * layer.heads * work.width)
        return decode_layer(self.desc[layer.device][layer.order], work, query, key, value, sinks, scaling, softcap, tier,
                            first=self.per_layer or layer.order == min(orders))


def _shape(layer: PSALayer) -> DecodeShape:
    digest = layer.digests.digest
    return DecodeShape(layer.batch, layer.heads, layer.group, layer.key_dim, layer.value_dim, layer.config.block_size,
                       digest.unit_blocks, digest.high_channels, digest.low_channels, layer.dtype)


def _describe(layer: PSALayer, work: DecodeWork) -> list[int]:
    """A descriptor's first numbers, in the order of `kernels/descriptor.py`: all that it has without a host tier."""
    store = layer.digests
    unit = dict(zip(store.digest.unit_layout(store.dtype), store.unit))
    row = dict(zip(store.digest.row_layout(), store.row))
    counters, captured = layer.stats.device_buffers(layer.batch, layer.heads, work.shape.group_pad, layer.device)
    tensors = [layer.table, layer.lengths, layer.pool.kv, unit["high"], unit["low"], unit["minimum"], unit["scale"],
               row["centre"], row["order"], counters, work.estimate, work.share, work.ranked, work.part,
               work.part_mass, work.part_left]
    numbers = [tensor.data_ptr() for tensor in tensors]
    numbers += [layer.table.shape[2], unit["high"].shape[2], layer.pool.elements, work.width, work.chunks,
                captured.data_ptr()]
    return numbers
