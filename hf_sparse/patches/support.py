"""Can a model be served? Read off the source of its attention classes, before anything is changed."""
from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, field
from functools import lru_cache

# Wrong by test although their source looks plain.
REFUSED = {
    "doge": "it builds a mask of its own from the dense one",
    "git": "its decoder does not read the configured attention implementation",
    "moshi": "its window comes from what its cache has evicted",
    "minimax": "it accepts a cache class of its own only",
    "mllama": "it reads the cached keys of its cross-attention directly",
    "mllama_text_model": "it reads the cached keys of its cross-attention directly",
}
# Read the mask beside attention, harmlessly.
MASK_READERS_ALLOWED = {"GPT2Attention", "DiffLlamaAttention"}
# Touch keys and values only on a branch that a configured attention implementation does not take.
TOUCHES_ALLOWED = {"GPT2Attention"}

INTERFACES = ("attention_interface", "attention_fn")


@dataclass
class Support:
    """How a model would be served: "sparse", "dense" (exact, K and V are edited on the way) or "refused"."""

    kind: str
    reasons: list[str] = field(default_factory=list)


def check(model) -> Support:
    """Classify a model by its attention classes and its type."""
    model_type = getattr(model.config.get_text_config(decoder=True), "model_type", "")
    if model_type in REFUSED:
        return Support("refused", [f"{model_type}: {REFUSED[model_type]}"])
    dense, refused = [], []
    for cls in sorted({type(module) for module in model.modules()}, key=lambda cls: cls.__name__):
        found = lint(cls)
        if not found:
            continue
        if "no_interface" in found:
            refused.append(f"{cls.__name__} computes attention itself instead of going through transformers' "
                           "AttentionInterface")
        elif "mask_consumed" in found and cls.__name__ not in MASK_READERS_ALLOWED:
            refused.append(f"{cls.__name__} uses the attention mask for something of its own")
        elif found & {"kv_touched", "kv_transformed"} and cls.__name__ not in TOUCHES_ALLOWED:
            dense.append(f"{cls.__name__} edits keys or values between the cache and attention")
    if refused:
        return Support("refused", refused)
    return Support("dense", dense) if dense else Support("sparse")


@lru_cache(maxsize=None)
def lint(cls) -> frozenset[str]:
    """Findings about one module class; empty if it is no caching attention or a plain one.

    "no_interface": does not call the attention interface. "kv_transformed", "kv_touched": what `update()` returned
    is not what attention gets, or is used in between. "mask_consumed": the mask is used outside of the call.
    """
    forward = cls.__dict__.get("forward") or getattr(cls, "forward", None)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return frozenset()
    update = interface = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "update" and len(node.args) >= 3 \
                and any(name in ast.unparse(node.func.value) for name in ("cache", "past_key_value", "layer_past")):
            update = node
        if isinstance(node.func, ast.Name) and node.func.id in INTERFACES:
            interface = node
    if update is None:
        return frozenset()
    if interface is None:
        return frozenset({"no_interface"})
    return frozenset(_between(tree, update, interface))


def _between(tree, update, interface) -> set[str]:
    found, targets, line = set(), [], update.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.value is update:
            target = node.targets[0]
            targets = [ast.unparse(t) for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
            line = node.end_lineno
    passed = [*interface.args, *(keyword.value for keyword in interface.keywords)]
    inside = {id(node) for argument in passed for node in ast.walk(argument)}
    if not set(targets) <= {ast.unparse(argument) for argument in passed}:
        found.add("kv_transformed")
    inside |= _stored(tree, targets)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
            if node.id in targets and line < node.lineno < interface.lineno:
                found.add("kv_touched")
            if node.id == "attention_mask":
                found.add("mask_consumed")
    return found


def _stored(tree, targets: list[str]) -> set[int]:
    """Uses of keys and values that only keep them, as layers that share them with later ones do: x[...] = keys, values."""
    kept = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Subscript) for target in node.targets):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            kept |= {id(value) for value in values if isinstance(value, ast.Name) and value.id in targets}
    return kept
