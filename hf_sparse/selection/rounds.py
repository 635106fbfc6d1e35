"""How many ranked blocks are read between two checks of the stop rule."""
from __future__ import annotations

# A round's blocks must be in the pool at the same time, so rounds stop growing here.
MAX_ROUND = 32


def round_bounds(max_blocks: int, first: int, growth: float) -> list[int]:
    """Cumulative block counts at which the stop rule is checked: [first, ...], ending at `max_blocks`.

    Each check has read about `growth` times the blocks of the one before, in steps of whole multiples of `first`
    (the chunk in which kernels read), and never more than `MAX_ROUND` blocks more.
    """
    bounds: list[int] = []
    done = 0
    while done < max_blocks:
        size = int(done * (growth - 1.0)) // first * first
        done = min(done + min(max(first, size), largest_round(first)), max_blocks)
        bounds.append(done)
    return bounds


def largest_round(first: int) -> int:
    """Blocks of the largest round there can be."""
    return max(first, MAX_ROUND // first * first)
