"""Compile the prefill kernel for a GPU that is not there, with the registers that it takes.

python -m tests.triton.compile_prefill [CAPABILITY[:CASE,CASE] ...]
"""
from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from hf_sparse.kernels import prefill_kernel
from hf_sparse.kernels.prefill_kernel import FLOAT_TILES, HOPPER_TILES, LARGE_TILES, SMALL_TILES

from .compile_kernels import OPTIONS, POINTERS, Recorder

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# query heads a group, key dim, value dim, type, softcap, sinks and heads, queries, tile
CASES = [
    (4, 64, 64, torch.bfloat16, 0.0, False, 4096, LARGE_TILES[64]),
    (4, 128, 128, torch.bfloat16, 0.0, False, 4096, LARGE_TILES[128]),
    (4, 256, 256, torch.bfloat16, 0.0, False, 4096, LARGE_TILES[256]),
    (8, 64, 64, torch.bfloat16, 0.0, True, 4096, SMALL_TILES[64]),
    (4, 128, 128, torch.bfloat16, 0.0, True, 4096, SMALL_TILES[128]),
    (2, 256, 256, torch.bfloat16, 30.0, True, 4096, SMALL_TILES[256]),
    (3, 80, 96, torch.float16, 30.0, True, 300, LARGE_TILES[128]),
    (1, 128, 128, torch.float32, 0.0, False, 300, FLOAT_TILES[128]),
    (7, 256, 64, torch.float32, 0.0, True, 5, FLOAT_TILES[256]),
    (4, 128, 128, torch.bfloat16, 0.0, True, 4096, HOPPER_TILES[128]),
    (2, 256, 256, torch.bfloat16, 30.0, False, 4096, HOPPER_TILES[256]),
]


def record(group, key_dim, value_dim, dtype, softcap, extras, queries, tile):
    """(kernel, arguments, keyword arguments) of one launch."""
    launches: list = []
    kernel = prefill_kernel.prefill_kernel
    make = lambda heads, dim: torch.zeros(1, heads, queries, dim, dtype=dtype)  # noqa: E731
    heads = sinks = None
    if extras:
        heads, sinks = torch.zeros(1, dtype=torch.int32), torch.zeros(2 * group)
    try:
        prefill_kernel.prefill_kernel = Recorder(kernel, launches)
        prefill_kernel.launch(make(2 * group, value_dim), make(2 * group, key_dim), make(2, key_dim), make(2, value_dim), heads,
                              0, 128, 4096, 0.1, softcap, sinks, tile)
    finally:
        prefill_kernel.prefill_kernel = kernel
    return kernel, *launches[0][1:]


def compile_launch(kernel, args, kwargs, capability: int):
    names, signature, constants, aligned = kernel.arg_names, {}, {}, {}
    for place, (name, value) in enumerate(zip(names, args)):
        if value is None:
            signature[name], constants[place,] = "constexpr", None
        elif torch.is_tensor(value):
            signature[name] = POINTERS[value.dtype]
        elif hasattr(value, "block_shape"):
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)}>"
        else:
            signature[name] = {int: "i32", float: "fp32"}[type(value)]
        # As a launch would find: addresses, and strides.
        if torch.is_tensor(value) or re.fullmatch("[a-z]_[a-z]", name) and value % 16 == 0:
            aligned[place,] = [["tt.divisibility", 16]]
    for name, value in kwargs.items():
        if name not in OPTIONS:
            signature[name], constants[names.index(name),] = "constexpr", value
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def registers(compiled, capability: int) -> str:
    """What the assembler says of a kernel: registers and spilled bytes."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        suffix = "a" if capability >= 90 else ""
        assembler = get_ptxas(capability).path
        done = subprocess.run([assembler, "-v", f"-arch=sm_{capability}{suffix}", file.name, "-o", "/dev/null"], text=True,
                              capture_output=True, check=True)
    used, spilled = (re.search(pattern, done.stderr)[1] for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return f"{used} registers, {spilled} bytes spilled"


def main(wanted: list[str]) -> None:
    for part in wanted:
        capability, _, cases = part.partition(":")
        for case in [CASES[int(number)] for number in cases.split(",")] if cases else CASES:
            if case[-1].descriptors and int(capability) < 90:
                continue
            compiled = compile_launch(*record(*case), int(capability))
            products = "wgmma" if "wgmma" in compiled.asm["ptx"] else "mma"
            print(f"sm_{capability} {case[0]} heads, dims {case[1]} {case[2]}, {NAMES[case[3]]}, {case[-1]}: "
                  f"{len(compiled.asm['cubin'])} bytes, {registers(compiled, int(capability))}, "
                  f"{compiled.metadata.shared} bytes shared, {products}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["80", "90"])
