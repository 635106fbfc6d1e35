"""Results of an evaluation: one row an answer, one summary a task, as a table or a JSON-ready dict."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Answer:
    """One question, asked with dense and with sparse attention over the same prefilled context.

    Token counts are of the gold answer, teacher-forced; a token is right when it is the argmax.
    """

    task: str
    seed: int
    question: str
    depth: float | None
    context_tokens: int
    tokens: int
    right_dense: int
    right_sparse: int
    agreed: int                                             # tokens with the same argmax, right or wrong
    kl: tuple[float, ...]                                   # KL(dense || sparse) in nats, one a token
    kv_fraction: float                                      # blocks read / blocks held
    coverage: float                                         # estimated share of the attention mass gathered
    coverage_true: float | None                             # the same measured (verify=True)

    @property
    def exact_dense(self) -> bool:
        return self.right_dense == self.tokens

    @property
    def exact_sparse(self) -> bool:
        return self.right_sparse == self.tokens


@dataclass(frozen=True)
class Summary:
    """A task's answers together. Shares are 0 to 1; KL in nats, over all answer tokens."""

    task: str
    questions: int
    tokens: int
    context_tokens: float
    exact_dense: float
    exact_sparse: float
    token_accuracy_dense: float
    token_accuracy_sparse: float
    agreement: float
    kl_mean: float
    kl_max: float
    kv_fraction: float
    coverage: float
    coverage_true: float | None


@dataclass(frozen=True)
class Report:
    """Everything an evaluation found, with the settings that it was found with."""

    config: dict                                            # PSAConfig.to_dict()
    settings: dict                                          # tasks, length, samples, seed
    summaries: tuple[Summary, ...]
    answers: tuple[Answer, ...]

    def to_dict(self) -> dict:
        return {"config": self.config, "settings": self.settings,
                "summaries": [asdict(s) for s in self.summaries], "answers": [asdict(a) for a in self.answers]}

    def table(self) -> str:
        """The summaries as a Markdown table."""
        head = ("task", "questions", "exact dense", "exact sparse", "tokens dense", "tokens sparse", "agree",
                "KL mean", "KL max", "KV read", "coverage")
        rows = [(s.task, str(s.questions), f"{s.exact_dense:.3f}", f"{s.exact_sparse:.3f}",
                 f"{s.token_accuracy_dense:.3f}", f"{s.token_accuracy_sparse:.3f}", f"{s.agreement:.3f}",
                 f"{s.kl_mean:.5f}", f"{s.kl_max:.5f}", f"{s.kv_fraction:.3f}", f"{s.coverage:.3f}")
                for s in self.summaries]
        return format_table(head, rows)


def summarise(answers: Sequence[Answer]) -> tuple[Summary, ...]:
    """One summary a task, in the order in which the tasks first appear."""
    return tuple(_summary(task, [a for a in answers if a.task == task])
                 for task in dict.fromkeys(a.task for a in answers))


def _summary(task: str, answers: list[Answer]) -> Summary:
    count, tokens = len(answers), sum(a.tokens for a in answers)
    kl = [value for a in answers for value in a.kl]
    true = [a.coverage_true for a in answers if a.coverage_true is not None]
    mean = lambda values: sum(values) / count               # noqa: E731
    return Summary(
        task=task, questions=count, tokens=tokens,
        context_tokens=mean(a.context_tokens for a in answers),
        exact_dense=mean(a.exact_dense for a in answers), exact_sparse=mean(a.exact_sparse for a in answers),
        token_accuracy_dense=sum(a.right_dense for a in answers) / tokens,
        token_accuracy_sparse=sum(a.right_sparse for a in answers) / tokens,
        agreement=sum(a.agreed for a in answers) / tokens,
        kl_mean=sum(kl) / tokens, kl_max=max(kl),
        kv_fraction=mean(a.kv_fraction for a in answers), coverage=mean(a.coverage for a in answers),
        coverage_true=sum(true) / len(true) if true else None,
    )


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned first column, right-aligned others, as a Markdown table."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells):
        return "| " + " | ".join(c.ljust(w) if i == 0 else c.rjust(w)
                                 for i, (c, w) in enumerate(zip(cells, widths))) + " |"

    rule = "|" + "|".join(("-" * (w + 2)) if i == 0 else ("-" * (w + 1) + ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(head), rule, *(line(row) for row in rows)])
