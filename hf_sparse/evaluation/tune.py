"""The smallest threshold that keeps a model's answers: what `hf-sparse tune` chooses from."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import PSAConfig
from .cells import Cell
from .policies import Policy, parse_policy
from .summary import Row, rows

THRESHOLDS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99)
TASKS = ("needles", "kl")
MOST_KL, LEAST_RELATIVE = 0.01, 0.98


@dataclass(frozen=True)
class Trial:
    """One threshold, of several lengths the worst: the mean of the tasks' mean KL a token, needles right relative to dense
    attention (None: the model can't find needles with dense attention either), and the share of the blocks that was read."""

    threshold: float
    kl_mean: float
    relative: float | None
    kv_fraction: float

    @property
    def good(self) -> bool:
        return self.kl_mean <= MOST_KL and (self.relative is None or self.relative >= LEAST_RELATIVE)


def policies(base: PSAConfig, thresholds: Sequence[float] = THRESHOLDS) -> list[Policy]:
    """The candidates, by rising threshold.

    Raises:
        ValueError: settings that have no threshold to choose.
    """
    if base.policy != "threshold":
        raise ValueError(f"policy={base.policy!r} has no threshold to choose; tune settings with policy='threshold'")
    return [parse_policy(f"psa@{threshold}", base) for threshold in sorted(thresholds)]


def trials(cells: Sequence[Cell], candidates: Sequence[Policy]) -> list[Trial]:
    """What each candidate did, by rising threshold; of several lengths the worst."""
    found = rows(cells)
    out = []
    for policy in candidates:
        mine = [row for row in found if row.policy == policy.name]
        needles = [row.relative for row in mine if row.task == "needles" and row.able]
        out.append(Trial(policy.config.threshold, max(_mean_kl(mine, length) for length in {row.length for row in mine}),
                         min(needles) if needles else None, max(row.kv_fraction for row in mine)))
    return out


def _mean_kl(found: Sequence[Row], length: int) -> float:
    """The mean of the tasks' means, so that a task with long answers is not all that counts."""
    means = [row.kl_mean for row in found if row.length == length]
    return sum(means) / len(means)


def choose(found: Sequence[Trial]) -> Trial | None:
    """The smallest threshold from which on all are good; None: there is none."""
    best = None
    for trial in sorted(found, key=lambda trial: -trial.threshold):
        if not trial.good:
            break
        best = trial
    return best
