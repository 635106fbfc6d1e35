"""Text that facts are hidden in: the user's own files, or the Python documentation that every CPython carries.

Prose only, one paragraph a list entry: code, grammar, tables and headings are left out of the default text, so that a
language model reads it as running text. Nothing is downloaded.
"""
from __future__ import annotations

import os
import pathlib
import re

_RULE = re.compile(r"\s*[*=\-~^\"+#.]{3,}\s*")
_MIN_PARAGRAPH = 80
_MIN_LETTERS = 0.85
_SUFFIXES = (".txt", ".md", ".rst")


def default_paragraphs() -> list[str]:
    """Paragraphs of the Python language reference as shipped in `pydoc_data.topics` (about 40K tokens).

    Raises RuntimeError where the Python build leaves the module out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, which the default evaluation text comes from; "
            "give a text file or a directory of text files instead (--text PATH)"
        ) from error
    # Several topics repeat whole sections of others, and a passage that stands twice is no test of retrieval.
    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        for raw in re.split(r"\n\s*\n", topics[name]):
            prose = _prose(raw)
            if prose:
                paragraphs.setdefault(prose)
    return list(paragraphs)


def load_paragraphs(path: str | os.PathLike | None = None) -> list[str]:
    """Paragraphs of a text file, of every .txt, .md and .rst file below a directory (in sorted order), or the default.

    Raises FileNotFoundError for a path that is not there, ValueError for one without text.
    """
    if path is None:
        return default_paragraphs()
    root = pathlib.Path(path)
    if root.is_dir():
        files = sorted(p for p in root.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not files:
            raise ValueError(f"{root} holds no text file ({', '.join(_SUFFIXES)})")
    elif root.is_file():
        files = [root]
    else:
        raise FileNotFoundError(f"there is no text at {root}: give a text file or a directory of them")
    paragraphs: dict[str, None] = {}
    for file in files:
        for raw in re.split(r"\n\s*\n", file.read_text(encoding="utf-8", errors="replace")):
            joined = " ".join(raw.split())
            if joined:
                paragraphs.setdefault(joined)
    if not paragraphs:
        raise ValueError(f"{root} holds no text")
    return list(paragraphs)


def _prose(raw: str) -> str | None:
    """The paragraph on one line without its markup, or None for anything that is not running text."""
    lines = raw.splitlines()
    if any(_RULE.fullmatch(line) for line in lines) or "::=" in raw or ">>>" in raw:
        return None
    text = re.sub(r"^[*\-•] ", "", " ".join(raw.split())).replace("**", "")
    if len(text) < _MIN_PARAGRAPH or not text[0].isupper() or text[-1] not in ".!?":
        return None
    letters = sum(c.isalpha() or c == " " for c in text)
    return text if letters >= _MIN_LETTERS * len(text) else None
