"""Write the settings table of docs/guide.md from the docstring and the defaults of PSAConfig.

    python -m docs.settings            # from the repository's root
    python -m docs.settings --check    # exit with 1 if the guide is not up to date
"""
from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys
from collections.abc import Sequence

from benchmarks.tables import between, table
from hf_sparse import PSAConfig

GUIDE = pathlib.Path(__file__).resolve().parent / "guide.md"


def described(docstring: str) -> dict[str, str]:
    """Field name -> its text in the `Args:` section; `a, b: text` describes both, and appears under "a, b"."""
    lines = inspect.cleandoc(docstring).split("Args:\n", 1)[1].splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        start = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if start:
            name = start.group(1)
            found[name] = start.group(2)
        elif line.startswith(" " * 8) and name:
            found[name] += " " + line.strip()
        elif line.strip():
            break                                           # the next section
    return found


def render() -> str:
    """The table: every field of PSAConfig in the order of the docstring, its default, and what it says of it."""
    defaults = {field.name: field.default for field in dataclasses.fields(PSAConfig)}
    rows = []
    for names, text in described(PSAConfig.__doc__).items():
        fields = names.split(", ")
        values = ", ".join(f"`{_written(defaults[name])}`" for name in fields)
        rows.append([", ".join(f"`{name}`" for name in fields), values, text.replace("|", "\\|")])
    return table(["setting", "default", "what it does"], rows, 3)


def _written(value) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main(argv: Sequence[str] | None = None) -> int:
    check = "--check" in (sys.argv[1:] if argv is None else argv)
    before = GUIDE.read_text(encoding="utf-8")
    after = between(before, "settings", render(), GUIDE.name)
    if check:
        if before != after:
            print("docs/guide.md does not list the settings as they are: run python -m docs.settings", file=sys.stderr)
        return int(before != after)
    GUIDE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
