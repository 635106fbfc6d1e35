"""Decoding through generate() on one GPU: ours and the stock paths in one run, after a correctness check.

    python -m benchmarks.decode [--rows psa,psa-peaked,free,static,dynamic,sdpa] [--contexts 4096,32768,131072]
                                [--batches 1] [--shape llama|lwm] [--out benchmarks/results/decode_h200.json]

The model is a Llama-3.1-8B shape (or LWM-Text-7B: 32 KV heads) with random weights in bf16. Random weights give flat
attention, which a threshold answers by reading everything, so the budget of `psa` is capped at 4096 tokens; `psa-peaked`
scales the keys of the prompt by 12, so that the threshold stops by itself.
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor, StaticCache, StoppingCriteria

from hf_sparse import PSACache, PSAConfig, patch_model, unpatch_model
from hf_sparse.cache.static import StaticStep
from hf_sparse.compat import CACHE_ARGUMENT

from .common import add_run_arguments, graph_times, quantiles, results, run_id, write

PEAK = 12.0
BANDWIDTH = 4.26e12                                         # bytes a second: read plus write of a large copy


def build(shape: str, layers: int | None) -> LlamaForCausalLM:
    kv_heads, hidden, inner, vocab = (8, 4096, 14336, 128256) if shape == "llama" else (32, 4096, 11008, 32000)
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers or 32,
                         num_attention_heads=32, num_key_value_heads=kv_heads, vocab_size=vocab, head_dim=128,
                         max_position_embeddings=1 << 20, rope_theta=5e5, bos_token_id=1, eos_token_id=None,
                         pad_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()


class Clock(StoppingCriteria):
    """Host time of every token; generate() has synchronised by then."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Follow(LogitsProcessor):
    """Lets only the tokens of given sequences through."""

    def __init__(self, sequences):
        self.sequences = sequences

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf).scatter_(1, self.sequences[:, input_ids.shape[1], None], 0.0)


def generate(model, ids, cache, tokens: int, **kwargs):
    clock = Clock()
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                         stopping_criteria=[clock], **({CACHE_ARGUMENT: cache} if cache is not None else {}), **kwargs)
    steps = [b - a for a, b in zip(clock.times, clock.times[1:])]
    return out, [s * 1e3 for s in steps]


@contextlib.contextmanager
def free_attention():
    """The same step with an attention that costs nothing: what everything else takes."""
    run, def_run = StaticStep.run, lambda self, layer, query, *args: query.transpose(1, 2).clone()
    StaticStep.run = def_run
    try:
        yield
    finally:
        StaticStep.run = run


def attention_us(model, cache) -> dict:
    """The chain from append to merge over all layers, microseconds a layer, in a graph."""
    layers = cache.sparse_layers
    for layer in layers:
        layer.begin_step()
    step = cache.state.step()
    step.prepare(layers)
    B, heads, dim = layers[0].batch, layers[0].heads, layers[0].key_dim
    query = torch.randn(B, heads * layers[0].group, 1, dim, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(B, heads, 1, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    saved = [layer.lengths.clone() for layer in layers]

    def chain():
        for layer in layers:
            step.run(layer, query, key, value, None, dim ** -0.5, 0.0)

    times = [t / len(layers) * 1e3 for t in graph_times(chain, repeats=15)]
    for layer, lengths in zip(layers, saved):
        layer.lengths.copy_(lengths)
    return quantiles(times)


def step_ms(model, cache) -> dict:
    """The captured step alone, replayed: what the device takes, without generate() around it."""
    step = next(iter(model._hf_sparse.steps.values()))
    call = next(iter(step.captures.values()))
    saved = [layer.lengths.clone() for layer in cache.sparse_layers]
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        call.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        for layer, lengths in zip(cache.sparse_layers, saved):
            layer.lengths.copy_(lengths)
    return quantiles(times)


def sdpa_us(batch: int, context: int, kv_heads: int, layers: int = 8) -> dict:
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    kv = [torch.randn(2, batch, kv_heads, context, 128, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]

    def chain():
        for k, v in kv:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads < 32)

    return quantiles([t / layers * 1e3 for t in graph_times(chain, repeats=15)])


def check() -> dict:
    """A small model: captured equals eager token for token, and threshold 1 equals dense within bf16."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=1000, head_dim=64, max_position_embeddings=1 << 17,
                         eos_token_id=None, pad_token_id=None)
    torch.manual_seed(1)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM(config).to("cuda", dtype).eval()
        for p in model.parameters():
            p.data.mul_(2.0 if p.dim() > 1 else 1.0)
        ids = torch.randint(3, 1000, (2, 3001), device="cuda")
        mask = torch.ones_like(ids)
        mask[1, :700] = 0
        free = lambda **kw: model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False,  # noqa: E731
                                           output_logits=True, return_dict_in_generate=True, **kw)
        dense = free(**{CACHE_ARGUMENT: DynamicCache(config=config)})
        # In bf16 a compiled step rounds elsewhere than an eager one, and tokens part at the first near tie: so all runs
        # are led along the dense run's tokens, and their logits are compared.
        lead = [] if dtype == torch.float32 else [Follow(dense.sequences)]
        run = lambda **kw: free(logits_processor=lead, **kw)  # noqa: E731
        for name, settings in (("exact", dict(threshold=1.0)), ("sparse", dict(threshold=0.6))):
            outs = []
            for compiled in (True, False):
                patch_model(model, min_context=0, compile=compiled, **settings)
                outs.append(run())
                if compiled:
                    steps = list(model._hf_sparse.steps.values())
                    if not steps or steps[0] is None or not steps[0].captured:
                        raise SystemExit("the step was not captured")
                    fraction = model.last_psa_cache.stats()["kv_fraction"]
                    again = run()
                    if not torch.equal(outs[0].sequences, again.sequences):
                        raise SystemExit("a second cache changes the tokens")
            unpatch_model(model)
            apart = max(float((a - b).abs().max()) for a, b in zip(outs[0].logits, outs[1].logits))
            same = bool(torch.equal(outs[0].sequences, outs[1].sequences))
            key = f"{str(dtype)[6:]}-{name}"
            found[key] = {"captured_equals_eager": same, "logits_apart": apart, "kv_fraction": fraction}
            if name == "exact":
                error = max(float((a - b).abs().max()) for a, b in zip(outs[0].logits, dense.logits))
                found[key]["against_dense"] = error
                found[key]["tokens_as_dense"] = bool(torch.equal(outs[0].sequences, dense.sequences))
                if dtype == torch.float32:
                    patch_model(model.cpu(), min_context=0, threshold=1.0)
                    there = model.generate(ids.cpu(), attention_mask=mask.cpu(), max_new_tokens=40, do_sample=False)
                    unpatch_model(model)
                    found[key]["tokens_as_cpu"] = bool(torch.equal(there, outs[0].sequences.cpu()))
                    model.to("cuda")
            print(key, found[key], flush=True)
            # Where attention is sparse, a block at the edge of the plan may fall to either side as the query's last bits
            # differ: tokens must agree, logits need not.
            limit = 2e-4 if dtype == torch.float32 else 0.25 * float(torch.stack(dense.logits).float().std())
            if name == "exact" and max(apart, found[key]["against_dense"]) > limit:
                raise SystemExit(f"logits are further apart than {limit:.4f}")
            if not same:
                raise SystemExit("captured and eager steps differ")
        del model
    return found


def measure(model, name: str, batch: int, context: int, tokens: int, run: str, shape: str) -> dict:
    model.last_psa_cache = None                              # of the row before: not this one's memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kv_heads = model.config.num_key_value_heads
    row = {"name": name, "shape": shape, "batch": batch, "context": context, "run_id": run}
    layer_bytes = 2 * batch * kv_heads * context * 128 * 2
    if name == "sdpa":
        row["attention_us_per_layer"] = sdpa_us(batch, context, kv_heads)
        row["bytes_floor_us"] = round(layer_bytes / BANDWIDTH * 1e6, 2)
        return row
    if name == "prefill":
        return {**row, **prefill_s(model, batch, context)}
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 30000, (batch, context), generator=generator).cuda()
    if name in ("dynamic", "static"):
        unpatch_model(model)
        if name == "dynamic":
            _, times = generate(model, ids, DynamicCache(config=model.config), min(tokens, 24))
        else:
            cache = StaticCache(config=model.config, max_cache_len=context + tokens + 8)
            _, times = generate(model, ids, cache, tokens)
        row["kv_fraction"], row["bytes_floor_us"] = 1.0, round(layer_bytes / BANDWIDTH * 1e6, 2)
    else:
        config = PSAConfig(max_blocks=128) if name != "psa-peaked" else PSAConfig()
        if not hasattr(model, "_hf_sparse"):                 # once for all contexts: the captured step is kept
            patch_model(model, config)
        cache = PSACache(model.config, config)
        started = time.perf_counter()
        with torch.no_grad():
            model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        torch.cuda.synchronize()
        row["prefill_s"] = round(time.perf_counter() - started, 3)
        if name == "psa-peaked":
            pool = cache.sparse_layers[0].pool              # one for all layers; keys come first in a slot
            pool.kv[:, :32 * 128].mul_(PEAK)
        longer = torch.cat([ids, torch.full((batch, 1), 7, device="cuda")], 1)
        with free_attention() if name == "free" else contextlib.nullcontext():
            _, times = generate(model, longer, cache, tokens)
        step = next(iter(model._hf_sparse.steps.values()), None)
        row["captured"] = step is not None and step.captured
        if row["captured"]:
            row["step_ms"] = step_ms(model, cache)
        row["compile_s"] = None if step is None else round(step.first_call_seconds, 2)
        stats = cache.stats()
        row["kv_fraction"], row["coverage"] = stats["kv_fraction"], stats["coverage"]
        if name != "free":
            row["attention_us_per_layer"] = attention_us(model, cache)
            digest = stats["bytes"]["digest"] / len(cache.sparse_layers)
            row["bytes_floor_us"] = round((layer_bytes * (stats["kv_fraction"] or 0) + digest) / BANDWIDTH * 1e6, 2)
        del cache
    times = times[6:] if len(times) > 12 else times[2:]
    row["ms_per_token"] = quantiles(times)
    row["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return row


def prefill_s(model, batch: int, context: int) -> dict:
    """Seconds of a prompt's forward: patched, the same with a third of one row padded, and stock without padding."""
    ids = torch.randint(3, 30000, (batch, context), generator=torch.Generator().manual_seed(6)).cuda()
    padded = torch.ones_like(ids)
    padded[0, :context // 3] = 0
    found = {}

    def seconds(cache, mask):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache()})
        torch.cuda.synchronize()
        return time.perf_counter() - started

    for label, patch, mask in (("stock", False, None), ("unpadded", True, torch.ones_like(ids)), ("padded", True, padded)):
        unpatch_model(model)
        if patch:
            patch_model(model, PSAConfig(max_blocks=128))
        cache = (lambda: PSACache(model.config, max_blocks=128)) if patch else lambda: DynamicCache(config=model.config)
        seconds(cache, mask)
        found[f"prefill_{label}_s"] = round(min(seconds(cache, mask) for _ in range(2)), 3)
    unpatch_model(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="psa,free,dynamic,psa-peaked,prefill,sdpa,static")
    parser.add_argument("--contexts", default="4096,32768,131072")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--shape", default="llama", choices=["llama", "lwm"])
    parser.add_argument("--tokens", type=int, default=64)
    add_run_arguments(parser, "benchmarks/results/decode_h200.json")
    args = parser.parse_args()
    result = results(args.out, args.append)
    if not args.skip_check:
        result["check"] = check()
    run, model = args.run or run_id(), build(args.shape, args.layers)
    for name in args.rows.split(","):
        unpatch_model(model)
        torch._dynamo.reset()
        for context in map(int, args.contexts.split(",")):
            for batch in map(int, args.batches.split(",")):
                try:
                    row = measure(model, name, batch, context, args.tokens, run, args.shape)
                except torch.OutOfMemoryError as error:
                    row = {"name": name, "batch": batch, "context": context, "run_id": run, "error": str(error)[:200]}
                print(json.dumps(row), flush=True)
                result["rows"].append(row)
                write(args.out, result)


if __name__ == "__main__":
    main()
