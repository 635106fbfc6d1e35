"""Eviction policies: what a block's priority becomes when it is loaded and when it is used.

The pool evicts the slot of the lowest priority. A policy is two elementwise functions of (priority, clock), so that
the device applies it inside the step; `clock` counts decoded tokens, with fractions for the layers of a token. What
`on_load` is given is the priority that the block had when it was last evicted, -inf if it never was.
"""
from __future__ import annotations

from . import decayed, fifo, lru

POLICIES = {"lru": lru, "fifo": fifo, "decayed": decayed}
