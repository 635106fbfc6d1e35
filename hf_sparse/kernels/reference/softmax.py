"""Attention over a few blocks with its log mass, and the merge of two such parts."""
from __future__ import annotations

import math

import torch


def block_attention(query, keys, values, valid, softcap: float):
    """Softmax numerators over blocks, per block and together.

    Args:
        query: [B, H, G, D] fp32, already scaled.
        keys: [B, H, R, P, D]; values: [B, H, R, P, Dv]; any float dtype.
        valid: bool, broadcastable to [B, H, 1, R, P]: tokens that take part.
        softcap: 0 for none, else logits become softcap * tanh(logits / softcap).

    Returns:
        output [B, H, G, Dv] fp32 (normalised; zeros where nothing is valid), log mass [B, H, G], and log mass of
        every block [B, H, G, R].
    """
    logits = torch.einsum("bhgd,bhrpd->bhgrp", query, keys.float())
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~valid, -math.inf)
    block_mass = torch.logsumexp(logits, -1)
    mass = torch.logsumexp(block_mass, -1)
    weights = torch.exp(logits - finite(mass)[..., None, None])
    # A slot that was never written may hold NaN, and 0 * NaN is NaN.
    values = values.float().masked_fill(~valid.squeeze(2)[..., None], 0.0)
    return torch.einsum("bhgrp,bhrpd->bhgd", weights, values), mass, block_mass


def merge(output_a, mass_a, output_b, mass_b):
    """Two normalised parts into one, always in this order so that results do not depend on where blocks were."""
    mass = torch.logaddexp(mass_a, mass_b)
    base = finite(mass)
    output = output_a * torch.exp(mass_a - base)[..., None] + output_b * torch.exp(mass_b - base)[..., None]
    return output, mass


def finite(mass):
    """-inf (nothing gathered) -> 0, so that exp(-inf - mass) is 0 and not NaN."""
    return torch.where(torch.isinf(mass), torch.zeros_like(mass), mass)
