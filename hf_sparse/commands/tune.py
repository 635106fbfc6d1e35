"""`hf-sparse tune`: the smallest threshold that keeps a model's answers, written as a psa_config.json."""
from __future__ import annotations

import argparse
import pathlib
import sys

from .common import CommandError, add_config_arguments, add_context_arguments, add_model_arguments, load_model, positive, read_config
from .evaluate import Line, lengths, read_text


def add_parser(verbs) -> None:
    parser = verbs.add_parser("tune", help="choose the threshold for a model and write its psa_config.json")
    add_model_arguments(parser)
    parser.add_argument("--length", type=lengths, default=[4096], metavar="TOKENS",
                        help="of each context; several are separated by commas, and the worst counts")
    parser.add_argument("--samples", type=positive, default=6, metavar="N", help="contexts a task (8 needles each)")
    add_context_arguments(parser, seed=1000)
    parser.add_argument("--out", metavar="DIR", help="where psa_config.json goes (default: the model's directory)")
    parser.add_argument("--cells", metavar="FILE", help="JSON lines of what was measured; a run that was stopped goes on there")
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    out = pathlib.Path(args.out or args.model)
    if not args.out and not out.is_dir():
        raise CommandError(f"{args.model!r} is no directory that a psa_config.json could be written to; give --out DIR")
    config = read_config(args)
    if args.threshold is not None or any(pair.partition("=")[0].strip() == "threshold" for pair in args.pairs):
        raise CommandError("tune chooses the threshold; leave out the one given")
    if args.policy not in (None, "threshold"):
        raise CommandError(f"--policy {args.policy} has no threshold to choose; leave it out")
    if min(args.length) < config.min_context:
        raise CommandError(f"--length {min(args.length)} is below min_context={config.min_context}, up to which attention is dense "
                           "whatever the threshold; lengthen it, or lower that with --set min_context=TOKENS")

    from ..config import CONFIG_NAME
    from ..evaluation import tune
    from ..evaluation.cells import CellFile, model_id
    from ..evaluation.decoding import DenseDecodeError
    from ..evaluation.grid import run_grid
    from ..evaluation.policies import unbounded
    from ..evaluation.samples import Haystack
    from ..evaluation.table import format_table
    from ..evaluation.work import check_lengths, task_work

    try:
        candidates = tune.policies(config)
    except ValueError as error:
        raise CommandError(str(error)) from error
    model, tokenizer = load_model(args)
    try:
        work = task_work(tune.TASKS, args.length, Haystack(read_text(args.text), tokenizer), args.samples, args.seed)
        check_lengths(model, work)
        cells = CellFile(args.cells, model_id(model), {"name": pathlib.Path(args.model).name})
        run_grid(model, tokenizer, work, candidates, cells, args.prefill_chunk, progress=None if args.quiet else Line())
    except DenseDecodeError as error:
        print(f"hf-sparse tune: nothing was measured: {error}", file=sys.stderr)
        return 1
    except (FileNotFoundError, FloatingPointError, ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from error
    places = {(sample.task, length, sample.seed) for length, sample in work}
    found = tune.trials([cell for cell in cells.cells.values() if cell.place[1:] in places], candidates)
    print(format_table(("threshold", "mean KL", "needles, relative to dense", "KV read", ""), [
        (f"{trial.threshold:g}", f"{trial.kl_mean:.5f}", "-" if trial.relative is None else f"{trial.relative:.3f}",
         f"{trial.kv_fraction:.3f}", "" if trial.good else "not enough") for trial in found]))
    best = tune.choose(found)
    if best is None:
        print(f"hf-sparse tune: no threshold keeps the mean KL at {tune.MOST_KL} and {tune.LEAST_RELATIVE:.0%} of the needles; "
              "nothing was written", file=sys.stderr)
        return 1
    try:
        config.replace(threshold=best.threshold, **unbounded(config)).save_pretrained(out)
    except OSError as error:
        raise CommandError(f"{CONFIG_NAME} can't be written to {str(out)!r}: {error}") from error
    print(f"\nthreshold {best.threshold:g} written to {out / CONFIG_NAME}; use it with "
          f"PSAConfig.from_pretrained({str(out)!r}) or --config {out}")
    return 0
