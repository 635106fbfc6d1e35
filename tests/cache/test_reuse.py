"""Tokens that share one selection (`reuse`), in the reference step; `tests/reuse.py` has the rule that it is held to."""
from __future__ import annotations

import pytest
import torch

from hf_sparse import PSACache, PSAConfig, patched
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.kept import KeptSelection
from hf_sparse.selection.drift import drifted
from tests.models import get_model
from tests.parity import assert_same_run, reference
from tests.reuse import DIM, GROUP, HEADS, TURNS, Reader, a_row_that_was_read_whole, one_query_turns
from tests.scenarios import SCENARIOS, greedy

P = 8


@pytest.mark.parametrize("reuse", [1, 2, 4, 8])
@pytest.mark.parametrize("ahead", [0, 1, 2, P - 1])
def test_over_ends_of_blocks(ahead, reuse):
    """Wherever a row stands in its block, the newest tokens are read (LServe's list of kept pages lost them after an end)."""
    reader = Reader(20 * P + ahead, reuse=reuse, reuse_refresh=0)
    if reuse == 1:
        for _ in range(2 * P):
            reader.step()
        assert reader.layer.kept._length is None            # nothing is kept
        return
    reader.check(2 * P + 3)
    fresh = [all(step) for step in reader.fresh]
    assert fresh == [any(step) for step in reader.fresh]    # without early ones, heads go together
    # Every `reuse` tokens, and with each token that opens a block.
    since, expected = 0, []
    for number in range(2 * P + 3):
        opens = (20 * P + ahead + number) % P == 0
        since = 0 if opens or since == reuse or number == 0 else since
        expected.append(since == 0)
        since += 1
    assert fresh == expected


@pytest.mark.parametrize("reuse", [2, 4, 8])
@pytest.mark.parametrize("settings", [
    dict(), dict(group_stop="min"), dict(top_k=0.4), dict(recent_blocks=0, sink_blocks=0), dict(digest="min_max"),
    dict(digest="key_bits", policy="threshold", threshold=0.8, round_blocks=1),
    dict(digest="key_bits", policy="top_p", top_p=0.7),
    dict(digest="key_bits", threshold=0.9, policy="threshold", max_blocks=12),
], ids=str)
def test_ragged_rows_and_early_refresh(settings, reuse):
    reader = Reader(150, pads=(0, 3, 41, 148), reuse=reuse, wander=0.5, reuse_refresh=0.7, **settings)
    reader.check(3 * P)
    flat = [fresh for step in reader.fresh for fresh in step]
    assert reader.early and not all(flat)                   # both ways to go on were taken


def test_a_row_that_was_read_whole():
    a_row_that_was_read_whole()


@pytest.mark.parametrize("digest", ["channel_codes", "cuboid_mean", "centroid"])
def test_other_digests(digest):
    rounds = dict(policy="threshold", threshold=0.8, round_blocks=1) if digest == "channel_codes" else {}
    reader = Reader(300, pads=(0, 17), reuse=4, wander=0.5, reuse_refresh=0.5, digest=digest, **rounds)
    reader.check(12)
    assert not all(fresh for step in reader.fresh for fresh in step)


def test_sinks_take_part_in_what_is_kept():
    sinks = torch.tensor([3.0, 5.0, 1.0, 4.0, 0.0, -2.0])
    Reader(150, pads=(0, 9), reuse=4, wander=0.6, reuse_refresh=0.5, sinks=sinks).check(2 * P)


@pytest.mark.parametrize("turn", TURNS)
def test_one_query_that_turns_away_ends_its_groups_selection(turn):
    one_query_turns(turn)


def test_a_query_is_compared_with_that_of_the_selection():
    """Small steps add up, and after a selection they are counted from there, over the end of a block too."""
    reader = Reader(20 * P + 3, pads=(0, 1), reuse=P, wander=0.25, reuse_refresh=0.8)
    reader.check(3 * P)
    assert len(reader.early) > 4 and not all(fresh for step in reader.fresh for fresh in step)
    assert all(not all(reader.fresh[step][2 * row:2 * row + 2]) for step, row, _ in reader.early[:1])


def test_zero_lets_a_query_turn_as_far_as_it_likes():
    reader = Reader(40 * P, reuse=P, reuse_refresh=0, wander=1.0)
    reader.check(2)
    reader.query = -reader.query
    reader.check(2)
    assert reader.fresh == [[True, True], *[[False, False]] * 3]


def test_stats_say_how_often_was_selected():
    reader = Reader(150, pads=(0, 3, 41), reuse=4, wander=0.5, reuse_refresh=0.7)
    reader.check(10)
    fresh = torch.tensor(reader.fresh).float()
    stats = reader.layer.stats.as_dict(0, "psa", False)
    assert stats["selected"] == pytest.approx(float(fresh.mean())) and 0.25 < stats["selected"] < 1
    assert 0 < stats["coverage"] < 1


def test_beams_select_at_every_token_and_stats_say_so():
    reader = Reader(150, pads=(0, 20), reuse=4, reuse_refresh=0)
    for _ in range(3):
        reader.check(1)
        reader.layer.reorder_cache(torch.tensor([1, 0]))
        reader.take_rows([1, 0])
    assert reader.layer.stats.as_dict(0, "psa", False)["selected"] == 1.0


def test_the_budget_holds_while_the_tail_grows():
    """With units of several blocks the tail grows without moving on; kept blocks make room for it."""
    reader = Reader(300, reuse=8, reuse_refresh=0, digest="channel_codes", policy="top_k", top_k=22)
    held = []
    for _ in range(2 * P):
        before = None if reader.layer.stats.sums is None else reader.layer.stats.sums[0].clone()
        reader.step()
        held.append(float(reader.layer.stats.sums[0] - (0 if before is None else before)) / HEADS)
    assert max(held) <= 22 and 22 in held


CHANGES = {
    "crop": lambda layer: layer.crop(-1),
    "crop and as many again": lambda layer: (layer.crop(-2), _chunk(layer, 2)),
    "chunk": lambda layer: _chunk(layer, 5),
    "chunk of one": lambda layer: _chunk(layer, 1),
    "beams": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "repeated": lambda layer: layer.batch_repeat_interleave(2),
    "one row": lambda layer: layer.batch_select_indices(torch.tensor([1])),
}


def _chunk(layer, count):
    """Tokens that a forward of its own stores."""
    shape = layer.batch, HEADS, count, DIM
    query = torch.zeros(layer.batch, HEADS * GROUP, count, DIM)
    mask = torch.ones(1, 1, count, layer.length + count, dtype=torch.bool)
    layer.attend(query, Pending(torch.ones(shape), torch.ones(shape), layer.length), None, mask, 1.0, 0.0, None, None)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_rows_makes_the_layer_forget(change):
    reader = Reader(150, pads=(0, 20), reuse=4, reuse_refresh=0)
    reader.check(2)
    change(reader.layer)
    if reader.layer.batch != 2:
        reader.take_rows([0, 0, 1, 1] if reader.layer.batch == 4 else [1])
    reader.forget()
    reader.check(6)


def test_beams_that_stay_keep_their_rows_apart():
    """Rows of one batch select at different times, and a row does what it does alone."""
    both, alone = (Reader(150, pads=(0, 20), reuse=4, wander=0.7, reuse_refresh=0.4) for _ in range(2))
    alone.layer.batch_select_indices(torch.tensor([1]))
    for _ in range(10):
        want = both.step()
        keys, values = (part[1:, :, -1:] for part in both.layer.padded())
        got = alone.layer.attend(both.asked[1:], Pending(keys, values, alone.layer.length), None, None, DIM**-0.5, 0.0, None,
                                 None)
        torch.testing.assert_close(got.squeeze(2), want[1:], rtol=1e-5, atol=1e-6)


def test_a_fork_starts_without_and_leaves_the_other_alone():
    reader = Reader(161, reuse=4, reuse_refresh=0)
    reader.check(2)
    fork = reader.layer.fork(reader.layer.state)
    assert fork.kept._length is None
    reader.check(1)
    assert reader.fresh[-1] == [False, False]


def test_reset_forgets():
    reader = Reader(150, reuse=4)
    reader.check(2)
    reader.layer.reset()
    assert reader.layer.kept._length is None


EVERYTHING = PSAConfig(policy="top_k", top_k=1.0, digest="pages", block_size=4, logical_size=2, min_context=0, reuse=4,
                       reuse_refresh=0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_keeping_everything_is_dense_attention(scenario):
    """However one generates: a list that outlives a change of its row would leave blocks out, or read others."""
    expected, model = reference("llama", scenario), get_model("llama")
    with patched(model, EVERYTHING):
        ours = SCENARIOS[scenario](model, lambda: PSACache(model.config, EVERYTHING))
    assert_same_run(ours, expected)


def test_the_preset_decodes():
    model = get_model("llama")
    with patched(model, "lserve", min_context=0, block_size=4, logical_size=2, top_k=8):
        run = greedy(model, lambda: PSACache(model.config, "lserve", min_context=0, block_size=4, logical_size=2, top_k=8))
    stats = run["cache"].stats()
    assert 0 < stats["kv_fraction"] < 0.5 and stats["sparse_steps"] > 0


# -- controls: what the checks above would miss is nothing if they see these ---------------------------------------------
def _ignoring(name):
    def due(self, query, start, length, reuse, refresh):
        if self._length != length - 1:
            return torch.ones(query.shape[:2], dtype=torch.bool)
        parts = {"age": self._age >= reuse, "start": (start != self._start)[:, None].expand_as(self._age),
                 "query": drifted(query, self._query, refresh)}
        del parts[name]
        return torch.stack(list(parts.values())).any(0)
    return due


@pytest.mark.parametrize("name", ["age", "start", "query"])
def test_control_a_rule_that_is_left_out_is_seen(name, monkeypatch):
    monkeypatch.setattr(KeptSelection, "due", _ignoring(name))
    with pytest.raises(AssertionError):
        Reader(150, reuse=4, wander=0.35, reuse_refresh=0.75).check(3 * P)


def test_control_queries_compared_with_the_last_one_are_seen(monkeypatch):
    keep = KeptSelection.keep

    def keep_newest(self, fresh, query, *args):
        keep(self, fresh, query, *args)
        self._query = query

    monkeypatch.setattr(KeptSelection, "keep", keep_newest)
    with pytest.raises(AssertionError):
        test_a_query_is_compared_with_that_of_the_selection()


def test_control_blocks_that_left_the_tail_are_lost_without_a_refresh(monkeypatch):
    """The defect itself: a kept list that goes on over the end of a block loses what has left the tail."""
    monkeypatch.setattr(KeptSelection, "due", _ignoring("start"))
    reader = Reader(150, reuse=1000, reuse_refresh=0, recent_blocks=0)
    for _ in range(2 * P):
        reader.step()
    start = int(reader.layer.tail_start(reader.layer.lengths)[0])
    assert not any(start - 1 in reader.observed(0, head)[0] for head in range(HEADS))


def test_control_a_crop_that_is_not_noticed_is_seen(monkeypatch):
    monkeypatch.setattr(KeptSelection, "forget", lambda self: None)
    monkeypatch.setattr(KeptSelection, "stored", lambda self, count: None)
    with pytest.raises(AssertionError):
        test_what_changes_rows_makes_the_layer_forget(CHANGES["crop and as many again"])
