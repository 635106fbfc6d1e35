"""Stop rules: the log mass that the unread blocks are taken to hold (arXiv 2503.00392, section 4.2).

Each rule answers one question after m ranked blocks have been read: how much attention mass is left? A head's
coverage is then captured / (captured + left). All in the log domain, fp32; shapes are [B, H, G] (row, KV head, query
head of its group) unless said otherwise. Always-read blocks count as captured and never in a rule's own statistics.
"""
from __future__ import annotations

import math

import torch


def estimate(rest: torch.Tensor, done: int, **_) -> torch.Tensor:
    """The digest's own estimate of every candidate not read yet. `rest`: [B, H, G, M + 1]."""
    return rest[..., done]


def nleft(block_mass: torch.Tensor, read: torch.Tensor, left: torch.Tensor, **_) -> torch.Tensor:
    """Unread blocks times the lightest ranked block read so far: a bound only if blocks come in true order.

    `block_mass`: [B, H, G, m] log mass of the ranked blocks read so far; `read`: [B, H, 1, m] which of them count;
    `left`: [B, H, 1] how many candidates are unread.
    """
    lightest = block_mass.masked_fill(~read, math.inf).amin(-1)
    return lightest + left.clamp(min=0).log()


def window(block_mass: torch.Tensor, read: torch.Tensor, left: torch.Tensor, size: int, **_) -> torch.Tensor:
    """Unread blocks times the mean mass of the last `size` blocks read: a mis-ranked light block can't end it."""
    position = torch.arange(block_mass.shape[-1], device=block_mass.device)
    count = read.sum(-1, keepdim=True)
    recent = read & (position >= count - size)
    mass = block_mass.masked_fill(~recent, -math.inf)
    return torch.logsumexp(mass, -1) - recent.sum(-1).clamp(min=1).log() + left.clamp(min=0).log()


def paper(block_mass: torch.Tensor, read: torch.Tensor, left: torch.Tensor, **_) -> torch.Tensor:
    """The lightest ranked block read so far, once: the formula as printed, which never looks at how many are left."""
    lightest = block_mass.masked_fill(~read, math.inf).amin(-1)
    return torch.where(left > 0, lightest, -math.inf)


RULES = {"estimate": estimate, "nleft": nleft, "window": window, "paper": paper}
