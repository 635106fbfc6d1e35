"""What sparse decoding loses and reads, for a grid of policies, tasks and lengths: benchmarks/results/fidelity.json.

    python -m benchmarks.fidelity --model DIR --lengths 4096,8192 --policies psa,topk@0.08 --questions 200 --limit-s 500

Policies are simulated on the model's true attention (hf_sparse/evaluation/simulated.py), so that any of them runs at the speed
of a forward. Every finished cell is written at once beside the result (FILE.jsonl), where a later run with the same file goes
on under the same run id; with other versions of anything, it has to be another file.
"""
from __future__ import annotations

import argparse
import ast
import pathlib
import sys
import sysconfig
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.common import results, run_id, versions, write
from hf_sparse import PSAConfig
from hf_sparse.commands.evaluate import read_heads
from hf_sparse.evaluation import Haystack, load_paragraphs
from hf_sparse.evaluation.cells import CellFile, model_id
from hf_sparse.evaluation.grid import Progress, run_grid
from hf_sparse.evaluation.policies import Policy, parse_policies, with_heads
from hf_sparse.evaluation.summary import rows, rows_table
from hf_sparse.evaluation.tasks import TASKS
from hf_sparse.evaluation.work import check_lengths, check_tasks, task_work

POLICIES = ("psa@0.7,psa@0.8,psa,psa@0.9,psa@0.95,psa@0.7/group_stop=min,psa@0.7/min_blocks=0.06,"
            "psa@0.9/min_blocks=0.05/max_blocks=0.16,psa@0.95/min_blocks=0.05/max_blocks=0.12,topk@0.04,topk@0.06,topk@0.08,"
            "topk@0.12,topk@0.16,topk@0.25,"
            "arkvale@0.15,arkvale@0.3,arkvale@0.45,arkvale@0.6,quest@0.3,quest@0.6,lserve@4096,topp@0.9,"
            "psa/cuboid_mean/nleft@0.95,psa/cuboid_mean/window@0.95,psa/cuboid_mean/paper@0.95,psa/cuboid_mean/true@0.9,"
            "psa/key_bits@0.85,oracle@0.85,oracle@0.95,psa/reuse=2,psa/reuse=4")
# LServe's parts on this library's selection, one by one and together, and LServe's own. Streaming heads need --heads.
LSERVE_POLICIES = ("psa,dense/kv_bits=8,dense/kv_bits=4,psa/kv_bits=8,psa/kv_bits=4,dense/streaming=0.25,dense/streaming=0.5,"
                   "psa/streaming=0.25,psa/streaming=0.5,psa/streaming=0.25/kv_bits=8,psa/streaming=0.25/kv_bits=4,"
                   "psa/streaming=0.5/kv_bits=8,psa/streaming=0.5/kv_bits=4,psa/reuse=4,psa/reuse=2,psa/reuse=4/reuse_refresh=0,"
                   "psa/streaming=0.25/kv_bits=8/reuse=4,psa/streaming=0.5/kv_bits=4/reuse=4,"
                   "lserve@4096,lserve@4096/kv_bits=8,lserve@4096/kv_bits=4,lserve@4096/streaming=0.5,"
                   "lserve@4096/streaming=0.5/kv_bits=4,lserve@4096/reuse=4,lserve@4096/streaming=0.5/kv_bits=4/reuse=4")
LISTS = {"default": POLICIES, "lserve": LSERVE_POLICIES}


def paragraphs(path: str | None) -> list[str]:
    """Text from a file or directory, else the default, else the docstrings of the standard library."""
    try:
        return load_paragraphs(path)
    except RuntimeError:                                    # this Python was built without its documentation
        return docstrings()


def docstrings() -> list[str]:
    """Prose of the standard library's docstrings, one paragraph an entry."""
    from hf_sparse.evaluation.text import _prose

    found: dict[str, None] = {}
    for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for raw in (ast.get_docstring(node) or "").split("\n\n"):
                    prose = _prose(raw)
                    if prose:
                        found.setdefault(prose)
    return list(found)


def show(step: Progress) -> None:
    left = "" if step.remaining is None else f", {step.remaining:.0f} s to go"
    where = f"{step.task} {step.length} seed {step.seed} {step.policy}"
    print(f"\r{step.done}/{step.total} cells, {step.elapsed:.0f} s{left}: {where:<60}", end="", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of a model and its tokenizer")
    parser.add_argument("--name", help="what the rows call the model (default: the directory's name)")
    parser.add_argument("--tasks", default="needles,copy,kl,passkey", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--lengths", default="4096", help="context tokens, comma-separated")
    parser.add_argument("--policies", default="default",
                        help=f"see hf_sparse/evaluation/policies.py; or one of the lists {', '.join(LISTS)}")
    parser.add_argument("--heads", help="profile by hf-sparse heads, for policies with streaming=SHARE")
    parser.add_argument("--questions", type=int, default=200, help="at least so many a task and length")
    parser.add_argument("--contexts", type=int, default=70, help="at most so many a task and length, whatever --questions says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", help="text file or directory (default: Python's documentation)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--limit-s", type=float, help="stop by itself after so many seconds, loading included")
    parser.add_argument("--out", default="benchmarks/results/fidelity.json")
    parser.add_argument("--cells", help="cells of this and earlier runs (default: the name of --out with .jsonl)")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)

    out = pathlib.Path(args.out)
    cells_path = pathlib.Path(args.cells) if args.cells else out.with_suffix(".jsonl")
    tasks = list(dict.fromkeys(args.tasks.split(",")))
    try:
        check_tasks(tasks)
        policies: list[Policy] = parse_policies(LISTS.get(args.policies, args.policies), PSAConfig(min_context=0))
        lengths = [int(length) for length in args.lengths.split(",")]
    except ValueError as error:
        parser.error(str(error))
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    try:
        heads = read_heads(args.heads, model)
        with_heads(policies, heads)                         # before anything is computed
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    work = task_work(tasks, lengths, Haystack(paragraphs(args.text), tokenizer), args.contexts, args.seed, args.questions)
    check_lengths(model, work)
    out.parent.mkdir(parents=True, exist_ok=True)
    name = args.name or pathlib.Path(args.model).resolve().name
    cells = CellFile(cells_path, model_id(model), {"name": name, "versions": versions(), "run_id": run_id()})
    if cells.about.get("versions") != versions():
        parser.error(f"{cells_path} was begun with {cells.about.get('versions')}, and this is {versions()}; give another "
                     "--cells")
    deadline = begun + args.limit_s if args.limit_s else None
    try:
        finished = run_grid(model, tokenizer, work, policies, cells, args.prefill_chunk, deadline=deadline,
                            progress=None if args.quiet else show, heads=heads)
    except KeyboardInterrupt:
        finished = False
    if not args.quiet:
        print(file=sys.stderr)
    found = rows(cells.cells.values())
    payload = results(args.out, append=True)
    measured = {(row.task, row.length, row.policy) for row in found}
    payload["rows"] = [row for row in payload["rows"]
                       if row["model"] != name or (row["task"], row["length"], row["policy"]) not in measured]
    about = {"dtype": args.dtype, "run_id": cells.about.get("run_id") or run_id(), "versions": versions()}
    payload["rows"] += [{"model": name, **row.to_dict(), **about} for row in found]
    write(args.out, payload)
    print(rows_table(found))
    how = "finished" if finished else "stopped before the end; the same command goes on"
    print(f"{how} after {time.monotonic() - begun:.0f} s, {len(cells.cells)} cells in {cells_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
