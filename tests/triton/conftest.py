"""The kernels run in Triton's interpreter here: this folder is collected only with TRITON_INTERPRET=1 in the environment."""
from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET", "0") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from .interpreter import hasten

    hasten()
