"""What the prefill kernel and its reference are tested on, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Sizes, and which of the KV heads stream (None: all)."""

    tokens: int
    queries: int
    heads: int = 2
    group: int = 2
    dim: int = 16
    value_dim: int | None = None
    streaming: tuple[int, ...] | None = None
    sink: int = 5
    window: int = 20
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        parts = [f"T{self.tokens}-Q{self.queries}-H{self.heads}x{self.group}-D{self.dim}-s{self.sink}-w{self.window}"]
        parts += [f"Dv{self.value_dim}"] * (self.value_dim is not None)
        parts += ["streaming-" + ("".join(map(str, self.streaming or ())) or "none")] * (self.streaming is not None)
        parts += ["softcap"] * (self.softcap > 0) + ["sinks"] * self.sinks
        return "-".join([*parts, str(self.dtype).removeprefix("torch.")])

    def tensors(self, device="cpu", seed: int = 0) -> dict[str, Tensor | None]:
        """Arguments of `prefill_attention`."""
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        query = draw(2, self.heads * self.group, self.queries, self.dim) * 2
        keys = draw(2, self.heads, self.tokens, self.dim)
        values = draw(2, self.heads, self.tokens, self.value_dim or self.dim)
        parts = {"query": query.to(self.dtype), "keys": keys.to(self.dtype), "values": values.to(self.dtype),
                 "sinks": draw(self.heads * self.group) if self.sinks else None}
        return {name: None if part is None else part.to(device) for name, part in parts.items()}

    @property
    def scaling(self) -> float:
        return self.dim**-0.5

    def streams(self, head: int) -> bool:
        return self.streaming is None or head in self.streaming

    def tolerance(self) -> dict[str, float]:
        return dict(rtol=0, atol=2e-5 if self.dtype == torch.float32 else 16 * torch.finfo(self.dtype).eps)

    def expected(self, query, keys, values, sinks, window: int | None = None) -> Tensor:
        """[B, Hq, Q, Dv] float64, a query at a time in plain sums; `window`: another one than the case's."""
        window = self.window if window is None else window
        batch, query_heads, queries, _ = query.shape
        output = torch.zeros(batch, query_heads, queries, values.shape[-1], dtype=torch.float64)
        query, keys, values = (part.cpu().double() for part in (query, keys, values))
        j = torch.arange(self.tokens)
        for b in range(batch):
            for own in range(query_heads):
                head = own // self.group
                for i in range(queries):
                    t = self.tokens - queries + i
                    seen = j <= t
                    if self.streams(head):
                        seen = seen & ((j < self.sink) | (j > t - window))
                    logits = keys[b, head][seen] @ query[b, own, i] * self.scaling
                    if self.softcap:
                        logits = self.softcap * torch.tanh(logits / self.softcap)
                    weights = torch.exp(logits)
                    total = weights.sum() + (0 if sinks is None else torch.exp(sinks[own].cpu().double()))
                    output[b, own, i] = weights @ values[b, head][seen] / total
        return output


HALF = torch.float16
CASES = [
    # Lengths around tiles, prompts whole and in chunks.
    *[Case(tokens, tokens) for tokens in (1, 7, 64, 129)],
    Case(300, 300, heads=1, group=2, window=70),
    *[Case(129, queries, group=1) for queries in (1, 7, 64, 65, 128)],
    Case(300, 7, window=129, sink=64),
    # Groups, head dims.
    *[Case(70, 40, group=group) for group in (1, 3, 7)],
    *[Case(70, 33, heads=1, dim=dim) for dim in (64, 80, 96, 128, 256)],
    Case(70, 70, dim=16, value_dim=40),
    Case(70, 33, dim=80, value_dim=24),
    # Windows and sinks: smaller and larger than tiles and rows, whole tiles and parts, and windows that begin in the sinks.
    *[Case(120, 120, heads=1, group=1, sink=sink, window=window)
      for sink in (0, 1, 32, 37, 200) for window in (1, 3, 16, 32, 33, 63, 64, 1000)],
    Case(64, 64, heads=1, group=1, sink=5, window=58),       # the last query's window begins one behind the sinks
    *[Case(150, 40, heads=1, group=1, sink=sink, window=window) for sink in (0, 37, 64) for window in (1, 33, 64, 140)],
    # Which heads stream.
    *[Case(90, 90, heads=3, group=1, streaming=streaming) for streaming in ((), (0,), (1,), (2,), (0, 2), (0, 1, 2))],
    Case(90, 21, heads=4, group=3, streaming=(1, 2)),
    # Soft caps, sink logits.
    Case(90, 90, softcap=2.0),
    Case(90, 90, sinks=True),
    Case(90, 33, softcap=2.0, sinks=True, streaming=(1,)),
    # 16 bits.
    Case(129, 129, group=3, dim=64, dtype=HALF),
    Case(129, 50, dim=80, value_dim=96, streaming=(0,), sinks=True, dtype=HALF),
    Case(129, 129, dim=128, softcap=5.0, streaming=(1,), dtype=HALF),
]
