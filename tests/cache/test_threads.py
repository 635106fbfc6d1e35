"""Caches in threads: one cache is one thread's at a time, and several caches on one model don't disturb each other."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import threading

import pytest
import torch

from hf_sparse import PSACache, patched
from hf_sparse.cache.layer import PSALayer
from tests.models import VOCAB_SIZE, build

SETTINGS = dict(min_context=0, block_size=4, digest="key_bits", threshold=0.6, round_blocks=1)
TIERS = {"resident": {}, "tiered": dict(gpu_memory="300KiB", host_memory="2MiB")}


@functools.cache
def model():
    return build("llama", num_hidden_layers=3)


def prompt(length=60, rows=1, seed=0):
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def make(**more) -> PSACache:
    return PSACache(model().config, **{**SETTINGS, **more})


def generate(cache, ids, tokens=10, **more):
    return model().generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, **more)


class Held:
    """A thread that runs `use` and stands still in the middle of it, where `point` (owner, name) is called."""

    def __init__(self, monkeypatch, use, owner, name: str, error=None):
        self.there, self.go_on, self.result, self.caught = threading.Event(), threading.Event(), None, None
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            if threading.current_thread() is self.thread and not self.there.is_set():
                self.there.set()
                assert self.go_on.wait(60)
                if error is not None:
                    raise error
            return original(*args, **kwargs)

        def run():
            try:
                self.result = use()
            except BaseException as caught:  # noqa: BLE001
                self.caught = caught

        monkeypatch.setattr(owner, name, call)
        self.thread = threading.Thread(target=run, name="the first one", daemon=True)
        self.thread.start()
        assert self.there.wait(60)

    def finish(self):
        self.go_on.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.result


MIDDLE = {
    "generate-in-a-layer": (lambda cache: generate(cache, prompt()), lambda: (PSALayer, "attend")),
    "generate-between-forwards": (
        lambda cache: generate(cache, prompt()),
        lambda: (type(model()), "_update_model_kwargs_for_generation"),
    ),
    "forward": (lambda cache: model()(prompt(), past_key_values=cache).logits, lambda: (type(model().lm_head), "forward")),
}
USES = {
    "forward": lambda cache: model()(prompt(3), past_key_values=cache),
    "generate": lambda cache: generate(cache, prompt(90)),
    "fork": lambda cache: cache.fork(),
    "deepcopy": lambda cache: copy.deepcopy(cache),
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "reset": lambda cache: cache.reset(),
}


@torch.no_grad()
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("middle", MIDDLE)
def test_one_cache_in_two_threads_is_refused(middle, use, monkeypatch):
    run, point = MIDDLE[middle]
    with patched(model(), **SETTINGS):
        want = run(make())
        cache = make()
        first = Held(monkeypatch, torch.no_grad()(lambda: run(cache)), *point())
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"another thread \(the first one\).*one thread at a time.*cache of its own"):
                USES[use](cache)
        assert torch.equal(first.finish(), want)
        assert first.caught is None
        USES[use](cache)  # it is free again


@torch.no_grad()
@pytest.mark.parametrize("middle", MIDDLE)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a fault"), SystemExit()], ids=["interrupt", "fault", "exit"]
)
def test_an_exception_gives_the_cache_back(middle, error, monkeypatch):
    """To any thread; what the cache then says of its contents is another matter."""
    run, point = MIDDLE[middle]
    with patched(model(), **SETTINGS):
        cache = make()
        stay = threading.Event()

        def use():
            try:
                run(cache)
            except BaseException as caught:  # noqa: BLE001
                failed.append(caught)
                stay.wait(60)  # the thread lives on

        failed = []
        first = Held(monkeypatch, use, *point(), error=error)
        with pytest.raises(RuntimeError, match="another thread"):
            cache.crop(-1)
        first.go_on.set()
        for _ in range(600):
            if failed:
                break
            threading.Event().wait(0.1)
        assert failed == [error] and first.thread.is_alive()
        cache.reset()
        assert torch.equal(generate(cache, prompt()), generate(make(), prompt()))
        stay.set()
        first.finish()


def test_a_cache_may_go_from_thread_to_thread():
    with patched(model(), **SETTINGS):
        want = generate(make(), prompt(), 20)
        cache, ids = make(), prompt()
        for _ in range(4):
            result = []
            thread = threading.Thread(target=lambda: result.append(generate(cache, ids, 5)))  # noqa: B023
            thread.start()
            thread.join(60)
            ids = result[0]
        assert torch.equal(ids, want)


def test_a_refused_thread_takes_nothing_from_its_own_calls(monkeypatch):
    """It goes on with a cache of its own, and the first thread's is still the first thread's."""
    with patched(model(), **SETTINGS):
        cache = make()
        first = Held(monkeypatch, lambda: generate(cache, prompt()), PSALayer, "attend")
        for _ in range(3):
            with pytest.raises(RuntimeError, match="another thread"):
                generate(cache, prompt())
            assert generate(make(), prompt()).shape == (1, 70)
        first.finish()
        assert first.caught is None


def at_once(uses) -> list:
    """Results of functions that run in threads of their own, all at the same time."""
    results, errors, start = [None] * len(uses), [], threading.Barrier(len(uses))

    def run(index):
        try:
            start.wait(60)
            results[index] = uses[index]()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(uses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture
def often(monkeypatch):
    """Threads change places every few instructions."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("tiers", TIERS)
def test_caches_in_threads_do_not_disturb_each_other(tiers, often):
    prompts = [prompt(50 + 7 * i, rows=1 + i % 2, seed=i) for i in range(4)]
    with patched(model(), **SETTINGS):
        want = [generate(make(**TIERS[tiers]), ids) for ids in prompts]
        for _ in range(2):
            caches = [make(**TIERS[tiers]) for _ in prompts]
            got = at_once([functools.partial(generate, cache, ids) for cache, ids in zip(caches, prompts)])
            assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("tiers", TIERS)
def test_forks_in_threads_do_not_disturb_each_other(tiers, often):
    """They share the pool: ids, slots, and what is swept."""
    budget = TIERS[tiers] and dict(gpu_memory="700KiB", host_memory="4MiB")
    with patched(model(), **SETTINGS):
        start = generate(make(), prompt(), 1)
        turns = [torch.cat([start, prompt(20 + 9 * i, seed=20 + i)], 1) for i in range(3)]

        def forked():
            cache = make(**budget)
            generate(cache, prompt(), 1)
            return [cache.fork() for _ in turns]

        want = [generate(fork, ids, 12) for fork, ids in zip(forked(), turns)]
        for _ in range(3):
            forks = forked()
            got = at_once([functools.partial(generate, fork, ids, 12) for fork, ids in zip(forks, turns)])
            assert all(torch.equal(a, b) for a, b in zip(got, want))
            pool = forks[0].sparse_layers[0].pool
            for fork in forks:
                fork.reset()
            assert pool.blocks_in_use() == 0


def test_threads_that_fight_for_a_cache(often):
    """However calls meet: each is refused or right."""
    with patched(model(), **SETTINGS):
        want, cache, counts = generate(make(), prompt(), 4), make(), [0, 0]

        def use(seed):
            rng = random.Random(seed)
            for _ in range(25):
                try:
                    with contextlib.ExitStack() as stack:
                        stack.callback(threading.Event().wait, rng.random() / 200)
                        got = cache.owner.run(lambda: (cache.reset(), generate(cache, prompt(), 4))[1])
                    assert torch.equal(got, want)
                    counts[0] += 1
                except RuntimeError as error:
                    assert "another thread" in str(error)
                    counts[1] += 1

        at_once([functools.partial(use, seed) for seed in range(3)])
        assert counts[0] > 0 and counts[1] > 0
