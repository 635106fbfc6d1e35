"""Run tasks on a model: dense and sparse answers over the same prefilled contexts."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config import PSAConfig
from ..patches.model import patched
from . import common_words, continuation, multi_value, needles, passkey, variable_tracking, verbatim
from .decoding import answer, divergence, prefill
from .report import Answer, Report, summarise
from .samples import Haystack, Question, Sample
from .text import load_paragraphs

TASKS: dict[str, Callable[[Haystack, int, int, float], Sample]] = {
    "passkey": passkey.build, "needles": needles.build, "copy": verbatim.build, "kl": continuation.build,
    "multi_value": multi_value.build, "variable_tracking": variable_tracking.build, "common_words": common_words.build,
}


def build_samples(tasks: Sequence[str], haystack: Haystack, length: int, samples: int, seed: int) -> list[Sample]:
    """Samples of every task, those of one seed together; depths are spread evenly over the samples.

    Raises:
        ValueError: an unknown task, a count below 1, a length that the text or the task can't fill.
    """
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"there is no task {task!r}; choose from {', '.join(TASKS)}")
    if not tasks:
        raise ValueError(f"no task given; choose from {', '.join(TASKS)}")
    for name, value in (("length", length), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return [TASKS[task](haystack, length, seed + index, (index + 0.5) / samples)
            for index in range(samples) for task in dict.fromkeys(tasks)]


def evaluate(model, tokenizer, tasks: Sequence[str] = ("passkey", "needles", "copy", "kl"), length: int = 4096,
             samples: int = 10, config: PSAConfig | str | dict | None = None, text=None, seed: int = 0,
             prefill_chunk: int | None = None, progress: Callable[[int, int, Sample], None] | None = None,
             **overrides) -> Report:
    """Measure what sparse decoding does to a model's answers, against dense attention over the same context.

    Context tokens are prefilled exactly, once for every different context; question and gold answer then go through
    the sparse step (and, on another fork of the same cache, through exact dense attention).

    Args:
        model: a causal language model; patched while this runs, and then what it was before.
        tokenizer: its tokenizer.
        tasks: names in TASKS, such as "passkey", "needles" (8 keys, six digits), "copy" and "kl".
        length: context tokens; a passkey or needle context ends with a whole paragraph, so it may be a little shorter.
        samples: contexts a task.
        config: PSAConfig, a preset's name, a dict or None; `overrides` change fields of it.
        text: file or directory to take contexts from; None: the Python documentation.
        seed: of the first sample; the others count up.
        prefill_chunk: tokens a prefill forward; None: all at once.
        progress: called before each context with (contexts done, contexts in all, sample).

    Raises:
        ValueError: an unknown task, a length beyond the model's context or the text's, settings that make no sense.
        DenseDecodeError: decoding was not sparse (see `decoding.check_sparse`).
    """
    config = PSAConfig.build(config, **overrides)
    work = build_samples(tasks, Haystack(load_paragraphs(text), tokenizer), length, samples, seed)
    check_length(model, work)
    answers: list[Answer] = []
    contexts: dict[tuple[int, ...], list[Sample]] = {}
    for sample in work:
        contexts.setdefault(sample.context, []).append(sample)
    with patched(model, config):
        for done, (context, sharing) in enumerate(contexts.items()):
            if progress is not None:
                progress(done, len(contexts), sharing[0])
            cache = prefill(model, context, config, prefill_chunk)
            for sample in sharing:
                answers += [compare(model, cache, sample, question) for question in sample.questions]
    order = {task: place for place, task in enumerate(tasks)}
    answers.sort(key=lambda a: order[a.task])
    settings = {"tasks": list(dict.fromkeys(tasks)), "length": length, "samples": samples, "seed": seed}
    return Report(config.to_dict(), settings, summarise(answers), tuple(answers))


def compare(model, cache, sample: Sample, question: Question) -> Answer:
    """Ask one question with dense and with sparse attention."""
    dense = answer(model, cache, question, dense=True)
    sparse = answer(model, cache, question)
    gold = list(question.answer)
    guess_dense, guess_sparse = dense.log_probs.argmax(-1).tolist(), sparse.log_probs.argmax(-1).tolist()
    stats = sparse.stats
    return Answer(
        task=sample.task, seed=sample.seed, question=question.name, depth=question.depth,
        context_tokens=len(sample.context), tokens=len(gold),
        right_dense=sum(a == b for a, b in zip(guess_dense, gold)),
        right_sparse=sum(a == b for a, b in zip(guess_sparse, gold)),
        agreed=sum(a == b for a, b in zip(guess_dense, guess_sparse)),
        kl=tuple(divergence(dense.log_probs, sparse.log_probs).tolist()),
        kv_fraction=stats["kv_fraction"], coverage=stats["coverage"], coverage_true=stats["coverage_true"],
    )


def check_length(model, samples: Sequence[Sample]) -> None:
    """Raise ValueError if a sample with its longest question does not fit the model's context."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(len(s.context) + max(len(q.prompt) + len(q.answer) for q in s.questions) for s in samples)
    if limit is not None and longest > limit:
        raise ValueError(f"context, question and answer take {longest} tokens but the model's context is {limit}; "
                         f"ask for a length of at most {limit - (longest - max(len(s.context) for s in samples))}")
