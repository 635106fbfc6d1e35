"""Decode-true measurement: the context is prefilled exactly, question and answer go through the sparse step.

Evaluations that read the question together with the context never exercise the sparse step on it, and report dense
figures under a sparse name. Here a fork of the prefilled cache answers every question, token by token through the
sparse step, and `check_sparse` raises where nothing was sparse.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..cache.psa_cache import PSACache
from ..compat import CACHE_ARGUMENT
from ..config import PSAConfig
from .samples import Question

# Reads everything, exactly, whatever the cache's own policy is.
DENSE = dict(policy="threshold", threshold=1.0, stop_rule="estimate", min_blocks=0, max_blocks=None, verify=False,
             sparse_queries=False)


class DenseDecodeError(RuntimeError):
    """A measurement of sparse decoding in which decoding was dense."""


@dataclass(frozen=True)
class Reading:
    """What the model predicted for a gold answer.

    Args:
        log_probs: [answer tokens, vocabulary] fp64 log-probabilities (of `answer` on the CPU), each given the gold tokens
            before.
        stats: `PSACache.stats()` of the fork that answered, and `reading`, see `reading_taken`.
    """

    log_probs: torch.Tensor
    stats: dict


@torch.no_grad()
def prefill(model, context: tuple[int, ...], config: PSAConfig, chunk: int | None = None,
            prepare: Callable[[PSACache], None] | None = None) -> PSACache:
    """Run a context through a patched model.

    Args:
        context: token ids.
        chunk: tokens a forward, which bounds the memory of a long context; None: all at once.
        prepare: called with the empty cache.

    Returns:
        A PSACache that holds the context; fork it for every question.
    """
    cache = PSACache(model.config, config.replace(sparse_queries=False))
    if prepare is not None:
        prepare(cache)
    ids = torch.tensor([context], device=model.device)
    for part in ids.split(chunk or len(context), dim=1):
        model(input_ids=part, **{CACHE_ARGUMENT: cache}, use_cache=True, **last_logits(model, 1))
    return cache


@torch.no_grad()
def answer(model, cache: PSACache, question: Question, dense: bool = False, one_forward: bool = True) -> Reading:
    """Ask one question on a prefilled cache, which is left as it was.

    Args:
        dense: answer with exact dense attention over the same blocks: the reference.
        one_forward: question and answer in one forward whose tokens take the sparse step one after the other, which
            computes what token-by-token decoding does; False does that decoding, a forward a token.

    Raises:
        DenseDecodeError: `dense` is False, and some of decoding was dense all the same.
        FloatingPointError: the model produced NaN or infinite logits.
    """
    fork = cache.fork(**(DENSE if dense else {"sparse_queries": True}))
    ids = torch.tensor([question.prompt + question.answer[:-1]], device=model.device)
    wanted = len(question.answer)
    if one_forward:
        logits = model(input_ids=ids, **{CACHE_ARGUMENT: fork}, use_cache=True, **last_logits(model, wanted)).logits
    else:
        logits = torch.cat([model(input_ids=one, **{CACHE_ARGUMENT: fork}, use_cache=True).logits
                            for one in ids.split(1, dim=1)], dim=1)
    logits = logits[0, -wanted:].double().cpu()
    if not bool(torch.isfinite(logits).all()):
        raise FloatingPointError(f"the model's logits are not finite ({'dense' if dense else 'sparse'} attention)")
    stats = {**fork.stats(), "reading": reading_taken(fork)}
    if not dense:
        check_sparse(stats, fork.config, ids.shape[1])
    return Reading(torch.log_softmax(logits, dim=-1), stats)


@torch.no_grad()
def answers(model, cache: PSACache, questions: Sequence[Question], dense: bool = False) -> list[Reading]:
    """Ask several questions on one prefilled context, those of one length together, as rows of one batch.

    Rows share the blocks of the context. Where kernels serve the cache's settings they decode, a token a forward; else one
    forward takes all tokens through the reference.

    Returns:
        A Reading a question; questions that were asked together share their stats.

    Raises:
        ValueError: the cache holds more than one row. DenseDecodeError, FloatingPointError: see `answer`.
    """
    if cache.batch_size != 1:
        raise ValueError(f"questions are asked on one context, the cache holds {cache.batch_size} rows")
    lengths = [len(question.prompt) + len(question.answer) - 1 for question in questions]
    readings: list[Reading | None] = [None] * len(questions)
    for length in dict.fromkeys(lengths):
        places = [place for place, other in enumerate(lengths) if other == length]
        asked = [questions[place] for place in places]
        single = bool(cache.config.streaming_heads)         # tokens of one forward see windows of their own
        fork = cache.fork(**(DENSE if dense else {"sparse_queries": not single}))
        if len(asked) > 1:
            fork.batch_repeat_interleave(len(asked))
        ids = torch.tensor([question.prompt + question.answer[:-1] for question in asked], device=model.device)
        keep = max(len(question.answer) for question in asked)
        parts = ids.split(1, dim=1) if not dense and (single or by_kernels(model, fork)) else [ids]
        logits = torch.cat([model(input_ids=part, **{CACHE_ARGUMENT: fork}, use_cache=True,
                                  **last_logits(model, min(keep, part.shape[1]))).logits[:, -keep:] for part in parts], 1)
        if not bool(torch.isfinite(logits[:, -keep:]).all()):
            raise FloatingPointError(f"the model's logits are not finite ({'dense' if dense else 'sparse'} attention)")
        stats = {**fork.stats(), "reading": reading_taken(fork)}
        if not dense:
            check_sparse(stats, fork.config, length)
        for place, row in zip(places, logits):
            own = row[-len(questions[place].answer):].double()
            readings[place] = Reading(torch.log_softmax(own, dim=-1), stats)
    return readings


def by_kernels(model, cache: PSACache) -> bool:
    """Whether a prefilled cache decodes single tokens with the kernels; several in one forward take the reference."""
    return cache.state.kernels(model.device, model.dtype) and all(layer.in_reach() for layer in cache.sparse_layers)


def reading_taken(cache: PSACache) -> str:
    """How the sparse steps of a cache have chosen blocks: "rounds" (the reference), "cut" (the kernels) or "mixed"."""
    steps, reference = (sum(getattr(layer.stats, name) for layer in cache.sparse_layers)
                        for name in ("sparse_steps", "reference_steps"))
    return "rounds" if reference == steps else "mixed" if reference else "cut"


def check_sparse(stats: dict, config: PSAConfig, tokens: int) -> None:
    """Raise DenseDecodeError unless all `tokens` took the sparse step, and blocks were skipped if the policy can."""
    if stats["sparse_steps"] < tokens:
        raise DenseDecodeError(
            f"only {stats['sparse_steps']} of {tokens} question and answer tokens went through the sparse step, so "
            f"this would measure dense attention. Contexts shorter than min_context={config.min_context} tokens are "
            "attended densely (lengthen the context or lower min_context), as are models that are not patched and "
            "models without a full-attention layer.")
    if can_skip(config) and stats["blocks_read"] >= stats["blocks_held"]:
        raise DenseDecodeError(
            f"all {stats['blocks_held']:.0f} blocks were read although policy={config.policy!r} may skip some, so this "
            "would measure dense attention. Lengthen the context, or lower the threshold, min_blocks or block_size.")


def can_skip(config: PSAConfig) -> bool:
    """Whether the policy may leave blocks unread at all."""
    if config.bounds[1] is not None:
        return True
    if config.policy == "threshold":
        return config.threshold < 1.0
    return config.policy == "top_k" and config.top_k != 1.0 or config.policy == "top_p" and config.top_p < 1.0


def divergence(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """KL(dense || sparse) in nats for every answer token: [tokens] fp64, from two [tokens, vocabulary] log_probs."""
    return (dense.exp() * (dense - sparse)).sum(-1).clamp(min=0.0)


def last_logits(model, count: int) -> dict:
    """Ask only for the logits that are read, from models that can do so: a vocabulary times a context is a lot."""
    known = inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if "logits_to_keep" in known else {}
