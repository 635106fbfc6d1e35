"""gpu_memory="auto" in front of a host tier: what is free on the GPU, less what activations need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_sparse import PSAConfig
from hf_sparse.cache import state as state_module
from hf_sparse.cache.state import CacheState, auto_budget
from tests.cache.drive import Text, feed

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB; what is `free`, and what PyTorch has `reserved` of the rest and given out (`allocated`), in bytes."""
    numbers = SimpleNamespace(free=0, reserved=0, allocated=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (numbers.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: numbers.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: numbers.allocated)
    return numbers


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "budget"),
    [
        (60 * GIB, 16 * GIB, 16 * GIB, 54 * GIB),  # a tenth for activations
        (40 * GIB, 36 * GIB, 16 * GIB, 54 * GIB),  # what PyTorch holds and nobody uses is free too
        (5 * GIB, 16 * GIB, 15 * GIB, 5 * GIB),  # a busy GPU: at least 1 GiB for activations
        (GIB // 2, 0, 0, 0),
    ],
    ids=["plenty", "cached", "busy", "full"],
)
def test_what_is_free(gpu, free, reserved, allocated, budget):
    gpu.free, gpu.reserved, gpu.allocated = free, reserved, allocated
    assert auto_budget(torch.device("cuda", 0)) == budget


def test_a_pool_on_a_cpu_grows_with_the_context():
    assert auto_budget(torch.device("cpu")) is None


KEYS = torch.zeros(1, 2, 5, 8)


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        (dict(host_memory="1MiB"), 70_000),
        (dict(gpu_memory=50_000, host_memory="1MiB"), 50_000),
        (dict(), None),
        (dict(gpu_memory=50_000, host_memory=0), 50_000),
    ],
    ids=["auto", "given", "no-host-tier", "given-no-host-tier"],
)
def test_when_it_is_asked_for(monkeypatch, settings, budget):
    monkeypatch.setattr(state_module, "auto_budget", lambda device: 70_000)
    state = CacheState(PSAConfig(block_size=4, **settings), layers=2)
    pool = state.pool(KEYS, KEYS)
    assert pool.budget == budget and state.pool(KEYS, KEYS) is pool


def test_two_pools_under_one_budget_are_refused(monkeypatch):
    monkeypatch.setattr(state_module, "auto_budget", lambda device: 70_000)
    state = CacheState(PSAConfig(block_size=4, host_memory="1MiB"), layers=2)
    state.pool(KEYS, KEYS)
    with pytest.raises(NotImplementedError, match="Leave gpu_memory and host_memory at 'auto'"):
        state.pool(KEYS, KEYS[..., :4])


def test_too_little_is_free(monkeypatch):
    monkeypatch.setattr(state_module, "auto_budget", lambda device: 2048)
    text = Text(rows=1, length=60)
    with pytest.raises(ValueError, match=r"gpu_memory='auto' \(2.00KiB were free\) is too small.*at least"):
        feed(text.cache(host_memory="1MiB"), text, 0, 50)
