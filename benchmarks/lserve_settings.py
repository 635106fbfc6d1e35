"""What the rows of benchmarks/lserve.py are measured with: sizes, settings, and a synthetic profile of streaming heads."""
from __future__ import annotations

import random

from hf_sparse import PSAConfig

from .synthetic import Shape

BOTH = (32768, 131072)
CONTEXTS = {"prefill": BOTH, "attention": BOTH, "decode": BOTH, "chain": (32768,), "offload": (131072,),
            "ablation": (4096, 16384, 65536, 262144), "reuse": (131072,), "pages": (131072,)}
BATCHES = {"chain": 8}                                      # of other rows: 1
WITH_MODEL = ("prefill", "decode", "offload")
BUDGET = 4096                                               # tokens that a row and KV head reads
POOL = 0.1                                                  # of the blocks, in offloaded rows
REUSE = (1, 2, 4, 8, 16)
PAGES = ((16, 32), (32, 32), (16, 64), (32, 64), (64, 64))  # tokens of logical and physical pages

PSA = PSAConfig(max_blocks=BUDGET // PSAConfig().block_size)
LSERVE = PSAConfig.preset("lserve")
SETTINGS: dict[str, tuple[PSAConfig | None, float]] = {     # rows of generate(), and the share of heads that stream
    "stock": (None, 0.0),
    "psa": (PSA, 0.0),
    "lserve": (LSERVE, 0.0),
    "lserve-c1": (LSERVE.replace(reuse=1), 0.0),
    "psa-half": (PSA, 0.5),
    "lserve-quarter": (LSERVE, 0.25),
    "lserve-half": (LSERVE, 0.5),
    "lserve-half-kv8": (LSERVE.replace(kv_bits=8), 0.5),
    "lserve-half-kv4": (LSERVE.replace(kv_bits=4), 0.5),
    "psa-half-kv4": (PSA.replace(kv_bits=4), 0.5),
}
PROMPTS: dict[str, tuple[PSAConfig | None, float]] = {      # rows "prefill-..."
    "stock": (None, 0.0),
    "psa": (PSA, 0.0),
    "streaming": (PSA, 0.5),
    "streaming-narrow": (PSA.replace(streaming_prefill_window=PSA.streaming_window, min_context=0), 0.5),
    "streaming-kv4": (PSA.replace(kv_bits=4), 0.5),
}


def streaming_heads(layers: int, heads: int, share: float) -> tuple[tuple[int, int], ...]:
    """`share` of the KV heads of a model, as pairs (layer, head): layers by turns have as many, fewer, more and as many.

    Real profiles are uneven too. There are three numbers of heads only, as each has kernels of its own to be compiled.
    """
    generator, mean = random.Random(6), round(share * heads)
    apart = min(mean // 2, heads - mean)
    counts = (mean, mean - apart, mean + apart, mean)
    return tuple((layer, head) for layer in range(layers) for head in sorted(generator.sample(range(heads), counts[layer % 4])))


def with_streaming(config: PSAConfig, shape: Shape, share: float) -> PSAConfig:
    return config.replace(streaming_heads=streaming_heads(shape.layers, shape.heads, share)) if share else config


def described(config: PSAConfig | None, shape: Shape) -> dict:
    """What a row says of its settings."""
    if config is None:
        return {"streaming": 0.0, "kv_bits": 8 * shape.dtype.itemsize, "reuse": 1}
    pages = {"logical_size": config.logical_size} if config.digest == "pages" else {}
    refresh = {"reuse_refresh": config.reuse_refresh} if config.reuse > 1 else {}
    return {"streaming": round(len(config.streaming_heads) / (shape.layers * shape.heads), 4), "kv_bits": config.kv_bits,
            "reuse": config.reuse, **refresh, "digest": config.digest, "block_size": config.block_size, **pages}
