"""What an evaluation has to do: samples of tasks and of dataset files at several lengths, in an order that can be cut short."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from . import longbench, ruler
from .generated import FreeQuestion
from .samples import Haystack, Sample
from .tasks import TASKS

FORMATS = {"longbench": longbench.load, "ruler": ruler.load}


def task_work(tasks: Sequence[str], lengths: Sequence[int], haystack: Haystack, samples: int, seed: int = 0,
              questions: int | None = None) -> list[tuple[int, Sample]]:
    """(length, sample) of generated tasks; those of a length come in turn, so that a run that is cut short has some of each.

    Args:
        samples: contexts a task and length. questions: fewer contexts where these hold so many questions.

    Raises:
        ValueError: an unknown task, a count below 1, a length that the text or the task can't fill.
    """
    check_tasks(tasks)
    for name, values in (("length", lengths), ("samples", [samples]), ("questions", [questions or 1])):
        if min(values, default=0) < 1:
            raise ValueError(f"{name} must be at least 1, got {min(values, default=None)}")
    work: list[tuple[float, int, Sample]] = []
    for length in dict.fromkeys(lengths):
        for task in dict.fromkeys(tasks):
            count = samples
            if questions is not None:
                count = min(samples, -(-questions // len(TASKS[task](haystack, length, seed, 0.5).questions)))
            work += [(index / count, length, TASKS[task](haystack, length, seed + index, (index + 0.5) / count))
                     for index in range(count)]
    work.sort(key=lambda entry: (entry[1], entry[0]))
    return [(length, sample) for _, length, sample in work]


def build_samples(tasks: Sequence[str], haystack: Haystack, length: int, samples: int, seed: int = 0) -> list[Sample]:
    """The samples of `task_work` at one length, those of one seed together."""
    return [sample for _, sample in task_work(tasks, [length], haystack, samples, seed)]


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise ValueError for a task that is not there, or none at all."""
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        what = f"there is no task {unknown[0]!r}" if unknown else "no task given"
        raise ValueError(f"{what}; choose from {', '.join(TASKS)}")


def file_work(files: Sequence[str], tokenizer, lengths: Sequence[int], samples: int | None = None) -> list[tuple[int, Sample]]:
    """(length, sample) of dataset files, "longbench:PATH" or "ruler:PATH", the first `samples` of each task.

    A task's samples are numbered through all files (`seed`), so that those of several files stay apart.

    Raises:
        FileNotFoundError, ValueError: an unknown format, and what `longbench.load` and `ruler.load` raise.
    """
    work = []
    taken: dict[tuple[int, str], int] = {}
    for text in files:
        kind, _, path = text.partition(":")
        if not path or kind not in FORMATS:
            raise ValueError(f"dataset files are given as {' or '.join(f'{name}:PATH' for name in FORMATS)}, got {text!r}")
        for length in dict.fromkeys(lengths):
            for sample in FORMATS[kind](path, tokenizer, length):
                number = taken[length, sample.task] = taken.get((length, sample.task), -1) + 1
                if samples is None or number < samples:
                    work.append((length, dataclasses.replace(sample, seed=number)))
    return work


def check_lengths(model, work: Sequence[tuple[int, Sample]]) -> None:
    """Raise ValueError if a sample with its longest question and answer does not fit the model's context, or its ids its
    vocabulary."""
    check_ids(model, (token for _, sample in work for token in sample.context))
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None:
        return
    for length, sample in work:
        needed = len(sample.context) + max(map(question_tokens, sample.questions))
        if needed > limit:
            raise ValueError(f"task {sample.task} at length {length}: context, question and answer take {needed} tokens but "
                             f"the model's context is {limit}; ask for a length of at most {length - (needed - limit)}")


def check_ids(model, ids: Iterable[int]) -> None:
    """Raise ValueError if the model does not have one of these tokens."""
    known, largest = model.get_input_embeddings().weight.shape[0], max(ids, default=0)
    if largest >= known:
        raise ValueError(f"the tokenizer gives token {largest}, but the model knows tokens 0 to {known - 1}; use the tokenizer "
                         "that it was trained with")


def question_tokens(question) -> int:
    """Most tokens that a question and its answer take."""
    return question.tokens if isinstance(question, FreeQuestion) else len(question.prompt) + len(question.answer)
