"""A long context without its prompt: synthetic keys and values in a cache, and synthetic queries inside the decode step.

Random weights give attention that no trained model has, and a token's blocks have nothing to do with those of the token
before, which is all that a pool of blocks lives on. So keys are random with a bias for each KV head, and the queries of
each layer, row and head are a walk, q[t] = a q[t - 1] + sqrt(1 - a^2) noise, with `a` chosen by `calibrate` such that
consecutive tokens share as many blocks as they were measured to on real models. The step takes the query from a
table on the device where it would take the model's; everything else is the model's own.

With prefetch=True the step predicts the next layer's query; that too is computed as always, and then replaced: by the next
layer's query with noise, a q + sqrt(1 - a^2) noise, `a` chosen by `calibrate` such that the heaviest blocks of the two have
as much in common (PREDICTED) as was measured on a real model for a prediction from the layer before.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hf_sparse.cache.static import StaticStep, blocks_of

PIECE = 65536                                               # tokens of a row and layer that are made at once
OBSERVED = 256                                              # queries of the walk that stand for the end of the prompt
TARGET = 0.75                                               # of a token's blocks that the token before it read
PREDICTED = 0.87                                            # of a token's blocks that the predicted query ranks highest


@dataclass(frozen=True)
class Shape:
    """Sizes of a cache and of the queries that read it."""

    layers: int
    batch: int
    query_heads: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def kv_bytes(self, tokens: int) -> int:
        return self.layers * self.batch * self.heads * tokens * 2 * self.dim * self.dtype.itemsize


def shape_of(model, batch: int) -> Shape:
    config = model.config
    return Shape(config.num_hidden_layers, batch, config.num_attention_heads, config.num_key_value_heads,
                 config.head_dim, model.dtype, model.device)


def pieces(shape: Shape, order: int, tokens: int, size: int = PIECE) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [B, H, n, D] of the layer `order`, `size` tokens at a time; the same at every call."""
    generator = torch.Generator(device=shape.device).manual_seed(order)
    normal = lambda *sizes: torch.randn(*sizes, generator=generator, device=shape.device)  # noqa: E731
    bias = normal(1, shape.heads, 1, shape.dim)
    for low in range(0, tokens, size):
        sizes = shape.batch, shape.heads, min(size, tokens - low), shape.dim
        yield normal(*sizes).add_(bias).to(shape.dtype), normal(*sizes).to(shape.dtype)


def walk(tokens: int, sizes: tuple, persistence: float, seed: int, device) -> Iterator[torch.Tensor]:
    """`tokens` queries [*sizes] fp32, each near the one before."""
    generator = torch.Generator(device=device).manual_seed(seed)
    noise = lambda: torch.randn(*sizes, generator=generator, device=device)  # noqa: E731
    query = noise()
    for _ in range(tokens):
        yield query
        query = persistence * query + math.sqrt(1.0 - persistence**2) * noise()


class Queries:
    """Queries of all layers for `tokens` tokens, taken by a counter on the device, as a captured step has to.

    nearness: of predictions to the queries that they predict; None: there are no predictions.
    """

    def __init__(self, shape: Shape, tokens: int, persistence: float, nearness: float | None = None):
        self.shape = shape
        sizes = shape.layers, shape.batch, shape.query_heads, 1, shape.dim
        self.table = torch.zeros(OBSERVED + tokens, *sizes, dtype=shape.dtype, device=shape.device)
        for row, query in zip(self.table, walk(len(self.table), sizes, persistence, 17, shape.device)):
            row.copy_(query)
        self.position = torch.zeros(1, dtype=torch.int64, device=shape.device)
        self.current = self.table[:1].clone()
        self.predictions = None
        if nearness is not None:
            self.predictions, self.predicted = self.table.clone(), self.current.clone()
            for row, noise in zip(self.predictions, walk(len(self.table), sizes, 0.0, 31, shape.device)):
                row.copy_(nearness * row.float() + math.sqrt(1.0 - nearness**2) * noise)
        self.start()

    def start(self) -> None:
        """The next token is the first after the prompt."""
        self.position.fill_(OBSERVED - 1)

    def taken(self) -> int:
        """Tokens since `start`. Synchronises."""
        return int(self.position) - OBSERVED + 1

    def observed(self, order: int) -> torch.Tensor:
        """[B, Hq, OBSERVED, D]: a layer's queries of the end of the prompt."""
        return self.table[:OBSERVED, order, :, :, 0].permute(1, 2, 0, 3)

    def query(self, order: int) -> torch.Tensor:
        """[B, Hq, 1, D] of this token; layers come in order, and the first one moves on."""
        if order == 0:
            self.position.add_(1).remainder_(len(self.table))
            torch.index_select(self.table, 0, self.position, out=self.current)
            if self.predictions is not None:
                torch.index_select(self.predictions, 0, self.position, out=self.predicted)
        return self.current[0, order]

    def prediction(self, order: int) -> torch.Tensor:
        """[B, Hq, 1, D]: what the layer before `order` takes its query of this token for."""
        return self.predicted[0, order]


@contextlib.contextmanager
def synthetic_queries(queries: Queries, watch: Callable | None = None):
    """The kernels' step with these queries, and predictions if there are any; `watch(step, layer)` is called after each layer
    (not if captured)."""
    run, look_ahead = StaticStep.run, StaticStep.look_ahead

    def run_with_queries(self, layer, query, *rest, **kwargs):
        output = run(self, layer, queries.query(layer.index), *rest, **kwargs)
        if watch is not None:
            watch(self, layer)
        return output

    def look_ahead_with_predictions(self, layer, query, *rest, **kwargs):
        look_ahead(self, layer, queries.prediction(layer.index), *rest, **kwargs)

    StaticStep.run, StaticStep.look_ahead = run_with_queries, look_ahead_with_predictions
    try:
        yield
    finally:
        StaticStep.run, StaticStep.look_ahead = run, look_ahead


@torch.no_grad()
def fill(cache, queries: Queries, context: int, room: int) -> None:
    """`context` tokens into an empty cache, with their digests, and ids for `room` more."""
    shape = queries.shape
    group = shape.query_heads // shape.heads
    for order, layer in enumerate(cache.step_layers):
        blocks = blocks_of(layer)
        for number, (keys, values) in enumerate(pieces(shape, order, context)):
            layer.update(keys, values)                      # which stores the piece before
            if number == 0 and blocks is not None:
                blocks.group = group
                blocks.reserve(context + room)              # at once: the pool would be copied at every piece
        if blocks is not None:
            observed = queries.observed(order)
            if blocks is not layer:
                observed = observed.unflatten(1, (shape.heads, group)).index_select(1, layer.others).flatten(1, 2)
            blocks.digests.observe(observed, blocks.heads, None)
        layer.begin_step()                                  # the last piece, and the digests, which belong to the prompt


# -- how near queries have to be -----------------------------------------------------------------------------


def block_shares(keys: list[torch.Tensor], queries: torch.Tensor, block_size: int) -> torch.Tensor:
    """Exact share of the attention mass of every block, mean over the query heads of a KV head: [T, H, N].

    Args:
        keys: pieces [H, n, D], whole blocks each. queries: [T, Hq, D].
    """
    tokens, heads = queries.shape[0], keys[0].shape[0]
    query = queries.float().unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2) * queries.shape[-1]**-0.5
    masses = [(query @ part.float().mT).unflatten(-1, (-1, block_size)).logsumexp(-1) for part in keys]
    shares = torch.cat(masses, -1).softmax(-1)                                                 # [H, T * G, N]
    return shares.unflatten(1, (tokens, -1)).mean(2).transpose(0, 1)


def shared_blocks(shares: torch.Tensor, blocks: int) -> float:
    """Share of a token's `blocks` heaviest blocks that are among those of the token before."""
    chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(2, shares.topk(blocks, 2).indices, True)
    return float((chosen[1:] & chosen[:-1]).sum() / chosen[1:].sum())


@torch.no_grad()
def calibrate(shape: Shape, context: int, blocks: int, block_size: int = 32, tokens: int = 17,
              rounds: int = 8, target: float = TARGET) -> tuple[float, float]:
    """The walk's `persistence` for which tokens share `target` of their blocks in the first layer, and what they share."""
    context = context // block_size * block_size
    one = Shape(1, 1, shape.query_heads, shape.heads, shape.dim, shape.dtype, shape.device)
    keys = [part[0] for part, _ in pieces(one, 0, context)]
    blocks = min(blocks, context // block_size)

    def measured(step: float) -> float:
        queries = torch.stack(list(walk(tokens, (shape.query_heads, shape.dim), 1.0 - step, 23, shape.device)))
        return shared_blocks(block_shares(keys, queries.to(shape.dtype), block_size), blocks)

    low, high = 1e-6, 0.5                                   # a step of the walk: the shorter, the more is shared
    for _ in range(rounds):
        step = math.sqrt(low * high)
        low, high = (step, high) if measured(step) > target else (low, step)
    step = math.sqrt(low * high)
    return 1.0 - step, measured(step)
