"""Policies by name: what they mean, and what is said where they mean nothing."""
from __future__ import annotations

import pytest

from hf_sparse import PSAConfig
from hf_sparse.evaluation.decoding import can_skip
from hf_sparse.evaluation.policies import NAMES, parse_policies, parse_policy


@pytest.mark.parametrize(
    ("text", "digest", "rule", "reading", "fields"),
    [
        ("psa", "channel_codes", "estimate", "cut", {"threshold": 0.9, "bounds": (0.05, 0.16)}),
        ("psa@0.8", "channel_codes", "estimate", "cut", {"threshold": 0.8, "bounds": (0, None)}),
        ("psa@0.9", "channel_codes", "estimate", "cut", {"threshold": 0.9, "bounds": (0, None)}),
        ("psa@0.8/rounds", "channel_codes", "estimate", "rounds", {"threshold": 0.8, "round_blocks": 8}),
        ("psa/window@0.9", "channel_codes", "window", "rounds", {"threshold": 0.9}),
        ("psa@0.9/cuboid_mean", "cuboid_mean", "window", "rounds", {"threshold": 0.9}),
        ("psa/cuboid_mean/true@0.9", "cuboid_mean", "true", "rounds", {"threshold": 0.9, "round_blocks": 1, "round_growth": 1.0}),
        ("psa/key_bits/key_bits=3", "key_bits", "estimate", "cut", {"key_bits": 3}),
        ("psa/key_planes/kv_bits=4", "key_planes", "estimate", "cut", {"kv_bits": 4}),
        ("psa/group_stop=min@0.7", "channel_codes", "estimate", "cut", {"threshold": 0.7, "group_stop": "min"}),
        ("psa/max_blocks=none/dense_layers=0+1", "channel_codes", "estimate", "cut", {"max_blocks": None, "dense_layers": (0, 1)}),
        ("topk@0.08", "channel_codes", "estimate", "rounds", {"policy": "top_k", "top_k": 0.08}),
        ("topk@40", "channel_codes", "estimate", "rounds", {"policy": "top_k", "top_k": 40}),
        ("topk@0.3/cuboid_mean", "cuboid_mean", "window", "rounds", {"policy": "top_k", "top_k": 0.3}),
        ("topp@0.9", "channel_codes", "estimate", "cut", {"policy": "top_p", "top_p": 0.9}),
        ("topp@0.9/min_max", "min_max", "window", "rounds", {"policy": "top_p", "top_p": 0.9}),
        ("quest@0.25", "min_max", "window", "rounds", {"policy": "top_k", "top_k": 0.25, "block_size": 16}),
        ("quest@2048", "min_max", "window", "rounds", {"top_k": 128}),
        ("arkvale@1", "cuboid_mean", "window", "rounds", {"top_k": 1.0, "block_size": 32}),
        ("arkvale@1000", "cuboid_mean", "window", "rounds", {"top_k": 32}),
        ("lserve", "pages", "window", "rounds", {"top_k": 64, "block_size": 64}),
        ("arkvale/pages@4096", "pages", "window", "rounds", {"top_k": 64, "block_size": 64}),
        ("quest/digest=pages/block_size=32@4096", "pages", "window", "rounds", {"top_k": 128, "block_size": 32}),
        ("oracle@0.95", "oracle", "estimate", "cut", {"threshold": 0.95}),
        ("dense", "channel_codes", "estimate", "cut", {"threshold": 1.0}),
    ],
    ids=lambda value: value.replace("/", "_") if isinstance(value, str) else "",
)  # fmt: skip
def test_names_mean_settings(text, digest, rule, reading, fields):
    policy = parse_policy(text)
    assert (policy.name, policy.digest, policy.stop_rule, policy.reading) == (text, digest, rule, reading)
    assert {name: getattr(policy.config, name) for name in fields} == fields
    assert policy.dense == (text == "dense")
    assert policy.real == (digest != "oracle" and rule != "true")


def test_reuse_is_the_settings_of_a_cache():
    policy = parse_policy("psa/reuse=4/reuse_refresh=0.1")
    assert policy.config == PSAConfig(reuse=4, reuse_refresh=0.1) and policy.real
    assert policy.to_dict() != parse_policy("psa/reuse=4").to_dict()
    assert parse_policy("psa/reuse_refresh=0.1").to_dict() == parse_policy("psa").to_dict()      # nothing is reused


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("psa/kv_bits=8", {"kv_bits": 8}),
        ("dense/kv_bits=4", {"kv_bits": 4}),
        ("dense/streaming=0.25", {"streaming_heads": (), "streaming_sink": 128, "streaming_window": 256}),
        ("psa@0.9/streaming_heads=3:1+0:2", {"streaming_heads": ((0, 2), (3, 1))}),
        ("lserve@4096/streaming=0.5/kv_bits=4/streaming_sink=0", {"kv_bits": 4, "streaming_sink": 0}),
    ],
)
def test_what_lserve_adds_is_no_dense_attention(text, fields):
    policy, plain = parse_policy(text), parse_policy(text.split("/")[0])
    assert policy.config == plain.config.replace(**fields) and policy.reads_all == plain.reads_all
    assert policy.streaming == {"dense/streaming=0.25": 0.25, "lserve@4096/streaming=0.5/kv_bits=4/streaming_sink=0": 0.5}.get(text, 0)
    assert not policy.dense and policy.real
    assert policy.to_dict() != plain.to_dict() and set(plain.to_dict()) < set(policy.to_dict())


def test_what_a_policy_does_not_use_is_not_in_its_settings():
    known = {"kv_bits", "streaming", "streaming_heads", "streaming_sink", "streaming_window", "reuse_refresh", "logical_size"}
    assert not known & set(parse_policy("psa").to_dict())
    assert parse_policy("psa/kv_bits=16").dense is False and parse_policy("dense/kv_bits=16/streaming=0").dense


def test_settings_start_from_those_given():
    base = PSAConfig(threshold=0.6, block_size=8, min_context=0, stop_rule="nleft", digest="cuboid_mean")
    policy = parse_policy("psa", base)
    assert policy.config == base and (policy.digest, policy.stop_rule) == ("cuboid_mean", "nleft")
    assert parse_policy("topk@0.1", base).config.block_size == 8


@pytest.mark.parametrize("base", [
    PSAConfig(policy="top_k", top_k=0.1), PSAConfig(policy="top_p", top_p=0.5), PSAConfig(max_blocks=0.2), PSAConfig(min_blocks=9),
    PSAConfig(kv_bits=4, streaming_heads=((0, 0),)),
], ids=["top_k", "top_p", "max_blocks", "min_blocks", "lserve"])  # fmt: skip
def test_names_that_say_it_all_win_over_the_settings(base):
    dense = parse_policy("dense", base)
    assert dense.dense and not can_skip(dense.config) and dense.config.min_blocks == 0
    for text in ("psa@0.9", "oracle@0.9"):
        assert (parse_policy(text, base).config.policy, parse_policy(text, base).threshold) == ("threshold", 0.9)
    assert parse_policy("oracle", base).config.policy == "threshold"
    assert parse_policy("psa", base).config == base


def test_a_threshold_of_one_with_a_limit_is_not_dense():
    policy = parse_policy("psa@1.0/max_blocks=20")
    assert not policy.dense and policy.config.max_blocks == 20
    assert parse_policy("psa@1.0").dense and parse_policy("psa@1.0/min_blocks=20").dense


def test_policies_that_choose_the_same_blocks_are_equal():
    assert parse_policy("psa").to_dict() == parse_policy("psa/estimate/cut").to_dict()
    assert parse_policy("psa").to_dict() != parse_policy("psa@0.9").to_dict() == parse_policy("psa/max_blocks=none").to_dict()
    assert parse_policy("psa").to_dict() != parse_policy("psa/rounds").to_dict()
    assert parse_policy("psa").threshold == 0.9 and parse_policy("topp@0.7").threshold == 0.7
    assert parse_policy("topk@0.1").threshold is None


def test_lists_keep_their_order_and_each_name_once():
    assert [p.name for p in parse_policies("topk@0.1, psa,topk@0.1,")] == ["topk@0.1", "psa"]
    assert [p.name for p in parse_policies(["psa", "dense"])] == ["psa", "dense"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no policy given"),
        ("pas@0.8", r"no policy 'pas' \(did you mean 'psa'\?\)"),
        ("everything", ", ".join(NAMES)),
        ("psa@much", "'much' after @ is not a number"),
        ("psa@true", "not a number"),
        ("psa@0.8/window@0.9", "two values"),
        ("psa@1.5", r"threshold=1.5 is outside \(0, 1\]"),
        ("dense@0.5", "'dense' takes no value"),
        ("quest@0", "budget must be above 0"),
        ("topk@1.5", "top_k=1.5"),
        ("psa/windw", r"did you mean 'window'\?"),
        ("psa/cuboid_mean/estimate", "needs a digest that estimates mass token by token"),
        ("psa/cuboid_mean/cut", "a cut needs a digest"),
        ("psa/window/cut", "a cut goes by estimates"),
        ("psa/blocksize=16", r"did you mean 'block_size'\?"),
        ("psa/gpu_memory=4GiB", "'gpu_memory' can't be set here"),
        ("psa/block_size=big", "block_size='big' is not a number"),
        ("psa/block_size=17", "block_size=17 is not supported"),
        ("psa/reuse=0", "reuse=0"),
        ("psa/kv_bits=2", "choose 16"),
        ("psa/kv_bits=many", "not a number"),
        ("psa/streaming=half", "share from 0 to 1"),
        ("psa/streaming=1.5", "share from 0 to 1"),
        ("psa/streaming_heads=1", "whole numbers"),
        ("psa/streaming_heads=1:x", "whole numbers"),
        ("psa/streaming=0.5/streaming_heads=1:1", "not both"),
        ("psa/streaming_window=0", "must be at least 1"),
        ("psa/streaming_heads=1:1+1:1", "twice"),
        ("psa/kvbits=8", r"did you mean 'kv_bits'\?"),
        ("psa/dense_layers=0+x", "whole numbers"),
        ("lserve/block_size=8", "logical_size=16 must divide block_size=8"),
    ],
)
def test_what_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policies(text)
