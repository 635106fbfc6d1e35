"""Compile the kernels of a tiered pool for a GPU that is not there.

python -m tests.triton.compile_residency [CAPABILITY ...]
"""
from __future__ import annotations

import sys

import torch

from hf_sparse.kernels import tiering
from hf_sparse.kernels.copy_engine import order_kernel
from hf_sparse.kernels.descriptor import FIELDS
from hf_sparse.kernels.loader import BLOCK_BITS
from hf_sparse.kernels.residency import POLICIES, admit_kernel, settle_kernel, touch_kernel

from .compile_kernels import Recorder, compile_launch

# bytes of a block, eviction policy
CASES = [(16384, "decayed"), (5120, "lru"), (2 * 999, "fifo")]


def record(block_bytes: int, policy: str) -> list:
    """The launches of one token."""
    launches: list = []
    names = ("fetch_kernel", "count_victims_kernel", "queue_victims_kernel")
    kernels = {name: getattr(tiering, name) for name in names}
    desc = torch.zeros(2, FIELDS, dtype=torch.int64)
    try:
        for name, kernel in kernels.items():
            setattr(tiering, name, Recorder(kernel, launches))
        tiering.Tier(block_bytes, policy, 2).fetch(desc[0])
        tiering.Tier(block_bytes, policy, 2).fetch(desc[0], ahead=100)
        tiering.queue_victims(desc[0], policy)
    finally:
        for name, kernel in kernels.items():
            setattr(tiering, name, kernel)
    Recorder(admit_kernel, launches)[1](desc[0], H=4, P=32, POLICY=POLICIES[policy], num_warps=1, num_stages=1)
    Recorder(order_kernel, launches)[1](desc[0], torch.zeros(8, dtype=torch.int64), LAYERS=2, POLICY=POLICIES[policy],
                                        BITS=BLOCK_BITS, num_warps=1, num_stages=1)
    Recorder(touch_kernel, launches)[1](desc[0], torch.zeros(8, 8, dtype=torch.int32), POLICY=POLICIES[policy],
                                        TILE=512, AHEAD=False, num_warps=16, num_stages=1)
    Recorder(touch_kernel, launches)[1](desc[0], torch.zeros(8, 8, dtype=torch.int32), POLICY=POLICIES[policy],
                                        TILE=512, AHEAD=True, num_warps=16, num_stages=1)
    Recorder(settle_kernel, launches)[1](desc[0], H=4, P=32, UB=4, SINK=1, RECENT=1, TAIL=8, POLICY=POLICIES[policy],
                                         **tiering.copy_types(block_bytes), num_warps=4, num_stages=1)
    return launches


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        for case in CASES:
            for kernel, args, kwargs in record(*case):
                compiled = compile_launch(kernel, args, kwargs, capability)
                wide = "ld.global.cg.v4.b32" in compiled.asm["ptx"]
                print(f"sm_{capability} {kernel.__name__} {case[0]} bytes {case[1]}: {len(compiled.asm['cubin'])} bytes"
                      + ", wide loads" * wide)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [80, 90])
