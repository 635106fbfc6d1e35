"""Prompts in sliding-window layers on one GPU: the kernel against PyTorch's attention in pieces, and against stock.

    python -m benchmarks.window_prompts [--contexts 4096,32768] [--out window_prompts.json]

A layer of each of some models' shapes takes a prompt and stores it. Rows, by `name`: "kernel", what layers without padding take;
"pieces", what others take; "stock", scaled_dot_product_attention alone with a mask, for models without soft cap and sink logits.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_sparse import PSAConfig
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.state import CacheState
from hf_sparse.cache.window import WindowLayer

from .common import quantiles, run_id, versions, write
from .prefill_kernel import times_of

DEVICE = "cuda"
SHAPES = {  # query heads, KV heads, head dim, window, soft cap, sink logits
    "gemma3": (8, 4, 256, 1024, 0.0, False),
    "mistral": (32, 8, 128, 4096, 0.0, False),
    "gpt_oss": (64, 8, 64, 128, 0.0, True),
    "gemma2": (8, 4, 256, 4096, 50.0, False),
}
LIMIT = 1e-2                                                # relative difference in bf16
REPEATS = 5


def rows(model: str, tokens: int, run: str) -> list[dict]:
    query_heads, heads, dim, window, softcap, sinks = SHAPES[model]
    generator = torch.Generator(DEVICE).manual_seed(0)
    new = lambda *size: torch.randn(*size, generator=generator, device=DEVICE).bfloat16()  # noqa: E731
    query, keys, values = new(1, query_heads, tokens, dim), new(1, heads, tokens, dim), new(1, heads, tokens, dim)
    logits = new(query_heads) if sinks else None

    def layer(padded: bool) -> torch.Tensor:
        one = WindowLayer(CacheState(PSAConfig(), layers=1), 0, window)
        one.lazy_initialization(keys, values)
        one.padded = padded
        return one.attend(query, Pending(keys, values, 0), None, None, dim ** -0.5, softcap, logits, None)

    paths: dict[str, Callable[[], torch.Tensor]] = {"kernel": lambda: layer(False), "pieces": lambda: layer(True)}
    if not softcap and not sinks:
        place = torch.arange(tokens, device=DEVICE)
        mask = (place <= place[:, None]) & (place > place[:, None] - window)
        repeated = [part.repeat_interleave(query_heads // heads, 1) for part in (keys, values)]
        paths["stock"] = lambda: scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    true, found = paths["pieces"]().float(), []
    for name, path in paths.items():
        error = float((path().float() - true).norm() / true.norm())
        if not error < LIMIT:
            raise SystemExit(f"{name} of {model} is {error} from the pieces")
        found.append({"name": name, "model": model, "context": tokens, "window": window, "error": round(error, 5),
                      "ms": quantiles(times_of(path, REPEATS)), "run_id": run})
        print(found[-1], flush=True)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[4096, 32768])
    parser.add_argument("--out", default="benchmarks/results/window_prompts_h200.json")
    args = parser.parse_args()
    run, found = run_id(), []
    for model in SHAPES:
        for tokens in args.contexts:
            found += rows(model, tokens, run)
            torch.cuda.empty_cache()
            write(args.out, {"versions": versions(), "rows": found})


if __name__ == "__main__":
    main()
