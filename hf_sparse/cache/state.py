"""What the layers of one cache share: the config, the pools (one a device, or one a layer), and what is known of the model."""
from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from ..config import PSAConfig
from ..kernels.reference.quantise import packed_bytes
from ..selection.rounds import largest_round
from ..sizes import format_bytes
from .backend import use_kernels
from .pool import BlockPool

# What "auto" leaves for activations: this share of what is free, at least so many bytes.
ACTIVATION_SHARE, ACTIVATION_BYTES = 10, 2**30


def free_bytes(device: torch.device) -> int:
    """Bytes that a GPU can still give, those among them that PyTorch holds and nobody uses."""
    free = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def auto_budget(device: torch.device) -> int | None:
    """Bytes for a pool in front of a host tier: what is free on the device now, with room left for activations.

    None on a CPU, where a pool grows with the context.
    """
    if device.type != "cuda":
        return None
    free = free_bytes(device)
    return max(0, free - max(ACTIVATION_BYTES, free // ACTIVATION_SHARE))


@dataclass
class CacheState:
    """Shared by the layers of one cache; `pools` also by its forks."""

    config: PSAConfig
    layers: int                                             # sparse layers in the model
    pools: dict = field(default_factory=dict)
    heads: tuple[int, ...] = ()                             # KV heads of each sparse layer, if not all have the same
    devices: int = 1                                        # devices that the model's layers are on
    dense_expected: bool = False                            # patch_model has already said that this model is dense
    warned: bool = False
    torn: bool = False                                      # interrupted in the middle of a change; `renew` after a reset
    members: list = field(default_factory=list)             # weak references to the layers of this cache
    expected: int = 0                                       # padded tokens of a prompt that comes in chunks, while it does
    static: object = None                                   # the StaticStep of this cache's kernels, once there is one

    def kernels(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether decoding on this device goes through the Triton kernels; says once why not."""
        return use_kernels(self.config, device, dtype)

    def step(self):
        """What the kernels need beside the layers: made at the first step."""
        if self.static is None:
            self.static = self.new_step()
        return self.static

    def new_step(self):
        from .static import StaticStep  # Triton is imported only where it is used
        return StaticStep(self.config, self.layers)

    def renew(self) -> None:
        """After all layers have let go of their blocks: what was torn is not used again."""
        for key in [key for key, pool in self.pools.items() if pool.torn]:
            del self.pools[key]
        self.torn = False

    def live_layers(self) -> list:
        return [layer for layer in (member() for member in self.members) if layer is not None]

    @property
    def pool_layers(self) -> int:
        """Layers that share a pool, with all layers on one device."""
        return 1 if self.config.pool == "per_layer" else self.layers

    def pool(self, keys: torch.Tensor, values: torch.Tensor, order: int = 0) -> BlockPool:
        """The pool for the blocks of the layer `order`: the one of its device, or its own.

        Raises:
            NotImplementedError: it would be the second one under one byte budget.
            ValueError: the host tier can't be reserved.
        """
        config = self.config
        elements, dtype = config.block_size * (keys.shape[-1] + values.shape[-1]), keys.dtype
        if config.kv_bits < 16:
            elements = packed_bytes(config.block_size, keys.shape[-1], values.shape[-1], config.kv_bits)
            dtype = torch.uint8
        kind = (keys.device, dtype, elements)
        key = (*kind, order if config.pool == "per_layer" else None)
        if key not in self.pools:
            pools = self.layers // self.pool_layers
            budget, host = config.gpu_bytes, config.host_bytes
            twin = next((pool for other, pool in self.pools.items() if other[:3] == kind), None)
            if twin is not None:                            # as large as it, though less may be free by now
                budget = None if twin.budget is None else twin.budget * pools
                host = twin.host_capacity * twin.block_bytes * pools if twin.tiered else 0
            elif budget is None and host != 0:
                budget = auto_budget(keys.device)
            if budget is not None and twin is None and any(device == keys.device for device, *_ in self.pools):
                raise NotImplementedError(
                    "Layers of this model have different key or value sizes, which one pool with a byte budget can't "
                    "hold. Leave gpu_memory and host_memory at 'auto'.")
            pool = BlockPool(keys.device, dtype, elements, budget, host, pools)
            for other in self.pools.values():
                pool.lock = other.lock                      # threads of forks take turns in all pools, or in none
                if pool.tiered and other.tiered and other.device == pool.device:
                    pool.host_tier.link = other.host_tier.link      # one layer at a time is stored beside
            if config.fetcher == "copy_engine":
                pool.host_tier.use_copy_engine()
            self.pools[key] = pool
        return self.pools[key]

    def fit(self, pool: BlockPool, ids: int = 0) -> None:
        """Give the pool the slots that its budget leaves beside digests and tables, or say what would do.

        The least is scratch, what every layer keeps pinned, and one round of the widest layer. Without a host tier it
        is what there is and the `ids` that are about to be asked for.

        Raises:
            ValueError: not even the smallest pool that can take a step fits.
        """
        users = list(pool.users)
        # The layers of a cache change one after the other; each counts the ones to come as large as itself, so that
        # what can't work is refused before anything is stored or moved, and the pool is laid out once.
        mine = {id(layer) for layer in self.live_layers()}
        rows = max((user.batch for user in users if id(user) in mine), default=0)
        columns = max((user.table.shape[2] for user in users if id(user) in mine), default=0)
        sizes = [(user, rows, columns) if id(user) in mine else (user, user.batch, user.table.shape[2]) for user in users]
        scale = 1.0
        if self.devices == 1 and self.pool_layers > 1:
            parts = self.pool_layers / len(users)
            if self.heads:
                parts = sum(self.heads) / sum(user.heads for user in users)
            scale = max(1.0, parts)
        other = int(sum(user.side_bytes(*size) for user, *size in sizes) * scale)
        if not pool.tiered:
            pool.check_budget(pool.slots + pool.lacking(ids), other)
            pool.side = other
            return
        pinned = int(sum(user.pinned_blocks(batch) for user, batch, _ in sizes) * scale)
        least = 1 + pinned + max(batch * user.heads * largest_round(user.config.round_blocks) for user, batch, _ in sizes)
        most = least + int(sum(batch * user.heads * columns for user, batch, columns in sizes) * scale)
        slots = most if pool.budget is None else min(most, (pool.budget - other) // pool.block_bytes)
        if slots < least:
            found = f" ({format_bytes(pool.budget * pool.pools)} were free)" if self.config.gpu_bytes is None else ""
            raise ValueError(
                f"gpu_memory={self.config.gpu_memory!r}{found} is too small: this context and batch need at least "
                f"{format_bytes(pool.pools * (other + least * pool.block_bytes))} ({least} slots of {pool.block_bytes} bytes, "
                f"and {other} bytes of digests and tables{pool.among}). Raise gpu_memory. Nothing in the cache was lost.")
        pool.resize(slots)

    def warn_dense(self) -> None:
        """Once a cache: dense keys and values were asked for."""
        if self.dense_expected or self.warned:
            return
        self.warned = True
        what = "exact" if self.config.kv_bits == 16 else f"of blocks in {self.config.kv_bits} bits"
        warnings.warn(f"This PSACache hands out dense keys and values: attention is {what} but not sparse. Patch the "
                      "model with hf_sparse.patch_model(model) before using the cache.", UserWarning, stacklevel=4)

