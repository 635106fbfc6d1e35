"""What cells say together: a row for each policy, task and length, with intervals, as a table or JSON-ready dicts."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from .cells import MASS_BINS, Cell
from .metrics import binomial_interval
from .table import format_table

# What counts as right; tasks that are not named: answers with every token right ("exact"), or their score.
COUNTED = {"copy": "tokens", "kl": "agreement"}
# A model that answers less than this with dense attention can't do the task; scores of free answers are low for good models too.
ABLE, ABLE_SCORE = 0.5, 0.1


@dataclass(frozen=True)
class Row:
    """One policy on one task and length.

    accuracy: share of exact answers, of right tokens (copy), of tokens with dense attention's argmax (kl), or mean score
    (generated answers), as `metric` says; accuracy_dense: of dense attention on the same samples. low, high: exact binomial
    interval of 95 % of the accuracy (of tokens as if they were independent; None for scores). relative: accuracy over
    accuracy_dense. able: whether dense attention does the task at all. kl_mean over tokens, kl_worst: the largest mean of an
    answer, kl_max: of a token. loss, loss_dense: nats a gold token. kv_fraction: blocks read over blocks held, also what has to
    cross the bus if nothing is cached on the device; hbm_fraction: with the digests' bytes, relative to dense. mass_mean and
    mass_p1: mean and 1st percentile of the share of the attention mass that was gathered.
    """

    task: str
    length: int
    policy: str
    digest: str
    stop_rule: str
    threshold: float | None
    samples: int
    questions: int
    metric: str
    accuracy: float
    accuracy_dense: float
    low: float | None
    high: float | None
    relative: float | None
    able: bool
    kl_mean: float | None
    kl_worst: float | None
    kl_max: float | None
    loss: float | None
    loss_dense: float | None
    kv_fraction: float
    hbm_fraction: float | None
    mass_mean: float | None
    mass_p1: float | None
    simulated: bool

    def to_dict(self) -> dict:
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}


def rows(cells: Iterable[Cell]) -> list[Row]:
    """A row for each policy, task and length, in the order of their first cells; cells without a dense one are left out."""
    cells = list(cells)
    dense = {(c.task, c.length, c.seed): c for c in cells if is_dense(c)}
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        if (cell.task, cell.length, cell.seed) in dense:
            groups.setdefault((cell.length, cell.task, cell.policy), []).append(cell)
    order = {key: place for place, key in enumerate(dict.fromkeys((length, task) for length, task, _ in groups))}
    return [_row(group, [dense[c.task, c.length, c.seed] for c in group])
            for key, group in sorted(groups.items(), key=lambda entry: order[entry[0][:2]])]


def is_dense(cell: Cell) -> bool:
    settings = cell.settings
    whole = settings["policy"] == "threshold" and settings["threshold"] == 1.0 and settings["max_blocks"] is None
    return whole and "kv_bits" not in settings and "streaming_heads" not in settings


def _row(cells: list[Cell], dense: list[Cell]) -> Row:
    first = cells[0]
    metric, right, trials, accuracy = _accuracy(cells)
    accuracy_dense = _accuracy(dense)[3]
    low, high = binomial_interval(right, trials) if metric != "score" else (None, None)
    answers = [answer for cell in cells for answer in cell.answers]
    kl = [value for answer in answers for value in answer.kl]
    held = sum(cell.blocks_held for cell in cells)
    settings = first.settings
    by_rule = settings["policy"] == "threshold"
    return Row(
        task=first.task, length=first.length, policy=first.policy, digest=settings["digest"],
        stop_rule=settings["stop_rule"] if by_rule else settings["policy"],
        threshold={"threshold": settings["threshold"], "top_p": settings["top_p"]}.get(settings["policy"]),
        samples=len(cells), questions=len(answers), metric=metric, accuracy=accuracy, accuracy_dense=accuracy_dense,
        low=low, high=high, relative=accuracy / accuracy_dense if accuracy_dense else None,
        able=metric == "agreement" or accuracy_dense >= (ABLE_SCORE if metric == "score" else ABLE),
        kl_mean=sum(kl) / len(kl) if kl else None,
        kl_worst=max((sum(a.kl) / len(a.kl) for a in answers if a.kl), default=None), kl_max=max(kl, default=None),
        loss=_loss(cells), loss_dense=_loss(dense),
        kv_fraction=sum(cell.blocks_read for cell in cells) / held,
        hbm_fraction=_weighted(cells, [cell.hbm_fraction for cell in cells]),
        mass_mean=mass_quantile(cells, None), mass_p1=mass_quantile(cells, 0.01), simulated=first.simulated)


def _accuracy(cells: list[Cell]) -> tuple[str, int, int, float]:
    """(metric, successes, trials, accuracy)"""
    answers = [answer for cell in cells for answer in cell.answers]
    if answers[0].score is not None:
        return "score", 0, len(answers), sum(answer.score for answer in answers) / len(answers)
    metric = COUNTED.get(cells[0].task, "exact")
    if metric == "exact":
        right, trials = sum(answer.exact for answer in answers), len(answers)
    else:
        right = sum(answer.right if metric == "tokens" else answer.agreed for answer in answers)
        trials = sum(answer.tokens for answer in answers)
    return metric, right, trials, right / trials


def _loss(cells: list[Cell]) -> float | None:
    answers = [answer for cell in cells for answer in cell.answers if answer.loss is not None]
    tokens = sum(answer.tokens for answer in answers)
    return sum(answer.loss * answer.tokens for answer in answers) / tokens if tokens else None


def _weighted(cells: list[Cell], values: list[float | None]) -> float | None:
    if any(value is None for value in values):
        return None
    return sum(value * cell.blocks_held for value, cell in zip(values, cells)) / sum(cell.blocks_held for cell in cells)


def mass_quantile(cells: Iterable[Cell], share: float | None) -> float | None:
    """Quantile of the gathered mass (None: its mean), from the histograms: the middle of a bin of 0.001."""
    counts: dict[int, int] = {}
    for cell in cells:
        for index, count in cell.mass.items():
            counts[index] = counts.get(index, 0) + count
    total = sum(counts.values())
    if not total:
        return None
    middle = lambda index: (index + 0.5) / MASS_BINS  # noqa: E731
    if share is None:
        return sum(middle(index) * count for index, count in counts.items()) / total
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= share * total:
            return middle(index)
    return middle(max(counts))


def rows_table(found: Sequence[Row]) -> str:
    """Rows as a Markdown table. A star marks tasks that the model can't do with dense attention."""
    head = ("policy", "task", "length", "questions", "accuracy", "95 %", "dense", "relative", "KL mean", "KL worst", "KV read",
            "HBM read", "mass", "mass p1")
    number = lambda value, digits=3: "-" if value is None else f"{value:.{digits}f}"  # noqa: E731
    body = [(row.policy, row.task + ("" if row.able else " *"), str(row.length), str(row.questions), number(row.accuracy),
             "-" if row.low is None else f"{row.low:.3f}-{row.high:.3f}", number(row.accuracy_dense), number(row.relative),
             number(row.kl_mean, 5), number(row.kl_worst, 5), number(row.kv_fraction), number(row.hbm_fraction),
             number(row.mass_mean), number(row.mass_p1)) for row in found]
    text = format_table(head, body)
    if not all(row.able for row in found):
        text += (f"\n\n\\* Dense attention answers less than {ABLE:.0%} (scores: {ABLE_SCORE:.0%}): this model can't do the task, so the "
                 "row says nothing.")
    return text


def layers_table(cells: Iterable[Cell], policy: str) -> str:
    """What one policy read and gathered layer by layer, over all its cells: where a setting is bad, it shows here first.

    Raises:
        ValueError: no simulated cells of this policy.
    """
    mine = [cell for cell in cells if cell.policy == policy and cell.head_mass]
    if not mine:
        raise ValueError(f"policy {policy!r} has no simulated results, which alone know what each layer gathered")
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    body = []
    for layer in range(len(mine[0].head_mass)):
        heads = [mean(column) for column in zip(*(cell.head_mass[layer] for cell in mine))]
        worst = min(range(len(heads)), key=heads.__getitem__)
        body.append((str(layer), f"{mean([cell.layer_kv[layer] for cell in mine]):.3f}", f"{mean(heads):.3f}",
                     f"{heads[worst]:.3f} (head {worst})"))
    return format_table((f"layer, {policy}", "KV read", "mass", "least of a KV head"), body)
