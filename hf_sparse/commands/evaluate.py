"""`hf-sparse eval`: what sparse decoding does to a model's answers, against dense attention."""
from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import sys

from .. import __version__
from .common import CommandError, add_config_arguments, add_model_arguments, load_model, positive, read_config

TASKS = ("passkey", "needles", "copy", "kl")                # as in evaluation.runner, which costs an import of torch


def add_parser(verbs) -> None:
    parser = verbs.add_parser("eval", help="compare sparse with dense answers on long contexts")
    add_model_arguments(parser)
    parser.add_argument("--task", default=",".join(TASKS), metavar="NAMES",
                        help=f"comma-separated, of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--length", type=positive, default=4096, metavar="TOKENS", help="of each context")
    parser.add_argument("--samples", type=positive, default=10, metavar="N", help="contexts a task")
    parser.add_argument("--seed", type=int, default=0, help="of the first context; the others count up")
    parser.add_argument("--text", metavar="PATH", help="text file or directory (default: Python's documentation)")
    parser.add_argument("--prefill-chunk", type=positive, metavar="TOKENS", help="tokens a prefill forward")
    parser.add_argument("--json", metavar="FILE", help="write everything there, answer by answer")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    tasks = read_tasks(args.task)
    config = read_config(args)
    if args.json and not pathlib.Path(args.json).resolve().parent.is_dir():
        raise CommandError(f"--json {args.json}: there is no such directory to write to")

    from ..evaluation import DenseDecodeError, evaluate

    model, tokenizer = load_model(args)

    def progress(done, total, sample):
        if not args.quiet:
            print(f"context {done + 1} of {total} ({sample.task}, seed {sample.seed})", file=sys.stderr)

    try:
        report = evaluate(model, tokenizer, tasks, args.length, args.samples, config, text=args.text, seed=args.seed,
                          prefill_chunk=args.prefill_chunk, progress=progress)
    except DenseDecodeError as error:
        print(f"hf-sparse eval: nothing was measured: {error}", file=sys.stderr)
        return 1
    except (FileNotFoundError, ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from error
    print(report.table())
    if args.json:
        result = {"model": pathlib.Path(args.model).name, "dtype": str(model.dtype).removeprefix("torch."),
                  "versions": {"hf_sparse": __version__, **{name: importlib.metadata.version(name)
                                                            for name in ("torch", "transformers")}},
                  **report.to_dict()}
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def read_tasks(text: str) -> list[str]:
    """"passkey,kl" -> ["passkey", "kl"], each once.

    Raises:
        CommandError: an unknown task, or none.
    """
    tasks = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in tasks if name not in TASKS]
    if unknown or not tasks:
        what = f"there is no task {unknown[0]!r}" if unknown else "no task given"
        raise CommandError(f"--task: {what}; choose from {', '.join(TASKS)}")
    return list(dict.fromkeys(tasks))
