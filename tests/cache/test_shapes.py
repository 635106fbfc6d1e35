"""GQA groups, head dims, value dims and dtypes, each against the float64 step (test_step.py).

Seeds are chosen so that no two blocks tie within float32: the order of such a pair would be up to rounding.
"""

from __future__ import annotations

import pytest
import torch

from tests.cache.drive import Text, feed
from tests.cache.test_step import check

FP16 = dict(rtol=2e-3, atol=2e-3)
BF16 = dict(rtol=2e-2, atol=2e-2)


def text(length, **shape) -> Text:
    return Text(length=length, layers=1, **shape)


@pytest.mark.parametrize("digest", ["channel_codes", "key_bits"])
@pytest.mark.parametrize(
    ("group", "heads", "key_dim"),
    [
        (1, 3, 64),
        (3, 1, 80),
        (4, 2, 96),
        (5, 1, 128),
        (7, 1, 64),
        (8, 1, 256),
        (1, 1, 128),
        (2, 2, 32),
    ],
    ids=lambda value: str(value),
)
def test_groups_and_head_dims(group, heads, key_dim, digest):
    length = 265 if digest == "channel_codes" else 70
    sample = text(length, rows=2, group=group, heads=heads, key_dim=key_dim, seed=1)
    stats = check(sample, length - 3, length, digest=digest, threshold=0.7, round_blocks=1)
    assert stats["kv_fraction"] < 0.95


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(16, 8), (24, 16), (8, 40), (96, 64)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("tiered", [False, True], ids=["resident", "tiered"])
def test_values_of_another_size(tiered, key_dim, value_dim):
    budget = dict(host_memory="4MiB") if tiered else {}
    stats = check(
        text(75, rows=2, key_dim=key_dim, value_dim=value_dim),
        70,
        75,
        digest="key_bits",
        threshold=0.7,
        round_blocks=1,
        **budget,
    )
    assert stats["kv_fraction"] < 0.95


@pytest.mark.parametrize("digest", ["channel_codes", "key_bits", "min_max", "centroid"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, FP16), (torch.bfloat16, BF16)], ids=["fp16", "bf16"]
)
def test_half_precision(dtype, tolerance, digest):
    length = 265 if digest == "channel_codes" else 70
    rule = "estimate" if digest in ("channel_codes", "key_bits") else "window"
    sample = text(length, rows=2, group=3, key_dim=64, dtype=dtype)
    settings = dict(digest=digest, stop_rule=rule, threshold=0.7, round_blocks=1)
    if digest in ("min_max", "centroid"):
        # Block-level digests are kept in the model's dtype: the reference does not round them, so only the budget is fixed.
        settings |= dict(policy="top_k", top_k=1)
    stats = check(sample, length - 3, length, **settings, **tolerance)
    assert stats["kv_fraction"] < 0.95


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
def test_blocks_are_kept_in_the_models_dtype(dtype):
    sample = text(60, dtype=dtype)
    cache = sample.cache(threshold=1.0)
    output = feed(cache, sample, 0, 60)
    layer = cache.sparse_layers[0]
    assert layer.pool.dtype == dtype and output.dtype == dtype
    keys, values = layer.padded()
    assert torch.equal(keys, sample.keys[0]) and torch.equal(values, sample.values[0])


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("heads", [1, 6])
def test_rows_and_heads(rows, heads):
    stats = check(
        text(70, rows=rows, heads=heads, group=1, key_dim=16),
        66,
        70,
        digest="key_bits",
        threshold=0.7,
        round_blocks=1,
    )
    assert stats["kv_fraction"] < 0.95
