"""The captured step over a pool for each layer: replays know all of them, and serve the next cache's."""

from __future__ import annotations

import re

import pytest

from hf_sparse import PSACache, patch_model
from hf_sparse.sizes import parse_bytes
from tests.triton.test_captured_step import SETTINGS, model, prompt, recordings, run, same  # noqa: F401
from tests.triton.test_tiered_step import small_launches  # noqa: F401

LENGTH, TOKENS = 260, 4


def test_captured_over_pools_of_layers(model, recordings):  # noqa: F811
    settings = {**SETTINGS, "round_blocks": 1, "threshold": 0.9}
    patch_model(model, **settings)
    memory = dict(host_memory="8MiB", pool="per_layer")
    with pytest.raises(ValueError, match="too small.*for each of 2 layers") as error:
        model(prompt(1, LENGTH + TOKENS), past_key_values=PSACache(model.config, gpu_memory="90KiB", **memory, **settings))
    memory["gpu_memory"] = parse_bytes(re.search(r"at least ([\d.]+\w*B)", str(error.value)).group(1))
    for seed in (1, 2):                                     # the second cache is served by the first one's capture
        ids = prompt(seed, LENGTH)
        plain, _ = run(model, ids, tokens=TOKENS, cache=PSACache(model.config, compile=False, **settings))
        captured, cache = run(model, ids, tokens=TOKENS, cache=PSACache(model.config, **memory, **settings))
        same(captured, plain)
        pools = [layer.pool for layer in cache.sparse_layers]
        assert pools[0] is not pools[1] and all(pool.counters.sum() > 0 for pool in pools)
        assert cache.stats()["misses"] == sum(int(pool.counters[1]) for pool in pools) > 0
        assert all(pool.clock.item() == pytest.approx(TOKENS - 1) for pool in pools)
    assert len(recordings) == 1
