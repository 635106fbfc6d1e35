"""Writes the support table of the README from what a sweep found."""

from __future__ import annotations

from pathlib import Path

from tests.families.classify import OUTCOMES

START, END = "<!-- families:start -->", "<!-- families:end -->"

NO_INTERFACE = "attention does not go through `AttentionInterface`"
# Part of a refusal -> what the table says; the first that fits.
CAUSES = {
    "instead of going through transformers' AttentionInterface": NO_INTERFACE,
    "does not let its attention be chosen": NO_INTERFACE,
    "uses the attention mask for something of its own": "the mask is used for more than attention",
    "which PSACache can't replace": "cache layers of a kind of their own",
    "forward takes no": "no cache that can be passed in",
}
OTHER_CAUSE = "each for a reason that the error names"


def cause(reason: str) -> str:
    """The short form of a refusal."""
    return next((short for part, short in CAUSES.items() if part in reason), OTHER_CAUSE)


def render(found: dict) -> str:
    """A markdown table, one row per outcome and cause, of {"transformers": version, "families": [record]}."""
    records = found["families"]
    tested = [record for record in records if record["outcome"] != "unbuildable"]
    rows: dict[str, list[str]] = {}
    for outcome, meaning in OUTCOMES.items():
        for record in records:
            if record["outcome"] == outcome:
                why = cause(record["reason"]) if outcome == "refused" else meaning
                rows.setdefault(f"{outcome}: {why}", []).append(record["family"])
    lines = [
        f"{len(tested)} of the {len(records)} causal language model families of transformers "
        f"{found['transformers']} as tiny random models,",
        "a left-padded batch of three, greedy, compared with the unpatched model:",
        "",
        "| outcome | | families |",
        "|---|---|---|",
    ]
    return "\n".join(
        lines + [f"| {row} | {len(names)} | {', '.join(sorted(names))} |" for row, names in rows.items()]
    )


def write(found: dict, path: Path) -> None:
    """Replaces what stands between the markers in `path`. Raises ValueError if they are not there."""
    text = path.read_text()
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{path} needs one line {START} and, after it, one line {END}")
    head, tail = text.split(START)[0], text.split(END)[1]
    path.write_text(f"{head}{START}\n{render(found)}\n{END}{tail}")
