"""The synthetic tasks by name."""
from __future__ import annotations

from collections.abc import Callable

from . import common_words, continuation, multi_value, needles, passkey, variable_tracking, verbatim
from .samples import Haystack, Sample

# Each takes a haystack, a length in tokens, a seed, and the depth (0 to 1) at which what is asked for lies, if it is one thing.
TASKS: dict[str, Callable[[Haystack, int, int, float], Sample]] = {
    "passkey": passkey.build, "needles": needles.build, "copy": verbatim.build, "kl": continuation.build,
    "multi_value": multi_value.build, "variable_tracking": variable_tracking.build, "common_words": common_words.build,
}
