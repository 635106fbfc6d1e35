"""`hf-sparse eval`: what sparse decoding reads and loses, against dense attention, for one policy or many."""
from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import sys

from .. import __version__
from .common import CommandError, add_config_arguments, add_context_arguments, add_model_arguments, load_model, positive, read_config

# As in evaluation.tasks, which costs an import of torch.
TASKS = ("passkey", "needles", "copy", "kl", "multi_value", "variable_tracking", "common_words")
DEFAULT_TASKS = ("passkey", "needles", "copy", "kl")
SPREAD = "oracle@0.95"


def add_parser(verbs) -> None:
    # --policy has a meaning of its own here.
    parser = verbs.add_parser("eval", help="compare sparse with dense answers on long contexts", conflict_handler="resolve")
    add_config_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--task", metavar="NAMES",
                        help=f"comma-separated, of {', '.join(TASKS)} (default: {','.join(DEFAULT_TASKS)}; none with --file)")
    parser.add_argument("--file", metavar="FORMAT:PATH", action="append", default=[],
                        help="dataset files, longbench:PATH or ruler:PATH; may be repeated")
    parser.add_argument("--length", type=lengths, default=[4096], metavar="TOKENS",
                        help="of each context; several are separated by commas")
    parser.add_argument("--samples", type=positive, metavar="N", help="contexts a task (default: 10; of files: all)")
    parser.add_argument("--policy", default="psa", metavar="NAMES",
                        help="comma-separated: psa, psa@0.9, topk@0.1/cuboid_mean, quest@0.3, lserve@4096, topp@0.9, "
                             "oracle@0.9, psa/window ... (default: psa, as the settings below say)")
    parser.add_argument("--heads", metavar="FILE",
                        help="profile of the model's heads, by hf-sparse heads: says which stream in policies with streaming=SHARE")
    parser.add_argument("--real", action="store_true",
                        help="decode with the cache's own sparse step instead of computing what it would read (slower)")
    add_context_arguments(parser, seed=0)
    parser.add_argument("--out", metavar="FILE", help="JSON lines, one a finished cell; a run that was stopped goes on there")
    parser.add_argument("--json", metavar="FILE", help="write the table's rows there")
    parser.add_argument("--plot", metavar="FILE", help="draw fidelity against what was read (needs matplotlib)")
    parser.add_argument("--map", metavar="FILE", help="draw right needles by depth and length, of the first policy")
    parser.add_argument("--blocks", metavar="FILE", help="draw how many blocks hold 95 %% of the mass, layer by layer")
    parser.add_argument("--layers", action="store_true", help="print what each layer read and gathered, for every policy")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    tasks = read_tasks(args.task, bool(args.file))
    for option in ("blocks", "layers") if args.real else ():
        if getattr(args, option):
            raise CommandError(f"--{option} shows what only a simulation knows; leave it out, or leave out --real")
    names, args.policy = args.policy, None
    config = read_config(args)
    for option in ("out", "json", "plot", "map", "blocks"):
        path = getattr(args, option)
        if path and not pathlib.Path(path).resolve().parent.is_dir():
            raise CommandError(f"--{option} {path}: there is no such directory to write to")
        if path and pathlib.Path(path).is_dir():
            raise CommandError(f"--{option} {path}: that is a directory; give a file's name")

    from ..evaluation import plots
    from ..evaluation.cells import CellFile, model_id
    from ..evaluation.decoding import DenseDecodeError, can_skip
    from ..evaluation.grid import run_grid
    from ..evaluation.policies import parse_policies, with_heads
    from ..evaluation.samples import Haystack
    from ..evaluation.summary import is_dense, layers_table, rows, rows_table
    from ..evaluation.work import check_lengths, file_work, task_work

    try:
        policies = parse_policies(names, config)
        if args.blocks:
            policies += [policy for policy in parse_policies(SPREAD, config) if policy not in policies]
        if args.heads and not any(policy.streaming for policy in policies):
            raise ValueError(f"--heads {args.heads}: no policy has streaming=SHARE, which the profile is for")
        drawn = [path for path in (args.plot, args.map, args.blocks) if path]
        if drawn:
            plots.check(*drawn)
    except (ImportError, ValueError) as error:
        raise CommandError(str(error)) from error
    model, tokenizer = load_model(args)
    cells = None
    try:
        heads = read_heads(args.heads, model)
        with_heads(policies, heads)                         # before anything is computed
        work = file_work(args.file, tokenizer, args.length, args.samples)
        if tasks:
            haystack = Haystack(read_text(args.text), tokenizer)
            work = task_work(tasks, args.length, haystack, args.samples or 10, args.seed) + work
        check_lengths(model, work)
        about = {"name": pathlib.Path(args.model).name, "config": config.to_dict(), "versions": versions()}
        cells = CellFile(args.out, model_id(model), about)
        run_grid(model, tokenizer, work, policies, cells, args.prefill_chunk, simulated=not args.real,
                 progress=None if args.quiet else Line(), heads=heads)
    except DenseDecodeError as error:
        print(f"hf-sparse eval: nothing was measured: {error}", file=sys.stderr)
        return 1
    except (FileNotFoundError, FloatingPointError, ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        if args.out:
            print(f"\nhf-sparse eval: stopped; {args.out} holds {len(cells.cells) if cells else 0} finished cells, and the "
                  "same command goes on from there", file=sys.stderr)
        raise
    # Of a file that holds more, what was asked for.
    wanted = {(policy.name, sample.task, length, sample.seed) for policy in policies for length, sample in work}
    places = {place[1:] for place in wanted}
    shown = [cell for cell in cells.cells.values() if cell.place in wanted or is_dense(cell) and cell.place[1:] in places]
    found = rows(shown)
    skipping = {policy.name for policy in policies if can_skip(policy.config)}
    if skipping and all(row.kv_fraction == 1.0 for row in found if row.policy in skipping):
        print("hf-sparse eval: nothing was measured: all blocks were read although policies may skip some. Lengthen the "
              "context, or lower the threshold, min_blocks or block_size.", file=sys.stderr)
        return 1
    print(rows_table(found))
    if args.json:
        result = {"model": about["name"], "dtype": str(model.dtype).removeprefix("torch."), "config": config.to_dict(),
                  "versions": about["versions"], "rows": [row.to_dict() for row in found]}
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    try:
        for policy in policies if args.layers else ():
            print("\n" + layers_table(shown, policy.name))
        if args.plot:
            plots.pareto(found, args.plot)
        if args.map:
            plots.needle_map(shown, policies[0].name, args.map)
        if args.blocks:
            plots.blocks_needed(shown, SPREAD, args.blocks)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return 0


def read_text(path: str | None) -> list[str]:
    from ..evaluation.text import load_paragraphs

    try:
        return load_paragraphs(path)
    except RuntimeError as error:                           # a Python without its documentation
        raise CommandError(str(error)) from error


def read_heads(path: str | None, model):
    """The profile of a file, which must be one of this model; None for None."""
    if path is None:
        return None
    from ..heads.profile import HeadProfile

    profile = HeadProfile.load(path)
    profile.check(model.config)
    return profile


class Line:
    """Progress as one line on standard error, rewritten on a terminal."""

    def __init__(self):
        self.rewrite = sys.stderr.isatty()

    def __call__(self, step) -> None:
        left = "" if step.remaining is None else f", {clock(step.remaining)} to go"
        where = f"{step.task}, {step.length} tokens, seed {step.seed}, {step.policy}"
        text = f"cell {step.done + 1} of {step.total}{left} ({where})"
        if self.rewrite:
            print(f"\r{text:<110}", end="" if step.done + 1 < step.total else "\n", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr)


def clock(seconds: float) -> str:
    """72 -> "1:12"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def versions() -> dict:
    return {"hf_sparse": __version__, **{name: importlib.metadata.version(name) for name in ("torch", "transformers")}}


def lengths(text: str) -> list[int]:
    """argparse type: "4096,8192" -> [4096, 8192]."""
    return [positive(part) for part in text.split(",")]


def read_tasks(text: str | None, files: bool) -> list[str]:
    """"passkey,kl" -> ["passkey", "kl"], each once; the default where nothing is given, none where there are files instead.

    Raises:
        CommandError: an unknown task, or none.
    """
    if text is None:
        return [] if files else list(DEFAULT_TASKS)
    tasks = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in tasks if name not in TASKS]
    if unknown or not tasks:
        what = f"there is no task {unknown[0]!r}" if unknown else "no task given"
        raise CommandError(f"--task: {what}; choose from {', '.join(TASKS)}")
    return list(dict.fromkeys(tasks))
