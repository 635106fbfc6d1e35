"""Numbers of the cut: how the kernels decide, without sorting, which blocks to read (kernels/select.py)."""

# Planned so far beyond the threshold, of the way to 1, because the masses that will be found are not quite those estimated.
PLAN = 0.15

# The search for the cut goes over this many octaves below the largest share and ends with bins of 1 / 21 octave, or 3 %.
OCTAVES = 24
STEPS = 9
