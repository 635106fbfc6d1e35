"""Attention of prompts with streaming heads: the PyTorch reference, and on a GPU the kernel, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparse.kernels import ops
from hf_sparse.kernels import prefill as prefill_module
from hf_sparse.kernels.prefill import causal_attention, prefill_attention, streaming_attention
from hf_sparse.kernels.reference import prefill as reference
from tests.kernels.prefill_cases import CASES, Case

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
settings = lambda case: (case.sink, case.window, case.scaling, case.softcap)  # noqa: E731


def layer(case: Case, parts: dict, **changes) -> torch.Tensor:
    """A whole layer by `prefill_attention`."""
    streaming = tuple(head for head in range(case.heads) if case.streams(head))
    given = dict(streaming=streaming, sink=case.sink, window=case.window, scaling=case.scaling, softcap=case.softcap)
    return prefill_attention(**parts, **{**given, **changes})


def assert_right(output, expected, case):
    assert output.dtype == case.dtype
    torch.testing.assert_close(output.cpu().double(), expected, **case.tolerance())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_against_float64(case, device):
    parts = case.tensors(device)
    assert_right(layer(case, parts), case.expected(**parts), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_launch_against_float64(case, device):
    """All heads in one call of the op, dense ones first. What it does not write stays NaN."""
    parts = case.tensors(device)
    dense = [head for head in range(case.heads) if not case.streams(head)]
    heads = None
    if dense:
        streaming = [head for head in range(case.heads) if case.streams(head)]
        heads = torch.tensor(dense + streaming, dtype=torch.int32, device=device)
    query, keys, values = parts["query"], parts["keys"], parts["values"]
    out = torch.full((*query.shape[:3], values.shape[-1]), torch.nan, dtype=case.dtype, device=device)
    ops.prefill(out, query, keys, values, heads, len(dense), *settings(case), parts["sinks"])
    assert_right(out, case.expected(**parts), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_kernel", [False, True], ids=["pytorch", "op"])
@pytest.mark.parametrize(("queries", "softcap", "sinks"), [(37, 0.0, False), (37, 5.0, True), (1061, 0.0, False), (1100, 5.0, True)],
                         ids=["chunk", "chunk-cap-sinks", "long-chunk", "prompt-cap-sinks"])
def test_heads_that_see_everything(queries, softcap, sinks, by_kernel, device, monkeypatch):
    case = Case(1100, queries, heads=3, dim=20, value_dim=12, streaming=(), softcap=softcap)
    parts = case.tensors(device)
    parts["sinks"] = torch.randn(6, device=device) if sinks else None
    monkeypatch.setattr(prefill_module, "_kernel_is_faster", lambda *args: by_kernel)
    assert_right(causal_attention(**parts, scaling=case.scaling, softcap=softcap), case.expected(**parts), case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(64, 64), (80, 80), (128, 128), (256, 256), (128, 64)], ids=str)
def test_many_tiles_on_a_gpu(shape, dtype):
    """Rows of many whole tiles, which the interpreter is too slow for."""
    case = Case(1500, 1100, heads=3, group=2, dim=shape[0], value_dim=shape[1], streaming=(0, 2), sink=128, window=401,
                dtype=dtype)
    parts = case.tensors("cuda")
    assert_right(layer(case, parts), case.expected(**parts), case)


# -- the reference in pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("case", [
    Case(150, 150, window=33, sink=37), Case(150, 70, window=60, sinks=True, streaming=(1,)),
    Case(90, 90, window=1, sink=0, softcap=2.0),
], ids=str)
def test_pieces_do_not_show(case, step, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_CHUNK", step)
    monkeypatch.setattr(ops, "prefill_of", lambda device, head_dim: reference.prefill)
    parts = case.tensors()
    assert_right(layer(case, parts), case.expected(**parts), case)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            # Views and expanded ones hold nothing.
            if torch.is_tensor(part):
                self.elements = max(self.elements, part.untyped_storage().nbytes() // part.element_size())
        return result


def test_a_long_row_holds_no_logits_of_all_keys(monkeypatch):
    monkeypatch.setattr(reference, "QUERY_CHUNK", 64)
    tokens = 6000
    case = Case(tokens, tokens, heads=1, group=1, dim=4, sink=16, window=100)
    parts = case.tensors()
    one_row = {name: None if part is None else part[:1] for name, part in parts.items()}
    with Largest() as largest:
        out = torch.zeros(1, 1, tokens, 4)
        reference.prefill(out, one_row["query"], one_row["keys"], one_row["values"], None, 0, *settings(case), None)
    assert largest.elements <= parts["keys"].numel() < tokens * tokens // 100
    last = slice(tokens - 20, tokens)
    short = Case(tokens, 20, heads=1, group=1, dim=4, sink=16, window=100)
    torch.testing.assert_close(out[:, :, last].double(),
                               short.expected(**{**one_row, "query": one_row["query"][:, :, last]}), **case.tolerance())


# -- negative controls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [dict(window=32), dict(window=34), dict(sink=4), dict(sink=6), dict(streaming=(0,)),
                                     dict(streaming=()), dict(sinks=None), dict(scaling=0.2)], ids=str)
def test_something_else_fails(changes):
    """The comparison sees a token, a head, a sink logit too many or too few."""
    case = Case(150, 150, window=33, sinks=True)
    parts = case.tensors()
    expected = case.expected(**parts)
    assert_right(layer(case, parts), expected, case)
    keep = {name: part for name, part in parts.items() if name not in changes}
    with pytest.raises(AssertionError, match="not close"):
        assert_right(layer(case, keep, **changes), expected, case)


# -- which way heads go --------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """What goes to dense attention: (query heads, KV heads), and to the op: (listed heads, dense ones of them)."""
    found: list = []
    exact, op = prefill_module.exact_attention, ops.prefill

    def dense(query, keys, *args, **kwargs):
        found.append((query.shape[1], keys.shape[1]))
        return exact(query, keys, *args, **kwargs)

    def kernel(out, query, keys, values, heads, count, *args):
        found.append((heads.tolist(), count))
        return op(out, query, keys, values, heads, count, *args)

    monkeypatch.setattr(prefill_module, "exact_attention", dense)
    monkeypatch.setattr(prefill_module.ops, "prefill", kernel)
    return found


@pytest.mark.parametrize(("case", "expected"), [
    (Case(60, 60, heads=4, streaming=(1,)), [(2, 1), (4, 2), ([1], 0)]),
    (Case(60, 60, heads=4, streaming=(3, 2)), [(4, 2), ([2, 3], 0)]),
    (Case(60, 60, heads=4), [([0, 1, 2, 3], 0)]),
    (Case(60, 60, heads=4, streaming=()), [(8, 4)]),
    (Case(25, 25, heads=4), [(8, 4)]),                      # sink and window reach over the row
    (Case(26, 26, heads=4), [([0, 1, 2, 3], 0)]),
    (Case(60, 60, heads=4, streaming=(1,), sinks=True), [([0, 2, 3, 1], 3)]),
    (Case(60, 60, heads=4, streaming=(1,), softcap=1.0), [([0, 2, 3, 1], 3)]),
    (Case(60, 20, heads=4, streaming=(1,)), [([0, 2, 3, 1], 3)]),    # without flash attention it would take a mask
], ids=str)
def test_ways(case, expected, calls):
    parts = case.tensors()
    output = layer(case, parts)
    assert calls == expected
    assert_right(output, case.expected(**parts), case)


def test_views_and_order_in_memory():
    """Strided inputs; the output is in the order that projections read, and only listed heads are written."""
    case = Case(70, 40, heads=3)
    parts = case.tensors()
    expected = case.expected(**parts)
    query = parts["query"].transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack([parts["keys"], parts["values"]], 3).transpose(1, 2).contiguous().transpose(1, 2)
    keys, values = both[:, :, :, 0], both[:, :, :, 1]
    heads = torch.tensor([2, 0], dtype=torch.int32)
    out = torch.full((2, 40, 6, 16), 7.0).transpose(1, 2)
    assert streaming_attention(query, keys, values, heads, *settings(case)[:3], out=out) is out
    assert (out[:, 2:4] == 7).all()
    for own in (slice(0, 2), slice(4, 6)):
        assert_right(out[:, own], expected[:, own], case)
    fresh = streaming_attention(query, keys, values, heads, *settings(case)[:3])
    assert fresh.transpose(1, 2).is_contiguous()
    assert (fresh[:, 2:4] == 0).all() and torch.equal(fresh[:, :2], out[:, :2])
    assert_right(streaming_attention(query, keys, values, None, *settings(case)[:3]), expected, case)


def test_chunks_make_the_whole():
    case = Case(130, 130, streaming=(1,), window=33)
    parts = case.tensors()
    whole = layer(case, parts)
    for low, high in ((0, 50), (50, 51), (51, 130)):
        piece = layer(case, {**parts, "query": parts["query"][:, :, low:high], "keys": parts["keys"][:, :, :high],
                             "values": parts["values"][:, :, :high]})
        torch.testing.assert_close(piece, whole[:, :, low:high], rtol=0, atol=1e-5)


def test_the_op_is_opaque_to_compilation():
    case = Case(40, 40)
    parts = case.tensors()
    heads = torch.tensor([1], dtype=torch.int32)
    out = torch.zeros(2, 4, 40, 16)
    args = (out, parts["query"], parts["keys"], parts["values"], heads, 0, *settings(case), None)
    torch.library.opcheck(ops.prefill, args)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(window=0), "window=0"), (dict(sink=-1), "sink=-1"), (dict(scaling=0.0), "scaling=0.0"),
    (dict(streaming=(2,)), "2 KV heads"), (dict(streaming=(-1,)), "2 KV heads"), (dict(streaming=(1, 1)), "different"),
], ids=lambda value: value if isinstance(value, str) else None)
def test_refusals(changes, message):
    case = Case(40, 40)
    with pytest.raises(ValueError, match=message):
        layer(case, case.tensors(), **changes)


def test_more_queries_than_keys_are_refused():
    parts = Case(40, 40).tensors()
    with pytest.raises(ValueError, match="40 queries are more than 39 keys"):
        layer(Case(40, 40), {**parts, "keys": parts["keys"][:, :, 1:], "values": parts["values"][:, :, 1:]})


@pytest.mark.parametrize("out", [torch.zeros(2, 4, 39, 16), torch.zeros(2, 4, 16, 40).mT], ids=["shape", "strides"])
def test_an_output_that_does_not_fit_is_refused(out):
    case = Case(40, 40)
    parts = case.tensors()
    with pytest.raises(ValueError, match=r"must be \(2, 4, 40, 16\)"):
        streaming_attention(parts["query"], parts["keys"], parts["values"], None, *settings(case)[:3], out=out)


def test_nothing_to_do():
    case = Case(40, 0)
    parts = case.tensors()
    parts["query"] = parts["query"][:, :, :0]
    assert layer(case, parts).shape == (2, 4, 0, 16)
