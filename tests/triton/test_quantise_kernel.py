"""The kernel that quantises the blocks of a prompt, interpreted: the reference, byte for byte."""
from __future__ import annotations

import pytest
import torch

from hf_sparse.kernels import ops
from hf_sparse.kernels.quantise import quantise_blocks
from hf_sparse.kernels.reference import quantise as reference

# tokens of a block, key and value dim, bits, type
CASES = {
    "bytes": (16, 64, 64, 8, torch.float32),
    "halves": (32, 128, 128, 4, torch.float16),
    "odd-dims": (16, 15, 7, 4, torch.float32),
    "odd-dims-bytes": (64, 20, 13, 8, torch.float16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_the_reference(case):
    P, key_dim, value_dim, bits, dtype = case
    keys, values = torch.randn(2, 3, P, key_dim), torch.randn(2, 3, P, value_dim)
    keys[0, 1] *= 1e-3
    keys[1, 0, :, 2] = 7.0                                  # a channel without a range
    values[1, 2, 3] = 1e6                                   # beyond float16
    keys, values = keys.to(dtype), values.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else values
    blocks = torch.cat([keys.flatten(2), values.flatten(2)], 2)
    packed = quantise_blocks(blocks, P, key_dim, value_dim, bits)
    assert torch.equal(packed, reference.quantise_blocks(keys, values, bits))


def test_no_blocks():
    assert quantise_blocks(torch.zeros(2, 0, 16 * 8), 16, 4, 4, 4).shape == (2, 0, reference.packed_bytes(16, 4, 4, 4))


def test_prompts_take_the_kernel():
    assert ops.quantise_of(torch.device("cpu")) is quantise_blocks
