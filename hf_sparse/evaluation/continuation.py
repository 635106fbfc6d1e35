"""Continuation: how far sparse attention moves the next-token distribution on text as it runs on (KL against dense)."""
from __future__ import annotations

from .samples import Haystack, Question, Sample

CONTINUED = 48                                              # tokens whose distributions are compared


def build(haystack: Haystack, length: int, seed: int, depth: float) -> Sample:
    """Plain text, and its own next tokens teacher-forced. `depth` is not used.

    There is no answer to be right about: read the KL divergence, and the share of equal argmaxes.
    """
    ids = haystack.plain(length, seed, extra=CONTINUED + 1)
    return Sample("kl", seed, ids[:length], (Question("continuation", ids[length:length + 1], ids[length + 1:]),))
