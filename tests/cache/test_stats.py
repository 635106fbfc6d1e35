"""What `cache.stats()` says, against counts made by hand. Masses and coverage are checked in test_step.py."""

from __future__ import annotations

import warnings

import pytest
import torch

from hf_sparse import PSACache, patched
from hf_sparse.cache.stats import LayerStats
from tests.cache.drive import Text, decode, feed
from tests.models import get_model
from tests.scenarios import make_prompt

TEXT = dict(rows=2, layers=2, heads=2, group=2, key_dim=8)
KEYS = {
    "steps",
    "sparse_steps",
    "blocks_read",
    "blocks_held",
    "kv_fraction",
    "coverage",
    "selected",
    "coverage_true",
    "hits",
    "misses",
    "hit_rate",
    "bytes",
    "materialized",
    "layers",
}
LAYER_KEYS = {
    "layer",
    "kind",
    "blocks_read",
    "blocks_held",
    "kv_fraction",
    "captured_log_mass",
    "coverage",
    "selected",
    "coverage_true",
    "history",
}


def test_before_anything():
    stats = Text(**TEXT).cache().stats()
    assert set(stats) >= KEYS
    assert (
        stats["steps"]
        == stats["sparse_steps"]
        == stats["blocks_read"]
        == stats["blocks_held"]
        == stats["materialized"]
        == 0
    )
    assert stats["kv_fraction"] is stats["coverage"] is stats["selected"] is stats["coverage_true"] is stats["hit_rate"] is None
    assert stats["bytes"] == {"device": 0, "host": 0, "digest": 0}
    assert [layer["kind"] for layer in stats["layers"]] == ["psa", "psa"]
    assert all(set(layer) >= LAYER_KEYS for layer in stats["layers"])


def test_a_prompt_is_no_step():
    text = Text(length=60, **TEXT)
    cache = text.cache(threshold=1.0)
    feed(cache, text, 0, 40)
    feed(cache, text, 40, 50)
    stats = cache.stats()
    assert stats["steps"] == stats["sparse_steps"] == 0 and stats["kv_fraction"] is None


def test_everything_read():
    text = Text(length=60, **TEXT)
    cache = text.cache(threshold=1.0, digest="key_bits")
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 55)
    stats = cache.stats()
    held = sum(-(-length // 4) for length in range(51, 56)) * 2 * 2 * 2  # rows, heads, layers
    assert stats["blocks_read"] == stats["blocks_held"] == held
    assert stats["kv_fraction"] == stats["selected"] == 1.0 and stats["coverage"] == pytest.approx(1.0)
    assert stats["steps"] == stats["sparse_steps"] == 5
    assert sum(layer["blocks_read"] for layer in stats["layers"]) == held


def test_dense_steps_are_steps_but_not_sparse():
    text = Text(length=60, **TEXT)
    cache = text.cache(min_context=53, digest="key_bits", threshold=0.5)
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 55)
    stats = cache.stats()
    assert stats["steps"] == 5 and stats["sparse_steps"] == 3  # rows of 53, 54 and 55 tokens


def test_dense_layers_are_dense():
    text = Text(length=60, **TEXT)
    cache = text.cache(digest="key_bits", policy="top_k", top_k=4, dense_layers=(1,))
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 55)
    first, second = cache.stats()["layers"]
    assert (first["sparse_steps"], second["sparse_steps"]) == (5, 0)
    assert second["kv_fraction"] is None and cache.stats()["kv_fraction"] == first["kv_fraction"] < 1


def test_dense_layers_that_do_not_exist():
    with pytest.raises(
        ValueError, match="dense_layers names layer 2, but this model has 2 layers, counted from 0"
    ):
        Text(**TEXT).cache(dense_layers=(0, 2))


def test_history():
    """Blocks a row and KV head, averaged, of each of the first `record_steps` steps."""
    text = Text(length=60, **TEXT)
    for limit, expected in ((0, 0), (3, 3), (99, 6)):
        cache = text.cache(digest="key_bits", policy="top_k", top_k=7, record_steps=limit)
        feed(cache, text, 0, 50)
        decode(cache, text, 50, 56)
        for layer in cache.stats()["layers"]:
            assert layer["history"] == [7.0] * expected


def test_history_averages_rows_and_heads():
    text = Text(length=70, **TEXT)
    cache = text.cache(digest="key_bits", threshold=0.5, round_blocks=1, record_steps=10)
    feed(cache, text, 0, 60)
    decode(cache, text, 60, 65)
    for layer in cache.stats()["layers"]:
        assert sum(layer["history"]) * 2 * 2 == pytest.approx(layer["blocks_read"])
        assert len(set(layer["history"])) > 1


def test_captured_mass_is_a_number_for_every_head():
    text = Text(length=60, **TEXT)
    cache = text.cache(digest="key_bits", threshold=0.5)
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 51)
    for layer in cache.stats()["layers"]:
        assert torch.tensor(layer["captured_log_mass"]).shape == (2, 4)


def test_true_coverage_only_with_verify():
    text = Text(length=60, **TEXT)
    for verify in (False, True):
        cache = text.cache(digest="key_bits", threshold=0.5, verify=verify)
        feed(cache, text, 0, 50)
        decode(cache, text, 50, 52)
        stats = cache.stats()
        assert (stats["coverage_true"] is not None) == verify
        if verify:
            assert 0.4 < stats["coverage_true"] <= 1.0


@pytest.mark.parametrize("tiered", [False, True], ids=["resident", "tiered"])
@pytest.mark.parametrize("digest", ["channel_codes", "key_bits", "min_max"])
def test_bytes_are_those_of_the_tensors(digest, tiered):
    text = Text(length=200, **TEXT)
    cache = text.cache(digest=digest, threshold=1.0, **(dict(host_memory="4MiB") if tiered else {}))
    feed(cache, text, 0, 190)
    decode(cache, text, 190, 192)
    size = lambda tensors: sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # noqa: E731
    layers = cache.sparse_layers
    digests = sum(size(layer.digests.unit) + size(layer.digests.row) for layer in layers)
    stats = cache.stats()["bytes"]
    assert stats["digest"] == digests
    assert stats["device"] == size([layers[0].pool.kv]) + digests + size(layer.table for layer in layers)
    pool = layers[0].pool
    assert stats["host"] == (pool.blocks_in_use() * pool.block_bytes if tiered else 0)


def test_statistics_are_plain_python():
    import json

    text = Text(length=60, **TEXT)
    cache = text.cache(digest="key_bits", threshold=0.5, record_steps=3, verify=True, host_memory="4MiB")
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 52)
    assert json.loads(json.dumps(cache.stats())) == cache.stats()


def test_asking_changes_nothing():
    text = Text(length=60, **TEXT)
    outputs = []
    for ask in (False, True):
        cache = text.cache(digest="key_bits", threshold=0.5)
        feed(cache, text, 0, 50)
        steps = []
        for position in range(50, 55):
            steps.append(decode(cache, text, position, position + 1))
            if ask:
                assert cache.stats() == cache.stats()
        outputs.append(torch.cat(steps, 2))
    assert torch.equal(*outputs)


def test_a_fork_starts_to_count_anew():
    text = Text(length=60, **TEXT)
    cache = text.cache(digest="key_bits", threshold=0.5)
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 53)
    fork = cache.fork(threshold=1.0)
    assert fork.stats()["steps"] == 0 and cache.stats()["steps"] == 3
    decode(fork, text, 53, 55)
    assert fork.stats()["kv_fraction"] == 1.0 and fork.stats()["steps"] == 2
    assert cache.stats()["steps"] == 3 and cache.stats()["kv_fraction"] < 1.0


def test_reset_starts_to_count_anew():
    text = Text(length=60, **TEXT)
    cache = text.cache(digest="key_bits", threshold=0.5, host_memory="4MiB")
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 53)
    before = cache.stats()
    cache.reset()
    stats = cache.stats()
    assert (
        stats["steps"] == stats["blocks_read"] == stats["hits"] == stats["misses"] == 0
        and stats["kv_fraction"] is None
    )
    feed(cache, text, 0, 50)
    decode(cache, text, 50, 53)
    assert cache.stats() == before and before["misses"] > 0


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_layer_kinds(family):
    model = get_model(family)
    with patched(model, min_context=0, block_size=4):
        model.generate(make_prompt(40, seed=1)[None], max_new_tokens=3)
        kinds = [layer["kind"] for layer in model.last_psa_cache.stats()["layers"]]
    assert kinds == {"gemma3": ["window", "psa", "window"], "llama": ["psa", "psa"]}[family]


@torch.no_grad()
def test_dense_keys_and_values_are_counted():
    """On a model that is not patched every layer asks for them, twice a forward (keys and values); the warning comes once."""
    model = get_model("llama")
    cache = PSACache(model.config, min_context=0, block_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(make_prompt(40, seed=1)[None], past_key_values=cache, max_new_tokens=3)
    assert [str(warning.message)[:50] for warning in caught if "PSACache" in str(warning.message)] == [
        "This PSACache hands out dense keys and values: att"
    ]
    stats = cache.stats()
    assert stats["materialized"] == 2 * 2 * 3  # layers, keys and values, forwards
    assert stats["sparse_steps"] == 0


@pytest.mark.parametrize("first", ["kernels", "reference"])
def test_a_reference_step_leaves_the_buffers_of_the_kernels_where_they_are(first):
    """Descriptors hold their addresses, and nothing tells them of a step that is not the kernels'."""
    stats, device = LayerStats(0), torch.device("cpu")
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    reference = lambda mass: stats.record(zeros, zeros[:, 0], mass, torch.ones_like(mass), None, None)  # noqa: E731
    mass = torch.arange(18.0).view(2, 3, 3)
    if first == "reference":
        reference(mass - 1)
    counters, captured = stats.device_buffers(2, 3, 3, 4, device)
    reference(mass)
    assert [part.data_ptr() for part in stats.device_buffers(2, 3, 3, 4, device)] == [counters.data_ptr(), captured.data_ptr()]
    assert stats.as_dict(0, "psa", False)["captured_log_mass"] == mass.flatten(1).tolist()      # and no padding
    assert torch.equal(captured[..., :3], mass)
