"""The kernels run in Triton's interpreter here: this folder is collected only with TRITON_INTERPRET=1 in the environment."""
from __future__ import annotations

import dataclasses
import os

if os.environ.get("TRITON_INTERPRET", "0") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime.interpreter import interpreter_builder

    # Overflow checks double the time, and integer overflow is not what these tests look for.
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
