"""Streaming heads: profiles, how they are measured, and the command. Expected values are dense attention in float64."""
from __future__ import annotations

import copy
import json
import math
import pathlib
import pickle
import re
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hf_sparse.heads.left_out as left_out_module
from hf_sparse import HeadProfile, PSAConfig, calibrate_heads, patch_model, unpatch_model
from hf_sparse.cache.psa_cache import model_fingerprint
from hf_sparse.commands.main import main
from hf_sparse.evaluation import default_paragraphs
from hf_sparse.heads.calibrate import repeat_passages
from hf_sparse.heads.left_out import left_out
from hf_sparse.heads.profile import PROFILE_NAME, full_attention_heads
from tests.models import SLIDING_WINDOW, VOCAB_SIZE, build, get_model
from tests.text_model import save_text_model, text_model, text_tokenizer

GATES = torch.tensor([[0.5, 0.25, 1.0], [0.25, 0.0, 0.5]])
SINK, WINDOW = 5, 19


def profile(gates=GATES, layers=(1, 4), **about) -> HeadProfile:
    return HeadProfile(gates, layers, about)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (dict(sparsity=0.0), ()),
        (dict(sparsity=0.25), ((1, 1), (4, 1))),                            # round(1.5) is 2; of the two 0.25 the earlier
        (dict(sparsity=0.5), ((1, 1), (4, 0), (4, 1))),
        (dict(sparsity=2 / 3), ((1, 0), (1, 1), (4, 0), (4, 1))),           # of the two 0.5 the earlier
        (dict(sparsity=1), ((1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (4, 2))),
        (dict(threshold=0.0), ()),
        (dict(threshold=0.25), ((4, 1),)),                                  # below, not at
        (dict(threshold=0.2500001), ((1, 1), (4, 0), (4, 1))),
        (dict(threshold=1.0), ((1, 0), (1, 1), (4, 0), (4, 1), (4, 2))),
    ],
    ids=["none", "quarter", "half", "two_thirds", "all", "below_0", "at_a_gate", "above_a_gate", "below_1"],
)
def test_heads_are_chosen_by_sparsity_or_threshold(choice, expected):
    assert profile().settings(**choice) == {"streaming_heads": expected}


def test_ties_are_broken_by_layer_and_head():
    even = profile(torch.full((7, 3), 0.5), tuple(range(7)))
    places = [(layer, head) for layer in range(7) for head in range(3)]
    for count in range(22):
        assert even.settings(sparsity=count / 21)["streaming_heads"] == tuple(places[:count])


def test_a_threshold_is_compared_with_the_gate_as_it_is():
    gate = torch.tensor([[0.1]])
    assert profile(gate, (0,)).settings(threshold=0.1)["streaming_heads"] == ()     # float32(0.1) is above 0.1


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({}, TypeError, "either"),
        (dict(sparsity=0.5, threshold=0.5), TypeError, "either"),
        (dict(sparsity=1.5), ValueError, "sparsity must be"),
        (dict(sparsity=50), ValueError, "sparsity must be"),
        (dict(sparsity=math.nan), ValueError, "sparsity must be"),
        (dict(sparsity=True), ValueError, "sparsity must be"),
        (dict(threshold=-0.1), ValueError, "threshold must be"),
        (dict(threshold="0.5"), ValueError, "threshold must be"),
    ],
    ids=["none", "both", "above_1", "percent", "nan", "bool", "negative", "text"],
)
def test_choices_that_make_no_sense_are_refused(choice, error, message):
    with pytest.raises(error, match=message):
        profile().settings(**choice)


@pytest.mark.parametrize(("about", "sizes"), [
    (dict(sink=64, window=512), (64, 512)), (dict(window=100), (128, 100)), (dict(sink=0), (0, 256)),
    (dict(method="mass"), (128, 256)),
], ids=["both", "window", "no_sink", "unknown"])
def test_heads_come_with_the_sink_and_window_that_they_were_measured_with(about, sizes):
    config = PSAConfig(**profile(**about).settings(sparsity=0.25))
    assert config.streaming_heads == ((1, 1), (4, 1))
    assert (config.streaming_sink, config.streaming_window) == sizes


def test_a_profile_can_not_be_applied_with_other_sizes_by_accident():
    measured = profile(sink=64, window=512)
    with pytest.raises(TypeError, match="streaming_window"):
        PSAConfig(**measured.settings(sparsity=0.5), streaming_window=256)
    assert PSAConfig(**{**measured.settings(sparsity=0.5), "streaming_window": 256}).streaming_window == 256
    with pytest.raises((TypeError, ValueError), match="streaming_sink"):
        PSAConfig(**profile(sink="much").settings(sparsity=0.5))


# -- profiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gates", "layers", "error", "message"),
    [
        (torch.tensor([[0.5, math.nan], [math.inf, 1.0]]), (0, 1), ValueError, "2 gate.*first is nan, row 0, KV head 1"),
        (torch.tensor([[0.5, 1.0], [1.01, 1.0]]), (0, 1), ValueError, "1.01.*row 1, KV head 0"),
        (torch.tensor([[-0.01]]), (0,), ValueError, "not in"),
        (torch.tensor([0.5]), (0,), ValueError, r"\[layers, KV heads\]"),
        (torch.zeros(0, 3), (), ValueError, r"\[layers, KV heads\]"),
        (torch.ones(2, 2).long(), (0, 1), TypeError, "floating-point"),
        ([[0.5]], (0,), TypeError, "list"),
        (GATES, (0,), ValueError, "2 rows but 1 layers"),
        (GATES, (1, 1), ValueError, "ascending"),
        (GATES, (3, 1), ValueError, "ascending"),
        (GATES, (-1, 1), ValueError, "ascending"),
        (GATES, (0.0, 1.0), ValueError, "ascending"),
    ],
    ids=["nan", "above_1", "negative", "one_dimension", "empty", "integers", "list", "too_few_layers", "same_layer",
         "descending", "negative_layer", "float_layers"],
)
def test_profiles_that_make_no_sense_are_refused(gates, layers, error, message):
    with pytest.raises(error, match=message):
        HeadProfile(gates, layers)


def test_a_profile_keeps_its_own_gates():
    gates = GATES.clone()
    kept = profile(gates.double())
    gates.zero_()
    assert kept.gates.dtype == torch.float32 and torch.equal(kept.gates, GATES)


@pytest.mark.parametrize("name", [".", "new/directory", "some.safetensors"])
def test_a_profile_is_read_as_it_was_written(tmp_path, name):
    saved = profile(method="mass", sink=128, nested={"a": [1, None]})
    file = saved.save(tmp_path / name)
    assert file == (tmp_path / name if name.endswith("safetensors") else tmp_path / name / PROFILE_NAME)
    loaded = HeadProfile.load(tmp_path / name)
    assert torch.equal(loaded.gates, saved.gates) and loaded.layers == saved.layers and loaded.about == saved.about
    # Written over: what was read before stays.
    profile(1 - GATES).save(tmp_path / name)
    assert torch.equal(loaded.gates, GATES)
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["profile"])["layers"] == [1, 4]


CIRCLE: list = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(("name", "value", "cause"), [
    ("gates", GATES, "Tensor is not JSON"), ("texts", {"a": [1, {2}]}, "set is not JSON"),
    ("dtype", torch.float16, "dtype is not JSON"), (("a", 1), 2, "keys must be str"), ("circle", CIRCLE, "Circular"),
], ids=["tensor", "nested", "dtype", "key", "circle"])
def test_what_json_can_not_hold_is_refused_by_name_and_nothing_is_written(tmp_path, name, value, cause):
    unsaved = HeadProfile(GATES, (1, 4), {"method": "mass", name: value})
    message = rf"about\[{re.escape(repr(name))}\] can't be saved.*{cause}.*Put numbers, text"
    with pytest.raises(TypeError, match=message):
        unsaved.save(tmp_path / "new")
    assert not list(tmp_path.iterdir())


class Bomb:
    """Unpickling one ends the process."""

    def __reduce__(self):
        return (sys.exit, ("unpickled",))


def write(path, kind: str) -> None:
    good = {"format": "hf_sparse head profile", "version": "1", "profile": '{"layers": [1, 4], "about": {}}'}
    if kind == "torch":
        torch.save({"gates": GATES, "bomb": Bomb()}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        profile().save(path)
        path.write_bytes(path.read_bytes()[:-3])
    elif kind == "weights":
        save_file({"weight": GATES}, path)
    elif kind == "tensor":
        save_file({"weight": GATES}, path, good)
    elif kind == "version":
        save_file({"gates": GATES}, path, {**good, "version": "2"})
    elif kind == "json":
        save_file({"gates": GATES}, path, {**good, "profile": "{"})
    elif kind == "layers":
        save_file({"gates": GATES}, path, {**good, "profile": '{"layers": [1], "about": {}}'})
    elif kind == "nan":
        save_file({"gates": GATES / 0}, path, good)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", FileNotFoundError, "no head profile"),
        ("torch", ValueError, "not a safetensors file"),
        ("pickle", ValueError, "not a safetensors file"),
        ("empty", ValueError, "not a safetensors file"),
        ("cut", ValueError, "not a safetensors file"),
        ("weights", ValueError, "holds no head profile"),
        ("tensor", ValueError, "holds no head profile"),
        ("version", ValueError, "version 2"),
        ("json", ValueError, "makes no sense"),
        ("layers", ValueError, "2 rows but 1 layers"),
        ("nan", ValueError, "not in"),
    ],
)
def test_files_that_are_no_profiles_are_refused(tmp_path, kind, error, message):
    path = tmp_path / "some.safetensors"
    write(path, kind)
    with pytest.raises(error, match=message):
        HeadProfile.load(path)


# -- whose profile it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", ((0, 1), 2)), ("qwen3", ((0, 1), 1)), ("gemma3", ((1,), 2)), ("gpt_oss", ((1,), 2)),
     ("qwen2_sliding", ((0,), 2)), ("phi3", ((0, 1), 4))],
)
def test_only_full_attention_layers_have_heads(family, expected):
    config = get_model(family).config
    assert full_attention_heads(config) == expected
    layers, heads = expected
    HeadProfile(torch.zeros(len(layers), heads), layers).check(config)


def test_full_attention_layers_may_have_kv_heads_of_their_own():
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, num_key_value_heads=4, num_attention_heads=8,
                                  attention_k_eq_v=True, num_global_key_value_heads=2)
    assert full_attention_heads(config) == ((5,), 2)


def test_a_profile_of_another_model_is_refused():
    config = get_model("llama").config
    with pytest.raises(ValueError, match="3 layers x 2 KV heads, but the model has 2 full-attention layers x 2 KV heads"):
        HeadProfile(torch.zeros(3, 2), (0, 1, 2)).check(config)
    with pytest.raises(ValueError, match="2 layers x 8 KV heads, but the model has 2 full-attention layers x 2 KV heads"):
        HeadProfile(torch.zeros(2, 8), (0, 1)).check(config)
    with pytest.raises(ValueError, match="of layers 0, 2, but the full-attention layers of the model are 0, 1"):
        HeadProfile(torch.zeros(2, 2), (0, 2)).check(config)
    # gemma3 has three layers of two heads, one of them with full attention.
    with pytest.raises(ValueError, match="3 layers x 2 KV heads, but the model has 1 full-attention layers x 2 KV heads"):
        HeadProfile(torch.zeros(3, 2), (0, 1, 2)).check(get_model("gemma3").config)
    same_shape = HeadProfile(torch.zeros(2, 2), (0, 1), {"model": model_fingerprint(get_model("olmo2").config)})
    same_shape.check(get_model("olmo2").config)
    with pytest.raises(ValueError, match="made for olmo2 with 2 layers.*the model is llama with 2 layers"):
        same_shape.check(config)
    with pytest.raises(ValueError, match="no full-attention layer"):
        same_shape.check(get_model("mistral").config)


# -- DuoAttention -----------------------------------------------------------------------------------------------------


def table(directory, lines: str, config: str | None = None):
    (directory / "full_attention_heads.tsv").write_text(lines)
    if config is not None:
        (directory / "config.json").write_text(config)
    return directory


def test_tables_of_duo_attention_are_imported(tmp_path):
    config = get_model("llama").config
    lines = "6.054687500000000000e-01\t-1.500000000000000000e-02\n1.007812500000000000e+00\t0.000000000000000000e+00\n"
    more = json.dumps({"model_name": "models/Some-8B", "sink_size": 64, "recent_size": 200, "deploy_sink_size": None})
    table(tmp_path, lines, more)
    for path in (tmp_path, tmp_path / "full_attention_heads.tsv"):
        imported = HeadProfile.from_duo_attention(path, config)
        assert imported.gates.tolist() == [[0.60546875, 0.0], [1.0, 0.0]] and imported.layers == (0, 1)
        assert imported.about == {"model": model_fingerprint(config), "method": "duo_attention", "sink": 64, "window": 200,
                                  "trained_on": "Some-8B"}
    assert imported.settings(sparsity=0.5) == {"streaming_heads": ((0, 1), (1, 1)), "streaming_sink": 64, "streaming_window": 200}
    imported.save(tmp_path)
    HeadProfile.load(tmp_path).check(config)


def test_a_table_alone_says_nothing_of_its_window(tmp_path):
    imported = HeadProfile.from_duo_attention(table(tmp_path, "0.5\t1\n\n0\t0.25"), get_model("llama").config)
    assert set(imported.about) == {"model", "method"} and imported.gates.tolist() == [[0.5, 1.0], [0.0, 0.25]]


def test_a_table_of_one_kv_head_is_a_column(tmp_path):
    assert HeadProfile.from_duo_attention(table(tmp_path, "0.5\n1\n"), get_model("qwen3").config).gates.shape == (2, 1)


@pytest.mark.parametrize(
    ("lines", "config", "message"),
    [
        ("0.5\t0.5\n", None, "1 layers x 2 KV heads, but the model has 2 full-attention layers x 2 KV heads"),
        ("0.5\n0.5\n", None, "2 layers x 1 KV heads, but the model has 2 full-attention layers x 2 KV heads"),
        ("0.5\t0.5\n0.5\n", None, "rows of 1 to 2 gates"),
        ("0.5\t0.5\n0.5\tnan\n", None, "line 2: nan is no gate"),
        ("0.5\t0.5\n0.5\t1.3\n", None, "line 2: 1.3 is no gate"),
        ("0.5\t0.5\n0.5,0.5\n", None, "line 2: '0.5,0.5' is not a row of numbers"),
        ("attn_patterns/Some-8B/full_attention_heads.tsv", None, "line 1: .*not a row of numbers"),
        ("\n", None, "holds no gates"),
        ("0.5\t0.5\n0.5\t0.5\n", "{", "config.json.*not JSON"),
    ],
    ids=["too_few_layers", "too_few_heads", "ragged", "nan", "out_of_range", "commas", "git_symlink", "empty", "broken_config"],
)
def test_tables_that_are_none_are_refused(tmp_path, lines, config, message):
    with pytest.raises(ValueError, match=message):
        HeadProfile.from_duo_attention(table(tmp_path, lines, config), get_model("llama").config)


def test_a_table_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="full_attention_heads.tsv"):
        HeadProfile.from_duo_attention(tmp_path, get_model("llama").config)
    (tmp_path / "x.tsv").write_bytes(b"\x80\x04\x95")
    with pytest.raises(ValueError, match="not text"):
        HeadProfile.from_duo_attention(tmp_path / "x.tsv", get_model("llama").config)


# -- what a query loses -----------------------------------------------------------------------------------------------


def dense(query, keys, values, position: int, sink: int, window: int, scaling, softcap, sink_logit):
    """(mass left out, relative error of the output) of one query [D] over keys [T, D]: by hand, in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    logits = [float(query @ keys[t]) * scaling for t in range(position + 1)]
    if softcap:
        logits = [softcap * math.tanh(x / softcap) for x in logits]
    weights = [math.exp(x) for x in logits]
    extra = 0.0 if sink_logit is None else math.exp(float(sink_logit))
    read = [t for t in range(position + 1) if t < sink or position - t < window]
    whole, part = sum(weights) + extra, sum(weights[t] for t in read) + extra
    exact = sum(weights[t] / whole * values[t] for t in range(position + 1))
    streamed = sum(weights[t] / part * values[t] for t in read)
    mass = sum(weights[t] for t in range(position + 1) if t not in read) / whole
    return mass, min(1.0, float((exact - streamed).norm() / exact.norm()))


@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize(("H", "G"), [(3, 1), (2, 3), (1, 5)], ids=["mha", "gqa", "mqa"])
def test_what_is_left_out_is_what_dense_attention_has_there(monkeypatch, H, G, with_sinks, softcap):
    torch.manual_seed(0)
    T, D, Dv, sink, window = 45, 11, 7, 3, 8
    query, keys, values = torch.randn(H * G, 6, D), torch.randn(H, T, D), torch.randn(H, T, Dv)
    positions = torch.tensor([0, 2, 10, 11, 30, 44])
    sinks = torch.randn(H * G) if with_sinks else None
    for elements in (2**24, 1):
        monkeypatch.setattr(left_out_module, "LOGIT_ELEMENTS", elements)
        for number, method in enumerate(("mass", "output")):
            found = left_out(query, keys, values, positions, sink, window, 0.7, softcap, sinks, method)
            assert found.shape == (H * G, 6) and found.dtype == torch.float32
            expected = [[dense(query[h, i], keys[h // G], values[h // G], int(p), sink, window, 0.7, softcap,
                               None if sinks is None else sinks[h])[number] for i, p in enumerate(positions)]
                        for h in range(H * G)]
            torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=1e-5)
            assert (found[:, :3] == 0).all() if method == "mass" else (found[:, :3] < 1e-6).all()      # all is read
            assert (found[:, 3:] > 1e-4).all()              # position 11 is the first to leave one token out


def test_sixteen_bits_are_measured_in_thirty_two():
    torch.manual_seed(0)
    query, keys, values = torch.randn(4, 3, 16).half(), torch.randn(2, 60, 16).half(), torch.randn(2, 60, 16).half()
    positions = torch.tensor([20, 40, 59])
    for method in ("mass", "output"):
        half = left_out(query, keys, values, positions, 2, 9, 0.5, method=method)
        assert torch.equal(half, left_out(query.float(), keys.float(), values.float(), positions, 2, 9, 0.5, method=method))


# -- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, 131, 999])
def test_the_end_of_a_text_is_copies_of_its_passages(length):
    ids = torch.arange(length)
    new, prose, copied = repeat_passages(ids, SINK, WINDOW)
    size = length // 32
    first = length - 4 * size
    assert len(new) == length and torch.equal(new[:first], ids[:first])
    starts = []
    for i in range(4):
        copy_ = new[first + i * size:first + (i + 1) * size]
        starts.append(int(copy_[0]))
        assert torch.equal(copy_, torch.arange(starts[-1], starts[-1] + size))
        assert starts[-1] >= SINK and first - (starts[-1] + size) >= WINDOW
    assert starts == sorted(starts) and starts[1] - starts[0] > size            # from all over the text
    assert prose[0] == first // 2 and prose == sorted(set(prose)) and prose[-1] < first <= copied[0]
    assert copied == sorted(set(copied)) and copied[-1] == length - 1
    assert copied[0] == first + min(8, size // 4)           # the first tokens of a copy can't be known as such
    assert max(len(prose), len(copied)) <= 256


def recorded(model, monkeypatch, ids: torch.Tensor) -> dict:
    """By layer, what eager attention was given: query [Hq, n, D], key [H, n, D], value, scaling, softcap, sinks [Hq]."""
    module = sys.modules[next(type(m) for m in model.modules() if type(m).__name__.endswith("Attention")).__module__]
    inner, found = module.eager_attention_forward, {}

    def record(layer, query, key, value, mask, scaling, **kwargs):
        sinks = layer.sinks.detach() if hasattr(layer, "sinks") else None
        found[layer.layer_idx] = (query[0], key[0], value[0], scaling, kwargs.get("softcap") or 0.0, sinks)
        return inner(layer, query, key, value, mask, scaling=scaling, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, "eager_attention_forward", record)
        model(ids[None], use_cache=False)
    return found


def expected_gates(model, monkeypatch, texts, method: str, layers) -> torch.Tensor:
    sums: dict = {layer: [] for layer in layers}
    for ids in texts:
        ids, *rows = repeat_passages(torch.tensor(ids), SINK, WINDOW)
        for layer, (query, keys, values, scaling, softcap, sinks) in recorded(model, monkeypatch, ids).items():
            if layer in sums:
                group = len(query) // len(keys)
                sums[layer].append([[[dense(query[h, p], keys[h // group], values[h // group], p, SINK, WINDOW, scaling,
                                            softcap, None if sinks is None else sinks[h])[method == "output"] for p in kind]
                                     for h in range(len(query))] for kind in rows])
    gates = []
    for layer in layers:
        kinds = [torch.cat([torch.tensor(one[kind], dtype=torch.float64) for one in sums[layer]], 1).mean(1) for kind in (0, 1)]
        heads = model.config.num_key_value_heads
        gates.append(torch.maximum(*kinds).view(heads, -1).amax(1))
    return torch.stack(gates)


@pytest.mark.parametrize(
    ("family", "method", "layers"),
    [("llama", "mass", (0, 1)), ("llama", "output", (0, 1)), ("qwen3", "mass", (0, 1)), ("gemma3", "mass", (1,)),
     ("gemma2", "output", (1,)), ("gpt_oss", "mass", (1,)), ("gpt_oss", "output", (1,))],
    ids=["gqa-mass", "gqa-output", "mqa-mass", "hybrid-mass", "softcap-output", "sinks-mass", "sinks-output"],
)
def test_gates_are_those_of_dense_attention(family, method, layers, monkeypatch):
    model = get_model(family)
    texts = [text(131, 1), text(150, 2)]
    assert SLIDING_WINDOW < WINDOW                          # a sliding layer would leave nothing out
    expected = expected_gates(model, monkeypatch, texts, method, layers)
    for chunk in (1024, 29, 131 - 1):                       # 130: the last chunk of the first text is a single token
        steps: list = []
        found = calibrate_heads(model, texts, method=method, sink=SINK, window=WINDOW, chunk=chunk,
                                progress=lambda *step, steps=steps: steps.append(step))
        assert found.layers == layers
        torch.testing.assert_close(found.gates.double(), expected, atol=5e-5, rtol=1e-4)
        assert steps[-1] == (281, 281) and len(steps) == sum(-(-len(ids) // chunk) for ids in texts)
    assert found.gates.min() > 0.01 and found.gates.std() > 0.001
    assert found.about == {"model": model_fingerprint(model.config), "method": method, "sink": SINK, "window": WINDOW,
                           "texts": 2, "tokens": 281}
    found.check(model.config)


def test_a_head_that_copies_is_seen_by_the_copies_only():
    """One query head attends to the token that followed the present one before: of no use in prose, where none came before."""
    n, sink, window = 640, 8, 32
    ids, prose, copied = repeat_passages(torch.arange(n), sink, window)
    codes = torch.nn.functional.normalize(torch.randn(n, 64, generator=torch.Generator().manual_seed(0)), dim=-1)
    query = codes[ids] * 40
    keys = torch.cat([torch.zeros(1, 64), codes[ids[:-1]]])                   # of the token before
    seen = [left_out(query[None, rows], keys[None], keys[None], torch.tensor(rows), sink, window, 1.0).mean() for rows in
            (prose, copied)]
    assert seen[1] > 0.9 and seen[0] < seen[1]


def test_a_text_more_is_averaged_in():
    model = get_model("llama")
    one, two, both = (calibrate_heads(model, texts, sink=SINK, window=WINDOW).gates
                      for texts in ([text(131, 1)], [text(131, 2)], [text(131, 1), text(131, 2)]))
    assert not torch.equal(one, two)
    assert (both <= torch.maximum(one, two) + 1e-6).all()


def test_tensors_and_batches_of_ids_are_texts():
    model = get_model("llama")
    lists = [text(131, 1), text(131, 2)]
    expected = calibrate_heads(model, lists, sink=SINK, window=WINDOW).gates
    assert torch.equal(calibrate_heads(model, torch.tensor(lists), sink=SINK, window=WINDOW).gates, expected)
    tensors = [torch.tensor(ids).int() for ids in lists]
    assert torch.equal(calibrate_heads(model, tensors, sink=SINK, window=WINDOW).gates, expected)


def test_the_model_is_left_as_it_was():
    model = copy.deepcopy(get_model("llama"))
    before = set(model.__dict__), model.config._attn_implementation, len(model._forward_hooks), len(model._forward_pre_hooks)
    calibrate_heads(model, [text(131)], sink=SINK, window=WINDOW)
    assert (set(model.__dict__), model.config._attn_implementation, len(model._forward_hooks),
            len(model._forward_pre_hooks)) == before
    patch_model(model, threshold=0.77)
    expected = calibrate_heads(get_model("llama"), [text(131)], sink=SINK, window=WINDOW).gates
    assert torch.equal(calibrate_heads(model, [text(131)], sink=SINK, window=WINDOW).gates, expected)
    assert model._hf_sparse.config == PSAConfig(threshold=0.77) and model.last_psa_cache is None
    unpatch_model(model)


@pytest.mark.parametrize(
    ("texts", "settings", "error", "message"),
    [
        ([text(131)], dict(method="gradient"), ValueError, "choose one of mass, output"),
        ([text(131)], dict(sink=-1), ValueError, "sink must be"),
        ([text(131)], dict(window=0), ValueError, "window must be"),
        ([text(131)], dict(window=16.0), ValueError, "window must be"),
        ([text(131)], dict(chunk=0), ValueError, "chunk must be"),
        ([], {}, ValueError, "No text"),
        ([text(127)], {}, ValueError, "127 tokens is too short.*takes 128"),
        ([text(400)], dict(sink=128, window=256), ValueError, "400 tokens is too short.*takes 1536"),
        ([text(513)], {}, ValueError, "513 tokens but the model's context is 512"),
        (text(131), {}, TypeError, r"a single text is \[ids\]"),
        (["some text"], {}, TypeError, "token ids"),
        ([torch.zeros(131)], {}, TypeError, "token ids"),
    ],
    ids=["method", "sink", "window", "window_type", "chunk", "no_text", "too_short", "too_short_for_window", "too_long", "flat",
         "strings", "floats"],
)
def test_bad_input_is_refused(texts, settings, error, message):
    with pytest.raises(error, match=message):
        calibrate_heads(get_model("llama"), texts, **{"sink": SINK, "window": WINDOW, **settings})


def test_models_whose_heads_can_not_stream_are_refused():
    with pytest.raises(ValueError, match="no full-attention layer"):
        calibrate_heads(get_model("mistral"), [text(131)], sink=SINK, window=WINDOW)
    from tests.families.build import tiny_model

    with pytest.raises(NotImplementedError, match="served dense"):
        calibrate_heads(tiny_model("deepseek_v3"), [text(131)], sink=SINK, window=WINDOW)


def test_attention_that_is_not_finite_is_no_profile():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="layer 1 is not finite"):
        calibrate_heads(model, [text(131)], sink=SINK, window=WINDOW)
    assert model.config._attn_implementation == "eager"     # unpatched, whatever happened


def test_the_example_of_the_guide_runs(tmp_path, monkeypatch):
    guide = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "guide.md").read_text(encoding="utf-8")
    example = next(block for block in re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S) if "calibrate_heads(" in block)
    tokenizer, model = text_tokenizer(), copy.deepcopy(text_model())
    ids = tokenizer("\n\n".join(default_paragraphs())[:20_000])["input_ids"][:1600]
    (tmp_path / "document.txt").write_text(tokenizer.decode(ids), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = {"tokenizer": tokenizer, "model": model}
    exec(compile(example, "guide.md", "exec"), names)
    config, half = model._hf_sparse.config, names["half"]
    assert len(half["streaming_heads"]) == 2 and {name: getattr(config, name) for name in half} == half
    assert set(names["idle"]["streaming_heads"]) == {(layer, head) for layer in (0, 1) for head in (0, 1)
                                                     if names["profile"].gates[layer, head] < 0.2}


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_text_model(path)
    return str(path)


SMALL = ["--length", "500", "--sink", str(SINK), "--window", str(WINDOW)]


def test_the_command_writes_a_profile_and_prints_it(directory, tmp_path, capsys):
    arguments = ["heads", directory, *SMALL, "--samples", "2", "--prefill-chunk", "200"]
    assert main([*arguments, "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr()
    saved = HeadProfile.load(tmp_path / "new")
    saved.check(text_model().config)
    assert (saved.about["tokens"], saved.about["texts"], saved.about["window"]) == (1000, 2, WINDOW)
    settings = saved.settings(sparsity=0.5)
    streaming = settings.pop("streaming_heads")
    assert settings == {"streaming_sink": SINK, "streaming_window": WINDOW}
    lines = [[cell.strip() for cell in line.split("|")[1:4]] for line in printed.out.splitlines() if line.startswith("| ")]
    assert lines[0] == ["layer", "streaming", "gates"] and len(lines) == 3 and len(streaming) == 2
    for layer, (number, count, gates) in enumerate(lines[1:]):
        stars = [(layer, head) in streaming for head in range(2)]
        assert (number, count) == (str(layer), str(sum(stars)))
        assert gates.split() == [f"{gate:.3f}{'*' * star}" for gate, star in zip(saved.gates[layer].tolist(), stars)]
    assert "2 of 4 heads" in printed.out and str(tmp_path / "new" / PROFILE_NAME) in printed.out
    bars = printed.err.splitlines()
    assert len(bars) == 6 and "200 of 1000 tokens" in bars[0] and f"[{'#' * 30}] 1000 of 1000" in bars[-1]

    assert main([*arguments, "--quiet", "--threshold", "1", "--method", "output"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "4 of 4 heads (*) stream at threshold 1" in printed.out
    assert HeadProfile.load(directory).about["method"] == "output"           # beside the model's files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "--sparsity", "1.5"], "--sparsity 1.5"),
        (["{model}", "--threshold", "nan"], "--threshold nan"),
        (["{model}", "--length", "5000"], "5000 tokens but the model's context is 2048"),
        (["{model}", "--length", "500"], "takes 1536"),
        (["{model}", *SMALL, "--text", "{missing}"], "no text"),
        (["{model}", *SMALL, "--sink", "-1"], "sink must be"),
        (["{missing}"], "give --out DIR"),
        (["{missing}", "--out", "{missing}"], "no model directory"),
    ],
    ids=["sparsity", "threshold", "too_long", "too_short", "text", "sink", "nowhere_to_write", "no_model"],
)
def test_bad_arguments_are_one_line_and_status_two(directory, tmp_path, capsys, arguments, message):
    names = {"model": directory, "missing": str(tmp_path / "missing")}
    assert main(["heads", *(argument.format(**names) for argument in arguments), "--quiet"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("hf-sparse heads: error: ") and printed.err.count("\n") == 1
    assert message in printed.err


def test_sparsity_and_threshold_exclude_each_other(directory, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["heads", directory, "--sparsity", "0.5", "--threshold", "0.5"])
    assert stop.value.code == 2
