"""What every digest has in common: the interface, chunking over units, and the two ways to a block's mass.

A digest is the little that stays on the device for every block, to estimate how much attention the block
would receive. These files know tensors only. They are the reference implementation and the specification of
the buffers.

Terms: B rows, H KV heads, G query heads per KV head, D key head dim, P tokens per block. A unit is
`unit_blocks` consecutive blocks that are encoded together; U = unit_blocks * P tokens; N units.
"""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor

# Float32 elements of temporaries per chunk of units (16 MiB). Results do not depend on it: units are
# independent, and each product has the shape of one unit whatever the chunk.
CHUNK_ELEMENTS = 1 << 22

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def check_size(name: str, value: int) -> int:
    """Return a positive integer, or raise ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    """cap * tanh(logits / cap), or the logits unchanged where softcap is 0."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class Digest(abc.ABC):
    """Estimates the attention mass of blocks of keys from a compressed form of them.

    Every tensor operation has static shapes and no Python decision depends on tensor values, so encode and
    score can be captured in a CUDA graph. Units are independent of each other: uninitialised units change no
    other unit's result.

    Attributes:
        name: the registered name.
        token_level: the mass of a block is summed from estimates of its tokens' logits, so that the
            estimated masses may be added up to a total (the "estimate" stop rule). Otherwise the score only
            ranks.
        unit_blocks: blocks that are encoded together, because they share scales.
        needs_calibration: `calibrate` must be called for a row before its keys are encoded.

    Args:
        block_size: tokens per block, P.
        head_dim: key head dimension, D.

    Raises:
        ValueError: for sizes that are not positive integers.
    """

    name: str
    token_level: bool = False
    unit_blocks: int = 1
    needs_calibration: bool = False

    def __init__(self, block_size: int, head_dim: int):
        self.block_size = check_size("block_size", block_size)
        self.head_dim = check_size("head_dim", head_dim)

    @property
    def unit_tokens(self) -> int:
        """Tokens per unit, U."""
        return self.unit_blocks * self.block_size

    @abc.abstractmethod
    def unit_layout(self, dtype: torch.dtype) -> Layout:
        """Shape and dtype of each tensor of one unit; the cache allocates [B, H, N, *shape].

        Args:
            dtype: dtype of the model's keys.
        """

    def row_layout(self) -> Layout:
        """Shape and dtype of each tensor of one (row, KV head), allocated as [B, H, *shape] and zeroed."""
        return {}

    def calibrate(self, key_mean: Tensor, key_var: Tensor, query_sq: Tensor) -> dict[str, Tensor]:
        """Row tensors from statistics of the prefill; {} for a digest that needs none.

        Args:
            key_mean, key_var: float32 [B, H, D], mean and variance of the row's keys, the sink left out.
            query_sq: float32 [B, H, D], E[q^2] over the last prefill queries, averaged over the group's
                query heads.
        """
        return {}

    def encode(
        self, keys: Tensor, row: dict[str, Tensor] | None = None, skip: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compress complete units of keys.

        Args:
            keys: [B, H, J, U, D] in the model's dtype, after the rotary embedding.
            row: the row tensors of `calibrate`, [B, H, *shape].
            skip: bool, broadcastable to [B, H, J, U]: tokens left out of the statistics (the sink block,
                which is always attended and so never ranked). Their keys are not read, they may be NaN. The
                mass that `score` reports for a block with skipped tokens means nothing (it is finite).

        Returns:
            The unit tensors, [B, H, J, *shape] as in `unit_layout(keys.dtype)`. NaN among kept keys stays
            visible: the scores of that unit become NaN.

        Raises:
            ValueError: if keys have the wrong shape, or a digest that needs calibration gets no row tensors.
        """
        if keys.dim() != 5 or tuple(keys.shape[-2:]) != (self.unit_tokens, self.head_dim):
            raise ValueError(
                f"digest {self.name!r} expects keys [rows, KV heads, units, {self.unit_tokens}, "
                f"{self.head_dim}], got {list(keys.shape)}"
            )
        row = self._check_row(row)
        rows, heads, units = keys.shape[:3]
        if skip is not None:
            skip = skip.expand(rows, heads, units, self.unit_tokens)
        step = max(1, CHUNK_ELEMENTS // max(1, 4 * rows * heads * self.unit_tokens * self.head_dim))
        out = {
            name: torch.empty((rows, heads, units, *shape), dtype=dtype, device=keys.device)
            for name, (shape, dtype) in self.unit_layout(keys.dtype).items()
        }
        for start in range(0, units, step):
            part = slice(start, start + step)
            chunk_skip = None if skip is None else skip[:, :, part]
            for name, value in self._encode(keys[:, :, part], row, chunk_skip).items():
                out[name][:, :, part] = value
        return out

    def score(
        self,
        query: Tensor,
        unit: dict[str, Tensor],
        row: dict[str, Tensor] | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Estimated log mass of every block: log of the sum over its tokens of exp(logit).

        Args:
            query: [B, H, G, D], already multiplied by the attention scaling; computed with in float32.
            unit: the unit tensors, [B, H, N, *shape].
            row: the row tensors, [B, H, *shape].
            softcap: cap c of the model's logits, c * tanh(logit / c); 0 for none.

        Returns:
            float32 [B, H, G, N * unit_blocks], natural log.

        Raises:
            ValueError: if the query has the wrong shape, or a digest that needs calibration gets no row
                tensors.
        """
        if query.dim() != 4 or query.shape[-1] != self.head_dim:
            raise ValueError(
                f"digest {self.name!r} expects a query [rows, KV heads, query heads per KV head, "
                f"{self.head_dim}], got {list(query.shape)}"
            )
        row = self._check_row(row)
        rows, heads, groups = query.shape[:3]
        units = next(iter(unit.values())).shape[2]
        query = query.float()
        step = max(1, CHUNK_ELEMENTS // max(1, rows * heads * self._score_elements(groups)))
        blocks = units * self.unit_blocks
        out = torch.empty(rows, heads, groups, blocks, dtype=torch.float32, device=query.device)
        for start in range(0, units, step):
            part = {name: value[:, :, start : start + step] for name, value in unit.items()}
            first = start * self.unit_blocks
            out[..., first : first + step * self.unit_blocks] = self._score(query, part, row, softcap)
        return out

    def bytes_per_token(self, dtype: torch.dtype) -> float:
        """Bytes of unit tensors per token of one KV head, for keys of this dtype; row tensors not counted."""
        total = sum(math.prod(shape) * kind.itemsize for shape, kind in self.unit_layout(dtype).values())
        return total / self.unit_tokens

    def _check_row(self, row: dict[str, Tensor] | None) -> dict[str, Tensor]:
        missing = [name for name in self.row_layout() if name not in (row or {})]
        if missing:
            raise ValueError(f"digest {self.name!r} needs the row tensors {missing}: call calibrate() first")
        return row or {}

    @abc.abstractmethod
    def _score_elements(self, groups: int) -> int:
        """Float32 elements that scoring one unit of one (row, KV head) needs for a moment."""

    @abc.abstractmethod
    def _encode(self, keys: Tensor, row: dict[str, Tensor], skip: Tensor | None) -> dict[str, Tensor]:
        """`encode` of one chunk of units; skip is [B, H, J, U] or None."""

    @abc.abstractmethod
    def _score(
        self, query: Tensor, unit: dict[str, Tensor], row: dict[str, Tensor], softcap: float
    ) -> Tensor:
        """`score` of one chunk of units, float32 query."""


class BlockDigest(Digest):
    """A digest with one or two vectors per block: the block's logit stands for each of its P tokens."""

    def _score_elements(self, groups: int) -> int:
        return 4 * groups * self.head_dim

    def _score(
        self, query: Tensor, unit: dict[str, Tensor], row: dict[str, Tensor], softcap: float
    ) -> Tensor:
        # A product and a sum instead of a matrix product: a block's score then has the same bits whatever
        # the number of blocks and rows, so that a padded row selects what it selects alone.
        return soft_cap(self._block_logit(query.unsqueeze(-2), unit), softcap) + math.log(self.block_size)

    @abc.abstractmethod
    def _block_logit(self, query: Tensor, unit: dict[str, Tensor]) -> Tensor:
        """Logit of each block, [B, H, G, N], from query [B, H, G, 1, D] and the unit tensors."""


class BoxDigest(BlockDigest):
    """A digest that keeps a box of keys per block and scores its corner that is best for the query.

    Unit tensors: "upper" and "lower", [D] each in the model's dtype.
    """

    def unit_layout(self, dtype: torch.dtype) -> Layout:
        return {"upper": ((self.head_dim,), dtype), "lower": ((self.head_dim,), dtype)}

    def _block_logit(self, query: Tensor, unit: dict[str, Tensor]) -> Tensor:
        upper = unit["upper"].float().unsqueeze(2)
        lower = unit["lower"].float().unsqueeze(2)
        return torch.maximum(query * upper, query * lower).sum(-1)


class TokenDigest(Digest):
    """A digest that estimates the logit of every token; a block's mass is the sum over its tokens."""

    token_level = True

    def _score_elements(self, groups: int) -> int:
        return 2 * self.unit_tokens * (self.head_dim + groups) + 2 * groups * self.head_dim

    def _score(
        self, query: Tensor, unit: dict[str, Tensor], row: dict[str, Tensor], softcap: float
    ) -> Tensor:
        logits = soft_cap(self._token_logits(query, unit, row), softcap)
        masses = logits.unflatten(-1, (self.unit_blocks, self.block_size)).logsumexp(-1)
        return masses.transpose(2, 3).flatten(-2)

    @abc.abstractmethod
    def _token_logits(self, query: Tensor, unit: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        """Estimated logits of every token, [B, H, N, G, U]."""


def coded_logits(query: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Query against affine codes without their minimum: the scale is folded into the query, as kernels do.

    Args:
        query: float32 [B, H, G, R].
        codes: uint8 [B, H, N, U, R].
        scale: float16 [B, H, N, R].

    Returns:
        float32 [B, H, N, G, U]. One product per unit, of one shape, so that a unit's bits depend on nothing
        else.
    """
    folded = query.unsqueeze(2) * scale.float().unsqueeze(3)
    return torch.matmul(folded, codes.float().transpose(-1, -2))


def offset_logits(query: Tensor, minimum: Tensor) -> Tensor:
    """The part of the logits that all tokens of a unit share, query . minimum.

    Args:
        query: float32 [B, H, G, R].
        minimum: float16 [B, H, N, R].

    Returns:
        float32 [B, H, N, G, 1].
    """
    return (query.unsqueeze(2) * minimum.float().unsqueeze(3)).sum(-1, keepdim=True)
