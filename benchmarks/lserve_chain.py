"""The attention of decode steps of a few layers without a model, for benchmarks/lserve.py: what a token takes, and what of it
selecting takes.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from transformers import LlamaConfig

from hf_sparse import PSACache, PSAConfig
from hf_sparse.kernels import decode as kernels

from .common import graph_times, quantiles
from .kernels import kernel_times
from .memory import held
from .synthetic import Queries, Shape, fill

CHAIN = Shape(8, 1, 32, 8, 128, torch.bfloat16, torch.device("cuda"))
CHAIN_TOKENS = 16                                           # of a graph: a multiple of every `reuse`
ROOM = 512                                                  # tokens that a chain goes on for, at most


class Chain:
    """The attention of a filled cache's decode steps, CHAIN_TOKENS tokens a call and layer after layer, without a model.

    rewind: each call begins where the first one did. For caches without streaming heads.
    """

    def __init__(self, cache: PSACache, queries: Queries, rewind: bool = False):
        self.layers, self.scaling, self.rewind = cache.step_layers, queries.shape.dim ** -0.5, rewind
        for layer in self.layers:
            layer.begin_step()
        self.step = cache.state.step()
        self.step.prepare(self.layers)
        shape = queries.shape
        generator = torch.Generator(device=shape.device).manual_seed(7)
        self.new = [torch.randn(shape.batch, shape.heads, 1, shape.dim, generator=generator, device=shape.device).to(shape.dtype)
                    for _ in range(2)]
        # A layer's own queries, one a token: part of the walk, and none of the time.
        self.table = queries.table[-CHAIN_TOKENS:]
        self.lengths = [layer.lengths for layer in cache.sparse_layers]
        self.saved = [lengths.clone() for lengths in self.lengths]

    def __call__(self) -> None:
        for token in range(CHAIN_TOKENS):
            for layer in self.layers:
                self.step.run(layer, self.table[token, layer.index], *self.new, None, self.scaling, 0.0)
        if self.rewind:
            for lengths, saved in zip(self.lengths, self.saved):
                lengths.copy_(saved)

    def us(self) -> dict:
        """Microseconds a layer and token, in a graph."""
        return quantiles([ms * 1e3 / (CHAIN_TOKENS * len(self.layers)) for ms in graph_times(self, repeats=10)])

    def kernels_us(self) -> dict[str, float]:
        """Mean microseconds of each kernel by itself: none starts before the one before it has ended."""
        saved, kernels.TUNING.overlap = kernels.TUNING.overlap, False
        try:
            return kernel_times(self)
        finally:
            kernels.TUNING.overlap = saved


class Skipped:
    """A kernel that is not launched."""

    def __getitem__(self, grid) -> Callable:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def nothing_selected():
    """Steps that score and select nothing: those of rows that keep a selection."""
    select, waves = kernels.select_kernel, kernels.TUNING.score_waves
    kernels.select_kernel, kernels.TUNING.score_waves = Skipped(), 0
    try:
        yield
    finally:
        kernels.select_kernel, kernels.TUNING.score_waves = select, waves


def chain_of(queries: Queries, context: int, config: PSAConfig, rewind: bool = False) -> tuple[Chain, PSACache]:
    shape = queries.shape
    model = LlamaConfig(num_hidden_layers=shape.layers, num_attention_heads=shape.query_heads, num_key_value_heads=shape.heads,
                        head_dim=shape.dim, hidden_size=shape.query_heads * shape.dim)
    cache = PSACache(model, config)
    fill(cache, queries, context, ROOM)
    return Chain(cache, queries, rewind), cache


def attention_alone(queries: Queries, context: int, config: PSAConfig) -> dict:
    chain, cache = chain_of(queries, context, config)
    row = {"attention_us_per_layer": chain.us(), **held(queries.shape, context, cache.stats()["bytes"]["device"])}
    return {**row, "kv_fraction": cache.stats()["kv_fraction"]}


def selecting(queries: Queries, context: int, config: PSAConfig) -> dict:
    """The chain, and of it what scoring and selecting take: the chain without them is one that keeps its selection."""
    chain, cache = chain_of(queries, context, config)
    row = {"attention_us_per_layer": chain.us(), "kernels_us": chain.kernels_us()}
    row |= {name: cache.stats()[name] for name in ("kv_fraction", "selected")}
    del chain, cache
    keeps = config.replace(reuse=2**20, reuse_refresh=0)
    chain, cache = chain_of(queries, context, keeps, rewind=True)
    chain()
    with nothing_selected():
        kept = chain.us()
    row["selector_us_per_layer"] = round(row["attention_us_per_layer"]["median"] - kept["median"], 3)
    return {**row, "kept_us_per_layer": kept}
