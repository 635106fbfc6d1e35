"""One captured step and whatever happens to a cache between and beside its calls: cropped, fed, forked, interrupted, and
served in turn with another thread's."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_sparse import PSACache, patch_model
from hf_sparse.compat import CACHE_ARGUMENT
from hf_sparse.patches import graph
from tests.triton.test_captured_step import SETTINGS, model, prompt, recordings, run, same  # noqa: F401

LENGTH = 150


def both(model, life):  # noqa: F811
    """A life of a cache with and without the captured step; the outputs of both."""
    results = []
    for compiled in (True, False):
        cache = PSACache(model.config, compile=compiled, **SETTINGS)
        results.append(life(cache))
    return results


@torch.no_grad()
def forward(model, cache, ids) -> None:  # noqa: F811
    model(ids, **{CACHE_ARGUMENT: cache})


def test_a_cache_that_was_cropped_between_two_calls(model, recordings):  # noqa: F811
    """Its tables are others, and just as long."""
    patch_model(model, **SETTINGS)

    def life(cache):
        first, _ = run(model, prompt(1, LENGTH), cache=cache, tokens=5)
        cache.crop(-40)
        ids = torch.cat([first.sequences[:, : cache.tokens], prompt(2, 35)], 1)
        return run(model, ids, cache=cache, tokens=4)[0]

    same(*both(model, life))
    assert recordings


def test_a_cache_that_was_fed_between_two_calls(model, recordings):  # noqa: F811
    """Blocks have closed that no step of the kernels has seen."""
    patch_model(model, **SETTINGS)

    def life(cache):
        first, _ = run(model, prompt(3, LENGTH), cache=cache, tokens=4)
        more = prompt(4, 100)
        forward(model, cache, torch.cat([first.sequences[:, -1:], more], 1))
        return run(model, torch.cat([first.sequences, more, prompt(5, 1)], 1), cache=cache, tokens=4)[0]

    same(*both(model, life))


def test_a_pool_that_a_fork_has_moved(model, recordings):  # noqa: F811
    patch_model(model, **SETTINGS)

    def life(cache):
        first, _ = run(model, prompt(6, LENGTH), cache=cache, tokens=4)
        fork, moved = cache.fork(), cache.sparse_layers[0].pool.version
        forward(model, fork, prompt(7, 300))
        assert fork.sparse_layers[0].pool is cache.sparse_layers[0].pool and fork.sparse_layers[0].pool.version != moved
        torch.zeros(2**20).fill_(7.0)
        return run(model, torch.cat([first.sequences, prompt(8, 1)], 1), cache=cache, tokens=4)[0]

    same(*both(model, life))


def test_two_threads_in_turn(model, recordings, monkeypatch):  # noqa: F811
    """Each token of one may come between two of the other."""
    patch_model(model, **SETTINGS)
    prompts = [prompt(9, LENGTH), prompt(10, 190)]
    want = [run(model, ids, compiled=False, tokens=5)[0] for ids in prompts]
    run(model, prompts[0], tokens=4)
    assert len(recordings) == 1
    served, original = [], graph.GraphedStep._decode

    def decode(self, cache, *args):
        assert self.lock.locked()
        served.append(cache)
        return original(self, cache, *args)

    monkeypatch.setattr(graph.GraphedStep, "_decode", decode)
    got, barrier = [None, None], threading.Barrier(2)

    def use(index):
        barrier.wait(60)
        got[index] = run(model, prompts[index], tokens=5)[0]

    threads = [threading.Thread(target=use, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for one, other in zip(got, want):
        same(one, other)
    assert len(recordings) == 1 and len({id(cache) for cache in served}) == 2


@pytest.mark.parametrize(("where", "at"), [("replay", 3), ("end", 5)], ids=["replay", "end"])
def test_an_interrupted_replay(model, recordings, monkeypatch, where, at):  # noqa: F811
    """Nobody knows which layers have stored the token: it says so."""
    patch_model(model, **SETTINGS)
    ids = prompt(11, LENGTH)
    want, cache = run(model, ids, tokens=5)
    owner, name = (graph.CapturedCall, "__call__") if where == "replay" else (type(cache.sparse_layers[0]), "end_step")
    cache, original, calls = PSACache(model.config, **SETTINGS), getattr(owner, name), []

    def interrupt(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, ids, tokens=5, cache=cache)
    with pytest.raises(RuntimeError, match="interrupted.*reset"):
        run(model, prompt(12, 300), cache=cache)
    cache.reset()
    again, _ = run(model, ids, tokens=5, cache=cache)
    same(again, want)


def test_an_interruption_before_the_first_step(model, recordings, monkeypatch):  # noqa: F811
    """The next call prepares again, and the token is not lost."""
    patch_model(model, **SETTINGS)
    ids = prompt(13, LENGTH)
    want, _ = run(model, ids, tokens=4, compiled=False)
    cache = PSACache(model.config, **SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(graph.GraphedStep, "_first_calls", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(model, ids, tokens=4, cache=cache)
    assert cache.tokens == LENGTH
    got, _ = run(model, want.sequences[:, :LENGTH + 1], tokens=3, cache=cache)
    assert torch.equal(got.sequences, want.sequences)


class Stream:
    def __init__(self, log):
        self.log = log

    def wait_event(self, event):
        self.log.append("waits")


def test_a_call_on_another_stream_waits_for_the_last(monkeypatch):
    step, log = object.__new__(graph.GraphedStep), []
    step.device, one, other = torch.device("cuda", 0), Stream(log), Stream(log)
    for ended, here, waits in ((None, one, 0), ((one, "event"), one, 0), ((one, "event"), other, 1)):
        step.ended = ended
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, here=here: here)
        step._wait()
        assert len(log) == waits
