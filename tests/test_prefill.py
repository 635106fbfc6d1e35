"""Prompts in chunks: how long a chunk is, that it changes nothing, and that it bounds what a prompt takes."""

from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse import PSACache, PSAConfig, patched
from hf_sparse.compat import TURNS_IN_CHUNKS
from hf_sparse.patches import checks, prefill
from hf_sparse.patches.graph import _one_token
from hf_sparse.patches.prefill import SMALLEST, activation_bytes, chunk_size, kv_bytes
from tests.models import get_model
from tests.scenarios import make_prompt, pad_left, run_generate

GIB = 2**30
LLAMA_8B = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=8, head_dim=128, vocab_size=128256)
LONG = 131072
GPU = torch.device("cuda", 0)


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations inside it give, weights that they look at among them, and their peak."""

    def __init__(self):
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage) -> None:
        key = storage._cdata
        if key not in self.held:
            weakref.finalize(storage, self.held.pop, key, None)
        self.held[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self.held.values()))


# -- how long ------------------------------------------------------------------------------------------------------


def test_what_a_token_takes():
    assert kv_bytes(LLAMA_8B, torch.bfloat16) == 4096
    # Gate, up and product; the residual, its norm and what is made of them.
    assert activation_bytes(LLAMA_8B, torch.bfloat16) == int(1.25 * 2 * 3 * (14336 + 4096))
    assert activation_bytes(LLAMA_8B, torch.bfloat16, last_only=False) == int(1.25 * 2 * 128256)
    many = SimpleNamespace(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, vocab_size=50,
                           num_experts_per_tok=8)
    few = SimpleNamespace(**{**vars(many), "num_experts_per_tok": 1})
    assert activation_bytes(many, torch.float32) > activation_bytes(few, torch.float32)


@pytest.mark.parametrize(
    ("free", "tokens", "settings", "expected"),
    [
        (80 * GIB, LONG, {}, None),
        (20 * GIB, LONG, {}, None),
        (10 * GIB, LONG, {}, 65536),
        (4 * GIB, LONG, {}, 16384),
        (4 * GIB, LONG, dict(rows=2), 4096),
        (4 * GIB, LONG, dict(last_only=False), 8192),
        (4 * GIB, 4096, {}, None),
        (4 * GIB, 4096, dict(past=10 * LONG), SMALLEST),
        (0, LONG, {}, SMALLEST),
        (0, SMALLEST, {}, None),
    ],
    ids=str,
)
def test_chunks_of_a_prompt(free, tokens, settings, expected):
    assert chunk_size(free, LLAMA_8B, tokens, torch.bfloat16, **settings) == expected


def test_what_was_decided_fits():
    each, layer = activation_bytes(LLAMA_8B, torch.bfloat16), kv_bytes(LLAMA_8B, torch.bfloat16)
    for free in range(2 * GIB, 24 * GIB, GIB // 3):
        chunk = chunk_size(free, LLAMA_8B, LONG, torch.bfloat16)
        if chunk is None:
            assert LONG * each <= free
        else:
            assert chunk * each + 2 * LONG * layer <= free < LONG * each + GIB


@pytest.mark.parametrize(("inner", "heads", "vocabulary"), [(512, 4, 128), (96, 8, 128), (96, 4, 4000)],
                         ids=["mlp", "attention", "logits"])
def test_the_estimate_is_from_above_and_near(inner, heads, vocabulary):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
                         num_key_value_heads=2, head_dim=16, vocab_size=vocabulary)
    model = LlamaForCausalLM(config).eval()
    ids, peaks = make_prompt(900, seed=1)[None], []
    for tokens in (300, 900):
        with torch.no_grad(), Live() as live:
            model(ids[:, :tokens], use_cache=False, logits_to_keep=0 if vocabulary > 1000 else 1)
        peaks.append(live.peak)
    measured = (peaks[1] - peaks[0]) / 600
    estimate = activation_bytes(config, torch.float32, last_only=vocabulary < 1000)
    assert measured <= estimate <= 2.2 * measured


# -- when ------------------------------------------------------------------------------------------------------------


def decide(monkeypatch, free=4 * GIB, config=LLAMA_8B, kwargs=None, tokens=LONG, **settings):
    """What generate() of a model on a GPU with so much free would add for a prompt of zeros."""
    monkeypatch.setattr(prefill, "free_bytes", lambda device: free)
    monkeypatch.setattr(prefill, "auto_budget", lambda device: free - GIB)
    model = SimpleNamespace(device=GPU, dtype=torch.bfloat16, config=config, forward=lambda ids, logits_to_keep=0: None)
    cache = PSACache(config, **settings)
    kwargs = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64), **(kwargs or {})}
    with prefill.in_chunks(model, cache, kwargs, SimpleNamespace(num_beams=1)) as more:
        chunk = more.get("prefill_chunk_size")
        assert cache.state.expected == (0 if chunk is None and "prefill_chunk_size" not in kwargs else tokens)
    assert cache.state.expected == 0
    return chunk


POOL = dict(gpu_memory="2GiB", host_memory="16MiB")


def test_memory_that_the_pool_will_take_is_not_free(monkeypatch):
    kv = 32 * LONG * 4096                                   # 16 GiB
    assert decide(monkeypatch, free=40 * GIB) is None
    assert decide(monkeypatch, free=int(1.125 * kv) + 4 * GIB) == 16384
    assert decide(monkeypatch, free=6 * GIB, **POOL) == 16384
    assert decide(monkeypatch, free=2 * GIB + 100, **POOL) == SMALLEST
    assert decide(monkeypatch, free=12 * GIB, host_memory="16MiB") == SMALLEST      # an automatic pool leaves 1 GiB here
    assert decide(monkeypatch, free=6 * GIB, kwargs={"num_beams": 2}, **POOL) == 4096


@pytest.mark.parametrize(
    "kwargs",
    [
        {"prefill_chunk_size": None},
        {"inputs_embeds": torch.zeros(1, 3, 4)},
        {"pixel_values": torch.zeros(1, 3, 4, 4)},
        {"prompt_lookup_num_tokens": 3},
        {"output_hidden_states": True},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_calls_that_are_not_cut(monkeypatch, kwargs):
    monkeypatch.setattr(PSACache, "tokens", 0)
    if "prefill_chunk_size" in kwargs:
        model = SimpleNamespace(device=GPU)
        with prefill.in_chunks(model, PSACache(LLAMA_8B), kwargs, None) as more:
            assert more == {}
        return
    assert decide(monkeypatch, free=6 * GIB, kwargs=kwargs, **POOL) is None
    assert decide(monkeypatch, free=6 * GIB, **POOL) is not None


def test_models_that_are_not_cut(monkeypatch):
    for parameters in ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                       {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64,
                        "original_max_position_embeddings": 4096}):
        config = LlamaConfig(**{**LLAMA_8B.to_dict(), "rope_parameters": parameters})
        assert decide(monkeypatch, free=6 * GIB, config=config, **POOL) is None
    two = SimpleNamespace(device=GPU, dtype=torch.bfloat16, config=LLAMA_8B, forward=lambda ids: None,
                          hf_device_map={"a": 0, "b": 1})
    ids = torch.zeros(1, LONG, dtype=torch.int64)
    assert prefill._automatic(two, PSACache(LLAMA_8B, **POOL), {}, None, ids) is None
    on_cpu = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, config=LLAMA_8B, forward=lambda ids: None)
    assert prefill._automatic(on_cpu, PSACache(LLAMA_8B, **POOL), {}, None, ids) is None


# -- through generate() --------------------------------------------------------------------------------------------------

SETTINGS = PSAConfig(threshold=0.6, digest="key_bits", min_context=0, block_size=4, round_blocks=1)
LENGTHS = (300, 236, 289)


@torch.no_grad()
def run(family: str, watch=None, pads=True, **settings) -> dict:
    """A greedy run over a padded batch of three prompts, or the first of them alone; `watch(inputs, cache)` at each forward."""
    chunk = {name: settings.pop(name) for name in ("prefill_chunk_size",) if name in settings}
    model, config = get_model(family), SETTINGS.replace(**settings)
    ids, mask = pad_left([make_prompt(length, seed=70 + i) for i, length in enumerate(LENGTHS if pads else LENGTHS[:1])])
    cache = PSACache(model.config, config)

    def look(module, args, kwargs, output):
        if watch is not None:
            watch(kwargs["input_ids"].shape[1], cache)

    with patched(model, config):
        hook = model.register_forward_hook(look, with_kwargs=True)
        try:
            return run_generate(model, cache, input_ids=ids, attention_mask=mask, max_new_tokens=6, **chunk)
        finally:
            hook.remove()


@functools.cache
def at_once(family: str) -> dict:
    return run(family)


@pytest.mark.parametrize("chunk", [17, 128])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_chunks_over_a_host_tier_are_one_shot(family, chunk):
    """With softcap, with sinks, and with chunks that are all padding in some row."""
    resident = run(family, prefill_chunk_size=chunk)
    offloaded = run(family, prefill_chunk_size=chunk, gpu_memory="600KiB", host_memory="16MiB")
    assert torch.equal(resident["scores"], offloaded["scores"]) and offloaded["cache"].stats()["misses"] > 0
    expected = at_once(family)
    assert torch.equal(offloaded["tokens"], expected["tokens"])
    torch.testing.assert_close(offloaded["scores"], expected["scores"], rtol=0, atol=2e-4)
    assert offloaded["cache"].stats()["blocks_read"] == expected["cache"].stats()["blocks_read"]


def test_generate_cuts_by_itself_and_leaves_the_callers_choice(monkeypatch):
    asked, fed, expected = [], [], at_once("llama")["scores"]
    monkeypatch.setattr(prefill, "_automatic", lambda *args: asked.append(1) or 128)
    automatic = run("llama", lambda count, cache: fed.append((count, cache.state.expected)))
    assert asked == [1] and fed == [(128, 300), (128, 300), (44, 300), *[(1, 300)] * 5]
    torch.testing.assert_close(automatic["scores"], expected, rtol=0, atol=2e-4)
    assert automatic["cache"].state.expected == 0
    for chunk, first in ((None, 300), (200, 200)):
        fed.clear()
        run("llama", lambda count, cache: fed.append(count), prefill_chunk_size=chunk)
        assert asked == [1] and fed[0] == first


@pytest.mark.parametrize(("chunk", "pads"), [(1, False), (23, False), (23, True), (299, True)])
def test_a_single_token_that_is_left_over_is_no_decode_step(chunk, pads):
    """Prompts are exact: 300 = 13 * 23 + 1."""
    expected = run("llama", pads=pads)
    got = run("llama", pads=pads, prefill_chunk_size=chunk)
    assert got["cache"].stats()["steps"] == got["cache"].stats()["sparse_steps"] == 5
    torch.testing.assert_close(got["scores"], expected["scores"], rtol=0, atol=2e-4)
    assert got["cache"].stats()["blocks_read"] == expected["cache"].stats()["blocks_read"]


@pytest.mark.skipif(not TURNS_IN_CHUNKS, reason="transformers gets them wrong: refused")
@pytest.mark.parametrize("only_new", [False, True])
@torch.no_grad()
def test_nor_is_one_of_a_new_turn_in_chunks(only_new):
    model = get_model("llama")
    scores = []
    for chunk in ({}, {"prefill_chunk_size": 10}):
        first = run("llama", pads=False)
        ids = torch.cat([first["tokens"], make_prompt(20, seed=9)[None]], 1)       # and the last token, which is not fed yet
        mask = torch.ones_like(ids)
        with patched(model, SETTINGS):
            second = run_generate(model, first["cache"], input_ids=ids[:, -21:] if only_new else ids, attention_mask=mask,
                                  max_new_tokens=3, **chunk)
        scores.append(second["scores"])
        assert second["cache"].stats()["sparse_steps"] == 5 + 2
    torch.testing.assert_close(*scores, rtol=0, atol=2e-4)


def test_turns_in_chunks_are_refused_where_transformers_gets_them_wrong(monkeypatch):
    model, first = get_model("llama"), run("llama", pads=False)
    monkeypatch.setattr(checks, "TURNS_IN_CHUNKS", False)
    ids = torch.cat([first["tokens"], make_prompt(20, seed=9)[None]], 1)
    more = dict(attention_mask=torch.ones_like(ids), max_new_tokens=3, prefill_chunk_size=10)
    before = first["cache"].get_seq_length()
    with patched(model, SETTINGS), pytest.raises(NotImplementedError, match="prefill_chunk_size"):
        run_generate(model, first["cache"], input_ids=ids, **more)
    assert first["cache"].get_seq_length() == before


@pytest.mark.parametrize(("expected", "decode"), [(0, True), (5, True), (6, False)])
def test_nor_does_the_captured_step_take_it(expected, decode):
    cache = SimpleNamespace(tokens=5, state=SimpleNamespace(expected=expected))
    assert _one_token(cache, {"input_ids": torch.zeros(1, 1)}) is decode


@pytest.mark.parametrize("memory", [dict(), dict(gpu_memory="600KiB", host_memory="16MiB")], ids=["resident", "tiered"])
def test_room_for_a_prompt_is_made_once(memory):
    pools = []

    def watch(count, cache):
        pool = cache.sparse_layers[0].pool
        pools.append((pool.version, pool.kv.data_ptr(), cache.sparse_layers[0].columns))

    run("llama", watch, prefill_chunk_size=60, **memory)
    assert len(set(pools[:5])) == 1 and pools[0][2] >= 300 // 4


def test_a_prompt_that_does_not_fit_is_refused_at_its_first_chunk():
    fed = []
    with pytest.raises(ValueError, match="host tier is full.*Nothing in the cache was lost"):
        run("llama", lambda count, cache: fed.append(cache), prefill_chunk_size=60, gpu_memory="600KiB", host_memory="200KiB")
    assert fed == []


# -- what a prompt takes ---------------------------------------------------------------------------------------------------


def peak_of_a_prompt(layers: int, tokens: int, chunk: int) -> tuple[int, int]:
    """Bytes held at most while a prompt goes into a cache, beside weights, pool and digests; bytes of a layer's KV."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=32, vocab_size=128)
    model = LlamaForCausalLM(config).eval()
    settings = PSAConfig(block_size=16, gpu_memory=2**21, host_memory="64MiB", round_blocks=1)
    cache = PSACache(config, settings)
    ids = make_prompt(tokens, seed=2)[None]
    with patched(model, settings), torch.no_grad(), Live() as live:
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1,
                       prefill_chunk_size=chunk)
    pool = cache.sparse_layers[0].pool
    held = pool.kv.nbytes + pool.host.nbytes + sum(weight.nbytes for weight in model.parameters())
    held += sum(layer.side_bytes() + layer.digests.tail.nbytes for layer in cache.sparse_layers)
    return live.peak - held, tokens * kv_bytes(config, torch.float32)


def test_a_prompt_takes_the_pool_and_one_layer():
    cases = (3, 1500, 256), (9, 1500, 256), (3, 3000, 256)
    (few, layer), (many, _), (longer, twice) = (peak_of_a_prompt(*case) for case in cases)
    # More layers take more of nothing but the pool, whose maps and tables grow a little.
    assert many - few < 0.1 * layer
    # Three copies of one layer's KV: what is read, and, where only the CPU reaches the host tier, both places it is read from.
    assert 2 * (twice - layer) < longer - few < 4 * (twice - layer)
