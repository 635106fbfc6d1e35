"""The captured decode step without a GPU: kernels are interpreted, and a "graph" is the recorded function run again.

So what is tested is everything around the graph: whose cache a replay serves, when a capture must not be used again,
and what happens if it can't be made.
"""
from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse import PSACache, patch_model
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.patches import capture, graph

SETTINGS = dict(min_context=0, block_size=16, threshold=0.6, round_blocks=2)


@pytest.fixture
def recordings(monkeypatch):
    """The functions that were captured. Replays run them again."""
    made = []

    def record(function, device):
        made.append(function)
        step = next(step for step in graph._STEPS.values() if step.bound)
        frozen = step.bound                                 # a graph knows only what was there when it was captured

        memory = []

        def replay():
            step.bound = frozen
            try:
                fresh = function()
            finally:
                step.bound = []
            if not memory:
                memory.append(fresh)
            elif fresh is not memory[0]:                    # every replay writes where the first one wrote
                for old, new in zip(pytree.tree_leaves(memory[0]), pytree.tree_leaves(fresh)):
                    if torch.is_tensor(old):
                        old.copy_(new)
            return memory[0]

        return replay

    monkeypatch.setattr(capture, "record", record)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(graph, "capturable", lambda model, cache: cache.config.compile and all(
        layer.on_device(10**6) for layer in cache.sparse_layers if layer.table is not None))
    return made


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                         head_dim=16, vocab_size=50, eos_token_id=None, pad_token_id=None)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


def prompt(seed: int, length: int = 260, rows: int = 1):
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def run(model, ids, tokens=4, cache=None, mask=None, compiled=True, **kwargs):
    cache = cache or PSACache(model.config, compile=compiled, **SETTINGS)
    out = model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=tokens, do_sample=False,
                         return_dict_in_generate=True, output_logits=True, **{CACHE_ARGUMENT: cache}, **kwargs)
    return out, cache


def same(a, b):
    assert torch.equal(a.sequences, b.sequences)
    assert len(a.logits) == len(b.logits)
    for x, y in zip(a.logits, b.logits):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


def test_captured_equals_uncaptured_over_caches_rows_and_padding(model, recordings):
    patch_model(model, **SETTINGS)
    mask = torch.ones(2, 260, dtype=torch.long)
    mask[1, :90] = 0
    cases = [(prompt(1), None), (prompt(2, 275), None), (prompt(3, rows=2), mask), (prompt(4), None)]
    for ids, mask in cases:
        captured, cache = run(model, ids, mask=mask)
        plain, other = run(model, ids, mask=mask, compiled=False)
        same(captured, plain)
        assert cache.stats()["kv_fraction"] == other.stats()["kv_fraction"] < 1.0
        assert cache.tokens == ids.shape[1] + 3
    # One capture for a batch of one and one for two rows: every other cache was served by a replay.
    assert len(recordings) == 2


def test_a_conversation_goes_on_in_the_same_capture(model, recordings):
    patch_model(model, **SETTINGS)
    ids = prompt(5)
    first, cache = run(model, ids)
    longer = torch.cat([first.sequences, prompt(6, 9)], 1)
    again, _ = run(model, longer, cache=cache)
    alone, alone_cache = run(model, ids, compiled=False)
    plain, _ = run(model, longer, cache=alone_cache, compiled=False)
    same(again, plain)
    assert len(recordings) == 1


def test_changed_weights_and_settings_are_captured_anew(model, recordings):
    patch_model(model, **SETTINGS)
    ids = prompt(7)
    run(model, ids)
    assert len(recordings) == 1
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.randn(32, 64), requires_grad=False)
    captured, _ = run(model, ids)
    plain, _ = run(model, ids, compiled=False)
    same(captured, plain)
    assert len(recordings) == 2
    model.model.layers[1].mlp._disable_adapters = True      # what an adapter's switch looks like
    run(model, ids)
    assert len(recordings) == 3
    run(model, ids)
    assert len(recordings) == 3


def test_outputs_of_a_replay_belong_to_the_caller(model, recordings):
    patch_model(model, **SETTINGS)
    out, _ = run(model, prompt(8), tokens=5, output_hidden_states=True)
    plain, _ = run(model, prompt(8), tokens=5, compiled=False, output_hidden_states=True)
    for ours, want in zip(out.hidden_states[1:], plain.hidden_states[1:]):
        torch.testing.assert_close(ours[-1], want[-1], rtol=0, atol=1e-5)


def test_a_generate_that_cannot_be_captured_asks_once(model, recordings, monkeypatch):
    """Asking waits for the device, so it must not happen for every token."""
    patch_model(model, **SETTINGS)
    asked = []
    monkeypatch.setattr(graph, "_find_step", lambda *args: asked.append(args))
    _, cache = run(model, prompt(10), tokens=4)
    assert len(asked) == 1 and not recordings and cache.tokens == 260 + 3


def test_a_second_signature_that_fails_is_not_raised(model, recordings, monkeypatch):
    patch_model(model, **SETTINGS)
    ids = prompt(11)
    run(model, ids)
    assert len(recordings) == 1

    def fail(function, device):
        raise RuntimeError("out of memory for a second graph")

    monkeypatch.setattr(capture, "record", fail)
    with pytest.warns(UserWarning, match="could not be captured"):
        other, _ = run(model, ids, output_hidden_states=True)
    plain, _ = run(model, ids, compiled=False)
    same(other, plain)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("operation not permitted when stream is capturing")],
                         ids=["out of memory", "capture"])
def test_a_failed_capture_is_said_once_and_decoding_goes_on(model, recordings, monkeypatch, error):
    def fail(function, device):
        function()                                          # got as far as the last layer
        raise error

    monkeypatch.setattr(capture, "record", fail)
    patch_model(model, **SETTINGS)
    ids = prompt(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured, cache = run(model, ids, tokens=5)
        run(model, ids, tokens=3)
    assert sum("could not be captured" in str(item.message) for item in caught) == 1
    plain, _ = run(model, ids, tokens=5, compiled=False)
    same(captured, plain)
    assert cache.tokens == 260 + 4


def test_fingerprint_sees_weights_modes_hooks_and_switches(model):
    before = capture.fingerprint(model)
    assert capture.fingerprint(model) == before
    model.train()
    assert capture.fingerprint(model) != before
    model.eval()
    assert capture.fingerprint(model) == before
    hook = model.model.norm.register_forward_hook(lambda *args: None)
    assert capture.fingerprint(model) != before
    hook.remove()
    assert capture.fingerprint(model) == before
    model.model.norm.scaling = {"default": 2.0}
    assert capture.fingerprint(model) != before


def test_signature_refuses_what_a_capture_would_freeze():
    ids = torch.zeros(1, 1, dtype=torch.long)
    assert capture.signature({"input_ids": ids, "use_cache": True}) == capture.signature({"input_ids": ids + 1, "use_cache": True})
    assert capture.signature({"input_ids": ids}) != capture.signature({"input_ids": ids.repeat(2, 1)})
    assert capture.signature({"input_ids": ids, "pair": (ids, ids)}) is None
