"""Bad input is refused by name, before anything is computed, and what was in the cache is still there.

Settings that make no sense by themselves are in test_config.py; here are models, caches and calls that don't
fit.
"""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_sparse import PSACache, patch_model, patched, unpatch_model
from hf_sparse.sizes import parse_bytes
from tests.families.build import tiny_model
from tests.models import get_draft_model, get_model
from tests.parity import assert_same_run, reference
from tests.scenarios import greedy, make_prompt, pad_left, run_generate
from tests.test_parity_sparse import SPARSE

LENGTH = 60


def filled(model, rows: int = 1, length: int = LENGTH, **settings) -> PSACache:
    """A cache with a prompt in it; two rows are left-padded differently."""
    cache = PSACache(model.config, SPARSE, **settings)
    ids, mask = prompt(rows, length)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return cache


def prompt(rows: int = 1, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_left([make_prompt(length - 7 * i, seed=70 + i) for i in range(rows)])


@torch.no_grad()
def go_on(model, cache, rows: int = 1) -> torch.Tensor:
    """Logits of six more tokens: three at once, then one by one."""
    new = torch.stack([make_prompt(6, seed=80 + i) for i in range(rows)])
    first = model(input_ids=new[:, :3], past_key_values=cache, use_cache=True).logits
    rest = [
        model(input_ids=new[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(3, 6)
    ]
    return torch.cat([first, *rest], 1)


@pytest.fixture
def model():
    """The tiny llama, patched."""
    model = get_model("llama")
    with patched(model, SPARSE):
        yield model
    model.eval()


@pytest.fixture
def computed(model):
    """A list that grows whenever the model's first layer runs."""
    calls = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


def feed(model, cache, rows=1, count=1, **kwargs):
    ids = torch.stack([make_prompt(count, seed=90)] * rows)
    return model(input_ids=ids, past_key_values=cache, use_cache=kwargs.pop("use_cache", True), **kwargs)


def generate(model, cache, ids=None, **kwargs):
    if ids is None:
        ids = torch.cat([prompt()[0], make_prompt(5, seed=91)[None]], 1)
    return run_generate(
        model, cache, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **kwargs
    )


def train(model, cache):
    model.train()
    try:
        feed(model, cache)
    finally:
        model.eval()


BAD_CALLS = {
    "batch": (
        ValueError,
        "holds 1 sequence.* has 2.*batch_repeat_interleave",
        lambda m, c: feed(m, c, rows=2),
    ),
    "batch_of_generate": (
        ValueError,
        "holds 1 sequence",
        lambda m, c: generate(m, c, do_sample=True, num_return_sequences=3),
    ),
    "beams_on_one_row": (ValueError, "holds 1 sequence", lambda m, c: generate(m, c, num_beams=2)),
    "attentions": (
        NotImplementedError,
        "output_attentions.*eager",
        lambda m, c: feed(m, c, output_attentions=True),
    ),
    "attentions_of_generate": (
        NotImplementedError,
        "output_attentions.*eager",
        lambda m, c: generate(m, c, output_attentions=True),
    ),
    "training": (NotImplementedError, r"model\.eval\(\)", train),
    "no_cache": (ValueError, "use_cache=False", lambda m, c: feed(m, c, use_cache=False)),
    "no_cache_of_generate": (ValueError, "use_cache=False", lambda m, c: generate(m, c, use_cache=False)),
    "same_prompt": (
        ValueError,
        f"holds {LENGTH} tokens but the prompt has {LENGTH}.*cache.reset",
        lambda m, c: generate(m, c, ids=prompt()[0]),
    ),
    "prompt_lookup": (
        NotImplementedError,
        "prompt_lookup_num_tokens.*already holds",
        lambda m, c: generate(m, c, prompt_lookup_num_tokens=3),
    ),
    "draft_model": (
        NotImplementedError,
        "assistant_model.*already holds",
        lambda m, c: generate(m, c, assistant_model=get_draft_model("llama")),
    ),
    "mask_of_a_static_cache": (
        ValueError,
        f"speaks of {LENGTH + 9} tokens.*there are {LENGTH + 2}",
        lambda m, c: feed(m, c, count=2, attention_mask=torch.ones(1, 1, 2, LENGTH + 9).bool().tril(LENGTH)),
    ),
    "copy": (TypeError, r"cache\.fork\(\)", lambda m, c: copy.copy(c)),
    "pickle": (TypeError, "can't be pickled", lambda m, c: pickle.dumps(c)),
    "fork_with_other_blocks": (
        ValueError,
        "block_size.*can change: threshold",
        lambda m, c: c.fork(block_size=8),
    ),
    "fork_with_unknown_field": (ValueError, "thresold", lambda m, c: c.fork(thresold=0.5)),
}


@pytest.mark.parametrize(("error", "message", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_call_is_refused_and_the_cache_goes_on(model, computed, error, message, call):
    cache, twin = filled(model), filled(model)
    computed.clear()
    with pytest.raises(error, match=message):
        call(model, cache)
    assert not computed
    assert cache.tokens == LENGTH
    assert torch.equal(go_on(model, cache), go_on(model, twin))


def test_cache_of_another_model(model):
    """Another model with the same shapes would read keys that mean nothing to it."""
    other = get_draft_model("llama")
    cache, twin = filled(model), filled(model)
    with patched(other, SPARSE), pytest.raises(ValueError, match="keys and values of another model.*reset"):
        feed(other, cache)
    assert torch.equal(go_on(model, cache), go_on(model, twin))


def test_empty_cache_may_change_models(model):
    other = get_draft_model("llama")
    cache = filled(model)
    cache.reset()
    with patched(other, SPARSE):
        ids, mask = prompt()
        other(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert cache.tokens == LENGTH


@pytest.mark.parametrize("is_filled", [False, True], ids=["empty", "filled"])
def test_cache_of_another_architecture(model, is_filled):
    other = get_model("qwen2")
    cache = filled(model) if is_filled else PSACache(model.config, SPARSE)
    with patched(other, SPARSE), pytest.raises(ValueError, match="built for llama.* the model is qwen2"):
        feed(other, cache)
    assert cache.tokens == (LENGTH if is_filled else 0)


def test_batch_of_an_unpatched_model():
    model = get_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache, twin = filled(model), filled(model)
        with pytest.raises(ValueError, match="holds 1 sequence"):
            feed(model, cache, rows=2)
        assert torch.equal(go_on(model, cache), go_on(model, twin))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_mask_that_shows_padding(family):
    """Padding was never stored, so a mask that shows it later can't be served."""
    model = get_model(family)
    with patched(model, SPARSE):
        cache, twin = filled(model, rows=2), filled(model, rows=2)
        shown = torch.ones(2, LENGTH + 1, dtype=torch.long)
        with pytest.raises(ValueError, match="attention_mask shows tokens that were masked"):
            feed(model, cache, rows=2, attention_mask=shown)
        assert torch.equal(go_on(model, cache, rows=2), go_on(model, twin, rows=2))


def test_crop_of_more_than_a_window_keeps():
    model = get_model("gemma3")
    with patched(model, SPARSE):
        cache, twin = filled(model, length=200), filled(model, length=200)
        with pytest.raises(
            ValueError, match="window of 16 tokens and can take back .* not 150.*activate_past"
        ):
            cache.crop(-150)
        assert cache.tokens == 200
        assert torch.equal(go_on(model, cache), go_on(model, twin))


# -- budgets ---------------------------------------------------------------------------------------


def named_bytes(error: pytest.ExceptionInfo) -> int:
    """The budget that a refusal asks for."""
    return parse_bytes(re.search(r"at least ([\d.]+\w+)", str(error.value)).group(1))


def least_bytes(model, rows: int = 1, **settings) -> int:
    """The smallest gpu_memory (host_memory, where the former is given) for the prompt and `go_on`."""
    name = "host_memory" if "gpu_memory" in settings else "gpu_memory"
    size = 2000
    while True:
        try:
            go_on(model, filled(model, rows, **{name: size}, **settings), rows)
            return size
        except ValueError as error:
            needed = parse_bytes(re.search(r"at least ([\d.]+\w+)", str(error)).group(1))
            assert needed > size, f"{size} bytes were refused: {error}"
            size = needed


BUDGETS = {
    "pool_alone": ("gpu_memory", dict(host_memory=0)),
    "pool_before_a_host_tier": ("gpu_memory", dict(host_memory="64MiB")),
    "host_tier": ("host_memory", dict(gpu_memory="4MiB")),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("name", "settings"), BUDGETS.values(), ids=BUDGETS)
def test_turn_that_the_budget_can_not_hold(model, computed, name, settings, rows):
    """A turn that is too long is refused with a number that would do; a shorter one can follow."""
    budget = least_bytes(model, rows, **settings)
    cache, twin = (filled(model, rows, **{name: budget}, **settings) for _ in range(2))
    expected = go_on(model, twin, rows)
    computed.clear()
    with pytest.raises(ValueError, match=f"{name}.*Nothing in the cache was lost") as error:
        feed(model, cache, rows, count=4000)
    assert not computed
    assert cache.tokens == LENGTH
    assert torch.equal(go_on(model, cache, rows), expected)
    enough = filled(model, rows, **{name: named_bytes(error)}, **settings)
    feed(model, enough, rows, count=4000)
    assert enough.tokens == LENGTH + 4000


@pytest.mark.parametrize(("name", "settings"), BUDGETS.values(), ids=BUDGETS)
def test_rows_that_the_budget_can_not_hold(model, name, settings):
    budget = least_bytes(model, **settings)
    cache, twin = (filled(model, **{name: budget}, **settings) for _ in range(2))
    with pytest.raises(ValueError, match=name):
        cache.batch_repeat_interleave(500)
    assert cache.batch_size == 1
    assert torch.equal(go_on(model, cache), go_on(model, twin))


@pytest.mark.parametrize(("name", "settings"), BUDGETS.values(), ids=BUDGETS)
def test_prompt_that_the_budget_can_not_hold(model, name, settings):
    """Refused at the first layer or a later one, the cache is empty afterwards and takes a shorter prompt."""
    budget = least_bytes(model, **settings)
    cache = PSACache(model.config, SPARSE, **{name: budget}, **settings)
    with pytest.raises(ValueError, match=name):
        feed(model, cache, count=4000)
    assert cache.tokens == 0
    ids, mask = prompt()
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert torch.equal(go_on(model, cache), go_on(model, filled(model)))


def test_budget_below_any_sequence():
    """Known from the config alone, so the constructor says it, in bytes that then do."""
    config = get_model("llama").config
    with pytest.raises(ValueError, match="too small even for one short sequence") as error:
        PSACache(config, SPARSE, gpu_memory="1KiB", host_memory="64MiB")
    PSACache(config, SPARSE, gpu_memory=named_bytes(error), host_memory="64MiB")


# -- building a cache ------------------------------------------------------------------------------


def test_cache_needs_a_config():
    with pytest.raises(TypeError, match=r"model\.config"):
        PSACache(get_model("llama"))


def test_cache_needs_layers():
    config = LlamaConfig()
    config.num_hidden_layers = 0
    with pytest.raises(ValueError, match="names no layers"):
        PSACache(config)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(thresold=0.9), TypeError, "Did you mean 'threshold'"),
        (dict(threshold=0.0), ValueError, r"threshold=0.0 is outside \(0, 1\]"),
        (dict(threshold=1.5), ValueError, r"threshold=1.5 is outside \(0, 1\]"),
        (dict(gpu_memory="plenty"), ValueError, "'plenty' is not a size.*4GiB"),
        (dict(config="fast"), ValueError, "no preset 'fast'.*psa"),
    ],
    ids=["unknown_field", "zero_threshold", "threshold_above_one", "no_size", "unknown_preset"],
)
@pytest.mark.parametrize("door", ["PSACache", "patch_model", "patched"])
def test_settings_are_refused_at_every_door(door, settings, error, message):
    model = get_model("llama")
    before = dict(model.__dict__)
    with pytest.raises(error, match=message):
        if door == "PSACache":
            PSACache(model.config, **settings)
        elif door == "patch_model":
            patch_model(model, **settings)
        else:
            with patched(model, **settings):
                pass
    assert model.__dict__ == before
    assert model.config._attn_implementation == "eager"


# -- models that can't be served -------------------------------------------------------------------


def tiny_t5():
    config = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config)


def tiny_backbone():
    return LlamaModel(LlamaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                  intermediate_size=16))  # fmt: skip


UNSERVED = {
    "no_model": (lambda: torch.nn.Linear(2, 2), TypeError, "takes a transformers model, got Linear"),
    "no_head": (tiny_backbone, TypeError, "LlamaModel does not generate.*AutoModelForCausalLM"),
    "encoder_decoder": (tiny_t5, NotImplementedError, "encoder-decoder.*unpatched"),
    "no_interface": (lambda: tiny_model("bloom"), NotImplementedError, "AttentionInterface.*unpatched"),
    "mask_of_its_own": (lambda: tiny_model("doge"), NotImplementedError, "doge: it builds a mask.*unpatched"),
    "no_cache_argument": (lambda: tiny_model("rwkv"), NotImplementedError, "forward takes no .*unpatched"),
    "own_cache_layers": (lambda: tiny_model("falcon_h1"), NotImplementedError, "can't replace.*own cache"),
}


@pytest.mark.parametrize(("build", "error", "message"), UNSERVED.values(), ids=UNSERVED)
def test_model_is_refused_and_left_as_it_was(build, error, message):
    model = build()
    attributes = set(model.__dict__)
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(error, match=message):
        patch_model(model)
    assert set(model.__dict__) == attributes
    assert not model._forward_pre_hooks
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


def test_cache_for_an_encoder_decoder_config():
    with pytest.raises(NotImplementedError, match="Encoder-decoder models"):
        PSACache(tiny_t5().config)


def test_budget_that_fits_no_sequence_leaves_the_model_as_it_was():
    model = get_model("llama")
    with pytest.raises(ValueError, match="too small"):
        patch_model(model, SPARSE, gpu_memory=10, host_memory="64MiB")
    assert_same_run(greedy(model, lambda: DynamicCache(config=model.config)), reference("llama", "greedy"))
    assert model.config._attn_implementation == "eager"


def test_patched_model_keeps_its_config_when_another_is_refused():
    model = get_model("llama")
    with patched(model, SPARSE):
        expected = run_generate(model, None, input_ids=prompt()[0])
        with pytest.raises(ValueError, match="too small"):
            patch_model(model, SPARSE, gpu_memory=10, host_memory="64MiB")
        again = run_generate(model, None, input_ids=prompt()[0])
        assert again["cache"].config == SPARSE
        assert torch.equal(again["scores"], expected["scores"])


def test_unpatching_what_is_not_patched_does_nothing():
    model = AutoModelForCausalLM.from_config(get_model("llama").config)
    before = dict(model.__dict__)
    assert unpatch_model(model) is model
    assert model.__dict__ == before


def test_a_forward_that_was_interrupted_between_layers_is_noticed(monkeypatch):
    model = get_model("llama")
    ids = torch.arange(5, 45)[None]
    with patched(model, threshold=1.0, min_context=0, block_size=4):
        cache = PSACache(model.config, threshold=1.0, min_context=0, block_size=4)
        model(ids, past_key_values=cache, use_cache=True)

        def interrupt(self, *args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(cache.layers[-1]), "_decode", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, :1], past_key_values=cache, use_cache=True)
        with pytest.raises(RuntimeError, match="interrupted"):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        cache.reset()
        model(ids, past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 40
