"""What the interpreter can't tell: the kernels compile for real GPUs."""
from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


# Each of the cases once, resident and with a host tier on both.
@pytest.mark.parametrize(("capability", "cases"), [(80, "1,3"), (90, "0,2")])
def test_kernels_compile(capability, cases, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.triton.compile_kernels", f"{capability}:{cases}"], capture_output=True,
                          text=True, timeout=600, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    built = re.findall(rf"sm_{capability} (\w+)_kernel .*: (\d+) bytes", done.stdout)
    resident, tiered = ([["rank", "select", *fetch, "attend", "merge", "extend"] for fetch in ([], ["fetch"])])
    names = [name for name, _ in built]
    assert names[:len(resident + tiered)] == resident + tiered
    assert set(names[len(resident + tiered):]) <= {"score", "select", "fetch"}                 # of what is fetched ahead
    assert all(int(size) > 1000 for _, size in built)
