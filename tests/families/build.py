"""Builds one tiny random model of any *ForCausalLM family of transformers."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.overrides import OVERRIDES, UNBUILDABLE
from tests.families.shrink import shrink
from tests.models import energise, prepare

MAX_PARAMETERS = 20_000_000


class CannotBuild(Exception):
    """The family has no tiny model here; the message says why."""


def family_names() -> list[str]:
    """Every model type that AutoModelForCausalLM knows in the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _merge(base: dict, extra: dict) -> dict:
    merged = dict(base)
    for name, value in extra.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge(merged[name], value) if nested else value
    return merged


def tiny_config(model_type: str):
    """The shrunk config of `model_type`."""
    config_class = CONFIG_MAPPING[model_type]
    override = OVERRIDES.get(model_type, {})
    try:
        entries = config_class().to_dict()
    except Exception:  # the defaults of some configs contradict each other: start from the overrides alone
        entries = {}
    return config_class(**_merge(shrink(entries), override))


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model in eval mode with redrawn weights. Raises CannotBuild where there is none."""
    if model_type in UNBUILDABLE:
        raise CannotBuild(UNBUILDABLE[model_type])
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise CannotBuild(f"the shrunk model still has {size:,} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return prepare(energise(model, seed))
