"""Predicted queries: that they are what the layer itself would ask, whose models are refused, and hooks that go away again."""
from __future__ import annotations

import copy

import pytest
import torch

from hf_sparse import PSACache, patch_model, patched, unpatch_model
from hf_sparse.compat import AttentionInterface
from hf_sparse.patches import graph, predict
from tests.models import build

TIERED = dict(gpu_memory="1MiB", host_memory="8MiB")


def hooks(model) -> list:
    return [module for module in model.modules() if predict.look_ahead in module._forward_pre_hooks.values()]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "glm", "olmoe", "gpt_oss", "cohere"])
def test_a_prediction_from_a_layer_s_own_input_is_its_query(name):
    asked, entered = {}, {}

    def attention(module, query, key, value, mask, **kwargs):
        asked[module.layer_idx] = query
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("spy_on_queries", attention)
    model = build(name, **({"use_qk_norm": True} if name == "cohere" else {}))
    model.set_attn_implementation("spy_on_queries")
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: entered.update({index: (args[0], kwargs["position_embeddings"])}),
            with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(3, 60, (2, 5)), use_cache=False)
        following = predict.following_layers(model)
        assert len(following) == len(layers) - 1 >= 1
        for index in range(1, len(layers)):
            hidden, (cos, sin) = entered[index]
            query = predict.predicted_query(following[index - 1], hidden, cos, sin)
            assert torch.equal(query, asked[index]) and float(query.std()) > 0


@pytest.mark.parametrize(("name", "reason"), [
    ("phi3", "has no q_proj"),
    ("olmo2", "has no input_layernorm"),
    ("phi", "rotates its queries in a way of its own"),
    ("gpt2", "no `layers` with `self_attn`"),
])
def test_models_that_are_refused(name, reason):
    model = build(name)
    before = set(vars(model))
    with pytest.raises(NotImplementedError, match=f"prefetch=True can't predict.*{reason}.*without prefetch=True"):
        patch_model(model, prefetch=True, **TIERED)
    assert set(vars(model)) == before and not hooks(model)
    unpatch_model(patch_model(model, **TIERED))


def test_a_projection_of_more_than_the_query_is_refused():
    model = build("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = torch.nn.Linear(attention.q_proj.in_features, 2 * attention.q_proj.out_features)
    with pytest.raises(NotImplementedError, match="q_proj of layer 1 gives more than the query"):
        patch_model(model, prefetch=True, **TIERED)


def test_hooks_are_on_every_layer_but_the_last_and_go_away():
    model = build("llama")
    layers = list(model.model.layers)
    patch_model(model, prefetch=True, **TIERED)
    assert hooks(model) == layers[:-1]
    patch_model(model, prefetch=True, **TIERED)             # again: not twice
    assert all(len(layer._forward_pre_hooks) == 1 for layer in layers[:-1])
    twin = copy.deepcopy(model)
    assert hooks(twin) == list(twin.model.layers)[:-1]
    assert unpatch_model(twin) is twin and not hooks(twin) and hooks(model) == layers[:-1]
    patch_model(model, **TIERED)
    assert not hooks(model)
    with patched(model, prefetch=True, **TIERED):
        assert hooks(model)
    assert not hooks(model)
    unpatch_model(model)
    assert all(not layer._forward_pre_hooks and not layer._forward_pre_hooks_with_kwargs for layer in layers)


def test_outside_of_the_captured_step_nothing_is_predicted_and_that_is_said_once(monkeypatch):
    monkeypatch.setattr(predict, "predicted_query", lambda *args: pytest.fail("predicted"))
    graph._warn_no_prefetch.cache_clear()
    model = build("llama")
    ids = torch.randint(3, 60, (1, 40))
    want = model.generate(ids, max_new_tokens=3, do_sample=False)
    patch_model(model, prefetch=True, threshold=1.0, min_context=0, block_size=4, **TIERED)
    with pytest.warns(UserWarning, match="prefetch=True does nothing here") as caught:
        for _ in range(2):
            assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), want)
    assert sum("prefetch" in str(item.message) for item in caught) == 1
    cache = PSACache(model.config)                          # one that wants no prefetch
    model.generate(ids, past_key_values=cache, max_new_tokens=3)
