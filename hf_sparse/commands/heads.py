"""`hf-sparse heads`: which KV heads of a model may stream, written as a profile."""
from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
import time

from .common import CommandError, add_context_arguments, add_model_arguments, load_model, positive
from .evaluate import clock, read_text

WIDTH = 30


def add_parser(verbs) -> None:
    parser = verbs.add_parser("heads", help="measure which KV heads do without the whole context, and write a profile of them")
    add_model_arguments(parser)
    parser.add_argument("--length", type=positive, default=8192, metavar="TOKENS", help="of each text (default: 8192)")
    parser.add_argument("--samples", type=positive, default=1, metavar="N", help="texts that are averaged (default: 1)")
    # As in heads.left_out, which costs an import of torch.
    parser.add_argument("--method", choices=("mass", "output"), default="mass",
                        help="measure attention mass outside of sink and window, or the error of the output without it")
    parser.add_argument("--sink", type=int, default=128, metavar="TOKENS", help="at the start that streaming heads read")
    parser.add_argument("--window", type=positive, default=256, metavar="TOKENS", help="newest ones that they read")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--sparsity", type=float, help="share of the heads that stream, lowest gates first (default: 0.5)")
    choice.add_argument("--threshold", type=float, help="heads whose gate is below it stream")
    add_context_arguments(parser, seed=0)
    parser.add_argument("--out", metavar="DIR", help="where the profile goes (default: the model's directory)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    out = pathlib.Path(args.out or args.model)
    if not args.out and not out.is_dir():
        raise CommandError(f"{args.model!r} is no directory that a profile could be written to; give --out DIR")
    choice = {"threshold": args.threshold} if args.threshold is not None else \
        {"sparsity": 0.5 if args.sparsity is None else args.sparsity}
    for name, value in choice.items():
        if not 0 <= value <= 1:
            raise CommandError(f"--{name} {value}: must be in [0, 1]")

    from ..evaluation.samples import Haystack
    from ..evaluation.work import check_ids
    from ..heads.calibrate import calibrate_heads

    model, tokenizer = load_model(args)
    chunk = {} if args.prefill_chunk is None else {"chunk": args.prefill_chunk}
    try:
        haystack = Haystack(read_text(args.text), tokenizer)
        texts = [haystack.plain(args.length, args.seed + i) for i in range(args.samples)]
        check_ids(model, itertools.chain(*texts))
        profile = calibrate_heads(model, texts, method=args.method, sink=args.sink, window=args.window,
                                  progress=None if args.quiet else Bar(), **chunk)
    except (FileNotFoundError, FloatingPointError, ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from error
    streaming = profile.settings(**choice)["streaming_heads"]
    print(heads_table(profile, streaming))
    try:
        file = profile.save(out)
    except OSError as error:
        raise CommandError(f"the profile can't be written to {str(out)!r}: {error}") from error
    (name, value), = choice.items()
    print(f"\n{len(streaming)} of {profile.gates.numel()} heads (*) stream at {name} {value:g}. All gates written to {file}; "
          f"use them with patch_model(model, **HeadProfile.load({str(file)!r}).settings({name}={value:g}))")
    return 0


def heads_table(profile, streaming) -> str:
    """A line a layer: how many of its heads stream, and the gates of all, with a star where they do."""
    from ..evaluation.table import format_table

    chosen = set(streaming)
    rows = []
    for layer, gates in zip(profile.layers, profile.gates.tolist()):
        stars = [(layer, head) in chosen for head in range(len(gates))]
        marked = [f"{gate:.3f}{'*' if star else ' '}" for gate, star in zip(gates, stars)]
        rows.append((str(layer), str(sum(stars)), " ".join(marked)))
    return format_table(("layer", "streaming", "gates"), rows)


class Bar:
    """Progress as one line on standard error, rewritten on a terminal."""

    def __init__(self):
        self.rewrite, self.begin = sys.stderr.isatty(), time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        bar = "#" * (WIDTH * done // total)
        left = (time.monotonic() - self.begin) * (total - done) / done
        text = f"[{bar:<{WIDTH}}] {done} of {total} tokens, {clock(left)} to go"
        if self.rewrite:
            print(f"\r{text:<80}", end="" if done < total else "\n", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr)
