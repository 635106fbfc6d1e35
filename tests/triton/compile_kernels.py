"""Compile the decode kernels for a GPU that is not there: python -m tests.triton.compile_kernels [CAPABILITY[:CASE,CASE] ...]

The interpreter runs kernels as Python and sees neither types that change in a loop nor what an instruction set lacks.
"""
from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_sparse import PSAConfig
from hf_sparse.cache.static import decode_policy
from hf_sparse.kernels import decode, tiering

POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.float32: "*fp32", torch.float16: "*fp16",
            torch.bfloat16: "*bf16"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
# query heads a group, head dim, block size, dtype, softcap, sinks, policy, eviction with a host tier
CASES = [
    (4, 128, 32, torch.bfloat16, 0.0, False, {"max_blocks": 128}, None),
    (3, 80, 16, torch.float16, 30.0, True, {"group_stop": "min"}, None),
    (4, 128, 32, torch.bfloat16, 0.0, False, {}, "decayed"),
    (7, 64, 32, torch.float16, 0.0, True, {}, "lru"),
]


class Recorder:
    """Stands in for a kernel and keeps what it would have been launched with."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def record(capability, group, dim, block_size, dtype, softcap, sinks, settings, eviction) -> list:
    """The launches of one decode step."""
    launches: list = []
    names = ("rank_kernel", "select_kernel", "attend_kernel", "merge_kernel", "extend_kernel")
    kernels = {name: getattr(decode, name) for name in names}
    fetch = tiering.fetch_kernel
    real = torch.cuda.get_device_properties, torch.cuda.get_device_capability
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda device: divmod(capability, 10)
    try:
        for name, kernel in kernels.items():
            setattr(decode, name, Recorder(kernel, launches))
        tiering.fetch_kernel = Recorder(fetch, launches)
        high = -(-dim // 4)
        shape = decode.DecodeShape(1, 2, group, dim, dim, block_size, 128 // block_size, high, dim - high, dtype)
        policy = decode_policy(PSAConfig(block_size=block_size, **settings))
        work = decode.DecodeWork(shape, policy, torch.device("cpu"))
        tier = None
        if eviction is not None:
            tier = tiering.Tier(2 * block_size * dim * dtype.itemsize, eviction, 2)
        query, key = torch.zeros(1, 2 * group, 1, dim, dtype=dtype), torch.zeros(1, 2, 1, dim, dtype=dtype)
        decode.decode_layer(torch.zeros(decode.FIELDS, dtype=torch.int64), work, query,
                            key, key, torch.zeros(2 * group) if sinks else None, dim**-0.5, softcap, tier)
    finally:
        torch.cuda.get_device_properties, torch.cuda.get_device_capability = real
        tiering.fetch_kernel = fetch
        for name, kernel in kernels.items():
            setattr(decode, name, kernel)
    return launches


def compile_launch(kernel, args, kwargs, capability: int):
    names = kernel.arg_names
    signature = {}
    for name, value in zip(names, args):
        if torch.is_tensor(value):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = {bool: "i1", int: "i32", float: "fp32"}[type(value)]
    constants = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    signature.update(dict.fromkeys(constants, "constexpr"))
    aligned = {(i,): [["tt.divisibility", 16]] for i, value in enumerate(args) if torch.is_tensor(value)}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(wanted: list[str]) -> None:
    for part in wanted:
        capability, _, cases = part.partition(":")
        for case in [CASES[int(number)] for number in cases.split(",")] if cases else CASES:
            for kernel, args, kwargs in record(int(capability), *case):
                compiled = compile_launch(kernel, args, kwargs, int(capability))
                print(f"sm_{capability} {kernel.__name__} group {case[0]} dim {case[1]}: {len(compiled.asm['cubin'])} bytes")


if __name__ == "__main__":
    main(sys.argv[1:] or ["80", "90"])
