"""patch_model, unpatch_model and patched: what they change, that they undo it exactly, and how generate() is entered."""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    StaticCache,
    pipeline,
)

from hf_sparse import PSACache, PSAConfig, patch_model, patched, unpatch_model
from tests.models import FAMILIES, get_draft_model, get_model
from tests.scenarios import make_prompt, pad_left

EXACT = PSAConfig(threshold=1.0, min_context=0, block_size=4, digest="key_bits")
SPARSE = EXACT.replace(threshold=0.5, round_blocks=1)
IDS = make_prompt(60, seed=0)[None]
TOOLS = dict(max_new_tokens=8, do_sample=False)


@pytest.fixture(params=["llama", "gemma3", "gpt_oss"])
def model(request):
    """A model that a test may change, patched or not: a copy."""
    return copy.deepcopy(get_model(request.param))


@pytest.fixture
def llama():
    return copy.deepcopy(get_model("llama"))


def snapshot(model) -> dict:
    """All that patching may touch."""
    return {
        "attributes": sorted(name for name in model.__dict__),
        "attention": {
            name: getattr(module.config, "_attn_implementation", None)
            for name, module in model.named_modules()
            if hasattr(module, "config")
        },
        "config": json.dumps(model.config.to_dict(), default=str, sort_keys=True),
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        "generate": model.generate,
        "generation": model.generation_config.to_dict(),
        "forward": {name: module.forward.__func__ for name, module in model.named_modules()},
        "weights": {name: parameter.data_ptr() for name, parameter in model.named_parameters()},
    }


@torch.no_grad()
def logits(model, **kwargs) -> torch.Tensor:
    return model(IDS, use_cache=False, **kwargs).logits


def test_the_model_itself_is_returned(model):
    assert patch_model(model, EXACT) is model
    assert unpatch_model(model) is model


def test_unpatching_restores_everything(model):
    before, output = snapshot(model), logits(model)
    patch_model(model, SPARSE)
    assert snapshot(model) != before
    model.generate(IDS, **TOOLS)
    unpatch_model(model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), output)


def test_patched_restores_everything_even_after_an_error(model):
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="mine"), patched(model, SPARSE):
        raise RuntimeError("mine")
    assert snapshot(model) == before


def test_each_attention_implementation_comes_back(llama):
    for name in ("eager", "sdpa"):
        llama.set_attn_implementation(name)
        with patched(llama, EXACT):
            assert llama.config._attn_implementation == "psa"
        assert llama.config._attn_implementation == name


def test_patching_twice_takes_the_second_config_and_unpatches_once(llama):
    before = snapshot(llama)
    patch_model(llama, EXACT)
    once = snapshot(llama)
    patch_model(llama, SPARSE)
    assert snapshot(llama)["hooks"] == once["hooks"] and snapshot(llama)["attributes"] == once["attributes"]
    llama.generate(IDS, **TOOLS)
    assert llama.last_psa_cache.config == SPARSE
    unpatch_model(llama)
    assert snapshot(llama) == before


def test_patched_inside_patched_goes_back_to_the_outer_config(llama):
    patch_model(llama, EXACT)
    llama.generate(IDS, **TOOLS)
    outer, cache = snapshot(llama), llama.last_psa_cache
    with patched(llama, SPARSE):
        llama.generate(IDS, **TOOLS)
        assert llama.last_psa_cache.config == SPARSE
    assert snapshot(llama) == outer
    assert llama.last_psa_cache is cache
    llama.generate(IDS, **TOOLS)
    assert llama.last_psa_cache.config == EXACT


def test_a_refused_second_patch_keeps_the_first(llama):
    patch_model(llama, SPARSE)
    before = snapshot(llama)
    with pytest.raises((TypeError, ValueError)):
        patch_model(llama, threshold=7)
    assert snapshot(llama) == before
    llama.generate(IDS, **TOOLS)
    assert llama.last_psa_cache.config == SPARSE


def test_unpatching_a_plain_model_does_nothing(model):
    before = snapshot(model)
    unpatch_model(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "given",
    ["exact", {"threshold": 1.0}, PSAConfig(threshold=1.0), None],
    ids=["preset", "dict", "config", "nothing"],
)
def test_ways_to_name_a_config(llama, given):
    patch_model(llama, given, min_context=5)
    llama.generate(IDS, **TOOLS)
    assert llama.last_psa_cache.config == PSAConfig.build(given, min_context=5)


def test_a_generate_of_its_own_survives(llama):
    """Other libraries put a generate() on the model as well: it is called, and it is there afterwards."""
    calls = []
    inner = llama.generate

    def counted(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    llama.generate = counted
    with patched(llama, SPARSE):
        llama.generate(IDS, **TOOLS)
        assert isinstance(llama.last_psa_cache, PSACache) and llama.last_psa_cache.get_seq_length() > 60
    assert calls == [1]
    assert llama.generate is counted


# -- copies, saving ------------------------------------------------------------------------------------------------


def test_a_copy_of_a_patched_model_is_independent(model):
    patch_model(model, SPARSE)
    expected = model.generate(IDS, **TOOLS)
    other = copy.deepcopy(model)
    assert torch.equal(other.generate(IDS, **TOOLS), expected)
    assert other.last_psa_cache is not model.last_psa_cache
    first = model.last_psa_cache
    patch_model(other, EXACT)
    other.generate(IDS, **TOOLS)
    assert other.last_psa_cache.config == EXACT and model.last_psa_cache is first
    unpatch_model(other)
    assert other.config._attn_implementation == "eager" and model.config._attn_implementation == "psa"
    assert torch.equal(model.generate(IDS, **TOOLS), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(model.generate(IDS, **TOOLS), expected)


def test_state_dicts_are_those_of_the_plain_model(model):
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    patch_model(model, SPARSE)
    model.generate(IDS, **TOOLS)
    state = model.state_dict()
    assert list(state) == list(plain)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for loaded in (torch.load(buffer, weights_only=True), pickle.loads(pickle.dumps(dict(state)))):
        assert all(torch.equal(loaded[name], value) for name, value in plain.items())
    model.load_state_dict(state)


def test_a_saved_patched_model_loads_as_a_plain_one(llama, tmp_path):
    patch_model(llama, SPARSE)
    expected = logits(llama)
    llama.save_pretrained(tmp_path)
    assert '"psa"' not in (tmp_path / "config.json").read_text(encoding="utf-8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not hasattr(loaded, "last_psa_cache")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)


class Wrapper(torch.nn.Module):
    """What a PEFT model looks like from outside: it holds the model and generates through it."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def get_base_model(self):
        return self.inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def generate(self, *args, **kwargs):
        return self.inner.generate(*args, **kwargs)


def test_wrapped_models(model):
    before = snapshot(model)
    wrapper = Wrapper(model)
    expected = model.generate(IDS, **TOOLS)
    assert patch_model(wrapper, EXACT) is wrapper
    assert torch.equal(wrapper.generate(IDS, **TOOLS), expected)
    assert model.last_psa_cache.stats()["sparse_steps"] > 0
    unpatch_model(wrapper)
    assert snapshot(model) == before
    with patched(wrapper, SPARSE):
        wrapper.generate(IDS, **TOOLS)
        assert model.last_psa_cache.config == SPARSE
    assert snapshot(model) == before


# -- generate() ------------------------------------------------------------------------------------------------------


def test_the_last_cache(llama):
    patch_model(llama, SPARSE)
    assert llama.last_psa_cache is None
    llama.generate(IDS, **TOOLS)
    first = llama.last_psa_cache
    assert first.get_seq_length() == 60 + 7 and first.stats()["sparse_steps"] == 7
    llama.generate(IDS[:, :40], **TOOLS)
    assert llama.last_psa_cache is not first and llama.last_psa_cache.get_seq_length() == 47
    mine = PSACache(llama.config, EXACT)
    llama.generate(IDS, past_key_values=mine, **TOOLS)
    assert llama.last_psa_cache is mine


def without(model, **kwargs):
    """What the plain model gives, and what the patched one does."""
    expected = model.generate(**kwargs)
    with patched(model, EXACT):
        got = model.generate(**kwargs)
        cache = model.last_psa_cache
    assert torch.equal(got, expected)
    return cache


def test_without_a_cache(model):
    assert without(model, inputs=IDS, use_cache=False, **TOOLS) is None


def test_with_a_generation_config_that_wants_no_cache(llama):
    config = GenerationConfig(max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
    assert without(llama, inputs=IDS, generation_config=config) is None
    expected = llama.generate(IDS, config)
    with patched(llama, EXACT):
        assert torch.equal(llama.generate(IDS, config), expected)  # given by position


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_with_another_cache_implementation(llama, implementation):
    assert (
        without(llama, inputs=IDS, cache_implementation=implementation, disable_compile=True, **TOOLS) is None
    )


def test_with_other_caches(model):
    for make in (
        lambda: DynamicCache(config=model.config),
        lambda: StaticCache(config=model.config, max_cache_len=80),
    ):
        expected = model.generate(IDS, past_key_values=make(), disable_compile=True, **TOOLS)
        with patched(model, EXACT):
            got = model.generate(IDS, past_key_values=make(), disable_compile=True, **TOOLS)
            assert model.last_psa_cache is None
        assert torch.equal(got, expected)


def test_with_beams(model):
    ids, mask = pad_left([make_prompt(60, seed=1), make_prompt(47, seed=2)])
    cache = without(model, input_ids=ids, attention_mask=mask, num_beams=3, num_return_sequences=2, **TOOLS)
    assert cache.batch_size == 6


def test_with_a_draft_model(llama):
    cache = without(llama, inputs=IDS, assistant_model=copy.deepcopy(get_draft_model("llama")), **TOOLS)
    assert isinstance(cache, PSACache)


def test_with_prompt_lookup(llama):
    assert isinstance(without(llama, inputs=IDS, prompt_lookup_num_tokens=4, **TOOLS), PSACache)


def test_with_penalties_and_eos(llama):
    eos = int(llama.generate(IDS, **TOOLS)[0, 63])
    without(llama, inputs=IDS, repetition_penalty=1.3, eos_token_id=eos, **TOOLS)


def test_an_empty_prompt_of_one_token(model):
    without(model, inputs=IDS[:, :1], **TOOLS)


def test_forward_in_training_is_what_it_was(llama):
    llama.train()
    expected = llama(IDS, labels=IDS, use_cache=False).loss
    expected.backward()
    gradient = llama.model.layers[0].self_attn.q_proj.weight.grad.clone()
    llama.zero_grad()
    with patched(llama, SPARSE):
        loss = llama(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        llama.model.layers[0].self_attn.q_proj.weight.grad, gradient, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_without_a_cache_is_exact(family):
    """A patched model computes what it did: scores, perplexities, embeddings."""
    model = get_model(family)
    ids, mask = pad_left([make_prompt(60, seed=1), make_prompt(43, seed=2)])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        with patched(model, SPARSE):
            got = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-4)


def test_model_config_that_names_a_cache_implementation(llama):
    """A default of the model's own gives way to the PSACache, and is there again afterwards."""
    llama.generation_config.cache_implementation = "static"
    with patched(llama, SPARSE):
        llama.generate(IDS, **TOOLS)
        assert isinstance(llama.last_psa_cache, PSACache)
    assert llama.generation_config.cache_implementation == "static"


def test_warnings_are_few(llama):
    """Ordinary use of a patched model warns of nothing that is ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with patched(llama, SPARSE):
            llama.generate(IDS, **TOOLS)
    ours = [
        str(warning.message)
        for warning in caught
        if "PSA" in str(warning.message) or "hf_sparse" in str(warning.filename)
    ]
    assert ours == []


# -- pipeline ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, 101)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", padding_side="left"
    )


def test_the_same_prompt_again_is_refused_however_it_is_given(llama):
    patch_model(llama, EXACT)
    cache = PSACache(llama.config, EXACT)
    llama.generate(IDS, past_key_values=cache, **TOOLS)
    for call in (dict(inputs=IDS), dict(input_ids=IDS)):
        with pytest.raises(ValueError, match="already holds 67 tokens but the prompt has 60"):
            llama.generate(**call, past_key_values=cache, **TOOLS)
    with pytest.raises(ValueError, match="already holds 67 tokens but the prompt has 60"):
        llama.generate(IDS, past_key_values=cache, **TOOLS)
    assert cache.get_seq_length() == 67


def test_pipeline(llama, tokenizer):
    texts = [
        " ".join(f"w{int(token)}" for token in make_prompt(length, seed=length)) for length in (60, 44, 71)
    ]

    def run():
        generator = pipeline("text-generation", model=llama, tokenizer=tokenizer)
        return generator(texts, batch_size=3, max_new_tokens=8, do_sample=False)

    expected = run()
    with patched(llama, EXACT):
        got = run()
        stats = llama.last_psa_cache.stats()
    assert got == expected and len(expected) == 3
    assert stats["sparse_steps"] > 0 and stats["materialized"] == 0
    with patched(llama, SPARSE):
        run()
        assert llama.last_psa_cache.stats()["kv_fraction"] < 1.0
