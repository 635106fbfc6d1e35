"""Decoding with the KV in host memory: a pool of blocks on the GPU against everything resident and transformers' own.

    python -m benchmarks.offload [--rows copy,psa-resident,psa-offload,copy-engine,hits,offloaded]
                                 [--contexts 131072] [--batches 1] [--pool 0.1,0.2 | --gpu-memory 8GiB]
                                 [--eviction decayed,lru,fifo] [--pools unified,per_layer] [--prefetch]

A Llama-3.1-8B shape with random weights in bf16 and a budget of 4096 tokens, through generate(). Keys, values and
queries are synthetic (benchmarks/synthetic.py): there is no prompt to wait for, and a token shares as many blocks with the
one before as on real models. Rows:

    copy            bandwidths from pinned host memory: the copy engine, and the fetch kernel alone
    psa-resident    the patched model, all blocks in GPU memory
    psa-offload     the same with a pool of each size and each eviction policy, and the rest in host memory; with --prefetch
                    each of them without and with prefetch=True
    copy-engine     the same, fetched as the paper does, by a thread and the copy engine (fetcher="copy_engine")
    hits            one pool for all layers against one for each: simulated, fed with what a decode reads, and measured
    offloaded       transformers' DynamicCache(offloading=True), a few tokens

A small model is decoded first, with pools of every kind against everything resident (benchmarks/offload_check.py). Times
are of generate() by the host's clock, after `--warmup` tokens that compile, capture and fill the pool.
"""
from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
import traceback
from collections.abc import Iterator

import torch
from transformers import DynamicCache

from hf_sparse import PSACache, PSAConfig, patch_model, unpatch_model
from hf_sparse.config import POOLS
from hf_sparse.kernels.residency import PREFETCHED
from hf_sparse.sizes import parse_bytes

from . import residency_simulation as simulation
from .bandwidth import bandwidths
from .common import add_run_arguments, check_names, check_tokens, quantiles, results, run_id, write
from .decode import attention_us, build, generate
from .memory import GB, side_bytes
from .offload_check import check, failures
from .synthetic import PREDICTED, Queries, Shape, calibrate, fill, pieces, shape_of, synthetic_queries

ROWS = ("copy", "psa-resident", "psa-offload", "copy-engine", "hits", "offloaded")
BLOCKS = 128                                                # budget of a row and KV head: 4096 tokens
STOCK_TOKENS = 7


class Bench:
    """What all rows of a run share: the model, the options, and one calibration for each context."""

    def __init__(self, model, args):
        self.model, self.args = model, args
        self.persistence: dict[int, tuple[float, float]] = {}
        self.nearness: dict[int, tuple[float, float]] = {}  # of predicted queries
        self.base = 0                                       # bytes in use before the cache: weights and queries

    def rows(self, name: str, batch: int, context: int) -> Iterator[dict]:
        """The rows of one name, each as soon as it is measured; what fails is a row with its error."""
        place = {"name": name, "batch": batch, "context": context}
        try:
            yield from getattr(self, name.replace("-", "_"))(place, shape_of(self.model, batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next row may work
            yield {**place, **failure(error)}

    # -- rows ---------------------------------------------------------------------------------------------------
    def psa_resident(self, place: dict, shape: Shape) -> Iterator[dict]:
        queries, overlap = self.queries(shape, place["context"])
        config = PSAConfig(max_blocks=BLOCKS)
        cache, row = self.filled(config, queries, place["context"])
        more, _ = self.decode(cache, queries, self.ids(shape, place["context"]))
        row = {**place, "fetcher": "none", "eviction": None, "overlap": overlap, **row, **more}
        try:
            with synthetic_queries(queries):
                row["attention_us_per_layer"] = attention_us(self.model, cache)
        except Exception:  # noqa: BLE001 - the row is good without it
            traceback.print_exc()
        yield row

    def psa_offload(self, place: dict, shape: Shape, fetcher: str = "kernel", pool: str = "unified") -> Iterator[dict]:
        context = place["context"]
        both = self.args.prefetch and place["name"] == "psa-offload"
        queries, overlap = self.queries(shape, context, predict=both)
        for eviction, prefetch in itertools.product(self.args.eviction, (False, True) if both else (False,)):
            cache = ids = None
            for budget in self.budgets(shape, context):
                row = {**place, "eviction": eviction, "overlap": overlap}
                if both:
                    row |= {"prefetch": prefetch, "predicted": round(self.nearness[context][1], 4) if prefetch else None}
                try:
                    if cache is None:
                        config = self.tiered(shape, context, budget, eviction, fetcher, pool, prefetch)
                        cache, filled = self.filled(config, queries, context)
                        ids = self.ids(shape, context)
                    else:                                   # the next size of the same pool: no second fill, one capture
                        for one in pools_of(cache):
                            one.budget = budget // one.pools
                            cache.state.fit(one)
                        settle()
                    used = fetcher if cache.sparse_layers[0].on_device(context) else "reference"
                    more, ids = self.decode(cache, queries, ids)
                    row |= {"fetcher": used, **filled, **more}
                except Exception as error:  # noqa: BLE001
                    row |= {"gpu_memory_gb": round(budget / GB, 3), **failure(error)}
                    cache = ids = None
                yield row

    def copy_engine(self, place: dict, shape: Shape) -> Iterator[dict]:
        yield from self.psa_offload(place, shape, "copy_engine")

    def hits(self, place: dict, shape: Shape) -> Iterator[dict]:
        context, args = place["context"], self.args
        queries, _ = self.queries(shape, context)
        config = PSAConfig(max_blocks=BLOCKS, compile=False)
        cache, _ = self.filled(config, queries, context)
        flat: list[list[int]] = []
        with synthetic_queries(queries, lambda step, layer: flat.append(planned_ids(step, layer))):
            generate(self.model, self.ids(shape, context), cache, args.warmup + args.tokens)
        trace = [flat[low:low + shape.layers] for low in range(0, len(flat), shape.layers)]
        pinned = sum(layer.pinned_blocks(shape.batch) for layer in cache.sparse_layers)
        overlap = simulation.overlap(trace, args.warmup)
        for fraction in args.pool:
            slots = int(fraction * shape.kv_bytes(context)) // cache.sparse_layers[0].pool.block_bytes - pinned
            for eviction in simulation.EVICTIONS:
                for pool in args.pools:
                    rate = simulation.hit_rate(trace, slots, eviction, pool == "per_layer", args.warmup)
                    yield {**place, "how": "simulated", "pool": pool, "eviction": eviction, "pool_fraction": fraction,
                           "slots": slots, "hit_rate": round(rate, 4), "overlap": round(overlap, 4),
                           "tokens": len(trace) - args.warmup}
        del cache                                           # its memory is the next one's
        for pool in args.pools:
            for row, fraction in zip(self.psa_offload(place, shape, pool=pool), itertools.cycle(args.pool)):
                asked = {} if args.gpu_memory else {"pool_fraction": fraction}
                yield {**row, "how": "measured", "pool": pool, **asked}

    def offloaded(self, place: dict, shape: Shape) -> Iterator[dict]:
        context = place["context"]
        unpatch_model(self.model)
        settle()
        started = time.perf_counter()
        cache = DynamicCache(config=self.model.config, offloading=True)
        for order in range(shape.layers):
            keys, values = (torch.cat(parts, 2) for parts in zip(*pieces(shape, order, context)))
            cache.update(keys, values, order)
            del keys, values
        torch.cuda.synchronize()
        row = {**place, "fetcher": "stock", "eviction": None, "fill_s": round(time.perf_counter() - started, 2)}
        torch.cuda.reset_peak_memory_stats()
        _, times = generate(self.model, self.ids(shape, context), cache, min(self.args.tokens, STOCK_TOKENS))
        row |= {**speed(times[2:], shape.batch), "kv_fraction": 1.0, "captured": False,
                "host_gb": round(shape.kv_bytes(context) / GB, 2),
                "peak_memory_gb": round(torch.cuda.max_memory_allocated() / GB, 2)}
        del cache
        settle()
        yield row

    # -- parts --------------------------------------------------------------------------------------------------
    def queries(self, shape: Shape, context: int, predict: bool = False) -> tuple[Queries, float]:
        """Queries for all tokens of a row, and the share of blocks that consecutive ones have in common.

        predict: with predictions of them.
        """
        if context not in self.persistence:
            self.persistence[context] = calibrate(shape, context, BLOCKS)
        persistence, overlap = self.persistence[context]
        if predict and context not in self.nearness:
            self.nearness[context] = calibrate(shape, context, BLOCKS, target=PREDICTED)
        nearness = self.nearness[context][0] if predict else None
        return Queries(shape, self.args.warmup + self.args.tokens + 8, persistence, nearness), round(overlap, 4)

    def room(self) -> int:
        """Tokens that a cache is decoded by, all sizes of its pool together, and some."""
        return len(self.args.pool) * (self.args.warmup + self.args.tokens) + 64

    def budgets(self, shape: Shape, context: int) -> list[int]:
        """Bytes of `gpu_memory`: as given, or shares of the KV and, beside them, digests and tables."""
        if self.args.gpu_memory:
            return [parse_bytes(self.args.gpu_memory)]
        side = side_bytes(PSAConfig(), shape, context + self.room())
        return [int(fraction * shape.kv_bytes(context)) + side for fraction in self.args.pool]

    def tiered(self, shape: Shape, context: int, budget: int, eviction: str, fetcher: str = "kernel",
               pool: str = "unified", prefetch: bool = False) -> PSAConfig:
        host = int(1.05 * shape.kv_bytes(context + self.room())) + 2**28
        return PSAConfig(max_blocks=BLOCKS, gpu_memory=budget, host_memory=host, eviction=eviction, fetcher=fetcher,
                         pool=pool, compile=fetcher == "kernel", prefetch=prefetch)

    def ids(self, shape: Shape, context: int) -> torch.Tensor:
        """A prompt of `context` tokens, which the cache has, and the one to go on with."""
        ids = torch.randint(3, 30000, (shape.batch, context + 1), generator=torch.Generator().manual_seed(5))
        return (ids % self.model.config.vocab_size).to(shape.device)

    def filled(self, config: PSAConfig, queries: Queries, context: int) -> tuple[PSACache, dict]:
        """A cache that holds the context, for a model freshly patched."""
        unpatch_model(self.model)
        torch._dynamo.reset()
        settle()
        self.base = torch.cuda.memory_allocated() if queries.shape.device.type == "cuda" else 0
        patch_model(self.model, config)
        cache = PSACache(self.model.config, config)
        started = time.perf_counter()
        fill(cache, queries, context, self.room())
        synchronize(queries.shape.device)
        return cache, {"fill_s": round(time.perf_counter() - started, 2)}

    def decode(self, cache: PSACache, queries: Queries, ids: torch.Tensor) -> tuple[dict, torch.Tensor]:
        """Decode the warm-up and the tokens that count: what was measured, and all ids."""
        args, shape, layer = self.args, queries.shape, cache.sparse_layers[0]
        context, on_gpu = ids.shape[1] - 1, shape.device.type == "cuda"
        queries.start()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with synthetic_queries(queries):
            ids, _ = generate(self.model, ids, cache, args.warmup)
            before, ahead = cache.stats(), prefetched(self.model)
            first = torch.cuda.max_memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            ids, times = generate(self.model, ids, cache, args.tokens)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        after = cache.stats()
        if queries.taken() < args.warmup + args.tokens:
            raise RuntimeError(f"{queries.taken()} steps of {args.warmup + args.tokens} took the synthetic queries: the others "
                               "were not the kernels'")
        step = next(iter(self.model._hf_sparse.steps.values()), None)
        row = {**speed(times[1:], shape.batch), "kv_fraction": after["kv_fraction"],
               "captured": step is not None and step.captured, "peak_memory_gb": round(peak / GB, 2),
               "base_memory_gb": round(self.base / GB, 2), "pool_fraction": 1.0, "hit_rate": None, "host_gb": 0.0}
        if layer.pool.tiered:
            hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
            ahead = prefetched(self.model) - ahead
            seconds = args.tokens * sum(times[1:]) / len(times[1:]) / 1e3
            pools = pools_of(cache)
            slots, budget = (sum(getattr(pool, name) for pool in pools) for name in ("slots", "budget"))
            row |= {"pool_fraction": round(slots * layer.pool.block_bytes / shape.kv_bytes(context), 4),
                    "gpu_memory_gb": round(budget / GB, 3),
                    "hit_rate": round(hits / (hits + misses), 4) if hits + misses else None,
                    "misses_per_token": round(misses / args.tokens, 1),
                    **({"prefetched_per_token": round(ahead / args.tokens, 1)} if cache.config.prefetch else {}),
                    "fetch_gb_s": round((misses + ahead) * layer.pool.block_bytes / seconds / GB, 2),
                    "peak_over_budget_gb": round((peak - self.base - budget) / GB, 3),
                    "first_peak_over_budget_gb": round((first - self.base - budget) / GB, 3),
                    "host_gb": round(after["bytes"]["host"] / GB, 2)}
        return row, ids


def pools_of(cache: PSACache) -> list:
    """The pools of a cache: one, or one for each layer."""
    return list({id(layer.pool): layer.pool for layer in cache.sparse_layers}.values())


def prefetched(model) -> int:
    """Blocks that captured steps of a patched model have fetched ahead so far. Synchronises."""
    steps = [step for step in model._hf_sparse.steps.values() if step is not None]
    return sum(int(work.state[PREFETCHED.value]) for step in steps for work in step.static.tier_work.values())


def planned_ids(step, layer) -> list[int]:
    """Ids of the blocks that the kernels planned to read in the layer's last step."""
    work = next(iter(step.work.values()))
    count = work.info[..., :1].long()
    width = int(count.max())
    planned = torch.arange(width, device=count.device) < count
    ranked = torch.where(planned, work.ranked[..., :width], 0)
    return layer.table.gather(2, ranked)[planned].tolist()


def speed(times: list[float], batch: int) -> dict:
    found = quantiles(times)
    return {"ms_per_token": found, "tokens_per_second": round(batch * 1e3 / found["median"], 2)}


def failure(error: Exception) -> dict:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"[:300]}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle() -> None:
    """Give back what nobody holds, pinned memory too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for name in ("_host_emptyCache", "_accelerator_emptyHostCache"):        # by version of PyTorch
            if hasattr(torch._C, name):
                getattr(torch._C, name)()
                break


def options(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--rows", type=listed(str), default=list(ROWS))
    parser.add_argument("--contexts", type=listed(int), default=[131072])
    parser.add_argument("--batches", type=listed(int), default=[1])
    parser.add_argument("--pool", type=listed(float), default=[0.1], help="sizes of the pool as shares of the KV")
    parser.add_argument("--gpu-memory", help="size of the pool instead, such as 8GiB, digests and tables included")
    parser.add_argument("--eviction", type=listed(str), default=["decayed"])
    parser.add_argument("--pools", type=listed(str), default=list(POOLS), help="of the rows \"hits\"")
    parser.add_argument("--prefetch", action="store_true", help="the rows \"psa-offload\" without and with prefetch=True")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are measured")
    parser.add_argument("--warmup", type=int, default=32, help="tokens before them")
    add_run_arguments(parser, "benchmarks/results/offload_h200.json")
    args = parser.parse_args(argv)
    for given, known in ((args.rows, ROWS), (args.eviction, simulation.EVICTIONS), (args.pools, POOLS)):
        check_names(parser, given, known)
    check_tokens(parser, args)
    if args.gpu_memory:
        parse_bytes(args.gpu_memory, "--gpu-memory")
    return args


def main() -> int:
    args = options()
    result = results(args.out, args.append)
    if not args.skip_check:
        result["check"] = check()
        settle()
        write(args.out, result)
    run = args.run or run_id()

    def record(row: dict) -> None:
        row = {**row, "run_id": run}
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        write(args.out, result)

    if "copy" in args.rows:
        try:
            record({"name": "copy", **bandwidths()})
        except Exception as error:  # noqa: BLE001
            record({"name": "copy", **failure(error)})
        settle()
    names = [name for name in args.rows if name != "copy"]
    if names:
        bench = Bench(build("llama", args.layers), args)
        for name in names:
            for context in args.contexts:
                for batch in args.batches:
                    for row in bench.rows(name, batch, context):
                        record(row)
    wrong = failures(result["check"] or {})
    if wrong:
        print("CHECK FAILED: " + ", ".join(wrong), flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
