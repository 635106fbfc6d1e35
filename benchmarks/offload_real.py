"""A real model with a small pool in front of host memory: are questions answered as with everything resident?

    python -m benchmarks.offload_real MODEL_DIR [--name NAME] [--task needles] [--length 8400] [--samples 1] [--pool 0.15]

Every context is prefilled twice, once with everything resident and once with a pool of slots for `--pool` of its KV. Forks
of both are asked the same questions by generate(), whose tokens all take the sparse step, and tokens and logits are compared.
`gpu_memory` is that share of the KV, and room for digests and tables of two caches: the context's and its fork's. Times are
not measured.
"""
from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse import PSACache, PSAConfig, patched
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.evaluation import Haystack, Question, Sample, build_samples, check_sparse, load_paragraphs, prefill

from .common import run_id, versions, write

OUT = pathlib.Path(__file__).resolve().parent / "results" / "offload_real.json"
CACHES = 2                                                  # that share the pool while a question is answered


def kv_bytes(cache: PSACache) -> int:
    """Bytes of the keys and values of all tokens, in whole blocks."""
    return sum(layer.batch * layer.heads * -(-cache.tokens // cache.config.block_size) * layer.pool.block_bytes
               for layer in cache.sparse_layers)


def budget(cache: PSACache, share: float) -> int:
    """`gpu_memory` with which slots for `share` of this cache's KV are left to it and a fork."""
    return int(share * kv_bytes(cache)) + CACHES * sum(layer.side_bytes() for layer in cache.sparse_layers)


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", help="directory of a model in Hugging Face format")
    parser.add_argument("--name", help="what the results call it (default: the directory's name)")
    parser.add_argument("--task", choices=("needles", "passkey"), default="needles")
    parser.add_argument("--length", type=int, default=8400, help="tokens of a context, at most")
    parser.add_argument("--samples", type=int, default=1, help="contexts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=float, default=0.15, help="slots' share of the KV")
    parser.add_argument("--prefill-chunk", type=int, default=2048, help="tokens a prefill forward")
    parser.add_argument("--out", default=str(OUT))
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    haystack = Haystack(load_paragraphs(), AutoTokenizer.from_pretrained(args.model))
    work = build_samples([args.task], haystack, args.length, args.samples, args.seed)
    config = PSAConfig()
    result = {"model": args.name or pathlib.Path(args.model).resolve().name, "dtype": "float32", "versions": versions(),
              "threshold": config.threshold, "rows": []}
    run = run_id()
    with patched(model, config):
        for sample in work:
            row = {**measure(model, sample, config, args.pool, args.prefill_chunk), "run_id": run}
            result["rows"].append(row)
            print({name: value for name, value in row.items() if name != "answers"}, flush=True)
            write(args.out, result)
    return 0 if all(row["same"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
