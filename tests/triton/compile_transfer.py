"""Compile the kernels that move and quantise the blocks of prompts for a GPU that is not there.

python -m tests.triton.compile_transfer [CAPABILITY ...]
"""
from __future__ import annotations

import re
import sys

import torch

from hf_sparse.kernels import quantise, transfer

from .compile_kernels import Recorder, compile_launch

# rows, KV heads, tokens, key dim, value dim, block size, type of the model, type of the pool
CASES = [
    (1, 8, 4096, 128, 128, 32, torch.bfloat16, torch.bfloat16),
    (2, 3, 999, 80, 96, 16, torch.float32, torch.float16),
    (2, 1, 50, 7, 5, 4, torch.float32, torch.float32),
]
# key dim, value dim, block size, type of the model, bits
QUANTISED = [(128, 128, 32, torch.bfloat16, 4), (80, 96, 16, torch.float16, 8)]
KERNELS = ("load_blocks_kernel", "copy_blocks_kernel", "store_blocks_kernel")


def record(batch, heads, count, key_dim, value_dim, block_size, dtype, pool_dtype) -> list:
    """A launch of each kernel."""
    launches: list = []
    kernels = {name: getattr(transfer, name) for name in KERNELS}
    kv = torch.zeros(9, block_size * (key_dim + value_dim), dtype=pool_dtype)
    keys, values = (torch.zeros(batch, count, heads, dim, dtype=dtype).transpose(1, 2) for dim in (key_dim, value_dim))
    ids, row, table = (torch.zeros(*shape, dtype=torch.int64) for shape in ((5,), (batch,), (batch, heads, 200)))
    try:
        for name, kernel in kernels.items():
            setattr(transfer, name, Recorder(kernel, launches))
        transfer.load_blocks(kv, kv, ids, ids)
        transfer.copy_blocks(kv, kv, ids, ids)
        transfer.store_blocks(kv, kv, ids, table, row, row, torch.zeros(batch, count, dtype=torch.int64), keys, values,
                              block_size)
    finally:
        for name, kernel in kernels.items():
            setattr(transfer, name, kernel)
    return launches


def record_quantise(key_dim, value_dim, block_size, dtype, bits) -> list:
    launches: list = []
    kernel = quantise.quantise_kernel
    try:
        quantise.quantise_kernel = Recorder(kernel, launches)
        quantise.quantise_blocks(torch.zeros(9, block_size * (key_dim + value_dim), dtype=dtype), block_size, key_dim, value_dim,
                                 bits)
    finally:
        quantise.quantise_kernel = kernel
    return launches


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        for case in QUANTISED:
            for kernel, args, kwargs in record_quantise(*case):
                print(f"sm_{capability} {kernel.__name__} {case}: "
                      f"{len(compile_launch(kernel, args, kwargs, capability).asm['cubin'])} bytes")
        for case in CASES:
            for kernel, args, kwargs in record(*case):
                compiled = compile_launch(kernel, args, kwargs, capability)
                # 16 bytes a thread, to the host tier and from it.
                wide = all(re.search(rf"{op}.global\S*.v4.b32", compiled.asm["ptx"]) for op in ("ld", "st"))
                print(f"sm_{capability} {kernel.__name__} {case[-1]} dim {case[3]}: {len(compiled.asm['cubin'])} bytes"
                      + ", wide" * wide)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [80, 90])
