"""Partial attention over blocks and its merge, against float64 over the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.kernels.reference.softmax import block_attention, finite, merge
from tests import references

# rows, KV heads, group, key dim, value dim, blocks, block size
SHAPES = [
    pytest.param(1, 1, 1, 8, 8, 1, 4, id="one-block"),
    pytest.param(2, 3, 5, 16, 24, 6, 4, id="group-5-wide-values"),
    pytest.param(1, 2, 7, 80, 64, 3, 16, id="group-7-dim-80"),
    pytest.param(3, 1, 8, 96, 96, 2, 32, id="group-8-dim-96"),
]


def draw(shape, dtype=torch.float32, sharpness=2.5):
    rows, heads, group, dim, value_dim, blocks, size = shape
    query = torch.randn(rows, heads, group, dim) * sharpness * dim**-0.5
    keys = torch.randn(rows, heads, blocks, size, dim).to(dtype)
    values = torch.randn(rows, heads, blocks, size, value_dim).to(dtype)
    valid = torch.rand(rows, heads, 1, blocks, size) < 0.7
    valid[..., 0, 0] = True
    return query, keys, values, valid


def expected(query, keys, values, valid, softcap=0.0):
    rows, heads = query.shape[:2]
    output, mass, block_mass = [], [], []
    for b in range(rows):
        for h in range(heads):
            flat = keys[b, h].flatten(0, 1), values[b, h].flatten(0, 1)
            one = references.attention(query[b, h], *flat, valid[b, h, 0].flatten(), softcap)
            output.append(one[0])
            mass.append(one[1])
            block_mass.append(
                torch.stack(
                    [
                        references.attention(
                            query[b, h], keys[b, h, r], values[b, h, r], valid[b, h, 0, r], softcap
                        )[1]
                        for r in range(keys.shape[2])
                    ],
                    -1,
                )
            )
    join = lambda parts: torch.stack(parts).unflatten(0, (rows, heads))  # noqa: E731
    return join(output), join(mass), join(block_mass)


@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["plain", "softcap"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("shape", [param.values for param in SHAPES], ids=[param.id for param in SHAPES])
def test_block_attention(shape, dtype, softcap):
    query, keys, values, valid = draw(shape, dtype)
    output, mass, block_mass = block_attention(query, keys, values, valid, softcap)
    reference = expected(query, keys, values, valid, softcap)
    assert output.dtype == mass.dtype == block_mass.dtype == torch.float32
    for ours, theirs in zip((output, mass, block_mass), reference):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_nothing_valid_gives_zeros_and_no_mass():
    query, keys, values, valid = draw((2, 1, 2, 8, 8, 3, 4))
    valid[1] = False
    output, mass, block_mass = block_attention(query, keys, values, valid, 0.0)
    assert (output[1] == 0).all()
    assert (mass[1] == -math.inf).all() and (block_mass[1] == -math.inf).all()
    assert output[0].abs().sum() > 0 and torch.isfinite(mass[0]).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
def test_invalid_tokens_are_not_looked_at(poison):
    query, keys, values, valid = draw((2, 2, 2, 8, 8, 3, 4))
    clean = block_attention(query, keys, values, valid, 0.0)
    hidden = ~valid.squeeze(2)[..., None]
    poisoned = block_attention(
        query, keys.masked_fill(hidden, poison), values.masked_fill(hidden, poison), valid, 0.0
    )
    for before, after in zip(clean, poisoned):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_huge_logits_do_not_overflow():
    query, keys, values, valid = draw((1, 1, 2, 8, 8, 3, 4), sharpness=400.0)
    output, mass, _ = block_attention(query, keys, values, valid, 0.0)
    reference = expected(query, keys, values, valid)
    torch.testing.assert_close(output.double(), reference[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(mass.double(), reference[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "cuts", [(1,), (2, 3), (1, 2, 3, 4, 5)], ids=["two-parts", "three-parts", "block-by-block"]
)
def test_merged_parts_are_the_whole(cuts):
    query, keys, values, valid = draw((2, 2, 3, 16, 8, 6, 4))
    valid[0, 0, :, 2:] = False  # some parts have nothing to say
    whole = expected(query, keys, values, valid)
    output, mass = None, None
    for low, high in zip((0, *cuts), (*cuts, 6)):
        part = block_attention(
            query, keys[:, :, low:high], values[:, :, low:high], valid[:, :, :, low:high], 0.0
        )
        output, mass = part[:2] if output is None else merge(output, mass, *part[:2])
    torch.testing.assert_close(output.double(), whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mass.double(), whole[1], rtol=1e-5, atol=1e-5)


def test_merging_nothing_changes_nothing():
    output, mass = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2)
    nothing, empty = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -math.inf)
    for merged in (merge(output, mass, nothing, empty), merge(nothing, empty, output, mass)):
        torch.testing.assert_close(merged[0], output, rtol=0, atol=1e-7)
        torch.testing.assert_close(merged[1], mass, rtol=0, atol=0)
    both = merge(nothing, empty, nothing, empty)
    assert (both[0] == 0).all() and (both[1] == -math.inf).all()


def test_finite_only_replaces_infinities():
    values = torch.tensor([-math.inf, -3.0, 0.0, 5.5])
    assert finite(values).tolist() == [0.0, -3.0, 0.0, 5.5]
