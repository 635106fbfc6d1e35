"""Whether queries have turned so far that blocks chosen for the earlier ones are no longer theirs."""
from __future__ import annotations

from torch import Tensor


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
