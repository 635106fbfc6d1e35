"""The tests of the Triton kernels, run in the interpreter and so in a process of their own."""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter():
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton"], capture_output=True,
                          text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 45 and "failed" not in done.stdout and "skipped" not in done.stdout
