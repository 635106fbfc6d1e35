"""A patched model with transformers' own caches, forward by forward: the logits that it gives unpatched.

Soft-capped and sink logits are where the patched model has code of its own for it; a static cache hands out its empty places.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_sparse import patched
from hf_sparse.patches.attention import psa_attention
from tests.models import get_model
from tests.scenarios import make_prompt, pad_left

CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=80),
}
STEPS = {"prompt-then-tokens": (30, 1, 1), "chunks": (30, 9, 13, 1), "one-token-first": (1, 1, 30), "short": (5, 1, 4)}


@torch.no_grad()
def logits(model, make, steps, ids, mask=None):
    cache, outputs, past = make(model), [], 0
    for count in steps:
        end = past + count
        given = {} if mask is None else dict(attention_mask=mask[:, :end])
        outputs.append(model(ids[:, past:end], past_key_values=cache, **given).logits)
        past = end
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3", "llama"])
def test_forwards(family, make, steps, padded):
    model, total = get_model(family), sum(steps)
    ids, mask = pad_left([make_prompt(total, seed=1), make_prompt(total - 4 * padded, seed=2)])
    expected = logits(model, make, steps, ids, mask if padded else None)
    with patched(model, "exact"):
        got = logits(model, make, steps, ids, mask if padded else None)
    real = mask.bool()                                      # a query of padding alone may give anything
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_generate_with_a_static_cache(family):
    model = get_model(family)
    arguments = dict(inputs=make_prompt(50, seed=0)[None], max_new_tokens=6, return_dict_in_generate=True, output_logits=True,
                     cache_implementation="static", disable_compile=True)  # fmt: skip
    expected = model.generate(**arguments)
    with patched(model, "exact"):
        got = model.generate(**arguments)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=2e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_module_says_whether_no_mask_means_causal(is_causal):
    """As for transformers' own attention functions."""
    module = torch.nn.Module().eval()
    module.is_causal = is_causal
    query, key, value = torch.randn(3, 1, 2, 7, 8, generator=torch.Generator().manual_seed(0))
    output, _ = psa_attention(module, query, key, value, None, scaling=0.4, softcap=5.0)
    weights = 5 * torch.tanh(query @ key.mT * 0.4 / 5)
    if is_causal:
        weights = weights.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(output, (weights.softmax(-1) @ value).transpose(1, 2))
