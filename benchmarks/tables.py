"""Markdown tables of benchmarks' results: what the reports share. Needs neither torch nor a GPU."""
from __future__ import annotations

from collections.abc import Callable, Sequence

EMPTY = "-"


def between(text: str, name: str, content: str, source: str = "the document") -> str:
    """`text` with what stands between `<!-- name:start -->` and `<!-- name:end -->` replaced.

    Raises:
        ValueError: the two markers are not there exactly once, in this order.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"{source} needs one line {start} and, after it, one line {end}")
    return f"{text[:text.index(start)]}{start}\n{content}\n{text[text.index(end):]}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table; the first `text_columns` columns are aligned to the left, the others to the right."""
    rule = ["---" if column < text_columns else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def number(value: float | None, digits: int = 1) -> str:
    return EMPTY if value is None else f"{value:.{digits}f}"


def spread(value: dict | None, digits: int = 1) -> str:
    """`{"median", "p20", "p80"}` -> "5.88 (5.85-5.94)"."""
    if value is None:
        return EMPTY
    return f"{value['median']:.{digits}f} ({value['p20']:.{digits}f}-{value['p80']:.{digits}f})"


def latest(rows: Sequence[dict], key: Callable[[dict], tuple]) -> list[dict]:
    """The last row of every key: a run that is repeated replaces what it measured before."""
    return list({key(row): row for row in rows}.values())


# -- decoding ------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    return EMPTY if value is None else f"{value:.1%}"
