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
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache

from hf_sparse import PSACache, PSAConfig, patch_model, unpatch_model

from . import offload, prefill_kernel
from .common import add_run_arguments, check_names, check_tokens, results, run_id, write
from .decode import build, generate, sdpa_us
from .lserve_chain import CHAIN, ROOM, Chain, attention_alone, selecting
from .lserve_check import check, failures
from .lserve_prompts import prompt_attention, prompt_seconds
from .lserve_settings import (
    BATCHES,
    BUDGET,
    CONTEXTS,
    LSERVE,
    PAGES,
    POOL,
    PROMPTS,
    PSA,
    REUSE,
    SETTINGS,
    WITH_MODEL,
    described,
    with_streaming,
)
from .memory import all_blocks, block_bytes, held, pool_budget
from .offload import failure, pools_of, settle, speed, synchronize
from .synthetic import Queries, Shape, fill, pieces, shape_of

STOCK_TOKENS = 8


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
        return prompt_seconds(self.model, self.parts.ids(shape, context)[:, :context], config)

    def attention(self, batch: int, contexts) -> Iterator[dict]:
        one = dataclasses.replace(CHAIN, layers=1, batch=1)
        heads = prefill_kernel.STREAMING["apart"]
        streaming = PSAConfig(streaming_heads=tuple((0, head) for head in heads), streaming_sink=prefill_kernel.SINK,
                              streaming_prefill_window=prefill_kernel.WINDOW)
        for context in contexts:
            for name, config in (("dense", None), ("streaming", streaming)):
                yield self.measured(f"attention-{name}", "prefill", one, context, config, prompt_attention)

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
                config = config.replace(gpu_memory=pool_budget(config, shape, POOL, context, tokens),
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
                yield self.attended("reuse", batch, context, config, selecting)

    def pages(self, batch: int, contexts) -> Iterator[dict]:
        for context in contexts:
            for logical, physical in PAGES:
                config = LSERVE.replace(logical_size=logical, block_size=physical, top_k=BUDGET // physical, reuse=1)
                yield self.attended("pages", batch, context, config, selecting)

    def attended(self, name: str, batch: int, context: int, config: PSAConfig, measure: Callable | None = None) -> dict:
        def measured(shape: Shape, context: int, config: PSAConfig) -> dict:
            return (measure or attention_alone)(self.parts.queries(shape, context)[0], context, config)

        return self.measured(name, "decode", dataclasses.replace(CHAIN, batch=batch), context, config, measured)


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
