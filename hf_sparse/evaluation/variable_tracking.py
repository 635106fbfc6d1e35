"""Variable tracking: variables that are defined by each other, down to a number (after RULER, arXiv 2404.06654)."""
from __future__ import annotations

import random
import string

from .samples import Haystack, Sample
from .words import alike

CHAINS = 2
HOPS = 3
HOP = "The value of variable {name} is the value of variable {target}."
END = "The value of variable {name} is the number {target}."


def build(haystack: Haystack, length: int, seed: int, depth: float) -> Sample:
    """A context with 2 chains of 4 variables, and a question for each link of each chain. `depth` is not used.

    Variables are five letters, as RULER's are, the value at the end of a chain is five digits. A definition stands behind that
    of the variable that it names, so a chain leads from the end of the context to its start. A question asks for one link, as
    if those before it had been followed; every other variable is named twice too, and is a near miss.
    """
    rng = random.Random(f"variable_tracking {seed}")
    names = _names(haystack, rng)
    values = [str(v) for v in rng.sample(range(10_000, 100_000), CHAINS)]
    facts, questions = [], []
    for chain, value in enumerate(values):
        stops = [*names[chain::CHAINS], value]              # from the last variable down to its value
        for link, (name, target) in enumerate(zip(stops, stops[1:])):
            at = 1.0 - (link + rng.random()) / (HOPS + 1)
            fact = (END if link == HOPS else HOP).format(name=name, target=target)
            facts.append((at, fact))
            questions.append(haystack.question(f"chain {chain + 1} link {link + 1}",
                                               "\n\n" + fact.removesuffix(f" {target}."), f" {target}", at))
    return Sample("variable_tracking", seed, haystack.planted(length, seed, facts), tuple(questions))


def _names(haystack: Haystack, rng: random.Random) -> list[str]:
    """Names of all variables: no two begin alike, because small models blend names that do."""
    count = CHAINS * (HOPS + 1)
    drawn = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(400)]
    found: dict[str, str] = {}                              # by initial
    for name in [*alike(haystack, drawn, count), *drawn]:
        found.setdefault(name[0], name)
    return list(found.values())[:count]
