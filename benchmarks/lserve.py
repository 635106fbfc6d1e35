"""LServe's parts on one GPU, against PSA and the stock paths of the same run, after a correctness check.

    python -m benchmarks.lserve [--rows prefill,attention,decode,chain,offload,ablation,reuse,pages] [--contexts 131072]
                                [--settings stock,psa,lserve] [--append --run ID]

A Llama-3.1-8B shape with random weights in bf16. There are no trained heads to calibrate, so streaming heads are a fixed
synthetic profile: drawn with a seed, of every four layers one with fewer and one with more of them. Rows:

    prefill     seconds of a prompt's forward: stock, patched, half of the heads streaming, so with the window of decoding, and
                with 4-bit KV
    attention   the attention of a prompt in one layer: dense, and with half of the heads streaming
    decode      generate(), for each of --settings; the KV that each takes
    chain       the attention of a decode step with KV of 16, 8 and 4 bits
    offload     generate() with a pool for a tenth of the blocks, with KV of 16 and 4 bits: what is fetched
    ablation    the attention of a decode step: dense, static (streaming heads), dynamic (pages), both
    reuse       the same by the number of tokens that share a selection, and what selecting costs; the last row with the preset's
                own `reuse_refresh`, which selects as often as the synthetic queries turn
    pages       the same by the sizes of logical and physical pages

Keys, values and queries of decoded tokens are synthetic (benchmarks/synthetic.py), and there is no prompt to wait for. Rows of
attention alone are of a few layers without a model, tokens in a CUDA graph. --rows, --settings and --contexts cut a run into
parts, which --append and --run put together again.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache, LlamaConfig

from hf_sparse import PSACache, PSAConfig, patch_model, unpatch_model
from hf_sparse.cache.digest_store import DigestStore
from hf_sparse.cache.exact_blocks import ExactBlocks
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.kernels import decode as kernels
from hf_sparse.kernels.prefill import prefill_attention
from hf_sparse.kernels.reference.dense import exact_attention
from hf_sparse.kernels.reference.quantise import packed_bytes

from . import offload, prefill_kernel
from .common import add_run_arguments, check_names, check_tokens, graph_times, quantiles, results, run_id, write
from .decode import build, generate, sdpa_us
from .kernels import kernel_times
from .lserve_check import check, failures
from .offload import GB, failure, pools_of, settle, speed, synchronize
from .synthetic import Queries, Shape, fill, pieces, shape_of

BOTH = (32768, 131072)
CONTEXTS = {"prefill": BOTH, "attention": BOTH, "decode": BOTH, "chain": (32768,), "offload": (131072,),
            "ablation": (4096, 16384, 65536, 262144), "reuse": (131072,), "pages": (131072,)}
BATCHES = {"chain": 8}                                      # of other rows: 1
WITH_MODEL = ("prefill", "decode", "offload")
CHAIN = Shape(8, 1, 32, 8, 128, torch.bfloat16, torch.device("cuda"))       # layers of attention alone
CHAIN_TOKENS = 16                                           # of a graph: a multiple of every `reuse`
ROOM = 512                                                  # tokens that a chain goes on for, at most
BUDGET = 4096                                               # tokens that a row and KV head reads
STOCK_TOKENS = 8
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


class Bench:
    """What all rows of a run share: the model, None where no row needs it, and the calibrated queries."""

    def __init__(self, model, args):
        self.model, self.args, self.parts = model, args, offload.Bench(model, args)

    def rows(self, name: str, batch: int, contexts) -> Iterator[dict]:
        """The rows of a name, each as soon as it is measured; what fails is a row with its error."""
        yield from getattr(self, name)(batch, contexts)

    @staticmethod
    def measured(name: str, phase: str, shape: Shape, context: int, config: PSAConfig | None, measure: Callable,
                 *args) -> dict:
        row = {"name": name, "phase": phase, "batch": shape.batch, "context": context, **described(config, shape)}
        try:
            row |= measure(shape, context, config, *args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next row may work
            row |= failure(error)
        settle()
        return row

    # -- prompts ------------------------------------------------------------------------------------------------
    def prefill(self, batch: int, contexts) -> Iterator[dict]:
        shape = shape_of(self.model, batch)
        for context in contexts:
            for name in self.args.prompts:
                config, share = PROMPTS[name]
                config = None if config is None else with_streaming(config, shape, share)
                yield self.measured(f"prefill-{name}", "prefill", shape, context, config, self.prompt)
        unpatch_model(self.model)

    def prompt(self, shape: Shape, context: int, config: PSAConfig | None) -> dict:
        unpatch_model(self.model)
        if config is not None:
            patch_model(self.model, config)
        ids = self.parts.ids(shape, context)[:, :context]
        mask = None if config is None else torch.ones_like(ids)

        def seconds() -> float:
            cache = DynamicCache(config=self.model.config) if config is None else PSACache(self.model.config, config)
            synchronize(shape.device)
            started = time.perf_counter()
            with torch.no_grad():
                self.model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            synchronize(shape.device)
            return time.perf_counter() - started

        seconds()
        return {"seconds": quantiles([seconds() for _ in range(2)])}

    def attention(self, batch: int, contexts) -> Iterator[dict]:
        one = dataclasses.replace(CHAIN, layers=1, batch=1)
        heads = prefill_kernel.STREAMING["apart"]
        streaming = PSAConfig(streaming_heads=tuple((0, head) for head in heads), streaming_sink=prefill_kernel.SINK,
                              streaming_prefill_window=prefill_kernel.WINDOW)
        for context in contexts:
            for name, config in (("dense", None), ("streaming", streaming)):
                yield self.measured(f"attention-{name}", "prefill", one, context, config, self.prompt_attention)

    def prompt_attention(self, shape: Shape, context: int, config: PSAConfig | None) -> dict:
        query, keys, values = prefill_kernel.draw(context)
        scaling = query.shape[-1] ** -0.5
        if config is None:
            function = lambda: exact_attention(query, keys, values, None, scaling, causal=True)  # noqa: E731
        else:
            heads = tuple(head for _, head in config.streaming_heads)
            function = lambda: prefill_attention(query, keys, values, heads, config.streaming_sink,  # noqa: E731
                                                 config.streaming_prefill_window, scaling)
        return {"attention_us_per_layer": quantiles([ms * 1e3 for ms in prefill_kernel.times_of(function, 5)])}

    # -- generate() ---------------------------------------------------------------------------------------------
    def decode(self, batch: int, contexts) -> Iterator[dict]:
        shape = shape_of(self.model, batch)
        for name in self.args.settings:
            config, share = SETTINGS[name]
            config = None if config is None else with_streaming(config, shape, share)
            for context in contexts:
                yield self.measured(name, "decode", shape, context, config, self.stock if config is None else self.generated)
        unpatch_model(self.model)

    def stock(self, shape: Shape, context: int, config: None) -> dict:
        unpatch_model(self.model)
        cache = DynamicCache(config=self.model.config)
        for order in range(shape.layers):
            keys, values = (torch.cat(parts, 2) for parts in zip(*pieces(shape, order, context)))
            cache.update(keys, values, order)
            del keys, values
        _, times = generate(self.model, self.parts.ids(shape, context), cache, STOCK_TOKENS)
        row = {**speed(times[2:], shape.batch), "captured": False, "kv_fraction": 1.0, **held(shape, context, shape.kv_bytes(context))}
        del cache
        settle()
        return {**row, "attention_us_per_layer": sdpa_us(shape.batch, context, shape.heads)}

    def generated(self, shape: Shape, context: int, config: PSAConfig) -> dict:
        queries, overlap = self.parts.queries(shape, context)
        cache, row = self.filled(config, queries, context)
        more, _ = self.parts.decode(cache, queries, self.parts.ids(shape, context))
        used = cache.stats()["bytes"]
        row |= {**more, "overlap": overlap, **held(shape, context, used["device"])}
        if not pools_of(cache)[0].tiered:
            row["attention_us_per_layer"] = Chain(cache, queries).us()
        return row

    def filled(self, config: PSAConfig, queries: Queries, context: int) -> tuple[PSACache, dict]:
        """A cache that holds the context. The model is patched anew for other settings only: a captured step is kept."""
        if getattr(getattr(self.model, "_hf_sparse", None), "config", None) != config:
            unpatch_model(self.model)
            torch._dynamo.reset()
            patch_model(self.model, config)
        self.model.last_psa_cache = None                    # of the row before: not this one's memory
        settle()
        self.parts.base = torch.cuda.memory_allocated() if queries.shape.device.type == "cuda" else 0
        cache, started = PSACache(self.model.config, config), time.perf_counter()
        fill(cache, queries, context, self.parts.room() + ROOM)
        synchronize(queries.shape.device)
        return cache, {"fill_s": round(time.perf_counter() - started, 2)}

    def offload(self, batch: int, contexts) -> Iterator[dict]:
        shape = shape_of(self.model, batch)
        for context in contexts:
            for bits in (16, 4):
                config, tokens = PSA.replace(kv_bits=bits), context + self.parts.room() + ROOM
                config = config.replace(gpu_memory=pool_budget(config, shape, context, tokens),
                                        host_memory=int(1.05 * all_blocks(config, shape, tokens)) + 2**28)
                yield self.measured("offload", "decode", shape, context, config, self.fetched)
        unpatch_model(self.model)

    def fetched(self, shape: Shape, context: int, config: PSAConfig) -> dict:
        row, size = self.generated(shape, context, config), block_bytes(config, shape)
        share = row["pool_fraction"] * shape.kv_bytes(context) / all_blocks(config, shape, context)
        return {**row, "pool_fraction": round(share, 4), "fetch_bytes": round(row["misses_per_token"] * size)}

    # -- the attention of decode steps --------------------------------------------------------------------------
    def chain(self, batch: int, contexts) -> Iterator[dict]:
        for context in contexts:
            for name, config in (("psa", PSA), ("lserve", LSERVE)):
                for bits in (16, 8, 4):
                    yield self.attended(f"chain-{name}", batch, context, config.replace(kv_bits=bits))

    def ablation(self, batch: int, contexts) -> Iterator[dict]:
        exact, shape = PSAConfig(threshold=1.0), dataclasses.replace(CHAIN, batch=batch)
        for context in contexts:
            for name, config, share in (("dense", exact, 0.0), ("static", exact, 0.5), ("dynamic", LSERVE, 0.0), ("both", LSERVE, 0.5)):
                yield self.attended(f"ablation-{name}", batch, context, with_streaming(config, shape, share))

    def reuse(self, batch: int, contexts) -> Iterator[dict]:
        for context in contexts:
            for tokens, refresh in (*((tokens, 0.0) for tokens in REUSE), (LSERVE.reuse, LSERVE.reuse_refresh)):
                config = LSERVE.replace(reuse=tokens, reuse_refresh=refresh)
                yield self.attended("reuse", batch, context, config, self.selecting)

    def pages(self, batch: int, contexts) -> Iterator[dict]:
        for context in contexts:
            for logical, physical in PAGES:
                config = LSERVE.replace(logical_size=logical, block_size=physical, top_k=BUDGET // physical, reuse=1)
                yield self.attended("pages", batch, context, config, self.selecting)

    def attended(self, name: str, batch: int, context: int, config: PSAConfig, measure: Callable | None = None) -> dict:
        shape = dataclasses.replace(CHAIN, batch=batch)
        return self.measured(name, "decode", shape, context, config, measure or self.attention_alone)

    def chain_of(self, shape: Shape, context: int, config: PSAConfig, rewind: bool = False) -> tuple[Chain, PSACache]:
        model = LlamaConfig(num_hidden_layers=shape.layers, num_attention_heads=shape.query_heads, num_key_value_heads=shape.heads,
                            head_dim=shape.dim, hidden_size=shape.query_heads * shape.dim)
        queries, _ = self.parts.queries(shape, context)
        cache = PSACache(model, config)
        fill(cache, queries, context, ROOM)
        return Chain(cache, queries, rewind), cache

    def attention_alone(self, shape: Shape, context: int, config: PSAConfig) -> dict:
        chain, cache = self.chain_of(shape, context, config)
        row = {"attention_us_per_layer": chain.us(), **held(shape, context, cache.stats()["bytes"]["device"])}
        return {**row, "kv_fraction": cache.stats()["kv_fraction"]}

    def selecting(self, shape: Shape, context: int, config: PSAConfig) -> dict:
        """The chain, and of it what scoring and selecting take: the chain without them is one that keeps its selection."""
        chain, cache = self.chain_of(shape, context, config)
        row = {"attention_us_per_layer": chain.us(), "kernels_us": chain.kernels_us()}
        row |= {name: cache.stats()[name] for name in ("kv_fraction", "selected")}
        del chain, cache
        keeps = config.replace(reuse=2**20, reuse_refresh=0)
        chain, cache = self.chain_of(shape, context, keeps, rewind=True)
        chain()
        with nothing_selected():
            kept = chain.us()
        row["selector_us_per_layer"] = round(row["attention_us_per_layer"]["median"] - kept["median"], 3)
        return {**row, "kept_us_per_layer": kept}


def held(shape: Shape, context: int, device_bytes: int) -> dict:
    """What a cache takes on the device, digests and tables included, and its ratio to the keys and values as the model has them."""
    return {"kv_gb": round(device_bytes / GB, 3), "kv_ratio": round(device_bytes / shape.kv_bytes(context), 4)}


def block_bytes(config: PSAConfig, shape: Shape) -> int:
    if config.kv_bits < 16:
        return packed_bytes(config.block_size, shape.dim, shape.dim, config.kv_bits)
    return config.block_size * 2 * shape.dim * shape.dtype.itemsize


def all_blocks(config: PSAConfig, shape: Shape, tokens: int) -> int:
    """Bytes of the blocks of rows of `tokens` tokens."""
    return shape.layers * shape.batch * shape.heads * (tokens // config.block_size) * block_bytes(config, shape)


def pool_budget(config: PSAConfig, shape: Shape, context: int, tokens: int) -> int:
    """`gpu_memory` of slots for POOL of the blocks, as many whatever they take, and of what else rows of `tokens` tokens need."""
    size, rows = config.block_size, shape.batch * shape.heads
    columns = tokens // size + 16
    store = DigestStore(config.digest, size, shape.dim, config.key_bits, shape.dtype, config.logical_size)
    side = store.bytes_for(shape.batch, shape.heads, columns) + rows * columns * 8
    if config.kv_bits < 16:
        tail = max(config.recent_blocks + 1, store.unit_blocks)
        side += ExactBlocks.bytes_for(shape.batch, shape.heads, config.sink_blocks, tail, size * 2 * shape.dim,
                                      shape.dtype.itemsize)
    return int(POOL * all_blocks(config, shape, context)) + shape.layers * side


def options(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--rows", type=listed(str), default=list(CONTEXTS))
    parser.add_argument("--settings", type=listed(str), default=list(SETTINGS), help="of the rows \"decode\"")
    parser.add_argument("--prompts", type=listed(str), default=list(PROMPTS), help="of the rows \"prefill\"")
    parser.add_argument("--contexts", type=listed(int), help="for all rows, instead of each one's own")
    parser.add_argument("--batches", type=listed(int), help="for all rows; else 1, and 8 of the rows \"chain\"")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of generate() that are measured")
    parser.add_argument("--warmup", type=int, default=12, help="tokens before them")
    add_run_arguments(parser, "benchmarks/results/lserve_h200.json")
    args = parser.parse_args(argv)
    for given, known in ((args.rows, CONTEXTS), (args.settings, SETTINGS), (args.prompts, PROMPTS)):
        check_names(parser, given, known)
    check_tokens(parser, args)
    args.pool = [POOL]                                      # for what is shared with benchmarks.offload
    return args


def main(argv=None) -> int:
    args = options(argv)
    result = results(args.out, args.append)
    if not args.skip_check:
        result["check"] = check()
        settle()
        write(args.out, result)
    run = args.run or run_id()
    bench = Bench(build("llama", args.layers) if set(args.rows) & set(WITH_MODEL) else None, args)
    for name in args.rows:
        for batch in args.batches or [BATCHES.get(name, 1)]:
            for row in bench.rows(name, batch, args.contexts or CONTEXTS[name]):
                row = {**row, "run_id": run}
                print(json.dumps(row), flush=True)
                result["rows"].append(row)
                write(args.out, result)
    wrong = failures(result["check"] or {})
    if wrong:
        print("CHECK FAILED: " + ", ".join(wrong), flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
