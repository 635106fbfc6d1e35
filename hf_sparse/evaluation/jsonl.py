"""The user's dataset files: JSON lines, read with errors that name the file, the line and what to do."""
from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Sequence


def files(path: str | os.PathLike) -> list[pathlib.Path]:
    """The file itself, or every .jsonl file below a directory, in sorted order.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a directory without such files.
    """
    root = pathlib.Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"there is no dataset at {root}: give a .jsonl file or a directory of them")
    found = sorted(file for file in root.rglob("*.jsonl") if file.is_file())
    if not found:
        raise ValueError(f"{root} holds no .jsonl file; give the directory that the benchmark's own scripts wrote or that its "
                         "archive unpacks to")
    return found


def records(file: pathlib.Path, texts: Sequence[str], lists: Sequence[str]) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object) of every line that is not empty.

    Args:
        texts: keys that each object must have, with a text.
        lists: keys that each object must have, with a list of texts, at least one.

    Raises:
        ValueError: a line that is not a JSON object, without such a key, or with another type; no line at all.
    """
    lines = 0
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
            if line.strip():
                lines += 1
                yield number, _record(line, f"{file}, line {number}", texts, lists)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}); give the benchmark's own .jsonl file") from error
    if not lines:
        raise ValueError(f"{file} is empty; download or generate it again")


def _record(line: str, where: str, texts: Sequence[str], lists: Sequence[str]) -> dict:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}, column {error.colno}); the file holds one JSON object a line, "
                         "not an array, and may have been cut off") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}, not an object")
    missing = [key for key in (*texts, *lists) if key not in record]
    if missing:
        raise ValueError(f"{where} has no key {missing[0]!r}; every line needs {', '.join((*texts, *lists))}, "
                         f"and this one has {', '.join(record) or 'none'}")
    for key in texts:
        if not isinstance(record[key], str):
            raise ValueError(f"{where}: {key!r} must be a text, got {type(record[key]).__name__}")
    for key in lists:
        value = record[key]
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
            raise ValueError(f"{where}: {key!r} must be a list of texts, at least one, got {json.dumps(value)[:60]}")
    return record
