"""Layers that attend to the keys and values of another one (Gemma 4), whose queries transformers cuts to the tokens that are asked
for."""
from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_sparse import PSACache, patch_model, unpatch_model
from hf_sparse.cache.kept import KeptSelection
from hf_sparse.cache.layer import PSALayer
from hf_sparse.compat import CACHE_ARGUMENT
from tests.models import energise

EXACT = dict(min_context=0, block_size=8, threshold=1.0)
WINDOW = 24


def gemma4(shared: int):
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "gemma4_text", hidden_size=48, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        num_global_key_value_heads=2, head_dim=16, global_head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3, vocab_size=61, vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=8, num_kv_shared_layers=shared, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return energise(AutoModelForCausalLM.from_config(config).eval())


def logits(model, ids, mask, tokens: int = 6, **kwargs) -> torch.Tensor:
    """[tokens, B, V] of a greedy generate()."""
    done = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, output_logits=True,
                          return_dict_in_generate=True, **kwargs)
    return torch.stack(done.logits)


@pytest.mark.parametrize("shared", [2, 4])
@pytest.mark.parametrize(("length", "padding"), [(7, 0), (60, 0), (60, 20)], ids=["short", "longer-than-the-window", "padded"])
def test_reading_everything_is_dense_attention(shared, length, padding):
    model, ids = gemma4(shared), torch.randint(1, 61, (2, length))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    dense = logits(model, ids, mask)
    patch_model(model, **EXACT)
    torch.testing.assert_close(logits(model, ids, mask), dense, rtol=0, atol=3e-4)


@pytest.mark.parametrize("padding", [0, 9])
def test_logits_of_the_last_token_are_those_of_all(padding):
    model, ids = gemma4(2), torch.randint(1, 61, (2, 50))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    patch_model(model, **EXACT)
    found = []
    with torch.no_grad():
        for keep in (0, 1):
            cache = {CACHE_ARGUMENT: PSACache(model.config, **EXACT)}
            found.append(model(ids, attention_mask=mask, logits_to_keep=keep, **cache).logits[:, -1])
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def test_a_turn_of_several_tokens_takes_no_sparse_step(monkeypatch):
    model, ids = gemma4(2), torch.randint(1, 61, (1, 30))
    settings = dict(min_context=0, block_size=8, policy="top_k", top_k=2)
    patch_model(model, **settings)
    cache = PSACache(model.config, **settings)
    model.generate(ids, max_new_tokens=3, do_sample=False, past_key_values=cache)
    steps, step = [], PSALayer._sparse_step
    monkeypatch.setattr(PSALayer, "_sparse_step", lambda self, *args: steps.append(self.length) or step(self, *args))
    more = torch.randint(1, 61, (1, 20 + 32))
    model.generate(more, max_new_tokens=1, do_sample=False, past_key_values=cache)
    assert steps == []
    unpatch_model(model)


def test_a_kept_selection_is_the_layers_own(monkeypatch):
    """Others' queries neither take it nor replace it."""
    asked, due = [], KeptSelection.due
    monkeypatch.setattr(KeptSelection, "due", lambda self, query, *args: asked.append(id(self)) or due(self, query, *args))
    model, ids = gemma4(4), torch.randint(1, 61, (1, 120))
    patch_model(model, min_context=0, block_size=8, policy="top_k", top_k=6, digest="pages", logical_size=4, reuse=4, reuse_refresh=0)
    tokens = 6
    model.generate(ids, max_new_tokens=tokens + 1, do_sample=False)
    cache = model.last_psa_cache
    owners = len(cache.sparse_layers)
    assert owners == 1 and len(asked) == tokens * owners    # one full layer of its own, read by two others
    assert len(DynamicCache(config=model.config).layers) == len(cache.layers)
