"""Which implementation takes the decode step: the Triton kernels, or the PyTorch reference."""
from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch

from ..config import PSAConfig

# Without tensor cores for int8 and bf16 the kernels make no sense.
MIN_CAPABILITY = (8, 0)


def use_kernels(config: PSAConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels serve these settings here. On a GPU, the reason why not is given once, as a warning."""
    reason = _missing(config, device, dtype)
    if reason is not None:
        warn_reference(reason, device)
    return reason is None


@lru_cache(maxsize=None)
def _missing(config: PSAConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    elif device.type != "cpu" or not interpreted:
        return f"there are no kernels for {device.type}"
    try:
        from ..kernels import decode  # noqa: F401 - with all that it takes from Triton
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the reference still works
        return f"the kernels can't be imported ({error})"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{dtype} keys"
    return unsupported(config)


def unsupported(config: PSAConfig) -> str | None:
    """None if the kernels implement these settings, else the setting that they lack."""
    if config.digest not in ("channel_codes", "pages", "min_max"):
        return f"digest={config.digest!r} has no kernels"
    if config.policy == "threshold" and config.threshold < 1.0 and config.stop_rule != "estimate":
        return f"stop_rule={config.stop_rule!r} has no kernels"
    if config.group_reduction != "softmax_mean":
        return f"group_reduction={config.group_reduction!r} has no kernels"
    for name in ("verify", "dense_layers", "record_steps"):
        if getattr(config, name):
            return f"{name} has no kernels"
    return None


def warn_reference(reason: str, device: torch.device) -> None:
    """On a GPU, say once why decoding takes the reference."""
    if device.type == "cuda":
        _warn(reason)


@lru_cache(maxsize=None)
def _warn(reason: str) -> None:
    warnings.warn(f"hf_sparse decodes with its PyTorch reference, which is slow on a GPU: {reason}.", UserWarning,
                  stacklevel=2)
