"""When blocks that were chosen for an earlier token are no longer those of this one."""
from __future__ import annotations

from torch import Tensor


def due(age: Tensor, reuse: int, moved: Tensor, query: Tensor, chosen_for: Tensor, cosine: float) -> Tensor:
    """KV heads that select anew, rather than read what several tokens share: bool [B, H].

    Args:
        age: [B, H], tokens that have had the selection. reuse: how many may have it.
        moved: bool [B], rows whose selection is void whatever its age. query, chosen_for, cosine: see `drifted`; [B, H, G, D].
    """
    return (age >= reuse) | moved[:, None] | drifted(query, chosen_for, cosine)


def drifted(query: Tensor, chosen_for: Tensor, cosine: float) -> Tensor:
    """Groups of query heads of which one has turned away from the query that its blocks were chosen for.

    Args:
        query, chosen_for: [..., G, D], of a token and of the one that has selected. cosine: of the angle that each head may
            have turned by; 0: any.

    Returns:
        bool [...]
    """
    now, then = query.float(), chosen_for.float()
    lengths = (now.square().sum(-1) * then.square().sum(-1)).sqrt()
    # Without a quotient: a query of zeros has no direction to turn from.
    return ((now * then).sum(-1) < cosine * lengths).any(-1) & (cosine > 0)
