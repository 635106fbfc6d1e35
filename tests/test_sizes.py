"""Byte sizes as text."""

from __future__ import annotations

import random

import pytest

from hf_sparse.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2MB", 2_000_000),
        ("2 MiB", 2 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("4GB", 4 * 10**9),
        ("4gib", 4 * 2**30),
        (" 4 GiB ", 4 * 2**30),
        ("2TiB", 2 * 2**40),
        ("0.5TB", 5 * 10**11),
    ],
)
def test_parse(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 G", "4GiBs", "-4GiB", "1e9", "4,5GiB", "four GiB", "0x10", "inf", "nan", "4 GiB 3"]
)
def test_unparsable(text):
    with pytest.raises(ValueError, match="gpu_memory=.*is not a size.*'4GiB'"):
        parse_bytes(text, "gpu_memory")


def test_negative():
    with pytest.raises(ValueError, match="host_memory must not be negative, got -1"):
        parse_bytes(-1, "host_memory")


@pytest.mark.parametrize("value", [None, 1.5, True, b"4GiB", [4]], ids=repr)
def test_wrong_type(value):
    with pytest.raises(TypeError, match="gpu_memory must be an int .* or a string"):
        parse_bytes(value, "gpu_memory")


def test_format_is_never_less_than_the_size():
    """An error that names a sufficient size must stay right when its text is copied into the setting."""
    rng = random.Random(0)
    sizes = [0, 1, 1023, 1024, 1025, 2**20 - 1, 2**20, 2**30 - 1, 2**30, 2**40] + [
        rng.randrange(2 ** rng.randint(1, 45)) for _ in range(3000)
    ]
    for size in sizes:
        text = format_bytes(size)
        assert size <= parse_bytes(text) <= size * 1.011 + 1, text
