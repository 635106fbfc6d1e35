"""Sparse answers in one forward: what every token of a question and its answer would read is computed for all of them at once.

The sparse step is a loop: token by token, round by round. For measuring what it loses, the loop is not needed. A layer's true
attention masses are computed once for all tokens, each token's selection follows from them and from the digest's estimates
(`choosing.py`), and attention is a masked softmax (`simulated_layer.py`). The selection is the cache's own
(tests/evaluation/test_simulated.py holds it to that), any ranking can be tried, also ones that have no implementation, and the
mass that was really gathered costs nothing (`found.py`).
"""
from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.layer import PSALayer
from ..cache.psa_cache import PSACache
from ..compat import CACHE_ARGUMENT
from .decoding import DenseDecodeError, last_logits
from .estimates import LayerKeys
from .found import Found
from .generated import FreeQuestion, cut
from .policies import Policy
from .samples import Question
from .simulated_layer import SimulatedLayer


class Context:
    """A prefilled context that any number of policies and questions are tried on; it is left as it was.

    Args:
        cache: of `decoding.prefill`, one row, not decoded with yet.

    Raises:
        DenseDecodeError: the model is exact but never sparse.
        ValueError: several rows, or a cache whose prompt is no longer known well enough to digest it as decoding would.
    """

    def __init__(self, cache: PSACache):
        if cache.batch_size != 1 or not cache.sparse_layers:
            raise ValueError("a simulated context is one row of a model with full-attention layers; this cache holds "
                             f"{cache.batch_size} row(s) in {len(cache.sparse_layers)} such layers")
        if cache.state.dense_expected:
            raise DenseDecodeError("this model is served exactly but not sparsely, because its attention edits keys or values "
                                   "between the cache and attention; decoding is dense, and there is nothing to measure")
        self.cache = cache
        self.spare: dict[int, PSACache] = {}                # forks that are as they were made, by their rows
        self.layers = []
        for layer in cache.sparse_layers:
            store = layer.digests
            if store.tail is None:
                raise ValueError("a simulated context needs a cache with digest='channel_codes' that was prefilled and not "
                                 "decoded with")
            keys, values = layer.padded()
            weight = store.tail_valid[:, None, :, None].float()
            energy = (store.tail * weight).sum(2) / weight.sum(2).clamp(min=1.0)
            self.layers.append(LayerKeys(keys.contiguous(), values.contiguous(), energy))

    @property
    def length(self) -> int:
        return self.layers[0].length


class Simulation:
    """A fork of a context in which a policy decides what is read; forwards go on from one to the next.

    Args:
        rows: questions that are asked at the same time, each on a row of its own.

    Raises:
        DenseDecodeError: the context is shorter than `min_context`, so that decoding would be dense.
        ValueError: streaming heads that the model doesn't have, or that no profile has chosen yet.
    """

    def __init__(self, context: Context, policy: Policy, rows: int = 1):
        if not policy.dense and context.length + 1 < policy.config.min_context:
            raise DenseDecodeError(f"a context of {context.length} tokens is below min_context={policy.config.min_context}, so "
                                   "decoding would be dense. Lengthen the context, or lower min_context.")
        check_heads(policy, context)
        self.policy, self.found = policy, Found()
        self.context, self.rows = context, rows
        self.cache = context.spare.pop(rows, None)
        if self.cache is None:
            self.cache = context.cache.fork(sparse_queries=False)
            if rows > 1:
                self.cache.batch_repeat_interleave(rows)
        self.layers = [SimulatedLayer(keys, policy, layer.index, self.found)
                       for keys, layer in zip(context.layers, self.cache.sparse_layers)]
        for layer, simulated in zip(self.cache.sparse_layers, self.layers):
            layer.attend = simulated.attend

    def forward(self, model, ids: Tensor, keep: int, lengths: Sequence[int] | None = None) -> Tensor:
        """Logits of the last `keep` of ids [R, T]: [R, keep, vocabulary]. lengths: tokens of rows before padding; None: all."""
        lengths, width = lengths or [ids.shape[1]] * ids.shape[0], ids.shape[1]

        @functools.cache
        def counted(low: int, high: int) -> Tensor:
            index = [(row - low) * width + token for row in range(low, high) for token in range(lengths[row])]
            return torch.tensor(index, device=ids.device)

        for layer in self.layers:
            layer.counted = counted
        output = model(input_ids=ids, **{CACHE_ARGUMENT: self.cache}, use_cache=True, **last_logits(model, keep))
        return output.logits[:, -keep:]

    def close(self) -> None:
        """After one forward: leave the fork to the next policy, as forking costs about as much as answering."""
        if all(isinstance(layer, PSALayer) for layer in self.cache.layers):
            for layer in self.cache.layers:
                layer.pending = None                        # nothing has been stored yet
            self.context.spare[self.rows] = self.cache


def check_heads(policy: Policy, context: Context) -> None:
    """Raise ValueError where a policy's streaming heads are not known, or not heads of full-attention layers."""
    if policy.streaming and not policy.config.streaming_heads:
        raise ValueError(f"policy {policy.name!r}: no profile has said which heads stream (policies.with_heads)")
    heads = {layer.index: keys.keys.shape[1] for keys, layer in zip(context.layers, context.cache.sparse_layers)}
    for layer, head in policy.config.streaming_heads:
        if head >= heads.get(layer, 0):
            raise ValueError(f"policy {policy.name!r}: layer {layer} has no KV head {head} with full attention; this model has "
                             f"{max(heads.values())} in layers {', '.join(map(str, heads))}")


@torch.no_grad()
def simulate(model, context: Context, questions: Sequence[Question], policy: Policy) -> tuple[list[Tensor], Found]:
    """Ask questions on a context, all in one forward.

    Args:
        model: patched (any settings).

    Returns:
        Log-probabilities of each gold answer, [answer tokens, vocabulary] fp64 on the model's device, each given the gold
        tokens before, and what was read and gathered.

    Raises:
        DenseDecodeError: decoding would be dense. FloatingPointError: the model's logits are not finite.
    """
    asked = [question.prompt + question.answer[:-1] for question in questions]
    width = max(map(len, asked))
    # Padding stands at the end, where no token sees it.
    ids = torch.tensor([tokens + tokens[-1:] * (width - len(tokens)) for tokens in asked], device=model.device)
    keep = width - min(len(question.prompt) for question in questions) + 1
    simulation = Simulation(context, policy, len(questions))
    logits = simulation.forward(model, ids, keep, [len(tokens) for tokens in asked])
    simulation.close()
    out = []
    for row, question in zip(logits, questions):
        first = len(question.prompt) - 1 - (width - keep)
        own = row[first:first + len(question.answer)].double()
        out.append(torch.log_softmax(own, -1))
    if not bool(torch.stack([torch.isfinite(part).all() for part in out]).all()):
        raise FloatingPointError(f"the model's logits are not finite (policy {policy.name})")
    return out, simulation.found


@torch.no_grad()
def simulate_generation(model, tokenizer, context: Context, question: FreeQuestion, policy: Policy) -> tuple[str, Found]:
    """Answer a question greedily, a forward a token, as `generated.generate_answer` does with the cache's own step.

    Raises:
        DenseDecodeError: decoding would be dense.
    """
    simulation = Simulation(context, policy)
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = set(ends if isinstance(ends, (list, tuple)) else [ends])
    tokens: list[int] = []
    ids = torch.tensor([question.prompt], device=model.device)
    while len(tokens) < question.max_new_tokens:
        ids = simulation.forward(model, ids, 1)[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(ids))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if tokens[-1] in ends or any(stop in text.lstrip("\n") for stop in question.stop):
            break
    return cut(tokenizer.decode(tokens, skip_special_tokens=True), question.stop), simulation.found
