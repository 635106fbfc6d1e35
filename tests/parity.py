"""Shared by the parity tests: reference runs on unpatched models, computed once, and the comparison."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from tests.models import SLIDING, get_model
from tests.scenarios import PLAIN, SCENARIOS, Result

LOGIT_TOLERANCE = 2e-4  # absolute, float32
TRANSFORMERS_VERSION = Version(Version(transformers.__version__).base_version)


@dataclass(frozen=True)
class UpstreamFailure:
    """Scenarios in which DynamicCache itself raises or is wrong, from one version to before another."""

    reason: str
    scenarios: tuple[str, ...]
    since: str
    fixed_in: str
    error: type[Exception] | None  # None: it does not raise, but the result is wrong
    match: str = ""
    families: frozenset[str] = SLIDING

    def applies(self, family: str, scenario: str) -> bool:
        in_range = Version(self.since) <= TRANSFORMERS_VERSION < Version(self.fixed_in)
        return in_range and scenario in self.scenarios and family in self.families


UPSTREAM_FAILURES = (
    UpstreamFailure(
        reason="the draft's DynamicCache returns the wrong number of keys after a crop of a sliding layer",
        scenarios=("draft_model",),
        since="5.16",
        fixed_in="5.18",
        error=RuntimeError,
        match="must match the size",
    ),
    UpstreamFailure(
        reason="DynamicCache cannot crop a sliding layer",
        scenarios=("draft_model", "prompt_lookup"),
        since="5.0",
        fixed_in="5.16",
        error=ValueError,
        match="Cannot `crop`",
    ),
    UpstreamFailure(
        reason="DynamicCache gets the mask of a chunk after the first wrong in sliding layers",
        scenarios=("chunked_prefill",),
        since="5.0",
        fixed_in="5.1",
        error=None,
    ),
)


def upstream_failure(family: str, scenario: str) -> UpstreamFailure | None:
    """The known failure of the reference in this cell of the matrix, if there is one."""
    return next((failure for failure in UPSTREAM_FAILURES if failure.applies(family, scenario)), None)


@functools.cache
def reference(family: str, scenario: str, plain: bool = False) -> Result:
    """The unpatched model of `family` with a DynamicCache; `plain`: by the plain way to the same result."""
    model = get_model(family)
    if model.config._attn_implementation != "eager":
        raise RuntimeError(f"the {family} model is still patched: an earlier test did not restore it")
    run = (PLAIN if plain else SCENARIOS)[scenario]
    result = run(model, lambda: DynamicCache(config=model.config))
    return {name: result[name] for name in ("tokens", "scores", "calls")}


def assert_same_run(ours: Result, expected: Result, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Equal tokens and, within `tolerance`, equal logits."""
    torch.testing.assert_close(ours["tokens"], expected["tokens"], rtol=0, atol=0)
    torch.testing.assert_close(ours["scores"], expected["scores"], rtol=0, atol=tolerance)
