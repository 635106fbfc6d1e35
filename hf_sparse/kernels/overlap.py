"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it needs its results.

That hides what a launch costs, which is as long as a kernel of this chain. It needs compute capability 9.0; elsewhere OVERLAP
is False and kernels follow each other as always.
"""
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The kernel after this one may be launched, as far as there is room for it."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Everything that the kernels before this one wrote is there after this. Every program must call it."""
    if OVERLAP:
        gdc_wait()
