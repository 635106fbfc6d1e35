"""Fetching ahead, interpreted: what a prediction brings, that it changes no result, and the captured step that makes one."""
from __future__ import annotations

import functools
import math

import pytest
import torch

from hf_sparse import PSACache, patch_model
from hf_sparse.cache.static import StaticStep
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.eviction import POLICIES as RULES
from hf_sparse.kernels import prefetch, tiering
from hf_sparse.kernels.descriptor import FORCED_BEFORE, PLANNED_BEFORE
from hf_sparse.kernels.residency import BUILT, CURSOR, MISSED, POLICIES, PREFETCHED, QUEUED, TICK, touch_kernel

from .test_captured_step import model, prompt, recordings  # noqa: F401 - fixtures
from .test_residency import Tier as Pool
from .test_residency import smallest as least_slots
from .test_tiered_step import DIM, GROUP, HEADS, Run, small_launches, smallest  # noqa: F401 - small_launches is a fixture

TOKENS, STEPS = 380, 3


# -- the launches ----------------------------------------------------------------------------------------------


def touch_ahead(pool: Pool, layer: int, wanted: list[list[int]]) -> None:
    for row, numbers in enumerate(wanted):
        pool.ranked[row, :len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        pool.info[row, 0] = len(numbers)
    touch_kernel[(len(wanted),)](pool.descs[layer], pool.info, POLICY=POLICIES[pool.policy], TILE=16, AHEAD=True)


@pytest.mark.parametrize("policy", ["lru", "fifo", "decayed"])
@pytest.mark.parametrize("most", [100, 3], ids=["all", "three"])
def test_what_is_fetched_ahead_is_there_and_counts_when_it_is_used(policy, most):
    pool = Pool(least_slots(2, 2, 2, 5) + 60, policy, length=31, seed=2, victims=64)
    for _ in range(3):
        pool.token(5)
    pool.queue()
    before, clock, counters = pool.resident, pool.pool.clock.clone(), pool.pool.counters.clone()
    priority, history = pool.pool.priority.clone(), pool.pool.history.clone()
    tick, wanted = pool.state(TICK), [[1, 2, 3, 5], [4, 2], [], [7, 1, 6]]
    blocks = pool.blocks(1, wanted)
    touch_ahead(pool, 1, wanted)
    missing = set(blocks) - set(before)
    assert len(missing) > 3 and pool.state(MISSED) == len(missing)
    used = {before[block] for block in blocks if block in before}
    assert all(pool.work.use[slot] == tick for slot in used) and torch.equal(pool.pool.priority, priority)
    limit = min(most, pool.state(QUEUED) // (2 * pool.layers), len(missing))
    assert limit == (len(missing) if most > 3 else 3)
    tiering.Tier(pool.block_bytes, policy, pool.layers).fetch(pool.descs[1], ahead=most)
    pool.check()
    now = pool.resident
    fetched = set(now) - set(before)
    assert len(fetched) == limit == pool.state(PREFETCHED) and fetched <= missing
    # A layer step of its own that no clock and no counter has seen; what it stamped has stayed.
    assert (pool.state(TICK), pool.state(MISSED)) == (tick + 1, 0)
    assert torch.equal(pool.pool.clock, clock) and torch.equal(pool.pool.counters, counters)
    assert all(now.get(block) == slot for block, slot in before.items() if slot in used)
    for block in fetched:
        loaded = RULES[policy].on_load(history[block].reshape(1), clock)[0]
        assert pool.pool.priority[now[block]] == loaded and pool.work.use[now[block]] == tick
    # Its own step finds it, and counts it as used.
    assert set(pool.read(1, wanted)[0]) == missing - fetched


def test_slots_come_from_half_of_the_queue_and_from_nowhere_else():
    pool = Pool(least_slots(2, 2, 2, 5), "decayed", length=31, seed=4)
    for _ in range(3):
        pool.token(5)
    pool.queue()
    wanted = [[n for n in range(1, 12) if int(pool.table[0].flatten(0, 1)[row, n]) not in pool.resident] for row in range(4)]
    touch_ahead(pool, 0, wanted)
    assert pool.state(MISSED) > pool.state(QUEUED) // 4 > 0
    at, limit = pool.state(CURSOR), pool.state(QUEUED) // 4
    tiering.Tier(pool.block_bytes, "decayed", pool.layers).fetch(pool.descs[0], ahead=100)
    pool.check()
    assert pool.state(PREFETCHED) == limit and pool.state(CURSOR) == at + limit
    # With nothing in the queue, or all of it used since, nothing is evicted.
    before = pool.resident
    for queued, used_since in ((0, False), (pool.state(QUEUED), True)):
        pool.work.state[QUEUED.value], pool.work.state[CURSOR.value] = queued, 0
        if used_since:
            pool.work.use[1:] = pool.state(BUILT)
        touch_ahead(pool, 0, wanted)
        tiering.Tier(pool.block_bytes, "decayed", pool.layers).fetch(pool.descs[0], ahead=100)
        pool.check()
        assert pool.resident == before and int((pool.pool.slot_of < 0).sum()) == 0


# -- the step of a layer -------------------------------------------------------------------------------------------


class Ahead(Run):
    """Layers whose next layer's query is predicted: as it will be ("right"), from nothing ("wrong"), or not at all."""

    def __init__(self, kind: str, **settings):
        self.kind, self.noise = kind, torch.Generator().manual_seed(9)
        self.new: list[set] = []                            # blocks that each prefetch has brought
        super().__init__(TOKENS, prefetch=True, **settings)

    def decode(self, count: int) -> list[torch.Tensor]:
        outputs = []
        for _ in range(count):
            drawn = [(self.draw(HEADS * GROUP) * 1.5, self.draw(HEADS), self.draw(HEADS)) for _ in self.layers]
            for layer in self.layers:
                layer.begin_step()
            step = self.layers[0].state.step()
            step.prepare(self.layers)
            for order, (layer, (query, key, value)) in enumerate(zip(self.layers, drawn)):
                outputs.append(step.run(layer, query, key, value, None, DIM**-0.5, 0.0).transpose(1, 2))
                layer.end_step()
                if order + 1 < len(self.layers) and self.kind != "none":
                    guess = drawn[order + 1][0]
                    if self.kind == "wrong":
                        guess = torch.randn(guess.shape, generator=self.noise) * 3
                    before = set(self.pool.block_in.tolist())
                    step.look_ahead(self.layers[order + 1], guess, DIM**-0.5, 0.0)
                    self.new.append(set(self.pool.block_in.tolist()) - before)
        return outputs

    @property
    def state(self):
        return self.layers[0].state.step().tier_work[torch.device("cpu"), None].state


def sized(kind: str, factor: float, **settings) -> Ahead:
    return Ahead(kind, gpu_memory=int(smallest("threshold") * factor), host_memory="4MiB", **settings)


@functools.cache
def decoded(kind: str, factor: float) -> tuple[Ahead, list[torch.Tensor]]:
    run = sized(kind, factor)
    return run, run.decode(STEPS)


@functools.cache
def resident() -> list[torch.Tensor]:
    return Run(TOKENS).decode(STEPS)


@pytest.mark.parametrize(("kind", "factor"), [
    ("right", 1.0), pytest.param("right", 1.15, marks=pytest.mark.slow), ("wrong", 1.15),
    pytest.param("right", 3.0, marks=pytest.mark.slow)],
                         ids=["smallest", "small", "wrong", "everything"])
def test_outputs_are_those_of_a_resident_pool(kind, factor):
    run, outputs = decoded(kind, factor)
    assert all(map(torch.equal, outputs, resident()))
    run.check_pool()
    assert int(run.state[TICK.value]) == 1 + STEPS * len(run.layers) + STEPS * (len(run.layers) - 1)
    assert run.pool.clock.item() == pytest.approx(STEPS)


def test_a_right_prediction_takes_misses_away():
    """Nothing is known before the first token; from then on what is brought and needed is a miss less."""
    misses, brought = {}, {}
    for kind in ("none", "right", "wrong"):
        run, _ = decoded(kind, 1.15)
        misses[kind], brought[kind] = run.pool.counters[1].item(), int(run.state[PREFETCHED.value])
        assert sum(map(len, run.new)) == brought[kind]
    assert brought["none"] == 0 < brought["wrong"] and brought["right"] > 4
    assert misses["right"] < misses["none"] - 0.75 * brought["right"] and misses["right"] < misses["wrong"]


def test_a_selection_ahead_is_the_layer_s_own_with_some_more():
    """With the forced masses of the token to come in place of the last one's, it holds all that the layer plans."""
    run = sized("none", 3.0, max_blocks=24)
    run.decode(2)
    step, layer = run.layers[0].state.step(), run.layers[1]
    work, = step.work.values()
    planned, forced = step.before[1]
    assert planned.tolist() == work.info[..., 0].tolist() and int(planned.min()) > 4
    torch.testing.assert_close(forced, torch.logsumexp(work.forced_mass * math.log(2), 2) / math.log(2), rtol=1e-6, atol=1e-6)
    lists = lambda: [set(work.ranked[b, 0, :int(work.info[b, 0, 0])].tolist()) for b in range(2)]  # noqa: E731
    for each in run.layers:
        each.begin_step()
    step.prepare(run.layers)
    query, memory = run.draw(HEADS * GROUP) * 1.5, planned.clone()
    step.look_ahead(layer, query, DIM**-0.5, 0.0)
    ahead, counts = lists(), work.info[..., :4].clone()
    assert torch.equal(planned, memory)                     # of the layer's own steps
    assert (counts[..., 0] == torch.minimum((1.5 * memory).ceil().int(), counts[..., 1])).all()
    step.run(layer, query, run.draw(HEADS), run.draw(HEADS), None, DIM**-0.5, 0.0)
    shared = [len(more & own) / len(own) for more, own in zip(ahead, lists())]
    assert min(shared) > 0.8, shared


@pytest.mark.slow
def test_bytes_bound_what_is_fetched(monkeypatch):
    monkeypatch.setattr(prefetch.TUNING, "most_bytes", 2 * 8 * DIM * 4 * 2)        # two blocks of 8 tokens
    run = sized("right", 1.15)
    run.decode(STEPS)
    assert max(map(len, run.new)) == 2


def test_rows_without_a_host_tier_or_prefetch_note_nothing():
    run = Run(TOKENS, gpu_memory="200KiB", host_memory="4MiB")
    run.decode(1)
    step = run.layers[0].state.step()
    rows = step.desc[torch.device("cpu")]
    assert step.before == {} and not rows[:, [PLANNED_BEFORE.value, FORCED_BEFORE.value]].any()


# -- the captured step -----------------------------------------------------------------------------------------


SETTINGS = dict(min_context=0, block_size=8, threshold=0.6, round_blocks=1)


def test_the_captured_step_predicts_and_fetches_ahead(model, recordings, monkeypatch):  # noqa: F811
    """The prediction of each layer's query reaches that layer's prefetch, and results are those without."""
    ids, outputs = prompt(1, 300), []
    for more in ({}, dict(gpu_memory="150KiB", host_memory="8MiB", prefetch=True)):
        patch_model(model, **SETTINGS, **more)
        cache = PSACache(model.config, **SETTINGS, **more)
        asked, seen = [], []

        def spy(name: str, calls: list):
            original = getattr(StaticStep, name)

            def called(self, layer, query, *rest):
                calls.append((layer.index, query.clone()))
                return original(self, layer, query, *rest)

            patch.setattr(StaticStep, name, called)

        with monkeypatch.context() as patch:
            spy("look_ahead", asked)
            spy("run", seen)
            outputs.append(model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True,
                                          output_logits=True, **{CACHE_ARGUMENT: cache}))
        assert [order for order, _ in seen] == [0, 1] * 4
        assert [order for order, _ in asked] == ([1] * 4 if more else [])
    truth = [query for order, query in seen if order == 1]
    near = [torch.cosine_similarity(guess, query, dim=-1) for (_, guess), query in zip(asked, truth)]
    assert float(torch.stack(near).mean()) > 0.5
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(map(torch.equal, outputs[0].logits, outputs[1].logits))
