"""Write the measured tables of docs/fidelity.md from benchmarks/results/fidelity.json.

    python -m benchmarks.fidelity_report            # rewrite what stands between the markers
    python -m benchmarks.fidelity_report --check    # exit with 1 if the document is not what the results say

Needs neither torch nor a GPU.
"""
from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence

from benchmarks.report import HERE
from benchmarks.tables import EMPTY, between, number, table

DOCUMENT = HERE.parent / "docs" / "fidelity.md"
RESULT = "fidelity.json"
NONE_YET = "Not measured yet: run `python -m benchmarks.fidelity`, then `python -m benchmarks.fidelity_report`."
DEFAULT = "psa"                                             # the policy of the library's defaults
LEAST_RELATIVE = 0.98
# What of LServe is judged by the needles it keeps, with every block read.
PARTS = (("dense/kv_bits=8", "8-bit keys and values", 0.99), ("dense/kv_bits=4", "4-bit keys and values", 0.97),
         ("dense/streaming=0.25", "a quarter of the KV heads streaming", 0.98), ("dense/streaming=0.5", "half of them streaming", 0.98))
LONG = 30000                                                # tokens: contexts beyond it stand for the longest ones


def latest(rows: Iterable[dict]) -> list[dict]:
    """The last row of every model, task, length and policy."""
    return list({(row["model"], row["task"], row["length"], row["policy"]): row for row in rows}.values())


def is_psa(row: dict) -> bool:
    """A threshold on the default digest's own estimates, with nothing else changed and no bounds."""
    return row["policy"].startswith(f"{DEFAULT}@") and "/" not in row["policy"]


def is_bounded_psa(row: dict) -> bool:
    """A threshold, with or without bounds on the number of blocks."""
    name, *changes = row["policy"].replace("@", "/@").split("/")
    return name == DEFAULT and all(change.startswith(("@", "min_blocks=", "max_blocks=")) for change in changes)


def is_top_k(row: dict) -> bool:
    """A fixed number of blocks, ranked by the default digest."""
    return row["policy"].startswith("topk@") and "/" not in row["policy"]


def is_cuboid_top_k(row: dict) -> bool:
    return row["policy"].startswith("arkvale@") and "/" not in row["policy"]


def cheapest(rows: Iterable[dict], task: str, length: int, kind: Callable[[dict], bool],
             field: str = "kv_fraction") -> dict | None:
    """The row that reads least of those which keep 98 % of dense accuracy."""
    good = [row for row in rows if row["task"] == task and row["length"] == length and kind(row)
            and row["able"] and row["relative"] is not None and row["relative"] >= LEAST_RELATIVE]
    return min(good, key=lambda row: row[field], default=None)


def percent(value: float | None, digits: int = 1) -> str:
    return EMPTY if value is None else f"{value:.{digits}%}"


def accuracy(row: dict) -> str:
    """"0.985 (0.957-0.997)" """
    if row["low"] is None:
        return number(row["accuracy"], 3)
    return f"{row['accuracy']:.3f} ({row['low']:.3f}-{row['high']:.3f})"


# -- tables -----------------------------------------------------------------------------------------------------------
def goals_table(result: dict) -> str:
    """What the project set out to show, and what was found."""
    rows = latest(result["rows"])
    out = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        long = max((row["length"] for row in mine if row["length"] > LONG), default=None)
        for length, goal in ((8192, 0.10), (long, 0.05)):
            psa, arkvale = (cheapest(mine, "needles", length, kind) for kind in (is_bounded_psa, is_cuboid_top_k))
            if psa is None and any(row["length"] == length and row["task"] == "needles" for row in mine):
                out.append([model, f"KV blocks read at 98 % of dense needle accuracy, {length}", f"<= {goal:.0%}",
                            "no setting that was tried keeps 98 %", mark(False)])
            if psa is not None:
                out.append([model, f"KV blocks read at 98 % of dense needle accuracy, {length}", f"<= {goal:.0%}",
                            f"{percent(psa['kv_fraction'])} ({psa['policy']})", mark(psa["kv_fraction"] <= goal)])
            if psa is not None and length == 8192:
                out.append([model, "the same, fewer than dense", ">= 8.8 x", f"{1 / psa['kv_fraction']:.1f} x",
                            mark(1 / psa["kv_fraction"] >= 8.8)])
                if arkvale is not None:
                    ratio = arkvale["kv_fraction"] / psa["kv_fraction"]
                    out.append([model, "the same, fewer than top-k with cuboid-mean digests", ">= 4 x",
                                f"{ratio:.1f} x ({arkvale['policy']})", mark(ratio >= 4)])
                least = cheapest(mine, "needles", length, is_bounded_psa, "hbm_fraction")
                out.append([model, f"HBM bytes read, digest included, {length}", "<= 19%", percent(least["hbm_fraction"]),
                            mark(least["hbm_fraction"] <= 0.19)])
        default = [row["kl_mean"] for row in mine if row["policy"] == DEFAULT and row["kl_mean"] is not None]
        if default:
            out.append([model, "mean KL on answers at the default, worst task and length", "<= 0.01", f"{max(default):.4f}",
                        mark(max(default) <= 0.01)])
        short = [row["threshold"] - row["mass_p1"] for row in mine
                 if is_bounded_psa(row) and row["policy"] != DEFAULT and "max_blocks=" not in row["policy"]
                 and row["mass_p1"] is not None]
        if short:
            out.append([model, "1st percentile of the mass gathered below the threshold, worst", "<= 0.02", f"{max(short):.3f}",
                        mark(max(short) <= 0.02)])
        reused = [_over(mine, row, row["policy"].removesuffix("/reuse=4")) for row in mine
                  if row["policy"].startswith(DEFAULT) and row["policy"].endswith("/reuse=4")]
        reused = [ratio for ratio in reused if ratio is not None]
        if reused:
            out.append([model, "selection kept for 4 tokens: KL over that without, worst", "<= 1.5 x", f"{max(reused):.1f} x",
                        mark(max(reused) <= 1.5)])
        for policy, what, goal in PARTS:
            kept = [row for row in mine if row["policy"] == policy and row["task"] == "needles" and row["able"]]
            for row in kept:
                out.append([model, f"needles with {what}, {row['length']}", f">= {goal:.0%} of dense", percent(row["relative"]),
                            mark(row["relative"] >= goal)])
    for length in sorted({row["length"] for row in rows}):
        found = mixed(rows, length)
        if found is not None:
            ratio, psa, worst, kv = found
            out.append(["all", f"one threshold against one top-k, same digest, equal worst mean KL, {length}", ">= 1.5 x fewer",
                        f"{ratio:.2f} x ({psa}: {percent(kv)}, KL {worst:.4f})", mark(ratio >= 1.5)])
    return table(["model", "what", "goal", "found", ""], out, 5)


def mark(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def _over(rows: Sequence[dict], row: dict, base: str) -> float | None:
    """KL of a row over that of policy `base` on the same task and length."""
    for other in rows:
        if (other["policy"], other["task"], other["length"]) == (base, row["task"], row["length"]) and other["kl_mean"]:
            return row["kl_mean"] / other["kl_mean"]
    return None


def mixed(rows: Sequence[dict], length: int) -> tuple[float, str, float, float] | None:
    """At equal worst-case mean KL over models and tasks, the blocks that one top-k setting reads over those of one threshold.

    Top-k settings are interpolated between those measured, in the logarithms of KL and of blocks read.

    Returns:
        (ratio, policy, worst mean KL, mean share of blocks read) of the threshold at which it is largest, or None.
    """
    here = [row for row in rows if row["length"] == length and row["kl_mean"] is not None]
    settings = {kind: _settings(here, kind) for kind in (is_bounded_psa, is_top_k)}
    curve = sorted((worst, kv) for worst, kv in settings[is_top_k].values() if worst > 0)
    best = None
    for policy, (worst, kv) in settings[is_bounded_psa].items():
        needed = _interpolate(curve, worst) if worst > 0 else None
        if needed is not None and (best is None or needed / kv > best[0]):
            best = needed / kv, policy, worst, kv
    return best


def _settings(rows: Sequence[dict], kind: Callable[[dict], bool]) -> dict[str, tuple[float, float]]:
    """Of each policy that was measured everywhere: the largest mean KL, and the mean share of blocks read."""
    chosen = [row for row in rows if kind(row)]
    places = {(row["model"], row["task"]) for row in chosen}
    out = {}
    for policy in dict.fromkeys(row["policy"] for row in chosen):
        mine = [row for row in chosen if row["policy"] == policy]
        if {(row["model"], row["task"]) for row in mine} == places:
            out[policy] = max(row["kl_mean"] for row in mine), sum(row["kv_fraction"] for row in mine) / len(mine)
    return out


def _interpolate(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x between the two points around it, in logarithms; None beyond the curve."""
    for (x0, y0), (x1, y1) in zip(curve, curve[1:]):
        if x0 <= x <= x1:
            share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0)) if x1 > x0 else 0.0
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return None


def threshold_table(result: dict) -> str:
    """What a user gets at which threshold: means over models and tasks that dense attention does, by length."""
    rows = [row for row in latest(result["rows"]) if is_psa(row) and row["able"]]
    out = []
    for length in sorted({row["length"] for row in rows}):
        for threshold in sorted({row["threshold"] for row in rows}):
            mine = [row for row in rows if (row["length"], row["threshold"]) == (length, threshold)]
            if mine:
                mean = lambda field: sum(row[field] for row in mine) / len(mine)  # noqa: E731, B023
                relative = [row["relative"] for row in mine if row["metric"] != "agreement"]
                out.append([f"{threshold:g}", str(length), number(min(relative, default=None), 3), number(mean("kl_mean"), 4),
                            number(max(row["kl_mean"] for row in mine), 4), percent(mean("kv_fraction")),
                            percent(mean("hbm_fraction"))])
    return table(["threshold", "context", "least accuracy, relative to dense", "KL, mean", "KL, worst task", "KV read",
                  "HBM read"], out, 1)


def policy_table(result: dict) -> str:
    """Every row: model, task, length and policy."""
    rows = sorted(latest(result["rows"]), key=lambda row: (row["model"], row["length"], row["task"]))
    out = [[row["model"], row["task"] + ("" if row["able"] else " (beyond the model)"), str(row["length"]), row["policy"],
            str(row["questions"]), accuracy(row), number(row["accuracy_dense"], 3), number(row["kl_mean"], 4),
            number(row["kl_worst"], 3), percent(row["kv_fraction"]), percent(row["hbm_fraction"]), number(row["mass_mean"], 3),
            number(row["mass_p1"], 3), row["run_id"]] for row in rows]
    return table(["model", "task", "context", "policy", "questions", "accuracy (95 %)", "dense", "KL, mean", "KL, worst answer",
                  "KV read", "HBM read", "mass", "mass, 1st percentile", "run"], out, 4)


def versions_line(result: dict) -> str:
    """One line for every set of versions that rows were made with."""
    found: dict[str, list[str]] = {}
    for row in latest(result["rows"]):
        text = ", ".join([row["dtype"], *(f"{name} {value}" for name, value in row["versions"].items())])
        runs = found.setdefault(text, [])
        if row["run_id"] not in runs:
            runs.append(row["run_id"])
    return "\n".join(f"- {', '.join(runs)}: {text}" for text, runs in found.items())


SECTIONS: dict[str, Callable[[dict], str]] = {
    "fidelity-goals": goals_table, "fidelity-thresholds": threshold_table, "fidelity-policies": policy_table,
    "fidelity-versions": versions_line,
}


def render(text: str, result: dict | None) -> str:
    """The document with every generated section as the result has it; None: nothing was measured."""
    for name, section in SECTIONS.items():
        text = between(text, name, section(result) if result and result["rows"] else NONE_YET, DOCUMENT.name)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=pathlib.Path, default=HERE / "results" / RESULT)
    parser.add_argument("--document", type=pathlib.Path, default=DOCUMENT)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is not up to date")
    args = parser.parse_args(argv)
    result = json.loads(args.result.read_text(encoding="utf-8")) if args.result.is_file() else None
    before = args.document.read_text(encoding="utf-8")
    after = render(before, result)
    if args.check:
        if after != before:
            print(f"{args.document.name} is not up to date: python -m benchmarks.fidelity_report", file=sys.stderr)
        return int(after != before)
    args.document.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
