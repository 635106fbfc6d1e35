"""What importing the package costs, each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("triton", "matplotlib", "transformers", "accelerate", "gguf")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    return set(run(code).split())


def test_importing_the_package_is_cheap():
    assert loaded_after("import hf_sparse") == set()


def test_a_config_needs_no_transformers():
    assert loaded_after("from hf_sparse import PSAConfig; PSAConfig(threshold=0.9)") == set()


def test_everything_public_works_without_triton_and_plotting():
    """transformers may import Triton by itself; we must not need it. Here it can't be imported at all."""
    code = (
        "import sys\n"
        "for name in ('triton', 'matplotlib', 'gguf'): sys.modules[name] = None\n"
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from hf_sparse import PSAConfig, PSACache, patch_model, unpatch_model, patched\n"
        "config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)\n"
        "model = patch_model(LlamaForCausalLM(config).eval(), min_context=0, block_size=4, policy='top_k', top_k=4)\n"
        "model.generate(torch.arange(200)[None] % 30, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)\n"
        "print(model.last_psa_cache.stats()['sparse_steps'])"
    )
    assert run(code).strip() == "3"


def test_a_triton_that_lacks_something_means_the_reference():
    """The kernels take more than the core of Triton, which other versions of it may not have."""
    code = (
        "import os, sys\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "sys.modules['triton.language.extra.cuda'] = None\n"
        "import torch\n"
        "from hf_sparse import PSAConfig\n"
        "from hf_sparse.cache import backend\n"
        "print(backend.use_kernels(PSAConfig(), torch.device('cpu'), torch.float32))\n"
        "print(backend._missing(PSAConfig(), torch.device('cpu'), torch.float32))"
    )
    used, reason = run(code).splitlines()
    assert used == "False" and reason.startswith("the kernels can't be imported")


def test_cuda_is_not_initialised():
    code = (
        "import torch\n"
        "def refuse(*args, **kwargs): raise RuntimeError('CUDA was touched')\n"
        "torch._C._cuda_init = torch.cuda._lazy_init = refuse\n"
        "import hf_sparse\n"
        "from hf_sparse import PSAConfig, PSACache, patch_model, unpatch_model, patched\n"
        "print(torch.cuda.is_initialized())"
    )
    assert run(code).strip() == "False"


def test_all_is_what_there_is():
    import hf_sparse

    assert set(hf_sparse.__all__) == {
        "HeadProfile",
        "PSACache",
        "PSAConfig",
        "__version__",
        "calibrate_heads",
        "patch_model",
        "patched",
        "unpatch_model",
    }
    assert dir(hf_sparse) == sorted(hf_sparse.__all__)
    for name in hf_sparse.__all__:
        assert getattr(hf_sparse, name) is not None


def test_unknown_name():
    import hf_sparse

    with pytest.raises(AttributeError, match="hf_sparse.*'PSACash'"):
        hf_sparse.PSACash  # noqa: B018


def test_the_library_never_prints():
    """Commands and examples print; library code only warns and raises."""
    import ast

    package = ROOT / "hf_sparse"
    found = []
    for path in package.rglob("*.py"):
        if (package / "commands") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.Assert):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} (assert)")
    assert found == []
