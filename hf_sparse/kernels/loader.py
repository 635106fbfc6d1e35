"""The paper's way to fetch: a thread that has the copy engine bring missing blocks into their slots, a copy for each.

It is there to be compared with the fetch kernel (residency.py), and unlike that it waits for the device. Two ways in:

    follow    a step of the kernels lists slots and blocks in host memory that both reach, while the thread reads the list,
              until the device's stop flag says how many there were (copy_engine.py)
    load      a round of the reference step, whose list is brought to the host
"""
from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

# An order is a slot and a block in one number, which is written, and seen, all at once.
BLOCK_BITS = 32


class Loader:
    """Copies blocks of one host tier into slots of its pool, from a thread, on a stream of its own.

    Args:
        device: of the pool. piece_bytes: the host tier is pinned in pieces of so many bytes, and the driver takes no copy
            that goes from one to the next.
    """

    def __init__(self, device: torch.device, piece_bytes: int):
        self.device, self.piece_bytes = device, piece_bytes
        self._stream: torch.cuda.Stream | None = None
        self._orders: torch.Tensor | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_sparse-loader")     # ends when this object does

    def orders(self, count: int) -> torch.Tensor:
        """int64 in host memory that kernels reach, zero, for a stop flag and `count` orders, and one beyond."""
        if self._orders is None or self._orders.shape[0] < count + 2:
            self._orders = torch.zeros(count + 2, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return self._orders

    def follow(self, kv: torch.Tensor, host: torch.Tensor) -> None:
        """Copy what the kernel just launched on this stream writes into `orders`; what follows on this stream sees it.

        Args:
            kv: [S, E] slots. host: [C, E], pinned.

        Raises:
            RuntimeError: the kernel has ended and has ordered less than it has said, or the device has failed.
        """
        ended = None
        if self.device.type == "cuda":
            ended = torch.cuda.Event()
            ended.record(torch.cuda.current_stream(self.device))
        self._run(kv, host, self._ordered(ended))

    def load(self, kv: torch.Tensor, host: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy blocks [n] into slots [n] (int64 on the pool's device; slot 0: nowhere); waits for the device."""
        # The reference's step, which is not captured: this fetcher is the one that may wait for the device.
        pairs = torch.stack([blocks, slots], 1)[slots > 0].tolist()
        if pairs:
            self._run(kv, host, pairs)

    def _run(self, kv, host, pairs: Iterable) -> None:
        if self.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        copies: Future = self._thread.submit(self._copy, kv, host, pairs)
        try:
            copies.result()
        finally:
            wait([copies])                                  # also in a call that is interrupted: nothing is written after it
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _copy(self, kv, host, pairs: Iterable) -> None:
        # What is copied is no longer in use: whoever gave out a slot came after all that read it.
        row_bytes = host.shape[1] * host.element_size()
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for block, slot in pairs:
                source, target = host[block], kv[slot]
                border = -block * row_bytes % self.piece_bytes // host.element_size()
                if 0 < border < host.shape[1]:
                    target[:border].copy_(source[:border], non_blocking=True)
                    target[border:].copy_(source[border:], non_blocking=True)
                else:
                    target.copy_(source, non_blocking=True)

    def _ordered(self, ended: torch.cuda.Event | None) -> Iterator[tuple[int, int]]:
        """(block, slot) as the device orders them, until its stop flag says that these were all. ended: of the kernel."""
        orders, done = self._orders.numpy(), 0
        try:
            while True:
                over = ended is None or ended.query()       # asked before looking, so that then all is there
                while (order := int(orders[1 + done])) != 0:
                    done += 1
                    if order >> BLOCK_BITS:                 # else it got no slot, and is read where it is
                        yield order & (1 << BLOCK_BITS) - 1, order >> BLOCK_BITS
                stop = int(orders[0])                       # 0: not known yet
                if stop == done + 1:
                    return
                if over:
                    raise RuntimeError(f"The device has ordered {done} blocks and ended; its stop flag is {stop}.")
                time.sleep(0)                               # let other threads run
        finally:
            orders[:done + 1] = 0


# By the address of the host tier: ops are given nothing but its tensor. The tier holds its loader.
LOADERS: weakref.WeakValueDictionary[int, Loader] = weakref.WeakValueDictionary()


def loader_of(host: torch.Tensor) -> Loader | None:
    """The loader of a host tier that has one."""
    return LOADERS.get(host.data_ptr())
