"""Multi-key needles: several facts of one form in one context, told apart only by their key (RULER, arXiv 2404.06654).

Harder than a passkey: every other needle is a near miss, so attention has to find the right block among alike ones.
"""
from __future__ import annotations

import random

from .samples import Haystack, Sample
from .words import alike

KEYS = ("lighthouse", "orchard", "violin", "glacier", "lantern", "harbour", "meadow", "compass", "falcon", "quarry",
        "saddle", "walnut", "chimney", "pebble", "anchor", "thistle", "candle", "garden", "window", "rocket", "pencil",
        "basket", "mirror", "bridge")
COUNT = 8
FACT = "The special magic number for the {key} is {value}."
QUESTION = ("\n\nWhat is the special magic number for the {key} mentioned in the text above? "
            "The special magic number for the {key} is")


def build(haystack: Haystack, length: int, seed: int, depth: float) -> Sample:
    """A context with 8 six-digit numbers spread over it, and a question for each. `depth` is not used.

    Where the tokenizer allows it, the questions are of one length in tokens.
    """
    rng = random.Random(f"needles {seed}")
    keys = rng.sample(alike(haystack, KEYS, COUNT), COUNT)
    values = [str(v) for v in rng.sample(range(100_000, 1_000_000), COUNT)]
    depths = [(i + rng.random()) / COUNT for i in range(COUNT)]
    facts = [(d, FACT.format(key=k, value=v)) for d, k, v in zip(depths, keys, values)]
    context = haystack.planted(length, seed, facts)
    questions = tuple(haystack.question(k, QUESTION.format(key=k), f" {v}", d)
                      for d, k, v in zip(depths, keys, values))
    return Sample("needles", seed, context, questions)
