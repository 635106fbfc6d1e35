"""The tests of the Triton kernels, run in the interpreter and so in a process of their own."""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

# Two processes beside each other, because interpreting is slow: (files, tests in them at least).
STEPS = ["tests/triton/test_decode_kernels.py", "tests/triton/test_tiered_step.py"]
SHARES = [(STEPS, 58), (["tests/triton", *(f"--ignore={file}" for file in STEPS)], 50)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) for files, _ in SHARES]
    try:
        outputs = [process.communicate(timeout=1200)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output, (_, least) in zip(running, outputs, SHARES):
        assert process.returncode == 0, output[-6000:]
        passed = re.search(r"(\d+) passed", output)
        assert passed and int(passed[1]) >= least and "failed" not in output and "skipped" not in output
