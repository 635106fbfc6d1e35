"""Shared by the benchmarks: timing in CUDA graphs, quantiles, versions, and layers filled with synthetic keys."""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import uuid
from collections.abc import Iterable

import torch

from hf_sparse import PSAConfig
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.state import CacheState


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    pick = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    return {"median": round(statistics.median(ordered), 4), "p20": round(pick(0.2), 4), "p80": round(pick(0.8), 4)}


def versions() -> dict[str, str]:
    import transformers
    import triton

    found = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__,
             "triton": triton.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def run_id() -> str:
    return uuid.uuid4().hex[:8]


def results(path: str, append: bool) -> dict:
    """What a benchmark adds its rows to: the file's content, or an empty result."""
    if append and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    return {"versions": versions(), "check": None, "rows": []}


def add_run_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """How much of a benchmark is run, and where its rows go."""
    parser.add_argument("--layers", type=int, help="a model of fewer layers")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--run", help="with --append: the run_id of a run just before on the same machine, to go on with")
    parser.add_argument("--append", action="store_true", help="keep the rows that the output file has")
    parser.add_argument("--out", default=out)


def check_names(parser: argparse.ArgumentParser, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            parser.error(f"{name!r} is not known; choose from {', '.join(known)}")


def check_tokens(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.warmup < 4 or args.tokens < 4:
        parser.error("--warmup and --tokens must be at least 4: a step is compiled, then captured, then replayed")


def write(path: str, payload: dict) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(payload, file, indent=1)
        file.write("\n")


def graph_times(function, repeats: int = 30, inner: int = 1) -> list[float]:
    """Milliseconds of `function` replayed from a CUDA graph, for each of `repeats` replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            function()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return times


def synthetic_layers(count: int, batch: int, query_heads: int, heads: int, dim: int, tokens: int, dtype, device,
                     config: PSAConfig, seed: int = 0, value_dim: int | None = None, lengths=None, peak: float = 1.0):
    """`count` layers of one cache holding random keys with a shared bias and rare spikes, and the last queries.

    `lengths`: real tokens of each row (left padding); `peak` scales the keys, so that attention is peaked.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    normal = lambda *size: torch.randn(*size, generator=generator, device=device)  # noqa: E731
    state = CacheState(config, layers=count)
    layers = []
    for order in range(count):
        layer = PSALayer(state, order, order)
        keys = normal(batch, heads, tokens, dim) * peak + normal(1, heads, 1, dim)
        values = normal(batch, heads, tokens, value_dim or dim)
        query = normal(batch, query_heads, min(tokens, 512), dim)
        valid = None
        if lengths is not None:
            position = torch.arange(tokens, device=device)
            valid = position >= tokens - torch.tensor(lengths, device=device)[:, None]
        layer.lazy_initialization(keys.to(dtype), values.to(dtype))
        layer.group = query_heads // heads
        layer.commit(Pending(keys.to(dtype), values.to(dtype), 0), valid)
        layer.digests.observe(query.to(dtype), heads, None if valid is None else valid[:, -query.shape[2]:])
        layers.append(layer)
    return state, layers
