"""The block pool of one device: slots, block ids, residency, and the host tier behind it.

All layers, rows and KV heads share one pool (or, for comparison, those of one layer do). A block id names a block of one
KV head for its whole life; a layer's table maps (row, KV head, block) to ids, and several rows (beams, forks) may name the
same id. Which ids are in use is never counted: it is read off the tables when free ids run out (`sweep`), so nothing can
leak and no step has to count.

Without a host tier ids are slots and the pool grows with the context. With one the slots are fixed by the byte budget,
every closed block is written through to the host tier once, and `slot_of` says which blocks have a slot.
"""
from __future__ import annotations

import itertools
import math
import threading
import weakref

import torch

from ..kernels.reference.fetch import fill
from ..sizes import format_bytes
from .host import HostTier, available_host_bytes

# Blocks copied at a time when the pool is laid out anew.
PIECE = 4096

# A pool that has to grow takes room for so many times what is asked for.
AHEAD = 32

_VERSIONS = itertools.count(1)


def next_version() -> int:
    """A number that no layer or pool has had: something that kernels hold the address of has moved."""
    return next(_VERSIONS)


class BlockPool:
    """Slots of `elements` values each, on one device.

    Args:
        elements: values a block: block_size * (key dim + value dim), or bytes, uint8, of a packed one.
        budget: bytes of the pool, or None to grow with the context.
        host_bytes: bytes of the host tier; 0 for none, None for half of what the machine has left.
        pools: as many equal pools, this one among them, share both.

    Raises:
        ValueError: the host tier can't be reserved.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int, budget: int | None,
                 host_bytes: int | None, pools: int = 1):
        self.device, self.dtype, self.elements = device, dtype, elements
        self.pools = pools
        self.budget = None if budget is None else budget // pools
        self.block_bytes = elements * dtype.itemsize
        self.users: weakref.WeakSet = weakref.WeakSet()
        self.lock = threading.RLock()
        self.kv = torch.zeros(1, elements, dtype=dtype, device=device)     # slot 0 is scratch
        self.free = torch.empty(0, dtype=torch.int64, device=device)
        self.cursor = 0                                                    # ids of `free` handed out so far
        self.torn = False                                                  # a change was interrupted: nothing here holds
        self.dirty = False                                                 # blocks were dropped since the last sweep
        self.side = 0                                                      # bytes of digests and tables (no host tier)
        self.version = next_version()
        self.host = self.host_tier = None
        if host_bytes != 0:
            size = available_host_bytes() // 2 if host_bytes is None else host_bytes
            self.host_capacity = size // pools // self.block_bytes
            if self.host_capacity < 2:
                raise ValueError(f"host_memory={size} bytes holds no block of {self.block_bytes} bytes{self.among}; "
                                 "raise it.")
            self.host_tier = HostTier(self.host_capacity, elements, dtype, device, pools)
            self.host = self.host_tier.rows
            self.slot_of = torch.zeros(1, dtype=torch.int64, device=device)
            self.block_in = torch.zeros(1, dtype=torch.int64, device=device)
            self.priority = torch.full((1,), -math.inf, dtype=torch.float64, device=device)
            self.pinned = torch.ones(1, dtype=torch.bool, device=device)
            self.clock = torch.zeros(1, dtype=torch.float64, device=device)
            self.counters = torch.zeros(2, dtype=torch.int64, device=device)
            self.history = torch.full((1,), -math.inf, dtype=torch.float64, device=device)

    @property
    def tiered(self) -> bool:
        return self.host is not None

    @property
    def among(self) -> str:
        """What refusals add to numbers of one pool."""
        return f" for each of {self.pools} layers" if self.pools > 1 else ""

    @property
    def slots(self) -> int:
        """Slots in the pool, the scratch slot included."""
        return self.kv.shape[0]

    @property
    def ids(self) -> int:
        """Block ids there are, the scratch id included."""
        return self.slot_of.shape[0] if self.tiered else self.slots

    def tiers(self) -> list[torch.Tensor]:
        """The pool as the flat list of tensors that kernels take (kernels/reference/fetch.py), all that was written in it."""
        if not self.tiered:
            return [self.kv]
        self.wait()
        return [self.kv, self.host, self.slot_of, self.block_in, self.priority, self.pinned, self.clock,
                self.counters, self.history]

    def wait(self) -> None:
        """Before anything looks at slots, maps or the host tier: have this stream wait for what is stored beside it."""
        if self.tiered:
            self.host_tier.link.join()

    # -- who uses it --------------------------------------------------------------------------------------------
    def join(self, layer) -> None:
        """Register a layer; its table decides which ids are in use."""
        with self.lock:
            self.users.add(layer)

    def leave(self, layer) -> None:
        """A layer lets go of its blocks."""
        with self.lock:
            self.drop()
            self.users.discard(layer)
            if self.tiered and not self.users:
                self.counters.zero_()

    def drop(self) -> None:
        """Some layer let go of its blocks; they are found at the next sweep."""
        self.dirty = True

    def blocks_in_use(self) -> int:
        """Ids that some table names, the scratch id excluded. Synchronises."""
        return int(self._live().sum())

    def _live(self) -> torch.Tensor:
        live = torch.zeros(self.ids, dtype=torch.bool, device=self.device)
        for layer in list(self.users):
            if layer.table is not None:
                live[layer.table.reshape(-1)] = True
        live[0] = False
        return live

    # -- ids ----------------------------------------------------------------------------------------------------
    def allocate(self, count: int, more: int = 0) -> torch.Tensor:
        """`count` fresh block ids, [count] int64.

        Args:
            more: blocks that the layers after this one will ask for. There must be room for them too, so that a
                change of all layers is refused before the first.

        Raises:
            ValueError: the byte budget or the host tier is used up; nothing has changed then.
        """
        with self.lock:
            short = self.lacking(count + more)
            if short:
                # Some columns of all layers ahead; not more, as a pool of many GB has to be there twice to grow.
                self._grow(short, min(self.ids // 4, AHEAD * short))
            if self.tiered:
                # `free` is in ascending order, so that no id is higher than this unless it comes later.
                self.host_tier.ensure(self.ids - (self.free.shape[0] - self.cursor - count), expected=self.ids)
            taken = self.free[self.cursor:self.cursor + count]
            self.cursor += count
            return taken

    def lacking(self, count: int) -> int:
        """How many ids there would have to be more, for `count` to be free."""
        with self.lock:
            if self.dirty or self.free.shape[0] - self.cursor < count:
                self.sweep()
            return max(0, count - self.free.shape[0] + self.cursor)

    def sweep(self) -> None:
        """Find the ids that no table names, and give up the slots of their blocks. Synchronises."""
        self.wait()
        live = self._live()
        # Ids already handed out but not yet in a table belong to the caller of `allocate` alone, which holds the lock.
        dead = ~live
        dead[0] = False
        self.free, self.cursor, self.dirty = dead.nonzero().squeeze(1), 0, False
        if self.tiered:
            gone = dead[self.block_in] & (self.block_in > 0)
            self.slot_of[torch.where(gone, self.block_in, 0)] = 0
            self.block_in[gone] = 0
            self.priority[gone] = -math.inf
            self.pinned[gone] = False
            self.history[dead] = -math.inf

    def _grow(self, needed: int, extra: int) -> None:
        if self.tiered:
            total = min(self.ids + needed + extra, self.host_capacity)
            if total < self.ids + needed:
                raise ValueError(
                    f"The host tier is full: {self.ids - 1 + needed} blocks of {self.block_bytes} bytes are needed, "
                    f"host_memory holds {self.host_capacity - 1}{self.among}. Give host_memory at least "
                    f"{format_bytes(self.pools * (self.ids + needed) * self.block_bytes)}, or a shorter context. "
                    "Nothing in the cache was lost.")
            first = self.ids
            longer = _extend(self.slot_of, total), _extend(self.history, total, -math.inf)
            self.slot_of, self.history = longer
        else:
            total = self.slots + needed + extra
            if self.budget is not None:
                total = self.slots + needed                 # what is left may have to go to digests and tables
                self.check_budget(total, self.side)
            first, self.kv = self.slots, self._longer(total)
        self.version = next_version()
        fresh = torch.arange(first, total, device=self.device)
        self.free, self.cursor = torch.cat([self.free[self.cursor:], fresh]), 0

    def _longer(self, total: int) -> torch.Tensor:
        """The slots with more behind them; by way of host memory where the device can't hold both at once.

        Raises:
            torch.OutOfMemoryError: the device has no room for them; nothing has changed then.
        """
        try:
            return _extend(self.kv, total)
        except torch.OutOfMemoryError:
            old, self.kv = self.kv.cpu(), None
        try:
            longer = torch.empty(total, self.elements, dtype=self.dtype, device=self.device)
        except torch.OutOfMemoryError:
            self.kv = old.to(self.device)
            raise
        longer[:old.shape[0]] = old
        longer[old.shape[0]:] = 0
        return longer

    def check_budget(self, slots: int, side: int) -> None:
        """Raise if so many slots, beside `side` bytes, are more than a pool without a host tier may take."""
        if self.budget is not None and slots * self.block_bytes + side > self.budget:
            raise ValueError(
                f"gpu_memory is used up: this context needs at least "
                f"{format_bytes(self.pools * (slots * self.block_bytes + side))} and there is no host tier. Raise gpu_memory "
                "or set host_memory. Nothing in the cache was lost.")

    # -- slots of a tiered pool ---------------------------------------------------------------------------------
    def resize(self, slots: int) -> None:
        """Set the number of slots, keeping pinned blocks and then those of the highest priority.

        The old slots are freed before there are new ones, as two pools may be more than fits. Only pinned blocks are
        held on to meanwhile; the others come from the host tier again.

        Raises:
            torch.OutOfMemoryError: the device has no room for them; nothing has changed then.
        """
        if slots == self.slots:
            return
        self.sweep()                                        # so that no dead block is kept in place of a live one
        self.version = next_version()
        before, pinned = self.slots, (self.block_in[self.pinned], self.kv[self.pinned])
        self.kv = None
        try:
            kv = torch.zeros(slots, self.elements, dtype=self.dtype, device=self.device)
        except torch.OutOfMemoryError:
            self.kv = torch.zeros(before, self.elements, dtype=self.dtype, device=self.device)
            self._refill(*pinned)
            raise
        order = torch.where(self.pinned, math.inf, self.priority)
        order[self.block_in == 0] = -math.inf
        order[0] = math.inf
        keep = torch.argsort(order, descending=True, stable=True)[:slots].sort().values
        lost = torch.ones(before, dtype=torch.bool, device=self.device)
        lost[keep] = False
        self.slot_of[torch.where(lost, self.block_in, 0)] = 0
        self.history[self.block_in[lost]] = self.priority[lost]
        self.kv = kv
        for name, fill_value in (("block_in", 0), ("priority", -math.inf), ("pinned", False)):
            setattr(self, name, _extend(getattr(self, name)[keep], slots, fill_value))
        # Keeping slot order means slot 0 stays slot 0.
        self.slot_of[self.block_in[:keep.shape[0]]] = torch.arange(keep.shape[0], device=self.device)
        self.slot_of[0] = 0
        self.block_in[0] = 0
        self._refill(*pinned)

    def _refill(self, blocks: torch.Tensor, contents: torch.Tensor) -> None:
        """Contents of all slots again: of some blocks as given, of the others from the host tier."""
        tiers = self.tiers()
        self.kv[self.slot_of[blocks]] = contents
        slots = ((self.block_in > 0) & ~self.pinned).nonzero().squeeze(1)
        for piece in slots.split(PIECE):
            fill(tiers, self.block_in[piece], piece)


def _extend(tensor: torch.Tensor, rows: int, fill=0) -> torch.Tensor:
    longer = tensor.new_empty(rows, *tensor.shape[1:])
    longer[:tensor.shape[0]] = tensor
    longer[tensor.shape[0]:] = fill
    return longer
