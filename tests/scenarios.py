"""Ways in which people generate with a cache, each as one function that runs on any model and any cache.

A scenario is called as `scenario(model, make_cache)`. `make_cache()` returns a fresh, empty cache;
`make_cache=None` leaves it to `generate()` to build one (not possible for the scenarios in `NEEDS_CACHE`,
which drive the model by hand). It returns a dict:

    tokens   LongTensor [rows, length], what was generated (and, where generate() returns it, the prompt)
    scores   float tensor [steps, rows, vocabulary] of raw logits, step by step
    cache    the cache that was used last
    calls    forward calls of `model` in the speculative scenarios, which may need fewer; else None

Two runs agree when tokens are equal and scores are close. Prompts close at least 20 blocks of 4 tokens in
every row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from tests.models import PAD_TOKEN_ID, VOCAB_SIZE, family_of, get_draft_model

PROMPT_LENGTH = 96
NEW_TOKENS = 14
PADDED_LENGTHS = (100, 93, 97, 88)

Result = dict
MakeCache = Callable[[], object]


def make_prompt(length: int, seed: int) -> torch.Tensor:
    """Random token ids [length], without the pad token and the first few special ids."""
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def pad_left(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pads token rows to one batch. Returns (input_ids, attention_mask), both [rows, longest]."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), PAD_TOKEN_ID)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = row
        mask[i, longest - len(row) :] = 1
    return ids, mask


def padded_prompts(count: int = 4) -> list[torch.Tensor]:
    """The rows of the padded scenarios, each as it is before padding."""
    return [make_prompt(length, seed=10 + i) for i, length in enumerate(PADDED_LENGTHS[:count])]


def cache_of(output):
    """The cache in what a model or generate() returned; transformers 5.24 renamed the field."""
    cache = getattr(output, "cache", None)
    return cache if cache is not None else output.past_key_values


def run_generate(model: PreTrainedModel, cache, **kwargs) -> Result:
    """generate() with raw logits kept. `cache=None` lets generate() build its own."""
    if cache is not None:
        kwargs["past_key_values"] = cache
    kwargs.setdefault("max_new_tokens", NEW_TOKENS)
    output = model.generate(return_dict_in_generate=True, output_logits=True, **kwargs)
    scores = torch.stack([step.float() for step in output.logits])
    return dict(tokens=output.sequences, scores=scores, cache=cache_of(output), calls=None)


def ones_like_ids(ids: torch.Tensor) -> torch.Tensor:
    """A mask without padding. Without a mask, generate() would take a generated pad id for padding."""
    return torch.ones_like(ids)


def _fresh(make_cache: MakeCache | None):
    return None if make_cache is None else make_cache()


def _greedy_steps(model: PreTrainedModel, cache, logits: torch.Tensor, steps: int) -> tuple[list, list]:
    """Feeds the argmax back `steps` times by forward calls. `logits` [rows, vocabulary]: the last."""
    tokens, scores = [logits.argmax(-1)], [logits]
    for _ in range(steps - 1):
        output = model(input_ids=tokens[-1][:, None], past_key_values=cache, use_cache=True)
        scores.append(output.logits[:, -1].float())
        tokens.append(scores[-1].argmax(-1))
    return tokens, scores


@torch.no_grad()
def _greedy(model: PreTrainedModel, make_cache: MakeCache | None, seed: int) -> Result:
    return run_generate(model, _fresh(make_cache), input_ids=make_prompt(PROMPT_LENGTH, seed)[None])


def greedy(model, make_cache) -> Result:
    """One prompt, greedy."""
    return _greedy(model, make_cache, seed=1)


@torch.no_grad()
def padded(model, make_cache) -> Result:
    """Four prompts of different lengths in one left-padded batch."""
    ids, mask = pad_left(padded_prompts())
    return run_generate(model, _fresh(make_cache), input_ids=ids, attention_mask=mask)


@torch.no_grad()
def early_finish(model, make_cache) -> Result:
    """A padded batch in which the first row meets an end token after a few steps; then it is padded."""
    ids, mask = pad_left(padded_prompts(3))
    first = run_generate(model, _fresh(make_cache), input_ids=ids, attention_mask=mask, max_new_tokens=4)
    end = int(first["tokens"][0, -1])
    return run_generate(model, _fresh(make_cache), input_ids=ids, attention_mask=mask, eos_token_id=end)


@torch.no_grad()
def beams(model, make_cache) -> Result:
    """Three beams over a left-padded batch of two, the best two returned: rows are reordered every step."""
    ids, mask = pad_left(padded_prompts(2))
    return run_generate(
        model, _fresh(make_cache), input_ids=ids, attention_mask=mask, num_beams=3, num_return_sequences=2
    )


@torch.no_grad()
def sampling(model, make_cache) -> Result:
    """Three sampled continuations of each of two padded prompts, with a fixed seed."""
    ids, mask = pad_left(padded_prompts(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return run_generate(
            model,
            _fresh(make_cache),
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=3,
        )


@torch.no_grad()
def chunked_prefill(model, make_cache) -> Result:
    """The padded batch, prefilled 27 tokens at a time: chunk edges fall inside blocks."""
    ids, mask = pad_left(padded_prompts())
    return run_generate(model, _fresh(make_cache), input_ids=ids, attention_mask=mask, prefill_chunk_size=27)


@torch.no_grad()
def continued(model, make_cache) -> Result:
    """A second turn on the kept cache, given the full ids: what is cached is not computed again."""
    first = run_generate(model, _fresh(make_cache), input_ids=make_prompt(PROMPT_LENGTH, seed=2)[None])
    ids = torch.cat([first["tokens"], make_prompt(13, seed=3)[None]], -1)
    second = run_generate(model, first["cache"], input_ids=ids, attention_mask=ones_like_ids(ids))
    return {**second, "scores": torch.cat([first["scores"], second["scores"]])}


def _second_turn(model: PreTrainedModel, first: Result, mask: torch.Tensor) -> Result:
    """Appends a left-padded turn to each of three rows. `mask` [3, length]: of all that was there before."""
    turn_ids, turn_mask = pad_left([make_prompt(length, seed=20 + length) for length in (9, 14, 3)])
    ids = torch.cat([first["tokens"], turn_ids], -1)
    mask = torch.cat([mask, turn_mask], -1)
    second = run_generate(model, first["cache"], input_ids=ids, attention_mask=mask)
    return {**second, "scores": torch.cat([first["scores"], second["scores"]])}


@torch.no_grad()
def continued_padded(model, make_cache) -> Result:
    """Two turns of a left-padded batch. The second turn is padded too, so the rows have holes."""
    ids, mask = pad_left(padded_prompts(3))
    first = run_generate(model, _fresh(make_cache), input_ids=ids, attention_mask=mask)
    return _second_turn(model, first, torch.cat([mask, mask.new_ones(3, NEW_TOKENS)], -1))


@torch.no_grad()
def continued_after_end(model, make_cache) -> Result:
    """A second turn after one in which a row ended early: its padding was cached, and is hidden now."""
    ids, mask = pad_left(padded_prompts(3))
    first = run_generate(model, _fresh(make_cache), input_ids=ids, attention_mask=mask, max_new_tokens=4)
    end = int(first["tokens"][0, -1])
    first = run_generate(model, _fresh(make_cache), input_ids=ids, attention_mask=mask, eos_token_id=end)
    ends = first["tokens"][:, ids.shape[1] :] == end
    after_end = ends.cumsum(-1) - ends.long() > 0
    return _second_turn(model, first, torch.cat([mask, (~after_end).long()], -1))


def _counted(model: PreTrainedModel, run: Callable[[], Result]) -> Result:
    """Runs `run` and adds the number of forward calls of `model`."""
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        return {**run(), "calls": len(calls)}
    finally:
        hook.remove()


@torch.no_grad()
def prompt_lookup(model, make_cache) -> Result:
    """Speculation with n-grams of the prompt: rejected tokens are cropped from the cache."""
    ids = make_prompt(PROMPT_LENGTH, seed=4)[None]
    # An end token that no model here can emit: before 5.16 the lookup fails where there is none.
    options = dict(prompt_lookup_num_tokens=6, eos_token_id=VOCAB_SIZE)
    return _counted(model, lambda: run_generate(model, _fresh(make_cache), input_ids=ids, **options))


@torch.no_grad()
def draft_model(model, make_cache) -> Result:
    """Speculation with a draft model, which is right only some of the time: cropped by varying amounts."""
    draft = get_draft_model(family_of(model))
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ids = make_prompt(PROMPT_LENGTH, seed=5)[None]
    return _counted(
        model, lambda: run_generate(model, _fresh(make_cache), input_ids=ids, assistant_model=draft)
    )


@torch.no_grad()
def forward_loop(model, make_cache) -> Result:
    """No generate() at all: a prefill, a second chunk of several tokens, then one token at a time."""
    cache = make_cache()
    ids = make_prompt(PROMPT_LENGTH, seed=6)[None].repeat(2, 1)
    ids[1] = make_prompt(PROMPT_LENGTH, seed=7)
    model(input_ids=ids[:, :-7], past_key_values=cache, use_cache=True)
    output = model(input_ids=ids[:, -7:], past_key_values=cache, use_cache=True)
    tokens, scores = _greedy_steps(model, cache, output.logits[:, -1].float(), NEW_TOKENS)
    return dict(tokens=torch.stack(tokens, 1), scores=torch.stack(scores), cache=cache, calls=None)


@torch.no_grad()
def forked_prefix(model, make_cache) -> Result:
    """One prefix prefilled and forked twice with copy.deepcopy; then forks and original take turns."""
    cache = make_cache()
    prefix = make_prompt(PROMPT_LENGTH - 1, seed=8)[None]
    model(input_ids=prefix, past_key_values=cache, use_cache=True)
    branches = [copy.deepcopy(cache), copy.deepcopy(cache), cache]
    texts, scores = [prefix] * 3, []
    for turn in range(2):
        turns = [make_prompt(6, seed=30 + 3 * turn + i)[None] for i in range(3)]
        texts = [torch.cat([text, new], -1) for text, new in zip(texts, turns, strict=True)]
        results = [
            run_generate(model, branch, input_ids=ids, attention_mask=ones_like_ids(ids), max_new_tokens=6)
            for branch, ids in zip(branches, texts, strict=True)
        ]
        texts = [result["tokens"] for result in results]
        scores.append(torch.cat([result["scores"] for result in results], 1))
    return dict(tokens=torch.cat(texts), scores=torch.cat(scores), cache=cache, calls=None)


@torch.no_grad()
def repeated_prefix(model, make_cache) -> Result:
    """One prefix repeated to three rows, continued, then two of the rows picked out and continued."""
    cache = make_cache()
    prefix = make_prompt(PROMPT_LENGTH - 1, seed=9)[None]
    model(input_ids=prefix, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(3)
    suffixes = torch.stack([make_prompt(6, seed=40 + i) for i in range(3)])
    ids = torch.cat([prefix.repeat(3, 1), suffixes], -1)
    first = run_generate(model, cache, input_ids=ids, attention_mask=ones_like_ids(ids))
    cache.batch_select_indices(torch.tensor([2, 0]))
    ids = torch.cat([first["tokens"][[2, 0]], make_prompt(10, seed=43).view(2, 5)], -1)
    second = run_generate(model, cache, input_ids=ids, attention_mask=ones_like_ids(ids))
    return {**second, "scores": torch.cat([first["scores"][:, [2, 0]], second["scores"]])}


@torch.no_grad()
def inputs_embeds(model, make_cache) -> Result:
    """A left-padded batch given as embeddings, as multimodal wrappers do."""
    ids, mask = pad_left(padded_prompts(2))
    embeds = model.get_input_embeddings()(ids)
    return run_generate(model, _fresh(make_cache), inputs_embeds=embeds, attention_mask=mask)


SCENARIOS: dict[str, Callable[[PreTrainedModel, MakeCache | None], Result]] = {
    "greedy": greedy,
    "padded": padded,
    "early_finish": early_finish,
    "beams": beams,
    "sampling": sampling,
    "chunked_prefill": chunked_prefill,
    "continued": continued,
    "continued_padded": continued_padded,
    "continued_after_end": continued_after_end,
    "prompt_lookup": prompt_lookup,
    "draft_model": draft_model,
    "forward_loop": forward_loop,
    "forked_prefix": forked_prefix,
    "repeated_prefix": repeated_prefix,
    "inputs_embeds": inputs_embeds,
}

# For scenarios that only change how the result is computed: the plain way to the same tokens and logits.
PLAIN: dict[str, Callable[[PreTrainedModel, MakeCache | None], Result]] = {
    "chunked_prefill": padded,
    "prompt_lookup": lambda model, make_cache: _greedy(model, make_cache, seed=4),
    "draft_model": lambda model, make_cache: _greedy(model, make_cache, seed=5),
}

# Scenarios that cannot leave the cache to generate(), and those in which most steps verify several drafted
# tokens at once.
NEEDS_CACHE = frozenset({"forward_loop", "forked_prefix", "repeated_prefix"})
SPECULATIVE = frozenset({"prompt_lookup", "draft_model"})
