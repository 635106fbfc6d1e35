"""An exception in the middle of generate(), wherever it comes: the cache goes on rightly or says that it can't, the forks
that share its pool too, and after reset() everything is as with a new one."""

from __future__ import annotations

import functools

import pytest
import torch

from hf_sparse import PSACache, patched
from hf_sparse.cache.blocks import LayerBlocks
from hf_sparse.cache.digest_store import DigestStore
from hf_sparse.cache.layer import PSALayer
from hf_sparse.cache.pool import BlockPool
from hf_sparse.cache.rows import LayerRows
from hf_sparse.cache.state import CacheState
from hf_sparse.compat import AttentionInterface
from hf_sparse.kernels import ops
from hf_sparse.kernels.reference import append, fetch
from hf_sparse.patches.attention import NAME, psa_attention
from tests.models import VOCAB_SIZE, build, get_model

TOKENS = 12
SETTINGS = dict(
    min_context=0, block_size=4, digest="key_bits", threshold=0.6, round_blocks=1, gpu_memory="130KiB", host_memory="2MiB"
)


@functools.cache
def model():
    return build("llama", num_hidden_layers=3)


def prompt(length=70, rows=2, seed=0):
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(cache, ids, tokens=TOKENS):
    """All tokens, and the logits of the new ones."""
    output = model().generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences, torch.stack(output.logits)


@functools.cache
def expected():
    with patched(model(), **SETTINGS):
        return generate(PSACache(model().config, **SETTINGS), prompt())


class Fault:
    """Raises once, in the `at`-th call of a function from now on, before or after it has done its work."""

    def __init__(self, error, at: int, after: bool):
        self.error, self.left, self.after, self.raised = error, at, after, False

    def into(self, monkeypatch, owner, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0 and not self.after:
                self.fail()
            result = original(*args, **kwargs)
            if self.left == 0 and self.after:
                self.fail()
            return result

        monkeypatch.setattr(owner, name, call)

    def fail(self) -> None:
        self.raised = True
        raise self.error


# Where, and which calls: those of the prompt and those of decoding. The first of a layer, of the middle one, of the last.
POINTS = {
    "mlp": (lambda: type(model().model.layers[0].mlp), "forward", (2, 3, 5, 6)),
    "head": (lambda: type(model().lm_head), "forward", (1, 3)),
    "attend": (lambda: PSALayer, "attend", (2, 3, 5, 6)),
    "append": (lambda: ops, "append", (1, 2, 3, 5, 6)),
    "slots-in-append": (lambda: append, "acquire", (2, 5, 30)),
    "pin": (lambda: append, "_pin", (2, 8, 30)),
    "fill": (lambda: fetch, "fill", (1, 5, 20, 60)),
    "forced": (lambda: ops, "attend_forced", (1, 3, 5)),
    "ranked": (lambda: ops, "attend", (1, 3, 5)),
    "digest": (lambda: DigestStore, "update", (1, 3, 5)),
    "digest-room": (lambda: DigestStore, "reserve", (1, 3)),
    "allocate": (lambda: BlockPool, "allocate", (1, 2, 3, 4)),
    "grow": (lambda: BlockPool, "_grow", (1,)),
    "sweep": (lambda: BlockPool, "sweep", (1, 2)),
    "fit": (lambda: CacheState, "fit", (1, 2, 3)),
    "resize": (lambda: BlockPool, "resize", (1, 2)),
    "refill": (lambda: BlockPool, "_refill", (1,)),
    "unpin": (lambda: LayerBlocks, "_unpin", (2, 5)),
}


def goes_on(cache) -> bool:
    """Whether the cache says that it is usable; then it must be."""
    sequences, logits = expected()
    held = cache.tokens
    try:
        cache.check_whole()
    except RuntimeError as error:
        assert "interrupted" in str(error) and "cache.reset()" in str(error)
        return False
    if held < prompt().shape[1]:
        assert held == 0
    known = sequences[:, : max(prompt().shape[1], held + 1)]
    got, more = generate(cache, known, sequences.shape[1] - known.shape[1])
    assert torch.equal(got, sequences)
    torch.testing.assert_close(more, logits[-more.shape[0] :], rtol=0, atol=2e-5)
    return True


@pytest.mark.parametrize(
    ("error", "after"), [(KeyboardInterrupt(), False), (RuntimeError("a fault"), True)], ids=["before", "after"]
)
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_in_the_middle(point, error, after, monkeypatch):
    expected()
    raised = 0
    with patched(model(), **SETTINGS):
        for at in POINTS[point][2]:
            cache = PSACache(model().config, **SETTINGS)
            fault = Fault(error, at, after)
            with monkeypatch.context() as patch:
                fault.into(patch, POINTS[point][0](), POINTS[point][1])
                try:
                    generate(cache, prompt())
                except (KeyboardInterrupt, RuntimeError) as caught:
                    assert caught is error
            raised += fault.raised
            pool = cache.sparse_layers[0].pool
            if not goes_on(cache):
                for use in (lambda: generate(cache, prompt(90)), cache.fork, lambda: cache.crop(-1),
                            lambda: model()(prompt(3), past_key_values=cache)):
                    with pytest.raises(RuntimeError, match="reset"):
                        use()
            cache.reset()
            assert cache.tokens == 0
            assert pool is None or pool.blocks_in_use() == 0
            got, logits = generate(cache, prompt())
            assert torch.equal(got, expected()[0]) and torch.equal(logits, expected()[1])
            pool = cache.sparse_layers[0].pool
            cache.reset()
            assert pool.blocks_in_use() == 0 and not pool.users
    assert raised


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", ["slots-in-append", "pin", "fill", "ranked", "refill", "grow", "mlp", "sweep"])
def test_forks_of_an_interrupted_cache(point, after, monkeypatch):
    """They share its pool: their blocks are right, or they say so."""
    settings = {**SETTINGS, "gpu_memory": "300KiB"}
    with patched(model(), **settings):
        alone = PSACache(model().config, **settings)
        start, _ = generate(alone, prompt(), 1)
        sequences, _ = generate(alone, start, TOKENS - 1)
        for at in POINTS[point][2]:
            cache = PSACache(model().config, **settings)
            generate(cache, prompt(), 1)
            fork = cache.fork()
            with monkeypatch.context() as patch:
                Fault(KeyboardInterrupt(), at, after).into(patch, POINTS[point][0](), POINTS[point][1])
                try:
                    generate(cache, torch.cat([start, prompt(40)], 1), 4)
                except KeyboardInterrupt:
                    pass
            try:
                fork.check_whole()
            except RuntimeError:
                cache.reset()
                with pytest.raises(RuntimeError, match="reset"):
                    generate(fork, start)
                fork.reset()
                for one in (cache, fork):
                    assert torch.equal(generate(one, prompt())[0], expected()[0])
                assert fork.sparse_layers[0].pool is cache.sparse_layers[0].pool
                assert cache.sparse_layers[0].pool.blocks_in_use() > 0
            else:
                assert torch.equal(generate(fork, start, TOKENS - 1)[0], sequences)


@pytest.mark.parametrize("operation", ["crop", "reorder", "repeat", "fork", "reset"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("point", ["take", "digest", "reset"])
def test_an_exception_between_the_layers_of_a_change(operation, at, point, monkeypatch):
    points = {"take": (LayerRows, "_take_rows"), "digest": (DigestStore, "take_rows"), "reset": (LayerBlocks, "reset")}
    owner, name = points[point]
    change = {
        "crop": lambda cache: cache.crop(-7),
        "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        "repeat": lambda cache: cache.batch_repeat_interleave(2),
        "fork": lambda cache: cache.fork(),
        "reset": lambda cache: cache.reset(),
    }[operation]
    with patched(model(), **{**SETTINGS, "gpu_memory": "300KiB"}):
        cache = PSACache(model().config, **{**SETTINGS, "gpu_memory": "300KiB"})
        generate(cache, prompt(), 3)
        with monkeypatch.context() as patch:
            fault = Fault(KeyboardInterrupt(), at, False)
            fault.into(patch, owner, name)
            try:
                change(cache)
            except KeyboardInterrupt:
                pass
        if fault.raised and operation != "fork":
            with pytest.raises(RuntimeError, match="reset"):
                generate(cache, prompt(90))
        cache.reset()
        assert torch.equal(generate(cache, prompt())[0], expected()[0])


def test_a_refusal_is_no_interruption():
    """What does not fit loses nothing, in the middle of a conversation too."""
    with patched(model(), **SETTINGS):
        cache = PSACache(model().config, **{**SETTINGS, "host_memory": "700KiB"})
        first, _ = generate(cache, prompt(), 4)
        with pytest.raises(ValueError, match="Nothing in the cache was lost"):
            generate(cache, torch.cat([first, prompt(400)], 1))
        again, _ = generate(cache, first, TOKENS - 4)
        assert torch.equal(again, expected()[0])


def test_a_first_prompt_that_was_interrupted_is_noticed(monkeypatch):
    """Layers that have never seen a token don't look like layers that were left behind."""
    with patched(model(), **SETTINGS):
        cache = PSACache(model().config, **SETTINGS)
        with monkeypatch.context() as patch:
            Fault(KeyboardInterrupt(), 1, True).into(patch, type(model().model.layers[0].mlp), "forward")
            with pytest.raises(KeyboardInterrupt):
                model()(prompt(), past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"hold 0 to 70 tokens.*reset"):
            model()(prompt(5), past_key_values=cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("tokens", [30, 1, 5], ids=["prompt", "token", "turn"])
@torch.no_grad()
def test_tokens_of_the_last_layer_that_attention_never_came_to(family, tokens, monkeypatch):
    """All layers count them, but of the last one nobody said which are padding."""
    last, settings = get_model(family), dict(min_context=0, block_size=4, threshold=1.0)
    index = last.config.num_hidden_layers - 1

    def interrupted(module, *args, **kwargs):
        if module.layer_idx == index:
            raise KeyboardInterrupt
        return psa_attention(module, *args, **kwargs)

    with patched(last, **settings):
        cache = PSACache(last.config, **settings)
        past = 0 if tokens == 30 else 30
        ids, mask = prompt(30 + tokens), torch.ones(2, 30 + tokens, dtype=torch.int64)
        mask[1, past:past + 3] = 0 if tokens > 1 else 1
        if past:
            last(input_ids=ids[:, :past], attention_mask=mask[:, :past], past_key_values=cache)
        monkeypatch.setitem(AttentionInterface._global_mapping, NAME, interrupted)
        with pytest.raises(KeyboardInterrupt):
            last(input_ids=ids[:, past:past + tokens], attention_mask=mask[:, :past + tokens], past_key_values=cache)
        monkeypatch.undo()
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        with pytest.raises(RuntimeError, match="interrupted"):
            last(input_ids=ids[:, -1:], attention_mask=mask[:, :past + tokens + 1], past_key_values=cache)
        cache.reset()
        last(input_ids=ids, attention_mask=mask, past_key_values=cache)
        assert cache.tokens == ids.shape[1] and all(layer.pending is None for layer in cache.layers)
