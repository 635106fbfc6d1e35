"""LServe's parts on a small model before they are timed: captured against eager, GPU against CPU, and against dense attention."""
from __future__ import annotations

import functools
import unittest.mock

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_sparse import PSACache, PSAConfig, patch_model, unpatch_model
from hf_sparse.compat import CACHE_ARGUMENT

from .decode import Follow

HALF = ((0, 1), (1, 0), (1, 1))                             # one head of a layer, and all of another; a third has none
NARROW = {"streaming_heads": HALF, "streaming_sink": 16, "streaming_window": 64, "streaming_prefill_window": 256}
PAGES = {"policy": "top_k", "top_k": 8, "digest": "pages", "block_size": 64}
EXACT, CLOSE = 2e-4, 2e-2                                   # relative errors of a token's logits

# Settings, and how far logits of the kernels may be from the reference on a CPU: EXACT, those of every token; CLOSE, those of the
# middle one, as a code or block at the edge may fall to either side, and then a token or two are far apart.
CASES: dict[str, tuple[dict, float]] = {
    "streaming-wide": ({"threshold": 1.0, "streaming_heads": HALF, "streaming_window": 2**14, "streaming_prefill_window": 2**14},
                       EXACT),
    "streaming": ({"threshold": 1.0, **NARROW}, EXACT),
    "kv8": ({"threshold": 1.0, "kv_bits": 8}, CLOSE),
    "kv4": ({"threshold": 1.0, "kv_bits": 4}, CLOSE),
    "pages": (PAGES, CLOSE),
    "reuse": ({**PAGES, "reuse": 4}, CLOSE),
    "lserve": ({**PAGES, **NARROW, "reuse": 4, "kv_bits": 4}, CLOSE),
}
FLAT, PEAKED = 2.0, 48.0                                    # weights of queries; with peaked attention a choice has few near ties
AS_DENSE = ("streaming-wide",)                              # cases that hide nothing


def check(device="cuda", length: int = 1501, tokens: int = 24) -> dict:
    """Name of a case -> {"equal", "captured", "captured_equals_eager", "from_cpu", "from_dense"} or {"equal": False, "error"}.

    A left-padded batch of two in float32. All runs are led along the tokens of the dense one, but for the captured and the
    eager one that are compared token for token; differences are relative ones of a token's logits, `from_dense` the largest.
    """
    ids = torch.randint(3, 1000, (2, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :length * 7 // 30] = 0

    def run(model, settings: dict | None, where, lead=None, compiled: bool = False):
        model.to(where)
        if settings is None:
            cache = DynamicCache(config=model.config)
        else:
            settings = PSAConfig(min_context=0, compile=compiled, **settings)
            patch_model(model, settings)
            cache = PSACache(model.config, settings)
        lead = [] if lead is None else [Follow(lead.to(where))]
        out = model.generate(ids.to(where), attention_mask=mask.to(where), max_new_tokens=tokens, do_sample=False,
                             logits_processor=lead, output_logits=True, return_dict_in_generate=True, **{CACHE_ARGUMENT: cache})
        steps = [step for step in model._hf_sparse.steps.values() if step is not None] if compiled else []
        return out.sequences.cpu(), torch.stack(out.logits).cpu(), any(step.captured for step in steps)

    models = {scale: small_model(scale) for scale in (FLAT, PEAKED)}
    dense = {scale: run(model, None, device) for scale, model in models.items()}
    found: dict = {}
    # Compiling proper takes longer than all the rest, and fuses nothing that this is about: captured, not optimised.
    with unittest.mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
        for name, (settings, limit) in CASES.items():
            scale = PEAKED if settings.get("policy") == "top_k" else FLAT
            model, (lead, dense_logits, _) = models[scale], dense[scale]
            try:
                captured, _, was_captured = run(model, settings, device, compiled=True)
                eager, _, _ = run(model, settings, device)
                _, logits, _ = run(model, settings, device, lead)
                _, on_cpu, _ = run(model, settings, "cpu", lead)
                same, apart, from_dense = torch.equal(captured, eager), errors_of(logits, on_cpu), errors_of(logits, dense_logits)
                apart, from_dense = float(apart.max() if limit == EXACT else apart.median()), float(from_dense.max())
                right = same and apart < limit and was_captured == (torch.device(device).type == "cuda")
                found[name] = {"equal": right and (name not in AS_DENSE or from_dense < EXACT), "captured": was_captured,
                               "captured_equals_eager": same, "from_cpu": apart, "from_dense": from_dense}
            except Exception as error:  # noqa: BLE001 - a run that fails is a result
                found[name] = {"equal": False, "error": f"{type(error).__name__}: {error}"[:300]}
            finally:
                unpatch_model(model)
                torch._dynamo.reset()
            print("" if found[name]["equal"] else "DIFFERENT", name, found[name], flush=True)
    return found


def small_model(scale: float) -> LlamaForCausalLM:
    """Three layers in float32, whose queries are so many times as large as those of a fresh model."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=1000, head_dim=64, max_position_embeddings=1 << 17,
                         bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(scale if "q_proj" in name else 2.0 if parameter.dim() > 1 else 1.0)
    return model


def errors_of(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Relative errors of [tokens, B, vocabulary]: [tokens, B]."""
    return (logits.double() - true.double()).norm(dim=-1) / true.double().norm(dim=-1)


def failures(found: dict) -> list[str]:
    """Names of the cases that were not as they should be."""
    return [name for name, entry in found.items() if not entry["equal"]]
