"""A selection that several tokens share, and when it is given up before its time."""
from __future__ import annotations

import torch
from torch import Tensor

from ..config import PSAConfig
from ..selection.drift import due


class Reuse:
    """The selections of the rows of a batch, from one token to the next.

    A KV head keeps a selection for `reuse` tokens. All heads of a row select anew when its always-read blocks have moved on,
    since what leaves them was in no selection. A head also selects anew at a token with a query whose cosine with that of the
    selection is below `reuse_refresh`.
    """

    def __init__(self, config: PSAConfig):
        self.config = config
        self.kept: Tensor | None = None                     # bool [R, H, N]
        self.query: Tensor | None = None                    # [R, H, G, D], for which it was selected
        self.start: Tensor | None = None                    # [R], first block of the always-read tail
        self.age: Tensor | None = None                      # [R, H], tokens that have had it

    def __call__(self, chosen: Tensor, start: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks that tokens read, in the order of tokens.

        Args:
            chosen: bool [R * T, H, N], what each token would select. start: [R * T]. query: [R, T, H, G, D].

        Returns:
            (bool [R * T, H, N], bool [R * T, H]: whether the selection is the token's own)
        """
        chosen, start = (x.unflatten(0, query.shape[:2]) for x in (chosen, start))
        out, new = [], []
        for token in range(query.shape[1]):
            fresh = self._due(start[:, token], query[:, token])
            self._take(fresh, chosen[:, token], start[:, token], query[:, token])
            out.append(self.kept)
            new.append(fresh)
        return torch.stack(out, 1).flatten(0, 1), torch.stack(new, 1).flatten(0, 1)

    def _due(self, start: Tensor, query: Tensor) -> Tensor:
        if self.kept is None:
            return torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
        return due(self.age, self.config.reuse, start != self.start, query, self.query, self.config.reuse_refresh)

    def _take(self, fresh: Tensor, chosen: Tensor, start: Tensor, query: Tensor) -> None:
        if self.kept is None:
            self.kept, self.query, self.age = chosen, query, torch.zeros_like(fresh, dtype=torch.long)
        old = torch.nn.functional.pad(self.kept, (0, chosen.shape[-1] - self.kept.shape[-1]))
        self.kept = torch.where(fresh[..., None], chosen, old)
        self.query = torch.where(fresh[..., None, None], query, self.query)
        self.age = torch.where(fresh, 1, self.age + 1)
        self.start = start
