"""Common words: which word of a kind comes most often in a long list (after RULER's common words, arXiv 2404.06654).

No place in the context holds the answer: attention has to gather from all of it.
"""
from __future__ import annotations

import random

from .samples import Haystack, Sample

KINDS = {
    "animal": "tiger horse rabbit monkey turtle eagle spider wolf",
    "fruit": "lemon grape apple melon banana mango plum pear",
    "drink": "coffee tea wine beer juice water milk soda",
    "metal": "gold silver copper iron steel lead tin zinc",
    "vehicle": "car bus train truck boat plane bike taxi",
    "job": "farmer painter doctor singer baker nurse sailor lawyer",
    "color": "red blue green yellow purple gray black white",
}
SHARE = 0.6                                                 # of a kind's lines that have its most common word
HEAD = "Below is a list of words with their kinds. Some words appear more often than others.\n\n"
QUESTION = "\n\nWhich word of the kind {kind} is the most common in the list above? Answer:\n{kind}:"
LEAST = 12                                                  # lines a kind


def build(haystack: Haystack, length: int, seed: int, depth: float) -> Sample:
    """A list of "kind: word" lines, and a question for each of 7 kinds. `depth` is not used.

    The most common of a kind's 8 words has 60 % of its lines; the others share the rest evenly.
    """
    rng = random.Random(f"common_words {seed}")
    common = {kind: rng.choice(words.split()) for kind, words in KINDS.items()}
    order = rng.random()
    start = haystack.start()
    lines, over = length // 2, 1
    while over > 0:                                         # a line takes about four tokens
        if lines < LEAST * len(KINDS):
            raise ValueError(f"a context of {length} tokens has no room for a list of words; ask for a longer one")
        context = start + haystack.encode(HEAD + "\n".join(_lines(common, lines, order)))
        over = len(context) - length
        lines -= max(1, over * lines // len(context))
    questions = tuple(haystack.question(kind, QUESTION.format(kind=kind), f" {word}") for kind, word in common.items())
    return Sample("common_words", seed, tuple(context), questions)


def _lines(common: dict[str, str], count: int, order: float) -> list[str]:
    """`count` lines, kinds in turns, then shuffled."""
    lines = []
    for place, (kind, word) in enumerate(common.items()):
        wanted = len(range(place, count, len(KINDS)))
        others = [other for other in KINDS[kind].split() if other != word]
        most = round(SHARE * wanted)
        lines += [f"{kind}: {word}"] * most + [f"{kind}: {others[i % len(others)]}" for i in range(wanted - most)]
    random.Random(order).shuffle(lines)
    return lines
