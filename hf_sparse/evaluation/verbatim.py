"""Verbatim copy: the first words of a passage come again, and the model should go on with it word for word."""
from __future__ import annotations

from .samples import Haystack, Question, Sample

DEPTHS = (0.12, 0.45, 0.75)
LEAD = 24                                                   # tokens of the passage that are given
COPIED = 32                                                 # tokens that must follow


def build(haystack: Haystack, length: int, seed: int, depth: float) -> Sample:
    """Plain text and a copying question for each of three depths. `depth` is not used.

    Token accuracy is the figure to look at: a model misses a few tokens of 32 with dense attention too.
    """
    if length < 4 * (LEAD + COPIED):
        raise ValueError(f"a copying context needs at least {4 * (LEAD + COPIED)} tokens, got {length}")
    context = haystack.plain(length, seed)
    gap = tuple(haystack.encode("\n\n"))
    questions = []
    for part in DEPTHS:
        at = int(part * length)
        passage = context[at:at + LEAD + COPIED]
        questions.append(Question(f"depth {part}", gap + passage[:LEAD], passage[LEAD:], part))
    return Sample("copy", seed, context, tuple(questions))
