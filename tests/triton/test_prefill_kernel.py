"""The prefill kernel, interpreted, against float64: with tiles small enough that rows have many."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from hf_sparse.kernels import ops, prefill_kernel
from hf_sparse.kernels.prefill import prefill_attention, streaming_attention
from hf_sparse.kernels.prefill_kernel import Tile
from hf_sparse.kernels.reference.prefill import prefill as reference
from tests.kernels.prefill_cases import CASES, Case

TILES = [Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)]


def test_ops_take_the_kernel():
    assert ops.prefill_of(torch.device("cpu"), 256) is prefill_kernel.launch
    assert ops.prefill_of(torch.device("cpu"), 512) is reference


def kernel(case: Case, parts: dict, tile: Tile | None, window: int | None = None) -> torch.Tensor:
    """All heads of a case in one launch. What the kernel does not write stays NaN."""
    every = range(case.heads)
    dense = [head for head in every if not case.streams(head)]
    heads = torch.tensor(dense + [head for head in every if case.streams(head)], dtype=torch.int32) if dense else None
    out = torch.full((*parts["query"].shape[:3], parts["values"].shape[-1]), torch.nan, dtype=case.dtype)
    prefill_kernel.launch(out, parts["query"], parts["keys"], parts["values"], heads, len(dense), case.sink,
                          window or case.window, case.scaling, case.softcap, parts["sinks"], tile)
    return out


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) if number % 3 else case
                                  for number, case in enumerate(CASES)], ids=str)
def test_against_float64(case):
    parts = case.tensors()
    expected = case.expected(**parts)
    for tile in TILES if case.heads * case.group == 1 else TILES[:1]:
        torch.testing.assert_close(kernel(case, parts, tile).double(), expected, **case.tolerance())


@pytest.mark.parametrize("case", [CASES[4], CASES[-2]], ids=str)
def test_own_tiles(case):
    parts = case.tensors()
    torch.testing.assert_close(kernel(case, parts, None).double(), case.expected(**parts), **case.tolerance())


@pytest.mark.parametrize("case", [
    Case(150, 150, dim=16, window=70), Case(150, 40, dim=24, value_dim=40, window=33, sink=20, streaming=(1,)),
    Case(129, 129, dim=64, window=50, sink=32, dtype=torch.float16),
], ids=str)
def test_tensor_descriptors(case):
    parts = case.tensors()
    output = kernel(case, parts, Tile(32, 16, 4, 1, descriptors=True))
    torch.testing.assert_close(output.double(), case.expected(**parts), **case.tolerance())


def test_what_descriptors_cannot_name_is_loaded_without():
    """Rows that do not begin at a multiple of 16 bytes."""
    case = Case(60, 60, dim=10)
    parts = case.tensors()
    output = kernel(case, parts, Tile(32, 16, 4, 1, descriptors=True))
    torch.testing.assert_close(output.double(), case.expected(**parts), **case.tolerance())


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_fails(off):
    case = Case(150, 150, window=33)
    parts = case.tensors()
    wrong = kernel(case, parts, TILES[0], case.window + off)
    assert not torch.allclose(wrong.double(), case.expected(**parts), **case.tolerance())
    torch.testing.assert_close(wrong.double(), case.expected(**parts, window=case.window + off), **case.tolerance())


def test_hidden_tiles_are_not_read():
    """Keys and values that no query sees may be anything."""
    case = Case(300, 60, heads=1, group=1, sink=16, window=40)
    parts = case.tensors()
    expected = case.expected(**parts)
    parts["keys"][:, :, 16:192] = torch.nan                 # the window of the first query, 240, begins at 201
    parts["values"][:, :, 16:192] = torch.nan
    torch.testing.assert_close(kernel(case, parts, TILES[0]).double(), expected, **case.tolerance())


def test_views_in_place():
    """Strided inputs, and an output of which only the streaming heads are written."""
    case = Case(70, 40, heads=3)
    parts = case.tensors()
    expected = case.expected(**parts)
    query = parts["query"].transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack([parts["keys"], parts["values"]], 3).transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((2, 40, 6, 16), 7.0).transpose(1, 2)
    heads = torch.tensor([2, 0], dtype=torch.int32)
    done = streaming_attention(query, both[:, :, :, 0], both[:, :, :, 1], heads, case.sink, case.window, case.scaling, out=out)
    assert done is out and (out[:, 2:4] == 7).all()
    for own in (slice(0, 2), slice(4, 6)):
        torch.testing.assert_close(out[:, own].double(), expected[:, own], **case.tolerance())
    fresh = streaming_attention(query, both[:, :, :, 0], both[:, :, :, 1], heads, case.sink, case.window, case.scaling)
    assert (fresh[:, 2:4] == 0).all() and torch.equal(fresh[:, :2], out[:, :2])


@pytest.mark.parametrize("case", [Case(90, 90, heads=4, streaming=(1, 3)), Case(90, 30, heads=4, streaming=(0,), sinks=True),
                                  Case(90, 30, heads=3, streaming=(2,))], ids=str)
def test_a_whole_layer(case):
    parts = case.tensors()
    output = prefill_attention(parts["query"], parts["keys"], parts["values"], case.streaming, case.sink, case.window,
                               case.scaling, case.softcap, parts["sinks"])
    torch.testing.assert_close(output.double(), case.expected(**parts), **case.tolerance())


# With and without tensor descriptors, of which only the second has any.
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "cases"), [(80, "1,6"), (90, "1,9")])
def test_compiles(capability, cases, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.triton.compile_prefill", f"{capability}:{cases}"], capture_output=True,
                          text=True, timeout=600, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    spilled = re.findall(rf"sm_{capability} .* registers, (\d+) bytes spilled, .* {'wgmma' if capability >= 90 else 'mma'}$",
                         done.stdout, re.MULTILINE)
    assert len(spilled) == 2 and all(int(count) < 64 for count in spilled)
