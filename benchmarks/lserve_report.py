"""The tables of docs/performance.md on LServe's parts, from benchmarks/results/lserve_h200.json; `benchmarks.report` writes them."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from .tables import EMPTY, latest, number, percent, spread, table

LSERVE = {  # rows of benchmarks.lserve
    "prefill-stock": "DynamicCache",
    "prefill-psa": "hf_sparse",
    "prefill-streaming": "hf_sparse, streaming heads",
    "prefill-streaming-narrow": "hf_sparse, streaming heads, window of decoding",
    "prefill-streaming-kv4": "hf_sparse, streaming heads, 4 bits",
    "attention-dense": "attention alone",
    "attention-streaming": "attention alone, streaming heads",
    "stock": "DynamicCache",
    "psa": "PSA",
    "psa-half": "PSA",
    "psa-half-kv4": "PSA",
    "lserve": "LServe",
    "lserve-c1": "LServe",
    "lserve-quarter": "LServe",
    "lserve-half": "LServe",
    "lserve-half-kv8": "LServe",
    "lserve-half-kv4": "LServe",
    "chain-psa": "PSA",
    "chain-lserve": "LServe",
    "offload": "PSA",
    "ablation-dense": "everything is read",
    "ablation-static": "streaming heads",
    "ablation-dynamic": "pages",
    "ablation-both": "both",
    "reuse": "LServe",
    "pages": "LServe",
}

# What is wanted of the GPU: label, the row, the row that it is compared with (None: it is a ratio), their field, batch, context,
# and the bound. "at least": so many times as fast; "at most": so many times as much.
WANTED: list[tuple] = [
    ("prompt, half of the heads streaming, whole", {"name": "prefill-streaming"}, {"phase": "prefill", "streaming": 0.0},
     "seconds", 1, 131072, "at least", 1.45),
    ("prompt, half of the heads streaming, whole", {"name": "prefill-streaming"}, {"phase": "prefill", "streaming": 0.0},
     "seconds", 1, 32768, "at least", 1.15),
    ("the same with the window of decoding", {"name": "prefill-streaming-narrow"}, {"phase": "prefill", "streaming": 0.0},
     "seconds", 1, 131072, "at least", 1.45),
    ("the same with the window of decoding", {"name": "prefill-streaming-narrow"}, {"phase": "prefill", "streaming": 0.0},
     "seconds", 1, 32768, "at least", 1.15),
    ("prompt, half of the heads streaming, attention alone", {"name": "attention-streaming"}, {"name": "attention-dense"},
     "attention_us_per_layer", 1, 131072, "at least", 1.7),
    ("time of a token, LServe of PSA", {"name": "lserve"}, {"name": "psa"}, "ms_per_token", 1, 131072, "at most", 1.0),
    ("KV memory, half of the heads streaming and 4 bits, of bf16", {"name": "lserve-half-kv4"}, None, "kv_ratio", 1, 131072,
     "at most", 0.18),
    ("selection shared by 4 tokens, of by none", {"name": "reuse", "reuse": 4, "reuse_refresh": 0.0}, {"name": "reuse", "reuse": 1},
     "selector_us_per_layer", 1, 131072, "at most", 0.35),
    ("attention of a token, 8 bits", {"name": "chain-psa", "kv_bits": 8}, {"name": "chain-psa", "kv_bits": 16},
     "attention_us_per_layer", 8, 32768, "at least", 1.1),
    ("attention of a token, 4 bits", {"name": "chain-psa", "kv_bits": 4}, {"name": "chain-psa", "kv_bits": 16},
     "attention_us_per_layer", 8, 32768, "at least", 1.2),
    ("bytes fetched a token, 4 bits of 16", {"name": "offload", "kv_bits": 4}, {"name": "offload", "kv_bits": 16}, "fetch_bytes",
     1, 131072, "at most", 0.32),
]
LSERVE_HEAD = ("path", "batch", "context", "heads streaming", "KV bits", "tokens a selection")


def lserve_rows(result: dict) -> list[dict]:
    """In the order of the tables; of a row measured twice in the same run, the later one."""
    keys = ("run_id", "name", "batch", "context", "streaming", "kv_bits", "reuse", "reuse_refresh", "block_size", "logical_size")
    rows = latest(result["rows"], lambda row: tuple(row.get(key) for key in keys))
    order = list(LSERVE)
    return sorted(rows, key=lambda row: (row["batch"], row["context"], order.index(row["name"])))


def value(row: dict, field: str) -> float | None:
    found = row.get(field)
    return found["median"] if isinstance(found, dict) else found


def smallest(rows: Sequence[dict], row: dict, field: str, **where) -> float | None:
    """The smallest `field` of the rows of the same run, batch and context that `where` describes."""
    where |= {key: row[key] for key in ("run_id", "batch", "context")}
    found = [value(other, field) for other in rows if all(other.get(key) == wanted for key, wanted in where.items())]
    return min((one for one in found if one is not None), default=None)


def times_as_fast(rows: Sequence[dict], row: dict, field: str, **where) -> str:
    base, mine = smallest(rows, row, field, **where), value(row, field)
    return number(base / mine if base is not None and mine else None, 2)


def lserve_goals(result: dict) -> str:
    """What was wanted, and what each run that has measured it found."""
    rows, out = lserve_rows(result), []
    for label, which, base, field, batch, context, sense, bound in WANTED:
        which = {"batch": batch, "context": context, **which}
        for row in rows:
            mine = value(row, field)
            if mine is None or any(row.get(key) != wanted for key, wanted in which.items()):
                continue
            other = 1.0 if base is None else smallest(rows, row, field, **base)
            if not other or not mine:
                continue
            found = other / mine if sense == "at least" else mine / other
            met = found >= bound if sense == "at least" else found <= bound
            out.append([label, str(batch), str(context), f"{sense} {bound:.2f} x", f"{found:.2f} x", "yes" if met else "no",
                        row["run_id"]])
    return table(["what", "batch", "context", "wanted", "found", "met", "run"], out) if out else no_lserve("prefill,decode")


def no_lserve(names: str) -> str:
    return f"No such rows are among these runs (`python -m benchmarks.lserve --rows {names}`)."


def lserve_table(result: dict, group: str, names: Sequence[str], head: Sequence[str],
                 cells: Callable[[dict, list[dict]], list[str]]) -> str:
    """The rows of these names: their settings, and what `cells` makes of a row, and of all rows to compare it with."""
    rows, out = lserve_rows(result), []
    for row in rows:
        if row["name"] not in names:
            continue
        rest = cells(row, rows) if "error" not in row else [
            "failed: " + " ".join(row["error"].split())[:60], *[EMPTY] * (len(head) - 1)]
        out.append([LSERVE[row["name"]], str(row["batch"]), str(row["context"]), f"{row['streaming']:.0%}", str(row["kv_bits"]),
                    str(row["reuse"]), *rest, row["run_id"]])
    return table([*LSERVE_HEAD, *head, "run"], out) if out else no_lserve(group)


def lserve_prefill(result: dict) -> str:
    def cells(row, rows):
        field = "seconds" if "seconds" in row else "attention_us_per_layer"
        what = {"name": "attention-dense"} if field != "seconds" else {"streaming": 0.0}
        return [spread(row.get("seconds"), 2), spread(row.get("attention_us_per_layer"), 0),
                times_as_fast(rows, row, field, phase="prefill", **what)]
    names = [name for name in LSERVE if name.startswith(("prefill-", "attention-"))]
    return lserve_table(result, "prefill,attention", names, ["seconds", "us a layer", "x dense"], cells)


def lserve_decode(result: dict) -> str:
    def cells(row, rows):
        return [spread(row["ms_per_token"], 2), times_as_fast(rows, row, "ms_per_token", name="psa"),
                spread(row.get("attention_us_per_layer")), percent(row.get("kv_fraction")), number(row.get("kv_gb"), 2),
                number(row.get("kv_ratio"), 3), {True: "yes", False: "no"}.get(row.get("captured"), EMPTY)]
    names = ("stock", *(name for name in LSERVE if name.split("-")[0] in ("psa", "lserve")))
    head = ["ms a token", "x PSA", "attention, us a layer", "KV read", "KV, GB", "of bf16", "captured"]
    return lserve_table(result, "decode", names, head, cells)


def lserve_offload(result: dict) -> str:
    def cells(row, rows):
        return [spread(row["ms_per_token"], 2), percent(row.get("pool_fraction")), percent(row.get("hit_rate")),
                number(row["misses_per_token"]), number(row["fetch_bytes"] / 1e6, 2), number(row.get("kv_gb"), 2),
                number(row.get("host_gb"), 2)]
    head = ["ms a token", "pool, of blocks", "hits", "misses a token", "fetched a token, MB", "on the GPU, GB", "host, GB"]
    return lserve_table(result, "offload", ("offload",), head, cells)


def lserve_chain(result: dict) -> str:
    def cells(row, rows):
        return [spread(row["attention_us_per_layer"]),
                times_as_fast(rows, row, "attention_us_per_layer", name=row["name"], kv_bits=16), percent(row.get("kv_fraction")),
                number(row.get("kv_ratio"), 3)]
    return lserve_table(result, "chain", ("chain-psa", "chain-lserve"), ["us a layer", "x 16 bits", "KV read", "KV, of bf16"], cells)


def lserve_ablation(result: dict) -> str:
    def cells(row, rows):
        return [spread(row["attention_us_per_layer"]), times_as_fast(rows, row, "attention_us_per_layer", name="ablation-dense"),
                percent(row.get("kv_fraction")), number(row.get("kv_ratio"), 3)]
    names = [name for name in LSERVE if name.startswith("ablation-")]
    return lserve_table(result, "ablation", names, ["us a layer", "x everything", "KV read of other heads", "KV, of bf16"], cells)


def lserve_selection(result: dict, group: str) -> str:
    """What selecting costs: of the rows "reuse" or "pages"."""
    def cells(row, rows):
        alone = row.get("kernels_us") or {}
        both = [alone.get(name) for name in ("rank_kernel", "select_kernel")]
        mine, once = (value(row, "selector_us_per_layer"), smallest(rows, row, "selector_us_per_layer", name=group, reuse=1))
        return [f"{row['logical_size']} of {row['block_size']}", spread(row["attention_us_per_layer"]), number(mine, 2),
                number(mine / once if group == "reuse" and mine is not None and once else None, 2), *(number(us) for us in both),
                percent(row.get("selected")), percent(row.get("kv_fraction"))]
    head = ["pages, tokens", "us a layer", "selecting, us", "of at every token", "rank kernel, us", "select kernel, us",
            "tokens that select", "KV read"]
    return lserve_table(result, group, (group,), head, cells)


def lserve_reuse(result: dict) -> str:
    return lserve_selection(result, "reuse")


def lserve_pages(result: dict) -> str:
    return lserve_selection(result, "pages")


def lserve_check(result: dict) -> str:
    """What the check of the benchmark found, before anything was timed."""
    found = result.get("check")
    if not found:
        return "The correctness check of this benchmark was skipped in these runs."
    yes = {True: "yes", False: "no"}
    out = [[name, yes[entry["equal"]], "failed: " + " ".join(entry["error"].split())[:60], *[EMPTY] * 3] if "error" in entry else
           [name, yes[entry["equal"]], yes[entry["captured_equals_eager"]], yes[entry["captured"]], f"{entry['from_cpu']:.1e}",
            f"{entry['from_dense']:.1e}"] for name, entry in found.items()]
    return table(["settings", "as it should be", "captured tokens = eager tokens", "captured", "logits from the CPU reference",
                  "logits from dense"], out)


PROMPT_ATTENTION = {  # rows of benchmarks.prefill_kernel
    "dense": "all heads, SDPA",
    "dense_half": "half of the heads, SDPA",
    "kernel": "half of the heads, streaming, the kernel",
    "layer": "all heads, half of them streaming",
    "chunk": "last queries, SDPA",
    "chunk_kernel": "last queries, the kernel",
}


def prompt_attention(result: dict) -> str:
    """Attention of a prompt in one layer; of each way, the fastest tile."""
    best: dict[tuple, dict] = {}
    for row in result["rows"]:
        key = (row["context"], list(PROMPT_ATTENTION).index(row["name"]), row.get("window", 0), row.get("streaming", ""))
        if key not in best or row["ms"]["median"] < best[key]["ms"]["median"]:
            best[key] = row
    out = []
    for _, row in sorted(best.items()):
        tile, dense = row.get("tile"), best[row["context"], 0, 0, ""]
        half = row["name"] in ("dense_half", "kernel")
        base = best.get((row["context"], list(PROMPT_ATTENTION).index("chunk"), 0, "")) if "chunk" in row["name"] else dense
        shown = EMPTY if tile is None else "{queries} x {keys}, {warps} warps, {stages} stages".format(**tile)
        if tile and tile["descriptors"]:
            shown += ", TMA"
        name = PROMPT_ATTENTION[row["name"]] + (f" ({row['streaming']})" if "streaming" in row else "")
        out.append([name, str(row["context"]), str(row.get("queries", row["context"])), str(row.get("window", EMPTY)),
                    spread(row["ms"], 2), number(row["tflop_s"], 0),
                    EMPTY if half else number(base["ms"]["median"] / row["ms"]["median"], 2), shown, row["run_id"]])
    return table(["what", "context", "queries", "window", "ms", "TFLOP/s", "x SDPA", "tile", "run"], out)


SECTIONS: dict[str, Callable[[dict], str]] = {
    "lserve-goals": lserve_goals, "lserve-prefill": lserve_prefill, "lserve-decode": lserve_decode, "lserve-chain": lserve_chain,
    "lserve-offload": lserve_offload, "lserve-ablation": lserve_ablation, "lserve-reuse": lserve_reuse,
    "lserve-pages": lserve_pages, "lserve-check": lserve_check,
}
