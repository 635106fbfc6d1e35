"""Simulated answers against the cache's own sparse step: the same blocks, the same logits, for every policy it can decode by."""
from __future__ import annotations

import math

import pytest
import torch

from hf_sparse import PSAConfig, patched
from hf_sparse.evaluation import estimates, simulated_layer
from hf_sparse.evaluation.choosing import Seen, choose
from hf_sparse.evaluation.decoding import DenseDecodeError, answer, prefill
from hf_sparse.evaluation.estimates import Estimator, LayerKeys
from hf_sparse.evaluation.generated import FreeQuestion, generate_answer
from hf_sparse.evaluation.policies import parse_policy
from hf_sparse.evaluation.samples import Question
from hf_sparse.evaluation.simulated import Context, Simulation, simulate, simulate_generation
from hf_sparse.patches import support
from tests.models import get_model

TOKENS = 371                                                # no multiple of any block or unit; 13 tokens before a unit closes


def draw(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def question(name: str, prompt: int, answer_tokens: int, seed: int) -> Question:
    ids = draw(prompt + answer_tokens, seed)
    return Question(name, ids[:prompt], ids[prompt:])


# Long enough that blocks and units of all digests close on the way, and of different lengths.
QUESTIONS = (question("a", 9, 3, 1), question("c", 2, 17, 3))


def both(family: str, text: str, base: PSAConfig, questions=QUESTIONS):
    """((log_probs, stats) by the cache's step, the same simulated) of the questions together."""
    model, policy = get_model(family), parse_policy(text, base)
    context = draw(TOKENS, 0)
    with patched(model, base):
        cache = prefill(model, context, PSAConfig(block_size=base.block_size))
        ours, found = simulate(model, Context(cache), questions, policy)
        own = prefill(model, context, policy.config)
        real = [answer(model, own, one) for one in questions]
    read, held = (sum(reading.stats[name] for reading in real) for name in ("blocks_read", "blocks_held"))
    return ([reading.log_probs for reading in real], read, held), (ours, found)


BASE = PSAConfig(block_size=8, min_context=0, threshold=0.7, round_blocks=2)
POLICIES = (
    "psa/rounds", "psa@0.95/rounds", "psa/rounds/round_blocks=1/round_growth=1", "psa/rounds/group_stop=min", "psa/key_bits/rounds",
    "psa/key_bits/key_bits=1/rounds", "psa/key_planes/rounds", "psa/rounds/group_reduction=max", "psa/rounds/max_blocks=21",
    "psa@1.0/rounds/max_blocks=21", "psa/rounds/min_blocks=25",
    "psa/rounds/min_blocks=0.4",
    "psa/rounds/sink_blocks=2/recent_blocks=3", "psa/rounds/sink_blocks=0/recent_blocks=0", "psa/cuboid_mean/window",
    "psa/min_max/window/stop_window=3", "psa/centroid/nleft@0.9", "psa/cuboid_mean/paper@0.95", "psa/channel_codes/window",
    "psa/channel_codes/nleft/group_stop=min", "topk@0.3", "topk@17", "topk@0.4/min_max", "topp@0.6/rounds", "topp@0.6/cuboid_mean",
    "psa/block_size=16/rounds", "quest@0.3/block_size=8", "arkvale@0.5",
)  # fmt: skip


@pytest.mark.parametrize("text", POLICIES)
def test_a_simulation_reads_and_answers_as_the_cache_does(text):
    (real, read, held), (answers, found) = both("llama", text, BASE)
    stats = found.stats()
    assert (stats["blocks_read"], stats["blocks_held"]) == (read, held)
    assert read < held
    for ours, theirs in zip(answers, real, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "text"),
    [("gemma2", "psa/rounds"), ("gpt_oss", "psa/rounds"), ("gpt_oss", "topp@0.6/rounds"), ("qwen3", "psa/cuboid_mean/window"),
     ("gemma3", "psa/rounds"), ("olmo2", "psa/rounds")],
)  # fmt: skip
def test_other_models_too(family, text):
    (real, read, held), (answers, found) = both(family, text, BASE)
    stats = found.stats()
    assert (stats["blocks_read"], stats["blocks_held"]) == (read, held) and read < held
    for ours, theirs in zip(answers, real, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


# -- one context, many policies -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """(model, context of a prefilled cache)"""
    model = get_model("llama")
    with patched(model, BASE):
        yield model, Context(prefill(model, draw(TOKENS, 0), PSAConfig(block_size=8)))


def run(llama, text: str, questions=QUESTIONS):
    model, context = llama
    return simulate(model, context, questions, parse_policy(text, BASE))


def test_dense_is_dense(llama):
    model, context = llama
    answers, found = run(llama, "dense")
    for ours, one in zip(answers, QUESTIONS, strict=True):
        assert torch.allclose(ours, answer(model, context.cache, one, dense=True).log_probs, atol=1e-4)
    stats = found.stats()
    assert stats["kv_fraction"] == stats["hbm_fraction"] == 1.0
    assert stats["coverage_true"] == pytest.approx(1.0, abs=1e-6)


def test_results_depend_neither_on_pieces_nor_on_what_was_asked_before(llama, monkeypatch):
    first, found = run(llama, "psa")
    run(llama, "topk@0.2/cuboid_mean")
    monkeypatch.setattr(simulated_layer, "LOGIT_ELEMENTS", 1)
    monkeypatch.setattr(estimates, "PIECE_ELEMENTS", 1)
    again, pieces = run(llama, "psa")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, again, strict=True))
    assert found.stats() == pytest.approx(pieces.stats(), rel=1e-5)


@pytest.mark.parametrize("policy", ["psa", "topp"])
def test_a_threshold_of_one_reads_up_to_its_limit(llama, policy):
    _, rounds = run(llama, f"{policy}@1.0/rounds/max_blocks=21")
    _, cut = run(llama, f"{policy}@1.0/cut/max_blocks=21")
    for layer in (*rounds.layers(), *cut.layers()):
        assert (layer.read == 21).all()
    everything = run(llama, f"{policy}@1.0/dense_layers=1")[1].stats()
    assert everything["kv_fraction"] == 1.0


@pytest.mark.parametrize("reading", ["rounds", "cut"])
@pytest.mark.parametrize("policy", ["psa", "topp"])
def test_all_of_the_mass_is_every_block(policy, reading):
    """Also where the last ones hold less than a float can tell from nothing."""
    masses = 40 * torch.randn(2, 2, 3, 45, generator=torch.Generator().manual_seed(0))
    each = lambda number: torch.full((2,), number)  # noqa: E731
    seen = Seen(masses, masses, torch.zeros(2, 2, 3), None, lengths=each(360), start=each(42), forced=each(4), total=each(45))
    chosen, _ = choose(parse_policy(f"{policy}@1.0/{reading}/max_blocks=38", BASE), seen)
    assert (chosen.sum(-1) == 38 - 4).all()


def test_questions_of_one_batch_are_answered_as_alone(llama):
    together, _ = run(llama, "psa")
    for one, ours in zip(QUESTIONS, together, strict=True):
        alone, _ = run(llama, "psa", (one,))
        assert torch.allclose(alone[0], ours, atol=1e-5)


def test_generation_is_that_of_the_cache(llama):
    model, context = llama
    tokenizer = Words()
    free = FreeQuestion("q", QUESTIONS[0].prompt, ("x",), "qa_f1", 9)
    policy = parse_policy("psa/rounds", BASE)
    text, found = simulate_generation(model, tokenizer, context, free, policy)
    own = prefill(model, draw(TOKENS, 0), policy.config)
    theirs = generate_answer(model, tokenizer, own, free)
    assert text == theirs.text and len(theirs.tokens) == 9
    assert found.stats()["blocks_read"] == theirs.stats["blocks_read"]
    stop = FreeQuestion("q", QUESTIONS[0].prompt, ("x",), "qa_f1", 9, (text.split()[3],))
    assert simulate_generation(model, tokenizer, context, stop, policy)[0].split() == text.split()[:3]


class Words:
    """A tokenizer whose tokens are numbers, one a word."""

    eos_token_id, pad_token_id = None, 0

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(f"<{token}> " for token in tokens)


# -- what is gathered -----------------------------------------------------------------------------------------------


def shares(llama, question: Question):
    """True share of each block in the attention of layer 0, mean over the group [tokens, H, N], from the model's weights."""
    model, context = llama
    keys = context.layers[0].keys[0]
    states = {}
    module = model.model.layers[0].self_attn
    hook = module.register_forward_pre_hook(lambda m, args, kwargs: states.update(kwargs), with_kwargs=True)
    try:
        run(llama, "dense", (question,))
    finally:
        hook.remove()
    hidden, (cos, sin) = states["hidden_states"], states["position_embeddings"]
    rotate = lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)  # noqa: E731
    heads = lambda x: x.view(1, hidden.shape[1], -1, keys.shape[-1]).transpose(1, 2)  # noqa: E731
    query, key = heads(module.q_proj(hidden)), heads(module.k_proj(hidden))
    query, key = (x * cos[:, None] + rotate(x) * sin[:, None] for x in (query, key))
    keys = torch.cat([keys, key[0]], 1)
    group = query.shape[1] // keys.shape[0]
    logits = torch.einsum("hqd,hkd->hqk", query[0], keys.repeat_interleave(group, 0)) * module.scaling
    count = logits.shape[-1]
    logits = logits.masked_fill(torch.arange(count) > torch.arange(TOKENS, count)[:, None], -math.inf)
    weights = torch.nn.functional.pad(logits.softmax(-1), (0, -count % 8)).unflatten(-1, (-1, 8)).sum(-1)
    return weights.unflatten(0, (-1, group)).mean(1).transpose(0, 1)


@torch.no_grad()
def test_the_oracle_reads_the_fewest_blocks_that_hold_the_mass(llama):
    one = QUESTIONS[1]
    share = shares(llama, one)
    _, found = run(llama, "oracle@0.8", (one,))
    layer = found.layers()[0]
    for token in range(layer.read.shape[0]):
        last = (TOKENS + token) // 8
        forced = [0, *range(last - 1, last + 1)]
        for head in range(share.shape[1]):
            rest = torch.tensor([share[token, head, n] for n in range(1, last - 1)]).sort(descending=True).values
            mass = share[token, head, forced].sum() + torch.cat([torch.zeros(1), rest.cumsum(0)])
            needed = int((mass < 0.8).sum())
            # Whole bins of 3 %, so perhaps some more of nearly the same weight.
            read = int(layer.read[token, head]) - len(forced)
            assert needed <= read <= needed + 2 and layer.mass[token, head].mean() >= 0.8 - 1e-5


@pytest.mark.parametrize("text", ["psa/cuboid_mean/true@0.85", "psa/true@0.85", "psa/centroid/true@0.85"])
def test_the_true_stop_gathers_the_mass_whatever_the_ranking(llama, text):
    _, found = run(llama, text)
    for layer in found.layers():
        gathered = layer.mass.mean(-1)
        assert (gathered >= 0.85 - 1e-5).all() and gathered.mean() < 0.93


def test_a_reused_selection_stays_for_its_tokens(llama):
    one = QUESTIONS[1]
    (plain,), fresh = run(llama, "psa", (one,))
    (kept,), reused = run(llama, "psa/reuse=3/reuse_refresh=0", (one,))
    fresh, reused = fresh.layers()[0], reused.layers()[0]
    # A unit closes before token 13, and all heads select anew.
    source = torch.tensor([t // 3 * 3 for t in range(13)] + [13 + t // 3 * 3 for t in range(5)])
    chosen = source == torch.arange(len(source))
    assert fresh.read.shape[0] == len(source)
    assert torch.equal(fresh.read[chosen], reused.read[chosen]) and torch.equal(fresh.mass[chosen], reused.mass[chosen])
    assert not torch.equal(fresh.read, reused.read)
    assert (reused.scanned[~chosen] == 0).all() and (reused.scanned[chosen] > 0).all()
    opened = (reused.held - reused.held[source])[:, None]
    assert torch.equal(reused.read, reused.read[source] + opened)
    assert not torch.allclose(plain, kept, atol=1e-3)


def test_reuse_goes_on_from_one_forward_to_the_next(llama):
    model, context = llama
    policy, ids = parse_policy("psa/reuse=3", BASE), torch.tensor([QUESTIONS[1].prompt + QUESTIONS[1].answer])
    whole, parts = Simulation(context, policy), Simulation(context, policy)
    with torch.no_grad():
        expected = whole.forward(model, ids, ids.shape[1])
        logits = torch.cat([parts.forward(model, part, part.shape[1]) for part in ids.split([4, 1, 7, 1, 6], 1)], 1)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert parts.found.stats()["blocks_read"] == whole.found.stats()["blocks_read"]


def test_pages_are_worth_their_best_logical_page():
    generator = torch.Generator().manual_seed(0)
    keys, new = torch.randn(1, 2, 203, 16, generator=generator), torch.randn(3, 2, 60, 16, generator=generator)
    query = torch.randn(3, 5, 2, 2, 16, generator=generator)
    policy = parse_policy("lserve@128", PSAConfig())
    got = Estimator(policy, 16).score(query, LayerKeys(keys, keys, keys.new_zeros(1, 2, 16)), new, None, 0.0)
    row = torch.cat([keys.expand(3, -1, -1, -1), new], 2)[:, :, :256].unflatten(2, (4, 4, 16))
    upper, lower = row.amax(4), row.amin(4)                                                  # [R, H, pages, 4, D]
    bound = torch.maximum(query[:, :, :, :, None, None] * upper[:, None, :, None], query[:, :, :, :, None, None] * lower[:, None, :, None])
    expected = bound.sum(-1).amax(-1) + math.log(64)
    # The sink page has no statistics; it is always read.
    assert torch.allclose(got.unflatten(0, (3, 5))[..., 1:], expected[..., 1:], atol=1e-4)
    assert Estimator(policy, 16).bytes_per_token() == 2 * 16 * 2 / 16


def test_bytes_are_those_of_digests_keys_and_values(llama):
    _, found = run(llama, "arkvale@0.5/block_size=16", QUESTIONS[:1])
    stats, layer = found.stats(), found.layers()[0]
    assert set(layer.scanned.flatten().tolist()) == {368}             # whole blocks of 16 before the last tokens
    vectors = 368 / 16 * 2 * 16 * 2                         # two vectors a block
    tokens = layer.held.float().mean() * 16
    assert stats["hbm_fraction"] == pytest.approx(stats["kv_fraction"] + float(vectors / (tokens * 2 * 16 * 2)), rel=1e-3)


def test_dense_layers_are_read_whole_and_count(llama):
    _, found = run(llama, "psa@0.3/dense_layers=1")
    first, second = found.layers()
    assert torch.equal(second.read, second.held[:, None].expand_as(second.read)) and (first.read < first.held[:, None]).any()
    assert (second.scanned == 0).all()


# -- what can't be measured -----------------------------------------------------------------------------------------


def test_a_context_below_min_context_is_refused(llama):
    model, context = llama
    with pytest.raises(DenseDecodeError, match="min_context=400"):
        simulate(model, context, QUESTIONS, parse_policy("psa", BASE.replace(min_context=400)))
    simulate(model, context, QUESTIONS[:1], parse_policy("dense", BASE.replace(min_context=400)))


def test_a_model_that_is_never_sparse_is_refused(monkeypatch):
    monkeypatch.setattr(support, "check", lambda model: support.Support("dense", ["its keys are edited"]))
    model = get_model("qwen2")
    with pytest.warns(UserWarning, match="exact but not sparse"), patched(model, BASE):
        cache = prefill(model, draw(50, 0), PSAConfig(block_size=8))
    with pytest.raises(DenseDecodeError, match="exactly but not sparsely, because its attention edits keys or values"):
        Context(cache)


def test_only_a_prefilled_cache_of_one_row_is_a_context(llama):
    model, _ = llama
    rows = prefill(model, draw(50, 0), PSAConfig(block_size=8))
    rows.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="2 row"):
        Context(rows)
    with pytest.raises(ValueError, match="channel_codes"):
        Context(prefill(model, draw(50, 0), PSAConfig(block_size=8, digest="min_max", stop_rule="window")))


def test_logits_that_are_not_numbers_are_refused(llama):
    model, _ = llama
    bad = model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
    try:
        with pytest.raises(FloatingPointError, match="topk@0.2"):
            run(llama, "topk@0.2")
    finally:
        bad.remove()
