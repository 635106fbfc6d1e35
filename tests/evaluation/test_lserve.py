"""LServe's parts in simulation: streaming heads, quantised blocks and selections that are given up early."""
from __future__ import annotations

import math
import warnings

import pytest
import torch

from hf_sparse import PSAConfig, patched
from hf_sparse.cache.handle import Pending
from hf_sparse.cache.kept import KeptSelection
from hf_sparse.commands.main import main
from hf_sparse.evaluation.cells import CellFile, model_id
from hf_sparse.evaluation.decoding import answers as real_answers
from hf_sparse.evaluation.decoding import prefill
from hf_sparse.evaluation.estimates import LayerKeys
from hf_sparse.evaluation.found import Found
from hf_sparse.evaluation.grid import Simulator, run_grid
from hf_sparse.evaluation.policies import parse_policies, parse_policy, with_heads
from hf_sparse.evaluation.reuse import Reuse
from hf_sparse.evaluation.simulated import Context, simulate
from hf_sparse.evaluation.simulated_layer import SimulatedLayer
from hf_sparse.evaluation.summary import rows
from hf_sparse.evaluation.work import task_work
from hf_sparse.heads.profile import HeadProfile
from hf_sparse.kernels.reference.quantise import dequantise_blocks, packed_bytes, quantise_blocks
from tests import references
from tests.evaluation.test_simulated import BASE, QUESTIONS, TOKENS, draw
from tests.models import get_model
from tests.text_model import save_text_model, text_model

N, HEADS, GROUP, D, DV = 131, 3, 2, 12, 20                  # context tokens: no multiple of a block


def layer_of(text: str, layer: int = 4):
    """(simulated layer, what it found, policy)"""
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn(1, HEADS, N, D, generator=generator) * 2
    values = torch.randn(1, HEADS, N, DV, generator=generator)
    policy, found = parse_policy(text, PSAConfig(block_size=16, min_context=0)), Found()
    simulated = SimulatedLayer(LayerKeys(keys, values, torch.ones(1, HEADS, D)), policy, layer, found)
    return simulated, found, policy


def ask(simulated: SimulatedLayer, rows: int, pieces: list[int], scale: float, softcap: float, sinks):
    """(query, keys, values of the rows' own tokens, output), through as many forwards as there are pieces."""
    generator = torch.Generator().manual_seed(8)
    tokens = sum(pieces)
    query, keys, values = (torch.randn(rows, heads, tokens, dim, generator=generator)
                           for heads, dim in ((HEADS * GROUP, D), (HEADS, D), (HEADS, DV)))
    out, first = [], 0
    for count in pieces:
        mine = slice(first, first + count)
        simulated.counted = lambda low, high, count=count: torch.arange((high - low) * count)
        pending = Pending(keys[:, :, mine], values[:, :, mine], N + first)
        out.append(simulated.attend(query[:, :, mine], pending, None, None, scale, softcap, sinks, None))
        first += count
    return query, keys, values, torch.cat(out, 2)


def expected(simulated, policy, query, keys, values, scale: float, softcap: float, sinks, unit: int, token: int, row: int):
    """Output of one token over everything, [H * G, Dv] float64, block by block as the policy stores them, and tokens read exactly
    and coarsely by each KV head."""
    config = policy.config
    P, last = config.block_size, N + token
    context = simulated.layer
    k = torch.cat([context.keys[0], keys[row]], 1)[:, :last + 1]
    v = torch.cat([context.values[0], values[row]], 1)[:, :last + 1]
    tail = min(last // (P * unit) * unit, last // P - config.recent_blocks)
    out, read = [], []
    for head in range(HEADS):
        own_keys, own_values = k[head].clone(), v[head].clone()
        valid = torch.ones(last + 1, dtype=torch.bool)
        exact = coarse = 0
        if (4, head) in config.streaming_heads:
            valid[config.streaming_sink:max(config.streaming_sink, last + 1 - config.streaming_window)] = False
            exact = int(valid.sum())
        else:
            for block in range(last // P + 1):
                mine = slice(block * P, block * P + P)
                if block < config.sink_blocks or block >= tail:
                    exact += P
                    continue
                coarse += P
                packed = quantise_blocks(k[head, mine], v[head, mine], config.kv_bits)
                own_keys[mine], own_values[mine] = dequantise_blocks(packed, P, D, DV, config.kv_bits, k.dtype)
        for one in range(head * GROUP, head * GROUP + GROUP):
            q = query[row, one, token].double() * scale
            o, mass, *_ = references.attention(q[None], own_keys, own_values, valid, softcap)
            if sinks is not None:
                o = o * torch.sigmoid(mass - sinks[one].double())[..., None]
            out.append(o[0])
        read.append((exact, coarse))
    return torch.stack(out), read


@pytest.mark.parametrize("pieces", [[37], [1, 30, 6]], ids=["one-forward", "three-forwards"])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (3.0, False), (0.0, True)], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize(("text", "unit"), [
    ("dense/kv_bits=4", 8), ("dense/min_max/window/kv_bits=4", 1), ("dense/min_max/window/kv_bits=8/sink_blocks=0/recent_blocks=0", 1),
    ("dense/min_max/window/kv_bits=4/streaming_heads=4:0+4:2+5:1/streaming_sink=9/streaming_window=19", 1),
    ("dense/kv_bits=8/streaming_heads=4:1/streaming_sink=0/streaming_window=16/sink_blocks=3", 8),
], ids=["units", "4-bit", "8-bit-no-tail", "streaming", "streaming-no-sink"])  # fmt: skip
def test_attention_is_over_what_is_stored(text, unit, softcap, with_sinks, pieces):
    simulated, found, policy = layer_of(text)
    sinks = torch.linspace(-1, 2, HEADS * GROUP) if with_sinks else None
    rows, scale = 2, D**-0.5
    query, keys, values, output = ask(simulated, rows, pieces, scale, softcap, sinks)
    for row in range(rows):
        for token in (0, 1, 12, 13, 28, 29, 30, 36):        # blocks close before tokens 13 and 29
            wanted, _ = expected(simulated, policy, query, keys, values, scale, softcap, sinks, unit, token, row)
            assert torch.allclose(output[row, :, token].double(), wanted, atol=2e-5), (row, token)


def test_quantised_and_streaming_reads_are_counted_in_bytes():
    text = "dense/min_max/window/kv_bits=4/streaming_heads=4:1/streaming_sink=9/streaming_window=19"
    simulated, found, policy = layer_of(text)
    query, keys, values, _ = ask(simulated, 1, [21], 1.0, 0.0, None)
    layer = found.layers()[0]
    read = [expected(simulated, policy, query, keys, values, 1.0, 0.0, None, 1, token, 0)[1] for token in range(21)]
    exact = torch.tensor([[head[0] for head in token] for token in read])
    coarse = torch.tensor([[head[1] for head in token] for token in read])
    assert torch.equal(layer.read, (exact + coarse) / 16)
    assert torch.equal(layer.kv_bytes, exact * 2 * (D + DV) + coarse // 16 * packed_bytes(16, D, DV, 4))
    assert (exact[:, 1] == 28).all() and (coarse[:, 1] == 0).all()
    held = float(layer.held.sum()) * HEADS
    stats = found.stats()
    assert stats["kv_fraction"] == pytest.approx(float(layer.read.sum()) / held)
    assert stats["hbm_fraction"] == pytest.approx(float(layer.kv_bytes.sum()) / (held * 16 * 2 * (D + DV)))


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """(model, context of a prefilled cache)"""
    model = get_model("llama")
    with patched(model, BASE):
        yield model, Context(prefill(model, draw(TOKENS, 0), PSAConfig(block_size=8)))


@pytest.mark.parametrize("text", [
    "psa/rounds/kv_bits=8", "psa/rounds/kv_bits=4/streaming_heads=0:1+1:0/streaming_sink=9/streaming_window=27",
    "topk@0.3/kv_bits=4", "psa/rounds/reuse=3", "psa/rounds/reuse=3/reuse_refresh=0", "quest@0.3/reuse=3/kv_bits=8",
    "lserve@128/block_size=32/reuse=4/streaming_heads=0:0/streaming_sink=32/streaming_window=50/kv_bits=4",
], ids=lambda text: text.replace("/", "_"))  # fmt: skip
def test_a_simulation_reads_and_answers_as_the_cache_does(text):
    """The prompt fits in the prefill window, so that it is exact in both."""
    model, context = get_model("llama"), draw(TOKENS, 0)
    policy = parse_policy(text, BASE.replace(block_size=16))
    with patched(model, BASE):
        ours, found = simulate(model, Context(prefill(model, context, PSAConfig(block_size=8))), QUESTIONS, policy)
        own = prefill(model, context, policy.config)
        real = [real_answers(model, own, [one])[0] for one in QUESTIONS]
    assert all(torch.allclose(a, b.log_probs, atol=1e-4) for a, b in zip(ours, real, strict=True))
    if not policy.streams:                                  # which the cache leaves out of its statistics
        assert found.stats()["blocks_read"] == sum(reading.stats["blocks_read"] for reading in real)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("chunk", [None, 100], ids=["at-once", "chunks"])
def test_a_window_is_prefilled_as_the_cache_does(family, chunk):
    """Also with sinks and soft-capped logits; layer 1 of these is one of full attention."""
    model, context = get_model(family), draw(TOKENS, 0)
    heads = "1:0" if family != "llama" else "0:1+1:0"
    policy = parse_policy(f"psa/rounds/streaming_heads={heads}/streaming_sink=9/streaming_window=27/streaming_prefill_window=61", BASE)
    with patched(model, BASE):
        engine = Simulator(model, None, context, chunk, policy.config)
        ours, _ = engine.teacher_forced(QUESTIONS, policy)
        own = prefill(model, context, policy.config, chunk)
        real = [real_answers(model, own, [one])[0] for one in QUESTIONS]
        exact, _ = simulate(model, engine.context, QUESTIONS, policy)
        assert list(engine.windowed) == [(policy.config.streaming_heads, 9, 61)]
    assert all(torch.allclose(a, b.log_probs, atol=1e-4) for a, b in zip(ours, real, strict=True))
    if family == "llama":                                   # what the last full-attention layer hands on is in no cache
        assert not any(torch.allclose(a, b.log_probs, atol=1e-2) for a, b in zip(exact, real, strict=True))


def run(llama, text: str, questions=QUESTIONS, base=BASE):
    model, context = llama
    return simulate(model, context, questions, parse_policy(text, base))


def kl(dense, ours) -> float:
    return max(float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(dense, ours, strict=True))


def test_fewer_bits_lose_more_and_read_less(llama):
    dense, _ = run(llama, "dense")
    losses, bytes_read = [], []
    for text in ("dense/kv_bits=8", "dense/kv_bits=4"):
        answers, found = run(llama, text + "/block_size=16")
        losses.append(kl(dense, answers))
        bytes_read.append(found.stats()["hbm_fraction"])
        assert found.stats()["kv_fraction"] == 1.0 and found.stats()["coverage_true"] == pytest.approx(1.0, abs=1e-6)
    assert 0 < losses[0] < losses[1] / 10
    assert 1 > bytes_read[0] > bytes_read[1] > 0.25


def test_a_window_over_everything_changes_nothing(llama):
    dense, _ = run(llama, "dense")
    answers, found = run(llama, "psa@0.3/streaming_heads=0:0+0:1+1:0+1:1/streaming_sink=200/streaming_window=200")
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(answers, dense, strict=True))
    assert all((layer.scanned == 0).all() and (layer.mass > 1 - 1e-5).all() for layer in found.layers())


def test_streaming_heads_are_read_by_the_window_and_the_others_by_the_policy(llama):
    _, plain = run(llama, "psa")
    _, found = run(llama, "psa/streaming_heads=0:1/streaming_sink=16/streaming_window=24")
    ours, theirs = found.layers()[0], plain.layers()[0]
    assert (ours.read[:, 1] == 5).all() and torch.equal(ours.read[:, 0], theirs.read[:, 0].float())
    assert (ours.scanned[:, 1] == 0).all() and torch.equal(ours.scanned[:, 0], theirs.scanned[:, 0])
    assert (ours.mass[:, 1] < 0.9).any() and torch.equal(ours.mass[:, 0], theirs.mass[:, 0])


@pytest.mark.parametrize("text", [
    "psa/block_size=16/streaming_heads=0:1/streaming_sink=16/streaming_window=24/kv_bits=4/reuse=4",
    "psa/block_size=16/rounds/kv_bits=8", "psa/block_size=16/dense_layers=1/kv_bits=4", "topk@0.3/block_size=16/kv_bits=4",
    "quest@0.5/kv_bits=8/reuse=2",
    "lserve@128/block_size=32/streaming_heads=1:0/streaming_sink=32/streaming_window=64/kv_bits=4/reuse=4",
], ids=["psa-all", "psa-rounds-8", "dense-layer-4", "topk-4", "quest-8-reuse", "lserve-all"])  # fmt: skip
def test_parts_can_be_combined(llama, text):
    plain = "/".join(part for part in text.split("/") if not part.startswith(("kv_bits", "streaming", "reuse")))
    answers, found = run(llama, text)
    stats, alone = found.stats(), run(llama, plain)[1].stats()
    assert stats["hbm_fraction"] < alone["hbm_fraction"] and stats["kv_fraction"] < 1
    assert stats["selected"] <= alone["selected"] <= 1
    dense, _ = run(llama, "dense")
    assert 0 < kl(dense, answers) < math.inf


def test_heads_that_the_model_has_not_are_refused(llama):
    for heads in ("0:2", "2:0"):
        with pytest.raises(ValueError, match=r"layer \d has no KV head \d.* 2 in layers 0, 1"):
            run(llama, f"psa/streaming_heads={heads}")
    with pytest.raises(ValueError, match="no profile has said"):
        run(llama, "psa/streaming=0.5")


class Profile:
    """Heads in a fixed order."""

    def __init__(self, **sizes):
        self.sizes = sizes

    def settings(self, *, sparsity: float) -> dict:
        return {"streaming_heads": ((1, 1), (0, 1), (1, 0), (0, 0))[:round(4 * sparsity)], **self.sizes}


def test_a_profile_says_which_heads_stream(llama):
    model, context = llama
    policies = with_heads([parse_policy("psa/streaming=0.5/streaming_sink=16/streaming_window=24", BASE), parse_policy("psa", BASE)],
                          Profile())
    assert policies[0].config.streaming_heads == ((0, 1), (1, 1)) and policies[1] == parse_policy("psa", BASE)
    ours, _ = simulate(model, context, QUESTIONS, policies[0])
    named, _ = run(llama, "psa/streaming_heads=0:1+1:1/streaming_sink=16/streaming_window=24")
    assert all(torch.equal(a, b) for a, b in zip(ours, named, strict=True))
    assert policies[0].to_dict()["streaming_heads"] == [[0, 1], [1, 1]]
    with pytest.raises(ValueError, match="--heads FILE"):
        with_heads([parse_policy("psa/streaming=0.5")], None)
    with pytest.raises(ValueError, match="less than one"):
        with_heads([parse_policy("psa/streaming=0.1")], Profile())


def test_a_profile_of_another_sink_or_window_is_said():
    policies = [parse_policy("psa/streaming=0.5/streaming_window=64", BASE)]
    with pytest.warns(UserWarning, match="has streaming_sink=128, streaming_window=64, but the profile's heads were measured with "
                                         "streaming_sink=128, streaming_window=256"):
        (policy,) = with_heads(policies, Profile(streaming_sink=128, streaming_window=256))
    assert (policy.config.streaming_sink, policy.config.streaming_window) == (128, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_heads(policies, Profile(streaming_sink=128, streaming_window=64))
        with_heads(policies, Profile(streaming_window=64))


# -- reuse ----------------------------------------------------------------------------------------------------------


def kept_by_hand(start, query, reuse, cosine):
    """Token by token, row by row, head by head, in plain Python: the indices of the tokens whose selections are read."""
    R, T, H, G, _ = query.shape
    source = torch.zeros(R, T, H, dtype=torch.long)
    for r in range(R):
        for h in range(H):
            at = None
            for t in range(T):
                pairs = [] if at is None else zip(query[r, t, h].tolist(), query[r, at, h].tolist(), strict=True)
                turned = any(sum(map(math.prod, zip(*pair, strict=True))) / math.hypot(*pair[0]) / math.hypot(*pair[1]) < cosine
                             for pair in pairs)
                if at is None or t - at >= reuse or start[r, t] != start[r, t - 1] or cosine and turned:
                    at = t
                source[r, t, h] = at
    return source


def wandering(R, T, H, G, D, step):
    """Queries [R, T, H, G, D] that turn a little at each token."""
    generator = torch.Generator().manual_seed(3)
    query = [torch.randn(R, H, G, D, generator=generator)]
    for _ in range(T - 1):
        query.append((1 - step**2)**0.5 * query[-1] + step * torch.randn(R, H, G, D, generator=generator))
    return torch.stack(query, 1) * torch.rand(R, T, H, G, 1, generator=generator)


@pytest.mark.parametrize("pieces", [[17], [3, 1, 1, 12]], ids=["one-forward", "four-forwards"])
@pytest.mark.parametrize("cosine", [0, 0.85, 0.93])
def test_a_selection_is_given_up_when_a_query_turns_away(cosine, pieces):
    R, T, H, G, count = 2, 17, 3, 2, 11
    query = wandering(R, T, H, G, 24, 0.25)
    chosen = torch.rand(R, T, H, count, generator=torch.Generator().manual_seed(5)) < 0.4
    start = torch.full((R, T), 20)
    start[1, 6:] = 22
    source = kept_by_hand(start, query.double(), 5, cosine)
    reuse, first, out, fresh = Reuse(PSAConfig(reuse=5, reuse_refresh=cosine)), 0, [], []
    for width in pieces:
        mine = slice(first, first + width)
        kept, new = reuse(chosen[:, mine].flatten(0, 1), start[:, mine].flatten(), query[:, mine])
        out.append(kept.unflatten(0, (R, width)))
        fresh.append(new.unflatten(0, (R, width)))
        first += width
    wanted = chosen.gather(1, source[..., None].expand(-1, -1, -1, count))
    assert torch.equal(torch.cat(out, 1), wanted)
    own = source == torch.arange(T)[:, None]
    assert torch.equal(torch.cat(fresh, 1), own)
    assert own.sum() == 9 * H if cosine == 0 else 9 * H < own.sum() < R * T * H


def test_the_rule_is_that_of_the_cache():
    R, T, H, G = 2, 12, 3, 2
    query, order = wandering(R, T, H, G, 24, 0.25), torch.arange(R * T * H).view(R, T, H, 1)
    start = torch.tensor([[2] * T, [3] * 5 + [4] * (T - 5)])
    simulated, kept, ones = Reuse(PSAConfig(reuse=4, reuse_refresh=0.85)), KeptSelection(), torch.ones(R, H, dtype=torch.long)
    _, expected = simulated(torch.ones(R * T, H, 1, dtype=torch.bool), start.flatten(), query)
    for token in range(T):
        fresh = kept.due(query[:, token], start[:, token], 100 + token, 4, 0.85)
        got, _ = kept.plan(fresh, order[:, token], ones[:, 0])
        kept.keep(fresh, query[:, token], start[:, token], 100 + token, ones, torch.zeros(R, dtype=torch.bool))
        assert torch.equal(fresh, expected.unflatten(0, (R, T))[:, token])
        assert torch.equal(got[..., 0] == order[:, token, :, 0], fresh)
    assert not expected.all() and expected.float().mean() > 0.3


def test_higher_cosines_select_anew_more_often(llama):
    one = QUESTIONS[1:]
    selected = [run(llama, f"psa/reuse=4/reuse_refresh={cosine}", one)[1].stats()["selected"] for cosine in (0, 0.05, 1)]
    # 18 tokens and a unit that closes before token 13: selected at 0, 4, 8, 12, 13 and 17 anyway.
    assert selected[0] == 6 / 18 < selected[1] < selected[2] <= 1


# -- the grid and the commands --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with its tokenizer and a profile of its heads, in which the first KV head of each layer needs the most."""
    path = tmp_path_factory.mktemp("model")
    model = text_model()
    save_text_model(path)
    heads = model.config.num_key_value_heads
    layers = tuple(range(model.config.num_hidden_layers))
    HeadProfile(torch.linspace(1, 0, heads).expand(len(layers), -1), layers).save(path / "heads")
    return path


SMALL = "/streaming_sink=16/streaming_window=40"


def test_a_grid_compares_with_exact_attention_only(haystack, tokenizer):
    model = text_model()
    cells = CellFile(None, model_id(model))
    policies = parse_policies("dense/kv_bits=4,dense/streaming=0.5" + SMALL, PSAConfig(min_context=0, block_size=16))
    work = task_work(["kl"], [500], haystack, 1)
    with pytest.raises(ValueError, match="--heads FILE"):
        run_grid(model, tokenizer, work, policies, cells)
    assert not cells.cells
    heads = HeadProfile(torch.rand(2, 2, generator=torch.Generator().manual_seed(0)), (0, 1))
    assert run_grid(model, tokenizer, work, policies, cells, heads=heads)
    found = {row.policy: row for row in rows(cells.cells.values())}
    assert list(found) == ["dense", "dense/kv_bits=4", "dense/streaming=0.5" + SMALL]
    assert found["dense"].kl_mean == 0 and all(row.kl_mean > 0 for name, row in found.items() if name != "dense")
    assert 0.3 < found["dense/kv_bits=4"].hbm_fraction < found["dense/kv_bits=4"].kv_fraction == 1
    assert found["dense/streaming=0.5" + SMALL].hbm_fraction == found["dense/streaming=0.5" + SMALL].kv_fraction < 0.6
    settings = next(cell.settings for cell in cells.cells.values() if "streaming" in cell.policy)
    assert settings["streaming_heads"] == [list(pair) for pair in heads.settings(sparsity=0.5)["streaming_heads"]]


def test_eval_takes_a_profile_of_heads(directory, capsys):
    policy = f"psa/streaming=0.5{SMALL}/kv_bits=8"
    arguments = ["eval", str(directory), "--task", "kl", "--length", "400", "--samples", "1", "--quiet", "--set", "min_context=0",
                 "--set", "block_size=16", "--policy", policy]
    assert main(arguments) == 2
    assert "give a profile of its heads (--heads FILE)" in capsys.readouterr().err
    assert main([*arguments, "--heads", str(directory / "nowhere")]) == 2
    assert "no head profile" in capsys.readouterr().err
    assert main([*arguments, "--heads", str(directory / "heads")]) == 0
    assert policy in capsys.readouterr().out
    assert main([*arguments[:-1], "psa", "--heads", str(directory / "heads")]) == 2
    assert "no policy has streaming=SHARE" in capsys.readouterr().err


def test_the_benchmark_has_a_list_of_these(directory, tmp_path, capsys):
    pytest.importorskip("triton")                           # its version is told
    from benchmarks import fidelity

    policies = parse_policies(fidelity.LISTS["lserve"])
    assert {(p.config.kv_bits, p.streaming) for p in policies} >= {(bits, share) for bits in (16, 8, 4) for share in (0, 0.25, 0.5)}
    arguments = ["--model", str(directory), "--lengths", "500", "--questions", "1", "--quiet", "--tasks", "kl", "--device", "cpu",
                 "--out", str(tmp_path / "out.json"), "--policies", "lserve"]
    with pytest.raises(SystemExit):
        fidelity.main(arguments)
    assert "--heads FILE" in capsys.readouterr().err
    assert fidelity.main([*arguments, "--heads", str(directory / "heads")]) == 0
    printed = capsys.readouterr().out
    assert "finished" in printed and all(f"| {policy.name} " in printed for policy in policies)
