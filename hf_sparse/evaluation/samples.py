"""What a task asks: a context, and questions on it with gold answers, all as token ids; and how contexts are made."""
from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

TASK_HEAD = "Some numbers are hidden in the text below. Find them and remember them.\n\n"


@dataclass(frozen=True)
class Question:
    """One question on a context.

    Args:
        name: what tells it apart within its sample.
        prompt: token ids of the question, with the beginning of the answer if it has one; at least one.
        answer: token ids of the gold answer; at least one.
        depth: where in the context the answer lies, 0 (start) to 1 (end); None where that means nothing.
    """

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float | None = None


@dataclass(frozen=True)
class Sample:
    """One context and the questions on it. Samples with equal contexts share their prefill."""

    task: str
    seed: int
    context: tuple[int, ...]
    questions: tuple[Question, ...] = field(default=())


class Haystack:
    """Contexts of a wanted length out of paragraphs, with facts planted between them.

    Args:
        paragraphs: running text, one paragraph an entry, in an order that makes sense.
        tokenizer: of the model that is evaluated.
    """

    def __init__(self, paragraphs: list[str], tokenizer):
        self.paragraphs = paragraphs
        self.tokenizer = tokenizer
        self._counts = [len(self.encode(p + "\n\n")) for p in paragraphs]

    @property
    def tokens(self) -> int:
        """How many tokens of text there are."""
        return sum(self._counts)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def start(self) -> list[int]:
        """The token that this tokenizer puts before every text, if it does."""
        bos = self.tokenizer.bos_token_id
        ids = self.tokenizer("text")["input_ids"]
        return [bos] if bos is not None and ids and ids[0] == bos else []

    def plain(self, length: int, seed: int, extra: int = 0) -> tuple[int, ...]:
        """`length + extra` tokens of the text as it runs, from a paragraph that the seed chooses.

        The first `length` do not depend on `extra`.
        """
        first, wanted = self._first(seed), length + extra
        room = wanted
        while True:
            ids = self.start() + self.encode("\n\n".join(self.paragraphs[i] for i in self._run(first, room)))
            if len(ids) >= wanted:
                return tuple(ids[:wanted])
            room += wanted - len(ids)                       # paragraphs take fewer tokens together than alone

    def planted(self, length: int, seed: int, facts: list[tuple[float, str]]) -> tuple[int, ...]:
        """At most `length` tokens of text with each (depth, sentence) as a paragraph of its own."""
        return tuple(self.start() + self.encode(self.planted_text(length - len(self.start()), seed, facts)))

    def planted_text(self, length: int, seed: int, facts: list[tuple[float, str]]) -> str:
        """The same as text, of at most `length` tokens, with a first line that says what to look for.

        A fact stands at the end of the paragraph that comes nearest to its depth (0: start, 1: end).
        """
        room = length - len(self.encode(TASK_HEAD)) - sum(len(self.encode(fact + "\n\n")) for _, fact in facts)
        first = self._first(seed)
        while True:
            run = self._run(first, room)[:-1]
            if not run:
                raise ValueError(f"a context of {length} tokens has no room for text beside what is hidden in it; "
                                 "ask for a longer one")
            ends = [0, *itertools.accumulate(self._counts[index] for index in run)]
            paragraphs = [self.paragraphs[index] for index in run]
            # Planted from the end, so that the places of the others stay what they are.
            for depth, fact in sorted(facts, reverse=True):
                place = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))  # noqa: B023
                paragraphs.insert(place, fact)
            text = TASK_HEAD + "\n\n".join(paragraphs)
            over = len(self.encode(text)) - length
            if over <= 0:
                return text
            room -= over                                    # or more

    def question(self, name: str, text: str, answer: str, depth: float | None = None) -> Question:
        """A question from its text, up to where the gold answer begins.

        The two are encoded together, because many tokenizers encode a text differently at its start.
        """
        prompt, whole = self.encode(text), self.encode(text + answer)
        shared = 0
        while shared < len(prompt) and shared < len(whole) - 1 and prompt[shared] == whole[shared]:
            shared += 1
        return Question(name, tuple(whole[:shared]), tuple(whole[shared:]), depth)

    def _first(self, seed: int) -> int:
        return random.Random(f"paragraph {seed}").randrange(len(self.paragraphs))

    def _run(self, first: int, tokens: int) -> list[int]:
        """Indices of paragraphs from `first` on, going round at the end, until they have more than `tokens` tokens."""
        if tokens >= self.tokens:
            raise self._too_short(tokens)
        run, total = [], 0
        while total <= tokens:
            run.append((first + len(run)) % len(self.paragraphs))
            total += self._counts[run[-1]]
        return run

    def _too_short(self, length: int) -> ValueError:
        return ValueError(f"the text has {self.tokens} tokens, a context of {length} needs more; give a longer text "
                          "(--text PATH)")
