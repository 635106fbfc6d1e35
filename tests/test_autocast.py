"""Generating under torch.autocast: what digests and steps compute in fp32 stays in fp32."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_sparse import PSAConfig, patched
from tests.cache.drive import Text, decode, feed
from tests.models import get_model
from tests.scenarios import make_prompt, pad_left

IDS, MASK = pad_left([make_prompt(50, seed=0), make_prompt(41, seed=1)])


def run(model, dtype):
    with torch.autocast("cpu", dtype):
        return torch.stack(model.generate(IDS, attention_mask=MASK, max_new_tokens=6, return_dict_in_generate=True,
                                          output_logits=True).logits).float()  # fmt: skip


@pytest.mark.parametrize("settings", [
    dict(threshold=1.0), dict(threshold=1.0, digest="key_bits"), dict(threshold=1.0, digest="cuboid_mean", stop_rule="window"),
    dict(threshold=1.0, digest="centroid", stop_rule="window"), dict(threshold=1.0, kv_bits=8, block_size=16),
], ids=lambda settings: "-".join(map(str, settings.values())))  # fmt: skip
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_generate(dtype, weights, settings):
    model = copy.deepcopy(get_model("llama")).to(weights)
    config = PSAConfig(**{"min_context": 0, "block_size": 8, **settings})
    expected = run(model, dtype)
    with patched(model, config):
        got = run(model, dtype)
        assert model.last_psa_cache.stats()["sparse_steps"] == 5
    # The first token is of the prompt, the others of steps; they differ as 16 bits do.
    torch.testing.assert_close(got[:3], expected[:3], rtol=0, atol=0.35)


@pytest.mark.parametrize("settings", [
    dict(threshold=0.7), dict(threshold=0.7, digest="key_bits"), dict(threshold=0.7, verify=True),
    dict(threshold=0.7, digest="cuboid_mean", stop_rule="window"), dict(threshold=0.7, kv_bits=4, block_size=16),
], ids=lambda settings: "-".join(map(str, settings.values())))  # fmt: skip
def test_sparse_steps_are_those_without_autocast(settings):
    """To the last bit, given the same queries, keys and values."""
    text, outputs, read = Text(length=300), [], []
    for enabled in (False, True):
        cache = text.cache(round_blocks=1, **settings)
        feed(cache, text, 0, 296)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs.append(decode(cache, text, 296, 300))
        read.append(cache.stats()["kv_fraction"])
    assert torch.equal(*outputs) and read[0] == read[1] < 1
