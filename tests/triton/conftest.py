"""The kernels run in Triton's interpreter here; that is decided when they are defined, so before anything imports them."""
from __future__ import annotations

import os

import pytest

from hf_sparse.cache import backend

_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    import hf_sparse.kernels.decode as _decode
    AVAILABLE = _decode.INTERPRETED
except ImportError:
    AVAILABLE = False
finally:
    if _before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _before


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Caches on the CPU decode through the kernels while a test of this folder runs."""
    if not AVAILABLE:
        pytest.skip("Triton's interpreter is not available")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend._missing.cache_clear()
    yield
    backend._missing.cache_clear()
