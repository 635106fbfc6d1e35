"""threshold=1.0 is dense attention: token for token and, within 2e-4, logit for logit, in every way of generating."""

from __future__ import annotations

import pytest
from hf_sparse import PSACache, PSAConfig, patched

from tests.models import FAMILIES, WITHOUT_FULL_ATTENTION, get_draft_model, get_model
from tests.parity import assert_same_run, reference, upstream_failure
from tests.scenarios import NEEDS_CACHE, SCENARIOS, SPECULATIVE, greedy, make_prompt, run_generate

EXACT = PSAConfig(threshold=1.0, min_context=0, block_size=4)
CELLS = [
    pytest.param(family, scenario, id=f"{family}-{scenario}") for family in FAMILIES for scenario in SCENARIOS
]


def check_used(cache, family: str, scenario: str) -> None:
    """The run went through the library's own layers, the sparse step where there is one, and never through dense K/V."""
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
        with pytest.raises(known.error, match=known.match):
            reference(family, scenario)
        check_against_greedy(family)
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


def check_against_greedy(family: str) -> None:
    """Where DynamicCache cannot serve a draft model: with the draft patched too, speculation gives what greedy gives."""
    model, draft = get_model(family), get_draft_model(family)
    ids = make_prompt(96, seed=5)[None]
    expected = run_generate(model, None, input_ids=ids)
    with patched(model, EXACT), patched(draft, EXACT):
        ours = SCENARIOS["draft_model"](model, lambda: PSACache(model.config, EXACT))
    assert_same_run(ours, expected)
    assert ours["calls"] < len(expected["scores"])


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
    ids = make_prompt(96, seed=5)[None]
    expected = run_generate(model, None, input_ids=ids)
    with patched(model, EXACT), patched(draft, EXACT):
        ours = SCENARIOS["draft_model"](model, lambda: PSACache(model.config, EXACT))
    assert_same_run(ours, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_below_min_context_is_bit_identical_to_dense(family):
    """`min_context` above the length: no sparse step, and not one bit of difference from the unpatched sdpa or eager run."""
    model = get_model(family)
    config = PSAConfig(threshold=0.5, min_context=4096, block_size=4)
    with patched(model, config):
        ours = greedy(model, lambda: PSACache(model.config, config))
    assert_same_run(ours, reference(family, "greedy"))
    assert ours["cache"].stats()["sparse_steps"] == 0
