"""Pinning of the host tier, with a driver that only takes notes: what is pinned when, what happens when it refuses, and in
which order things are let go of."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from hf_sparse.cache import host
from hf_sparse.cache.host import HostTier
from hf_sparse.cache.pool import BlockPool
from hf_sparse.kernels.host_link import LINKS, link_of

GPU = torch.device("cuda", 0)
ELEMENTS, ROW_BYTES = 256, 1024  # fp32
CHUNK = 2**16


class Driver:
    """Stands in for the CUDA driver."""

    def __init__(self):
        self.regions: dict[int, int] = {}  # address: bytes
        self.limit = None  # refuses to pin more bytes than this
        self.open = threading.Event()  # pins only while it is set
        self.open.set()
        self.released: list[int] = []
        self.alive_at_release = None

    def register(self, address, size, device):
        assert device == GPU
        self.open.wait(10)
        if self.limit is not None and sum(self.regions.values()) + size > self.limit:
            raise RuntimeError("out of memory (2)")
        self.regions[address] = size

    def unregister(self, addresses, device):
        self.released += addresses

    def pinned(self, tier: HostTier) -> int:
        """Bytes from the start of the tier that are pinned without a gap."""
        end = tier.rows.data_ptr()
        after = end + tier.rows.nbytes  # another tier may lie right behind
        while end in self.regions and end < after:
            end += self.regions[end]
        return end - tier.rows.data_ptr()


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(host, "register", driver.register)
    monkeypatch.setattr(host, "unregister", driver.unregister)
    monkeypatch.setattr(host, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(host, "AHEAD_BYTES", 3 * CHUNK)
    yield driver
    driver.open.set()
    gc.collect()


def make_tier(blocks: int) -> HostTier:
    return HostTier(blocks, ELEMENTS, torch.float32, GPU)


def settle(tier: HostTier) -> None:
    """Wait for the background to have nothing to do."""
    for _ in range(1000):
        if tier._thread is None:
            return
        time.sleep(0.01)
    raise TimeoutError


def test_what_is_asked_for_is_pinned_when_it_is_there(driver):
    tier = make_tier(2000)
    assert tier.pinned and not driver.regions
    for blocks in (1, 64, 65, 700, 300, 1999, 2000):
        tier.ensure(blocks)
        assert driver.pinned(tier) >= blocks * ROW_BYTES and tier.pinned
        assert link_of(tier.rows) is tier.link
    settle(tier)
    assert sum(driver.regions.values()) == driver.pinned(tier) == 2000 * ROW_BYTES


@pytest.mark.parametrize(
    ("needed", "expected", "pinned"),
    [
        (1, 0, 4 * CHUNK),
        (64, 0, 4 * CHUNK),
        (65, 0, 5 * CHUNK),
        (1280, 0, 25 * CHUNK),
        (1, 960, 15 * CHUNK),
        (3900, 0, 4000 * ROW_BYTES),
    ],
    ids=["least", "one-chunk", "more", "a-quarter", "expected", "all-there-is"],
)
def test_how_much_is_pinned_ahead(driver, needed, expected, pinned):
    tier = make_tier(4000)
    tier.ensure(needed, expected)
    settle(tier)
    assert driver.pinned(tier) == pinned


def test_nobody_waits_for_what_is_pinned_ahead(driver):
    tier = make_tier(4000)
    tier.ensure(100)
    settle(tier)
    driver.open.clear()
    tier.ensure(200)  # starts the background, which stands still
    assert tier._thread is not None and driver.pinned(tier) < 4 * CHUNK + 200 * ROW_BYTES
    waiting = threading.Thread(target=tier.ensure, args=(1000,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    driver.open.set()
    waiting.join(10)
    assert not waiting.is_alive() and driver.pinned(tier) >= 1000 * ROW_BYTES


@pytest.mark.parametrize("inference", [False, True])
def test_what_was_written_stays(driver, inference):
    with torch.inference_mode(inference):
        tier = make_tier(1000)
        for blocks in (3, 64, 65, 300, 1000):
            tier.ensure(blocks)
            tier.rows[:blocks] = torch.arange(1.0, 1 + blocks)[:, None]
        settle(tier)
        assert tier.pinned and torch.equal(tier.rows[:, 7], torch.arange(1.0, 1001))


def test_a_driver_that_refuses(driver):
    """Nothing is said while what is needed is pinned; then it is said once, and nothing is tried again."""
    driver.limit = 6 * CHUNK
    tier = make_tier(4000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tier.ensure(200)
        settle(tier)
        tier.ensure(300)
        settle(tier)
        assert tier.pinned and link_of(tier.rows) is tier.link and driver.pinned(tier) == 6 * CHUNK
    with pytest.warns(UserWarning, match=r"can't be pinned \(out of memory.*slower.*ulimit -l.*smaller host_memory") as said:
        tier.ensure(400)
    assert len(said) == 1 and not tier.pinned and link_of(tier.rows) is None
    driver.limit = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tier.ensure(10)
        tier.ensure(1000)
    assert not tier.pinned and link_of(tier.rows) is None and len(driver.regions) == 6
    tier.rows[999] = 1.0  # it is memory like any other


def test_a_driver_that_refuses_everything(driver):
    driver.limit = 0
    tier = make_tier(100)
    with pytest.warns(UserWarning, match="can't be pinned"):
        tier.ensure(1)
    assert not tier.pinned and not driver.regions
    del tier
    gc.collect()
    assert driver.released == []


def test_dropped_memory_is_given_back_after_the_driver_has_let_go(driver, monkeypatch):
    tier = make_tier(1000)
    tier.ensure(500)
    settle(tier)
    address, regions = tier.rows.data_ptr(), list(driver.regions)
    state = []

    def unregister(addresses, device):
        state.append(mapped(address))
        driver.unregister(addresses, device)

    monkeypatch.setattr(host, "unregister", unregister)
    assert mapped(address) and address in LINKS
    del tier
    gc.collect()
    assert state == [True] and driver.released == regions
    assert not mapped(address) and address not in LINKS


def mapped(address: int) -> bool:
    try:
        with open("/proc/self/maps", encoding="ascii") as file:
            ranges = [line.split()[0].split("-") for line in file]
    except OSError:
        pytest.skip("no /proc here")
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_a_tier_that_is_dropped_while_it_is_being_pinned(driver):
    tier = make_tier(4000)
    tier.ensure(1)
    settle(tier)
    driver.open.clear()
    tier.ensure(200)
    thread = tier._thread
    del tier
    gc.collect()
    driver.open.set()
    thread.join(10)
    assert not thread.is_alive()
    # Of the three more chunks that were to come, the one that was under way.
    assert driver.released == list(driver.regions) and len(driver.released) in (4, 5)


def test_a_machine_without_threads(driver, monkeypatch):
    """Nobody waits for a thread that could not be started."""

    def start(self):
        raise RuntimeError("can't start new thread")

    tier = make_tier(2000)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.warns(UserWarning, match=r"can't be pinned \(can't start new thread"):
        tier.ensure(10)
    tier.ensure(100)
    assert not tier.pinned and link_of(tier.rows) is None


def test_an_interrupt_while_the_thread_is_started(driver, monkeypatch):
    tier, original = make_tier(2000), threading.Thread.start

    def start(self):
        monkeypatch.setattr(threading.Thread, "start", original)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        tier.ensure(10)
    tier.ensure(10)  # does not wait for what never ran
    settle(tier)
    assert tier.pinned and driver.pinned(tier) == 4 * CHUNK


def test_a_wait_that_is_interrupted(driver):
    """Ctrl-C while memory is being pinned: the next one waits again."""
    tier = make_tier(2000)
    driver.open.clear()
    original, interrupted = tier._changed.wait_for, []

    def wait_for(predicate):
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        driver.open.set()
        return original(predicate)

    tier._changed.wait_for = wait_for
    with pytest.raises(KeyboardInterrupt):
        tier.ensure(500)
    tier.ensure(500)
    settle(tier)
    assert tier.pinned and driver.pinned(tier) >= 500 * ROW_BYTES


def test_two_tiers_at_once(driver):
    """Each waits for its own memory, and a tier that is let go takes only its own from the driver."""
    tiers = [make_tier(1500), make_tier(900)]
    threads = [threading.Thread(target=tier.ensure, args=(blocks,)) for tier, blocks in zip(tiers, (1500, 900))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [driver.pinned(tier) for tier in tiers] == [1500 * ROW_BYTES, 900 * ROW_BYTES]
    assert link_of(tiers[0].rows) is tiers[0].link and link_of(tiers[1].rows) is tiers[1].link
    own = list(tiers[0]._regions)
    for tier in tiers:
        settle(tier)
    del tier, threads, tiers[0]
    gc.collect()
    assert driver.released == own and driver.pinned(tiers[0]) == 900 * ROW_BYTES


EXIT = """
import sys, time, torch
from hf_sparse.cache import host
host.CHUNK_BYTES, host.AHEAD_BYTES = 2**16, 2**22
started = []
def register(address, size, device):
    started.append(1)
    time.sleep(0.02)
host.register = register
tier = host.HostTier(20000, 256, torch.float32, torch.device("cuda", 0))
tier.ensure(1, expected=20000)
thread = tier._thread
assert thread.is_alive() and len(started) < 100
print("alive", flush=True)
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del tier"], ids=["end", "exit", "dropped"])
def test_an_interpreter_that_ends_while_memory_is_being_pinned(end):
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", EXIT + end], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
    assert time.monotonic() - begun < 60


def test_on_a_cpu_nothing_is_pinned_or_said(driver):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tier = HostTier(100, ELEMENTS, torch.float32, torch.device("cpu"))
        tier.ensure(100)
    assert not tier.pinned and not driver.regions and link_of(tier.rows) is None and tier._thread is None


# -- the pool ----------------------------------------------------------------------------------------------------


class Table:
    def __init__(self, pool):
        self.table = torch.zeros(0, dtype=torch.int64)
        pool.join(self)


def test_every_id_that_is_given_out_is_pinned():
    """However ids were freed before: a pool never names a row that is not pinned, and asks for no more than there is."""
    pool = BlockPool(torch.device("cpu"), torch.float32, ELEMENTS, None, 3000 * ROW_BYTES)
    asked = []
    pool.host_tier.ensure = lambda blocks, expected: asked.append((blocks, expected))
    generator = torch.Generator().manual_seed(0)
    layers = [Table(pool) for _ in range(3)]
    slack = []
    for count in torch.randint(1, 60, (60,), generator=generator).tolist():
        layer = layers[count % 3]
        if count % 5 == 0:
            layer.table = layer.table[: layer.table.shape[0] // 2]
            pool.drop()
        ids = pool.allocate(count, more=count)
        layer.table = torch.cat([layer.table, ids])
        blocks, expected = asked.pop()
        assert int(ids.max()) < blocks <= expected == pool.ids <= 3000 and not asked
        slack.append(blocks - 1 - int(ids.max()))
    assert min(slack) == 0


def test_what_kernels_know_of_moves_with_the_ids():
    pool = BlockPool(torch.device("cpu"), torch.float32, ELEMENTS, None, 3000 * ROW_BYTES)
    layer, version = Table(pool), pool.version
    layer.table = pool.allocate(10)
    assert pool.version > version
    version = pool.version
    layer.table = torch.cat([layer.table, pool.allocate(1)])
    layer.table = torch.cat([layer.table, pool.allocate(200)])
    assert pool.version > version


def test_a_pool_that_can_not_be_laid_out_anew_stays_as_it_is(monkeypatch):
    pool = BlockPool(torch.device("cpu"), torch.float32, ELEMENTS, None, 300 * ROW_BYTES)
    layer = Table(pool)
    layer.table = pool.allocate(6)
    pool.resize(9)
    pool.host[layer.table] = layer.table[:, None].float()
    pool.slot_of[layer.table[:4]] = torch.tensor([3, 1, 8, 5])
    pool.block_in[pool.slot_of[layer.table[:4]]] = layer.table[:4]
    pool.priority[pool.slot_of[layer.table[:4]]] = 1.0
    pool.kv[pool.slot_of[layer.table[:4]]] = layer.table[:4, None].float()
    pool.pinned[8] = True
    pool.kv[8] = -1.0  # an open block
    before = [part.clone() for part in (pool.kv[[1, 3, 5, 8]], pool.slot_of, pool.block_in, pool.priority, pool.pinned)]
    real = torch.zeros

    def zeros(*shape, **more):
        if shape[0] == 200:
            raise torch.OutOfMemoryError("no room")
        return real(*shape, **more)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError):
        pool.resize(200)
    after = (pool.kv[[1, 3, 5, 8]], pool.slot_of, pool.block_in, pool.priority, pool.pinned)
    assert all(torch.equal(old, new) for old, new in zip(before, after)) and pool.slots == 9
    pool.resize(20)
    assert (pool.kv[pool.slot_of[layer.table[2]]] == -1.0).all()
    assert all((pool.kv[pool.slot_of[block]] == block).all() for block in layer.table[[0, 1, 3]])


@pytest.mark.parametrize(
    "use",
    [
        lambda pool: pool.tiers(),
        lambda pool: pool.sweep(),
        lambda pool: pool.resize(7),
        lambda pool: pool.allocate(100),
    ],
    ids=["tiers", "sweep", "resize", "grow"],
)
def test_the_pool_waits_for_what_is_stored_beside(use):
    pool = BlockPool(torch.device("cpu"), torch.float32, ELEMENTS, None, 300 * ROW_BYTES)
    layer = Table(pool)
    layer.table = pool.allocate(3)
    maps, joined = (pool.slot_of, pool.block_in, pool.kv), []
    pool.host_tier.link.join = lambda: joined.append((pool.slot_of, pool.block_in, pool.kv))
    use(pool)
    assert joined and all(one is other for one, other in zip(joined[0], maps))  # before anything moved
