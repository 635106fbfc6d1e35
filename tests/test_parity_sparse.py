"""Below threshold 1 blocks are skipped, and what is left does not depend on how one generates.

Random models have no right answer to a sparse step, so a run is compared with another way to the same result:
the row alone instead of in a padded batch, the prompt at once instead of in chunks, everything resident
instead of offloaded. Prefill is exact in all of them, so first logits are those of dense attention.
"""

from __future__ import annotations

import contextlib
import re
import warnings

import pytest
import torch

from hf_sparse import PSACache, PSAConfig, patch_model, patched, unpatch_model
from hf_sparse.sizes import parse_bytes
from tests.models import FAMILIES, WITHOUT_FULL_ATTENTION, get_draft_model, get_model
from tests.parity import LOGIT_TOLERANCE, assert_same_run, reference, upstream_failure
from tests.scenarios import (
    PROMPT_LENGTH,
    SCENARIOS,
    SPECULATIVE,
    greedy,
    make_prompt,
    pad_left,
    padded,
    padded_prompts,
    run_generate,
)

SPARSE = PSAConfig(
    threshold=0.6, digest="key_bits", min_context=0, block_size=4, round_blocks=4, round_growth=2.0
)
FULL_ATTENTION = [family for family in FAMILIES if family not in WITHOUT_FULL_ATTENTION]
# One of each pattern: plain, softcap and windows, sink logits and windows, three query heads a KV head.
PATTERNS = ["llama", "gemma2", "gpt_oss", "qwen2"]


def run_patched(family: str, scenario, config: PSAConfig) -> dict:
    """A scenario (or a function like one) on the patched model, with a cache of `config`."""
    model = get_model(family)
    with patched(model, config):
        return scenario(model, lambda: PSACache(model.config, config))


def config_for(scenario: str, **overrides) -> PSAConfig:
    """Speculation verifies several tokens at once, which is exact by default and so would read everything."""
    return SPARSE.replace(sparse_queries=scenario in SPECULATIVE, **overrides)


def difference(run: dict, other: dict, step: int) -> float:
    """Largest difference between the logits of two runs at one step."""
    return (run["scores"][step] - other["scores"][step]).abs().max().item()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_skips_blocks(family, scenario):
    known = upstream_failure(family, scenario)
    expected = reference(family, scenario, plain=known is not None)
    config = config_for(scenario)
    # Where the draft would fail on a DynamicCache it gets a cache of ours.
    draft = patched(get_draft_model(family), config) if known else contextlib.nullcontext()
    with draft:
        ours = run_patched(family, SCENARIOS[scenario], config)
    stats = ours["cache"].stats()
    assert stats["sparse_steps"] > 0
    assert 0 < stats["kv_fraction"] < 0.6
    assert stats["blocks_held"] > 20 * stats["sparse_steps"]
    assert config.threshold < stats["coverage"] < 1
    assert stats["materialized"] == 0
    torch.testing.assert_close(ours["scores"][0], expected["scores"][0], rtol=0, atol=LOGIT_TOLERANCE)
    # Tokens drafted with the prompt are part of the prefill.
    assert scenario in SPECULATIVE or difference(ours, expected, step=1) > 100 * LOGIT_TOLERANCE


@torch.no_grad()
def by_verification(model, make_cache, tokens: torch.Tensor) -> tuple[torch.Tensor, object]:
    """Logits [steps, vocabulary] of `tokens` [steps], fed with wrong drafts among them that are cropped.

    Every forward has seven tokens of which one to four are right, so that whole blocks are closed by tokens that are
    taken back. transformers' own assisted decoding verifies
    its first drafts together with the prompt, where attention is dense.
    """
    cache = make_cache()
    model(input_ids=make_prompt(PROMPT_LENGTH, seed=1)[None], past_key_values=cache, use_cache=True)
    logits, done, right = [], 0, 1
    while done < len(tokens):
        right = min(right, len(tokens) - done)
        draft = make_prompt(7, seed=60 + done)
        draft[:right] = tokens[done : done + right]
        output = model(input_ids=draft[None], past_key_values=cache, use_cache=True).logits[0, :right]
        cache.crop(right - 7)
        logits.append(output.float())
        done, right = done + right, right % 4 + 1
    return torch.cat(logits), cache


@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_verified_drafts_are_plain_decoding(family):
    """Drafted tokens that are taken back leave neither keys nor digests behind."""
    config = SPARSE.replace(sparse_queries=True)
    plain = run_patched(family, greedy, config)
    tokens = plain["tokens"][0, PROMPT_LENGTH:-1]
    logits, cache = run_patched(family, lambda *args: by_verification(*args, tokens), config)
    torch.testing.assert_close(logits, plain["scores"][1:, 0], rtol=0, atol=LOGIT_TOLERANCE)
    assert cache.tokens == PROMPT_LENGTH + len(tokens)
    assert cache.stats()["sparse_steps"] > plain["cache"].stats()["sparse_steps"] == len(tokens)


# The default digest has units of 128 tokens whatever the block size, so prompts of two units and more.
LONG = (300, 271, 289)
DIGESTS = {
    "key_bits": dict(),
    "channel_codes": dict(digest="channel_codes"),
    "min_max": dict(digest="min_max", stop_rule="window", stop_window=4),
}
# Digests see no more of a model than its keys, so four families are enough for the others.
DIGESTED = [
    (family, digest)
    for digest in DIGESTS
    for family in (FULL_ATTENTION if digest == "key_bits" else PATTERNS)
]


@torch.no_grad()
def long_batch(model, make_cache, rows=slice(None), **kwargs) -> dict:
    """Some rows of a left-padded batch of three long prompts, padded no more than those rows need."""
    prompts = [make_prompt(length, seed=50 + i) for i, length in enumerate(LONG)][rows]
    ids, mask = pad_left(prompts)
    return run_generate(model, make_cache(), input_ids=ids, attention_mask=mask, max_new_tokens=8, **kwargs)


def assert_skipped(run: dict) -> None:
    assert run["cache"].stats()["kv_fraction"] < 0.9


@pytest.mark.parametrize(("family", "digest"), DIGESTED, ids=lambda name: name)
def test_padded_row_is_the_row_alone(family, digest):
    config = SPARSE.replace(**DIGESTS[digest])
    together = run_patched(family, long_batch, config)
    assert_skipped(together)
    for i in range(len(LONG)):
        alone = run_patched(family, lambda *args, i=i: long_batch(*args, rows=slice(i, i + 1)), config)
        padding = max(LONG) - LONG[i]
        assert torch.equal(together["tokens"][i, padding:], alone["tokens"][0])
        row = together["scores"][:, i]
        torch.testing.assert_close(row, alone["scores"][:, 0], rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize(("family", "digest"), DIGESTED, ids=lambda name: name)
def test_chunked_prefill_is_one_shot(family, digest):
    config = SPARSE.replace(**DIGESTS[digest])
    at_once = run_patched(family, long_batch, config)
    chunked = run_patched(family, lambda *args: long_batch(*args, prefill_chunk_size=77), config)
    assert_skipped(chunked)
    assert_same_run(chunked, at_once)
    assert chunked["cache"].stats()["blocks_read"] == at_once["cache"].stats()["blocks_read"]


def at_the_smallest_budget(run) -> dict:
    """run(gpu_memory) with the fewest bytes that it accepts, which every refusal names."""
    budget = 1
    while True:
        try:
            return run(budget)
        except ValueError as error:
            named = re.search(r"needs? at least ([\d.]+\w+)", str(error))
            assert named, f"no number to go by in: {error}"
            needed = parse_bytes(named.group(1))
            assert needed > budget, f"{budget} bytes were refused although {needed} were asked for: {error}"
            budget = needed


OFFLOADED = [("llama", scenario) for scenario in SCENARIOS] + [
    (family, scenario)
    for family in PATTERNS[1:]
    for scenario in ("padded", "beams", "continued_padded", "prompt_lookup")
]


@pytest.mark.parametrize(("family", "scenario"), OFFLOADED, ids=lambda name: name)
def test_offloaded_is_resident(family, scenario):
    config = config_for(scenario)
    with patched(get_draft_model(family), config):
        resident = run_patched(family, SCENARIOS[scenario], config)
        offloaded = at_the_smallest_budget(
            lambda budget: run_patched(
                family, SCENARIOS[scenario], config.replace(gpu_memory=budget, host_memory="64MiB")
            )
        )
    assert torch.equal(offloaded["tokens"], resident["tokens"])
    assert torch.equal(offloaded["scores"], resident["scores"])
    stats = offloaded["cache"].stats()
    assert stats["blocks_read"] == resident["cache"].stats()["blocks_read"]
    assert stats["misses"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        dict(policy="top_k", top_k=8),
        dict(policy="top_k", top_k=0.25),
        dict(policy="top_p", top_p=0.5),
        dict(stop_rule="nleft"),
        dict(stop_rule="window"),
        dict(stop_rule="paper"),
        dict(digest="cuboid_mean", stop_rule="window"),
        dict(digest="centroid", stop_rule="window"),
        dict(group_stop="min", group_reduction="max"),
        dict(max_blocks=6),
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_other_settings_skip_and_repeat(family, settings):
    """Policies, rules and digests on the padded batch: they skip, and a row does what it does alone."""
    config = SPARSE.replace(**settings)
    together = run_patched(family, padded, config)
    stats = together["cache"].stats()
    sparse_layers = [layer for layer in stats["layers"] if layer["kind"] == "psa"]
    heads = get_model(family).config.num_key_value_heads
    fixed = settings.get("max_blocks") or isinstance(settings.get("top_k"), int) and settings["top_k"]
    if fixed:
        most = fixed * heads * len(sparse_layers) * stats["sparse_steps"] * together["scores"].shape[1]
        assert stats["blocks_read"] == most if "top_k" in settings else stats["blocks_read"] <= most
    assert stats["kv_fraction"] < (1 if settings.get("stop_rule") == "nleft" else 0.9)
    alone = run_patched(
        family,
        lambda model, make_cache: run_generate(model, make_cache(), input_ids=padded_prompts()[1][None]),
        config,
    )
    torch.testing.assert_close(together["scores"][:, 1], alone["scores"][:, 0], rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("scenario", ["greedy", "padded", "beams", "chunked_prefill", "continued_padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unpatched_is_exact_with_one_warning(family, scenario):
    """On a model that is not patched: dense keys and values, whatever the threshold, and it is said once."""
    if upstream_failure(family, scenario):
        pytest.skip(upstream_failure(family, scenario).reason)
    model = get_model(family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = SCENARIOS[scenario](model, lambda: PSACache(model.config, SPARSE))
    assert_same_run(ours, reference(family, scenario))
    said = [warning for warning in caught if "PSACache hands out dense" in str(warning.message)]
    assert len(said) == 1 and said[0].category is UserWarning
    stats = ours["cache"].stats()
    assert stats["materialized"] > 0 and stats["sparse_steps"] == 0


@torch.no_grad()
def test_unpatched_between_two_turns():
    """A cache may go from a patched model to the same model unpatched and back; in between it is dense."""
    model = get_model("gemma2")
    exact = SPARSE.replace(threshold=1.0)
    cache = PSACache(model.config, exact)
    ids = torch.cat([make_prompt(96, seed=1), make_prompt(9, seed=2), make_prompt(5, seed=3)])[None]
    expected = model(input_ids=ids).logits
    logits = []
    for low, high, is_patched in ((0, 96, True), (96, 105, False), (105, 110, True)):
        if is_patched:
            patch_model(model, exact)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                logits += [
                    model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(low, high)
                ]
        finally:
            unpatch_model(model)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert cache.stats()["materialized"] > 0 and cache.stats()["sparse_steps"] > 0


def test_the_same_run_twice_is_bit_identical():
    first, second = (run_patched("llama", greedy, SPARSE) for _ in range(2))
    assert torch.equal(first["scores"], second["scores"])
