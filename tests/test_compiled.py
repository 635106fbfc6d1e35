"""torch.compile around a patched model: the cache works as uncompiled, and what is refused stays refused."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_sparse import PSACache, patch_model
from tests.models import get_model
from tests.scenarios import make_prompt

SETTINGS = dict(threshold=1.0, min_context=0, block_size=8)


@pytest.fixture(scope="module")
def compiled():
    torch._dynamo.reset()
    return torch.compile(patch_model(copy.deepcopy(get_model("llama")), **SETTINGS), backend="eager")


@torch.no_grad()
def test_forwards_are_those_of_the_plain_model(compiled):
    ids, cache = make_prompt(40, seed=0)[None], PSACache(compiled.config, **SETTINGS)
    got = [compiled(part, past_key_values=cache).logits for part in ids.split([30, 1, 9], 1)]
    torch.testing.assert_close(torch.cat(got, 1), get_model("llama")(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("error", "message", "given"), [
    (ValueError, "use_cache=False", dict(use_cache=False)),
    (NotImplementedError, "output_attentions", dict(output_attentions=True)),
    (ValueError, "holds 2 sequence", {}),
])  # fmt: skip
@torch.no_grad()
def test_what_is_refused(compiled, error, message, given):
    cache = PSACache(compiled.config, **SETTINGS)
    compiled(make_prompt(20, seed=1).expand(2, -1), past_key_values=cache)
    with pytest.raises(error, match=message):
        compiled(make_prompt(1, seed=2)[None].expand(2 if given else 1, -1), past_key_values=cache, **given)
    assert cache.get_seq_length() == 20
    compiled(make_prompt(1, seed=2).expand(2, -1), past_key_values=cache)


@torch.no_grad()
def test_a_forward_that_was_interrupted_is_noticed(compiled, monkeypatch):
    cache = PSACache(compiled.config, **SETTINGS)
    compiled(make_prompt(20, seed=1)[None], past_key_values=cache)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(cache.layers[-1]), "_decode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiled(make_prompt(1, seed=2)[None], past_key_values=cache)
    with pytest.raises(RuntimeError, match="interrupted"):
        compiled(make_prompt(1, seed=2)[None], past_key_values=cache)


def test_patching_comes_first(compiled):
    with pytest.raises(TypeError, match="patch first, compile afterwards"):
        patch_model(compiled)
