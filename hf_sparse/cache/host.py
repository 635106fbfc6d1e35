"""The host tier: one reservation of address space, of which only written pages take memory."""
from __future__ import annotations

import mmap
import os

import torch


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
