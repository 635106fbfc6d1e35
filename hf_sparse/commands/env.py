"""`hf-sparse env`: versions, devices, and which path decoding will take here."""
from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import warnings

from .. import __version__
from ..sizes import format_bytes

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "triton")


def add_parser(verbs) -> None:
    parser = verbs.add_parser("env", help="show versions, devices and the path that decoding takes here")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def collect() -> dict:
    """Everything that a bug report should say about the machine; names no paths."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"device": f"cuda:{index}", "name": properties.name, "memory": properties.total_memory,
                        "capability": f"{properties.major}.{properties.minor}"})
    return {
        "hf_sparse": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "devices": devices,
        "cpu_threads": torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
        "path": decode_path("cuda" if devices else "cpu"),
    }


def decode_path(device: str) -> str:
    """What takes the decode step on a device with the default settings."""
    import torch

    from ..cache.backend import use_kernels
    from ..config import PSAConfig

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if use_kernels(PSAConfig(), torch.device(device), torch.bfloat16):
            return "Triton kernels"
    return f"PyTorch reference on {device}" + "".join(f" ({warning.message})" for warning in caught)


def as_text(facts: dict) -> str:
    rows = [("hf-sparse", facts["hf_sparse"]), ("Python", f"{facts['python']} on {facts['platform']}")]
    rows += [(name, version or "not installed") for name, version in facts["packages"].items()]
    rows.append(("CUDA", facts["cuda"] or "this torch is built without it"))
    rows += [(d["device"], f"{d['name']}, {format_bytes(d['memory'])}, capability {d['capability']}")
             for d in facts["devices"]] or [("GPU", "none")]
    rows += [("CPU", f"{facts['cpu_cores']} cores, {facts['cpu_threads']} threads in torch"),
             ("decoding runs", facts["path"])]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
