"""The parity tests notice what they are there for: with a part of the library broken, a scenario differs.

Every control replaces one method by one that forgets a single thing, runs a scenario that passes otherwise,
and wants another result. An error would not do: it says nothing about what the comparison can see.
"""

from __future__ import annotations

import functools

import pytest
import torch

import hf_sparse.kernels.reference.append as append_kernels
import hf_sparse.patches.attention as attention
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.window import WindowLayer
from tests.parity import LOGIT_TOLERANCE, reference
from tests.scenarios import SCENARIOS, pad_left, padded_prompts, run_generate
from tests.test_parity import EXACT
from tests.test_parity_sparse import SPARSE, at_the_smallest_budget, run_patched


def wide_window(monkeypatch):
    """Sliding layers see everything."""
    build = WindowLayer.__init__
    monkeypatch.setattr(
        WindowLayer,
        "__init__",
        lambda self, state, index, window, chunk=None: build(self, state, index, 500, chunk),
    )


def without(cls, method: str, **arguments):
    """A break that calls `cls.method` with some of its arguments replaced."""

    def apply(monkeypatch):
        original = getattr(cls, method)
        names = original.__code__.co_varnames

        @functools.wraps(original)
        def forgetful(self, *args, **kwargs):
            given = {**dict(zip(names[1:], args, strict=False)), **kwargs}
            return original(self, **{**given, **arguments})

        monkeypatch.setattr(cls, method, forgetful)

    return apply


def skip(cls, method: str):
    """A break that makes `cls.method` do nothing."""
    return lambda monkeypatch: monkeypatch.setattr(cls, method, lambda self, *args, **kwargs: None)


def share_open_blocks(monkeypatch):
    """Rows and forks go on in the same open block instead of in copies of it."""
    take_rows = PSALayer._take_rows

    def shared(self, index, release=True):
        table = None if self.table is None else self.table.index_select(0, index)
        take_rows(self, index, release)
        if table is not None:
            self.table = table

    monkeypatch.setattr(PSALayer, "_take_rows", shared)


def first_rows(monkeypatch):
    """Picking rows keeps as many as asked for, but the first ones."""
    select = PSALayer.batch_select_indices
    monkeypatch.setattr(
        PSALayer, "batch_select_indices", lambda self, indices: select(self, torch.arange(len(indices)))
    )


def no_padding_mask(monkeypatch):
    """The mask function never hears of padding."""
    mask = attention.psa_mask
    monkeypatch.setattr(
        attention, "psa_mask", lambda *args, attention_mask=None, **kwargs: mask(*args, **kwargs)
    )


def no_mask_function(monkeypatch):
    """Only the attention function is registered: transformers then passes no mask at all."""
    monkeypatch.setattr(attention, "psa_mask", lambda *args, **kwargs: None)


CONTROLS = [
    ("window", wide_window, "gemma3", "greedy"),
    ("window", wide_window, "mistral", "greedy"),
    ("softcap_of_the_sparse_step", without(PSALayer, "_sparse_step", softcap=0.0), "gemma2", "greedy"),
    ("softcap_of_the_prompt", without(PSALayer, "_prefill", softcap=0.0), "gemma2", "greedy"),
    ("softcap_in_the_window", without(WindowLayer, "attend", softcap=0.0), "gemma2", "greedy"),
    ("sinks_of_the_sparse_step", without(PSALayer, "_sparse_step", sinks=None), "gpt_oss", "greedy"),
    ("sinks_of_the_prompt", without(PSALayer, "_prefill", sinks=None), "gpt_oss", "greedy"),
    ("sinks_in_the_window", without(WindowLayer, "attend", sinks=None), "gpt_oss", "greedy"),
    ("reorder", skip(PSALayer, "reorder_cache"), "llama", "beams"),
    ("reorder_in_the_window", skip(WindowLayer, "reorder_cache"), "mistral", "beams"),
    ("copy_on_write", share_open_blocks, "llama", "forked_prefix"),
    ("copy_on_write", share_open_blocks, "llama", "beams"),
    ("copy_on_write", share_open_blocks, "llama", "repeated_prefix"),
    ("row_selection", first_rows, "llama", "repeated_prefix"),
    ("crop", skip(PSALayer, "crop"), "llama", "prompt_lookup"),
    ("crop", skip(PSALayer, "crop"), "llama", "draft_model"),
    ("crop_in_the_window", skip(WindowLayer, "crop"), "mistral", "prompt_lookup"),
    ("padding_mask", no_padding_mask, "llama", "padded"),
    ("padding_mask", no_padding_mask, "llama", "inputs_embeds"),
    ("mask_function", no_mask_function, "llama", "padded"),
    ("padding_of_later_turns", no_padding_mask, "llama", "continued_padded"),
    ("padding_of_later_turns", no_padding_mask, "mistral", "continued_padded"),
    ("hidden_later", skip(PSALayer, "hide"), "llama", "continued_after_end"),
]


def differ(ours: dict, expected: dict) -> bool:
    if ours["tokens"].shape != expected["tokens"].shape or not torch.equal(
        ours["tokens"], expected["tokens"]
    ):
        return True
    return (ours["scores"] - expected["scores"]).abs().max().item() > 10 * LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("broken", "family", "scenario"),
    [
        pytest.param(broken, family, scenario, id=f"{name}-{family}-{scenario}")
        for name, broken, family, scenario in CONTROLS
    ],
)
def test_exact_run_differs_without(monkeypatch, broken, family, scenario):
    expected = reference(family, scenario)
    broken(monkeypatch)
    ours = run_patched(family, SCENARIOS[scenario], EXACT)
    assert differ(ours, expected), "the scenario passes although the library is broken"


def test_offloaded_differs_without_write_through(monkeypatch):
    """Blocks that close while decoding reach the host tier; what is evicted without that comes back empty."""
    ids, mask = pad_left(padded_prompts())

    def long_answer(model, make_cache):
        return run_generate(model, make_cache(), input_ids=ids, attention_mask=mask, max_new_tokens=48)

    def offloaded():
        run = functools.partial(SPARSE.replace, host_memory="64MiB", eviction="fifo")
        return at_the_smallest_budget(
            lambda budget: run_patched("llama", long_answer, run(gpu_memory=budget))
        )

    resident = run_patched("llama", long_answer, SPARSE)
    assert not differ(offloaded(), resident)
    monkeypatch.setattr(append_kernels, "_write_through", lambda *args: None)
    assert differ(offloaded(), resident)
