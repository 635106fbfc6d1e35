"""Attention of a prompt with streaming heads on one GPU: checked first, then its time beside dense attention.

    python -m benchmarks.prefill_kernel [--contexts 32768,131072] [--out prefill_kernel.json]

One layer of a Llama-3.1-8B shape in bf16 (32 query and 8 KV heads, head dim 128), batch 1. Rows, by `name`:

    dense            all heads, scaled_dot_product_attention
    dense_half       half of the KV heads
    kernel           the other half, streaming, for each window and tile
    layer            all heads by prefill_attention, half of them streaming, with the default tile and with the sweep's best
    chunk, chunk_kernel    the last queries of the row, dense: by PyTorch, and by the kernel, which they go to
"""
from __future__ import annotations

import argparse
import dataclasses
import itertools
from functools import partial

import torch

from hf_sparse.kernels import prefill_kernel
from hf_sparse.kernels.prefill import prefill_attention
from hf_sparse.kernels.prefill_kernel import Tile
from hf_sparse.kernels.reference.dense import exact_attention

from .common import quantiles, run_id, versions, write

DEVICE, DTYPE = "cuda", torch.bfloat16
QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
SINK, WINDOWS, WINDOW = 128, (256, 1024, 4096, 8192), 4096  # the last: of the whole layer
STREAMING = {"apart": (1, 3, 5, 7), "together": (4, 5, 6, 7)}
CHUNK = 8192
CHECKED = 2048                                              # tokens
LIMIT = 1e-2                                                # relative error in bf16
TILES = [
    Tile(128, 64, 8, 3), Tile(128, 64, 8, 3, True), Tile(128, 64, 8, 2, True), Tile(128, 128, 8, 2), Tile(128, 128, 8, 2, True),
    Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, True), Tile(64, 64, 4, 3, True), Tile(64, 128, 4, 2, True), Tile(64, 32, 4, 3, True),
]


def draw(tokens: int):
    """Query, keys and values in the order that projections leave them in."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    new = lambda heads: torch.randn(1, tokens, heads, DIM, generator=generator, device=DEVICE)  # noqa: E731
    return [part.to(DTYPE).transpose(1, 2) for part in (new(QUERY_HEADS) * 1.5, new(KV_HEADS), new(KV_HEADS))]


def kernel(query, keys, values, heads, dense: int, window: int, tile: Tile | None, out) -> torch.Tensor:
    prefill_kernel.launch(out, query, keys, values, heads, dense, SINK, window, DIM ** -0.5, 0.0, None, tile)
    return out


def empty(query) -> torch.Tensor:
    return torch.empty_like(query.transpose(1, 2)).transpose(1, 2)


def listed(heads) -> torch.Tensor:
    return torch.tensor(heads, dtype=torch.int32, device=DEVICE)


def float32_attention(query, keys, values, streaming, window: int) -> torch.Tensor:
    """[1, Hq, Q, D], with a mask, the last Q of T tokens."""
    query, keys, values = (part.float() for part in (query, keys, values))
    group, tokens = query.shape[1] // keys.shape[1], keys.shape[2]
    j = torch.arange(tokens, device=query.device)
    t = j[-query.shape[2]:, None]
    output = torch.empty_like(query)
    for own in range(query.shape[1]):
        seen = j <= t
        if own // group in streaming:
            seen = seen & ((j < SINK) | (j > t - window))
        logits = query[:, own] @ keys[:, own // group].mT * DIM ** -0.5
        output[:, own] = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1) @ values[:, own // group]
    return output


def check() -> list[dict]:
    """Relative errors of the kernel in every tile, and of whole layers; raises if one is wrong."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found, group = [], QUERY_HEADS // KV_HEADS
    query, keys, values = draw(CHECKED)
    for window in (64, 256, 1000):
        for name, streaming in STREAMING.items():
            true = float32_attention(query, keys, values, streaming, window)
            ours = [head * group + g for head in streaming for g in range(group)]
            order = [head for head in range(KV_HEADS) if head not in streaming]
            outputs = {"layer": prefill_attention(query, keys, values, streaming, SINK, window, DIM ** -0.5)}
            every = listed([*order, *streaming])
            outputs["launch"] = kernel(query, keys, values, every, len(order), window, None, empty(query))
            errors = {way: error_of(output, true) for way, output in outputs.items()}
            for tile in TILES if name == "apart" else []:
                out = kernel_or_error(query, keys, values, listed(streaming), window, tile)
                errors[str(tile)] = out if isinstance(out, str) else error_of(out[:, ours], true[:, ours])
            part = query[:, :, -700:]
            last = kernel(part, keys, values, listed(streaming), 0, window, None, empty(part))
            errors["chunk"] = error_of(last[:, ours], true[:, ours, -700:])
            found.append({"window": window, "streaming": streaming, **errors})
            print(found[-1], flush=True)
            if any(isinstance(error, float) and not error < LIMIT for error in errors.values()):
                raise SystemExit("the kernel is wrong")
    return found


def error_of(output, true) -> float:
    return round(float((output.float() - true).norm() / true.norm()), 6)


def kernel_or_error(query, keys, values, heads, window: int, tile: Tile):
    """The output, or why this GPU can't run such tiles."""
    try:
        return kernel(query, keys, values, heads, 0, window, tile, empty(query))
    except Exception as error:  # noqa: BLE001 - a launch that needs too much of something
        return f"{type(error).__name__}: {error}"[:200]


def times_of(function, repeats: int) -> list[float]:
    """Milliseconds on the device, of each of `repeats` calls."""
    function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def pairs(tokens: int, queries: int, window: int | None = None) -> int:
    """Pairs of a query and a key that it sees, of one head."""
    t = torch.arange(tokens - queries, tokens, dtype=torch.int64)
    if window is None:
        return int((t + 1).sum())
    begin = (t - window + 1).clamp(min=0)
    return int((t + 1 - begin + begin.clamp(max=SINK)).sum())


def timings(tokens: int, repeats: int, tiles: list[Tile], run: str) -> list[dict]:
    rows: list[dict] = []
    query, keys, values = draw(tokens)
    group, scaling = QUERY_HEADS // KV_HEADS, DIM ** -0.5
    half = KV_HEADS // 2
    out = empty(query)

    def add(name: str, work: int, function, **what) -> float:
        """`work`: pairs of query and key, of all query heads."""
        ms = quantiles(times_of(function, repeats))
        rate = round(work * 4 * DIM / ms["median"] / 1e9, 1)
        rows.append({"name": name, "context": tokens, **what, "ms": ms, "tflop_s": rate, "run_id": run})
        return ms["median"]

    whole = pairs(tokens, tokens)
    dense = add("dense", QUERY_HEADS * whole, lambda: exact_attention(query, keys, values, None, scaling, causal=True))
    part = query[:, :half * group], keys[:, :half], values[:, :half]
    add("dense_half", half * group * whole, lambda: exact_attention(*part, None, scaling, causal=True))
    best: tuple[float, Tile] | None = None
    heads = listed(STREAMING["apart"])
    for window, tile in itertools.product(WINDOWS, tiles):
        work, what = half * group * pairs(tokens, tokens, window), {"window": window, "tile": dataclasses.asdict(tile)}
        ms = add("kernel", work, partial(kernel, query, keys, values, heads, 0, window, tile, out), **what)
        if window == WINDOW and (best is None or ms < best[0]):
            best = ms, tile
    usual = prefill_kernel.HOPPER_TILES[DIM]
    work = half * group * (whole + pairs(tokens, tokens, WINDOW))
    try:
        for tile, (name, streaming) in itertools.product(dict.fromkeys((usual, best[1])), STREAMING.items()):
            prefill_kernel.HOPPER_TILES[DIM] = tile
            what = {"streaming": name, "window": WINDOW, "tile": dataclasses.asdict(tile)}
            layer = partial(prefill_attention, query, keys, values, streaming, SINK, WINDOW, scaling)
            ms = add("layer", work, layer, **what)
            rows[-1]["times_dense"] = round(dense / ms, 3)
    finally:
        prefill_kernel.HOPPER_TILES[DIM] = usual
    count = min(CHUNK, tokens // 2)
    last = query[:, :, -count:]
    work, what = QUERY_HEADS * pairs(tokens, count), {"queries": count}
    add("chunk", work, lambda: exact_attention(last, keys, values, None, scaling, causal=True), **what)
    for tile in dict.fromkeys((usual, best[1])):
        chunk = partial(kernel, last, keys, values, None, KV_HEADS, WINDOW, tile, out[:, :, -count:])
        add("chunk_kernel", work, chunk, **what, tile=dataclasses.asdict(tile))
    return rows


def table(rows: list[dict]) -> str:
    lines = [f"{'name':14}{'context':>9}{'window':>8}  {'ms':>9}{'TFLOP/s':>9}  {'x dense':>8}  tile"]
    for row in rows:
        tile = row.get("tile")
        shown = "" if tile is None else f"{tile['queries']}x{tile['keys']} warps {tile['warps']} stages {tile['stages']}"
        shown += ", descriptors" * bool(tile and tile["descriptors"])
        shown += f" ({row['streaming']})" if "streaming" in row else ""
        shown += f" {row['queries']} queries" if "queries" in row else ""
        lines.append(f"{row['name']:14}{row['context']:>9}{row.get('window', ''):>8}  {row['ms']['median']:>9.3f}"
                     f"{row['tflop_s']:>9}  {row.get('times_dense', ''):>8}  {shown}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="prefill_kernel.json")
    parser.add_argument("--contexts", default="32768,131072")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    run, rows = run_id(), []
    checks = check()
    # What can't run here was said by the check.
    tiles = [tile for tile in TILES if not isinstance(checks[0][str(tile)], str)]
    for tokens in map(int, args.contexts.split(",")):
        rows += timings(tokens, args.repeats, tiles, run)
        write(args.out, {"versions": versions(), "checks": checks, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
