"""Gradients and a PSACache: right where a forward holds all tokens, refused where they would have to go through the cache."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import DynamicCache

from hf_sparse import PSACache, patched
from hf_sparse.cache.handle import refuse_gradient
from tests.models import get_model
from tests.scenarios import make_prompt

SETTINGS = dict(threshold=1.0, block_size=8)
FAMILIES = ["llama", "gemma2", "gemma3", "gpt_oss"]
REFUSAL = "Gradients don't flow through what a PSACache has stored.*use_cache=False"


def embeddings(model) -> torch.Tensor:
    ids = torch.stack([make_prompt(50, seed=seed) for seed in (0, 1)])
    return model.get_input_embeddings()(ids).detach().requires_grad_()


def forwards(model, inputs, cache, steps) -> list[torch.Tensor]:
    return [model(inputs_embeds=part, past_key_values=cache).logits for part in inputs[:, :sum(steps)].split(steps, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_forward_has_the_gradients_of_the_plain_model(family):
    model, found = get_model(family), []
    for make, place in ((DynamicCache, contextlib.nullcontext()), (PSACache, patched(model, SETTINGS))):
        inputs = embeddings(model)
        with place:
            cache = make(config=model.config) if make is DynamicCache else make(model.config, SETTINGS)
            forwards(model, inputs, cache, [50])[0].square().mean().backward(inputs=[inputs])
        found.append(inputs.grad)
    assert found[0].abs().max() > 1e-4
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("min_context", [0, 1000], ids=["sparse", "dense"])
@pytest.mark.parametrize("steps", [[30, 20], [40, 1, 1]], ids=["chunks", "tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_backward_through_the_cache_is_refused(family, steps, min_context):
    model = get_model(family)
    with patched(model, SETTINGS, min_context=min_context):
        inputs = embeddings(model)
        first, *others = forwards(model, inputs, PSACache(model.config, SETTINGS, min_context=min_context), steps)
        with pytest.raises(NotImplementedError, match=REFUSAL):
            others[-1].mean().backward(inputs=[inputs])
        first.mean().backward(inputs=[inputs])              # nothing before it
        assert inputs.grad.isfinite().all() and inputs.grad.abs().max() > 0


@pytest.mark.filterwarnings("ignore:This PSACache hands out dense keys")
@pytest.mark.parametrize("steps", [[50], [40, 1]], ids=["prompt", "token"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_backward_on_a_model_that_is_not_patched_is_refused(family, steps):
    """It asks for the stored keys and values, also at once."""
    model = get_model(family)
    inputs = embeddings(model)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        forwards(model, inputs, PSACache(model.config, SETTINGS), steps)[-1].mean().backward(inputs=[inputs])


def test_what_kernels_computed_is_refused_too():
    """They give outputs that know of no gradient, so it is the query that tells."""
    query = torch.randn(2, 3, requires_grad=True)
    output = refuse_gradient(query.detach() * 2, query)
    assert torch.equal(output, query * 2)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        output.sum().backward()
    with torch.no_grad():
        assert not refuse_gradient(query.detach(), query).requires_grad


@pytest.mark.parametrize("min_context", [0, 1000], ids=["sparse", "dense"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_keeps_no_graph(family, min_context):
    """A loop without no_grad() must not hold on to what all its forwards have computed."""
    model = get_model(family)
    cache = PSACache(model.config, SETTINGS, min_context=min_context)
    with patched(model, SETTINGS, min_context=min_context):
        assert forwards(model, embeddings(model), cache, [30, 1, 1])[-1].requires_grad
    for layer in cache.layers:
        held = [layer.ring_keys, layer.ring_values] if layer.kind == "window" else [
            layer.pool.kv, *layer.digests.unit, *layer.digests.row, layer.digests.tail]
        assert not any(tensor.requires_grad for tensor in held if tensor is not None)
