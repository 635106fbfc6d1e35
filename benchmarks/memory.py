"""Bytes that synthetic caches take: their blocks, what lies beside these, and pools with room for a share of them."""
from __future__ import annotations

from hf_sparse import PSAConfig
from hf_sparse.cache.digest_store import DigestStore
from hf_sparse.cache.exact_blocks import ExactBlocks
from hf_sparse.kernels.reference.quantise import packed_bytes

from .synthetic import Shape

GB = 1e9


def block_bytes(config: PSAConfig, shape: Shape) -> int:
    if config.kv_bits < 16:
        return packed_bytes(config.block_size, shape.dim, shape.dim, config.kv_bits)
    return config.block_size * 2 * shape.dim * shape.dtype.itemsize


def all_blocks(config: PSAConfig, shape: Shape, tokens: int) -> int:
    """Bytes of the blocks of rows of `tokens` tokens."""
    return shape.layers * shape.batch * shape.heads * (tokens // config.block_size) * block_bytes(config, shape)


def side_bytes(config: PSAConfig, shape: Shape, tokens: int) -> int:
    """Bytes beside the slots of rows of `tokens` tokens: of digests, tables, and exact copies where blocks are quantised."""
    size, rows = config.block_size, shape.batch * shape.heads
    columns = tokens // size + 16
    store = DigestStore(config.digest, size, shape.dim, config.key_bits, shape.dtype, config.logical_size)
    side = store.bytes_for(shape.batch, shape.heads, columns) + rows * columns * 8
    if config.kv_bits < 16:
        tail = max(config.recent_blocks + 1, store.unit_blocks)
        side += ExactBlocks.bytes_for(shape.batch, shape.heads, config.sink_blocks, tail, size * 2 * shape.dim,
                                      shape.dtype.itemsize)
    return shape.layers * side


def pool_budget(config: PSAConfig, shape: Shape, share: float, context: int, tokens: int) -> int:
    """`gpu_memory` of slots for `share` of the blocks of `context`, as many whatever they take, and of what else rows of
    `tokens` tokens need."""
    return int(share * all_blocks(config, shape, context)) + side_bytes(config, shape, tokens)


def held(shape: Shape, context: int, device_bytes: int) -> dict:
    """What a cache takes on the device, digests and tables included, and its ratio to the keys and values in the model's dtype."""
    return {"kv_gb": round(device_bytes / GB, 3), "kv_ratio": round(device_bytes / shape.kv_bytes(context), 4)}
