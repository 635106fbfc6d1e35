"""Sparse answers in one forward: what every token of a question and its answer would read is computed for all of them at once.

The sparse step is a loop: token by token, round by round. For measuring what it loses, the loop is not needed. A layer's true
attention masses are computed once for all tokens, each token's selection follows from them and from the digest's estimates
(`choosing.py`), and attention is a masked softmax. The selection is the cache's own (tests/evaluation/test_simulated.py holds
it to that), any ranking can be tried, also ones that have no implementation, and the mass that was really gathered costs
nothing.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.handle import Pending
from ..cache.layer import PSALayer
from ..cache.psa_cache import PSACache
from ..compat import CACHE_ARGUMENT
from .choosing import Seen, choose
from .decoding import DenseDecodeError, last_logits
from .estimates import Estimator, LayerKeys, tail_start
from .generated import FreeQuestion, cut
from .policies import Policy
from .reuse import Reuse
from .samples import Question
from .stored import Stored

# fp32 logits held at a time; results do not depend on it.
LOGIT_ELEMENTS = 1 << 28


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


class Found:
    """What the full-attention layers of one policy read and gathered, token by token (those of padding are left out)."""

    def __init__(self):
        self._parts: dict[int, list[tuple]] = {}
        self.digest_bytes = 0.0                             # a token of one KV head, for 16-bit keys
        self.dense_bytes = 0.0                              # of its key and value, likewise
        self.block_size = 0

    def record(self, layer: int, *figures: Tensor) -> None:
        """read [B, H], held [B], mass [B, H, G], coverage [B, H, G], scanned [B, H] and kv_bytes [B, H] of B tokens, see
        `Layer`."""
        self._parts.setdefault(layer, []).append(figures)

    @classmethod
    def joined(cls, found: Sequence[Found]) -> Found:
        """Several of the same policy and model as one."""
        whole = cls()
        whole.__dict__.update({**found[0].__dict__, "_parts": {}})
        for one in found:
            for layer, parts in one._parts.items():
                whole._parts.setdefault(layer, []).extend(parts)
        return whole

    def layers(self) -> list[Layer]:
        """The figures of each layer, in the order of the model's full-attention layers."""
        return [Layer(*(torch.cat(parts) for parts in zip(*self._parts[index]))) for index in sorted(self._parts)]

    def stats(self) -> dict:
        """Figures like those of `PSACache.stats()`, and what only a simulation knows. Synchronises.

        Returns:
            blocks_read and blocks_held (summed over tokens, KV heads and layers), kv_fraction, coverage (estimated) and
            coverage_true (means), hbm_fraction (bytes read of digests, keys and values over those of all keys and values, at
            16 bits), selected (share of tokens and KV heads that ranked blocks), sparse_steps (tokens).
        """
        layers = self.layers()
        heads = layers[0].read.shape[1]
        figures = torch.stack([torch.stack([
            layer.read.double().sum(), layer.held.double().sum() * heads, layer.scanned.double().sum(),
            layer.kv_bytes.double().sum(), layer.coverage.double().mean(), layer.mass.double().mean(),
            (layer.scanned > 0).double().mean()]) for layer in layers])
        read, held, scanned, kv_bytes = figures[:, :4].sum(0).tolist()
        coverage, mass, selected = figures[:, 4:].mean(0).tolist()
        hbm = (kv_bytes + scanned * self.digest_bytes) / (held * self.block_size * self.dense_bytes)
        return {"sparse_steps": layers[0].held.shape[0], "blocks_read": read, "blocks_held": held, "kv_fraction": read / held,
                "hbm_fraction": hbm, "coverage": coverage, "coverage_true": mass, "selected": selected}


@dataclass(frozen=True)
class Layer:
    """read [B, H] and held [B]: blocks (those of a streaming head: tokens over tokens a block). mass [B, H, G]: true share of the
    attention mass that was gathered (sinks of the model count as gathered; from the keys as they are stored); coverage: the same
    as estimated (of a reused selection: of the one that the token would have made itself). scanned [B, H]: tokens whose digests
    were read. kv_bytes [B, H]: bytes of the keys and values that were read."""

    read: Tensor
    held: Tensor
    mass: Tensor
    coverage: Tensor
    scanned: Tensor
    kv_bytes: Tensor


@dataclass(frozen=True)
class Places:
    """Which blocks there are at each of B tokens: lengths, total and start (first block of the always-read tail) [B]; exists and
    forced bool [B, columns]."""

    lengths: Tensor
    total: Tensor
    start: Tensor
    exists: Tensor
    forced: Tensor


class SimulatedLayer:
    """Attention of one layer under a policy; takes the place of a PSALayer's `attend` in a fork of the cache.

    Args:
        layer: the context's keys, values and digests.
        found: where to say what was read.

    Attributes:
        counted: set before a forward; takes a slice of its rows and says which of their tokens are no padding, as indices into
            the flattened [rows, T].
    """

    def __init__(self, layer: LayerKeys, policy: Policy, index: int, found: Found):
        self.layer, self.policy, self.found, self.index = layer, policy, found, index
        self.dense = policy.reads_all or index in policy.config.dense_layers
        self.estimator = Estimator(policy, layer.keys.shape[-1])
        mine = [head for place, head in policy.config.streaming_heads if place == index]
        self.streaming: Tensor | None = None                # bool [H]
        if mine:
            self.streaming = torch.zeros(layer.keys.shape[1], dtype=torch.bool)
            self.streaming[mine] = True
            self.streaming = self.streaming.to(layer.keys.device)
        self.stored = Stored(policy, layer, self.streaming)
        self.counted: Callable[[int, int], Tensor] | None = None
        self.keys = self.values = None                      # the rows' own tokens, [R, H, A, D]
        self.reuse = Reuse(policy.config) if policy.config.reuse > 1 else None

    def attend(self, query, pending: Pending, valid, mask, scaling: float, softcap: float, sinks, dense_step):
        """See `PSALayer.attend`: query [R, Hq, T, D] -> [R, Hq, T, Dv]."""
        if mask is not None or valid is not None:
            raise NotImplementedError("this model attends to new tokens by a pattern that a simulated answer does not know; "
                                      "measure it with the cache's own step")
        self.keys = pending.keys if self.keys is None else torch.cat([self.keys, pending.keys], 2)
        self.values = pending.values if self.values is None else torch.cat([self.values, pending.values], 2)
        rows, tokens = query.shape[0], query.shape[2]
        size = query.shape[1] * tokens * (self.layer.length + self.keys.shape[2])
        step = max(1, LOGIT_ELEMENTS // size)
        if self.reuse is not None:                          # which knows the rows by their numbers
            step = rows
        parts = [self._attend(query[low:low + step], slice(low, low + step), self.counted(low, min(low + step, rows)), scaling,
                              softcap, sinks) for low in range(0, rows, step)]
        return torch.cat(parts)

    def _attend(self, query, rows: slice, counted, scaling, softcap, sinks):
        config, layer = self.policy.config, self.layer
        P, N0 = config.block_size, layer.length
        new_keys, new_values = self.keys[rows].float(), self.values[rows].float()
        R, Hq, T, D = query.shape
        H, A = new_keys.shape[1:3]
        G, B = Hq // H, R * T
        sinks = None if sinks is None else sinks.float().view(H, G)
        q = query.float().mul(scaling).unflatten(1, (H, G)).permute(0, 3, 1, 2, 4)                       # [R, T, H, G, D]
        columns = -(-(N0 + A) // P)
        places = self._places(N0 + A - T, T, R, columns, q.device)
        logits = torch.full((B, H, G, columns * P), -math.inf, device=q.device)
        logits[..., :N0] = torch.einsum("bhgd,hnd->bhgn", q.flatten(0, 1), self.stored.keys.float())
        own = torch.einsum("rthgd,rhad->rthga", q, new_keys)
        place = torch.arange(A - T, A, device=q.device)
        logits[..., N0:N0 + A] = own.flatten(0, 1)
        mending = None
        if config.kv_bits < 16:
            exact = places.forced[:, None].expand(-1, H, -1)
            exact = exact if self.streaming is None else exact | self.streaming[:, None]
            tail = tail_start(N0 + A - T, config, self.estimator.unit_blocks)
            mending = self.stored.mend_logits(logits, q, exact, new_keys, new_values, tail)
        if softcap:
            logits[..., :N0 + A] = softcap * torch.tanh(logits[..., :N0 + A] / softcap)
        ahead = torch.arange(A, device=q.device) > place[:, None]                                       # [T, A]
        logits[..., N0:N0 + A].masked_fill_(ahead.repeat(R, 1)[:, None, None], -math.inf)

        masses = logits.unflatten(-1, (columns, P)).logsumexp(-1)
        everything = masses.logsumexp(-1)
        coverage = None
        if self.dense:
            chosen, scanned = places.exists[:, None].expand(-1, H, -1), torch.zeros(B, H, dtype=torch.long, device=q.device)
        else:
            chosen, coverage, scanned = self._choose(q, masses, places, softcap, sinks, new_keys)
        read = chosen.sum(-1)
        whole, packed = self.stored.block_bytes()
        kv_bytes = read * packed + (chosen & places.forced[:, None]).sum(-1) * (whole - packed)
        captured = torch.where(chosen[:, :, None], masses, -math.inf).logsumexp(-1)
        if self.streaming is not None:
            near = self._near(places.lengths, columns * P)
            logits.masked_fill_(~near[:, None, None] & self.streaming[:, None, None], -math.inf)
            chosen = chosen | self.streaming[:, None]
            captured = torch.where(self.streaming[:, None], logits.logsumexp(-1), captured)
            tokens = near.sum(-1, keepdim=True)
            read = torch.where(self.streaming, tokens / P, read)
            kv_bytes = torch.where(self.streaming, tokens * (whole // P), kv_bytes)
            scanned = scanned.masked_fill(self.streaming, 0)
            if coverage is not None:
                coverage = coverage.masked_fill(self.streaming[:, None], 1.0)
        self._record(counted, read, places.total, captured, everything, coverage, sinks, scanned, kv_bytes)

        weights = logits.unflatten(-1, (columns, P)).masked_fill_(~chosen[:, :, None, :, None], -math.inf).flatten(-2)
        weights = weights.sub_(captured[..., None]).exp_()
        output = torch.einsum("bhgn,hnd->bhgd", weights[..., :N0], self.stored.values.float()).unflatten(0, (R, T))
        output += torch.einsum("rthga,rhad->rthgd", weights[..., N0:N0 + A].unflatten(0, (R, T)), new_values)
        if mending is not None:
            output += mending.output(weights, R)
        if sinks is not None:
            output = output * torch.sigmoid(captured - sinks)[..., None].unflatten(0, (R, T))
        return output.permute(0, 2, 3, 1, 4).flatten(1, 2).to(query.dtype)

    def _places(self, first: int, tokens: int, rows: int, columns: int, device) -> Places:
        """Of `tokens` tokens from place `first` on, of all rows."""
        config, P, ub = self.policy.config, self.policy.config.block_size, self.estimator.unit_blocks
        last = torch.arange(first, first + tokens, device=device).repeat(rows)
        start = torch.minimum(last // (P * ub) * ub, last // P - config.recent_blocks).clamp(min=config.sink_blocks)
        block = torch.arange(columns, device=device)
        exists = block <= (last // P)[:, None]
        forced = exists & ((block < config.sink_blocks) | (block >= start[:, None]))
        return Places(last + 1, last // P + 1, start, exists, forced)

    def _near(self, lengths: Tensor, columns: int) -> Tensor:
        """Tokens that a streaming head reads, bool [B, columns]."""
        place, config = torch.arange(columns, device=lengths.device), self.policy.config
        near = (place < config.streaming_sink) | (place >= lengths[:, None] - config.streaming_window)
        return near & (place < lengths[:, None])

    def _choose(self, q, masses, places: Places, softcap, sinks, new_keys):
        """Blocks that are attended to [B, H, N], estimated coverage [B, H, G], tokens whose digests were read [B, H]."""
        estimator, forced, H = self.estimator, places.forced, masses.shape[1]
        forced_mass = torch.where(forced[:, None, None], masses, -math.inf).logsumexp(-1)
        estimate = estimator.score(q, self.layer, new_keys, masses, softcap)
        ranked = estimate.shape[-1]
        scanned = ((places.lengths - 1) // estimator.unit_tokens * estimator.unit_tokens)[:, None].expand(-1, H)
        if ranked == 0:
            return forced[:, None].expand(-1, H, -1), torch.ones_like(forced_mass), torch.zeros_like(scanned)
        seen = Seen(estimate, masses[..., :ranked], forced_mass, sinks, places.lengths, places.start, forced.sum(1), places.total)
        chosen, coverage = choose(self.policy, seen)
        if self.reuse is not None:
            chosen, fresh = self.reuse(chosen, places.start, q)
            scanned = scanned * fresh
        chosen = torch.nn.functional.pad(chosen, (0, masses.shape[-1] - ranked))
        return chosen | forced[:, None], coverage, scanned

    def _record(self, counted, read, total, captured, everything, coverage, sinks, scanned, kv_bytes) -> None:
        if sinks is not None:
            captured, everything = torch.logaddexp(captured, sinks), torch.logaddexp(everything, sinks)
        found = self.found
        mass = torch.exp(captured - everything).clamp(max=1.0)
        coverage = torch.ones_like(mass) if coverage is None else coverage
        figures = read, total, mass, coverage, scanned, kv_bytes
        found.record(self.index, *(part.index_select(0, counted) for part in figures))
        found.digest_bytes, found.block_size = self.estimator.bytes_per_token(), self.policy.config.block_size
        found.dense_bytes = self.stored.block_bytes()[0] / found.block_size


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
