"""The host tier: one reservation of address space, of which only written pages take memory; pinned ahead of need for a GPU."""
from __future__ import annotations

import contextlib
import mmap
import os
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from ..kernels.host_link import LINKS, HostLink
from ..kernels.loader import LOADERS, Loader

# Pinning takes about half a second a GiB, most of it for making pages.
CHUNK_BYTES = 2**28                                         # pinned at a time
AHEAD_BYTES = 2**30                                         # pinned beyond what is needed, at least
TOUCHING_THREADS = 4
PORTABLE_MAPPED = 3                                         # flags of cudaHostRegister: for all devices, in their address space


def available_host_bytes() -> int:
    """Bytes of memory that the machine could still give, as far as it says."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


def reserve_host(blocks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[blocks, elements] of host memory at one base address, zero, committed page by page as it is written.

    One address for the whole tier lets a kernel reach every block by an offset, and memory goes back to the system
    when the tensor is dropped.

    Raises:
        ValueError: the system refuses a reservation of this size.
    """
    size = blocks * elements * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"host_memory: the system refuses to reserve {size} bytes ({error}); give a smaller "
                         "host_memory.") from error
    return torch.frombuffer(memory, dtype=dtype).view(blocks, elements)


class HostTier:
    """Blocks in host memory. With a GPU they are pinned, from the first one on and ahead of need, so that kernels reach them.

    Kernels use the CPU's addresses. The rows of two pieces that were pinned apart are no single piece to the driver: a
    copy of its own across the border fails, a kernel's does not.

    Args:
        tiers: as many, this one among them, are pinned at the same time: each a part of what one would be, at a time and
            ahead of need.

    Attributes:
        rows: [blocks, elements], see `reserve_host`.
        pinned: whether kernels reach what `ensure` was asked for. Once False it stays so; never on a CPU.
        link: the stream beside which prompts are stored.
        loader: the thread that copies what decoding misses, if it is not kernels that do.
    """

    def __init__(self, blocks: int, elements: int, dtype: torch.dtype, device: torch.device, tiers: int = 1):
        self.rows = reserve_host(blocks, elements, dtype)
        self._chunk = -(-CHUNK_BYTES // tiers // mmap.PAGESIZE) * mmap.PAGESIZE
        self._ahead = AHEAD_BYTES // tiers
        self.device, self.link = device, HostLink(device)
        self.loader: Loader | None = None
        self.pinned = device.type == "cuda"
        self._row_bytes = elements * dtype.itemsize
        self._changed = threading.Condition()               # guards what follows
        self._done = self._goal = 0                         # bytes pinned, and to be pinned
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._regions: list[int] = []                       # addresses that were given to the driver
        if self.pinned:
            # It holds the rows: their memory goes back only after the driver has let go of it.
            weakref.finalize(self, _release, self.rows, device, self._regions).atexit = False

    def use_copy_engine(self) -> None:
        """From now on a thread and the copy engine bring what decoding misses."""
        self.loader = LOADERS[self.rows.data_ptr()] = Loader(self.device, self._chunk)

    def ensure(self, blocks: int, expected: int = 0) -> None:
        """Wait until the first `blocks` rows are pinned, and go on pinning in the background.

        If the driver refuses, `pinned` becomes False, with a warning.

        Args:
            expected: rows that will be asked for before long.
        """
        if not self.pinned:
            return
        size, needed = self.rows.shape[0] * self._row_bytes, blocks * self._row_bytes
        goal = max(needed + max(needed // 4, self._ahead), expected * self._row_bytes)
        with self._changed:
            self._goal = max(self._goal, min(size, -(-goal // self._chunk) * self._chunk))
            if self._error is None and self._done < self._goal and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=_pin_ahead, args=(weakref.ref(self),), daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:               # no more threads
                    self._error = error
            self._changed.wait_for(lambda: self._done >= needed or self._error is not None)
            self.pinned = self._done >= needed
        if self.pinned:
            LINKS[self.rows.data_ptr()] = self.link
            return
        LINKS.pop(self.rows.data_ptr(), None)
        warnings.warn(f"Host memory can't be pinned ({self._error}), after {self._done} bytes of {size}. Blocks go through "
                      "the CPU instead, which gives the same and is much slower. Raise the limit of locked memory (ulimit -l; "
                      "--ulimit memlock=-1 for a container), free memory, or give a smaller host_memory.", UserWarning,
                      stacklevel=2)

    def _pin_next(self) -> bool:
        """Pin one more chunk; False if there is nothing to do."""
        with self._changed:
            low, high = self._done, min(self._done + self._chunk, self._goal)
            if low >= high or self._error is not None:
                self._thread = None
                return False
        address, error = self.rows.data_ptr() + low, None
        try:
            _touch(self.rows, low, high)
            register(address, high - low, self.device)
        except Exception as reason:  # noqa: BLE001 - whoever waits has to hear of it
            error = reason
        with self._changed:
            if error is None:
                self._regions.append(address)
                self._done = high
            self._error = error
            self._changed.notify_all()
        return True


def register(address: int, size: int, device: torch.device) -> None:
    """Pin host memory for kernels.

    Raises:
        torch.cuda.CudaError: the driver refuses.
    """
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE_MAPPED))
    if code != 0:
        raise torch.cuda.CudaError(code)


def unregister(addresses: list[int], device: torch.device) -> None:
    """Let the driver go of memory, once kernels are done with it."""
    with contextlib.suppress(RuntimeError):                 # after a fault of the device: nothing runs any more
        torch.cuda.synchronize(device)
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


def _release(rows: torch.Tensor, device: torch.device, regions: list[int]) -> None:
    LINKS.pop(rows.data_ptr(), None)
    if not regions:
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        # A garbage collection in the middle of a capture, in which the driver can't be waited for by this thread.
        threading.Thread(target=lambda: (unregister(regions, device), rows)).start()
    else:
        unregister(regions, device)


def _pin_ahead(tier_of) -> None:
    # A tier that is dropped meanwhile is not kept by the thread for longer than a chunk.
    while (tier := tier_of()) is not None and tier._pin_next():
        del tier


def _touch(rows: torch.Tensor, low: int, high: int) -> None:
    """Have the system make pages for bytes low..high, which nobody has written yet, by a few threads."""
    part = -(-(high - low) // (TOUCHING_THREADS * mmap.PAGESIZE)) * mmap.PAGESIZE

    def touch(start: int) -> None:
        rows.view(-1).view(torch.uint8)[start:min(start + part, high):mmap.PAGESIZE].zero_()

    with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
        list(threads.map(touch, range(low, high, part)))
