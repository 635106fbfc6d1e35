"""A model whose sliding and full-attention layers differ in their KV heads and head sizes (Gemma 4)."""
from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_sparse import HeadProfile, PSACache, patched
from hf_sparse.compat import kv_heads, layer_config
from hf_sparse.heads.profile import full_attention_heads
from hf_sparse.patches.prefill import kv_bytes

gemma4 = pytest.importorskip("transformers.models.gemma4")
SETTINGS = dict(threshold=1.0, min_context=0, block_size=16)


@functools.cache
def model():
    torch.manual_seed(5)
    config = gemma4.Gemma4TextConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        num_global_key_value_heads=2, head_dim=12, global_head_dim=20, attention_k_eq_v=True, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size=61, vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).eval()


def generate(cache=None) -> torch.Tensor:
    ids = torch.randint(1, 61, (2, 90), generator=torch.Generator().manual_seed(6))
    more = {} if cache is None else {"past_key_values": cache}
    out = model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, output_logits=True,
                           return_dict_in_generate=True, **more)
    return torch.stack(out.logits)


def test_heads_of_a_layer():
    config = model().config.get_text_config(decoder=True)
    assert [kv_heads(config, index) for index in range(4)] == [4, 2, 4, 2]
    assert [kv_bytes(layer_config(config, index), torch.float32) for index in range(2)] == [2 * 4 * 12 * 4, 2 * 2 * 20 * 4]
    assert full_attention_heads(model().config) == ((1, 3), 2)


@pytest.mark.parametrize("memory", ["auto", "1MiB"])
def test_everything_read_is_dense(memory):
    expected = generate(DynamicCache(config=model().config))
    with patched(model(), gpu_memory=memory, **SETTINGS):
        torch.testing.assert_close(generate(), expected, rtol=0, atol=1e-4)


def test_a_budget_is_checked_by_the_full_attention_layers():
    with pytest.raises(ValueError, match="too small even for one short sequence"):
        PSACache(model().config, gpu_memory=1000)


@pytest.mark.parametrize("sparsity", [0.25, 0.5, 1.0])
def test_heads_of_a_profile_stream(sparsity):
    """The windows are wider than the text."""
    expected = generate(DynamicCache(config=model().config))
    gates = torch.tensor([[0.1, 0.2], [0.9, 0.8]])
    heads = HeadProfile(gates, (1, 3), {}).settings(sparsity=sparsity)
    with patched(model(), **heads, **SETTINGS):
        torch.testing.assert_close(generate(), expected, rtol=0, atol=1e-4)
        assert model().last_psa_cache.state.heads == {0.25: (1, 2), 0.5: (2,), 1.0: ()}[sparsity]


@pytest.mark.parametrize(("heads", "message"), [
    (((1, 2),), "KV head 2 of layer 1, which has 2 KV heads"), (((0, 1),), "layer 0, which has no full attention"),
    (((4, 0),), "layer 4, but this model has 4 layers"),
])
def test_heads_that_are_not_there_are_refused(heads, message):
    with pytest.raises(ValueError, match=message):
        PSACache(model().config, streaming_heads=heads)
