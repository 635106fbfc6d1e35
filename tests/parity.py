"""Shared by the parity tests: reference runs on unpatched models, computed once, and the comparison."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from tests.models import SLIDING, get_model
from tests.scenarios import SCENARIOS, Result

LOGIT_TOLERANCE = 2e-4  # absolute, float32
TRANSFORMERS_VERSION = Version(Version(transformers.__version__).base_version)


@dataclass(frozen=True)
class UpstreamFailure:
    """A scenario in which transformers' own DynamicCache raises, in versions before `fixed_in`."""

    reason: str
    families: frozenset[str]
    scenario: str
    fixed_in: Version
    error: type[Exception]
    match: str

    def applies(self, family: str, scenario: str) -> bool:
        return scenario == self.scenario and family in self.families and TRANSFORMERS_VERSION < self.fixed_in


UPSTREAM_FAILURES = (
    UpstreamFailure(
        reason="the draft's DynamicCache returns the wrong number of keys after a crop of a sliding layer",
        families=SLIDING,
        scenario="draft_model",
        fixed_in=Version("5.18"),
        error=RuntimeError,
        match="must match the size",
    ),
)


def upstream_failure(family: str, scenario: str) -> UpstreamFailure | None:
    """The known failure of the reference in this cell of the matrix, if there is one."""
    return next((failure for failure in UPSTREAM_FAILURES if failure.applies(family, scenario)), None)


@functools.cache
def reference(family: str, scenario: str) -> Result:
    """What the unpatched model of `family` gives with a DynamicCache."""
    model = get_model(family)
    if model.config._attn_implementation != "eager":
        raise RuntimeError(f"the {family} model is still patched: an earlier test did not restore it")
    result = SCENARIOS[scenario](model, lambda: DynamicCache(config=model.config))
    return {name: result[name] for name in ("tokens", "scores", "calls")}


def assert_same_run(ours: Result, expected: Result, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Equal tokens and, within `tolerance`, equal logits."""
    torch.testing.assert_close(ours["tokens"], expected["tokens"], rtol=0, atol=0)
    torch.testing.assert_close(ours["scores"], expected["scores"], rtol=0, atol=tolerance)
