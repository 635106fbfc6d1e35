"""`hf-sparse VERB ...`

Exit status: 0 done, 1 an evaluation that measured nothing sparse, 2 bad arguments or input, 130 interrupted, 141 output
that nobody reads any more.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from . import env, evaluate, generate, heads, tune
from .common import CommandError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-sparse", description="Progressive sparse attention for transformers.")
    parser.add_argument("--version", action="version", version=f"hf-sparse {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in (env, generate, evaluate, tune, heads):
        module.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status. argparse itself exits with 2 on arguments it can't read."""
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:                                 # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())       # or Python fails to flush it at its end
        return 141
    except CommandError as error:
        print(f"hf-sparse {args.verb}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
