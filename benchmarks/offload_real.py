"""A real model with a small pool in front of host memory: are answers those of everything resident, and how often does it hit?

    python -m benchmarks.offload_real MODEL_DIR [--rows answers,hits] [--name NAME] [--length 8400] [--append]
                                      [--task needles] [--samples 1] [--pool 0.15]

Rows:

    answers    every context is prefilled twice, once with everything resident and once with a pool of slots for `--pool` of its
               KV. Forks of both are asked the same questions by generate(), whose tokens all take the sparse step, and tokens
               and logits are compared. `gpu_memory` is that share of the KV, and room for digests and tables of two caches: the
               context's and its fork's.
    hits       a plain text is gone on with, first by its own tokens and then greedily, with everything resident. The blocks
               that each token reads are played through pools of several sizes, organisations and eviction policies
               (benchmarks/residency_simulation.py), and two of the pools are checked against the library's own.

Times are not measured.
"""
from __future__ import annotations

import argparse
import contextlib
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse import PSACache, PSAConfig, patched
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.config import POOLS
from hf_sparse.evaluation import Haystack, Question, Sample, build_samples, check_sparse, load_paragraphs, prefill
from hf_sparse.kernels import ops

from . import residency_simulation as simulation
from .common import results, run_id, versions, write

OUT = pathlib.Path(__file__).resolve().parent / "results" / "offload_real.json"
ROWS = ("answers", "hits")
CACHES = 2                                                  # that share the pool while a question is answered
SHARES = (0.1, 0.2, 0.3, 0.4)                               # of the KV, that the pools of the rows "hits" hold
CHECKED = 0.2                                               # the one that the library decodes with: less holds no layer's step
WARMUP, TOKENS = 32, 64                                     # tokens that fill a pool, and that are counted, of each text


def kv_bytes(cache: PSACache) -> int:
    """Bytes of the keys and values of all tokens, in whole blocks."""
    return sum(layer.batch * layer.heads * -(-cache.tokens // cache.config.block_size) * layer.pool.block_bytes
               for layer in cache.sparse_layers)


def budget(cache: PSACache, share: float, caches: int = CACHES) -> int:
    """`gpu_memory` with which slots for `share` of this cache's KV are left to it and its forks."""
    return int(share * kv_bytes(cache)) + caches * sum(layer.side_bytes() for layer in cache.sparse_layers)


@torch.no_grad()
def ask(model, cache: PSACache, context: Sequence[int], question: Question) -> dict:
    """A fork's greedy answer, of as many tokens as the right one has.

    Returns:
        tokens (list of ids), logits [tokens, vocabulary], and what the sparse steps of question and answer read:
        steps, kv_fraction, coverage, hits, misses; slots: those that the pool had.

    Raises:
        DenseDecodeError: some of it was not sparse.
    """
    before = cache.stats()
    fork = cache.fork(sparse_queries=True)
    ids = torch.tensor([[*context, *question.prompt]], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(question.answer), do_sample=False,
                         repetition_penalty=1.0, output_logits=True, return_dict_in_generate=True, **{CACHE_ARGUMENT: fork})
    model.last_psa_cache = None                             # a fork that is kept has its digests in the next one's pool
    tokens = out.sequences[0, ids.shape[1]:].tolist()
    stats = fork.stats()
    steps = len(question.prompt) + len(tokens) - 1          # the last token is not fed
    check_sparse(stats, fork.config, steps)
    return {"tokens": tokens, "logits": torch.cat(out.logits), "steps": steps, "kv_fraction": stats["kv_fraction"],
            "coverage": stats["coverage"], "slots": fork.sparse_layers[0].pool.slots,
            **{name: stats[name] - before[name] for name in ("hits", "misses")}}


def compare(question: Question, resident: dict, offloaded: dict) -> dict:
    """Both answers to one question; `logits_apart` is at most, up to the first token that differs."""
    same = next((place for place, (a, b) in enumerate(zip(resident["tokens"], offloaded["tokens"])) if a != b),
                min(len(resident["tokens"]), len(offloaded["tokens"])) - 1) + 1
    apart = (resident["logits"][:same] - offloaded["logits"][:same]).abs().max()
    return {"question": question.name, "depth": question.depth, "gold": list(question.answer),
            "resident": resident["tokens"], "offloaded": offloaded["tokens"], "logits_apart": float(apart),
            **{name: offloaded[name] for name in ("slots", "steps", "kv_fraction", "coverage", "hits", "misses")}}


def measure(model, sample: Sample, config: PSAConfig, share: float, chunk: int | None) -> dict:
    """One row: a context, and all questions on it, with everything resident and with a pool."""
    found = []
    memory = {"gpu_memory": "auto", "host_memory": 0}
    for where in ("resident", "offloaded"):
        cache = prefill(model, sample.context, config.replace(**memory), chunk)
        found.append([])
        for question in sample.questions:
            found[-1].append(ask(model, cache, sample.context, question))
            print(sample.task, sample.seed, where, question.name, found[-1][-1]["tokens"], flush=True)
        size = kv_bytes(cache)
        if where == "resident":
            memory = {"gpu_memory": budget(cache, share), "host_memory": 2 * size}
        block_bytes = cache.sparse_layers[0].pool.block_bytes
        cache.reset()
    slots = max(answer["slots"] for answer in found[1])     # the same for all
    answers = [compare(*each) for each in zip(sample.questions, *found)]
    hits, misses, steps = (sum(answer[name] for answer in answers) for name in ("hits", "misses", "steps"))
    return {
        "name": sample.task, "seed": sample.seed, "context": len(sample.context), "eviction": config.eviction,
        "kv_bytes": size, "block_bytes": block_bytes, "slots": slots, "pool_fraction": slots * block_bytes / size, **memory,
        "questions": len(answers),
        **{f"right_{where}": sum(answer[where] == answer["gold"] for answer in answers) for where in ("resident", "offloaded")},
        "tokens": sum(len(answer["resident"]) for answer in answers),
        "same": all(answer["resident"] == answer["offloaded"] for answer in answers),
        "logits_apart": max(answer["logits_apart"] for answer in answers),
        "kv_fraction": sum(answer["kv_fraction"] for answer in answers) / len(answers),
        "hit_rate": hits / (hits + misses) if hits + misses else None, "misses_per_step": misses / steps,
        "answers": answers,
    }


# -- hit rates -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reads_of(flat: list):
    """Append to `flat`, for every sparse step of a layer by the reference, the ids of the ranked blocks that it reads.

    They are lists of ids, one a round.
    """
    attend = ops.attend

    def attend_and_note(tiers, query, table, order, *rest):
        found = attend(tiers, query, table, order, *rest)
        rank, ids, read = torch.arange(order.shape[-1], device=order.device), table.gather(2, order), found[2][..., None]
        bounds = [0, *rest[7]]
        flat.append([ids[(low <= rank) & (rank < high) & (rank < read)].tolist() for low, high in itertools.pairwise(bounds)
                     if low < int(read.max())])
        return found

    ops.attend = attend_and_note
    try:
        yield
    finally:
        ops.attend = attend


def hit_rate_of_rounds(trace: Sequence[Sequence[Sequence[list[int]]]], slots: int, eviction: str, per_layer: bool,
                       warmup: int) -> float:
    """`simulation.hit_rate` where only the blocks of a round are needed together: trace[token][layer][round]."""
    layers = len(trace[0])
    pools = [simulation.SimulatedPool(slots // layers if per_layer else slots, eviction) for _ in range(layers)]
    hits = reads = 0
    for token, steps in enumerate(trace):
        for layer, rounds in enumerate(steps):
            for ids in rounds:
                found = pools[layer if per_layer else 0].read(ids, token + layer / layers)
                if token >= warmup:
                    hits, reads = hits + found, reads + len(ids)
    return hits / reads


@torch.no_grad()
def decode(model, cache: PSACache, ids: Sequence[int], more: int = 0) -> list[int]:
    """Feed `ids`, a forward each, and then `more` tokens, each the likeliest after the one before.

    Returns:
        All tokens that were fed.
    """
    fed, likeliest = [], None
    for place in range(len(ids) + more):
        fed.append(ids[place] if place < len(ids) else likeliest)
        one = torch.tensor([fed[-1:]], device=model.device)
        likeliest = int(model(input_ids=one, **{CACHE_ARGUMENT: cache}, use_cache=True).logits.argmax())
    return fed


def hits(model, text: Sequence[int], config: PSAConfig, shares: Sequence[float], checked: float, warmup: int, tokens: int,
         chunk: int | None) -> Iterator[dict]:
    """Rows of hit rates, of the `tokens` tokens that end `text` ("text") and as many that the model adds ("greedy").

    Args:
        text: a context, the `warmup` tokens that fill the pools, and `tokens` tokens.
        shares: sizes of the simulated pools, of the context's KV; pinned blocks have their place in it.
        checked: the size at which the library decodes the same text, with one pool and with one a layer.

    Raises:
        DenseDecodeError: some of it was not sparse.
    """
    context, follow = text[:len(text) - warmup - tokens], list(text[len(text) - warmup - tokens:])
    config = config.replace(record_steps=1)                 # which the kernels lack: it is the reference that is watched
    cache = prefill(model, context, config.replace(gpu_memory="auto", host_memory=0), chunk)
    blocks = kv_bytes(cache) // cache.sparse_layers[0].pool.block_bytes
    memory = {"gpu_memory": budget(cache, checked, 1), "host_memory": 2 * kv_bytes(cache)}
    flat: list[list[list[int]]] = []
    with reads_of(flat):
        fed = decode(model, cache, follow, tokens)
    stats, layers = cache.stats(), len(cache.sparse_layers)
    check_sparse(stats, cache.config, len(fed))
    by_round = [flat[low:low + layers] for low in range(0, len(flat), layers)]
    trace = [[list(itertools.chain(*rounds)) for rounds in step] for step in by_round]
    pinned = round((stats["blocks_read"] - sum(len(ids) for step in trace for ids in step)) / len(fed))    # always read, mean
    cache.reset()
    parts = {"text": (warmup, warmup + tokens), "greedy": (warmup + tokens, warmup + 2 * tokens)}

    def row(part: str, **values) -> dict:
        first, last = parts[part]
        reads = sum(len(ids) for step in trace[first:last] for ids in step)
        return {"name": "hits", "decoded": part, "context": len(context), **values,
                "working_set": round(reads / tokens / blocks, 4), "overlap": round(simulation.overlap(trace[:last], first), 4),
                "warmup": first, "tokens": tokens}

    for part, eviction, pool, share in itertools.product(parts, simulation.EVICTIONS, POOLS, shares):
        slots, (first, last) = int(share * blocks), parts[part]
        rate = simulation.hit_rate(trace[:last], slots - pinned, eviction, pool == "per_layer", first)
        yield row(part, how="simulated from a real trace", pool=pool, eviction=eviction, pool_fraction=share, slots=slots,
                  hit_rate=round(rate, 4))
    for pool in POOLS:
        cache = prefill(model, context, config.replace(**memory, pool=pool), chunk)
        decode(model, cache, follow[:warmup])
        before = cache.stats()
        decode(model, cache, follow[warmup:])
        after = cache.stats()
        found, missed = (after[name] - before[name] for name in ("hits", "misses"))
        slots = sum({id(layer.pool): layer.pool.slots for layer in cache.sparse_layers}.values())
        cache.reset()
        likewise = slots - pinned, config.eviction, pool == "per_layer", warmup
        yield row("text", how="measured", pool=pool, eviction=config.eviction, pool_fraction=round(slots / blocks, 4),
                  slots=slots, hits=found, misses=missed, hit_rate=round(found / (found + missed), 4),
                  simulated=round(simulation.hit_rate(trace[:len(follow)], *likewise), 4),
                  simulated_in_rounds=round(hit_rate_of_rounds(by_round[:len(follow)], *likewise), 4))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", help="directory of a model in Hugging Face format")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS))
    parser.add_argument("--name", help="what the results call it (default: the directory's name)")
    parser.add_argument("--task", choices=("needles", "passkey"), default="needles", help="of the rows \"answers\"")
    parser.add_argument("--length", type=int, default=8400, help="tokens of a context, at most")
    parser.add_argument("--samples", type=int, default=1, help="contexts of the rows \"answers\"")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=float, default=0.15, help="slots' share of the KV in the rows \"answers\"")
    parser.add_argument("--prefill-chunk", type=int, default=2048, help="tokens a prefill forward")
    parser.add_argument("--append", action="store_true", help="keep the rows that the output file has")
    parser.add_argument("--out", default=str(OUT))
    args = parser.parse_args(argv)
    for name in args.rows:
        if name not in ROWS:
            parser.error(f"{name!r} is not known; choose from {', '.join(ROWS)}")

    config = PSAConfig()
    head = {"model": args.name or pathlib.Path(args.model).resolve().name, "dtype": "float32", "versions": versions(),
            "threshold": config.threshold}
    before = results(args.out, args.append)
    if before["rows"] and any(before[name] != value for name, value in head.items()):
        parser.error(f"--append: the rows in {args.out} are of another model, or made with other versions")
    result = {**head, "rows": before["rows"]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    haystack = Haystack(load_paragraphs(), AutoTokenizer.from_pretrained(args.model))
    run = run_id()

    def record(row: dict) -> None:
        result["rows"].append({**row, "run_id": run})
        print({name: value for name, value in row.items() if name != "answers"}, flush=True)
        write(args.out, result)

    same = True
    with patched(model, config):
        if "answers" in args.rows:
            for sample in build_samples([args.task], haystack, args.length, args.samples, args.seed):
                row = measure(model, sample, config, args.pool, args.prefill_chunk)
                same = same and row["same"]
                record(row)
        if "hits" in args.rows:
            text = haystack.plain(args.length, args.seed, extra=WARMUP + TOKENS)
            for row in hits(model, text, config, SHARES, CHECKED, WARMUP, TOKENS, args.prefill_chunk):
                record(row)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
