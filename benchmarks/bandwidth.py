"""How fast blocks come from pinned host memory: the copy engine's one large copy, and the fetch kernel's scattered blocks."""
from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from hf_sparse.kernels import tiering
from hf_sparse.kernels.descriptor import FIELDS, HOST, KV
from hf_sparse.kernels.residency import MISSED

from .common import quantiles

ELEMENTS = 32 * 2 * 128                                     # of a block: 32 tokens of 128 in 16 bits, 16 KiB
PROGRAMS = (8, 16, 32, 64)
QUEUED = 3_000_000                                          # cycles for which the device waits while launches queue up


class FetchBench:
    """A pool of random blocks in host memory, and miss lists for the fetch kernel.

    Args:
        blocks: in the host tier. misses: fetched at a time; the pool holds four times as many.
    """

    def __init__(self, blocks: int, misses: int, elements: int = ELEMENTS, device="cuda", eviction: str = "lru"):
        device = torch.device(device)
        self.misses, self.eviction, self.block_bytes = misses, eviction, elements * 2
        slots = 1 + 4 * misses
        new = lambda size, value=0, dtype=torch.int64: torch.full((size,), value, dtype=dtype, device=device)  # noqa: E731
        host = torch.empty(blocks, elements, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
        host.view(torch.int16).copy_(torch.arange(blocks, dtype=torch.int64).to(torch.int16)[:, None])
        self.pool = SimpleNamespace(
            slots=slots, host=host, kv=torch.zeros(slots, elements, dtype=torch.bfloat16, device=device),
            slot_of=new(blocks), block_in=new(slots), priority=new(slots, -math.inf, torch.float64),
            pinned=new(slots, False, torch.bool), history=new(blocks, -math.inf, torch.float64),
            clock=new(1, 0.0, torch.float64), counters=new(2))
        self.pool.pinned[0] = True
        self.work = tiering.TierWork(slots, misses, 2 * misses, device)
        numbers = [0] * FIELDS
        numbers[KV.value] = self.pool.kv.data_ptr()
        tier = self.work.numbers(self.pool)
        numbers[HOST.value:HOST.value + len(tier)] = tier
        self.desc = torch.tensor(numbers, dtype=torch.int64, device=device)

    def miss(self) -> torch.Tensor:
        """List `misses` random blocks that have no slot, as `touch` would, and queue who leaves; returns them."""
        absent = (self.pool.slot_of == 0).nonzero().squeeze(1)
        absent = absent[absent > 0]
        blocks = absent[torch.randperm(len(absent), device=absent.device)[:self.misses]]
        self.work.misses.copy_(blocks)
        self.pool.slot_of[blocks] = -1
        self.work.state[MISSED.value] = self.misses
        tiering.queue_victims(self.desc, self.eviction)
        return blocks

    def fetch(self) -> None:
        tiering.Tier(self.block_bytes, self.eviction, 32).fetch(self.desc)

    def check(self, blocks: torch.Tensor) -> None:
        """Raise if these blocks did not get slots with their contents."""
        slots = self.pool.slot_of[blocks]
        if bool((slots <= 0).any()) or not torch.equal(
                self.pool.kv[slots].view(torch.int16).cpu(), self.pool.host[blocks.cpu()].view(torch.int16)):
            raise RuntimeError("the fetch kernel did not bring the blocks that were missing")


def event_ms(function) -> float:
    """Milliseconds on the device; the launch itself is not in it."""
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda._sleep(QUEUED)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def bandwidths(blocks: int = 131072, misses: int = 2000) -> dict:
    """GB/s of the copy engine and, for each number of programs, of the fetch kernel alone."""
    bench = FetchBench(blocks, misses)
    host = bench.pool.host
    target = torch.empty_like(host, device="cuda")
    engine = [host.nbytes / event_ms(lambda: target.copy_(host, non_blocking=True)) / 1e6 for _ in range(5)]
    found, default = {}, tiering.TUNING.fetch_programs
    try:
        for programs in dict.fromkeys((default, *PROGRAMS)):
            tiering.TUNING.fetch_programs = programs
            rates = []
            for _ in range(16):
                listed = bench.miss()
                rates.append(misses * bench.block_bytes / event_ms(bench.fetch) / 1e6)
            bench.check(listed)
            found[str(programs)] = quantiles(rates[4:])     # before, the pool fills and kernels are compiled
    finally:
        tiering.TUNING.fetch_programs = default
    return {"copy_engine_gb_s": quantiles(engine[1:])["median"], "fetch_gb_s": found[str(default)]["median"],
            "fetch_programs": default, "by_programs": found, "blocks": misses, "block_bytes": bench.block_bytes}
