"""Runs every causal language model family of transformers as a tiny model, and says how it is served.

    python -m tests.families.sweep                          # all families, a line each and a summary
    python -m tests.families.sweep --only llama,gemma3_text
    python -m tests.families.sweep --jobs 2 --json families.json --table README.md

Every family runs in a process of its own with a time and a memory limit, forked from one that has
transformers loaded. The exit status is 1 if any family is wrong or crashes.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import resource
import sys
from multiprocessing.connection import wait
from pathlib import Path

import torch
import transformers

from tests.families.build import family_names
from tests.families.classify import OUTCOMES, Record, classify
from tests.families.table import write

MEMORY_LIMIT_BYTES = 6 << 30
TIME_LIMIT_SECONDS = 120


def _child(family: str, connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    sys.stdout = sys.stderr = open(os.devnull, "w")
    torch.set_num_threads(1)
    connection.send(classify(family).to_dict())
    connection.close()


def _start(family: str):
    context = multiprocessing.get_context(
        "fork"
    )  # the models then need no second import of torch and transformers
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, sender), daemon=True)
    process.start()
    sender.close()
    return family, process, receiver


def _finish(family: str, process, receiver, timed_out: bool) -> Record:
    if timed_out:
        process.kill()
    try:
        record = Record(**receiver.recv())
    except EOFError:
        limit = (
            f"took more than {TIME_LIMIT_SECONDS} s"
            if timed_out
            else f"the process ended with {process.exitcode}"
        )
        record = Record(family, outcome="crash", reason=limit)
    process.join()
    return record


def sweep(families: list[str], jobs: int = 1):
    """Yields one Record per family, as they finish, with at most `jobs` processes at a time."""
    waiting, running = collections.deque(families), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            family, process, receiver = _start(waiting.popleft())
            running[receiver] = (family, process)
        ready = wait(list(running), timeout=TIME_LIMIT_SECONDS)
        for receiver in ready or list(running):
            family, process = running.pop(receiver)
            yield _finish(family, process, receiver, timed_out=not ready)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.families.sweep", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", metavar="A,B", help="only these model types")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the table between the markers in this file"
    )
    options = parser.parse_args(arguments)
    options.families = options.only.split(",") if options.only else family_names()
    unknown = sorted(set(options.families) - set(family_names()))
    if unknown:
        parser.error(
            f"not a causal language model in transformers {transformers.__version__}: {', '.join(unknown)}"
        )
    return options


def write_json(found: dict, path: Path) -> None:
    """One family a line, so that a change shows as one."""
    lines = ",\n".join(json.dumps(record) for record in found["families"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"transformers": "{found["transformers"]}", "families": [\n{lines}\n]}}\n')


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    records = []
    for record in sweep(options.families, options.jobs):
        records.append(record)
        print(f"{record.family:28} {record.outcome:12} {record.reason}", flush=True)
    records.sort(key=lambda record: record.family)
    counts = collections.Counter(record.outcome for record in records)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES), f"of {len(records)}")
    found = {
        "transformers": transformers.__version__,
        "families": [record.to_dict() for record in records],
    }
    if options.json:
        write_json(found, options.json)
    if options.table:
        write(found, options.table)
    return 1 if counts["wrong"] or counts["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
