"""Passkey: one number, said twice, hidden in a long text (after Landmark Attention, arXiv 2305.16300)."""
from __future__ import annotations

import random

from .samples import Haystack, Sample

FACT = ("The secret number of the treasure chest is {key}. "
        "Remember it: {key} is the secret number of the treasure chest.")
QUESTION = "\n\nWhat is the secret number of the treasure chest? The secret number of the treasure chest is"


def build(haystack: Haystack, length: int, seed: int, depth: float) -> Sample:
    """A context with a five-digit number at `depth` (0 to 1), and one question for it."""
    key = str(random.Random(f"passkey {seed}").randrange(10_000, 100_000))
    context = haystack.planted(length, seed, [(depth, FACT.format(key=key))])
    return Sample("passkey", seed, context, (haystack.question("key", QUESTION, f" {key}", depth),))
