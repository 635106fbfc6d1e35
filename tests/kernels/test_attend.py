"""The always-read blocks and the progressive loop, against float64 attention over exactly the blocks that were read."""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.kernels.reference.attend import attend
from hf_sparse.kernels.reference.forced import attend_forced
from hf_sparse.kernels.reference.select import select
from tests import references
from tests.kernels.pools import make_problem

P = 4
SINK, RECENT = 1, 1


def tail_start(lengths, sink=SINK, recent=RECENT):
    return ((lengths - 1).clamp(min=0) // P - recent).clamp(min=sink)


def forced_tokens(length: int, sink=SINK, recent=RECENT) -> torch.Tensor:
    """[T] bool: tokens of the blocks that are always read."""
    block = torch.arange(length) // P
    start = max((length - 1) // P - recent, sink)
    return (block < sink) | (block >= start)


def estimates_of(problem, noise: float, softcap=0.0, seed=1) -> torch.Tensor:
    """[B, H, G, N] true log masses of the blocks with noise, NaN where there is no whole block."""
    B, H, G, _ = problem.query.shape
    estimate = torch.full((B, H, G, problem.table.shape[-1]), math.nan)
    for b in range(B):
        for h in range(H):
            row = problem.row(b, h)
            mass = references.block_masses(row.query, row.keys, P, softcap)
            estimate[b, h, :, : mass.shape[-1]] = mass.float()
    generator = torch.Generator().manual_seed(seed)
    return estimate + noise * torch.randn(estimate.shape, generator=generator)


def step(
    problem,
    tiers,
    estimate,
    *,
    bounds,
    policy="threshold",
    rule="estimate",
    threshold=0.9,
    window=16,
    group_stop="mean",
    floor=0,
    most=None,
    softcap=0.0,
    sinks=None,
    eviction="lru",
):
    """Forced blocks, ranking and the loop, as a decode step runs them."""
    lengths = problem.lengths
    start = tail_start(lengths)
    output, mass, forced = attend_forced(
        tiers,
        problem.query,
        problem.table,
        lengths,
        start,
        SINK,
        RECENT + 1,
        P,
        problem.value_dim,
        softcap,
        eviction,
    )
    candidates = (start - SINK).clamp(min=0)
    count = candidates if most is None else candidates.clamp(max=most)
    order, rest = select(estimate, mass, SINK, start, estimate.shape[-1], "softmax_mean")
    floors = torch.minimum(torch.full_like(count, floor), count)
    return (
        forced,
        order,
        attend(
            tiers,
            problem.query,
            problem.table,
            order,
            rest,
            candidates,
            count,
            floors,
            output,
            mass,
            sinks,
            bounds,
            policy,
            rule,
            threshold,
            window,
            group_stop == "min",
            P,
            problem.value_dim,
            softcap,
            eviction,
        ),
    )


def check(problem, result, estimate, *, bounds, most=None, softcap=0.0, sinks=None, **settings) -> list[int]:
    """Blocks read, output, mass and coverage of every row and KV head; returns the numbers of ranked blocks read."""
    forced, order, (output, mass, read, coverage) = result
    counts = []
    for b, length in enumerate(problem.lengths.tolist()):
        keep_always = forced_tokens(length)
        block = torch.arange(length) // P
        first, last = SINK, int(tail_start(problem.lengths)[b])
        candidates = max(0, last - first)
        assert forced[b] == len(block[keep_always].unique())
        for h in range(problem.query.shape[1]):
            row = problem.row(b, h)
            sink = None if sinks is None else sinks[h]
            _, always = references.attention(row.query, row.keys, row.values, keep_always, softcap)
            captured = torch.exp(always) if sink is None else torch.exp(always) + torch.exp(sink.double())
            guess = estimate[b, h, :, first : first + candidates].double()
            ranked = [first + i for i in references.rank(guess, always)] if candidates else []
            true = references.block_masses(row.query, row.keys, P, softcap).exp()
            expected = (
                references.blocks_read(
                    true=true[:, ranked].tolist(),
                    estimated=[[math.exp(guess[g, n - first]) for n in ranked] for g in range(len(guess))],
                    captured=captured.tolist(),
                    bounds=bounds,
                    count=candidates if most is None else min(most, candidates),
                    **settings,
                )
                if candidates
                else 0
            )
            assert read[b, h] == expected
            counts.append(expected)
            assert order[b, h, :expected].tolist() == ranked[:expected]
            keep = keep_always | torch.isin(block, torch.tensor(ranked[:expected], dtype=torch.int64))
            want, want_mass = references.attention(row.query, row.keys, row.values, keep, softcap)
            torch.testing.assert_close(output[b, h].double(), want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mass[b, h].double(), want_mass, rtol=1e-5, atol=1e-5)
            got = torch.exp(want_mass) if sink is None else torch.exp(want_mass) + torch.exp(sink.double())
            left = torch.tensor(
                [sum(math.exp(guess[g, n - first]) for n in ranked[expected:]) for g in range(len(guess))]
            )
            torch.testing.assert_close(coverage[b, h].double(), got / (got + left), rtol=1e-5, atol=1e-5)
    return counts


RULES = ["estimate", "window", "nleft", "paper"]


@pytest.mark.parametrize("group_stop", ["mean", "min"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("threshold", [0.6, 0.9, 0.97])
def test_stop_rules(rule, group_stop, threshold):
    problem = make_problem([190, 41, 118], heads=3, group=4)
    estimate = estimates_of(problem, noise=0.3)
    bounds = references.round_bounds(estimate.shape[-1], 2, 1.25)
    settings = dict(bounds=bounds, rule=rule, group_stop=group_stop, threshold=threshold, window=6)
    result = step(problem, problem.resident(), estimate, **settings)
    check(problem, result, estimate, **settings)


def test_rules_and_thresholds_differ():
    """The cases above are no trivial ones: a higher threshold and a more careful rule read more, and none reads all."""
    problem = make_problem([190, 41, 118], heads=3, group=4)
    estimate = estimates_of(problem, noise=0.3)
    bounds = references.round_bounds(estimate.shape[-1], 2, 1.25)

    def total(**settings):
        return int(step(problem, problem.resident(), estimate, bounds=bounds, **settings)[2][2].sum())

    everything = 3 * (45 + 8 + 27)
    assert (
        total(rule="paper", threshold=0.9)
        < total(rule="estimate", threshold=0.9)
        < total(rule="window", threshold=0.9)
    )
    assert 0 < total(threshold=0.6) < total(threshold=0.9) < total(threshold=0.97) < everything
    assert total(threshold=0.9) < total(threshold=0.9, group_stop="min")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("extra", ["sinks", "softcap", "floor", "most"])
def test_stop_rules_with(extra, rule):
    problem = make_problem([130, 77], group=3)
    more = {
        "sinks": dict(sinks=torch.tensor([[4.0, 2.0, 6.0], [0.0, 5.0, 3.0]])),
        "softcap": dict(softcap=2.0),
        "floor": dict(floor=9),
        "most": dict(most=11),
    }[extra]
    estimate = estimates_of(problem, noise=0.3, softcap=more.get("softcap", 0.0))
    settings = dict(
        bounds=references.round_bounds(estimate.shape[-1], 2, 1.25), rule=rule, threshold=0.8, **more
    )
    counts = check(problem, step(problem, problem.resident(), estimate, **settings), estimate, **settings)
    plain = step(
        problem, problem.resident(), estimate, **{**settings, "floor": 0, "most": None, "sinks": None}
    )[2][2]
    if extra == "floor":
        assert min(counts) >= 9
    elif extra == "most":
        assert max(counts) <= 11
    elif extra == "sinks":
        assert sum(counts) <= plain.sum()  # the sink logits count as captured, so no more has to be read
    if rule == "estimate" and extra != "softcap":
        assert sum(counts) != plain.sum()


@pytest.mark.parametrize("group_stop", ["mean", "min"])
@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_top_p_goes_by_estimates_alone(top_p, group_stop):
    problem = make_problem([190, 41], heads=3, group=4)
    estimate = estimates_of(problem, noise=1.0)
    settings = dict(
        bounds=references.round_bounds(estimate.shape[-1], 2, 1.25),
        policy="top_p",
        threshold=top_p,
        group_stop=group_stop,
    )
    counts = check(problem, step(problem, problem.resident(), estimate, **settings), estimate, **settings)
    assert len(set(counts)) > 1


@pytest.mark.parametrize("policy", ["threshold", "top_p"])
def test_all_of_it_is_everything(policy):
    """Also where the last blocks hold less than a float can tell from nothing."""
    problem = make_problem([190, 41], heads=3, group=4)
    estimate = 40 * estimates_of(problem, noise=1.0)
    settings = dict(bounds=references.round_bounds(estimate.shape[-1], 2, 1.25), policy=policy, threshold=1.0)
    _, _, (_, _, read, _) = step(problem, problem.resident(), estimate, **settings)
    candidates = (tail_start(problem.lengths) - SINK).clamp(min=0)
    assert torch.equal(read, candidates[:, None].expand_as(read))


@pytest.mark.parametrize("most", [0, 1, 5, 30])
def test_top_k_reads_exactly_as_many(most):
    problem = make_problem([120, 61, 9], heads=2, group=2)
    estimate = estimates_of(problem, noise=1.0)
    settings = dict(bounds=references.round_bounds(estimate.shape[-1], 2, 1.25), policy="top_k", most=most)
    counts = check(problem, step(problem, problem.resident(), estimate, **settings), estimate, **settings)
    assert counts == [min(most, n) for n in (27, 27, 13, 13, 0, 0)]


@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("lengths", [[1], [3], [4], [5], [64, 63, 65, 1], [9, 200]], ids=str)
def test_threshold_one_reads_everything(lengths, softcap):
    problem = make_problem(lengths, heads=2, group=3, value_dim=12)
    estimate = estimates_of(problem, noise=3.0, softcap=softcap)
    settings = dict(
        bounds=references.round_bounds(estimate.shape[-1], 8, 1.25), threshold=1.0, softcap=softcap
    )
    forced, _, (output, mass, read, coverage) = step(problem, problem.resident(), estimate, **settings)
    for b, length in enumerate(lengths):
        assert (read[b] + forced[b] == -(-length // P)).all()
        for h in range(2):
            row = problem.row(b, h)
            want, want_mass = references.attention(row.query, row.keys, row.values, None, softcap)
            torch.testing.assert_close(output[b, h].double(), want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mass[b, h].double(), want_mass, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(coverage, torch.ones_like(coverage))


@pytest.mark.parametrize("eviction", ["lru", "fifo", "decayed"])
@pytest.mark.parametrize("extra_slots", [0, 5, 40])
@pytest.mark.parametrize("rule", ["estimate", "nleft"])
def test_tiered_equals_resident_bit_for_bit(rule, extra_slots, eviction):
    problem = make_problem([130, 77, 41], group=3)
    estimate = estimates_of(problem, noise=0.3)
    bounds = references.round_bounds(estimate.shape[-1], 4, 1.25)
    settings = dict(bounds=bounds, rule=rule, threshold=0.8, eviction=eviction)
    resident = step(problem, problem.resident(), estimate, **settings)
    # What a call may need at once: all forced blocks, or one round of every row and KV head.
    largest = max(high - low for low, high in zip([0, *bounds], bounds))
    tiers = problem.tiered(1 + 3 * 2 * max(largest, SINK + RECENT + 1) + extra_slots)
    for _ in range(3):  # with whatever the last step left in the slots
        tiered = step(problem, tiers, estimate, **settings)
        for ours, theirs in zip(tiered[2], resident[2]):
            assert torch.equal(ours, theirs)


def test_stopped_heads_fetch_nothing_more():
    """Misses are exactly the blocks read: a head that has stopped costs no slots and no transfers."""
    problem = make_problem([190, 118], heads=3, group=2)
    estimate = estimates_of(problem, noise=0.1)
    tiers = problem.tiered(400)
    result = step(problem, tiers, estimate, bounds=references.round_bounds(48, 2, 1.25), threshold=0.8)
    read = result[2][2]
    assert len(read.unique()) > 2
    assert tiers[7].tolist() == [0, int(read.sum())]


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (0, 3), (1, 1), (2, 0), (5, 2)])
@pytest.mark.parametrize("lengths", [[1, 4, 5, 8, 9, 23], [12, 47]], ids=str)
def test_forced_blocks(lengths, sink, recent):
    problem = make_problem(lengths, heads=2, group=2, value_dim=6)
    start = tail_start(problem.lengths, sink, recent)
    output, mass, forced = attend_forced(
        problem.resident(),
        problem.query,
        problem.table,
        problem.lengths,
        start,
        sink,
        recent + 1,
        P,
        6,
        0.0,
        "lru",
    )
    for b, length in enumerate(lengths):
        keep = forced_tokens(length, sink, recent)
        assert forced[b] == len((torch.arange(length) // P)[keep].unique())
        for h in range(2):
            row = problem.row(b, h)
            want, want_mass = references.attention(row.query, row.keys, row.values, keep)
            torch.testing.assert_close(output[b, h].double(), want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mass[b, h].double(), want_mass, rtol=1e-5, atol=1e-5)


def test_a_row_without_tokens_is_finite():
    problem = make_problem([0, 30])
    estimate = estimates_of(problem, noise=0.0)
    _, _, (output, mass, read, coverage) = step(problem, problem.resident(), estimate, bounds=[4, 8])
    assert (output[0] == 0).all() and (mass[0] == -math.inf).all() and (read[0] == 0).all()
    assert torch.isfinite(coverage).all() and torch.isfinite(output).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_blocks(dtype):
    problem = make_problem([130, 77], group=5, key_dim=16, value_dim=8, dtype=dtype)
    estimate = estimates_of(problem, noise=0.3)
    settings = dict(bounds=references.round_bounds(estimate.shape[-1], 2, 1.25), threshold=0.8)
    check(problem, step(problem, problem.resident(), estimate, **settings), estimate, **settings)


def test_inputs_are_not_changed():
    """The forced part's output and mass are inputs; a caller may hold on to them."""
    problem = make_problem([130])
    tiers = problem.resident()
    start = tail_start(problem.lengths)
    output, mass, _ = attend_forced(
        tiers, problem.query, problem.table, problem.lengths, start, SINK, 2, P, 8, 0.0, "lru"
    )
    estimate = estimates_of(problem, noise=0.0)
    order, rest = select(estimate, mass, SINK, start, 33, "softmax_mean")
    inputs = (
        problem.query,
        problem.table,
        order,
        rest,
        start - SINK,
        start - SINK,
        torch.zeros(1, dtype=torch.int64),
        output,
        mass,
    )
    before = [part.clone() for part in inputs]
    attend(tiers, *inputs, None, [4, 33], "threshold", "estimate", 0.9, 16, False, P, 8, 0.0, "lru")
    for part, old in zip(inputs, before):
        torch.testing.assert_close(part, old, rtol=0, atol=0, equal_nan=True)
