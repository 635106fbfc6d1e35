"""Streaming heads in a cache: every output against float64 over a plain list of tokens, through all that happens to rows.

Other heads run at threshold 1.0, so that they are dense. `Streams` says what a streaming head sees; nothing of the library's.
"""

from __future__ import annotations

import copy
import gc
import json
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparse import PSACache, PSAConfig
from hf_sparse.cache import split, split_storage, streaming_ring
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.split import SplitLayer
from tests.cache.drive import Text, decode, feed, model_config
from tests.cache.shadow import Shadow

SINK, WINDOW, PREFILL, SLACK_TOKENS = 3, 7, 19, 6
LAYERS, HEADS = 2, 3
STREAMING = {"some": ((0, 1), (1, 0), (1, 2)), "one": ((1, 1),), "layer": ((0, 0), (0, 1), (0, 2), (1, 2)),
             "all": tuple((layer, head) for layer in range(LAYERS) for head in range(HEADS))}
SETTINGS = dict(digest="key_bits", threshold=1.0, block_size=4, min_context=0, streaming_sink=SINK, streaming_window=WINDOW,
                streaming_prefill_window=PREFILL)


@pytest.fixture
def small_slack(monkeypatch):
    """So few tokens beside the window that tests of ordinary size reach the end of what can be taken back."""
    for module in (streaming_ring, split_storage):
        monkeypatch.setattr(module, "SLACK_TOKENS", SLACK_TOKENS)


class Streams(Shadow):
    """A cache with streaming heads, and all that it was given."""

    def __init__(self, streaming="some", seed=0, heads=HEADS, layers=LAYERS, **settings):
        pairs = STREAMING.get(streaming, streaming)
        config = {**SETTINGS, "streaming_heads": pairs, **settings}
        super().__init__(PSACache(model_config(layers, heads, 2, 8), **config), layers, heads, seed=seed)
        self.config = self.cache.config
        self.streams = torch.zeros(layers, heads, dtype=torch.bool)
        for layer, head in pairs:
            self.streams[layer, head] = True

    def clear(self) -> None:
        super().clear()
        self.stepped = 0

    def feed(self, count, batch=None, valid=None, cache=None) -> None:
        self.before = self.length
        super().feed(count, batch, valid, cache)

    def widths(self) -> torch.Tensor:
        """[B, q] how many tokens the streaming heads of the newest tokens see beside the sink."""
        config, count = self.config, self.length - self.before
        number = self.valid.cumsum(1)[:, self.before:]      # 1 for the first of a row
        wide = config.min_context > config.streaming_sink + config.streaming_window
        free = config.min_context + streaming_ring.SLACK_TOKENS if wide else 0
        if count == 1 and self.before:
            self.stepped = self.length
            return torch.where(number < config.min_context, 10**6, config.streaming_window)
        decoded = self.valid[:, :self.stepped].sum(1)
        was = (decoded >= free) & (self.stepped > 0)
        return torch.where(was, config.streaming_window, config.streaming_prefill_window)[:, None].expand(-1, count)

    def check(self, outputs, queries) -> None:
        count, total = outputs.shape[2], self.length
        place = self.valid.cumsum(1) - 1
        own, widths = place[:, -count:, None], self.widths()[..., None]
        causal = (torch.arange(total) <= torch.arange(total - count, total)[:, None])[None] & self.valid[:, None]
        narrow = causal & ((place[:, None] < self.config.streaming_sink) | (place[:, None] > own - widths))
        streams = self.streams[:, None, :, None, None, None]
        visible = torch.where(streams, narrow[None, :, None, None], causal[None, :, None, None])
        q = queries.double().unflatten(2, (self.heads, self.group))
        logits = torch.einsum("lbhgqd,lbhtd->lbhgqt", q, self.keys.double()) * self.dim**-0.5
        want = torch.einsum("lbhgqt,lbhtd->lbqhgd", logits.masked_fill(~visible, -torch.inf).softmax(-1), self.values.double())
        real = self.valid[:, -count:]
        assert torch.isfinite(outputs).all()
        torch.testing.assert_close(outputs[:, real].double(), want.flatten(3, 4)[:, real], rtol=0, atol=3e-5)

    def crop(self, count: int) -> None:
        super().crop(count)
        self.stepped = min(self.stepped, self.length)

    def fork(self, how=copy.deepcopy) -> Streams:
        return super().fork(how)

    def hide(self, valid: torch.Tensor) -> None:
        """A mask of everything so far, as the next turn's forward brings it."""
        layers = self.cache.state.live_layers()
        assert not any([layer.shows_more(valid) for layer in layers])
        for layer in layers:
            layer.hide(valid)
        self.valid = valid

    @property
    def rings(self) -> list:
        return [layer.ring for layer in self.cache.layers if isinstance(layer, split.SplitLayer)]


def one_hot_text(length: int, rows=1, heads=2, layers=1, seed=0) -> Text:
    """Values that say which token they are of: what comes out is the weight of each token."""
    text = Text(rows, length, layers, heads, key_dim=8, value_dim=length, seed=seed, sharpness=0.5)
    text.values = [torch.eye(length).expand(rows, heads, length, length).contiguous() for _ in range(layers)]
    return text


# -- what is seen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", ["some", "all"])
@pytest.mark.parametrize("prompt", [1, SINK - 1, SINK, SINK + 1, SINK + WINDOW, SINK + WINDOW + 1, PREFILL, SINK + PREFILL, 61])
def test_a_prompt_and_steps(prompt, streaming, small_slack):
    one = Streams(streaming)
    one.feed(prompt, batch=2)
    one.decode(18)                                          # the ring of 13 tokens goes round


@pytest.mark.parametrize("prompt", [2, 20, 70])
def test_the_tokens_attended_to(prompt, small_slack):
    """Read off exactly: a ring whose tokens lie one place off, or two rings that differ, would show."""
    text = one_hot_text(prompt + 40, rows=2, heads=3)
    cache = PSACache(text.config(), **SETTINGS, streaming_heads=[[0, 0], [0, 2]])
    seen = torch.cat([feed(cache, text, 0, prompt), decode(cache, text, prompt, text.length)], 2)[0]
    for t in range(text.length):
        window = PREFILL if t < prompt else WINDOW
        wanted = {token for token in range(t + 1) if token < SINK or token > t - window}
        for head in range(6):
            attended = {tuple(row.nonzero().squeeze(1).tolist()) for row in seen[:, t, head]}
            assert attended == {tuple(sorted(wanted if head // 2 in (0, 2) else range(t + 1)))}


@pytest.mark.parametrize("sizes", [(2,), (15,), (3, 12)], ids=str)
def test_a_later_turn_sees_the_window_of_decoding(sizes, small_slack):
    """The wide window is of the first prompt: what lies between the two is gone once a token has been decoded."""
    text = one_hot_text(60)
    cache = PSACache(text.config(), **SETTINGS, streaming_heads=[[0, 1]])
    feed(cache, text, 0, 40)
    decode(cache, text, 40, 41)
    parts, low = [], 41
    for size in sizes:
        parts.append(feed(cache, text, low, low + size))
        low += size
    for t, row in enumerate(torch.cat(parts, 2)[0, 0, :, 2], 41):
        assert row.nonzero().squeeze(1).tolist() == [token for token in range(t + 1) if token < SINK or token > t - WINDOW]


def test_rings_of_rows_with_other_lengths_stay_apart(small_slack):
    text = one_hot_text(60, rows=2, heads=2)
    cache = PSACache(text.config(), **SETTINGS, streaming_heads=[[0, 1]])
    valid = torch.arange(60) >= torch.tensor([0, 17])[:, None]
    feed(cache, text, 0, 30, valid)
    seen = decode(cache, text, 30, 60, valid)[0]
    for row, pad in enumerate((0, 17)):
        for t in range(30 - pad, 60 - pad):
            wanted = [token + pad for token in range(t + 1) if token < SINK or token > t - WINDOW]
            assert seen[row, t - 30 + pad, 2].nonzero().squeeze(1).tolist() == wanted


CASES = [
    # heads, group, key dim, value dim, softcap, sinks, streaming
    pytest.param(2, 3, 8, 12, 0.0, False, (1,), id="group3-wide-values"),
    pytest.param(5, 1, 12, 6, 0.0, True, (4, 0, 2), id="sinks-narrow-values"),
    pytest.param(2, 2, 8, 8, 3.0, False, (0,), id="softcap"),
    pytest.param(3, 4, 8, 20, 3.0, True, (0, 1, 2), id="softcap-sinks-all"),
    pytest.param(1, 6, 8, 8, 0.0, True, (0,), id="one-kv-head"),
]


@pytest.mark.parametrize(("heads", "group", "key_dim", "value_dim", "softcap", "sinks", "streaming"), CASES)
def test_shapes_and_logits(heads, group, key_dim, value_dim, softcap, sinks, streaming, small_slack):
    text = Text(2, 55, 1, heads, group, key_dim, value_dim)
    cache = PSACache(text.config(), **SETTINGS, streaming_heads=[(0, head) for head in streaming])
    logits = torch.randn(heads * group, generator=torch.Generator().manual_seed(1)) + 1 if sinks else None
    more = dict(softcap=softcap, sinks=logits)
    parts = [feed(cache, text, 0, 30, **more), feed(cache, text, 30, 33, **more), decode(cache, text, 33, 55, **more)]
    got = torch.cat(parts, 2)
    for b in range(2):
        for t in range(text.length):
            for own in range(heads * group):
                head = own // group
                token = torch.arange(t + 1)
                if head in streaming:
                    token = token[(token < SINK) | (token > t - (PREFILL if t < 33 else WINDOW))]
                s = text.keys[0][b, head, token].double() @ text.queries[0][b, own, t].double() * text.scaling
                if softcap:
                    s = softcap * torch.tanh(s / softcap)
                weights = torch.cat([s, logits[own:own + 1].double()]).softmax(0)[:-1] if sinks else s.softmax(0)
                want = weights @ text.values[0][b, head, token].double()
                torch.testing.assert_close(got[0, b, t, own].double(), want, rtol=0, atol=2e-5)


# -- prompts in pieces, padding --------------------------------------------------------------------------------------


def in_pieces(cache, text, end, size, valid=None):
    """A prompt of `end` tokens in chunks, told of its length as generate() does."""
    cache.state.expected = end
    parts = [feed(cache, text, low, min(low + size, end), valid) for low in range(0, end, size)]
    cache.state.expected = 0
    return torch.cat(parts, 2)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("size", [1, 7, SINK - 1, SINK + 1, PREFILL - 1, PREFILL + 1, SINK + PREFILL + SLACK_TOKENS + 1, 33])
def test_pieces_are_the_whole(size, padded, small_slack):
    text = Text(3, 80, LAYERS, HEADS, key_dim=8)
    valid = torch.arange(80) >= torch.tensor([0, 41, 5])[:, None] if padded else None
    whole, pieces = (PSACache(text.config(), **SETTINGS, streaming_heads=STREAMING["layer"]) for _ in range(2))
    real = torch.ones(3, 80, dtype=torch.bool) if valid is None else valid
    want, got = feed(whole, text, 0, 60, valid), in_pieces(pieces, text, 60, size, valid)
    torch.testing.assert_close(got[:, real[:, :60]], want[:, real[:, :60]], rtol=0, atol=2e-5)
    torch.testing.assert_close(decode(pieces, text, 60, 68, valid), decode(whole, text, 60, 68, valid), rtol=0, atol=2e-5)
    # The next turn too, after the ring has become small.
    want = feed(whole, text, 68, 80, valid)
    got = torch.cat([feed(pieces, text, 68, 74, valid), feed(pieces, text, 74, 80, valid)], 2)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("streaming", ["some", "all"])
@pytest.mark.parametrize("min_context", [0, 20])
@pytest.mark.parametrize("pads", [(0, 2, 36), (17, 30, 39)], ids=str)
def test_a_padded_row_is_what_it_is_alone(pads, min_context, streaming, small_slack):
    """Also if it is shorter than the window, or than what is attended densely; and in a second turn with padding of its own."""
    text, turn = Text(3, 70, LAYERS, HEADS, key_dim=8), (3, 0, 5)
    token = torch.arange(70)
    valid = (token >= torch.tensor(pads)[:, None]) & ((token < 52) | (token >= 52 + torch.tensor(turn)[:, None]))
    settings = {**SETTINGS, "min_context": min_context, "streaming_heads": STREAMING[streaming]}
    make = lambda: PSACache(text.config(), **settings)  # noqa: E731
    cache = make()
    together = torch.cat([feed(cache, text, 0, 40, valid), decode(cache, text, 40, 52, valid), feed(cache, text, 52, 62, valid),
                          decode(cache, text, 62, 70, valid)], 2)
    for row, pad in enumerate(pads):
        only = Text.select(text, [row])
        for name in ("queries", "keys", "values"):
            setattr(only, name, [part[:, :, valid[row]] for part in getattr(only, name)])
        prompt, later = 40 - pad, 62 - pad - turn[row]
        single = make()
        alone = torch.cat([feed(single, only, 0, prompt), decode(single, only, prompt, prompt + 12),
                           feed(single, only, prompt + 12, later), decode(single, only, later, later + 8)], 2)
        torch.testing.assert_close(together[:, row, valid[row]], alone[:, 0], rtol=0, atol=2e-5)


def test_a_decoded_token_that_is_padding(small_slack):
    one = Streams(min_context=20)
    one.feed(30, batch=3, valid=torch.arange(30) >= torch.tensor([0, 20, 29])[:, None])
    for flags in ([True, False, True], [False, True, True], [True, True, False]) * 5:
        one.feed(1, valid=torch.tensor(flags)[:, None])


def test_padding_takes_no_tokens_place(small_slack):
    """What the ring keeps to be taken back to is all still there."""
    one = Streams()
    one.feed(30, batch=2)
    one.decode(20)
    one.feed(1, valid=torch.zeros(2, 1, dtype=torch.bool))
    one.crop(SLACK_TOKENS + 1)                              # the padding, and as many tokens as can be
    one.decode(3)


def test_a_decoded_token_that_is_padding_goes_the_way_of_the_others(small_slack, monkeypatch):
    def several(*args):
        raise AssertionError("taken for a turn, which waits for the lengths of the rows")
    monkeypatch.setattr(SplitLayer, "_extend", several)
    test_a_decoded_token_that_is_padding(small_slack)


def test_below_min_context_nothing_is_hidden(small_slack):
    one = Streams(min_context=SINK + PREFILL)
    one.feed(4, batch=2)
    one.decode(12)                                          # more than sink and window
    text = Text(1, 22, 1, 2, key_dim=8)
    settings = {**SETTINGS, "min_context": 22}
    streams, dense = PSACache(text.config(), **settings, streaming_heads=[(0, 1)]), PSACache(text.config(), **settings)
    for cache in (streams, dense):
        feed(cache, text, 0, 9)
    torch.testing.assert_close(decode(streams, text, 9, 21), decode(dense, text, 9, 21), rtol=0, atol=1e-6)


@pytest.mark.parametrize("streaming", STREAMING)
def test_a_window_as_long_as_the_text_is_dense(streaming):
    text = Text(2, 60, LAYERS, HEADS, key_dim=8)
    wide = dict(SETTINGS, streaming_window=60, streaming_prefill_window=60)
    caches = [PSACache(text.config(), **wide, streaming_heads=STREAMING[streaming]), PSACache(text.config(), **SETTINGS)]
    valid = torch.arange(60) >= torch.tensor([0, 13])[:, None]
    outputs = [torch.cat([feed(cache, text, 0, 30, valid)[:, valid[:, :30]].flatten(0, 1),
                          decode(cache, text, 30, 60, valid).flatten(0, 2)]) for cache in caches]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


# -- rows, forks, tokens taken back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("min_context", [0, 15])
def test_rows_and_forks(min_context, streaming, small_slack):
    one = Streams(streaming, min_context=min_context)
    one.feed(30, batch=3, valid=torch.arange(30) >= torch.tensor([0, 13, 25])[:, None])
    one.decode(5)
    one.reorder([2, 0, 0])
    one.decode(3)
    other = one.fork()
    one.decode(9)
    other.reorder([1, 2, 0])
    other.decode(9)
    one.select([2, 0])
    one.repeat(2)
    one.feed(11)
    one.decode(5)
    other.feed(4)
    other.decode(20)
    other.reset()
    other.feed(24, batch=1)
    other.decode(3)


def test_a_fork_with_another_min_context(small_slack):
    one = Streams(min_context=20)
    one.feed(12, batch=2)
    one.decode(2)
    other = one.fork(lambda cache: cache.fork(min_context=0))
    other.config = other.cache.config
    other.decode(10)
    one.decode(10)
    with pytest.raises(ValueError, match="streaming_prefill_window"):
        one.cache.fork(min_context=SINK + PREFILL + 1)


@pytest.mark.parametrize("prompt", [SINK, SINK + WINDOW + SLACK_TOKENS - 2, 40])
def test_tokens_taken_back(prompt, small_slack):
    one = Streams()
    one.feed(prompt, batch=2)
    one.decode(10)
    for back in (1, 3, 2):                                  # together no more than the slack
        one.crop(back)
    one.decode(1)
    one.crop(1)
    one.decode(14)
    one.crop(SLACK_TOKENS)
    one.feed(9)
    one.crop(5)
    one.decode(3)


def test_more_than_can_be_taken_back_is_refused(small_slack):
    one = Streams()
    one.feed(20, batch=2)
    one.decode(20)
    for first, then in ((0, SLACK_TOKENS + 1), (2, SLACK_TOKENS - 1), (SLACK_TOKENS, 1)):
        if first:
            one.crop(first)
        with pytest.raises(ValueError, match="Nothing was changed"):
            one.crop(then)
        assert {layer.get_seq_length() for layer in one.cache.layers} == {one.length}
        one.decode(12)
    one.crop(one.length)                                    # all of it is another text
    assert one.cache.tokens == 0
    one.feed(30)
    one.feed(10)                                            # sees the prefill window: the ring is as wide as at first
    one.decode(5)


def test_short_rows_give_back_more_than_long_ones(small_slack):
    """What a row can take back goes by its own tokens."""
    pads = torch.tensor([0, 28])
    one = Streams()
    one.feed(30, batch=2, valid=torch.arange(30) >= pads[:, None])
    one.decode(8)
    with pytest.raises(ValueError, match="Nothing was changed"):
        one.crop(SLACK_TOKENS + 1)
    one.select([1])
    one.crop(SLACK_TOKENS + 1)                              # the short row has lost nothing yet
    one.decode(20)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_what_was_taken_back_from_a_prompt_is_forgotten_with_the_wide_ring(padded, small_slack):
    one = Streams()
    one.feed(24, batch=2, valid=torch.arange(24) >= torch.tensor([0, 4])[:, None] if padded else None)
    one.crop(12)                                            # all of it was in the ring of a prompt
    one.decode(2)
    one.crop(3)                                             # and what is there now is in the small one
    one.decode(14)


def test_hiding_and_cropping_share_the_slack(small_slack):
    one = Streams()
    one.feed(30, batch=2)
    one.decode(10)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, -4:] = False
    one.hide(valid)
    one.decode(2)
    one.crop(2)
    for more in (3, 20):                                    # too many now, and some that others stand behind
        hidden = valid.clone()
        hidden[0, 40 - 4 - more: 36 if more == 3 else 21] = False
        with pytest.raises(ValueError, match="Nothing in the cache was changed"):
            one.hide(hidden)
    one.decode(2)
    one.feed(7, valid=torch.arange(7) >= torch.tensor([0, 3])[:, None])
    one.decode(15)


def test_hiding_too_much_is_refused_before_any_layer_changes(small_slack):
    one = Streams("one")                                    # layer 0 has no streaming heads, and could do it
    one.feed(30, batch=2)
    one.decode(10)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, -SLACK_TOKENS - 1:] = False
    with pytest.raises(ValueError, match="Nothing in the cache was changed"):
        one.hide(valid)
    one.decode(3)


@pytest.mark.parametrize("min_context", [0, 14])
@pytest.mark.parametrize("streaming", STREAMING)
def test_random_lives(streaming, min_context, small_slack):
    """Refusals are those of a row that would see what is gone, and lose nothing."""
    rng = random.Random(min_context)
    names = ["decode"] * 6 + ["feed", "padded", "single", "reorder", "select", "fork", "drop"] + ["crop"] * 3 + ["hide"] * 2
    family = [Streams(streaming, min_context=min_context)]
    family[0].feed(20, batch=3)
    refused = 0
    for number in range(75):
        one, name = rng.choice(family), rng.choice(names)
        rows = one.batch
        try:
            if name == "decode":
                one.decode(rng.randint(1, 4))
            elif name == "feed":
                one.feed(rng.randint(2, 25))
            elif name in ("padded", "single"):
                count = rng.randint(2, 12) if name == "padded" else 1
                one.feed(count, valid=torch.tensor([[rng.random() < 0.6 for _ in range(count)] for _ in range(rows)]))
            elif name == "reorder":
                one.reorder([rng.randrange(rows) for _ in range(rows)])
            elif name == "select":
                one.select([rng.randrange(rows) for _ in range(rng.randint(2, 3))])
            elif name == "crop":
                one.crop(rng.choice([1, 2, 3, 4, SLACK_TOKENS, SLACK_TOKENS + 1]) if number % 30 else one.length)
                if one.length == 0:
                    one.feed(rng.randint(1, 30))
            elif name == "hide":
                valid = one.valid.clone()
                valid[rng.randrange(rows), -rng.randint(1, SLACK_TOKENS + 2):] = False
                if bool(valid.any(1).all()):
                    one.hide(valid)
            elif name == "fork" and len(family) < 3:
                family.append(one.fork())
            elif name == "drop" and len(family) > 1:
                family.remove(one)
        except ValueError as error:
            assert name in ("crop", "hide") and "was changed" in str(error), (name, error)
            refused += 1
        assert {layer.get_seq_length() for layer in one.cache.layers} == {one.length}
    assert 2 <= refused <= 20


# -- memory ----------------------------------------------------------------------------------------------------------


def test_bytes_and_blocks(small_slack):
    """Rings as long as decoding needs, and blocks of the other heads alone."""
    one = Streams(min_context=0)
    one.feed(60, batch=2)
    token, pairs = 2 * 8 * 4, len(STREAMING["some"])        # keys and values of one row and head, fp32
    assert sum(layer.side_bytes() for layer in one.cache.layers) == 2 * pairs * token * (SINK + PREFILL + SLACK_TOKENS)
    one.decode(1)
    assert sum(layer.side_bytes() for layer in one.cache.layers) == 2 * pairs * token * (SINK + WINDOW + SLACK_TOKENS)
    pool = one.cache.sparse_layers[0].pool
    held = 2 * (LAYERS * HEADS - pairs) * -(-61 // 4)
    assert held <= pool.blocks_in_use() <= held + 2 * (LAYERS * HEADS - pairs)
    stats, plain = one.cache.stats(), Streams(())
    plain.feed(60, batch=2)
    plain.decode(1)
    dense = plain.cache.stats()["bytes"]["device"]
    assert stats["bytes"]["device"] < 0.75 * dense
    assert [entry["kind"] for entry in stats["layers"]] == ["split", "split"]
    one.decode(100)
    assert sum(layer.side_bytes() for layer in one.cache.layers) == 2 * pairs * token * (SINK + WINDOW + SLACK_TOKENS)
    one.reset()
    assert pool.blocks_in_use() == 0 and sum(layer.side_bytes() for layer in one.cache.layers) == 0


def test_the_ring_stays_wide_while_a_row_needs_it(small_slack):
    one = Streams(min_context=20)
    one.feed(30, batch=2, valid=torch.arange(30) >= torch.tensor([0, 22])[:, None])
    one.decode(17)                                          # the short row has 25 tokens, and may yet fall below 20
    assert {ring.columns for ring in one.rings} == {SINK + PREFILL + SLACK_TOKENS}
    one.decode(1)
    assert {ring.columns for ring in one.rings} == {SINK + WINDOW + SLACK_TOKENS}
    one.crop(SLACK_TOKENS)
    one.decode(12)


def test_no_blocks_at_all(small_slack):
    one = Streams("all")
    one.feed(40, batch=2)
    one.decode(4)
    stats = one.cache.stats()
    assert not one.cache.state.pools and not one.cache.sparse_layers
    assert stats["blocks_held"] == 0 and stats["kv_fraction"] is None and stats["bytes"]["host"] == 0
    assert stats["bytes"]["device"] == sum(ring.bytes() for ring in one.rings) > 0


def test_a_host_tier_changes_nothing(small_slack):
    text = Text(2, 160, LAYERS, HEADS, key_dim=8)
    valid = torch.arange(160) >= torch.tensor([0, 37])[:, None]
    outputs = []
    for more in ({}, dict(gpu_memory="60KiB", host_memory="1MiB")):
        settings = {**SETTINGS, "threshold": 0.7, "round_blocks": 1, **more}
        cache = PSACache(text.config(), **settings, streaming_heads=STREAMING["some"])
        outputs.append([feed(cache, text, 0, 120, valid), decode(cache, text, 120, 160, valid)])
    assert cache.stats()["misses"] > 0
    for resident, offloaded in zip(*outputs):
        assert torch.equal(resident, offloaded)


def test_what_the_blocks_have_no_room_for_is_refused_and_nothing_is_lost(small_slack):
    one = Streams(gpu_memory="40KiB", host_memory=0)
    one.feed(30, batch=2)
    one.decode(2)
    with pytest.raises(ValueError, match="used up"):
        one.feed(200)
    assert all(layer.pending is None for layer in one.cache.layers)
    assert {layer.get_seq_length() for layer in one.cache.layers} == {32}
    one.cache.check_whole()
    one.decode(4)


def test_dropped_caches_leave_nothing(small_slack):
    one = Streams()
    one.feed(50, batch=2)
    pool, before = one.cache.sparse_layers[0].pool, one.cache.sparse_layers[0].pool.blocks_in_use()
    other = one.fork()
    other.decode(20)
    assert pool.blocks_in_use() > before
    del other
    gc.collect()
    assert pool.blocks_in_use() == before
    sizes = []
    for _ in range(4):
        one.decode(5)
        sizes.append(pool.ids)
        one.reset()
        assert pool.blocks_in_use() == 0 and not pool.users
        one.feed(50, batch=2)
    assert len(set(sizes)) == 1


class Scalars(TorchDispatchMode):
    """Notes what would wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_decoded_token_waits_for_nothing(small_slack):
    text = Text(2, 60, 1, 2, key_dim=8)
    cache = PSACache(text.config(), **SETTINGS, streaming_heads=[(0, 0), (0, 1)])
    valid = torch.arange(60) >= torch.tensor([0, 5])[:, None]
    feed(cache, text, 0, 30, valid)
    with Scalars() as first:
        decode(cache, text, 30, 31)
    with Scalars() as others:
        decode(cache, text, 31, 50)
        cache.reorder_cache(torch.tensor([1, 0]))
        decode(cache, text, 50, 60)
    assert len(first.found) == 1 and not others.found       # the length of the shortest row, once


# -- settings, refusals ----------------------------------------------------------------------------------------------


def test_settings_round_trip(tmp_path):
    config = PSAConfig(streaming_heads=[[3, 1], [0, 2]], streaming_sink=5, streaming_window=40, min_context=0)
    assert config.streaming_heads == ((0, 2), (3, 1))
    config.save_pretrained(tmp_path)
    for other in (PSAConfig.from_pretrained(tmp_path), PSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
                  PSAConfig(streaming_heads=((3, 1), (0, 2)), streaming_sink=5, streaming_window=40, min_context=0)):
        assert other == config and hash(other) == hash(config)
    assert config.replace(streaming_heads=()) != config


@pytest.mark.parametrize(("settings", "match"), [
    (dict(streaming_heads=[(0, 0), (0, 0)]), "twice"), (dict(streaming_heads=[(0,)]), "pairs"),
    (dict(streaming_heads="00"), "pairs"), (dict(streaming_heads=[(0, -1)]), "pairs"),
    (dict(streaming_heads=[(0, 0.0)]), "pairs"), (dict(streaming_heads=[(0, True)]), "pairs"),
    (dict(streaming_heads=[(0, 0)], streaming_window=31), "below a block"),
    (dict(streaming_heads=[(0, 0)], streaming_prefill_window=255), "streaming_prefill_window"),
    (dict(streaming_heads=[(0, 0)], min_context=5000), "min_context"),
    (dict(streaming_heads=[(1, 0)], dense_layers=[1]), "dense_layers"),
    (dict(streaming_heads=[(1, 0)], sparse_queries=True), "sparse_queries"),
    (dict(streaming_sink=-1), "streaming_sink"), (dict(streaming_window=0), "streaming_window"),
], ids=str)
def test_settings_that_make_no_sense(settings, match):
    with pytest.raises(ValueError, match=match):
        PSAConfig(**settings)


@pytest.mark.parametrize(("pair", "match"), [
    ((2, 0), "layer 2, but this model has 2 layers"), ((0, 3), "KV head 3 of layer 0, which has 3 KV heads"),
], ids=str)
def test_heads_of_another_model(pair, match):
    with pytest.raises(ValueError, match=match):
        PSACache(model_config(2, 3), streaming_heads=[pair])


def test_a_forked_cache_may_not_stream_otherwise():
    cache = PSACache(model_config(2, 2), streaming_heads=[(0, 0)])
    for change in (dict(streaming_heads=()), dict(streaming_window=512), dict(streaming_sink=1)):
        with pytest.raises(ValueError, match="can't change"):
            cache.fork(**change)
    with pytest.raises(ValueError, match="dense_layers"):
        cache.fork(dense_layers=(0,))


def test_a_mask_with_a_pattern_of_its_own():
    text = Text(1, 30, 1, 2, key_dim=8)
    cache = PSACache(text.config(), **SETTINGS, streaming_heads=[(0, 1)])
    handles = cache.update(text.keys[0][:, :, :20], text.values[0][:, :, :20], 0)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()[None, None].clone()
    for pattern in (mask, torch.zeros(1, 1, 20, 20).masked_fill(~mask, torch.finfo(torch.float32).min)):
        with pytest.raises(NotImplementedError, match="not plainly causal"):
            cache.layers[0].attend(text.queries[0][:, :, :20], handles[0].pending, None, pattern, 1.0, 0.0, None, None)
    # A single token whose mask hides some of the past.
    cache.reset()
    feed(cache, text, 0, 20)
    handles = cache.update(text.keys[0][:, :, 20:21], text.values[0][:, :, 20:21], 0)
    hides = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    hides[..., 7] = False
    with pytest.raises(NotImplementedError, match="not plainly causal"):
        cache.layers[0].attend(text.queries[0][:, :, 20:21], handles[0].pending, None, hides, 1.0, 0.0, None, None)


def test_code_that_wants_dense_keys():
    cache = PSACache(model_config(1, 2, 2, 8), **SETTINGS, streaming_heads=[(0, 1)])
    keys, _ = cache.update(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), 0)
    for use in (lambda: keys.dense(), lambda: keys + 1, lambda: torch.cat([keys, keys]), lambda: keys[0]):
        with pytest.raises(NotImplementedError, match="Patch the model with hf_sparse.patch_model"):
            use()


def test_layers_of_both_kinds():
    cache = PSACache(model_config(3, 2), streaming_heads=[(0, 1), (2, 0), (2, 1)], block_size=16, streaming_window=16)
    assert [type(layer) for layer in cache.layers] == [split.SplitLayer, PSALayer, split.SplitLayer]
    assert cache.layers[2].blocks is None and len(cache.sparse_layers) == 2 and cache.state.layers == 2
    assert [layer.order for layer in cache.sparse_layers] == [0, 1]
