"""Writes the support table of the README from the records of a sweep."""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.families.classify import OUTCOMES, Record

START, END = "<!-- families:start -->", "<!-- families:end -->"


def render(records: list[Record]) -> str:
    """A markdown table: one row per outcome that occurs, with its families."""
    tested = [record for record in records if record.outcome != "unbuildable"]
    lines = [
        f"{len(tested)} of the {len(records)} causal language model families of transformers "
        f"{transformers.__version__},",
        "each as a tiny random model: a left-padded batch of three, greedy, against the unpatched model.",
        "",
        "| outcome | families | |",
        "|---|---|---|",
    ]
    for outcome, meaning in OUTCOMES.items():
        names = sorted(record.family for record in records if record.outcome == outcome)
        if names:
            lines.append(f"| {meaning} | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines)


def write(records: list[Record], path: Path) -> None:
    """Replaces what stands between the markers in `path`. Raises ValueError if they are not there."""
    text = path.read_text()
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{path} needs one line {START} and, after it, one line {END}")
    head, tail = text.split(START)[0], text.split(END)[1]
    path.write_text(f"{head}{START}\n{render(records)}\n{END}{tail}")
