"""Compile the decode kernels for a GPU that is not there: python -m tests.triton.compile_kernels [CAPABILITY[:CASE,CASE] ...]

The interpreter runs kernels as Python and sees neither types that change in a loop nor what an instruction set lacks.
"""
from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_sparse import PSAConfig
from hf_sparse.cache.static import decode_policy
from hf_sparse.kernels import decode, prefetch, streaming, tiering
from hf_sparse.kernels.reference.quantise import packed_bytes

POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8", torch.float32: "*fp32",
            torch.float16: "*fp16", torch.bfloat16: "*bf16"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
# query heads a group, head dim, block size, dtype, softcap, sinks, policy, eviction with a host tier
CASES = [
    (4, 128, 32, torch.bfloat16, 0.0, False, {"max_blocks": 128}, None),
    (3, 80, 16, torch.float16, 30.0, True, {"group_stop": "min"}, None),
    (4, 128, 32, torch.bfloat16, 0.0, False, {}, "decayed"),
    (7, 64, 32, torch.float16, 0.0, True, {"reuse": 4}, "lru"),
    (4, 128, 64, torch.bfloat16, 0.0, False, {"policy": "top_k", "top_k": 64, "digest": "pages", "reuse": 4}, None),
    (5, 80, 16, torch.float16, 30.0, False, {"policy": "top_k", "top_k": 64, "digest": "min_max", "reuse": 2}, "decayed"),
    (4, 128, 32, torch.bfloat16, 0.0, False, {"kv_bits": 8}, None),
    (4, 128, 32, torch.bfloat16, 0.0, False, {"kv_bits": 4}, "decayed"),
    (3, 80, 16, torch.float16, 30.0, True, {"kv_bits": 4}, None),
    (4, 128, 64, torch.bfloat16, 0.0, False, {"kv_bits": 4, "policy": "top_k", "top_k": 64, "digest": "pages"}, "decayed"),
    (2, 256, 32, torch.float32, 0.0, False, {"kv_bits": 8}, None),
    (2, 64, 16, torch.float32, 0.0, False, {"kv_bits": 4}, None),
    (4, 128, 32, torch.bfloat16, 0.0, False, {"streaming_heads": [(0, 1)]}, "decayed"),
    (3, 80, 16, torch.float16, 30.0, True, {"streaming_heads": [(0, 1)], "kv_bits": 4}, None),
    (7, 64, 64, torch.float16, 0.0, True, {"streaming_heads": [(0, 1)], "policy": "top_k", "top_k": 9, "digest": "pages", "reuse": 4},
     None),
    (2, 256, 32, torch.float32, 0.0, False, {"streaming_heads": [(0, 1)]}, None),
]
STREAMING = 3                                               # where some heads stream: as many, of 5 KV heads


class Recorder:
    """Stands in for a kernel and keeps what it would have been launched with."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def record(capability, group, dim, block_size, dtype, softcap, sinks, settings, eviction) -> list:
    """The launches of one decode step, and with a host tier of a prefetch."""
    launches: list = []
    names = ("rank_kernel", "select_kernel", "attend_kernel", "merge_kernel", "extend_kernel")
    kernels = {name: getattr(decode, name) for name in names}
    fetch, ring, ahead = tiering.fetch_kernel, streaming.ring_kernel, (prefetch.score_kernel, prefetch.select_kernel)
    real = torch.cuda.get_device_properties, torch.cuda.get_device_capability
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda device: divmod(capability, 10)
    try:
        for name, kernel in kernels.items():
            setattr(decode, name, Recorder(kernel, launches))
        tiering.fetch_kernel, streaming.ring_kernel = Recorder(fetch, launches), Recorder(ring, launches)
        prefetch.score_kernel, prefetch.select_kernel = (Recorder(kernel, launches) for kernel in ahead)
        high = -(-dim // 4)
        shape = decode.DecodeShape(1, 2, group, dim, dim, block_size, 128 // block_size, high, dim - high, dtype)
        pages = {"pages": block_size // 16, "min_max": 1}.get(settings.get("digest"), 0)
        if pages:
            shape = dataclasses.replace(shape, unit_blocks=1, high=0, low=0, pages=pages)
        config = PSAConfig(block_size=block_size, **settings)
        shape, policy = dataclasses.replace(shape, kv_bits=config.kv_bits), decode_policy(config)
        work = decode.DecodeWork(shape, policy, torch.device("cpu"))
        tier = None
        if eviction is not None:
            packed = 0 if config.kv_bits == 16 else packed_bytes(block_size, dim, dim, config.kv_bits)
            tier = tiering.Tier(packed or 2 * block_size * dim * dtype.itemsize, eviction, 2, prefetch=True)
        heads, out = 2, None
        if config.streaming_heads:
            heads = 2 + STREAMING
            work.shape, out = dataclasses.replace(shape, model_heads=heads), torch.zeros(1, 1, heads * group, dim, dtype=dtype)
        query, key = torch.zeros(1, heads * group, 1, dim, dtype=dtype), torch.zeros(1, heads, 1, dim, dtype=dtype)
        logits = torch.zeros(heads * group) if sinks else None
        decode.decode_layer(torch.zeros(decode.FIELDS, dtype=torch.int64), work, query, key, key, logits, dim**-0.5, softcap,
                            tier, out=out)
        if config.streaming_heads:
            desc, those = torch.zeros(streaming.RING_FIELDS, dtype=torch.int64), torch.zeros(STREAMING, dtype=torch.int32)
            streaming.ring_step(desc, those, heads, query, key, key, logits, out, 128, 256, 64, config.min_context, dim**-0.5,
                                softcap)
        if tier is not None:
            prefetch.prefetch_layer(torch.zeros(decode.FIELDS, dtype=torch.int64), work, query, dim**-0.5, softcap, tier)
    finally:
        torch.cuda.get_device_properties, torch.cuda.get_device_capability = real
        tiering.fetch_kernel, streaming.ring_kernel = fetch, ring
        prefetch.score_kernel, prefetch.select_kernel = ahead
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
