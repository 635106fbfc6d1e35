"""Runs one family unpatched and patched, and says which of the outcomes the library gives it."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import asdict, dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_sparse import PSACache, PSAConfig, patch_model
from tests.families.build import CannotBuild, tiny_model
from tests.families.shrink import FIRST_SPECIAL_ID
from tests.scenarios import pad_left

OUTCOMES = {
    "sparse": "exact at threshold 1 on the sparse path",
    "dense": "exact, but the model edits K and V after caching them: attention is dense",
    "native": "exact, no layer with full attention to make sparse",
    "refused": "refused by an error that names the cause",
    "wrong": "different output",
    "crash": "an error from inside",
    "unbuildable": "not tested: no tiny model",
}
EXACT = PSAConfig(threshold=1.0, min_context=0, block_size=4)
NEW_TOKENS = 12
TOLERANCE = 1e-3  # of the largest logit: float32, and routers that amplify rounding
REFUSALS = (ValueError, TypeError, NotImplementedError)


@dataclass
class Record:
    """What the sweep found out about one family."""

    family: str
    outcome: str = "crash"
    reason: str = ""
    layers: dict[str, int] = field(default_factory=dict)  # layer kind -> count, as the cache reports them
    difference: float | None = None  # largest logit difference, relative to the largest logit
    distinct: int | None = None  # distinct tokens generated
    context_effect: float | None = (
        None  # effect of one changed prompt token, in standard deviations of the logits
    )
    warnings: list[str] = field(default_factory=list)
    unpatched: str = ""  # the unpatched model with a PSACache: "exact", "wrong", or the error

    to_dict = asdict


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch of three, (input_ids, attention_mask) [3, 48]; no special ids in it."""
    generator = torch.Generator().manual_seed(0)
    return pad_left([torch.randint(3, FIRST_SPECIAL_ID - 4, (n,), generator=generator) for n in (48, 41, 35)])


@torch.no_grad()
def _generate(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    kwargs.setdefault("max_new_tokens", NEW_TOKENS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **kwargs,
        )
    return output.sequences, torch.stack([step.float() for step in output.logits])


def _reference(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unpatched model with a DynamicCache; for the few that refuse one, with what they build."""
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        return _generate(model, ids, mask, past_key_values=cache)
    except Exception:
        return _generate(model, ids, mask)


def _difference(ours: tuple, reference: tuple) -> float:
    """Largest logit difference relative to the largest logit; infinite where the tokens differ."""
    if not torch.equal(ours[0], reference[0]) or not ours[1].isfinite().all():
        return float("inf")
    return ((ours[1] - reference[1]).abs().max() / reference[1].abs().max()).item()


def _from_library(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, REFUSALS) and "hf_sparse" in frames[-1].filename


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_short(error)} ({'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno})"


def _measure_power(
    record: Record, model: PreTrainedModel, reference: tuple, ids: torch.Tensor, mask: torch.Tensor
) -> None:
    """How much a wrong attention would show: distinct tokens, and the effect of one changed token."""
    changed = ids.clone()
    changed[:, 20] = (ids[:, 20] - 3 + 50) % (FIRST_SPECIAL_ID - 7) + 3
    _, logits = _generate(model, changed, mask, max_new_tokens=1)
    first = reference[1][0]
    record.distinct = reference[0][:, -NEW_TOKENS:].unique().numel()
    record.context_effect = round(((logits[0] - first).abs().max() / first.std()).item(), 4)


def _check_unpatched(model: PreTrainedModel, reference: tuple, ids: torch.Tensor, mask: torch.Tensor) -> str:
    try:
        cache = PSACache(model.config, EXACT)
        return (
            "exact"
            if _difference(_generate(model, ids, mask, past_key_values=cache), reference) <= TOLERANCE
            else "wrong"
        )
    except Exception as error:
        return _where(error)


def _check_patched(
    record: Record, model: PreTrainedModel, reference: tuple, ids: torch.Tensor, mask: torch.Tensor
) -> None:
    try:
        patch_model(model, EXACT)
    except REFUSALS as error:
        record.outcome, record.reason = "refused", str(error)
        return
    try:
        ours = _generate(model, ids, mask)
    except Exception as error:
        refused = _from_library(error)
        record.outcome, record.reason = ("refused", str(error)) if refused else ("crash", _where(error))
        return
    record.difference = float(f"{_difference(ours, reference):.1e}")
    stats = (
        model.last_psa_cache.stats()
        if model.last_psa_cache is not None
        else {"layers": [], "materialized": 0}
    )
    for layer in stats["layers"]:
        record.layers[layer["kind"]] = record.layers.get(layer["kind"], 0) + 1
    if not record.difference <= TOLERANCE:
        record.outcome, record.reason = "wrong", f"largest relative logit difference {record.difference:.2g}"
    elif "psa" not in record.layers:
        record.outcome = "native"
    elif stats["materialized"]:
        record.outcome = "dense"
    elif stats["sparse_steps"] < NEW_TOKENS - 1:
        record.outcome, record.reason = "dense", f"only {stats['sparse_steps']} steps took the sparse path"
    else:
        record.outcome = "sparse"


def classify(family: str) -> Record:
    """The outcome for `family`. Never raises for what the model or the library does."""
    record = Record(family)
    ids, mask = prompts()
    try:
        model = tiny_model(family)
        model.generation_config.use_cache = True  # off by default in a few old families
        reference = _reference(model, ids, mask)
        repeat = _reference(model, ids, mask)
    except CannotBuild as error:
        record.outcome, record.reason = "unbuildable", str(error)
        return record
    except Exception as error:
        record.outcome, record.reason = "unbuildable", _where(error)
        return record
    if _difference(repeat, reference) != 0.0:
        record.outcome, record.reason = "unbuildable", "the unpatched model does not repeat its own output"
        return record
    _measure_power(record, model, reference, ids, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record.unpatched = _check_unpatched(model, reference, ids, mask)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check_patched(record, model, reference, ids, mask)
    record.warnings = [str(w.message) for w in caught if w.category is UserWarning and _is_ours(w.filename)]
    if record.outcome == "sparse" and record.warnings:
        record.reason = f"but warned: {record.warnings[0]}"
    if record.outcome == "dense" and len(record.warnings) != 1:
        record.outcome = "wrong"
        record.reason = f"exact but dense with {len(record.warnings)} warnings, not one. {record.reason}"
    return record


def _is_ours(filename: str) -> bool:
    """A warning of the library points at its own code or, by its stack level, at the caller: this file."""
    return "hf_sparse" in filename or filename == __file__
