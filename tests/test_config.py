"""PSAConfig: every bad value is refused with its cause and remedy; round trips; presets."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import pytest

from hf_sparse import PSAConfig
from hf_sparse.config import CONFIG_NAME, FORK_FIELDS, PRESETS

NAN, INF = math.nan, math.inf

# (field, value, error, what the message must say); further settings that the case needs in the last place.
BAD = [
    # out of range
    ("threshold", 0, ValueError, r"threshold=0 is outside \(0, 1\]"),
    ("threshold", -0.1, ValueError, r"outside \(0, 1\]"),
    ("threshold", 1.0001, ValueError, r"outside \(0, 1\]"),
    ("threshold", NAN, ValueError, r"outside \(0, 1\]"),
    ("threshold", INF, ValueError, r"outside \(0, 1\]"),
    ("top_p", 0.0, ValueError, r"top_p=0.0 is outside \(0, 1\]"),
    ("top_p", 1.5, ValueError, r"outside \(0, 1\]"),
    ("round_growth", 0.9, ValueError, "round_growth=0.9 is outside"),
    ("round_growth", NAN, ValueError, "round_growth=nan is outside"),
    ("round_growth", INF, ValueError, "round_growth=inf is outside"),
    ("stop_window", 0, ValueError, "stop_window=0 must be at least 1"),
    ("sink_blocks", -1, ValueError, "sink_blocks=-1 must be at least 0"),
    ("recent_blocks", -1, ValueError, "recent_blocks=-1 must be at least 0"),
    ("min_blocks", -1, ValueError, "min_blocks=-1 must be at least 0"),
    ("min_blocks", 1.0, ValueError, r"min_blocks=1.0 as a share must lie in \(0, 1\)"),
    ("min_blocks", 0.0, ValueError, r"min_blocks=0.0 as a share must lie in \(0, 1\)"),
    ("min_blocks", True, TypeError, "min_blocks"),
    ("max_blocks", 0, ValueError, "max_blocks=0 must be at least 1"),
    ("max_blocks", 2, ValueError, "3 blocks that are always read"),
    ("top_k", 0, ValueError, "top_k=0 must be at least 1 block"),
    ("top_k", -4, ValueError, "top_k=-4 must be at least 1 block"),
    ("top_k", 0.0, ValueError, r"top_k=0.0 as a share must lie in \(0, 1\]"),
    ("top_k", 1.5, ValueError, r"blocks are given as an int"),
    ("top_k", NAN, ValueError, r"must lie in \(0, 1\]"),
    ("min_context", -1, ValueError, "min_context=-1 must be at least 0"),
    ("round_blocks", 0, ValueError, "round_blocks=0 must be at least 1"),
    ("record_steps", -1, ValueError, "record_steps=-1 must be at least 0"),
    ("block_size", 0, ValueError, "block_size=0 is not supported; choose 16, 32 or 64"),
    ("block_size", 48, ValueError, "choose 16, 32 or 64"),
    ("key_bits", 5, ValueError, "key_bits=5 is not supported; choose 1, 2, 3 or 4"),
    ("key_bits", 0, ValueError, "choose 1, 2, 3 or 4"),
    # names that don't exist
    ("policy", "topk", ValueError, "policy='topk' is not known; choose one of threshold, top_k, top_p"),
    ("digest", "minmax", ValueError, "digest='minmax' is not known; choose one of channel_codes"),
    ("stop_rule", "never", ValueError, "stop_rule='never' is not known"),
    ("group_stop", "max", ValueError, "group_stop='max' is not known; choose one of mean, min"),
    ("group_reduction", "sum", ValueError, "group_reduction='sum' is not known"),
    ("eviction", "LRU", ValueError, "eviction='LRU' is not known; choose one of decayed, lru, fifo"),
    ("eviction", None, ValueError, "eviction=None is not known"),
    ("pool", "shared", ValueError, "pool='shared' is not known; choose one of unified, per_layer"),
    ("fetcher", "copy-engine", ValueError, "fetcher='copy-engine' is not known; choose one of kernel, copy_engine"),
    # sizes
    ("gpu_memory", "lots", ValueError, "gpu_memory='lots' is not a size"),
    ("gpu_memory", 0, ValueError, "gpu_memory must be more than 0 bytes"),
    ("gpu_memory", "0GiB", ValueError, "gpu_memory must be more than 0 bytes"),
    ("gpu_memory", -1, ValueError, "gpu_memory must not be negative"),
    ("gpu_memory", 1.5, TypeError, "gpu_memory must be an int"),
    ("gpu_memory", None, TypeError, "gpu_memory must be an int"),
    ("host_memory", "4 gigs", ValueError, "host_memory='4 gigs' is not a size"),
    ("host_memory", True, TypeError, "host_memory must be an int"),
    # types
    ("threshold", "0.9", TypeError, "threshold must be a number, got '0.9'"),
    ("threshold", None, TypeError, "threshold must be a number, got None"),
    ("threshold", True, TypeError, "threshold must be a number, got True"),
    ("top_p", "half", TypeError, "top_p must be a number"),
    ("block_size", 32.0, TypeError, "block_size must be an int, got 32.0"),
    ("block_size", "32", TypeError, "block_size must be an int, got '32'"),
    ("key_bits", True, TypeError, "key_bits must be an int, got True"),
    ("key_bits", 2.0, TypeError, "key_bits must be an int, got 2.0"),
    ("sink_blocks", 1.0, TypeError, "sink_blocks must be an int, got 1.0"),
    ("recent_blocks", None, TypeError, "recent_blocks must be an int"),
    ("max_blocks", 1.5, ValueError, r"max_blocks=1.5 as a share must lie in \(0, 1\)"),
    ("max_blocks", "8", TypeError, "max_blocks must be an int"),
    ("top_k", "12", TypeError, r"top_k must be an int \(blocks\) or a float"),
    ("top_k", True, TypeError, "top_k must be an int"),
    ("min_context", "2K", TypeError, "min_context must be an int"),
    ("verify", 1, TypeError, "verify must be True or False, got 1"),
    ("sparse_queries", "yes", TypeError, "sparse_queries must be True or False"),
    ("dense_layers", 3, TypeError, "dense_layers must be"),
    ("dense_layers", None, TypeError, "dense_layers must be"),
    ("dense_layers", "01", TypeError, "dense_layers must be"),
    ("dense_layers", (0, -1), ValueError, "dense_layers=.* must be layer indices, 0 or more"),
    ("dense_layers", (0.5,), ValueError, "must be layer indices"),
    ("logical_size", 0, ValueError, "logical_size=0 must be at least 1"),
    ("logical_size", 16.0, TypeError, "logical_size must be an int"),
    ("reuse", 0, ValueError, "reuse=0 must be at least 1"),
    ("reuse", True, TypeError, "reuse must be an int"),
    ("reuse_refresh", 1.5, ValueError, "reuse_refresh=1.5 is outside"),
    ("reuse_refresh", -0.1, ValueError, "reuse_refresh=-0.1 is outside"),
    ("reuse_refresh", None, TypeError, "reuse_refresh must be a number"),
]


@pytest.mark.parametrize(
    ("field", "value", "error", "message"), BAD, ids=[f"{case[0]}={case[1]!r}" for case in BAD]
)
def test_bad_value(field, value, error, message):
    with pytest.raises(error, match=message):
        PSAConfig(**{field: value})
    with pytest.raises(error, match=message):
        PSAConfig().replace(**{field: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(policy="top_k"), "policy='top_k' needs top_k"),
        (dict(min_blocks=20, max_blocks=10), "max_blocks=10 is below min_blocks=20"),
        (dict(min_blocks=0.2, max_blocks=0.1), "max_blocks=0.1 is below min_blocks=0.2"),
        (
            dict(sink_blocks=4, recent_blocks=8, max_blocks=10),
            "max_blocks=10 is below the 13 blocks that are always read",
        ),
        (
            dict(digest="min_max"),
            "stop_rule='estimate' needs a digest that estimates mass token by token.*Use stop_rule='window'",
        ),
        (dict(digest="centroid", threshold=0.5), "digest='centroid' does not"),
        (dict(digest="pages"), "digest='pages' does not"),
        (dict(digest="pages", policy="top_k", top_k=9, logical_size=12), "logical_size=12 must divide block_size=32"),
        (dict(reuse=33), "reuse=33 is more than block_size=32.*Lower reuse to at most 32"),
    ],
    ids=["top_k-missing", "max-below-min", "max-share-below-min", "max-below-forced", "estimate-min_max", "estimate-centroid",
         "estimate-pages", "pages-logical_size", "reuse-channel_codes"],
)
def test_settings_that_contradict(settings, message):
    with pytest.raises(ValueError, match=message):
        PSAConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        dict(digest="min_max", threshold=1.0),
        dict(digest="min_max", stop_rule="window"),
        dict(digest="centroid", policy="top_k", top_k=8),
        dict(policy="top_k", top_k=0.1),
        dict(threshold=1),
        dict(max_blocks=3),
        dict(sink_blocks=0, recent_blocks=0, max_blocks=1),
        dict(gpu_memory="4GiB", host_memory=0),
        dict(gpu_memory=10**9),
        dict(dense_layers=[0, 5]),
        dict(min_blocks=5, max_blocks=5),
        dict(min_blocks=0.05, max_blocks=5),
        dict(min_blocks=0.05, max_blocks=0.2),
    ],
    ids=str,
)
def test_good_values(settings):
    config = PSAConfig(**settings)
    for name, value in settings.items():
        assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("treshold", "threshold"), ("gpu_mem", "gpu_memory"), ("topk", "top_k"), ("blocksize", "block_size")],
)
def test_unknown_names_suggest(name, hint):
    for build in (
        PSAConfig().replace,
        lambda **kw: PSAConfig.build(None, **kw),
        lambda **kw: PSAConfig.from_dict(kw),
    ):
        with pytest.raises(TypeError, match=f"has no field '{name}'. Did you mean '{hint}'"):
            build(**{name: 1})


def test_unknown_names_without_a_close_one_list_all():
    with pytest.raises(
        TypeError, match="has no field 'zzz'. Known fields: threshold, policy, .*record_steps"
    ):
        PSAConfig.build(zzz=1)


def test_defaults_are_the_documented_ones():
    config = PSAConfig()
    assert (config.threshold, config.digest, config.stop_rule, config.group_stop) == (
        0.9,
        "channel_codes",
        "estimate",
        "mean",
    )
    assert (config.bounds, config.least_cap) == ((0.05, 0.16), 40)
    assert (config.block_size, config.min_context, config.eviction) == (32, 2048, "decayed")
    assert config == PSAConfig.preset("psa")


@pytest.mark.parametrize("changed", [dict(threshold=0.8), dict(threshold=1.0), dict(policy="top_p"), dict(stop_rule="window"),
                                     dict(digest="key_bits"), dict(policy="top_k", top_k=9)], ids=str)
def test_automatic_bounds_hold_for_the_default_choice_of_blocks_only(changed):
    assert (PSAConfig(**changed).bounds, PSAConfig(**changed).least_cap) == ((0, None), 0)
    assert PSAConfig(**changed).replace(threshold=0.9).bounds == ((0.05, 0.16) if "threshold" in changed else (0, None))


@pytest.mark.parametrize(("given", "bounds"), [(dict(max_blocks=128), (0, 128)), (dict(min_blocks=0.3), (0.3, None)),
                                               (dict(min_blocks=0, max_blocks=None), (0, None))], ids=str)
def test_a_bound_that_is_given_leaves_no_automatic_one(given, bounds):
    assert (PSAConfig(**given).bounds, PSAConfig(**given).least_cap) == (bounds, 0)


def test_immutable_and_hashable():
    config = PSAConfig(dense_layers=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threshold = 0.5
    assert hash(config) == hash(PSAConfig(dense_layers=(1,)))


EVERY_FIELD = dict(
    threshold=0.7,
    policy="top_k",
    digest="key_bits",
    key_bits=3,
    logical_size=4,
    stop_rule="window",
    stop_window=5,
    group_stop="min",
    group_reduction="max",
    block_size=16,
    sink_blocks=2,
    recent_blocks=3,
    min_blocks=7,
    max_blocks=90,
    top_k=0.25,
    top_p=0.8,
    reuse=3,
    reuse_refresh=0.8,
    min_context=17,
    round_blocks=4,
    round_growth=1.5,
    gpu_memory="3GiB",
    host_memory=12345,
    pool="per_layer",
    eviction="fifo",
    fetcher="copy_engine",
    streaming_heads=((1, 2), (2, 0)),
    streaming_sink=64,
    streaming_window=100,
    streaming_prefill_window=1000,
    kv_bits=8,
    verify=True,
    dense_layers=(0, 3),
    record_steps=9,
    compile=False,
)


def test_the_round_trip_cases_change_every_field():
    default = PSAConfig()
    alone = {"prefetch", "sparse_queries"}                  # which others exclude
    assert set(EVERY_FIELD) | alone == {field.name for field in dataclasses.fields(PSAConfig)}
    assert [name for name, value in EVERY_FIELD.items() if getattr(default, name) == value] == []


@pytest.mark.parametrize(
    "trip",
    [
        lambda config, path: PSAConfig.from_dict(config.to_dict()),
        lambda config, path: PSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        lambda config, path: (config.save_pretrained(path), PSAConfig.from_pretrained(path))[1],
        lambda config, path: (
            config.save_pretrained(str(path / "new" / "folder")),
            PSAConfig.from_pretrained(path / "new" / "folder"),
        )[1],
        lambda config, path: copy.deepcopy(config),
        lambda config, path: pickle.loads(pickle.dumps(config)),
        lambda config, path: config.replace(),
        lambda config, path: PSAConfig.build(config),
        lambda config, path: PSAConfig.build(config.to_dict()),
    ],
    ids=["dict", "json", "file", "new-folder", "deepcopy", "pickle", "replace", "build", "build-dict"],
)
@pytest.mark.parametrize("settings", [{}, EVERY_FIELD], ids=["defaults", "every-field"])
def test_round_trip(tmp_path, settings, trip):
    config = PSAConfig(**settings)
    assert trip(config, tmp_path) == config


def test_the_file_is_readable_json(tmp_path):
    PSAConfig(threshold=0.5).save_pretrained(tmp_path)
    text = (tmp_path / CONFIG_NAME).read_text(encoding="utf-8")
    assert json.loads(text)["threshold"] == 0.5 and json.loads(text)["version"] == 1
    assert text.endswith("\n")


def test_to_dict_shares_nothing():
    config = PSAConfig(dense_layers=(1, 2))
    config.to_dict()["dense_layers"].append(7)
    assert config.dense_layers == (1, 2)


@pytest.mark.parametrize("version", [2, 99, "1", None, 1.5])
def test_other_versions_are_refused(version):
    with pytest.raises(ValueError, match=f"version {version}; this library reads up to 1"):
        PSAConfig.from_dict({**PSAConfig().to_dict(), "version": version})


def test_a_dict_without_a_version_is_read():
    assert PSAConfig.from_dict({"threshold": 0.5}) == PSAConfig(threshold=0.5)


def test_from_dict_leaves_its_argument_alone():
    values = PSAConfig().to_dict()
    PSAConfig.from_dict(values)
    assert values["version"] == 1


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=f"no {CONFIG_NAME} in .*save_pretrained"):
        PSAConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3"], ids=["empty", "cut", "list", "number"])
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / CONFIG_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=CONFIG_NAME):
        PSAConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets(name):
    assert PSAConfig.build(name) == PSAConfig.preset(name) == PSAConfig(**PRESETS[name])


def test_presets_say_what_they_promise():
    assert PSAConfig.preset("exact").threshold == 1.0
    paper = PSAConfig.preset("paper")
    assert (paper.digest, paper.stop_rule, paper.threshold, paper.eviction) == (
        "cuboid_mean",
        "nleft",
        0.95,
        "lru",
    )
    lserve = PSAConfig.preset("lserve")
    assert lserve.policy == "top_k" and lserve.top_k * lserve.block_size == 4096
    assert (lserve.digest, lserve.block_size, lserve.logical_size, lserve.reuse) == ("pages", 64, 16, 4)
    assert lserve.sink_blocks == 1 and lserve.recent_blocks >= 0 and lserve.reuse_refresh > 0


def test_unknown_preset():
    with pytest.raises(ValueError, match="no preset 'fast'; choose one of exact, psa, paper, lserve"):
        PSAConfig.build("fast")


@pytest.mark.parametrize("value", [3, 0.9, ("psa",), object()], ids=["int", "float", "tuple", "object"])
def test_build_from_something_else(value):
    with pytest.raises(TypeError, match="config must be a PSAConfig, a preset's name, a dict or None"):
        PSAConfig.build(value)


def test_overrides_come_last():
    assert PSAConfig.build("paper", threshold=0.5).threshold == 0.5
    assert PSAConfig.build({"threshold": 0.4}, threshold=0.5, sink_blocks=3) == PSAConfig(
        threshold=0.5, sink_blocks=3
    )


@pytest.mark.parametrize(
    ("settings", "gpu", "host"),
    [
        ({}, None, 0),
        (dict(gpu_memory="1KiB"), 1024, None),
        (dict(gpu_memory=5000, host_memory=0), 5000, 0),
        (dict(host_memory="2KB"), None, 2000),
        (dict(gpu_memory="1MiB", host_memory="1GiB"), 2**20, 2**30),
    ],
    ids=str,
)
def test_bytes(settings, gpu, host):
    config = PSAConfig(**settings)
    assert config.gpu_bytes == gpu and config.host_bytes == host


def test_fork_fields_exist_and_leave_storage_alone():
    names = {field.name for field in dataclasses.fields(PSAConfig)}
    assert set(FORK_FIELDS) <= names
    assert not set(FORK_FIELDS) & {
        "digest",
        "key_bits",
        "block_size",
        "gpu_memory",
        "host_memory",
        "eviction",
        "fetcher",
        "sink_blocks",
        "recent_blocks",
    }


def test_prefetch_makes_the_round_trip():
    config = PSAConfig(prefetch=True, gpu_memory="1GiB")
    assert PSAConfig.from_dict(config.to_dict()) == config and config.prefetch and not PSAConfig().prefetch


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(), ValueError, "prefetch=True needs a host tier to fetch from.*give gpu_memory as a number of bytes"),
        (dict(gpu_memory="1GiB", host_memory=0), ValueError, "prefetch=True needs a host tier"),
        (dict(gpu_memory="1GiB", fetcher="copy_engine"), ValueError, "fetcher='copy_engine' decodes uncaptured"),
        (dict(gpu_memory="1GiB", reuse=2), ValueError, "prefetch=True with reuse=2.*Leave out one of them"),
        (dict(gpu_memory="1GiB", prefetch=1), TypeError, "prefetch must be True or False, got 1"),
    ],
    ids=["no tier", "host_memory=0", "copy_engine", "reuse", "type"],
)
def test_prefetch_that_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        PSAConfig(**{"prefetch": True, **settings})
