"""Tokens that share one selection, by the kernels: held to the rule of `tests/reuse.py`, as the reference is."""
from __future__ import annotations

import pytest
import torch

from tests.cache.drive import required
from tests.cache.test_reuse import CHANGES
from tests.reuse import HEADS, TURNS, Reader, a_row_that_was_read_whole, one_query_turns
from tests.triton.test_tiered_step import Run, small_launches  # noqa: F401 - a fixture

P = 8


@pytest.mark.parametrize("reuse", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [0, 1, 2, P - 1])
def test_over_ends_of_blocks(ahead, reuse):
    reader = Reader(12 * P + ahead, kernels=True, reuse=reuse, reuse_refresh=0)
    reader.check(P + 1)
    assert reader.layer.stats.reference_steps == 0
    since, expected = 0, []
    for number in range(P + 1):
        since = 0 if (12 * P + ahead + number) % P == 0 or since == reuse or number == 0 else since
        expected.append([since == 0] * HEADS)
        since += 1
    assert reader.fresh == expected


@pytest.mark.parametrize("settings", [
    dict(), *(pytest.param(settings, marks=pytest.mark.slow) for settings in (
        dict(policy="threshold", threshold=0.8, digest="channel_codes"),
        dict(group_stop="min"), dict(top_k=0.4), dict(recent_blocks=0, sink_blocks=0), dict(digest="min_max"),
        dict(digest="channel_codes", top_k=20), dict(policy="top_p", top_p=0.7, digest="channel_codes", group_stop="min"))),
], ids=str)
def test_ragged_rows_and_early_refresh(settings):
    tokens, pads = (300, (0, 3, 131)) if settings.get("digest") == "channel_codes" else (150, (0, 3, 41, 148))
    reader = Reader(tokens, pads=pads, kernels=True, reuse=4, wander=0.5, reuse_refresh=0.7, **settings)
    reader.check(P)
    flat = [fresh for step in reader.fresh for fresh in step]
    assert reader.layer.stats.reference_steps == 0 and not all(flat)
    assert reader.early or "digest" in settings


def test_a_row_that_was_read_whole():
    a_row_that_was_read_whole(kernels=True)


@pytest.mark.parametrize("turn", [turn if turn in ("turned", "none") else pytest.param(turn, marks=pytest.mark.slow)
                                  for turn in TURNS])
def test_one_query_that_turns_away_ends_its_groups_selection(turn):
    one_query_turns(turn, kernels=True)


@pytest.mark.parametrize("heads, group, dim, cosine", [
    (3, 5, 24, 0.75), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1, 40, 0.9), (2, 9, 16, 0.7)))])
def test_odd_sizes(heads, group, dim, cosine):
    reader = Reader(150, pads=(0, 3), kernels=True, reuse=6, wander=0.3, reuse_refresh=cosine, heads=heads, group=group, dim=dim)
    reader.check(P + 2)
    fresh = torch.tensor(reader.fresh).float()
    stats = reader.layer.stats.as_dict(0, "psa", False)
    assert reader.early and not fresh.all() and reader.layer.stats.reference_steps == 0
    assert stats["selected"] == pytest.approx(float(fresh.mean())) and 0 < stats["coverage"] < 1


def test_sinks_and_half_precision():
    sinks = torch.tensor([3.0, 5.0, 1.0, 4.0, 0.0, -2.0])
    Reader(150, pads=(0, 9), kernels=True, reuse=4, wander=0.6, reuse_refresh=0.5, sinks=sinks,
           dtype=torch.float16).check(6, tolerance=2e-3)


@pytest.mark.slow
def test_kernels_and_reference_select_anew_at_the_same_tokens():
    readers = [Reader(150, pads=(0, 3, 41), kernels=kernels, reuse=8, wander=0.5, reuse_refresh=0.7)
               for kernels in (True, False)]
    for reader in readers:
        reader.check(10)
    assert readers[0].early and readers[0].fresh == readers[1].fresh


@pytest.mark.parametrize("change", [change if name in ("crop and as many again", "beams") else
                                    pytest.param(change, marks=pytest.mark.slow) for name, change in CHANGES.items()], ids=CHANGES)
def test_what_changes_rows_makes_the_layer_forget(change):
    reader = Reader(150, pads=(0, 20), kernels=True, reuse=4, reuse_refresh=0)
    reader.check(2)
    change(reader.layer)
    if reader.layer.batch != 2:
        reader.take_rows([0, 0, 1, 1] if reader.layer.batch == 4 else [1])
    reader.forget()
    reader.check(3)


def test_a_step_of_the_reference_between_voids_what_kernels_keep():
    reader = Reader(161, kernels=True, reuse=4, reuse_refresh=0)
    reader.check(2)
    kernels = reader.layer.state.kernels
    reader.layer.state.kernels = lambda device, dtype: False
    reader.step()
    reader.layer.state.kernels = kernels
    reader.forget()
    reader.check(2)


def test_a_fork_starts_without_and_leaves_the_other_alone():
    reader = Reader(161, kernels=True, reuse=4, reuse_refresh=0)
    reader.check(2)
    fork = reader.layer.fork(reader.layer.state)
    assert fork.kept.state is None
    reader.check(1)
    assert reader.fresh[-1] == [False, False]


def test_growing_keeps_what_is_kept():
    """The work buffers grow, and the list of kept blocks with them."""
    reader = Reader(161, kernels=True, reuse=4, reuse_refresh=0)
    reader.check(2)
    work = reader.layer.state.static._work(reader.layer)
    before = reader.layer.kept.ranked.data_ptr()
    work.reserve(work.width + 1)
    reader.layer.state.static._forget_others(reader.layer)
    reader.layer.version += 1 << 40                         # as when its table has grown
    reader.check(2)
    assert reader.layer.kept.ranked.data_ptr() != before
    assert reader.fresh[-2:] == [[False, False], [False, False]]


def test_kept_blocks_may_have_left_the_pool():
    """With a host tier: a kept list is looked up at every token, and outputs are those of a resident pool to the last bit."""
    settings = dict(tokens=150, digest="pages", block_size=8, logical_size=2, policy="top_k", top_k=9, reuse=4,
                    reuse_refresh=0)
    with pytest.raises(ValueError, match="too small") as error:
        Run(gpu_memory=1, host_memory="4MiB", **settings)
    runs = [Run(**settings), Run(gpu_memory=required(error.value), host_memory="4MiB", **settings)]
    outputs = [run.decode(5) for run in runs]
    assert all(map(torch.equal, *outputs))
    runs[1].check_pool()
    hits, misses = runs[1].pool.counters.tolist()
    kept = runs[1].layers[0].kept.state[..., 2]
    assert misses > 0 and hits > int(kept.sum())            # also at tokens that selected nothing


def test_what_had_to_be_read_on_is_not_kept():
    """Estimates that promise too much: the list of planned blocks is not all that was read, so the next token selects anew."""
    reader = Reader(300, kernels=True, reuse=4, wander=0.0, reuse_refresh=0, digest="channel_codes", policy="threshold",
                    threshold=0.98)
    layer = reader.layer
    layer.begin_step()
    for name, part in zip(layer.digests.digest.unit_layout(torch.float32), layer.digests.unit):
        if name == "minimum":
            part[:, :, 0] += 3.0
    reader.step()
    info = layer.state.static._work(layer).info
    short = info[..., 5].clone()
    assert short.any()
    reader.step()
    assert torch.equal(layer.kept.state[..., 3], short)


def test_the_least_critical_block_makes_room_where_the_tail_grows():
    """With `reuse` up to a block, a kept selection sees one block end at most within its unit, and the list ends with its
    least critical block, but for the width of the cut's bin."""
    reader = Reader(300, pads=(0, 5), kernels=True, reuse=P, reuse_refresh=0, digest="channel_codes", policy="top_k", top_k=24)
    share, lost = None, 0
    for _ in range(P):
        reader.step()
        work, kept = reader.layer.state.static._work(reader.layer), reader.layer.kept
        _, _, planned, fresh, *_ = kept.state.unbind(-1)
        share = work.share.clone() if share is None else torch.where(fresh[..., None] != 0, work.share, share)
        for row, head in torch.nonzero(planned > work.info[..., 0]).tolist():
            listed = kept.ranked[row, head, :planned[row, head]]
            left = listed[work.info[row, head, 0]:]
            assert len(left) == 1 and share[row, head, left] <= 1.05 * share[row, head, listed].min()
            lost += 1
    assert lost > 2 * HEADS


def test_control_a_query_that_is_not_kept_is_seen():
    """Kernels that compare with the query of the token before: the check must notice."""
    reader = Reader(12 * P + 3, kernels=True, reuse=8, wander=0.25, reuse_refresh=0.8)
    with pytest.raises(AssertionError):
        for _ in range(2 * P):
            reader.check(1)
            reader.layer.kept.query.copy_(reader.asked.view_as(reader.layer.kept.query))


def test_control_kept_lists_without_a_refresh_are_seen():
    """Kernels that never look at where the tail begins: the check must notice."""
    reader = Reader(12 * P + 5, kernels=True, reuse=8, reuse_refresh=0)
    with pytest.raises(AssertionError):
        for _ in range(P):
            reader.check(1)
            start = reader.layer.tail_start(reader.layer.lengths + 1)
            reader.layer.kept.state[..., 1] = start[:, None]
