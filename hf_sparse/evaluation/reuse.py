"""A selection that several tokens share, and when it is given up before its time."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import PSAConfig
from ..kernels.reference.softmax import finite


class Reuse:
    """The selections of the rows of a batch, from one token to the next.

    A KV head keeps a selection for `reuse` tokens. All heads of a row select anew when its always-read blocks have moved on, since
    what leaves them was in no selection. A head also selects anew after a token whose coverage was lower than it was at the
    selection, by more than `reuse_refresh`. Coverage is judged by what a step knows: the mass that was gathered, over that and
    the mass that was left at the selection, by the estimates. Estimates that only rank are scaled first, so that what was read
    holds as much as it did.
    """

    def __init__(self, config: PSAConfig, token_level: bool):
        self.config, self.token_level = config, token_level
        self.kept: Tensor | None = None                     # bool [R, H, N]
        self.start: Tensor | None = None                    # [R], first block of the always-read tail
        self.age = self.left = self.coverage = self.fallen = None

    def __call__(self, chosen: Tensor, start: Tensor, masses: Tensor, always: Tensor, estimate: Tensor,
                 rows: int) -> tuple[Tensor, Tensor]:
        """The blocks that tokens read, in the order of tokens.

        Args:
            chosen: bool [R * T, H, N], what each token would select. start: [R * T].
            masses: [R * T, H, G, N] true log masses. always: [R * T, H, G] log mass gathered whatever is selected.
            estimate: [R * T, H, G, N] estimated log masses, -inf for blocks that are not ranked.
            rows: R.

        Returns:
            (bool [R * T, H, N], bool [R * T, H]: whether the selection is the token's own)
        """
        chosen, start, masses, always, estimate = (x.unflatten(0, (rows, -1)) for x in (chosen, start, masses, always, estimate))
        out, new = [], []
        for token in range(chosen.shape[1]):
            fresh = self._due(chosen[:, token], start[:, token])
            self._take(fresh, chosen[:, token], start[:, token])
            self._watch(fresh, masses[:, token], always[:, token], estimate[:, token])
            out.append(self.kept)
            new.append(fresh)
        return torch.stack(out, 1).flatten(0, 1), torch.stack(new, 1).flatten(0, 1)

    def _due(self, chosen: Tensor, start: Tensor) -> Tensor:
        if self.kept is None:
            return torch.ones_like(chosen[..., 0])
        return (self.age >= self.config.reuse) | (start != self.start)[:, None] | self.fallen

    def _take(self, fresh: Tensor, chosen: Tensor, start: Tensor) -> None:
        if self.kept is None:
            self.kept, self.age = chosen, torch.zeros_like(fresh, dtype=torch.long)
        old = torch.nn.functional.pad(self.kept, (0, chosen.shape[-1] - self.kept.shape[-1]))
        self.kept = torch.where(fresh[..., None], chosen, old)
        self.age = torch.where(fresh, 1, self.age + 1)
        self.start = start

    def _watch(self, fresh: Tensor, masses: Tensor, always: Tensor, estimate: Tensor) -> None:
        kept = self.kept[:, :, None]
        held = torch.where(kept, masses, -math.inf).logsumexp(-1)
        left = torch.where(kept, -math.inf, estimate).logsumexp(-1)
        if not self.token_level:
            promised = torch.where(kept, estimate, -math.inf).logsumexp(-1)
            left = torch.where(torch.isfinite(promised), left + held - finite(promised), left)
        self.left = left if self.left is None else torch.where(fresh[..., None], left, self.left)
        gathered = torch.logaddexp(always, held)
        now = self._combined(torch.exp(gathered - finite(torch.logaddexp(gathered, self.left))))
        self.coverage = now if self.coverage is None else torch.where(fresh, now, self.coverage)
        self.fallen = now < self.coverage - self.config.reuse_refresh

    def _combined(self, coverage: Tensor) -> Tensor:
        return coverage.amin(-1) if self.config.group_stop == "min" else coverage.mean(-1)
