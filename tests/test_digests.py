"""Digests against slow float64 reimplementations; their bounds, packed layouts and behaviour on bad data.

The references are written from the formulas, in Python loops, without the library's packing or tensor code.
"""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparse.digests import DIGESTS, base, get_digest
from hf_sparse.kernels.reference.quantise import dequantise_blocks, quantise_blocks

ALL = [
    pytest.param("channel_codes", {}, id="channel_codes"),
    pytest.param("channel_codes", {"drop_fraction": 0.25}, id="channel_codes-drop"),
    pytest.param("channel_codes", {"high_fraction": 0.0}, id="channel_codes-all-low"),
    pytest.param("channel_codes", {"high_fraction": 1.0}, id="channel_codes-all-high"),
    pytest.param("key_bits", {"bits": 1}, id="key_bits-1"),
    pytest.param("key_bits", {"bits": 2}, id="key_bits-2"),
    pytest.param("key_bits", {"bits": 3}, id="key_bits-3"),
    pytest.param("key_bits", {"bits": 4}, id="key_bits-4"),
    pytest.param("key_planes", {}, id="key_planes"),
    pytest.param("cuboid_mean", {}, id="cuboid_mean"),
    pytest.param("min_max", {}, id="min_max"),
    pytest.param("pages", {"logical_size": 2}, id="pages-2"),
    pytest.param("pages", {"logical_size": 4}, id="pages-4"),
    pytest.param("centroid", {}, id="centroid"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def make(digest, dtype=torch.float32, rows=1, heads=2, groups=2, units=2, seed=0, scale=1.0, bias=0.0):
    """Random keys [B, H, N, U, D], scaled queries [B, H, G, D] and the row tensors from their statistics."""
    gen = torch.Generator().manual_seed(seed)
    dim = digest.head_dim
    spread = scale * (0.2 + torch.rand(rows, heads, 1, 1, dim, generator=gen))
    keys = torch.randn(rows, heads, units, digest.unit_tokens, dim, generator=gen) * spread + bias
    keys = keys.to(dtype)
    query = torch.randn(rows, heads, groups, dim, generator=gen) / (scale * math.sqrt(dim))
    return keys, query, calibrated(digest, keys, query)


def calibrated(digest, keys, query):
    flat = keys.float().flatten(2, 3)
    return digest.calibrate(flat.mean(2), flat.var(2, unbiased=False), query.float().square().mean(2))


def log_masses(query, keys, block_size, softcap=0.0):
    """True log mass of every block in float64: [B, H, G, blocks]."""
    logits = torch.einsum("bhgd,bhtd->bhgt", query.double(), keys.double().flatten(2, 3))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.unflatten(-1, (-1, block_size)).logsumexp(-1)


# ---- the references: one (row, KV head), plain Python numbers ------------------------------------


def half(x):
    return torch.tensor(x, dtype=torch.float64).to(torch.float16).double().item()


def stored(x, dtype):
    return torch.tensor(x, dtype=torch.float64).to(dtype).double().item()


def cap(x, softcap):
    return softcap * math.tanh(x / softcap) if softcap else x


def log_sum_exp(values):
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def columns(tokens):
    return [list(column) for column in zip(*tokens)]


def affine(column, bits, two_levels=False):
    """Decoded values of one channel of one unit."""
    levels = 2**bits - 1
    if two_levels:
        mean = sum(column) / len(column)
        spread = sum(abs(x - mean) for x in column) / len(column)
        low, step = half(mean - spread), half(2 * spread)
    else:
        low = half(min(column))
        step = half(max(0.0, max(column) - low) / levels)
    codes = [0 if step == 0 else min(levels, max(0, round((x - low) / step))) for x in column]
    return [low + step * c for c in codes]


def decode_key_bits(tokens, bits):
    return columns([affine(column, bits, two_levels=bits == 1) for column in columns(tokens)])


def decode_key_planes(tokens):
    decoded = []
    for column in columns(tokens):
        low = half(min(column))
        step = half(max(0.0, max(column) - low) / 15)
        codes = [0 if step == 0 else min(15, max(0, round((x - low) / step))) for x in column]
        decoded.append([low + step * (code - code % 4 + 1.5) for code in codes])
    return columns(decoded)


def decode_channel_codes(tokens, mean, weight, high_fraction=0.25, drop_fraction=0.0):
    dim = len(mean)
    order = sorted(range(dim), key=lambda i: (-weight[i], i))
    high, drop = math.ceil(dim * high_fraction), math.floor(dim * drop_fraction)
    decoded = [[m] * len(tokens) for m in mean]
    for place, channel in enumerate(order[: dim - drop]):
        bits = 4 if place < high else 2
        centred = [token[channel] - mean[channel] for token in tokens]
        decoded[channel] = [mean[channel] + x for x in affine(centred, bits)]
    return columns(decoded)


def block_logit(name, tokens, query, dtype, logical_size=None):
    if name == "pages":
        pages = [tokens[i : i + logical_size] for i in range(0, len(tokens), logical_size)]
        return max(block_logit("min_max", page, query, dtype) for page in pages)
    if name == "centroid":
        vectors = [[stored(sum(c) / len(c), dtype) for c in columns(tokens)]]
    elif name == "min_max":
        vectors = [[max(c) for c in columns(tokens)], [min(c) for c in columns(tokens)]]
    else:
        upper, lower = [], []
        for c in columns(tokens):
            centre = (min(c) + max(c)) / 2
            radius = sum(abs(x - centre) for x in c) / len(c)
            upper.append(stored(centre + radius, dtype))
            lower.append(stored(centre - radius, dtype))
        vectors = [upper, lower]
    return sum(max(q * v[i] for v in vectors) for i, q in enumerate(query))


def reference_scores(digest, options, keys, query, row, dtype, softcap=0.0, first_group=0):
    """float64 [B, H, G - first_group, blocks], unit by unit and token by token."""
    rows, heads, units = keys.shape[:3]
    size = digest.block_size
    flat = keys.float().flatten(2, 3)
    weight = query.float().square().mean(2) * flat.var(2, unbiased=False)
    query = query[:, :, first_group:]
    out = torch.empty(rows, heads, query.shape[2], units * digest.unit_blocks, dtype=torch.float64)
    for b in range(rows):
        for h in range(heads):
            for n in range(units):
                tokens = keys[b, h, n].double().tolist()
                if digest.name == "key_bits":
                    decoded = decode_key_bits(tokens, digest.bits)
                elif digest.name == "key_planes":
                    decoded = decode_key_planes(tokens)
                elif digest.name == "channel_codes":
                    decoded = decode_channel_codes(
                        tokens, row["centre"][b, h].double().tolist(), weight[b, h].tolist(), **options
                    )
                for g in range(query.shape[2]):
                    q = query[b, h, g].double().tolist()
                    for j in range(digest.unit_blocks):
                        part = slice(j * size, (j + 1) * size)
                        if digest.token_level:
                            dots = [sum(a * k for a, k in zip(q, token)) for token in decoded[part]]
                            score = log_sum_exp([cap(x, softcap) for x in dots])
                        else:
                            logit = block_logit(digest.name, tokens[part], q, dtype, **options)
                            score = cap(logit, softcap) + math.log(size)
                        out[b, h, g, n * digest.unit_blocks + j] = score
    return out


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name, options", ALL)
def test_score_equals_float64_reference(name, options, dtype):
    digest = get_digest(name, 8, 8, **options)
    keys, query, row = make(digest, dtype, bias=1.5)
    query = query * 4  # logits of several nats, so that one token dominates some blocks
    score = digest.score(query, digest.encode(keys, row), row)
    assert score.dtype == torch.float32
    expected = reference_scores(digest, options, keys, query, row, dtype)
    torch.testing.assert_close(score.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name, options", ALL)
def test_softcap_before_the_mass(name, options):
    digest = get_digest(name, 4, 8, **options)
    keys, query, row = make(digest, units=2, scale=2.0)
    query = query * 10
    unit = digest.encode(keys, row)
    score = digest.score(query, unit, row, softcap=1.5)
    expected = reference_scores(digest, options, keys, query, row, torch.float32, softcap=1.5)
    torch.testing.assert_close(score.double(), expected, atol=2e-5, rtol=1e-5)
    assert (digest.score(query, unit, row) - score).abs().max() > 0.5


@pytest.mark.parametrize(
    "block_size, dim, groups",
    [(16, 80, 7), (32, 64, 1), (32, 96, 3), (64, 128, 5), (32, 256, 8), (4, 8, 4), (8, 16, 2), (128, 16, 2)],
    ids=lambda v: str(v),
)
@pytest.mark.parametrize("name, options", ALL)
def test_odd_shapes_equal_float64_reference(name, options, block_size, dim, groups):
    digest = get_digest(name, block_size, dim, **options)
    keys, query, row = make(digest, torch.bfloat16, rows=1, heads=1, groups=groups, units=1, bias=0.5)
    unit = digest.encode(keys, row)
    layout = digest.unit_layout(torch.bfloat16)
    assert {k: (tuple(v.shape[3:]), v.dtype) for k, v in unit.items()} == layout
    score = digest.score(query, unit, row)
    assert score.shape == (1, 1, groups, digest.unit_blocks)
    last = groups - 1  # the reference is slow: one query head of the group is enough
    expected = reference_scores(digest, options, keys, query, row, torch.bfloat16, first_group=last)
    torch.testing.assert_close(score[:, :, last:].double(), expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_min_max_is_an_upper_bound(dtype, softcap):
    digest = get_digest("min_max", 16, 64)
    keys, query, row = make(digest, dtype, rows=2, heads=3, groups=4, units=20)
    query = query * 3
    score = digest.score(query, digest.encode(keys, row), row, softcap)
    true = log_masses(query, keys, 16, softcap)
    slack = score.double() - true
    assert (slack >= -1e-5).all()
    assert slack.min() < 0.7 * slack.max()  # a bound that follows the data


def test_pages_lie_between_the_true_mass_and_min_max():
    outer = get_digest("min_max", 64, 32)
    keys, query, _ = make(outer, units=20, groups=3)
    upper = outer.score(query, outer.encode(keys))
    before = upper
    for size in (64, 16, 4, 1):  # smaller pages, tighter bounds
        digest = get_digest("pages", 64, 32, logical_size=size)
        score = digest.score(query, digest.encode(keys))
        assert (score <= before + 1e-5).all()
        assert (score.double() >= log_masses(query, keys, 64) - 1e-5).all()
        assert torch.allclose(score, upper) == (size == 64)
        before = score


def test_pages_leave_skipped_tokens_out():
    """Tokens that are skipped change nothing of the others' pages, whatever they hold."""
    digest = get_digest("pages", 8, 4, logical_size=2)
    keys, query, _ = make(digest, units=3, seed=5)
    skip = torch.zeros(1, 1, 3, 8, dtype=torch.bool)
    skip[..., 0, :5] = True  # two pages and half of the third
    dirty = keys.clone()
    dirty[:, :, 0, :5] = math.nan
    unit = digest.encode(dirty, skip=skip)
    assert not unit["upper"][:, :, 0, :2].any() and not unit["lower"][:, :, 0, :2].any()
    for name in ("upper", "lower"):
        assert torch.equal(unit[name][:, :, 0, 2], keys[:, :, 0, 5])
        assert torch.equal(unit[name][:, :, 1:], digest.encode(keys)[name][:, :, 1:])


def test_centroid_is_a_lower_bound():
    digest = get_digest("centroid", 16, 64)
    keys, query, row = make(digest, rows=2, heads=3, groups=4, units=20)
    score = digest.score(query, digest.encode(keys, row), row)
    assert (score.double() <= log_masses(query, keys, 16) + 1e-5).all()


def test_cuboid_mean_lies_inside_min_max():
    keys, query, _ = make(get_digest("min_max", 16, 64), units=20)
    inner = get_digest("cuboid_mean", 16, 64)
    outer = get_digest("min_max", 16, 64)
    difference = outer.score(query, outer.encode(keys)) - inner.score(query, inner.encode(keys))
    assert (difference >= -1e-5).all() and difference.max() > 0.1


# ---- quantisation --------------------------------------------------------------------------------


def decoded_keys(digest, unit, row):
    """Keys that the packed buffers stand for, float64 [B, H, N, U, D], read byte by byte."""
    rows, heads, units = unit["scale"].shape[:3]
    size, dim = digest.unit_tokens, digest.head_dim
    out = torch.zeros(rows, heads, units, size, dim, dtype=torch.float64)
    if digest.name == "channel_codes":
        out += row["centre"].double()[:, :, None, None]
    for b in range(rows):
        for h in range(heads):
            for n in range(units):
                for place in range(unit["scale"].shape[-1]):
                    low = unit["minimum"][b, h, n, place].double().item()
                    step = unit["scale"][b, h, n, place].double().item()
                    if digest.name == "channel_codes":
                        channel = row["order"][b, h, place].item()
                        codes = channel_code_column(digest, unit, b, h, n, place)
                    else:
                        channel = place
                        codes = key_bits_column(unit["planes"][b, h, n, :, :, place], size)
                    values = [low + step * c for c in codes]
                    out[b, h, n, :, channel] += torch.tensor(values, dtype=torch.float64)
    return out


def channel_code_column(digest, unit, b, h, n, place):
    size, high = digest.unit_tokens, digest.high_channels
    if place < high:
        column, bits = unit["high"][b, h, n, :, place].tolist(), 4
    else:
        column, bits = unit["low"][b, h, n, :, place - high].tolist(), 2
    run = size * bits // 8
    return [(column[t % run] >> (bits * (t // run))) % (1 << bits) for t in range(size)]


def key_bits_column(planes, size):
    run = planes.shape[1]
    return [
        sum(((planes[plane, t % run].item() >> (t // run)) & 1) << plane for plane in range(planes.shape[0]))
        for t in range(size)
    ]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_key_bits_error_at_most_half_a_step(bits, block_size):
    digest = get_digest("key_bits", block_size, 8, bits=bits)
    keys, _, _ = make(digest, units=3, bias=2.0)
    unit = digest.encode(keys)
    error = (decoded_keys(digest, unit, {}) - keys.double()).abs()
    half_step = unit["scale"].double().unsqueeze(-2) / 2
    rounding = unit["minimum"].double().abs().unsqueeze(-2) * 2.0**-11
    assert (error <= half_step.maximum(rounding) * 1.01).all()
    assert error.max() > 0.5 * half_step.min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("block_size", [4, 16, 32, 64], ids=lambda p: f"P{p}")
def test_key_planes_are_the_upper_halves_of_a_quantised_block(block_size, dtype):
    digest = get_digest("key_planes", block_size, 10)
    keys, _, _ = make(digest, dtype, units=5, bias=2.0)
    packed = quantise_blocks(keys, keys, 4)
    unit = digest.encode(keys)
    half_bytes = block_size * 10 // 2
    pairs = packed[..., :half_bytes].unflatten(-1, (block_size // 2, 10))
    codes = torch.cat([pairs & 15, pairs >> 4], -2)
    upper = torch.cat([unit["upper"] >> 2 * k & 3 for k in range(4)], -2)
    assert unit["upper"].shape[-2:] == (block_size // 4, 10)
    assert torch.equal(upper, codes >> 2) and set(upper.unique().tolist()) == {0, 1, 2, 3}
    ranges = packed[..., 2 * half_bytes : 2 * half_bytes + 40].contiguous().view(torch.float16)
    assert torch.equal(ranges, torch.cat([unit["minimum"], unit["scale"]], -1))
    if dtype == torch.float32:  # and made of the stored keys they are the same, but for a scale on the edge of a float16
        again = digest.encode(dequantise_blocks(packed, block_size, 10, 10, 4, dtype)[0])
        assert torch.equal(again["minimum"], unit["minimum"])
        assert (again["upper"] == unit["upper"]).float().mean() > 0.99


@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_key_planes_error_at_most_two_scales(block_size):
    digest = get_digest("key_planes", block_size, 8)
    keys, _, _ = make(digest, units=3, bias=2.0)
    scale = digest.encode(keys)["scale"].double().unsqueeze(-2)
    decoded = torch.tensor([[decode_key_planes(tokens) for tokens in head] for head in keys[0].double().tolist()])
    error = (decoded - keys[0].double()).abs()
    assert (error <= 2.05 * scale[0]).all() and error.max() > 1.4 * scale.min()


def test_key_bits_error_shrinks_with_bits():
    errors = []
    for bits in (1, 2, 3, 4):
        digest = get_digest("key_bits", 32, 64, bits=bits)
        keys, query, row = make(digest, heads=4, units=32)
        score = digest.score(query, digest.encode(keys), row)
        errors.append((score.double() - log_masses(query, keys, 32)).abs().mean().item())
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2] > 3.375 * errors[3] > 0


def test_channel_codes_error_at_most_half_a_step_and_no_clipping():
    digest = get_digest("channel_codes", 8, 16)
    keys, _, row = make(digest, units=2, bias=-3.0)
    keys[0, 0, 0, 5, 3] = 40.0  # a spike in one channel of one token stays a spike
    unit = digest.encode(keys, row)
    decoded = decoded_keys(digest, unit, row)
    step = torch.zeros(1, 2, 2, 16, dtype=torch.float64)
    step.scatter_(-1, row["order"].long()[:, :, None].expand(1, 2, 2, 16), unit["scale"].double())
    assert ((decoded - keys.double()).abs() <= step.unsqueeze(-2) * 0.5 + 0.02).all()
    assert abs(decoded[0, 0, 0, 5, 3].item() - 40.0) < 0.1


@pytest.mark.parametrize("dim", [8, 16, 80, 128], ids=lambda d: f"D{d}")
@pytest.mark.parametrize("block_size", [4, 16, 32, 64], ids=lambda p: f"P{p}")
def test_channel_codes_layout_round_trip(block_size, dim):
    digest = get_digest("channel_codes", block_size, dim)
    size = digest.unit_tokens
    assert size == 128 and digest.unit_blocks == 128 // block_size
    keys, query, row = make(digest, heads=1, units=1)
    unit = digest.encode(keys, row)
    high = math.ceil(dim / 4)
    assert unit["high"].shape == (1, 1, 1, size // 2, high)
    assert unit["low"].shape == (1, 1, 1, size // 4, dim - high)
    codes = torch.cat(list(digest.codes(unit).values()), -1)[0, 0, 0]
    expected = [channel_code_column(digest, unit, 0, 0, 0, place) for place in range(dim)]
    assert codes.T.tolist() == expected
    # and the codes are those of the keys: the nearest level of the stored range
    levels = torch.tensor([15.0] * high + [3.0] * (dim - high), dtype=torch.float64)
    centred = (keys - row["centre"][:, :, None, None])[0, 0, 0][:, row["order"][0, 0].long()].double()
    place = (centred - unit["minimum"][0, 0, 0].double()) / unit["scale"][0, 0, 0].double()
    nearest = torch.minimum(place.clamp_min(0), levels)
    assert (codes - nearest).abs().max() <= 0.5 + 1e-4
    assert codes[:, :high].max() == 15 and codes[:, high:].max() == 3


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64], ids=lambda p: f"P{p}")
def test_key_bits_layout_round_trip(block_size, bits):
    digest = get_digest("key_bits", block_size, 8, bits=bits)
    keys, _, _ = make(digest, heads=1, units=1)
    unit = digest.encode(keys)
    assert unit["planes"].shape == (1, 1, 1, bits, max(1, block_size // 8), 8)
    codes = digest.codes(unit)[0, 0, 0]
    planes = unit["planes"][0, 0, 0]
    assert codes.T.tolist() == [key_bits_column(planes[:, :, c], block_size) for c in range(8)]
    assert codes.max() == 2**bits - 1 and codes.min() == 0


def test_channel_order_by_energy_times_variance_ties_by_index():
    digest = get_digest("channel_codes", 32, 8)
    variance = torch.tensor([1.0, 4.0, 2.0, 2.0, 0.0, 8.0, 2.0, 0.0]).view(1, 1, 8)
    energy = torch.tensor([8.0, 1.0, 1.0, 1.0, 9.0, 0.25, 1.0, 9.0]).view(1, 1, 8)
    row = digest.calibrate(torch.arange(8.0).view(1, 1, 8), variance, energy)
    assert row["order"].tolist() == [[[0, 1, 2, 3, 5, 6, 4, 7]]]
    assert row["centre"].tolist() == [[list(range(8))]]
    layout = digest.row_layout()
    assert {k: (tuple(v.shape[2:]), v.dtype) for k, v in row.items()} == layout


@pytest.mark.parametrize(
    "name, options, share",
    [
        ("channel_codes", {}, 44 / 512),
        ("channel_codes", {"drop_fraction": 0.25}, 35 / 512),
        ("key_bits", {"bits": 1}, 32 / 512),
        ("key_bits", {"bits": 2}, 48 / 512),
        ("key_bits", {"bits": 3}, 64 / 512),
        ("key_bits", {"bits": 4}, 80 / 512),
        ("key_planes", {}, 48 / 512),
        ("min_max", {}, 16 / 512),
        ("cuboid_mean", {}, 16 / 512),
        ("centroid", {}, 8 / 512),
    ],
)
def test_bytes_per_token(name, options, share):
    digest = get_digest(name, 32, 128, **options)
    keys, query, row = make(digest, torch.float16, heads=1, units=3)
    unit = digest.encode(keys, row)
    held = sum(value.numel() * value.element_size() for value in unit.values())
    assert held / (3 * digest.unit_tokens) == digest.bytes_per_token(torch.float16) == share * 4 * 128
    if name == "channel_codes" and not options:
        assert round(100 * share, 1) == 8.6


# ---- hostile data --------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e4], ids=["nan", "inf", "large"])
@pytest.mark.parametrize("name, options", ALL)
def test_skipped_tokens_do_not_enter(name, options, fill):
    """A skipped sink block changes nothing in the blocks after it, whatever it holds, and stays finite."""
    digest = get_digest(name, 8, 8, **options)
    keys, query, row = make(digest, units=3)
    skip = torch.zeros(1, 1, 3, digest.unit_tokens, dtype=torch.bool)
    skip[:, :, 0, :8] = True
    hostile = keys.clone()
    hostile[:, :, 0, :8] = fill
    scores = [digest.score(query, digest.encode(k, row, skip), row) for k in (keys, hostile)]
    assert torch.equal(scores[0], scores[1]) and scores[1].isfinite().all()
    if digest.unit_blocks > 1:
        # the scales are those of the kept tokens: as if the sink repeated a kept token
        repeated = keys.clone()
        repeated[:, :, 0, :8] = keys[:, :, 0, 8:9]
        expected = digest.score(query, digest.encode(repeated, row), row)
        torch.testing.assert_close(scores[1][..., 1:], expected[..., 1:])
        spoiled = digest.score(query, digest.encode(hostile, row), row)
        others = slice(1, digest.unit_blocks)
        assert not torch.allclose(spoiled[..., others], scores[1][..., others])


@pytest.mark.parametrize("name, options", ALL)
def test_partly_skipped_block_uses_the_kept_tokens(name, options):
    digest = get_digest(name, 8, 8, **options)
    keys, query, row = make(digest, units=1, heads=1)
    skip = torch.zeros(1, 1, 1, digest.unit_tokens, dtype=torch.bool)
    skip[..., 3] = True
    hostile = keys.clone()
    hostile[:, :, :, 3] = float("nan")
    unit = digest.encode(hostile, row, skip)
    kept = [t for t in range(digest.unit_tokens) if t != 3]
    if name == "pages":
        kept.insert(3, 2)  # as if it repeated a token of its page
    if digest.token_level:
        other = digest.encode(keys, row, skip)
        assert all(torch.equal(unit[k], other[k]) for k in unit)
    else:
        tokens = keys[0, 0, 0, kept].double().tolist()
        q = query[0, 0, 0].double().tolist()
        expected = block_logit(name, tokens, q, torch.float32, **options) + math.log(8)
        assert digest.score(query, unit, row)[0, 0, 0, 0].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -217.3, 6e4], ids=lambda v: f"value{v:g}")
@pytest.mark.parametrize("name, options", ALL)
def test_constant_channels(name, options, value):
    digest = get_digest(name, 8, 8, **options)
    keys = torch.full((1, 1, 2, digest.unit_tokens, 8), value)
    query = torch.full((1, 1, 1, 8), 0.125)
    row = calibrated(digest, keys, query)
    score = digest.score(query, digest.encode(keys, row), row)
    expected = value + math.log(8)
    assert score.isfinite().all()
    rounding = abs(value) * 2.0**-11  # of a float16 minimum
    torch.testing.assert_close(score, torch.full_like(score, expected), atol=1e-4 + rounding, rtol=0)


def test_scale_that_underflows_gives_code_zero():
    """A range below float16's smallest step: the scale is 0, and nothing is divided by it."""
    digest = get_digest("key_bits", 8, 8, bits=4)
    keys = torch.zeros(1, 1, 1, 8, 8)
    keys[..., 4:, :] = 1e-9
    unit = digest.encode(keys)
    assert unit["scale"].abs().max() == 0 and digest.codes(unit).max() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name, options", ALL)
def test_bias_outliers(name, options, dtype):
    """Keys like those of Qwen2's first layer: a few channels sit at +-217 with a small spread around it."""
    digest = get_digest(name, 16, 64, **options)
    gen = torch.Generator().manual_seed(3)
    units = 128 // digest.unit_tokens
    bias = torch.zeros(64)
    bias[[5, 20, 41]] = torch.tensor([217.0, -160.0, 90.0])
    keys = (torch.randn(1, 2, units, digest.unit_tokens, 64, generator=gen) + bias).to(dtype)
    query = torch.randn(1, 2, 3, 64, generator=gen) / 8
    row = calibrated(digest, keys, query)
    score = digest.score(query, digest.encode(keys, row), row)
    true = log_masses(query, keys, 16)
    assert score.isfinite().all()
    if name == "channel_codes" and "drop_fraction" not in options:
        # centring keeps the error at that of unit variance keys, though the logits are tens of nats
        assert true.abs().max() > 20 and (score.double() - true).abs().max() < 1.5
    if name == "key_bits" and digest.bits > 1:
        assert (score.double() - true).abs().max() < 1.5


@pytest.mark.parametrize("name, options", ALL)
def test_keys_beyond_float16_stay_finite(name, options):
    digest = get_digest(name, 8, 8, **options)
    keys, query, _ = make(digest, torch.bfloat16, units=2, scale=3e5)
    row = calibrated(digest, keys, query)
    unit = digest.encode(keys, row)
    assert all(value.isfinite().all() for value in unit.values())
    assert digest.score(query * 1e-3, unit, row).isfinite().all()


@pytest.mark.parametrize("name, options", ALL)
def test_poisoned_units_change_no_other_unit(name, options):
    digest = get_digest(name, 8, 16, **options)
    keys, query, row = make(digest, rows=2, units=3, groups=3)
    unit = digest.encode(keys, row)
    clean = digest.score(query, unit, row)
    poisoned = {}
    for key, value in unit.items():
        shape = (2, 2, 7, *value.shape[3:])
        if value.is_floating_point():
            poisoned[key] = torch.full(shape, float("nan"), dtype=value.dtype)
        else:
            poisoned[key] = torch.full(shape, 255, dtype=value.dtype)
        poisoned[key][:, :, :3] = value
    score = digest.score(query, poisoned, row)
    valid = 3 * digest.unit_blocks
    assert torch.equal(score[..., :valid], clean)
    assert score[..., valid:].isnan().all()


@pytest.mark.parametrize("name, options", [p for p in ALL if p.id != "channel_codes-drop"])
def test_nan_among_kept_keys_is_visible(name, options):
    digest = get_digest(name, 8, 8, **options)
    keys, query, row = make(digest, units=2)
    keys[:, :, 1, 2, 4] = float("nan")
    score = digest.score(query, digest.encode(keys, row), row)
    assert score[..., : digest.unit_blocks].isfinite().all()
    assert score[..., digest.unit_blocks].isnan().all()


@pytest.mark.parametrize("name, options", ALL)
def test_rows_and_chunks_change_no_bit(name, options, monkeypatch):
    """A row scores the same bits alone, in a batch, beside fewer units, and in chunks of one unit."""
    digest = get_digest(name, 8, 64, **options)
    keys, query, row = make(digest, torch.bfloat16, rows=3, units=5, groups=3)
    unit = digest.encode(keys, row)
    score = digest.score(query, unit, row)
    alone = {k: v[1:2] for k, v in row.items()}
    one = digest.encode(keys[1:2, :, :2], alone)
    assert all(torch.equal(one[k], unit[k][1:2, :, :2]) for k in unit)
    assert torch.equal(digest.score(query[1:2], one, alone), score[1:2, ..., : 2 * digest.unit_blocks])
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", 1)
    again = digest.encode(keys, row)
    assert all(torch.equal(again[k], unit[k]) for k in unit)
    assert torch.equal(digest.score(query, again, row), score)


@pytest.mark.parametrize("name, options", ALL)
def test_no_tensor_value_reaches_python(name, options):
    """Meta tensors have shapes and no values: a decision by value (or a copy to the host) raises on them."""
    digest = get_digest(name, 16, 32, **options)
    keys = torch.empty(2, 3, 4, digest.unit_tokens, 32, dtype=torch.bfloat16, device="meta")
    stats = torch.empty(2, 3, 32, device="meta")
    row = digest.calibrate(stats, stats, stats)
    skip = torch.empty(2, 1, 4, digest.unit_tokens, dtype=torch.bool, device="meta")
    unit = digest.encode(keys, row, skip)
    layout = digest.unit_layout(torch.bfloat16)
    assert {k: (tuple(v.shape), v.dtype) for k, v in unit.items()} == {
        k: ((2, 3, 4, *shape), dtype) for k, (shape, dtype) in layout.items()
    }
    score = digest.score(torch.empty(2, 3, 5, 32, device="meta"), unit, row, softcap=30.0)
    assert score.shape == (2, 3, 5, 4 * digest.unit_blocks)
    none = {k: v[:, :, :0] for k, v in unit.items()}
    assert digest.score(torch.empty(2, 3, 5, 32, device="meta"), none, row).shape == (2, 3, 5, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, options", ALL)
def test_encode_and_score_replay_in_a_cuda_graph(name, options):
    """Captured once, replayed on new contents of the same buffers; equal to eager, close to the CPU."""
    digest = get_digest(name, 16, 128, **options)
    keys, query, row = make(digest, torch.bfloat16, rows=2, groups=4, units=6)
    other = make(digest, torch.bfloat16, rows=2, groups=4, units=6, seed=1, bias=2.0)
    other_keys, other_query, other_row = other
    skip = torch.zeros(1, 1, 6, digest.unit_tokens, dtype=torch.bool)
    skip[:, :, 0, :16] = True
    buffers = [x.cuda() for x in (keys, query, skip, *row.values())]
    row_buffers = dict(zip(row, buffers[3:]))

    def step():
        return digest.score(buffers[1], digest.encode(buffers[0], row_buffers, buffers[2]), row_buffers, 30.0)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for buffer, value in zip(buffers, (other_keys, other_query, skip, *other_row.values())):
        buffer.copy_(value)
    graph.replay()
    assert torch.equal(captured, step())
    expected = digest.score(other_query, digest.encode(other_keys, other_row, skip), other_row, 30.0)
    torch.testing.assert_close(captured.cpu(), expected, atol=1e-3, rtol=1e-4)


# ---- ranking -------------------------------------------------------------------------------------


def spiky(seed=7, heads=8, blocks=128, size=32, dim=64, spikes=10):
    """Diffuse keys; a few blocks hold one token that answers the query, like needles in a long context."""
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, heads, blocks * size, dim, generator=gen)
    query = torch.randn(1, heads, 1, dim, generator=gen)
    for h in range(heads):
        for block in torch.randperm(blocks, generator=gen)[:spikes].tolist():
            token = block * size + int(torch.randint(size, (1,), generator=gen))
            keys[0, h, token] += query[0, h, 0] * 1.0
    return keys, query / math.sqrt(dim)


def recall(digest, keys, query, count):
    units = keys.unflatten(2, (-1, digest.unit_tokens))
    row = calibrated(digest, units, query)
    score = digest.score(query, digest.encode(units, row), row)[0, :, 0]
    true = log_masses(query, units, digest.block_size)[0, :, 0]
    hits = [
        len(set(score[h].topk(count).indices.tolist()) & set(true[h].topk(count).indices.tolist()))
        for h in range(keys.shape[1])
    ]
    return sum(hits) / (count * keys.shape[1])


def test_channel_codes_find_spikes_that_boxes_miss():
    keys, query = spiky()
    found = {name: recall(get_digest(name, 32, 64), keys, query, 10) for name in DIGESTS}
    assert found["channel_codes"] > 0.9
    assert found["channel_codes"] >= found["key_bits"] - 0.05
    assert found["key_planes"] >= found["key_bits"] - 0.05
    assert found["channel_codes"] > found["cuboid_mean"] + 0.2
    assert found["channel_codes"] > found["centroid"] + 0.2
    assert found["channel_codes"] > found["min_max"] + 0.2


def test_token_level_masses_add_up():
    """The total of the estimated masses is near the true total: what the estimate stop needs."""
    keys, query = spiky()
    for name, limit in (("channel_codes", 0.12), ("key_bits", 0.25)):
        digest = get_digest(name, 32, 64)
        units = keys.unflatten(2, (-1, digest.unit_tokens))
        row = calibrated(digest, units, query)
        estimate = digest.score(query, digest.encode(units, row), row).double().logsumexp(-1)
        assert (estimate - log_masses(query, units, 32).logsumexp(-1)).abs().mean() < limit, name


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        (("nope", 32, 64), {}, ValueError, "unknown digest 'nope'.*channel_codes"),
        (("key_bits", 32, 64), {"bits": 5}, ValueError, "1, 2, 3 or 4 bits, got 5"),
        (("key_bits", 32, 64), {"bits": True}, ValueError, "1, 2, 3 or 4 bits"),
        (("min_max", 0, 64), {}, ValueError, "block_size must be a positive integer"),
        (("min_max", 32, 1.5), {}, ValueError, "head_dim must be a positive integer"),
        (("min_max", 32, 64), {"bits": 2}, TypeError, "bits"),
        (("pages", 32, 64), {"logical_size": 12}, ValueError, "divides block_size=32, got 12"),
        (("pages", 32, 64), {"logical_size": 0}, ValueError, "logical_size must be a positive integer"),
        (("pages", 32, 64), {"logical_size": 8.0}, ValueError, "logical_size must be a positive integer"),
        (("key_planes", 6, 64), {}, ValueError, "block_size=6 is not a multiple of 4"),
        (("channel_codes", 6, 64), {"group": 6}, ValueError, "multiple of 4"),
        (("channel_codes", 32, 64), {"group": 0}, ValueError, "group must be a positive integer"),
        (("channel_codes", 32, 64), {"high_fraction": 1.5}, ValueError, r"high_fraction must be in \[0, 1\]"),
        (("channel_codes", 32, 64), {"high_fraction": 0.5, "drop_fraction": 0.75}, ValueError, "not overlap"),
        (("channel_codes", 32, 64), {"high_fraction": 0, "drop_fraction": 1.0}, ValueError, "leave channels"),
    ],
)
def test_bad_arguments(arguments, options, error, words):
    with pytest.raises(error, match=words):
        get_digest(*arguments, **options)


def test_wrong_shapes_are_named():
    digest = get_digest("channel_codes", 32, 64)
    keys, query, row = make(digest, units=1)
    with pytest.raises(ValueError, match="call calibrate"):
        digest.encode(keys)
    with pytest.raises(ValueError, match=r"expects keys .*128, 64"):
        digest.encode(keys[..., :32, :], row)
    unit = digest.encode(keys, row)
    with pytest.raises(ValueError, match="expects a query"):
        digest.score(query[..., :32], unit, row)
    with pytest.raises(ValueError, match="call calibrate"):
        digest.score(query, unit)


def test_interface_flags():
    flags = {
        name: (d.token_level, d.needs_calibration, d.unit_blocks)
        for name in DIGESTS
        for d in [get_digest(name, 16, 32)]
    }
    assert flags == {
        "channel_codes": (True, True, 8),
        "key_bits": (True, False, 1),
        "key_planes": (True, False, 1),
        "cuboid_mean": (False, False, 1),
        "min_max": (False, False, 1),
        "pages": (False, False, 1),
        "centroid": (False, False, 1),
    }
