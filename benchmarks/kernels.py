"""The decode kernels on a GPU: first against the reference and float64, then their time.

    python -m benchmarks.kernels [--out benchmarks/results/kernels_h200.json]
"""
from __future__ import annotations

import argparse
import dataclasses
import itertools

import torch

from hf_sparse import PSAConfig
from hf_sparse.cache import backend
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.static import StaticStep
from hf_sparse.kernels.decode import TUNING, Reading

from .common import graph_times, quantiles, run_id, synthetic_layers, versions, write

SHAPES = [  # query heads, KV heads, head dim
    (32, 8, 128), (8, 8, 64), (9, 3, 64), (8, 2, 80), (10, 2, 96), (14, 2, 64), (16, 2, 256), (4, 4, 128),
]


def float64_attention(layer, query, blocks=None):
    keys, values = (part.double() for part in layer.padded())
    group = query.shape[1] // layer.heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = query.double() @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    if layer.ragged:
        logits = logits.masked_fill(~layer.valid[:, None, None], -torch.inf)
    return torch.softmax(logits, -1) @ values


def check(shape, dtype, threshold, tokens=1500, batch=2, block_size=32, kv_bits=16):
    """Relative errors of the kernels and of the reference; reads must agree within a few blocks."""
    query_heads, heads, dim = shape
    config = PSAConfig(threshold=threshold, min_context=0, block_size=block_size, kv_bits=kv_bits)
    device = torch.device("cuda")
    state, (layer,) = synthetic_layers(1, batch, query_heads, heads, dim, tokens, dtype, device, config, seed=1,
                                       lengths=[tokens, tokens - 333], peak=1.5)
    twin = layer.fork(type(state)(config, 1, state.pools))
    twin.state.kernels = lambda device, dtype: False        # the PyTorch reference
    scaling = dim ** -0.5
    generator = torch.Generator(device=device).manual_seed(7)
    worst = {"kernel": 0.0, "reference": 0.0, "apart": 0.0}
    for step in range(140):
        new = lambda h: torch.randn(batch, h, 1, dim, generator=generator, device=device).to(dtype)  # noqa: E731
        query, key, value = new(query_heads) * 1.5, new(heads), new(heads)
        ours = layer._device_step(query, Pending(key, value, layer.length), scaling, 0.0, None)
        pending = Pending(key, value, twin.length)
        if step % 20 not in (0, 3):
            twin.commit(pending, None)
        else:
            ref = twin.attend(query, pending, None, None, scaling, 0.0, None, None)
            rel = lambda a, b: float((a.double() - b.double()).norm() / b.double().norm())  # noqa: E731
            worst["apart"] = max(worst["apart"], rel(ours, ref))
            if threshold >= 1.0:
                true = float64_attention(twin, query)
                worst["kernel"] = max(worst["kernel"], rel(ours, true))
                worst["reference"] = max(worst["reference"], rel(ref, true))
            if not bool(torch.isfinite(ours).all()):
                raise SystemExit(f"not finite: {shape} {dtype}")
    a, b = layer.stats.as_dict(0, "psa", False), twin.stats.as_dict(0, "psa", False)
    worst["fraction_kernel"], worst["fraction_reference"] = a["kv_fraction"], b["kv_fraction"]
    worst["coverage_kernel"], worst["coverage_reference"] = a["coverage"], b["coverage"]
    assert bool((layer.lengths == twin.lengths).all())
    return worst


def check_long(tokens: int) -> float:
    """Relative error of a step that reads everything, on a long row in bf16, against float64."""
    config, device = PSAConfig(threshold=1.0, min_context=0), torch.device("cuda")
    _, (layer,) = synthetic_layers(1, 1, 32, 8, 128, tokens, torch.bfloat16, device, config, seed=2)
    new = lambda heads: torch.randn(1, heads, 1, 128, device=device).bfloat16()  # noqa: E731
    query, key, value = new(32), new(8), new(8)
    ours = layer._device_step(query, Pending(key, value, layer.length), 128 ** -0.5, 0.0, None).double()
    keys, values = (part.double() for part in layer.padded())
    heads = [torch.softmax(query[:, 4 * h:4 * h + 4].double() @ keys[:, h:h + 1].mT * 128 ** -0.5, -1) @ values[:, h:h + 1]
             for h in range(8)]
    true = torch.cat(heads, 1)
    return float((ours - true).norm() / true.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/kernels_h200.json")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--quick", action="store_true", help="check three shapes only")
    parser.add_argument("--sweep", action="store_true", help="time variants of the ranking kernel")
    args = parser.parse_args()
    rows, checks = [], []
    if not args.skip_check:
        for shape, dtype, threshold in itertools.product(SHAPES, (torch.bfloat16, torch.float16, torch.float32),
                                                         (1.0, 0.7)):
            if dtype != torch.bfloat16 and shape not in SHAPES[:3] or args.quick and (
                    shape not in (SHAPES[0], SHAPES[5], SHAPES[6]) or dtype != torch.bfloat16):
                continue
            found = check(shape, dtype, threshold)
            found = {k: round(v, 5) for k, v in found.items()}
            checks.append({"shape": shape, "dtype": str(dtype), "threshold": threshold, **found})
            print(shape, dtype, threshold, found, flush=True)
            limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
            if threshold >= 1.0 and found["kernel"] > limit:
                raise SystemExit("kernels are wrong")
            # Below 1 kernels read what lies above a cut, the reference whole rounds, and so a little more than it must.
            if threshold < 1.0 and (found["apart"] > 0.4 or found["coverage_kernel"] < threshold - 0.005
                                    or abs(found["fraction_kernel"] - found["fraction_reference"]) > 0.1):
                raise SystemExit("kernels choose other blocks than the reference")
        for tokens in (4096, 32768, 131072):
            error = check_long(tokens)
            checks.append({"tokens": tokens, "dtype": "bfloat16", "threshold": 1.0, "kernel": round(error, 5)})
            print(checks[-1], flush=True)
            if not error < 1e-2:
                raise SystemExit("kernels are wrong on a long row")
    run = run_id()
    for batch, tokens in ((1, 131072), (4, 131072), (1, 32768), (1, 8192)):
        if batch == 4 and torch.cuda.get_device_properties(0).total_memory < 80e9:
            continue
        rows += timings(batch, tokens, run, args.sweep)
    rows += stopping(131072, run)
    write(args.out, {"versions": versions(), "checks": checks, "rows": rows})


def kernel_times(chain) -> dict[str, float]:
    """Mean microseconds of every kernel of ours in a chain, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    chain()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            chain()
        torch.cuda.synchronize()
    return {event.key: round(event.device_time_total / event.count, 2) for event in prof.key_averages()
            if event.key.endswith("_kernel") and event.count}


SWEEPS = {
    "rank_kernel": [dict(score_waves=w, rank_registers=r) for w, r in ((12, 168), (10, 168), (8, 248), (16, 128))],
    "select_kernel": [dict(select_tile=t, select_warps=w) for t, w in ((4096, 8), (4096, 4), (4096, 16), (2048, 8))],
    "attend_kernel": [dict(reading=Reading(*r), reading_many=Reading(*r))
                      for r in ((4, 128, 4, 3), (2, 64, 2, 4), (2, 32, 2, 12), (2, 32, 2, 6), (1, 32, 2, 12), (4, 32, 2, 12))],
    "merge_kernel": [dict(merge_tile=t, merge_warps=w) for t, w in ((32, 4), (32, 2), (32, 8))],
}


def chain_of(config: PSAConfig, batch: int, tokens: int, count: int):
    """(chain, restore, layers, step) of synthetic layers: a token through all of them, and their lengths as they were."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    _, layers = synthetic_layers(count, batch, 32, 8, 128, tokens, dtype, device, config)
    step = StaticStep(config, count)
    for layer in layers:
        layer.begin_step()
    step.prepare(layers)
    query = torch.randn(batch, 32, 1, 128, device=device).to(dtype)
    key, value = (torch.randn(batch, 8, 1, 128, device=device).to(dtype) for _ in range(2))
    lengths = [layer.lengths.clone() for layer in layers]

    def chain():
        for layer in layers:
            step.run(layer, query, key, value, None, 128 ** -0.5, 0.0)

    def restore():
        for layer, saved in zip(layers, lengths):
            layer.lengths.copy_(saved)

    return chain, restore, layers, step


def stopping(tokens: int, run: str) -> list[dict]:
    """A chain that its threshold stops at about a tenth of the blocks, against one that reads them all."""
    rows, threshold = [], 0.0
    for name, wanted in (("stops", 0.1), ("never", 1.0)):
        low, high = 0.0, 1.0
        for _ in range(8 if wanted < 1.0 else 0):           # the threshold that reads so much of these keys
            threshold = (low + high) / 2
            chain, restore, layers, _ = chain_of(PSAConfig(threshold=threshold, min_context=0), 1, tokens, 1)
            chain()
            fraction = layers[0].stats.device_buffers(1, 8, 4, 4, layers[0].device)[0]
            low, high = (threshold, high) if float(fraction[0] / fraction[1]) < wanted else (low, threshold)
        config = PSAConfig(threshold=threshold if wanted < 1.0 else 1.0, min_context=0)
        chain, restore, layers, _ = chain_of(config, 1, tokens, 4)
        times = [t / 4 * 1e3 for t in graph_times(chain)]
        counted = layers[0].stats.counters
        rows.append({"kernel": "stop", "name": name, "batch": 1, "context": tokens, "us": quantiles(times), "run_id": run,
                     "threshold": config.threshold, "kv_fraction": round(float(counted[0] / counted[1]), 4)})
        restore()
        print(rows[-1], flush=True)
    return rows


def _plain(variant: dict) -> dict:
    if "reading" in variant:
        return dataclasses.asdict(variant["reading"])
    return variant


def sweep(chain, restore, batch: int, run: str) -> list[dict]:
    """Every kernel with other launch parameters, one at a time. Chunk sizes change buffers, so those chains are only
    timed here, not checked."""
    rows = []
    for name, variants in SWEEPS.items():
        for variant in variants:
            saved = {key: getattr(TUNING, key) for key in variant}
            for key, value in variant.items():
                setattr(TUNING, key, value)
            try:
                us = kernel_times(chain).get(name)
            except Exception as error:  # noqa: BLE001 - a variant that does not compile is a result
                us = f"{type(error).__name__}: {str(error)[:150]}"
            restore()
            rows.append({"kernel": name, "variant": _plain(variant), "us": us, "batch": batch, "run_id": run})
            for key, value in saved.items():
                setattr(TUNING, key, value)
    return rows


def timings(batch: int, tokens: int, run: str, sweep_too: bool = False) -> list[dict]:
    """Chain and single kernels, microseconds a layer, over several layers so that caches are cold."""
    count = 4 if tokens >= 32768 else 8
    chain, restore, *_ = chain_of(PSAConfig(threshold=0.85, min_context=0, max_blocks=128), batch, tokens, count)
    times = [t / count * 1e3 for t in graph_times(chain)]
    restore()
    digest_bytes = tokens * 8 * batch * (32 * 4 + 96 * 2) / 8 * (1 + 4 * 128 * 8 / (128 * 320))
    attend_bytes = 128 * 32 * 8 * batch * 128 * 2 * 2
    out = [{"kernel": "chain", "batch": batch, "context": tokens, "us": quantiles(times), "run_id": run,
            "bytes_floor_us": round((digest_bytes + attend_bytes) / 4.26e6, 2)}]
    for name, us in kernel_times(chain).items():
        out.append({"kernel": name, "batch": batch, "context": tokens, "run_id": run, "us": us})
    restore()
    if sweep_too and tokens == 131072:
        out += sweep(chain, restore, batch, run)
    for row in out:
        print(row, flush=True)
    return out


if __name__ == "__main__":
    backend.use_kernels(PSAConfig(), torch.device("cuda"), torch.bfloat16)
    main()
