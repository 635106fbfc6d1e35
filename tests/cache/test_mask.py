"""attention_mask in every form: what a patched model gives is what the same model gives with DynamicCache and eager attention."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from transformers import DynamicCache

from hf_sparse import PSACache, patched
from tests.cache.drive import Text, decode, feed
from tests.families.build import tiny_model
from tests.models import energise, get_model, prepare
from tests.scenarios import make_prompt

TOLERANCE = 2e-4
LENGTH = 60


def ids_of(rows=2, length=LENGTH, seed=0) -> torch.Tensor:
    return torch.stack([make_prompt(length, seed=seed + row) for row in range(rows)])


def positions(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Position ids as generate() makes them: real tokens counted."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -count:]


class Pair:
    """The same forwards through a PSACache on the patched model, and through DynamicCache on the plain one."""

    def __init__(self, family="llama", **settings):
        self.model = get_model(family)
        self.settings = {
            "min_context": 0,
            "block_size": 4,
            "threshold": 1.0,
            "digest": "key_bits",
            **settings,
        }
        self.ours, self.theirs = (
            PSACache(self.model.config, **self.settings),
            DynamicCache(config=self.model.config),
        )

    @torch.no_grad()
    def forward(self, ids, mask=None, real=None, check=True, **kwargs):
        """Compares logits of the tokens `real` [B, q] (default: those that a 2-D mask shows)."""
        count = ids.shape[1]
        if mask is not None and mask.dim() == 2 and "position_ids" not in kwargs:
            full = mask if mask.shape[1] >= self.theirs.get_seq_length() + count else None
            if full is not None:
                kwargs["position_ids"] = positions(full, count)
                real = full[:, -count:].bool() if real is None else real
        arguments = dict(input_ids=ids, attention_mask=mask, use_cache=True, **kwargs)
        theirs = self.model(past_key_values=self.theirs, **arguments).logits
        with patched(self.model, **self.settings):
            ours = self.model(past_key_values=self.ours, **arguments).logits
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        assert torch.isfinite(ours).all()
        if check:
            torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=TOLERANCE)
        return ours

    def decode(self, mask, steps=5, seed=50):
        """Single tokens, the mask growing by ones."""
        for step in range(steps):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            self.forward(ids_of(mask.shape[0], 1, seed + 3 * step), mask)
        return mask


FAMILIES = ["llama", "gemma3", "gemma2", "gpt_oss"]

PATTERNS = {
    "left": lambda mask: mask[1].fill_(0)[-23:].fill_(1),
    "right": lambda mask: mask[1, -9:].fill_(0),
    "hole": lambda mask: mask[0, 20:31].fill_(0),
    "both-ends": lambda mask: (mask[0, :5].fill_(0), mask[1, -4:].fill_(0)),
    "every-third": lambda mask: mask[1, ::3].fill_(0),
    "one-token": lambda mask: mask[1, :-1].fill_(0),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PATTERNS)
def test_padding_anywhere_in_a_prompt(name, family):
    pair = Pair(family)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    PATTERNS[name](mask)
    pair.forward(ids_of(), mask)
    pair.decode(mask)
    assert pair.ours.stats()["materialized"] == 0


@pytest.mark.parametrize(
    "dtype",
    [torch.long, torch.int32, torch.bool, torch.float32, torch.uint8],
    ids=lambda dtype: str(dtype)[6:],
)
@pytest.mark.parametrize("padded", [False, True], ids=["ones", "padded"])
def test_dtypes(dtype, padded):
    pair = Pair()
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padded:
        mask[1, :30] = 0
    real = mask.bool()
    pair.forward(ids_of(), mask.to(dtype), real=real, position_ids=positions(mask, LENGTH))
    for step in range(3):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        pair.forward(
            ids_of(2, 1, 50 + 3 * step),
            mask.to(dtype),
            real=mask[:, -1:].bool(),
            position_ids=positions(mask, 1),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_mask_at_all(family):
    pair = Pair(family)
    pair.forward(ids_of())
    for step in range(3):
        pair.forward(ids_of(2, 1, 50 + 3 * step))
    pair.forward(ids_of(2, 7, 90))
    pair.forward(ids_of(2, 1, 95))


@pytest.mark.parametrize("family", FAMILIES)
def test_ones_are_no_mask(family):
    """Bit for bit, and the step stays sparse."""
    outputs = []
    for with_mask in (False, True):
        pair = Pair(family, threshold=0.5, round_blocks=1)
        steps, length = [], 0
        for count in (LENGTH, 1, 1, 5, 1):
            length += count
            mask = torch.ones(2, length, dtype=torch.long) if with_mask else None
            place = torch.arange(length - count, length).expand(2, -1)
            steps.append(pair.forward(ids_of(2, count, length), mask, check=False, position_ids=place))
        outputs.append(torch.cat(steps, 1))
        assert pair.ours.stats()["sparse_steps"] == 3 and pair.ours.stats()["kv_fraction"] < 1.0
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_between_turns(family):
    """A second turn that is padded, chunks of a padded prompt, and padding after an early end."""
    pair = Pair(family)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :25] = mask[2, :51] = 0
    pair.forward(ids_of(3, 33), mask[:, :33])
    pair.forward(ids_of(3, LENGTH - 33, 7), mask)
    mask = pair.decode(mask, 3)
    turn = torch.ones(3, 11, dtype=torch.long)
    turn[0, :8] = turn[2, :1] = 0
    mask = torch.cat([mask, turn], 1)
    pair.forward(ids_of(3, 11, 60), mask)
    pair.decode(mask, 4, seed=80)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "hidden", [slice(40, 47), slice(0, 10), slice(59, 62), slice(3, 4)], ids=["middle", "start", "end", "one"]
)
@pytest.mark.parametrize("count", [1, 6], ids=["step", "chunk"])
def test_stored_tokens_hidden_later(family, hidden, count):
    """Tokens that were real when they came and are masked from some step on."""
    pair = Pair(family)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :12] = 0
    pair.forward(ids_of(), mask)
    mask = pair.decode(mask, 3)
    mask[1, hidden] = 0
    mask = torch.cat([mask, torch.ones(2, count, dtype=torch.long)], 1)
    # Positions go on as they were: hidden tokens keep theirs.
    place = torch.arange(63, 63 + count).expand(2, -1)
    pair.forward(ids_of(2, count, 70), mask, real=mask[:, -count:].bool(), position_ids=place)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    pair.forward(ids_of(2, 1, 75), mask, real=mask[:, -1:].bool(), position_ids=place[:, -1:] + 1)
    assert pair.ours.stats()["materialized"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_shown_later_are_refused(family):
    """They were padding when they came, so they were never stored; what is stored stays usable."""
    if family == "gemma3":
        shown = slice(50, 52)  # within the sliding window as well
    else:
        shown = slice(4, 6)
    pair = Pair(family)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, shown] = 0
    pair.forward(ids_of(), mask)
    kept = mask.clone()
    wrong = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    wrong[0, shown] = 1
    with (
        patched(pair.model, **pair.settings),
        pytest.raises(
            ValueError,
            match="shows tokens that were masked.*Keep the padding.*Nothing in the cache was changed",
        ),
    ):
        pair.model(ids_of(2, 1, 70), attention_mask=wrong, past_key_values=pair.ours, use_cache=True)
    assert {layer.get_seq_length() for layer in pair.ours.layers} == {LENGTH}
    pair.decode(kept)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("length", "count"), [(LENGTH, 1), (LENGTH, 5), (5, 5), (1, 1)], ids=lambda number: str(number))
def test_a_mask_that_stops_early_is_refused(family, length, count):
    """transformers would hide the tokens after its end, the newest ones, from everybody."""
    pair = Pair(family)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :17] = 0
    pair.forward(ids_of(), mask)
    with patched(pair.model, **pair.settings), pytest.raises(ValueError, match=f"covers {length} of {LENGTH + count} tokens"):
        pair.model(ids_of(2, count, 70), attention_mask=mask[:, :length], past_key_values=pair.ours)
    pair.decode(mask)


@pytest.mark.parametrize("hidden", [[-1], [-2], [5], [0], [10, -1]], ids=str)
@pytest.mark.parametrize("steps", [(18, 1), (16, 1), (10, 1), (33, 1), (18, 1, 1), (18, 3), (18, 2, 1)], ids=str)
@torch.no_grad()
def test_a_row_whose_new_token_is_hidden_keeps_to_its_chunk(steps, hidden):
    """Llama 4: layers that see the tokens of one chunk."""
    model = chunked_model()
    ids, logits = ids_of(3, sum(steps)), []
    mask = torch.ones_like(ids)
    mask[0, hidden] = 0
    settings = dict(threshold=1.0, min_context=0, block_size=8)
    for cache in (DynamicCache(config=model.config), PSACache(model.config, **settings)):
        with patched(model, **settings) if isinstance(cache, PSACache) else contextlib.nullcontext():
            outputs, past = [], 0
            for count in steps:
                seen = mask[:, :past + count]               # given only once something is hidden, as users do
                given = {} if seen.all() else dict(attention_mask=seen)
                outputs.append(model(ids[:, past:past + count], past_key_values=cache, **given).logits)
                past += count
        logits.append(torch.cat(outputs, 1))
    torch.testing.assert_close(logits[1][mask.bool()], logits[0][mask.bool()], rtol=0, atol=TOLERANCE)


@functools.cache
def chunked_model():
    model = prepare(energise(tiny_model("llama4_text")))
    model.set_attn_implementation("eager")
    assert "chunked_attention" in model.config.layer_types and model.config.attention_chunk_size == 16
    return model


def causal(total: int, count: int, rows: int = 2) -> torch.Tensor:
    """[rows, 1, count, total] bool: the last `count` queries of `total` tokens."""
    own = torch.arange(total - count, total)[:, None]
    return (torch.arange(total) <= own).expand(rows, 1, count, total).clone()


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


FOUR_D = {
    "causal": lambda mask: mask,
    "packed": lambda mask: mask[:, :, 30:, :30].fill_(False),  # two documents in a row
    "prefix": lambda mask: mask[:, :, :20, :20].fill_(True),  # a prefix that sees itself both ways
    "holes": lambda mask: mask[:, :, 40:, 5:15].fill_(False),
    "rows-differ": lambda mask: mask[1, :, 50:, 20:40].fill_(False),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", FOUR_D)
def test_masks_of_four_dimensions(name, kind):
    """A user's own pattern for the prompt is followed exactly, then plain decoding sees all stored tokens."""
    pair = Pair()
    mask = causal(LENGTH, LENGTH)
    FOUR_D[name](mask)
    mask = mask if kind == "bool" else additive(mask)
    place = torch.arange(LENGTH).expand(2, -1)
    # Eager attention adds its mask, so the reference gets the additive form; both forms mean the same.
    theirs = additive(mask) if kind == "bool" else mask
    with torch.no_grad():
        expected = pair.model(
            ids_of(), attention_mask=theirs, position_ids=place, past_key_values=pair.theirs, use_cache=True
        ).logits
        with patched(pair.model, **pair.settings):
            ours = pair.model(
                ids_of(), attention_mask=mask, position_ids=place, past_key_values=pair.ours, use_cache=True
            ).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)
    for step in range(3):
        pair.forward(ids_of(2, 1, 50 + 3 * step), position_ids=torch.full((2, 1), LENGTH + step))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_tree_of_drafts(kind):
    """Several continuations in one chunk, each seeing its own branch only, as tree speculation sends them."""
    pair = Pair()
    pair.forward(ids_of())
    mask = causal(LENGTH + 6, 6)
    mask[:, :, 3:, LENGTH : LENGTH + 3] = False
    place = torch.tensor([[60, 61, 62, 60, 61, 62]]).expand(2, -1)
    ids = ids_of(2, 6, 70)
    with torch.no_grad():
        expected = pair.model(
            ids,
            attention_mask=additive(mask),
            position_ids=place,
            past_key_values=pair.theirs,
            use_cache=True,
        ).logits
        with patched(pair.model, **pair.settings):
            given = mask if kind == "bool" else additive(mask)
            ours = pair.model(
                ids, attention_mask=given, position_ids=place, past_key_values=pair.ours, use_cache=True
            ).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)
    pair.ours.crop(-3)
    pair.theirs.crop(-3)
    pair.forward(ids_of(2, 1, 80), position_ids=torch.full((2, 1), 63))


def test_a_hidden_token_in_a_fork_stays_in_the_original():
    pair = Pair()
    pair.forward(ids_of())
    fork, theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    mask = torch.ones(2, LENGTH + 1, dtype=torch.long)
    pair.forward(ids_of(2, 1, 70), mask)
    hidden = mask.clone()
    hidden[:, 30:40] = 0
    pair.ours, pair.theirs = fork, theirs
    place = torch.full((2, 1), LENGTH)
    pair.forward(ids_of(2, 1, 71), hidden, real=torch.ones(2, 1, dtype=torch.bool), position_ids=place)


@pytest.mark.parametrize("tiered", [False, True], ids=["resident", "tiered"])
@pytest.mark.parametrize("hidden", [slice(20, 33), slice(0, 9), slice(70, 80), slice(4, 8)], ids=str)
def test_hiding_leaves_what_never_had_the_tokens(hidden, tiered):
    """Below threshold 1 too: blocks, digests and selection are those of the row without the hidden tokens."""
    text = Text(rows=2, length=86, layers=2, key_dim=8)
    settings = dict(
        threshold=0.6, digest="key_bits", round_blocks=1, **(dict(host_memory="1MiB") if tiered else {})
    )
    cache = text.cache(**settings)
    feed(cache, text, 0, 78)
    decode(cache, text, 78, 80)
    valid = torch.ones(2, 80, dtype=torch.bool)
    valid[1, hidden] = False
    for layer in cache.state.live_layers():
        layer.hide(valid)
    output = decode(cache, text, 80, 86)
    for row in range(2):
        kept = torch.cat([valid[row], torch.ones(6, dtype=torch.bool)])
        short = text.select([row])
        for name in ("queries", "keys", "values"):
            setattr(short, name, [part[:, :, kept] for part in getattr(short, name)])
        length = int(kept.sum())
        single = short.cache(**settings)
        feed(single, short, 0, length - 6)
        torch.testing.assert_close(
            output[:, row], decode(single, short, length - 6, length)[:, 0], rtol=0, atol=2e-5
        )
    assert cache.stats()["kv_fraction"] < 0.95
