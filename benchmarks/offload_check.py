"""A small model's generate() with a tiered pool against the same with everything resident: equal bit for bit?"""
from __future__ import annotations

import functools
import gc
import re
import unittest.mock
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse import PSACache, PSAConfig, patch_model, unpatch_model
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.sizes import parse_bytes

from .residency_simulation import EVICTIONS

SHARE = 0.3                                                 # of the KV, for the middle pool


class Case:
    """One way of decoding, greedy or with beams, run with pools of any size. fetcher, pool, prefetch: of those with a host
    tier."""

    def __init__(self, model, ids, mask, tokens: int, threshold: float, compiled: bool, beams: int = 1,
                 fetcher: str = "kernel", pool: str = "unified", prefetch: bool = False):
        self.model, self.ids, self.mask, self.tokens, self.beams = model, ids, mask, tokens, beams
        self.fetcher, self.pool, self.prefetch = fetcher, pool, prefetch
        self.config = PSAConfig(threshold=threshold, min_context=0, compile=compiled)

    @property
    def kv_bytes(self) -> int:
        config = self.model.config
        return (self.beams * self.ids.numel() * config.num_hidden_layers * config.num_key_value_heads
                * 2 * config.head_dim * self.model.dtype.itemsize)

    def run(self, **budget) -> tuple:
        """Tokens, logits, and what is worth noting."""
        config = self.config.replace(**budget)
        cache = PSACache(self.model.config, config)
        patch_model(self.model, config)
        out = self.model.generate(self.ids, attention_mask=self.mask, max_new_tokens=self.tokens, do_sample=False,
                                  num_beams=self.beams, output_logits=True, return_dict_in_generate=True,
                                  **{CACHE_ARGUMENT: cache})
        steps = [step for step in self.model._hf_sparse.steps.values() if step is not None]
        noted = {"captured": any(step.captured for step in steps), "misses": cache.stats()["misses"],
                 "slots": cache.sparse_layers[0].pool.slots}
        return out.sequences, torch.stack(out.logits), noted

    def tiered(self, budget: int, eviction: str) -> tuple:
        return self.run(gpu_memory=budget, host_memory=max(2**26, 3 * self.kv_bytes), eviction=eviction, fetcher=self.fetcher,
                        pool=self.pool, prefetch=self.prefetch)


def smallest(attempt: Callable[[int], object]) -> int:
    """The smallest budget that `attempt` takes, found as a user would: by what the last refusal asked for.

    Raises:
        ValueError: a refusal that names no larger size.
    """
    budget = 1
    for _ in range(6):
        try:
            attempt(budget)
            return budget
        except ValueError as error:
            size = re.search(r"at least ([\d.]+\w*B)", str(error))
            if size is None or parse_bytes(size.group(1)) <= budget:
                raise
            budget = parse_bytes(size.group(1))
    raise ValueError(f"the sizes that refusals ask for do not end: {budget}")


def check(device="cuda", length: int = 3001, tokens: int = 40) -> dict:
    """Name of a run -> {"equal", "apart" (of logits, at most), "captured", "misses", "slots", "gpu_memory"} or
    {"equal": False, "error"}."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=1000, head_dim=64, max_position_embeddings=1 << 17,
                         bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(device, torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2.0 if parameter.dim() > 1 else 1.0)
    ids = torch.randint(3, 1000, (2, length), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :length * 7 // 30] = 0
    on_gpu = torch.device(device).type == "cuda"
    found: dict = {}
    # Compiling proper takes longer than all the rest, and fuses nothing that this is about: captured, not optimised.
    with unittest.mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
        for threshold in (0.6, 1.0):
            common = model, ids, mask, tokens, threshold
            try:
                _sizes(found, f"captured-{threshold}", Case(*common, compiled=True), EVICTIONS, True, on_gpu)
                _sizes(found, f"eager-{threshold}", Case(*common, compiled=False), EVICTIONS, False, False)
                _sizes(found, f"copy-engine-{threshold}", Case(*common, compiled=False, fetcher="copy_engine"), EVICTIONS, True,
                       False)
                _sizes(found, f"per-layer-{threshold}", Case(*common, compiled=True, pool="per_layer"), EVICTIONS, False,
                       on_gpu)
                _sizes(found, f"prefetch-{threshold}", Case(*common, compiled=True, prefetch=True), EVICTIONS, True, on_gpu)
                # transformers never compiles a beam search.
                _sizes(found, f"beams-{threshold}", Case(*common, compiled=False, beams=3), EVICTIONS[-1:], False, False)
            finally:
                unpatch_model(model)
                torch._dynamo.reset()
    del model, common
    gc.collect()
    return found


def _sizes(found: dict, name: str, case: Case, evictions, every_size: bool, captured: bool) -> None:
    """Adds the runs of a case with the smallest pool and, if asked for, larger ones."""
    try:
        tokens, logits, noted = case.run(host_memory=0)
        _note(found, f"{name}-resident", {"equal": noted["captured"] == captured, "apart": 0.0, **noted})
        least = smallest(lambda budget: case.tiered(budget, evictions[-1]))
    except Exception as error:  # noqa: BLE001 - a run that fails is a result
        _note(found, name, {"equal": False, "error": f"{type(error).__name__}: {error}"[:300]})
        return
    sizes = {"smallest": least}
    if every_size:
        sizes |= {"share": max(int(SHARE * case.kv_bytes), int(least * 1.1)), "everything": 4 * case.kv_bytes + 4 * least}
    for eviction in evictions:
        for label, budget in sizes.items():
            try:
                got = case.tiered(budget, eviction)
                same = torch.equal(got[0], tokens) and torch.equal(got[1], logits)
                entry = {"equal": same and got[2]["captured"] == captured,
                         "apart": float((got[1] - logits).abs().max()) if got[1].shape == logits.shape else None,
                         **got[2], "gpu_memory": budget}
            except Exception as error:  # noqa: BLE001
                entry = {"equal": False, "error": f"{type(error).__name__}: {error}"[:300]}
            _note(found, f"{name}-{eviction}-{label}", entry)


def _note(found: dict, name: str, entry: dict) -> None:
    found[name] = entry
    print("" if entry["equal"] else "DIFFERENT", name, entry, flush=True)


def failures(found: dict) -> list[str]:
    """Names of the runs that were not as they should be."""
    return [name for name, entry in found.items() if not entry["equal"]]
