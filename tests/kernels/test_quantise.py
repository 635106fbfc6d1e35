"""Quantised blocks: how far they are from what went in, and where in a packed block everything lies."""
from __future__ import annotations

import struct

import pytest
import torch

from hf_sparse.kernels.reference.quantise import dequantise_blocks, packed_bytes, quantise_blocks

BITS = pytest.mark.parametrize("bits", [8, 4], ids=["8-bit", "4-bit"])
# block size, key dim, value dim
SHAPES = [
    pytest.param(16, 60, 60, id="16-tokens-dim-60"),
    pytest.param(32, 80, 72, id="32-tokens-dim-80-values-72"),
    pytest.param(64, 17, 33, id="64-tokens-odd-dims"),
    pytest.param(16, 1, 1, id="one-channel"),
]


def draw(block_size: int, key_dim: int, value_dim: int, dtype=torch.float32, leading=(2, 3)):
    """Keys with loud channels and channels off zero, values with loud tokens."""
    generator = torch.Generator().manual_seed(block_size + key_dim)
    normal = lambda *shape: torch.randn(*leading, *shape, generator=generator)  # noqa: E731
    keys = normal(block_size, key_dim) * torch.exp(normal(1, key_dim)) + 4 * normal(1, key_dim)
    values = normal(block_size, value_dim) * torch.exp(normal(block_size, 1))
    return keys.to(dtype), values.to(dtype)


def half_ulp(x: torch.Tensor) -> torch.Tensor:
    """Largest error of rounding to float16."""
    return (x.double().abs() * 2.0**-11).clamp(min=2.0**-25)


def bound(x: torch.Tensor, dim: int, levels: int) -> torch.Tensor:
    """Half a step of the exact range, and what rounding minimum and step to float16 adds (float64)."""
    x = x.double()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low + half_ulp(low)) / levels
    return 0.5 * step + half_ulp(low) + (levels + 1) * half_ulp(step) + 1e-6 * x.abs().amax(dim, keepdim=True)


@BITS
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize(("block_size", "key_dim", "value_dim"), SHAPES)
def test_errors_are_half_a_step(block_size, key_dim, value_dim, dtype, bits):
    keys, values = draw(block_size, key_dim, value_dim, dtype)
    packed = quantise_blocks(keys, values, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_bytes(block_size, key_dim, value_dim, bits))
    got = dequantise_blocks(packed, block_size, key_dim, value_dim, bits, torch.float32)
    for ours, theirs, dim in zip(got, (keys, values), (-2, -1), strict=True):
        assert ours.shape == theirs.shape and ours.isfinite().all()
        error = (ours.double() - theirs.double()).abs()
        assert (error <= bound(theirs, dim, 2**bits - 1)).all()
    rounded = dequantise_blocks(packed, block_size, key_dim, value_dim, bits, dtype)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(rounded, got, strict=True))


@BITS
def test_ranges_are_of_channels_for_keys_and_of_tokens_for_values(bits):
    """One loud channel of the keys, and one loud token of the values, cost the others nothing."""
    keys, values = torch.rand(16, 6), torch.rand(16, 6)
    keys[:, 2] *= 1000
    values[5] *= 1000
    got_keys, got_values = dequantise_blocks(quantise_blocks(keys, values, bits), 16, 6, 6, bits, torch.float32)
    step = 0.51 / (2**bits - 1)
    others = [0, 1, 3, 4, 5]
    assert (got_keys - keys)[:, others].abs().max() <= step + 1e-3
    assert (got_values - values)[[n for n in range(16) if n != 5]].abs().max() <= step + 1e-3


@BITS
def test_constants_are_exact(bits):
    keys = torch.tensor([0.0, 1.0, -2.5, 1000.0, 65504.0]).expand(32, -1)
    values = torch.arange(-16.0, 16.0)[:, None].expand(-1, 7)
    got = dequantise_blocks(quantise_blocks(keys, values, bits), 32, 5, 7, bits, torch.float32)
    assert torch.equal(got[0], keys) and torch.equal(got[1], values)


@BITS
@pytest.mark.parametrize(("block_size", "key_dim", "value_dim"), SHAPES)
def test_what_was_dequantised_is_quantised_to_the_same_bytes(block_size, key_dim, value_dim, bits):
    # Ranges that are wide beside the rounding of their minimum, so that code 0 is in use; where it isn't, minima move.
    generator = torch.Generator().manual_seed(block_size)
    keys, values = (torch.randn(4, block_size, dim, generator=generator) for dim in (key_dim, max(value_dim, 16)))
    value_dim = values.shape[-1]
    packed = quantise_blocks(keys, values, bits)
    again = quantise_blocks(*dequantise_blocks(packed, block_size, key_dim, value_dim, bits, torch.float32), bits)
    assert torch.equal(again, packed)


@BITS
def test_halves_between_two_codes_go_to_the_even_one(bits):
    levels = 2**bits - 1
    keys = torch.zeros(16, 1)
    keys[:4, 0] = torch.tensor([0.5, 1.5, 2.5, levels])
    codes = quantise_blocks(keys, torch.zeros(16, 1), bits)[:4].int() & levels
    assert codes.tolist() == [0, 2, 2, levels]


@BITS
def test_the_layout_of_a_packed_block(bits):
    """Every byte, from the documented layout and arithmetic in plain Python."""
    P, D, Dv, levels = 16, 3, 5, 2**bits - 1
    keys, values = draw(P, D, Dv, torch.float16, leading=())
    half = lambda x: struct.unpack("<e", struct.pack("<e", x))[0]  # noqa: E731

    def affine(numbers):
        low = half(min(numbers))
        step = half(max(max(numbers) - low, 0.0) / levels)
        return [min(max(round((x - low) / step), 0), levels) for x in numbers], low, step

    by_channel = [affine(keys[:, d].tolist()) for d in range(D)]
    by_token = [affine(values[p].tolist()) for p in range(P)]
    key_codes = [[by_channel[d][0][p] for d in range(D)] for p in range(P)]
    value_codes = [by_token[p][0] for p in range(P)]
    expected = bytearray()
    for codes in (key_codes, value_codes):
        for row in range(P * bits // 8):
            for channel in range(len(codes[0])):
                high = 0 if bits == 8 else codes[row + P // 2][channel] << 4
                expected.append(codes[row][channel] | high)
    for ranges in (by_channel, by_token):
        for part in (1, 2):
            expected += struct.pack(f"<{len(ranges)}e", *(entry[part] for entry in ranges))
    expected += bytes(-len(expected) % 16)
    assert bytes(quantise_blocks(keys, values, bits).tolist()) == bytes(expected)


@BITS
def test_numbers_beyond_float16_stay_finite(bits):
    keys = torch.tensor([-3e38, 0.0, 3e38, 7e4]).to(torch.bfloat16).repeat(4)[:, None].expand(-1, 3)
    got = dequantise_blocks(quantise_blocks(keys, keys, bits), 16, 3, 3, bits, torch.bfloat16)
    assert all(part.isfinite().all() for part in got)


@pytest.mark.parametrize("shape", [(32, 128, 128), (16, 80, 80), (32, 192, 128), (64, 60, 60)], ids=str)
def test_sizes(shape):
    P, D, Dv = shape
    exact = 2 * P * (D + Dv)
    for bits in (8, 4):
        size = packed_bytes(*shape, bits)
        ranges = 4 * (D + P)
        assert size % 16 == 0 and 0 <= size - exact * bits // 16 - ranges < 16


def test_what_is_no_packed_block_is_refused():
    with pytest.raises(ValueError, match="8 or 4 bits, not 2"):
        packed_bytes(32, 64, 64, 2)
    with pytest.raises(ValueError, match="must be even, not 7"):
        quantise_blocks(torch.zeros(7, 4), torch.zeros(7, 4), 4)
    with pytest.raises(ValueError, match="bytes, got 7"):
        dequantise_blocks(torch.zeros(7, dtype=torch.uint8), 16, 4, 4, 8, torch.float32)
