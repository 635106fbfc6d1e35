"""The decode step of layers with streaming heads as kernels: the ring's kernel beside those of the other heads' blocks."""
from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse import PSACache, patch_model
from hf_sparse.cache import split, split_storage, static, streaming_ring
from hf_sparse.kernels import streaming
from tests.cache.drive import Text, decode, feed, model_config
from tests.triton.compile_kernels import Recorder
from tests.triton.test_captured_step import prompt, recordings, run, same  # noqa: F401 - recordings is a fixture

SINK, WINDOW, PREFILL = 5, 21, 60
SETTINGS = dict(min_context=0, block_size=16, round_blocks=2, threshold=1.0, streaming_sink=SINK, streaming_window=WINDOW,
                streaming_prefill_window=PREFILL)
PAGES = dict(digest="min_max", policy="top_k", top_k=5)     # ranks short texts too
PADS = torch.tensor([0, 37])


def caches(text: Text, pairs, count=2, **settings) -> list[PSACache]:
    """With the same prompt; the last one takes the reference's step."""
    made = [PSACache(text.config(), **SETTINGS, **settings, streaming_heads=pairs) for _ in range(count)]
    made[-1].state.kernels = lambda device, dtype: False
    return made


SHAPES = [
    # KV heads, group, key dim, value dim, softcap, sinks, streaming, others
    pytest.param(5, 1, 16, 16, 0.0, False, (0, 2), {**PAGES, "top_k": 99}, id="0-and-2-of-5"),
    pytest.param(3, 3, 20, 24, 0.0, True, (2, 1), {}, id="all-but-the-first-sinks"),
    pytest.param(3, 2, 16, 16, 9.0, False, (1,), {**PAGES, "top_k": 99}, id="the-middle-softcap"),
    pytest.param(2, 2, 16, 32, 9.0, True, (0, 1), {}, id="all"),
]


@pytest.mark.parametrize(("heads", "group", "key_dim", "value_dim", "softcap", "sinks", "streaming", "others"), SHAPES)
def test_a_layer_by_kernels_and_by_the_reference(heads, group, key_dim, value_dim, softcap, sinks, streaming, others):
    text = Text(2, 142, 1, heads, group, key_dim, value_dim)
    valid = torch.arange(142) >= PADS[:, None]
    logits = torch.randn(heads * group, generator=torch.Generator().manual_seed(2)) if sinks else None
    ours, reference = caches(text, [(0, head) for head in streaming], **others)
    for cache in (ours, reference):
        feed(cache, text, 0, 140, valid, softcap=softcap, sinks=logits)
    got, want = (decode(cache, text, 140, 142, softcap=softcap, sinks=logits) for cache in (ours, reference))
    assert ours.state.static is not None and reference.state.static is None
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    for layers in zip(ours.layers, reference.layers):
        assert torch.equal(layers[0].lengths, layers[1].lengths) and layers[0].length == layers[1].length == 142
        for name in ("keys", "values"):
            assert torch.equal(*(getattr(layer.ring, name) for layer in layers))


TIERED = dict(block_size=8, gpu_memory="120KiB", host_memory="1MiB")


@pytest.mark.parametrize(("streaming", "settings"), [
    pytest.param((0, 2, 4), dict(threshold=0.6), id="1-and-3"), pytest.param((0, 3), PAGES, id="1-2-4-pages"),
    pytest.param((1, 2, 3), {**PAGES, **TIERED}, id="0-and-4-pages-tiered"),
    pytest.param((0, 1, 2), {**PAGES, "kv_bits": 4, "reuse": 2, "reuse_refresh": 0.05}, id="3-and-4-quantised"),
])
def test_the_other_heads_read_what_they_read_in_a_model_of_their_own(streaming, settings):
    text, valid = Text(1, 403, 1, 5, 2, 16, 24), torch.arange(403)[None] >= 7
    others = [head for head in range(5) if head not in streaming]
    own = Text(1, 403, 1, len(others), 2, 16, 24)
    own.keys, own.values = [text.keys[0][:, others]], [text.values[0][:, others]]
    own.queries = [text.queries[0].unflatten(1, (5, 2))[:, others].flatten(1, 2)]
    config = {**SETTINGS, **settings}
    split_cache = PSACache(text.config(), **config, streaming_heads=[(0, head) for head in streaming])
    plain = PSACache(own.config(), **config)
    for cache, source in ((split_cache, text), (plain, own)):
        feed(cache, source, 0, 400, valid)
    got = decode(split_cache, text, 400, 403).unflatten(3, (5, 2))[:, :, :, others].flatten(3, 4)
    assert torch.equal(got, decode(plain, own, 400, 403))
    stats = split_cache.stats(), plain.stats()
    for name in ("kv_fraction", "coverage", "selected", "hits", "misses"):
        assert stats[0][name] == stats[1][name]
    assert (stats[0]["selected"] < 1) == ("reuse" in settings)
    assert stats[0]["kv_fraction"] < 1 and (stats[0]["misses"] > 0) == ("gpu_memory" in settings)


def test_a_step_serves_the_cache_that_it_is_pointed_at():
    """One set of descriptors and work buffers for two caches in turn, as a captured graph has."""
    text = Text(2, 60, 2, 2, 1, 16)
    pairs = [(0, 1), (1, 0), (1, 1)]
    first, second, reference = caches(text, pairs, count=3, digest="min_max", policy="top_k", top_k=99)
    other = Text(2, 60, 2, 2, 1, 16, seed=1)
    expected = PSACache(text.config(), **SETTINGS, streaming_heads=pairs)
    expected.state.kernels = lambda device, dtype: False
    for cache, source in ((first, text), (second, other), (reference, text), (expected, other)):
        feed(cache, source, 0, 50)
    step, addresses = first.state.new_step(), None
    for token in (50, 51):
        if token == 51:
            first.reorder_cache(torch.tensor([1, 0]))       # moves every ring
            reference.reorder_cache(torch.tensor([1, 0]))
        for cache, source, slow in ((first, text, reference), (second, other, expected)):
            want = decode(slow, source, token, token + 1)[:, :, 0]
            layers = cache.step_layers
            for layer in layers:
                if layer.blocks is not None:
                    layer.blocks.group = 1
                layer.begin_step()
            step.prepare(layers)
            for number, layer in enumerate(layers):
                part = [source.queries, source.keys, source.values]
                query, key, value = (x[number][:, :, token:token + 1] for x in part)
                out = step.run(layer, query, key, value, None, source.scaling, 0.0)
                torch.testing.assert_close(out[:, 0], want[number], rtol=1e-4, atol=2e-5)
                layer.end_step()
        now = [step.rings[index].desc.data_ptr() for index in (0, 1)]
        assert addresses in (None, now)                     # a graph has them
        addresses = now


class Calls(TorchDispatchMode):
    """Notes what is asked of torch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_allocates_its_output_and_waits_for_nothing(monkeypatch):
    text = Text(2, 90, 1, 2, 2, 16)
    cache = caches(text, [(0, 0), (0, 1)])[0]
    feed(cache, text, 0, 80)
    decode(cache, text, 80, 81)
    launches = []
    monkeypatch.setattr(streaming, "ring_kernel", Recorder(streaming.ring_kernel, launches))
    layer = cache.layers[0]
    query, key, value = (x[0][:, :, 81:82] for x in (text.queries, text.keys, text.values))
    with Calls() as calls:
        layer.begin_step()
        cache.state.static.prepare([layer])
        cache.state.static.run(layer, query, key, value, None, text.scaling, 0.0)
        layer.end_step()
    assert len(launches) == 1 and calls.found == ["new_empty"]


# -- the captured step ------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=16, vocab_size=50, eos_token_id=None, pad_token_id=None)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


PAIRS = ((0, 1), (1, 0), (1, 1))


def test_captured_equals_uncaptured(model, recordings):  # noqa: F811
    settings = {**SETTINGS, **PAGES, "streaming_heads": PAIRS}
    patch_model(model, **settings)
    cache = lambda compiled: PSACache(model.config, compile=compiled, **settings)  # noqa: E731
    padded = torch.ones(2, 90, dtype=torch.long)
    padded[1, :60] = 0
    kept = []
    for ids, mask in ((prompt(1, 90), None), (prompt(3, 90, rows=2), padded), (prompt(4, 123), None)):
        captured, one = run(model, ids, 4, cache(True), mask)
        plain, other = run(model, ids, 4, cache(False), mask)
        same(captured, plain)
        assert one.stats()["kv_fraction"] == other.stats()["kv_fraction"] and one.tokens == other.tokens
        kept.append((captured, one, other))
    assert len(recordings) == 2
    captured, one, other = kept[0]                          # the next turn, in the same capture
    longer = torch.cat([captured.sequences, prompt(6, 9)], 1)
    same(run(model, longer, 3, one)[0], run(model, longer, 3, other)[0])
    assert len(recordings) == 2


def test_the_ring_becomes_small_between_two_replays(model, recordings, monkeypatch):  # noqa: F811
    for module in (streaming_ring, split_storage, static):
        monkeypatch.setattr(module, "SLACK_TOKENS", 4)
    settings = {**SETTINGS, **PAGES, "min_context": 64, "streaming_heads": PAIRS}
    patch_model(model, **settings)
    mask = torch.ones(2, 66, dtype=torch.long)
    mask[1, :1] = 0
    outputs, widths = [], []
    narrow = streaming_ring.StreamingRing._resize
    monkeypatch.setattr(streaming_ring.StreamingRing, "_resize", lambda self, columns: (widths.append(int(self.lengths.min())),
                                                                              narrow(self, columns))[1])
    for compiled in (True, False):
        cache = PSACache(model.config, compile=compiled, **settings)
        outputs.append(run(model, prompt(5, 66, rows=2), 6, cache, mask)[0])
        assert {layer.ring.columns for layer in cache.layers if isinstance(layer, split.SplitLayer)} == {SINK + WINDOW + 4}
    same(*outputs)
    # At the token that makes the shorter row 68 long: 64, and as many as may be taken back.
    assert len(recordings) == 1 and widths == [67] * 4


def test_a_capture_that_fails_leaves_the_rings_as_they_were(model, recordings, monkeypatch):  # noqa: F811
    from hf_sparse.patches import capture

    def fail(function, device):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(capture, "record", fail)
    settings = {**SETTINGS, **PAGES, "streaming_heads": PAIRS}
    patch_model(model, **settings)
    with pytest.warns(UserWarning, match="could not be captured"):
        captured, cache = run(model, prompt(9, 70), 4, PSACache(model.config, **settings))
    same(captured, run(model, prompt(9, 70), 4, PSACache(model.config, compile=False, **settings))[0])
    assert cache.tokens == 73


def test_only_streaming_heads_decode_uncaptured_by_the_kernel(model, monkeypatch):
    pairs = tuple((layer, head) for layer in range(2) for head in range(2))
    settings = {**SETTINGS, "streaming_heads": pairs}
    patch_model(model, **settings)
    launches, real = [], streaming.ring_kernel
    counted = type("Counted", (), {"__getitem__": lambda self, grid: launches.append(grid) or real[grid]})()
    monkeypatch.setattr(streaming, "ring_kernel", counted)
    got, cache = run(model, prompt(1, 100), 5, PSACache(model.config, **settings))
    assert len(launches) == 2 * 4
    slow = PSACache(model.config, **settings)
    slow.state.kernels = lambda device, dtype: False
    same(got, run(model, prompt(1, 100), 5, slow)[0])
    assert len(launches) == 2 * 4


def test_heads_are_those_of_the_model():
    """RingWork says which heads of the model's queries the ring's are."""
    cache = PSACache(model_config(1, 5, 1, 16), **SETTINGS, streaming_heads=[(0, 4), (0, 1)])
    text = Text(1, 60, 1, 5, 1, 16)
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 51)
    work, tokens = cache.state.static.rings[0], (SINK, WINDOW, streaming_ring.SLACK_TOKENS, 0)
    assert work.heads.tolist() == [1, 4] and work.model_heads == 5 and work.tokens == tokens
