"""Tables that DuoAttention (arXiv 2410.10819) has trained: full_attention_heads.tsv."""
from __future__ import annotations

import json
import os
import pathlib

import torch
from torch import Tensor

TABLE_NAME = "full_attention_heads.tsv"
# Training saves gates after a step and before it clips them, so that they lie a little outside of [0, 1].
MARGIN = 0.1


def read_table(path: str | os.PathLike) -> tuple[Tensor, dict]:
    """Read a table and what stands beside it.

    Args:
        path: a .tsv file, or the directory that holds full_attention_heads.tsv.

    Returns:
        (gates [layers, KV heads] fp32, clipped to [0, 1]; method, and sink, window and trained_on as far as they are known)

    Raises:
        FileNotFoundError: no such table. ValueError: not a table of gates.
    """
    file = pathlib.Path(path)
    file = file / TABLE_NAME if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"There is no table of DuoAttention's at {str(file)!r}.")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not text, so it is no table of DuoAttention's.") from error
    rows = [_row(line, f"{str(file)!r}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{str(file)!r} holds no gates.")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{str(file)!r} has rows of {min(map(len, rows))} to {max(map(len, rows))} gates; all must have as "
                         "many as the model has KV heads.")
    return torch.tensor(rows).clamp(0, 1), {"method": "duo_attention", **_training(file.with_name("config.json"))}


def _row(line: str, where: str) -> list[float]:
    try:
        row = [float(text) for text in line.split("\t")]
    except ValueError:
        raise ValueError(f"{where}: {line[:60]!r} is not a row of numbers between tabs.") from None
    for value in row:
        if not -MARGIN <= value <= 1 + MARGIN:              # nor NaN
            raise ValueError(f"{where}: {value} is no gate; gates lie in [0, 1].")
    return row


def _training(file: pathlib.Path) -> dict:
    """What DuoAttention's config.json says of how the gates were trained."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r}, beside a table of DuoAttention's, is not JSON: {error}.") from error
    names = {"sink_size": "sink", "recent_size": "window", "model_name": "trained_on"}
    found = {new: values[old] for old, new in names.items() if isinstance(values, dict) and values.get(old) is not None}
    if "trained_on" in found:
        found["trained_on"] = str(found["trained_on"]).replace("\\", "/").rsplit("/", 1)[-1]
    return found
