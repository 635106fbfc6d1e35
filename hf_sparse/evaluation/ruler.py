"""RULER (arXiv 2404.06654) from the .jsonl files that its official scripts generate: answer lengths and metrics as published.

Each line has `input` (context and question, with the model's template if one was chosen), `outputs` and, in files of newer
scripts, `answer_prefix`. What follows the context goes through the sparse decode. Nothing is generated or downloaded.
"""
from __future__ import annotations

import os
import pathlib
import re
from dataclasses import dataclass

from . import jsonl, prompt
from .generated import FreeQuestion
from .samples import Sample


@dataclass(frozen=True)
class Task:
    """How a kind of RULER task is asked and scored.

    Args:
        question: pattern of where the question begins; its last match counts, as there may be an example before.
        max_new_tokens: of an answer.
        metric: a name in `metrics.METRICS`.
    """

    question: str
    max_new_tokens: int
    metric: str = "string_match_all"


# By the first part of a task's name: "niah_single_1" is a niah.
TASKS = {
    "niah": Task(r"\s*What (?:is|are all) the special magic ", 128),
    "vt": Task(r"\s*Question: Find all variables ", 30),
    "cwe": Task(r"\s*Question: What are the ", 120),
    "fwe": Task(r"\s*Question: Do not provide any explanation", 50),
    "qa": Task(r"\s*Answer the question based on the given documents", 32, "string_match_part"),
}


def load(path: str | os.PathLike, tokenizer, length: int) -> list[Sample]:
    """A sample for every line, with one FreeQuestion; its `task` is "ruler/" and the task's name.

    Prompts are taken as they are: RULER never cuts them, and its scripts have put the model's template around them.

    Args:
        path: a .jsonl file, or a directory of them. The task is told from the name of the file's folder, as in
            niah_single_1/validation.jsonl, or of the file, as in niah_single_1.jsonl.
        length: most tokens that a prompt and its answer may take, as in RULER's own max_seq_length.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a malformed file (naming file and line), an unknown task, a prompt without its question, or one that is
            too long.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    samples = []
    for file in jsonl.files(path):
        name = _name(file)
        for number, record in jsonl.records(file, ("input",), ("outputs",)):
            try:
                samples.append(_sample(name, record, number, tokenizer, length))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
    return samples


def _name(file: pathlib.Path) -> str:
    for name in (file.resolve().parent.name, file.stem):
        if name.split("_")[0] in TASKS:
            return name
    raise ValueError(f"{file}: neither the folder nor the file is named after a RULER task; name one of them after it, as in "
                     f"niah_single_1/validation.jsonl (tasks begin with {', '.join(TASKS)})")


def _sample(name: str, record: dict, number: int, tokenizer, length: int) -> Sample:
    task = TASKS[name.split("_")[0]]
    text = record["input"] + record.get("answer_prefix", "")
    found = [match.start() for match in re.finditer(task.question, record["input"])]
    if not found:
        raise ValueError(f"the input holds no question as RULER's task {name!r} asks it; is this the file of another task?")
    context, question = prompt.split(tokenizer, text, text[found[-1]:])
    needed = len(context) + len(question) + task.max_new_tokens
    if needed > length:
        raise ValueError(f"prompt and answer take {needed} tokens of this tokenizer, more than the length of {length}; RULER "
                         "does not cut prompts, so generate the data with this tokenizer and a smaller max_seq_length, or ask "
                         "for a longer length")
    return Sample(f"ruler/{name}", number - 1, context, (FreeQuestion(
        f"line {number}", question, tuple(record["outputs"]), task.metric, task.max_new_tokens),))
