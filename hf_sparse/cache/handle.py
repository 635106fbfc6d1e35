"""What `Cache.update()` returns: lazy references to the keys and values of a layer.

The registered attention function recognises them and never builds dense tensors. Any other torch operation does, so a
model that is not patched, or that edits keys and values on the way, still computes exact attention.
"""
from __future__ import annotations

import torch


class Pending:
    """The new tokens of one `update()`, stored when attention runs and the padding is known.

    `past`: what a ring held of the tokens before them when they were stored, and may hold no more.
    """

    __slots__ = ("keys", "values", "start", "committed", "past")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: int):
        self.keys, self.values, self.start, self.committed, self.past = keys, values, start, False, None

    @property
    def count(self) -> int:
        return self.keys.shape[2]


def refuse_gradient(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`result`, which depends on what a cache has stored; a backward through it is refused if `source` is part of one."""
    return _WithoutGradient.apply(result, source) if torch.is_grad_enabled() and source.requires_grad else result


class _WithoutGradient(torch.autograd.Function):

    @staticmethod
    def forward(ctx, result, source):
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("Gradients don't flow through what a PSACache has stored. Use transformers' own cache, or none "
                                  "and all tokens in one forward (use_cache=False).")


class KVHandle:
    """All keys (or values) of one layer, [B, H, T, D], not a tensor until something needs one."""

    __slots__ = ("layer", "which", "pending", "_length", "_dense")

    def __init__(self, layer, which: str, pending: Pending, length: int):
        self.layer, self.which, self.pending, self._length, self._dense = layer, which, pending, length, None

    @property
    def new(self) -> torch.Tensor:
        """The new tokens, [B, H, q, D]."""
        return self.pending.keys if self.which == "keys" else self.pending.values

    @property
    def shape(self) -> torch.Size:
        batch, heads, _, dim = self.new.shape
        return torch.Size((batch, heads, self._length, dim))

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        return self.new.dtype

    @property
    def device(self) -> torch.device:
        return self.new.device

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def dense(self) -> torch.Tensor:
        """The tensor. Costs a copy of the layer's keys or values."""
        if self._dense is None:
            self._dense = refuse_gradient(self.layer.materialise(self.which, self.pending), self.new)
        return self._dense

    def to(self, *args, **kwargs):
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, int, torch.device)) and torch.device(device) == self.device:
            return self
        return self.dense().to(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_dense(tuple(args)), **{name: _dense(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index):
        return self.dense()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self):
        return iter(self.dense())

    def __repr__(self) -> str:
        return f"KVHandle({self.which}, shape={tuple(self.shape)})"


def _dense(value):
    if isinstance(value, KVHandle):
        return value.dense()
    if isinstance(value, (list, tuple)):
        return type(value)(_dense(item) for item in value)
    return value


def _operator(name: str):
    def apply(self, *args):
        return getattr(self.dense(), name)(*_dense(args))
    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg", "pow"):
    setattr(KVHandle, f"__{_name}__", _operator(f"__{_name}__"))


class KVLength(int):
    """`kv_length` that says which cache layer it belongs to; transformers hands it to the mask function as it is."""

    def __new__(cls, value: int, layer):
        length = int.__new__(cls, value)
        length.layer = layer
        return length
