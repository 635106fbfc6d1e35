"""The tiny models and the scenarios are worth comparing on: the other tests mean nothing where these fail."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.models import FAMILIES, SLIDING, SLIDING_WINDOW, VOCAB_SIZE, WITHOUT_FULL_ATTENTION, get_model
from tests.parity import assert_same_run, reference, upstream_failure
from tests.scenarios import NEW_TOKENS, PADDED_LENGTHS, PLAIN, PROMPT_LENGTH, make_prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_varies(family):
    tokens = reference(family, "padded")["tokens"][:, -NEW_TOKENS:]
    assert tokens.unique().numel() >= 12
    assert all(row.unique().numel() >= 2 for row in tokens)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_distant_context_matters_exactly_where_a_layer_sees_it(family):
    model = get_model(family)
    ids = make_prompt(PROMPT_LENGTH, seed=1)[None]
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] - 3 + 50) % (VOCAB_SIZE - 3) + 3
    difference = (model(ids).logits[0, -1] - model(changed).logits[0, -1]).abs().max().item()
    if family in WITHOUT_FULL_ATTENTION:
        assert model.config.num_hidden_layers * SLIDING_WINDOW < PROMPT_LENGTH - 5
        assert difference == 0.0
    else:
        assert difference > 1e-3


@pytest.mark.parametrize("family", sorted(SLIDING))
@torch.no_grad()
def test_sliding_window_bites(family):
    model = get_model(family)
    ids = make_prompt(PROMPT_LENGTH, seed=1)[None]
    sliding = [layer.is_sliding for layer in DynamicCache(config=model.config).layers]
    assert any(sliding)
    attentions = model(ids, output_attentions=True).attentions
    windowed = [a for a, is_sliding in zip(attentions, sliding, strict=True) if is_sliding]
    assert all(a[0, :, -1, : PROMPT_LENGTH - SLIDING_WINDOW].abs().max() == 0 for a in windowed)


def test_prompts_close_twenty_blocks():
    assert min(PROMPT_LENGTH, *PADDED_LENGTHS) // 4 >= 20


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_is_accepted_and_rejected(family):
    if upstream_failure(family, "draft_model"):
        pytest.skip(upstream_failure(family, "draft_model").reason)
    calls = reference(family, "draft_model")["calls"]
    all_accepted = -(-NEW_TOKENS // 6)  # five drafted tokens and one of the model's own per call
    assert all_accepted < calls < NEW_TOKENS


@pytest.mark.parametrize("scenario", PLAIN)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_way_gives_the_same(family, scenario):
    if upstream_failure(family, scenario):
        pytest.skip(upstream_failure(family, scenario).reason)
    assert_same_run(reference(family, scenario), reference(family, scenario, plain=True))


def test_early_finish_stops_a_row_early():
    tokens = reference("llama", "early_finish")["tokens"]
    assert (tokens[0, -8:] == 0).all()
    assert (tokens[1:, -8:] != 0).any()
