"""The tests of the Triton kernels, run in the interpreter and so in processes of their own.

Interpreting is slow, so they run beside all other tests: tests/conftest.py starts them first and puts this test last. They leave
one core to the others, which are one process, as long as these last; with equal shares the others would end long after them.
"""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile

import pytest

STEPS = ["tests/triton/test_decode_kernels.py", "tests/triton/test_tiered_step.py"]
PARTS = ["tests/triton/test_prefetch.py", "tests/triton/test_quantised_step.py", "tests/triton/test_streaming_step.py",
         "tests/triton/test_reuse_step.py", "tests/triton/test_pages.py", "tests/triton/test_prefill_kernel.py",
         "tests/triton/test_captured_sharing.py"]
# Files, and tests in them at least.
SHARES = [(STEPS, 58), (["tests/triton", *(f"--ignore={file}" for file in (*STEPS, *PARTS))], 40), (PARTS, 40)]
_RUNNING: list[tuple[subprocess.Popen, object]] = []


def start() -> None:
    """Begin, if there is a Triton to interpret kernels."""
    if _RUNNING or importlib.util.find_spec("triton") is None:
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for files, _ in SHARES:
        output = tempfile.TemporaryFile("w+")               # a pipe that nobody reads would fill up
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        process = subprocess.Popen(command, text=True, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _RUNNING.append((process, output))
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)


def stop() -> None:
    for process, _ in _RUNNING:
        process.kill()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter():
    start()
    for (process, output), (_, least) in zip(_RUNNING, SHARES):
        process.wait(timeout=1200)
        output.seek(0)
        text = output.read()
        assert process.returncode == 0, text[-6000:]
        passed = re.search(r"(\d+) passed", text)
        assert passed and int(passed[1]) >= least and "failed" not in text and "skipped" not in text
