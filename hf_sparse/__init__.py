"""hf_sparse: progressive sparse attention over paged, tiered KV caches for transformers."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS = {
    "PSAConfig": "config",
    "PSACache": "cache.psa_cache",
    "patch_model": "patches.model",
    "unpatch_model": "patches.model",
    "patched": "patches.model",
    "HeadProfile": "heads.profile",
    "calibrate_heads": "heads.calibrate",
}
__all__ = ["HeadProfile", "PSACache", "PSAConfig", "__version__", "calibrate_heads", "patch_model", "patched", "unpatch_model"]

if TYPE_CHECKING:
    from .cache.psa_cache import PSACache
    from .config import PSAConfig
    from .heads.calibrate import calibrate_heads
    from .heads.profile import HeadProfile
    from .patches.model import patch_model, patched, unpatch_model


def __getattr__(name: str):
    # Lazy, so that importing the package costs neither transformers nor Triton.
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
