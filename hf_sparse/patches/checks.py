"""What is refused before anything is computed, so that a cache never loses what it holds."""
from __future__ import annotations

import torch

from ..cache.psa_cache import PSACache
from ..cache.streaming_ring import SLACK_TOKENS
from ..cache.window import SLACK, WindowLayer
from ..compat import RECORDS_PAST, TURNS_IN_CHUNKS

# A ring holds its window and SLACK tokens more; the token after those taken back sees one less than the window before it.
WINDOW_TOKENS = SLACK + 1


def check_generate(cache: PSACache, kwargs: dict, generation_config) -> None:
    """Refuse what generate() could only do wrongly with this cache, before it starts."""
    if kwargs.get("output_attentions", getattr(generation_config, "output_attentions", False)):
        raise NotImplementedError("output_attentions=True: sparse attention never has all attention weights. Use "
                                  "hf_sparse.unpatch_model(model) with attn_implementation='eager' for them.")
    cache.check_whole()
    _check_drafts(cache, kwargs, generation_config)
    past = cache.tokens
    if past == 0:
        return
    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if kwargs.get(name, getattr(generation_config, name, None)) is not None:
            raise NotImplementedError(f"{name} with a cache that already holds tokens: transformers feeds the whole prompt "
                                      "again then, whatever the cache. Use a new cache, or generate without drafts.")
    chunk = kwargs.get("prefill_chunk_size", getattr(generation_config, "prefill_chunk_size", None))
    if chunk is not None and not TURNS_IN_CHUNKS:
        raise NotImplementedError("prefill_chunk_size with a cache that already holds tokens: before 5.24 transformers counts a "
                                  "turn's chunks from the beginning of the conversation. Upgrade it, or leave prefill_chunk_size "
                                  "out of later turns.")
    ids = kwargs.get("input_ids", kwargs.get("inputs"))
    mask = kwargs.get("attention_mask")
    length = mask.shape[1] if mask is not None else ids.shape[1] if ids is not None else None
    if length is not None and length <= past:
        raise ValueError(f"The cache already holds {past} tokens but the prompt has {length}. To continue, pass the "
                         "ids (and mask) of the whole conversation so far; to start again, use a new cache or "
                         "cache.reset().")


def _check_drafts(cache: PSACache, kwargs: dict, generation_config) -> None:
    """Refuse drafts that may be longer than what the cache can take back: they would fail in the middle of a text."""
    # The assistant's own call, a token at a time: of what it drafts at most all is taken back from its cache.
    assists = bool(getattr(generation_config, "is_assistant", False))
    limits = []                                             # (tokens, of what, the remedy)
    if cache.config.streaming_heads:
        limits.append((SLACK_TOKENS, "streaming heads", "leave out streaming_heads"))
    if (assists or not RECORDS_PAST) and any(isinstance(layer, WindowLayer) for layer in cache.layers):
        remedy = "unpatch the assistant" if assists else "update transformers"
        limits.append((WINDOW_TOKENS, "sliding-window layers", remedy))
    lookup, assistant = (kwargs.get(name, getattr(generation_config, name, None))
                         for name in ("prompt_lookup_num_tokens", "assistant_model"))
    settings = getattr(assistant, "generation_config", None)
    counts = {"prompt_lookup_num_tokens": lookup,
              "assistant_model.generation_config.num_assistant_tokens": getattr(settings, "num_assistant_tokens", None)}
    if assists:
        counts = {"assistant_model.generation_config.num_assistant_tokens": kwargs.get("max_new_tokens")}
    schedule = getattr(settings, "num_assistant_tokens_schedule", None)
    for limit, what, remedy in limits:
        for name, count in counts.items():
            if count is not None and count > limit:
                raise ValueError(f"{name}={count}: with {what} a draft may have up to {limit} tokens, since no more can be "
                                 f"taken back where it is wrong. Lower it, or {remedy}.")
        if schedule in ("heuristic", "heuristic_transient"):
            raise ValueError(f"assistant_model.generation_config.num_assistant_tokens_schedule={schedule!r} lets drafts grow, "
                             f"and with {what} they may have up to {limit} tokens. Set it to 'constant', or {remedy}.")


def check_mask(cache: PSACache, mask, total: int) -> None:
    """Refuse a 4-D mask of more than the `total` tokens there are: its last columns would be taken for the new tokens'."""
    if torch.is_tensor(mask) and mask.dim() == 4 and mask.shape[-1] > total and any(hasattr(x, "attend") for x in cache.layers):
        raise ValueError(f"This attention_mask speaks of {mask.shape[-1]} tokens, but with the new ones there are {total}; "
                         "unlike a static cache this one has no empty places. Cut the mask there. Nothing in the cache was "
                         "changed.")
