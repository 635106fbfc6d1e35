"""How many ranked blocks are read between two checks of the stop rule."""
from __future__ import annotations

# A round's blocks must be in the pool at the same time, so rounds stop growing here.
MAX_ROUND = 32


def round_bounds(max_blocks: int, first: int, growth: float) -> list[int]:
    """Cumulative block counts at which the stop rule is checked: [first, ...], ending at `max_blocks`.

    Rounds have `first` blocks at least, and otherwise grow so that each check has read `growth` times the blocks
    of the one before; never more than `MAX_ROUND` a round (or `first`, if that is larger).
    """
    bounds: list[int] = []
    done = 0
    while done < max_blocks:
        size = min(max(first, int(done * (growth - 1.0))), max(first, MAX_ROUND))
        done = min(done + size, max_blocks)
        bounds.append(done)
    return bounds


def largest_round(first: int) -> int:
    """Blocks of the largest round there can be."""
    return max(first, MAX_ROUND)
