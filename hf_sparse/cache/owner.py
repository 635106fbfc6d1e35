"""One cache, one thread: whose call a cache is in, and what an exception in the middle of a change leaves behind."""
from __future__ import annotations

import functools
import sys
import threading

import torch

_TAKING = threading.Lock()


class Owner:
    """The thread that is inside a call with a cache.

    A call that this module makes (`run`) gives the cache back whatever happens. A forward can only be told of by hooks,
    which a KeyboardInterrupt skips; so before another thread is refused, the stack of the first is looked at.
    """

    def __init__(self):
        self.thread: int | None = None
        self.running = False                                # inside of `run`

    def take(self) -> None:
        """Enter a forward.

        Raises:
            RuntimeError: another thread is inside a call with this cache.
        """
        me = threading.get_ident()
        if self.thread == me:
            return
        with _TAKING:
            before, self.thread = self.thread, me           # before looking: the other thread may be about to enter
            if before is None or before == me or not _is_inside(before):
                self.running = False
                return
            self.thread = before
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        raise RuntimeError(
            f"This PSACache is in use by another thread ({names.get(before, before)}), and a cache serves one thread at a "
            "time. Give each thread a cache of its own (PSACache(model.config), or cache.fork() beforehand to share a "
            "prefix), or wait until the other has finished. Nothing in the cache was changed.")

    def give_back(self) -> None:
        """Leave a forward; within `run` that is not the end."""
        if self.thread == threading.get_ident() and not self.running:
            self.thread = None

    def run(self, function, *args, **kwargs):
        """`function(...)`, with the cache for this thread alone.

        Raises:
            RuntimeError: see `take`.
        """
        self.take()
        if self.running:
            return function(*args, **kwargs)
        self.running = True
        try:
            return function(*args, **kwargs)
        finally:
            self.running, self.thread = False, None


_INSIDE = (Owner.run.__code__, torch.nn.Module._call_impl.__code__)


def _is_inside(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code not in _INSIDE:
        frame = frame.f_back
    return frame is not None


def alone(method):
    """A method of a cache that changes all its layers: no other thread is let in, and half a change is marked."""
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        def change():
            self.check_whole()
            with Change(self.state):
                return method(self, *args, **kwargs)
        return self.owner.run(change)
    return call


class Change:
    """Around what must not be left half done: an exception marks the cache, and the pools, as torn.

    A ValueError is a refusal, from before anything was changed.
    """

    __slots__ = ("state", "pool", "refusals")

    def __init__(self, state, pool=None, refusals: tuple = (ValueError,)):
        self.state, self.pool, self.refusals = state, pool, refusals

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None and not issubclass(kind, self.refusals):
            self.state.torn = True
            # What is shared there is the maps of slots; blocks without a host tier are their caches' own.
            if self.pool is not None and self.pool.tiered:
                for pool in (self.pool, *self.state.pools.values()):
                    pool.torn = True
