"""PSAConfig: every setting of the sparse cache, validated when it is built."""
from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from dataclasses import dataclass

from .sizes import parse_bytes

CONFIG_NAME = "psa_config.json"
CONFIG_VERSION = 1

POLICIES = ("threshold", "top_k", "top_p")
DIGESTS = ("channel_codes", "key_bits", "cuboid_mean", "min_max", "centroid")
STOP_RULES = ("estimate", "window", "nleft", "paper")
GROUP_STOPS = ("mean", "min")
GROUP_REDUCTIONS = ("softmax_mean", "max", "mean")
EVICTIONS = ("decayed", "lru", "fifo")
FETCHERS = ("kernel", "copy_engine")
POOLS = ("unified", "per_layer")

# What a fork may change: how blocks are chosen, never how they are stored.
FORK_FIELDS = ("threshold", "policy", "stop_rule", "stop_window", "top_k", "top_p", "min_blocks", "max_blocks",
               "group_stop", "group_reduction", "min_context", "round_blocks", "round_growth", "verify",
               "sparse_queries", "dense_layers", "record_steps")

PRESETS: dict[str, dict] = {
    "exact": {"threshold": 1.0},
    "psa": {},
    "paper": {"digest": "cuboid_mean", "stop_rule": "nleft", "threshold": 0.95, "eviction": "lru"},
}


@dataclass(frozen=True)
class PSAConfig:
    """Settings of a sparse cache. Immutable; unknown names and values that make no sense raise at construction.

    Args:
        threshold: share of the attention mass to gather before a row and KV head stops, in (0, 1].
            1.0 reads everything and equals dense attention.
        policy: "threshold" (PSA, section 4 of arXiv 2503.00392), "top_k" (a fixed number of blocks, as Quest and
            ArkVale do) or "top_p" (mass from the digest's estimates alone, as Twilight does).
        digest: what is kept on the GPU for every block to estimate its criticality.
        key_bits: bits a key channel in the "key_bits" digest: 1, 2, 3 or 4.
        stop_rule: how the mass of the unread blocks is judged: "estimate" (the digest's own estimates; needs a
            token-level digest: channel_codes or key_bits), "window" (unread blocks weigh what the last
            `stop_window` read ones did), "nleft" (what the lightest read one did) or "paper" (the formula as
            printed, which stops after a few blocks; for comparison only).
        stop_window: blocks in the mean of the "window" rule.
        group_stop: a KV head stops when the "mean" coverage of its query heads passes, or each one's ("min").
        group_reduction: how query heads that share a KV head rank blocks together.
        block_size: tokens a block.
        sink_blocks, recent_blocks: blocks at the start, and before the newest one, that are always read.
        min_blocks, max_blocks: bounds of the budget a row and KV head, in blocks (int) or as a share of all blocks (float
            in (0, 1)), always-read blocks included. Where they contradict each other, `max_blocks` holds.
        top_k: blocks (int) or share of all blocks (float in (0, 1]) for policy "top_k", always-read ones included.
        top_p: estimated mass for policy "top_p", in (0, 1].
        min_context: rows shorter than this many tokens are attended densely.
        round_blocks, round_growth: blocks in the first round, and the factor between the numbers of blocks read at
            two checks of the stop rule. (GPU kernels read all that is planned at once, and check after it.)
        gpu_memory: bytes of the device pool, slots, digests and tables together: an int, "4GiB", or "auto" (grows
            with the context).
        host_memory: bytes of the host tier: an int, "64GiB", 0 (none: everything stays in the pool), or "auto" (a
            host tier when `gpu_memory` is a number of bytes, none when it is "auto").
        pool: "unified" (one for all layers of a device, so that those which read more get more of it) or "per_layer"
            (one for each layer, with an equal share of both budgets; for comparison).
        eviction: which block leaves a full pool: "decayed" (use count, 0.9 a token), "lru" (the paper's) or "fifo".
        fetcher: what brings blocks that a step misses from the host tier: "kernel" (a kernel of the step) or "copy_engine" (the
            paper's pipeline: a thread and a copy for each block; it waits for the device in every layer, so nothing is
            captured; for comparison).
        verify: also read every block to report the true coverage. Slow; for checking settings.
        sparse_queries: send forwards with several query tokens on a filled cache through the sparse step, token by
            token. Off: such forwards (chunks of a prompt, a new turn, assisted verification) are exact.
        dense_layers: indices of layers that always read everything.
        record_steps: decode steps whose blocks read are kept for `stats()`.
        compile: on a GPU, let generate() decode through one compiled CUDA graph.
    """

    threshold: float = 0.85
    policy: str = "threshold"
    digest: str = "channel_codes"
    key_bits: int = 2
    stop_rule: str = "estimate"
    stop_window: int = 16
    group_stop: str = "mean"
    group_reduction: str = "softmax_mean"
    block_size: int = 32
    sink_blocks: int = 1
    recent_blocks: int = 1
    min_blocks: int | float = 0
    max_blocks: int | float | None = None
    top_k: int | float | None = None
    top_p: float = 0.9
    min_context: int = 2048
    round_blocks: int = 8
    round_growth: float = 1.25
    gpu_memory: int | str = "auto"
    host_memory: int | str = "auto"
    pool: str = "unified"
    eviction: str = "decayed"
    fetcher: str = "kernel"
    verify: bool = False
    sparse_queries: bool = False
    dense_layers: tuple[int, ...] = ()
    record_steps: int = 0
    compile: bool = True

    def __post_init__(self):
        if not isinstance(self.dense_layers, (tuple, list)):
            raise TypeError(f"dense_layers must be a list or tuple of layer indices, got {self.dense_layers!r}.")
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for name, allowed in (("policy", POLICIES), ("digest", DIGESTS), ("stop_rule", STOP_RULES),
                              ("group_stop", GROUP_STOPS), ("group_reduction", GROUP_REDUCTIONS),
                              ("eviction", EVICTIONS), ("fetcher", FETCHERS), ("pool", POOLS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}.")
        self._number("threshold", 0, 1, low_open=True)
        self._number("top_p", 0, 1, low_open=True)
        self._number("round_growth", 1, 1e6)
        for name, low in (("min_blocks", 0), ("max_blocks", 1)):
            value = getattr(self, name)
            if not isinstance(value, float):
                if value is not None or name == "min_blocks":
                    self._integer(name, low)
            elif not 0 < value < 1:
                raise ValueError(f"{name}={value} as a share must lie in (0, 1); blocks are given as an int.")
        for name, low in (("stop_window", 1), ("sink_blocks", 0), ("recent_blocks", 0), ("min_context", 0),
                          ("round_blocks", 1), ("record_steps", 0), ("block_size", None), ("key_bits", None)):
            self._integer(name, low)
        if self.round_blocks not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"round_blocks={self.round_blocks} must be a power of two up to 32.")
        if self.block_size not in (4, 8, 16, 32, 64):
            raise ValueError(f"block_size={self.block_size!r} is not supported; choose 16, 32 or 64 "
                             "(4 and 8 exist for tests).")
        if self.key_bits not in (1, 2, 3, 4):
            raise ValueError(f"key_bits={self.key_bits!r} is not supported; choose 1, 2, 3 or 4.")
        if self.max_blocks is not None:
            if type(self.max_blocks) is type(self.min_blocks) and self.max_blocks < self.min_blocks:
                raise ValueError(f"max_blocks={self.max_blocks} is below min_blocks={self.min_blocks}.")
            forced = self.sink_blocks + self.recent_blocks + 1
            if isinstance(self.max_blocks, int) and self.max_blocks < forced:
                raise ValueError(f"max_blocks={self.max_blocks} is below the {forced} blocks that are always read "
                                 "(sink_blocks + recent_blocks + the open one); raise it or lower those.")
        if self.top_k is not None:
            if isinstance(self.top_k, bool) or not isinstance(self.top_k, (int, float)):
                raise TypeError(f"top_k must be an int (blocks) or a float (share of all blocks), got {self.top_k!r}.")
            if isinstance(self.top_k, float) and not 0 < self.top_k <= 1:
                raise ValueError(f"top_k={self.top_k} as a share must lie in (0, 1]; blocks are given as an int.")
            if isinstance(self.top_k, int) and self.top_k < 1:
                raise ValueError(f"top_k={self.top_k} must be at least 1 block.")
        if self.policy == "top_k" and self.top_k is None:
            raise ValueError("policy='top_k' needs top_k: blocks as an int, or a share of all blocks as a float.")
        if self.policy == "threshold" and self.stop_rule == "estimate" and self.threshold < 1.0 and \
                self.digest not in ("channel_codes", "key_bits"):
            raise ValueError(f"stop_rule='estimate' needs a digest that estimates mass token by token; "
                             f"digest={self.digest!r} does not. Use stop_rule='window' with it.")
        for name in ("gpu_memory", "host_memory"):
            if getattr(self, name) != "auto":
                parse_bytes(getattr(self, name), name)
        if self.gpu_memory != "auto" and parse_bytes(self.gpu_memory) == 0:
            raise ValueError("gpu_memory must be more than 0 bytes: the newest blocks always live in the pool.")
        if self.fetcher == "copy_engine" and self.host_bytes == 0:
            raise ValueError("fetcher='copy_engine' needs a host tier to fetch from, and with these settings there is none: "
                             "give gpu_memory as a number of bytes and leave host_memory at 'auto', or give host_memory.")
        for name in ("verify", "sparse_queries", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in self.dense_layers):
            raise ValueError(f"dense_layers={self.dense_layers!r} must be layer indices, 0 or more.")

    def _number(self, name: str, low: float, high: float, low_open: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        if math.isnan(value) or value > high or value < low or (low_open and value == low):
            raise ValueError(f"{name}={value} is outside {'(' if low_open else '['}{low}, {high}].")

    def _integer(self, name: str, low: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}.")
        if low is not None and value < low:
            raise ValueError(f"{name}={value} must be at least {low}.")

    # -- derived ------------------------------------------------------------------------------------------------
    @property
    def gpu_bytes(self) -> int | None:
        """Bytes of the device pool, or None when it grows with the context."""
        return None if self.gpu_memory == "auto" else parse_bytes(self.gpu_memory)

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the host tier; 0: no host tier; None: as much as the machine reasonably gives."""
        if self.host_memory == "auto":
            return 0 if self.gpu_memory == "auto" else None
        return parse_bytes(self.host_memory)

    # -- building -----------------------------------------------------------------------------------------------
    @classmethod
    def build(cls, config: PSAConfig | str | dict | None = None, **overrides) -> PSAConfig:
        """A config from a config, a preset's name, a dict or nothing, with fields overridden by keyword."""
        if config is None:
            config = cls()
        elif isinstance(config, str):
            config = cls.preset(config)
        elif isinstance(config, dict):
            config = cls.from_dict(config)
        elif not isinstance(config, cls):
            raise TypeError("config must be a PSAConfig, a preset's name, a dict or None, "
                            f"got {type(config).__name__}.")
        return config.replace(**overrides) if overrides else config

    def replace(self, **overrides) -> PSAConfig:
        """A copy with fields changed."""
        _check_names(overrides)
        return dataclasses.replace(self, **overrides)

    @classmethod
    def preset(cls, name: str) -> PSAConfig:
        """"exact" (reads everything), "psa" (the default) or "paper" (the paper's digest, rule and eviction)."""
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return cls(**PRESETS[name])

    def to_dict(self) -> dict:
        fields = dataclasses.asdict(self)
        fields["dense_layers"] = list(self.dense_layers)
        return {"version": CONFIG_VERSION, **fields}

    @classmethod
    def from_dict(cls, values: dict) -> PSAConfig:
        values = dict(values)
        version = values.pop("version", CONFIG_VERSION)
        if not isinstance(version, int) or version > CONFIG_VERSION:
            raise ValueError(f"This config is of version {version}; this library reads up to {CONFIG_VERSION}. "
                             "Update hf-sparse.")
        _check_names(values)
        return cls(**values)

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write `psa_config.json` into a directory, beside a model's files for example."""
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, CONFIG_NAME), "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike) -> PSAConfig:
        path = os.path.join(directory, CONFIG_NAME)
        if not os.path.isfile(path):
            raise ValueError(f"There is no {CONFIG_NAME} in {os.fspath(directory)!r}; save one there with "
                             "PSAConfig(...).save_pretrained(directory).")
        with open(path, encoding="utf-8") as file:
            try:
                values = json.load(file)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path!r} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path!r} does not hold the fields of a PSAConfig.")
        return cls.from_dict(values)


def _check_names(values: dict) -> None:
    known = [field.name for field in dataclasses.fields(PSAConfig)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known fields: {', '.join(known)}."
            raise TypeError(f"PSAConfig has no field {name!r}.{hint}")
