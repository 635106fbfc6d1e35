"""threshold=1.0 is dense attention: same tokens and, within 2e-4, same logits, however one generates."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_sparse import PSACache, PSAConfig, patched
from tests.models import FAMILIES, WITHOUT_FULL_ATTENTION, get_draft_model, get_model
from tests.parity import LOGIT_TOLERANCE, UpstreamFailure, assert_same_run, reference, upstream_failure
from tests.scenarios import NEEDS_CACHE, NEW_TOKENS, SCENARIOS, SPECULATIVE, greedy

EXACT = PSAConfig(threshold=1.0, min_context=0, block_size=4)
CELLS = [
    pytest.param(family, scenario, id=f"{family}-{scenario}") for family in FAMILIES for scenario in SCENARIOS
]


def check_used(cache, family: str, scenario: str) -> None:
    """The run went through the library's own layers and the sparse step, never through dense K and V."""
    stats = cache.stats()
    kinds = {layer["kind"] for layer in stats["layers"]}
    assert stats["materialized"] == 0
    assert "native" not in kinds
    if family in WITHOUT_FULL_ATTENTION:
        assert kinds == {"window"}
    else:
        assert "psa" in kinds
        assert stats["sparse_steps"] > 0 or scenario in SPECULATIVE
        assert stats["kv_fraction"] == 1.0 or scenario in SPECULATIVE


@pytest.mark.parametrize(("family", "scenario"), CELLS)
def test_exact(family, scenario):
    known = upstream_failure(family, scenario)
    if known is not None:
        check_upstream_failure(known, family, scenario)
        return
    expected = reference(family, scenario)
    model = get_model(family)
    before = model.config._attn_implementation
    with patched(model, EXACT):
        ours = SCENARIOS[scenario](model, lambda: PSACache(model.config, EXACT))
    assert model.config._attn_implementation == before
    assert isinstance(ours["cache"], PSACache)
    assert_same_run(ours, expected)
    assert ours["calls"] == expected["calls"]
    check_used(ours["cache"], family, scenario)


def check_upstream_failure(known: UpstreamFailure, family: str, scenario: str) -> None:
    """DynamicCache fails as described; ours gives what the plain way to the same result gives."""
    expected = reference(family, scenario, plain=True)
    if known.error is not None:
        with pytest.raises(known.error, match=known.match):
            reference(family, scenario)
    else:
        wrong = reference(family, scenario)
        assert not torch.allclose(wrong["scores"], expected["scores"], rtol=0, atol=100 * LOGIT_TOLERANCE)
    model, draft = get_model(family), get_draft_model(family)
    with patched(model, EXACT), patched(draft, EXACT):  # the draft too: it would fail on a DynamicCache
        ours = SCENARIOS[scenario](model, lambda: PSACache(model.config, EXACT))
    assert_same_run(ours, expected)
    check_used(ours["cache"], family, scenario)


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in NEEDS_CACHE])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exact_with_the_cache_that_generate_builds(family, scenario):
    if upstream_failure(family, scenario):
        pytest.skip(upstream_failure(family, scenario).reason)
    expected = reference(family, scenario)
    model = get_model(family)
    with patched(model, EXACT):
        ours = SCENARIOS[scenario](model, None)
        assert model.last_psa_cache is ours["cache"]
    assert_same_run(ours, expected)
    check_used(ours["cache"], family, scenario)


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_and_model_both_patched(family):
    model, draft = get_model(family), get_draft_model(family)
    with patched(model, EXACT), patched(draft, EXACT):
        ours = SCENARIOS["draft_model"](model, lambda: PSACache(model.config, EXACT))
    assert_same_run(ours, reference(family, "draft_model", plain=True))
    assert ours["calls"] < NEW_TOKENS


BELOW_MIN_CONTEXT = PSAConfig(threshold=0.5, min_context=4096, block_size=4)


@pytest.mark.parametrize("scenario", ["greedy", "padded", "continued"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_dense_below_min_context(family, scenario):
    """Contexts below `min_context` take no sparse step, whatever the threshold."""
    model = get_model(family)
    with patched(model, BELOW_MIN_CONTEXT):
        ours = SCENARIOS[scenario](model, lambda: PSACache(model.config, BELOW_MIN_CONTEXT))
    assert_same_run(ours, reference(family, scenario))
    assert ours["cache"].stats()["sparse_steps"] == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "olmo2", "granite", "glm4"])
def test_bit_identical_to_sdpa_below_min_context(family):
    """Without padding, windows, sinks or softcap, dense steps compute what transformers' sdpa computes."""
    model = get_model(family)
    model.set_attn_implementation("sdpa")
    try:
        expected = greedy(model, lambda: DynamicCache(config=model.config))
        with patched(model, BELOW_MIN_CONTEXT):
            ours = greedy(model, lambda: PSACache(model.config, BELOW_MIN_CONTEXT))
    finally:
        model.set_attn_implementation("eager")
    assert torch.equal(ours["tokens"], expected["tokens"])
    assert torch.equal(ours["scores"], expected["scores"])
