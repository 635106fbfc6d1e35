"""Tasks x policies on a model: every context is prefilled once, and every policy answers the same questions on it."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..cache.backend import use_kernels
from ..cache.psa_cache import PSACache
from ..config import FORK_FIELDS, PSAConfig
from ..patches.model import patched
from .cells import BLOCK_BINS, MASS_BINS, AnswerScore, Cell, CellFile, sample_id
from .decoding import answers, divergence, prefill
from .estimates import DENSE_BYTES, Estimator
from .found import Found
from .generated import FreeQuestion, generate_answer
from .policies import Policy, Profile, parse_policy, with_heads
from .samples import Question, Sample
from .simulated import Context, check_heads, simulate, simulate_generation
from .windowed import sees_window, windowed_prefill


@dataclass(frozen=True)
class Progress:
    """Where an evaluation is: cells done and in all (those of earlier runs too), seconds since it began and still to go."""

    done: int
    total: int
    elapsed: float
    remaining: float | None
    task: str
    length: int
    seed: int
    policy: str


class Simulator:
    """Answers of one context by simulation (`simulated.py`).

    The context is prefilled once, and once more for each choice of streaming heads whose window it doesn't fit in.

    Args:
        context_ids: token ids. prefill_chunk: tokens a prefill forward; None: all at once.
        config: of the first policy that will be asked for.
    """

    simulated = True

    def __init__(self, model, tokenizer, context_ids: tuple[int, ...], prefill_chunk: int | None, config: PSAConfig):
        self.model, self.tokenizer, self.context_ids, self.prefill_chunk = model, tokenizer, context_ids, prefill_chunk
        self.context = Context(prefill(model, context_ids, PSAConfig(min_context=0), prefill_chunk))
        self.windowed: dict[tuple, Context] = {}

    def teacher_forced(self, questions: Sequence[Question], policy: Policy) -> tuple[list[torch.Tensor], dict]:
        """Log-probabilities of each gold answer, and fields of `Cell`."""
        log_probs, found = simulate(self.model, self._context(policy), questions, policy)
        return log_probs, self._fields([found], policy)

    def generated(self, questions: Sequence[FreeQuestion], policy: Policy) -> tuple[list[str], dict]:
        """Answers as text, and fields of `Cell`."""
        context = self._context(policy)
        done = [simulate_generation(self.model, self.tokenizer, context, question, policy) for question in questions]
        return [text for text, _ in done], self._fields([found for _, found in done], policy)

    def _context(self, policy: Policy) -> Context:
        config = policy.config
        if not sees_window(config, len(self.context_ids)):
            return self.context
        check_heads(policy, self.context)
        key = config.streaming_heads, config.streaming_sink, config.streaming_prefill_window
        if key not in self.windowed:
            self.windowed[key] = Context(windowed_prefill(self.model, self.context_ids, config, self.prefill_chunk))
        return self.windowed[key]

    def _fields(self, found: list[Found], policy: Policy) -> dict:
        whole = found[0] if len(found) == 1 else Found.joined(found)
        stats = whole.stats()
        mass, layer_kv, head_mass, layer_blocks = per_layer(whole, with_blocks=policy.digest == "oracle")
        return {**{name: stats[name] for name in ("blocks_read", "blocks_held", "hbm_fraction", "coverage")}, "mass": mass,
                "layer_kv": layer_kv, "head_mass": head_mass, "layer_blocks": layer_blocks}


class Decoder:
    """Answers of one context by the cache's own sparse step, for policies that it can decode by."""

    simulated = False

    def __init__(self, model, tokenizer, context_ids: tuple[int, ...], prefill_chunk: int | None, config: PSAConfig):
        self.model, self.tokenizer, self.context_ids, self.prefill_chunk = model, tokenizer, context_ids, prefill_chunk
        self.cache = prefill(model, context_ids, config, prefill_chunk)

    def teacher_forced(self, questions: Sequence[Question], policy: Policy) -> tuple[list[torch.Tensor], dict]:
        readings = answers(self.model, self._cache(policy), questions, dense=policy.dense)
        return [reading.log_probs for reading in readings], self._fields([reading.stats for reading in readings], policy)

    def generated(self, questions: Sequence[FreeQuestion], policy: Policy) -> tuple[list[str], dict]:
        cache = self._cache(policy)
        done = [generate_answer(self.model, self.tokenizer, cache, question, policy.dense) for question in questions]
        return [answer.text for answer in done], self._fields([answer.stats for answer in done], policy)

    def _cache(self, policy: Policy) -> PSACache:
        # Policies that differ in what is stored need a prefill of their own; dense attention reads what there is, if that is exact.
        same = is_exact(self.cache.config) if policy.dense else storage(self.cache.config) == storage(policy.config)
        if not same:
            self.cache = None                               # its memory is free again before the next one takes any
            self.cache = prefill(self.model, self.context_ids, policy.config, self.prefill_chunk)
        if policy.dense or self.cache.config == policy.config:
            return self.cache
        return self.cache.fork(**{name: getattr(policy.config, name) for name in FORK_FIELDS})

    def _fields(self, stats: list[dict], policy: Policy) -> dict:
        together = list({id(entry): entry for entry in stats}.values())
        read, held = (sum(entry[name] for entry in together) for name in ("blocks_read", "blocks_held"))
        if policy.dense:
            return {"blocks_read": 1.0, "blocks_held": 1.0, "hbm_fraction": 1.0, "coverage": 1.0}
        for entry in together:
            if entry["reading"] != policy.reading:
                raise ValueError(f"policy {policy.name!r} was decoded by {entry['reading']!r} where {policy.reading!r} was to "
                                 "be expected; see the warnings of the cache for what its kernels lack")
        fields = {"blocks_read": read, "blocks_held": held, "hbm_fraction": None,
                  "coverage": sum(entry["coverage"] for entry in together) / len(together)}
        if not is_exact(policy.config) or policy.config.reuse > 1:       # how many bytes these read, only a simulation knows
            return fields
        layer = self.cache.sparse_layers[0]
        digest = Estimator(policy, layer.key_dim).bytes_per_token() / (DENSE_BYTES * (layer.key_dim + layer.value_dim))
        return {**fields, "hbm_fraction": read / held + digest}


def storage(config: PSAConfig) -> dict:
    """The fields that forks of a cache share."""
    return {name: value for name, value in config.to_dict().items() if name not in FORK_FIELDS}


def is_exact(config: PSAConfig) -> bool:
    """Whether a cache holds every key and value as the model made it."""
    return config.kv_bits == 16 and not config.streaming_heads


def as_decoded(policy: Policy, model) -> Policy:
    """A policy with the reading that the cache's own step has on this model: "cut" by the kernels, "rounds" by the reference.

    Raises:
        ValueError: a policy that no cache can decode by, or that says how blocks are to be read.
    """
    if not policy.real:
        raise ValueError(f"policy {policy.name!r} exists in simulation only; leave it out, or leave out --real")
    if policy.reading_given:
        raise ValueError(f"policy {policy.name!r} says how blocks are read, which the cache's own step decides by itself; "
                         f"leave out {policy.reading!r}, or leave out --real")
    if policy.dense:
        return policy
    kernels = use_kernels(policy.config, model.device, model.dtype)
    return dataclasses.replace(policy, reading="cut" if kernels else "rounds")


def run_grid(model, tokenizer, work: Sequence[tuple[int, Sample]], policies: Sequence[Policy], cells: CellFile,
             prefill_chunk: int | None = None, simulated: bool = True, deadline: float | None = None,
             progress: Callable[[Progress], None] | None = None, heads: Profile | None = None) -> bool:
    """Measure every policy on every sample that `cells` doesn't hold yet.

    Args:
        work: (length, sample) in the order in which they are measured; samples with the same context share its prefill.
        policies: "dense" need not be among them, but its cells are measured and kept too.
        prefill_chunk: tokens a prefill forward; None: all at once.
        simulated: compute what policies read and lose for all tokens at once; False: decode with the cache's own sparse step.
        deadline: `time.monotonic()` after which nothing new is begun.
        progress: called before each cell.
        heads: says which KV heads stream in policies with a share of them; see `policies.with_heads`.

    Returns:
        Whether everything is done; False: the deadline came first.

    Raises:
        ValueError: cells that were measured with other settings, policies that `as_decoded` refuses without `simulated`;
            nothing has been measured then. Or streaming heads that are not known, or not the model's, or a step of the cache
            that read otherwise than it was to.
        DenseDecodeError, FloatingPointError: see `simulate` and `answer`; finished cells are kept.
    """
    policies = with_heads(policies, heads)
    if not simulated:
        policies = [as_decoded(policy, model) for policy in policies]
    dense = next((policy for policy in policies if policy.dense), None) or parse_policy("dense")
    policies = [dense, *(policy for policy in policies if policy is not dense)]
    ahead = [(length, sample, [p for p in policies if not cells.done(p, sample, length, simulated)]) for length, sample in work]
    total, todo = len(work) * len(policies), sum(len(left) for _, _, left in ahead)
    ahead = [entry for entry in ahead if entry[2]]
    begun, measured, first = time.monotonic(), 0, policies[-1 if len(policies) == 1 else 1].config
    late = lambda: deadline is not None and time.monotonic() >= deadline  # noqa: E731
    with patched(model, PSAConfig(min_context=0)):
        while ahead:
            if late():
                return False
            context_ids = ahead[0][1].context
            sharing = [entry for entry in ahead if entry[1].context == context_ids]
            ahead = [entry for entry in ahead if entry[1].context != context_ids]
            engine = None
            for length, sample, left in sharing:
                reference = None
                for policy in [dense, *(p for p in left if p is not dense)]:
                    if late():
                        return False
                    if progress is not None:
                        elapsed = time.monotonic() - begun
                        progress(Progress(total - todo + measured, total, elapsed,
                                          elapsed / measured * (todo - measured) if measured else None,
                                          sample.task, length, sample.seed, policy.name))
                    if engine is None:
                        engine = (Simulator if simulated else Decoder)(model, tokenizer, context_ids, prefill_chunk, first)
                    cell, reference = measure(engine, sample, length, policy, reference)
                    if policy in left:
                        cells.add(cell)
                        measured += 1
    return True


def measure(engine, sample: Sample, length: int, policy: Policy, reference: list | None) -> tuple[Cell, list]:
    """One cell, and what later policies are compared with (`reference`: that of dense attention; None: this is it)."""
    begun = time.monotonic()
    if isinstance(sample.questions[0], FreeQuestion):
        texts, fields = engine.generated(sample.questions, policy)
        reference = texts if reference is None else reference
        scores = tuple(AnswerScore(question.name, getattr(question, "depth", None), 1, 0, int(text == dense), (), None,
                                   question.score(text), text)
                       for question, text, dense in zip(sample.questions, texts, reference))
    else:
        log_probs, fields = engine.teacher_forced(sample.questions, policy)
        reference = log_probs if reference is None else reference
        scores = tuple(score(question, ours, dense) for question, ours, dense in zip(sample.questions, log_probs, reference))
    cell = Cell(policy.name, policy.to_dict(), sample.task, length, sample.seed, sample_id(sample), len(sample.context), scores,
                **fields, simulated=engine.simulated, seconds=round(time.monotonic() - begun, 4))
    return cell, reference


def score(question: Question, ours: torch.Tensor, dense: torch.Tensor) -> AnswerScore:
    """A teacher-forced answer from its log-probabilities and those of dense attention, [answer tokens, vocabulary] each."""
    gold = torch.tensor(question.answer, device=ours.device)
    guess = ours.argmax(-1)
    counts = torch.stack([(guess == gold).sum(), (guess == dense.argmax(-1)).sum()]).double()
    loss = -ours.gather(-1, gold[:, None]).mean()
    right, agreed, loss, *kl = torch.cat([counts, loss[None], divergence(dense, ours)]).tolist()
    return AnswerScore(question.name, question.depth, len(question.answer), int(right), int(agreed),
                       tuple(round(value, 9) for value in kl), loss)


def per_layer(found: Found, with_blocks: bool) -> tuple:
    """mass, layer_kv, head_mass and layer_blocks of a `Cell`."""
    layers = found.layers()
    mass = torch.stack([layer.mass.float().mean(-1) for layer in layers])                           # [layers, tokens, KV heads]
    counts = torch.histc(mass, MASS_BINS, 0.0, 1.0).tolist()
    share = torch.stack([(layer.read / layer.held[:, None]).float().flatten() for layer in layers])
    blocks = ()
    if with_blocks:
        blocks = tuple(_sparse(torch.histc(row, BLOCK_BINS, 0.0, 1.0).tolist()) for row in share)
    heads = tuple(tuple(round(value, 5) for value in layer) for layer in mass.mean(1).tolist())
    return _sparse(counts), tuple(round(value, 5) for value in share.mean(-1).tolist()), heads, blocks


def _sparse(counts: Sequence[float]) -> dict[int, int]:
    return {index: int(count) for index, count in enumerate(counts) if count}
