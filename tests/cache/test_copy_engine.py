"""Fetching with a loader thread, without a GPU: the reference step's copies, the list that a device would write, and what
becomes of threads, failures and settings that make no sense."""
from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hf_sparse import PSACache, PSAConfig
from hf_sparse.cache.host import CHUNK_BYTES
from hf_sparse.cache.pool import BlockPool
from hf_sparse.kernels.loader import BLOCK_BITS, LOADERS, Loader, loader_of
from hf_sparse.kernels.reference import fetch
from hf_sparse.patches import graph
from tests.cache.drive import Text, decode, run

CPU = torch.device("cpu")
SETTINGS = {"digest": "key_bits", "threshold": 0.6, "round_blocks": 1}
MEMORY = {"gpu_memory": 116_000, "host_memory": 10**6}


def tiers(slots=9, blocks=23, elements=10):
    generator = torch.Generator().manual_seed(3)
    return torch.zeros(slots, elements), torch.randn(blocks, elements, generator=generator)


# -- the reference step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "decayed"])
@pytest.mark.parametrize("threshold", [0.6, 1.0])
def test_steps_of_the_reference_are_those_of_the_other_fetcher(eviction, threshold, monkeypatch):
    text = Text(rows=2, length=150)
    settings = {**SETTINGS, **MEMORY, "threshold": threshold, "eviction": eviction}
    plain = text.cache(**settings)
    expected = run(plain, text, 121, 150)
    loaded = []
    load = Loader.load
    monkeypatch.setattr(Loader, "load", lambda self, kv, host, blocks, slots: (
        loaded.append(int((slots > 0).sum())), load(self, kv, host, blocks, slots)))
    cache = text.cache(**settings, fetcher="copy_engine")
    assert torch.equal(run(cache, text, 121, 150), expected)
    pools = [other.sparse_layers[0].pool for other in (plain, cache)]
    assert pools[0].host_tier.loader is None and pools[1].host_tier.loader is loader_of(pools[1].host)
    assert sum(loaded) == int(pools[1].counters[1]) > 0
    for name in ("kv", "slot_of", "block_in", "priority", "counters", "history"):
        assert torch.equal(*(getattr(pool, name)[1:] for pool in pools)), name


def test_forks_share_the_thread_which_ends_with_them():
    text = Text(rows=2, length=130)
    cache = text.cache(**SETTINGS, gpu_memory=200_000, host_memory=10**6, fetcher="copy_engine")
    run(cache, text, 120, 125)
    loader = cache.sparse_layers[0].pool.host_tier.loader
    fork = cache.fork()
    assert fork.sparse_layers[0].pool.host_tier.loader is loader
    assert [thread.name for thread in threading.enumerate()].count("hf_sparse-loader_0") == 1
    address = cache.sparse_layers[0].pool.host.data_ptr()
    del cache, fork, loader
    gc.collect()
    until = time.monotonic() + 10
    while "hf_sparse-loader_0" in [thread.name for thread in threading.enumerate()] and time.monotonic() < until:
        time.sleep(0.01)
    assert "hf_sparse-loader_0" not in [thread.name for thread in threading.enumerate()] and address not in LOADERS


def test_a_failing_copy_is_an_error_of_the_step_and_tears_the_cache(monkeypatch):
    text = Text(rows=2, length=130)
    cache = text.cache(**SETTINGS, **MEMORY, fetcher="copy_engine")
    run(cache, text, 120, 121)

    def fail(self, kv, host, pairs):
        raise RuntimeError("the bus is gone")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the bus is gone"):
        patch.setattr(Loader, "_copy", fail)
        decode(cache, text, 121, 130)
    with pytest.raises(RuntimeError, match="interrupted"):
        cache.check_whole()
    cache.reset()
    again = text.cache(**SETTINGS, **MEMORY)
    assert torch.equal(run(cache, text, 120, 130), run(again, text, 120, 130))


# -- the thread ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [CHUNK_BYTES, 44, 64], ids=["one-piece", "every-block-across", "some-across"])
def test_blocks_arrive_whole_across_the_borders_of_pinned_pieces(piece_bytes, monkeypatch):
    kv, host = tiers()
    copies = []
    real = torch.Tensor.copy_

    def copy(self, source, non_blocking=False):
        first = source.data_ptr() - host.data_ptr()
        assert first // piece_bytes == (first + source.numel() * 4 - 1) // piece_bytes and non_blocking
        copies.append(source.numel())
        return real(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    blocks, slots = torch.tensor([22, 5, 0, 7, 1, 21]), torch.tensor([3, 8, 0, 1, 2, 0])
    Loader(CPU, piece_bytes).load(kv, host, blocks, slots)
    monkeypatch.undo()
    expected = torch.zeros_like(kv)
    expected[slots[slots > 0]] = host[blocks[slots > 0]]
    assert torch.equal(kv, expected)
    assert sum(copies) == 4 * host.shape[1] and (len(copies) > 4) == (piece_bytes != CHUNK_BYTES)


class Event:
    """Of a kernel that has ended when it is said so."""

    def __init__(self):
        self.over = False

    def query(self):
        return self.over


def slow_device(loader, orders, steps):
    """A thread that writes numbers at places of the list, one after the other, as a device may."""
    def write():
        for place, number in steps:
            time.sleep(0.01)
            orders[place] = number

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def order(slot, block):
    return slot << BLOCK_BITS | block


@pytest.mark.parametrize("flag", ["first", "in-between", "last"])
def test_orders_are_followed_as_they_come_and_until_the_stop_flag(flag):
    """Out of order, with one that got no slot; and nothing is left for the next step."""
    kv, host = tiers()
    loader, event = Loader(CPU, CHUNK_BYTES), Event()
    steps = [(2, order(5, 22)), (1, order(3, 7)), (4, order(8, 1)), (3, order(0, 9))]
    steps.insert({"first": 0, "in-between": 2, "last": 4}[flag], (0, 5))
    orders = loader.orders(20)
    for _ in range(2):
        kv.zero_()
        thread = slow_device(loader, orders, steps)
        loader._run(kv, host, loader._ordered(event))
        thread.join()
        expected = torch.zeros_like(kv)
        expected[[5, 3, 8]] = host[[22, 7, 1]]
        assert torch.equal(kv, expected) and not bool(orders.any())
    assert loader.orders(7) is orders and loader.orders(30) is not orders


def test_a_step_without_misses_needs_its_stop_flag_only():
    kv, host = tiers()
    loader = Loader(CPU, CHUNK_BYTES)
    loader.orders(4)[0] = 1
    loader.follow(kv, host)
    assert not bool(kv.any()) and not bool(loader.orders(4).any())


@pytest.mark.parametrize("steps", [[], [(0, 3), (1, order(2, 4))], [(1, order(2, 4))]], ids=["nothing", "too-few", "no-flag"])
def test_a_device_that_has_ended_early_is_an_error_and_no_endless_wait(steps):
    kv, host = tiers()
    loader = Loader(CPU, CHUNK_BYTES)
    orders = loader.orders(4)
    for place, number in steps:
        orders[place] = number
    with pytest.raises(RuntimeError, match="has ordered [01] blocks and ended"):
        loader.follow(kv, host)
    assert not bool(orders.any())


def test_an_interrupted_step_leaves_no_copies_behind(monkeypatch):
    """The wait is interrupted; the thread is waited for all the same, so that slots are not written to later."""
    kv, host = tiers()
    loader, going, ended = Loader(CPU, CHUNK_BYTES), threading.Event(), []

    def pairs():
        going.set()
        time.sleep(0.2)
        yield 4, 2
        ended.append(True)

    class Interrupted:
        def __init__(self, pool):
            self.pool = pool

        def submit(self, *args):
            future = self.pool.submit(*args)

            def result():
                going.wait()
                raise KeyboardInterrupt

            future.result = result
            return future

    loader._thread = Interrupted(loader._thread)
    with pytest.raises(KeyboardInterrupt):
        loader._run(kv, host, pairs())
    assert ended and torch.equal(kv[2], host[4])


def test_tensors_of_inference_mode_are_copied_too():
    with torch.inference_mode():
        kv, host = tiers()
        Loader(CPU, CHUNK_BYTES).load(kv, host, torch.tensor([4]), torch.tensor([1]))
        assert torch.equal(kv[1], host[4])


def test_other_pools_keep_their_fetcher():
    pools = [BlockPool(CPU, torch.float32, 6, 10**4, 10**4) for _ in range(2)]
    pools[0].host_tier.use_copy_engine()
    assert fetch.loader_of(pools[1].host) is None and fetch.loader_of(pools[0].host) is pools[0].host_tier.loader


# -- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [{}, {"gpu_memory": "4GiB", "host_memory": 0}, {"host_memory": 0}], ids=str)
def test_without_a_host_tier_it_is_refused(memory):
    with pytest.raises(ValueError, match="fetcher='copy_engine' needs a host tier.*gpu_memory as a number"):
        PSAConfig(fetcher="copy_engine", **memory)


@pytest.mark.parametrize("memory", [{"gpu_memory": "4GiB"}, {"host_memory": "1GiB"}], ids=str)
def test_with_a_host_tier_it_is_taken(memory):
    assert PSAConfig(fetcher="copy_engine", **memory).fetcher == "copy_engine"


def test_a_fork_can_not_change_it():
    text = Text(rows=1, length=20)
    with pytest.raises(ValueError, match="'fetcher' can't change"):
        text.cache(**SETTINGS, **MEMORY).fork(fetcher="copy_engine")


@pytest.mark.parametrize(("settings", "captured", "said"), [
    ({}, True, 0), ({"fetcher": "copy_engine"}, False, 1), ({"fetcher": "copy_engine", "compile": False}, False, 0)], ids=str)
def test_the_captured_step_is_off_and_says_so_once(settings, captured, said, recwarn, monkeypatch):
    text = Text(rows=1, length=20)
    cache = PSACache(text.config(), PSAConfig(gpu_memory="1GiB", **settings))
    monkeypatch.setattr(type(cache.state), "kernels", lambda *args: True)
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, _hf_sparse=SimpleNamespace(support="sparse"))
    graph._warn_uncaptured.cache_clear()
    assert [graph.capturable(model, cache) for _ in range(2)] == [captured] * 2
    assert [str(warning.message).split(":")[0] for warning in recwarn] == ["fetcher='copy_engine' decodes uncaptured"] * said
