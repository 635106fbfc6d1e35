"""Rank the candidate blocks of every row and KV head by their estimated mass."""
from __future__ import annotations

import math

import torch

from .softmax import finite


def select(estimate, captured, first: int, last, limit: int, reduction: str):
    """Candidates in descending criticality, and the estimated mass that is left after each.

    Args:
        estimate: [B, H, G, N] fp32 estimated log mass of every block.
        captured: [B, H, G] exact log mass of the always-read blocks, which the shares are relative to.
        first, last: candidates are the blocks first <= n < last[b]; last is [B] int64.
        limit: how many of them to rank.
        reduction: "softmax_mean" (mean over the group's heads of their share), "max" or "mean" of the log masses.

    Returns:
        order [B, H, M] int64, M = min(limit, N); equal scores keep the order of the blocks. Past the candidates it
        holds other blocks, which the caller masks. rest [B, H, G, M + 1]: log of the estimated mass of all
        candidates that are not among the first m.
    """
    N = estimate.shape[-1]
    block = torch.arange(N, device=estimate.device)
    candidate = ((block >= first) & (block < last[:, None]))[:, None, None]                      # [B, 1, 1, N]
    estimate = torch.where(candidate, estimate, -math.inf)
    if reduction == "softmax_mean":
        total = torch.logaddexp(captured, torch.logsumexp(estimate, -1))
        score = torch.exp(estimate - finite(total)[..., None]).mean(2)
    elif reduction == "max":
        score = estimate.amax(2)
    else:
        score = estimate.mean(2)
    # A candidate without any mass still comes before what is no candidate.
    score = torch.where(candidate[:, 0], score.clamp(min=torch.finfo(score.dtype).min), -math.inf)
    order = torch.argsort(score, dim=-1, descending=True, stable=True)
    ranked = estimate.gather(-1, order[:, :, None].expand_as(estimate))
    rest = torch.logcumsumexp(ranked.flip(-1), -1).flip(-1)
    rest = torch.cat([rest, torch.full_like(rest[..., :1], -math.inf)], -1)
    limit = min(limit, N)
    return order[..., :limit].contiguous(), rest[..., :limit + 1].contiguous()
