"""Questions that are answered by free greedy generation, and scored by a benchmark's metric.

Decode-true like `decoding`: a fork of the prefilled cache takes the question token by token through the sparse step, and
`generate()` goes on from there.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from ..compat import CACHE_ARGUMENT
from . import metrics
from .decoding import DENSE, by_kernels, check_sparse, reading_taken


@dataclass(frozen=True)
class FreeQuestion:
    """One question on a context whose answer is generated.

    Args:
        name: what tells it apart within its sample.
        prompt: token ids of the question, what follows the context; at least one.
        references: gold answers; at least one.
        metric: a name in `metrics.METRICS`.
        max_new_tokens: of the answer.
        stop: texts that end the answer and are not part of it. Line breaks before an answer don't count.
        classes: all classes, for metric "classification".
    """

    name: str
    prompt: tuple[int, ...]
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Most tokens that question and answer take."""
        return len(self.prompt) + self.max_new_tokens

    def score(self, text: str) -> float:
        """How good an answer is, 0 to 1."""
        return metrics.score(self.metric, text, self.references, self.classes)


@dataclass(frozen=True)
class Generated:
    """An answer.

    Args:
        text: without special tokens, up to where a stop text began.
        tokens: ids that were generated.
        stats: `PSACache.stats()` of the fork that answered, and `reading`, see `decoding.reading_taken`.
    """

    text: str
    tokens: tuple[int, ...]
    stats: dict


def generate_answer(model, tokenizer, cache, question: FreeQuestion, dense: bool = False) -> Generated:
    """Answer a question greedily on a prefilled cache of one row, which is left as it was.

    Args:
        model: the patched model that prefilled the cache.
        dense: with exact dense attention over the same blocks: the reference.

    Raises:
        DenseDecodeError: `dense` is False, and some of decoding was dense all the same.
    """
    fork = cache.fork(**(DENSE if dense else {"sparse_queries": True}))
    past = fork.get_seq_length()
    if not dense and by_kernels(model, fork):
        # generate() would hand over the question in one piece, which the reference would take.
        with torch.no_grad():
            for token in question.prompt[:-1]:
                model(input_ids=torch.tensor([[token]], device=model.device), **{CACHE_ARGUMENT: fork}, use_cache=True)
    # generate() wants the ids of the context too, and looks at none of them: the cache has it. Any id does.
    ids = torch.tensor([[question.prompt[0]] * past + list(question.prompt)], device=model.device)
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    pad = tokenizer.pad_token_id
    if pad is None and ends is not None:
        pad = ends if isinstance(ends, int) else ends[0]
    settings = GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=question.max_new_tokens, eos_token_id=ends,
                                pad_token_id=pad)
    stops = [_Stop(tokenizer, ids.shape[1], question.stop)] if question.stop else []
    # The model's own settings may sample, or punish repetition by the ids; what a given config leaves open is taken from them.
    own = model.generation_config
    model.generation_config = settings
    try:
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=fork,
                                stopping_criteria=StoppingCriteriaList(stops))
    finally:
        model.generation_config = own
    tokens = tuple(output[0, ids.shape[1]:].tolist())
    stats = {**fork.stats(), "reading": reading_taken(fork)}
    if not dense:
        check_sparse(stats, fork.config, len(question.prompt) + len(tokens) - 1)
    text = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return Generated(cut(text, question.stop), tokens, stats)


def cut(text: str, stop: tuple[str, ...]) -> str:
    """An answer up to the first of its stop texts; with any, line breaks before it are left out."""
    if not stop:
        return text
    text = text.lstrip("\n")
    return text[:min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


class _Stop(StoppingCriteria):
    def __init__(self, tokenizer, prompt_tokens: int, stop: tuple[str, ...]):
        self.tokenizer, self.prompt_tokens, self.stop = tokenizer, prompt_tokens, stop

    def __call__(self, input_ids, scores, **kwargs):
        text = self.tokenizer.decode(input_ids[0, self.prompt_tokens:].tolist(), skip_special_tokens=True)
        done = any(stop in text.lstrip("\n") for stop in self.stop)
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)
