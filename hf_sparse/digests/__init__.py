"""Digests: what stays on the device for every block, to estimate its criticality. One file each."""

from __future__ import annotations

from typing import Any

from .base import Digest
from .centroid import CentroidDigest
from .channel_codes import ChannelCodesDigest
from .cuboid_mean import CuboidMeanDigest
from .key_bits import KeyBitsDigest
from .key_planes import KeyPlanesDigest
from .min_max import MinMaxDigest
from .pages import PagesDigest

DIGESTS: dict[str, type[Digest]] = {
    cls.name: cls
    for cls in (ChannelCodesDigest, KeyBitsDigest, KeyPlanesDigest, CuboidMeanDigest, MinMaxDigest, PagesDigest, CentroidDigest)
}


def get_digest(name: str, block_size: int, head_dim: int, **options: Any) -> Digest:
    """Build a digest by name.

    Args:
        name: "channel_codes", "key_bits", "key_planes", "cuboid_mean", "min_max", "pages" or "centroid".
        block_size: tokens per block.
        head_dim: key head dimension.
        **options: key_bits takes `bits`; pages takes `logical_size`; channel_codes takes `group`, `high_fraction` and
            `drop_fraction`.

    Raises:
        ValueError: for an unknown name or an option out of range.
        TypeError: for an option that the digest does not have.
    """
    if name not in DIGESTS:
        raise ValueError(f"unknown digest {name!r}; choose from {', '.join(DIGESTS)}")
    return DIGESTS[name](block_size, head_dim, **options)


__all__ = [
    "DIGESTS",
    "CentroidDigest",
    "ChannelCodesDigest",
    "CuboidMeanDigest",
    "Digest",
    "KeyBitsDigest",
    "KeyPlanesDigest",
    "MinMaxDigest",
    "PagesDigest",
    "get_digest",
]
