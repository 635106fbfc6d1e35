"""Write the measured tables of docs/performance.md from the results beside this file.

    python -m benchmarks.report            # rewrite what stands between the markers
    python -m benchmarks.report --check    # exit with 1 if the document is not what the results say

Needs neither torch nor a GPU. Absolute times drift from one machine and day to the next, so ratios are formed only
between rows of the same run, and every row names its run.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence

from . import lserve_report
from .tables import EMPTY, between, latest, number, percent, spread, table

HERE = pathlib.Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "docs" / "performance.md"
NONE_YET = "Nothing is committed yet: run the command above on a GPU, then `python -m benchmarks.report`."
MISSING = {
    "offload_h200.json": "Not measured yet: run `python -m benchmarks.offload` on a GPU, then `python -m benchmarks.report`.",
    "offload_real.json": "Not measured yet: run `python -m benchmarks.offload_real MODEL_DIR`, then `python -m benchmarks.report`.",
    "prefill_kernel_h200.json": "Nothing is committed yet: run `python -m benchmarks.prefill_kernel` on a GPU, then `python -m benchmarks.report`.",
    "lserve_h200.json": "No run yet: run `python -m benchmarks.lserve` on a GPU, then `python -m benchmarks.report`.",
}

PATHS = {  # rows of benchmarks.decode, in the order of the tables
    "psa": "hf_sparse, budget of 4096 tokens",
    "psa-peaked": "hf_sparse, peaked keys",
    "free": "free attention (the floor)",
    "static": "StaticCache, compiled",
    "dynamic": "DynamicCache",
    "sdpa": "SDPA alone",
}
SHAPES = {"llama": "Llama-3.1-8B", "lwm": "LWM-Text-7B"}
OFFLOAD = {  # rows of benchmarks.offload
    "psa-resident": "hf_sparse, all in GPU memory",
    "psa-offload": "hf_sparse, KV in host memory",
    "copy-engine": "the same, fetched by the copy engine",
    "offloaded": "DynamicCache, offloading",
}
KERNELS = ("rank_kernel", "select_kernel", "attend_kernel", "merge_kernel", "extend_kernel")


def decode_rows(result: dict) -> list[dict]:
    """Rows in the order of the tables; of a path measured twice in the same run, the later one."""
    rows = latest(result["rows"], lambda row: (row["run_id"], row.get("shape"), row["batch"], row["context"],
                                               row["name"]))
    order = list(PATHS)
    return sorted(rows, key=lambda row: (list(SHAPES).index(row.get("shape", "llama")), row["batch"], row["context"],
                                         order.index(row["name"]) if row["name"] in order else len(order)))


def ratio(rows: Sequence[dict], row: dict, base: str, field: str) -> float | None:
    """Median of `field` over that of path `base` at the same shape, batch, context, and in the same run."""
    same = ("run_id", "shape", "batch", "context")
    for other in rows:
        if other["name"] == base and field in other and field in row \
                and all(other.get(name) == row.get(name) for name in same):
            return row[field]["median"] / other[field]["median"]
    return None


def place(row: dict) -> list[str]:
    return [SHAPES.get(row.get("shape", "llama"), row.get("shape", "")), PATHS.get(row["name"], row["name"]),
            str(row["batch"]), str(row["context"])]


def decode_table(result: dict) -> str:
    rows = decode_rows(result)
    out = []
    for row in rows:
        if "error" in row:
            out.append([*place(row), "failed: " + " ".join(row["error"].split())[:60], *[EMPTY] * 7, row["run_id"]])
        elif "ms_per_token" in row:
            read = row.get("kv_fraction")
            out.append([*place(row), spread(row["ms_per_token"], 2),
                        number(ratio(rows, row, "free", "ms_per_token"), 2), EMPTY if read is None else f"{read:.1%}",
                        number(row.get("peak_memory_gb")), number(row.get("prefill_s")),
                        {True: "yes", False: "no"}.get(row.get("captured"), EMPTY), number(row.get("compile_s")),
                        number(row.get("step_ms", {}).get("median"), 2), row["run_id"]])
    return table(["model shape", "path", "batch", "context", "ms a token", "x free", "KV read", "peak memory, GB",
                  "prefill, s", "captured", "compile, s", "step alone, ms", "run"], out, 2)


def attention_table(result: dict) -> str:
    rows = decode_rows(result)
    out = []
    for row in rows:
        if "attention_us_per_layer" not in row:
            continue
        floor = row.get("bytes_floor_us")
        out.append([*place(row), spread(row["attention_us_per_layer"]), number(floor),
                    number(row["attention_us_per_layer"]["median"] / floor, 2) if floor else EMPTY,
                    number(ratio(rows, row, "sdpa", "attention_us_per_layer"), 2), number(row.get("coverage"), 3),
                    row["run_id"]])
    return table(["model shape", "path", "batch", "context", "us a layer", "byte floor, us", "x floor", "x SDPA",
                  "coverage, estimated", "run"], out, 2)


def decode_check(result: dict) -> str:
    """What the correctness check of the decode benchmark found before anything was timed."""
    found = result.get("check")
    if not found:
        return "The correctness check of this benchmark was skipped in these runs."
    yes = {True: "yes", False: "no", None: EMPTY}
    out = [[name, yes[entry.get("captured_equals_eager")], f"{entry['logits_apart']:.1e}",
            yes[entry.get("tokens_as_dense")],
            EMPTY if "against_dense" not in entry else f"{entry['against_dense']:.1e}", f"{entry['kv_fraction']:.1%}"]
           for name, entry in found.items()]
    return table(["settings", "captured tokens = eager tokens", "logits apart", "tokens as dense",
                  "logits from dense", "KV read"], out)


# -- kernels -------------------------------------------------------------------------------------------------


def kernel_table(result: dict) -> str:
    """One row a size and run: the chain of kernels as one graph, each kernel alone, and the byte floor."""
    rows = latest([row for row in result["rows"] if "context" in row and row["kernel"] != "stop"],
                  lambda row: (row["run_id"], row["batch"], row["context"], row["kernel"]))
    sizes = sorted({(row["batch"], row["context"], row["run_id"]) for row in rows})
    out = []
    for batch, context, run in sizes:
        here = {row["kernel"]: row for row in rows
                if (row["batch"], row["context"], row["run_id"]) == (batch, context, run)}
        chain = here.get("chain", {})
        out.append([str(batch), str(context), spread(chain.get("us")),
                    *(number(here[name]["us"]) if name in here else EMPTY for name in KERNELS),
                    number(chain.get("bytes_floor_us")), run])
    return table(["batch", "context", "chain, us", *(name.removesuffix("_kernel") for name in KERNELS),
                  "byte floor, us", "run"], out, 0)


def stop_table(result: dict) -> str:
    """The chain where its threshold stops it early, and where nothing does."""
    rows = latest([row for row in result["rows"] if row.get("kernel") == "stop"], lambda row: (row["run_id"], row["name"]))
    never = {row["run_id"]: row["us"]["median"] for row in rows if row["name"] == "never"}
    out = [[f"threshold {row['threshold']:.4g}", str(row["batch"]), str(row["context"]), f"{row['kv_fraction']:.1%}",
            spread(row["us"]), number(row["us"]["median"] / never[row["run_id"]], 2) if row["run_id"] in never else EMPTY,
            row["run_id"]] for row in rows]
    return table(["stops at", "batch", "context", "KV read", "chain, us", "x never stopping", "run"], out)


def sweep_table(result: dict) -> str:
    """Launch parameters that were tried, fastest first within a kernel and run."""
    rows = [row for row in result["rows"] if "variant" in row]
    if not rows:
        return "No sweep is among these runs (`python -m benchmarks.kernels --sweep`)."
    failed = lambda row: not isinstance(row["us"], (int, float))  # noqa: E731
    rows = sorted(rows, key=lambda row: (row["run_id"], KERNELS.index(row["kernel"]), row.get("batch", 1), failed(row),
                                         0.0 if failed(row) else row["us"]))
    out = [[row["kernel"].removesuffix("_kernel"), str(row.get("batch", 1)),
            ", ".join(f"{name.split('_')[-1]} {value}" for name, value in row["variant"].items()),
            "failed: " + str(row["us"])[:60] if failed(row) else number(row["us"]), row["run_id"]] for row in rows]
    return table(["kernel", "batch", "launch parameters", "us", "run"], out, 3)


def check_table(result: dict) -> str:
    """The largest relative errors at threshold 1 by type, and how far kernels and reference read the same below it."""
    checks = result.get("checks") or []
    if not checks:
        return "The correctness check of this benchmark was skipped in these runs."
    out = []
    for dtype in dict.fromkeys(entry["dtype"] for entry in checks):
        exact = [entry for entry in checks if entry["dtype"] == dtype and entry["threshold"] >= 1.0]
        below = [entry for entry in checks if entry["dtype"] == dtype and entry["threshold"] < 1.0]
        found = {name: [entry[name] for entry in exact if name in entry] for name in ("kernel", "reference")}
        worst = [f"{max(errors):.1e}" if errors else EMPTY for errors in found.values()]
        apart = [abs(entry["fraction_kernel"] - entry["fraction_reference"]) for entry in below]
        shapes = {tuple(entry["shape"]) for entry in exact or below if "shape" in entry}
        longest = max((entry.get("tokens", 0) for entry in exact), default=0)
        out.append([dtype.removeprefix("torch."), str(len(shapes)), str(longest or EMPTY), *worst,
                    f"{max(apart):.3f}" if apart else EMPTY])
    return table(["type", "shapes", "longest row", "kernels against float64", "reference against float64",
                  "KV share read, kernels from reference, at most"], out)


# -- offloading ----------------------------------------------------------------------------------------------


def none_of(name: str) -> str:
    return f"No such rows are among these runs (`python -m benchmarks.offload --rows {name}`)."


def offload_table(result: dict) -> str:
    """Decoding with pools of every size and policy, beside everything resident and transformers' own offloading."""
    order = list(OFFLOAD)
    rows = latest([row for row in result["rows"] if row["name"] in order],
                  lambda row: (row["run_id"], row["batch"], row["context"], row["name"], row.get("eviction"),
                               row.get("pool_fraction"), row.get("gpu_memory_gb"), row.get("prefetch", False)))
    rows.sort(key=lambda row: (row["batch"], row["context"], order.index(row["name"]), row.get("prefetch", False),
                               row.get("eviction") or "", row.get("pool_fraction") or 0.0))
    out = []
    for row in rows:
        path = OFFLOAD[row["name"]] + ", prefetching" * row.get("prefetch", False)
        start = [path, row.get("eviction") or EMPTY, str(row["batch"]), str(row["context"])]
        if "error" in row:
            out.append([*start, EMPTY, "failed: " + " ".join(row["error"].split())[:60], *[EMPTY] * 10, row["run_id"]])
            continue
        out.append([*start, percent(row.get("pool_fraction")), spread(row["ms_per_token"], 2),
                    number(ratio(rows, row, "psa-resident", "ms_per_token"), 2), number(row["tokens_per_second"]),
                    percent(row.get("hit_rate")), number(row.get("fetch_gb_s")), percent(row.get("kv_fraction")),
                    percent(row.get("overlap")), number(row.get("peak_memory_gb")), number(row.get("peak_over_budget_gb"), 2),
                    number(row.get("host_gb")), {True: "yes", False: "no"}.get(row.get("captured"), EMPTY), row["run_id"]])
    head = ["path", "eviction", "batch", "context", "pool, of KV", "ms a token", "x resident", "tokens/s", "hits",
            "fetched, GB/s", "KV read", "blocks shared", "peak memory, GB", "over budget, GB", "host, GB", "captured", "run"]
    return table(head, out, 2) if out else none_of("psa-resident,psa-offload,offloaded")


def copy_table(result: dict) -> str:
    """Bandwidths from pinned host memory: the fetch kernel by its number of programs, and the copy engine."""
    out = []
    for row in latest([row for row in result["rows"] if row["name"] == "copy"], lambda row: (row["run_id"],)):
        if "error" in row:
            out.append(["failed: " + " ".join(row["error"].split())[:60], *[EMPTY] * 3, row["run_id"]])
            continue
        engine = row["copy_engine_gb_s"]
        for programs in sorted(row["by_programs"], key=int):
            rate = row["by_programs"][programs]
            used = " (used)" if int(programs) == row["fetch_programs"] else ""
            out.append([programs + used, spread(rate), number(engine), f"{rate['median'] / engine:.0%}", row["run_id"]])
    head = ["programs", "fetch kernel, GB/s", "copy engine, GB/s", "kernel of engine", "run"]
    return table(head, out) if out else none_of("copy")


def hits_table(result: dict) -> str:
    """Hit rates, simulated and measured: organisations of the pool and policies in rows, sizes of the pool in columns."""
    rows = [row for row in result["rows"] if row["name"] == "hits" and "error" not in row]
    if not rows:
        return none_of("hits")
    sizes = sorted({row["pool_fraction"] for row in rows})
    found: dict[tuple, dict] = {}
    for row in rows:
        place = row["batch"], row["context"], row["how"], row["eviction"], row["pool"], row["run_id"]
        found.setdefault(place, {})[row["pool_fraction"]] = row["hit_rate"]
    out = [[how, pool, eviction, str(batch), str(context), *(percent(rates.get(size)) for size in sizes), run]
           for (batch, context, how, eviction, pool, run), rates in sorted(found.items())]
    return table(["", "pool", "eviction", "batch", "context", *(f"{size:.0%} of KV" for size in sizes), "run"], out, 2)


def offload_check(result: dict) -> str:
    """What the check of the offload benchmark found: every way of decoding against everything resident."""
    found = result.get("check")
    if not found:
        return "The correctness check of this benchmark was skipped in these runs."
    yes = {True: "yes", False: "no", None: EMPTY}
    out = [[name, yes[entry["equal"]], "failed: " + " ".join(entry["error"].split())[:60], *[EMPTY] * 3] if "error" in entry else
           [name, yes[entry["equal"]], EMPTY if entry["apart"] is None else f"{entry['apart']:.1e}", yes[entry["captured"]],
            str(entry["slots"]), str(entry["misses"])] for name, entry in found.items()]
    return table(["decoding", "as resident, bit for bit", "logits apart", "captured", "slots", "misses"], out)


def real_table(result: dict) -> str:
    """What a real model answered with a small pool, and with everything resident: one row a context. Then its hit rates."""
    out = []
    answered = [row for row in result["rows"] if row["name"] != "hits"]
    for row in latest(answered, lambda row: (row["run_id"], row["name"], row["seed"], row["context"])):
        questions = row["questions"]
        same = sum(a == b for answer in row["answers"] for a, b in zip(answer["resident"], answer["offloaded"]))
        out.append([row["name"], str(row["context"]), f"{row['pool_fraction']:.1%}", str(row["slots"]),
                    f"{row['gpu_memory'] / 2**20:.1f}", f"{row['kv_bytes'] / 2**20:.1f}", f"{row['right_resident']} of {questions}",
                    f"{row['right_offloaded']} of {questions}", f"{same} of {row['tokens']}",
                    f"{row['logits_apart']:.1e}", percent(row["kv_fraction"]), number(row["misses_per_step"]),
                    percent(row["hit_rate"]), row["run_id"]])
    head = ["task", "context", "pool, of KV", "slots", "gpu_memory, MiB", "KV, MiB", "right, resident", "right, offloaded",
            "same tokens", "logits apart", "KV read", "misses a step", "hits", "run"]
    parts = [f"{result['model']}, {result['dtype']}, threshold {result['threshold']}; {versions(result)}", table(head, out)]
    if len(answered) < len(result["rows"]):
        parts += [real_hits_table(result), real_check_table(result)]
    return "\n\n".join(parts)


def real_hits_table(result: dict) -> str:
    """Hit rates on a real model's reads: texts, organisations of the pool and policies in rows, its sizes in columns."""
    rows = [row for row in result["rows"] if row["name"] == "hits" and row["how"] != "measured"]
    sizes = sorted({row["pool_fraction"] for row in rows})
    found: dict[tuple, dict] = {}
    for row in rows:
        place = row["run_id"], row["decoded"], row["context"], row["pool"], row["eviction"], row["working_set"], row["overlap"]
        found.setdefault(place, {})[row["pool_fraction"]] = row["hit_rate"]
    out = [[decoded, pool, eviction, str(context), percent(working_set), percent(overlap),
            *(percent(rates.get(size)) for size in sizes), run]
           for (run, decoded, context, pool, eviction, working_set, overlap), rates in found.items()]
    return table(["decoded", "pool", "eviction", "context", "a token reads, of KV", "blocks shared",
                  *(f"hits, {size:.0%} of KV" for size in sizes), "run"], out, 3)


def real_check_table(result: dict) -> str:
    """What the library's own pools counted at one size, beside the simulations of the same slots."""
    out = [[row["pool"], row["eviction"], percent(row["pool_fraction"]), str(row["slots"]), str(row["hits"]),
            str(row["misses"]), percent(row["hit_rate"]), percent(row["simulated_in_rounds"]), percent(row["simulated"]),
            row["run_id"]]
           for row in result["rows"] if row["name"] == "hits" and row["how"] == "measured"]
    return table(["pool", "eviction", "pool, of KV", "slots", "hits", "misses", "measured", "simulated in rounds",
                  "simulated, a layer at once", "run"], out, 2)


def versions(result: dict) -> str:
    """One sentence: what the runs were made with."""
    found = dict(result["versions"])
    gpu = found.pop("gpu", "no GPU")
    return f"{gpu}; " + ", ".join(f"{name} {value}" for name, value in found.items()) + "."


# -- LServe --------------------------------------------------------------------------------------------------

# -- the document --------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "decode-versions": ("decode_h200.json", versions),
    "decode": ("decode_h200.json", decode_table),
    "attention": ("decode_h200.json", attention_table),
    "decode-check": ("decode_h200.json", decode_check),
    "kernels-versions": ("kernels_h200.json", versions),
    "kernels": ("kernels_h200.json", kernel_table),
    "kernels-check": ("kernels_h200.json", check_table),
    "kernels-stop": ("kernels_h200.json", stop_table),
    "kernels-sweep": ("kernels_h200.json", sweep_table),
    "offload-versions": ("offload_h200.json", versions),
    "offload": ("offload_h200.json", offload_table),
    "offload-copy": ("offload_h200.json", copy_table),
    "offload-hits": ("offload_h200.json", hits_table),
    "offload-check": ("offload_h200.json", offload_check),
    "offload-real": ("offload_real.json", real_table),
    "prompt-attention": ("prefill_kernel_h200.json", lserve_report.prompt_attention),
    "lserve-versions": ("lserve_h200.json", versions),
    **{name: ("lserve_h200.json", section) for name, section in lserve_report.SECTIONS.items()},
}


def render(text: str, results: pathlib.Path) -> str:
    """The document with every generated section as the result files in `results` have it."""
    for name, (file, section) in SECTIONS.items():
        path = results / file
        content = section(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else MISSING.get(file, NONE_YET)
        text = between(text, name, content, DOCUMENT.name)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results", help="folder of the JSON files")
    parser.add_argument("--document", type=pathlib.Path, default=DOCUMENT)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is not up to date")
    args = parser.parse_args(argv)
    before = args.document.read_text(encoding="utf-8")
    after = render(before, args.results)
    if args.check:
        if before != after:
            print(f"{args.document.name} is not what the results say: run python -m benchmarks.report",
                  file=sys.stderr)
        return int(before != after)
    args.document.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
