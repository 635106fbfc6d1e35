"""Multi-value needles: several facts about one key, which differ in nothing but the value (RULER, arXiv 2404.06654)."""
from __future__ import annotations

import random

from .needles import FACT
from .samples import Haystack, Sample
from .words import NOUNS

VALUES = 4
QUESTION = ("\n\nWhat are the {count} special magic numbers for the {key} mentioned in the text above? "
            "The special magic numbers for the {key} are {others}, and")


def build(haystack: Haystack, length: int, seed: int, depth: float) -> Sample:
    """A context with 4 six-digit numbers for one key, and a question for each number. `depth` is not used.

    A question gives the three others, in the order of the text, and asks for the one that is missing: a list has no
    right order, and would be judged by the first number that a model happens to take.
    """
    rng = random.Random(f"multi_value {seed}")
    key = rng.choice(NOUNS)
    values = [str(v) for v in rng.sample(range(100_000, 1_000_000), VALUES)]
    depths = [(i + rng.random()) / VALUES for i in range(VALUES)]
    context = haystack.planted(length, seed, [(d, FACT.format(key=key, value=v)) for d, v in zip(depths, values)])
    questions = []
    for place, (at, value) in enumerate(zip(depths, values)):
        others = ", ".join(values[:place] + values[place + 1:])
        questions.append(haystack.question(f"value {place + 1}", QUESTION.format(count=VALUES, key=key, others=others),
                                           f" {value}", at))
    return Sample("multi_value", seed, context, tuple(questions))
