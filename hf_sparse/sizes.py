"""Byte sizes as people write them."""
from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str, name: str = "size") -> int:
    """`4096`, `"4GiB"`, `"512 MB"` -> bytes.

    Raises:
        ValueError: the string does not parse, or the size is negative.
        TypeError: neither an int nor a string.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name} must be an int (bytes) or a string such as '4GiB', got {type(value).__name__}.")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}.")
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match.group(2).upper() not in _UNITS:
        raise ValueError(f"{name}={value!r} is not a size. Write bytes as an int, or a number with one of "
                         "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, for example '4GiB'.")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def format_bytes(n: int) -> str:
    """Bytes -> `"1.5GiB"`, rounded up so that the text, parsed again, is never less than `n`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{-(-n * 100 // size) / 100:.2f}{unit}"
    return f"{n}B"
