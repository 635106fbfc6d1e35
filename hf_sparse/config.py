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
DIGESTS = ("channel_codes", "key_bits", "key_planes", "cuboid_mean", "min_max", "pages", "centroid")
STOP_RULES = ("estimate", "window", "nleft", "paper")
GROUP_STOPS = ("mean", "min")
GROUP_REDUCTIONS = ("softmax_mean", "max", "mean")
EVICTIONS = ("decayed", "lru", "fifo")
FETCHERS = ("kernel", "copy_engine")
POOLS = ("unified", "per_layer")

# Least and most blocks, as shares, with the default threshold, policy, digest and rule (docs/fidelity.md has what they cost).
AUTO_BOUNDS = (0.05, 0.16)
AUTO_LEAST_CAP = 40                                         # blocks that may be read whatever their share: of short contexts

# What a fork may change: how blocks are chosen, never how they are stored.
FORK_FIELDS = ("threshold", "policy", "stop_rule", "stop_window", "top_k", "top_p", "min_blocks", "max_blocks",
               "group_stop", "group_reduction", "min_context", "round_blocks", "round_growth", "verify",
               "sparse_queries", "dense_layers", "record_steps", "reuse", "reuse_refresh")

PRESETS: dict[str, dict] = {
    "exact": {"threshold": 1.0},
    "psa": {},
    "paper": {"digest": "cuboid_mean", "stop_rule": "nleft", "threshold": 0.95, "eviction": "lru"},
    "lserve": {"policy": "top_k", "top_k": 64, "digest": "pages", "block_size": 64, "reuse": 4},
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
        logical_size: tokens of a logical page in the "pages" digest (LServe, arXiv 2502.14866); divides `block_size`.
        stop_rule: how the mass of the unread blocks is judged: "estimate" (the digest's own estimates; needs a
            token-level digest: channel_codes, key_bits or key_planes), "window" (unread blocks weigh what the last
            `stop_window` read ones did), "nleft" (what the lightest read one did) or "paper" (the formula as
            printed, which stops after a few blocks; for comparison only).
        stop_window: blocks in the mean of the "window" rule.
        group_stop: a KV head stops when the "mean" coverage of its query heads passes, or each one's ("min").
        group_reduction: how query heads that share a KV head rank blocks together.
        block_size: tokens a block.
        kv_bits: bits of keys and values in closed blocks, in both tiers: 16 (the model's dtype, as it is), 8 or 4. The
            always-read blocks stay exact.
        sink_blocks, recent_blocks: blocks at the start, and before the newest one, that are always read.
        min_blocks, max_blocks: bounds of the budget a row and KV head, in blocks (int) or as a share of all blocks (float
            in (0, 1)), always-read blocks included. Where they contradict each other, `max_blocks` holds. "auto": 5 % and 16 % of
            all blocks, the latter at least 40 blocks, by measurement (docs/fidelity.md), as long as neither is given and
            threshold, policy, digest and stop_rule are the defaults; else no bounds.
        top_k: blocks (int) or share of all blocks (float in (0, 1]) for policy "top_k", always-read ones included.
        top_p: estimated mass for policy "top_p", in (0, 1].
        reuse: decoded tokens that share one selection of blocks (LServe). The always-read blocks are read anew at each; a row
            and KV head also selects anew when a block has left them, and after anything but decoding. With digest
            "channel_codes" at most `block_size`.
        reuse_refresh: a row and KV head selects anew sooner, at a token with a query that has turned away from the one that
            the selection was made for: the cosine of the two is below this for one of the group's query heads, in [0, 1].
            0: never sooner.
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
        prefetch: fetch blocks that the next layer's attention will probably read while this one's MLP runs, by its query as
            predicted from this layer's input. Results are the same. For the captured step of a GPU, with a host tier.
        streaming_heads: pairs (layer index, KV head) of heads that see the first `streaming_sink` tokens and the last
            `streaming_window` only, and keep no others (LServe, arXiv 2502.14866; `hf_sparse.heads` chooses them).
        streaming_sink, streaming_window: tokens. The window holds for decoding, and for what follows in the same row: later
            turns, drafts.
        streaming_prefill_window: tokens that streaming heads see while a prompt is read, and in rows below `min_context`.
        verify: also read every block to report the true coverage. Slow; for checking settings.
        sparse_queries: send forwards with several query tokens on a filled cache through the sparse step, token by
            token. Off: such forwards (chunks of a prompt, a new turn, assisted verification) are exact.
        dense_layers: indices of layers that always read everything.
        record_steps: decode steps whose blocks read are kept for `stats()`.
        compile: on a GPU, let generate() decode through one compiled CUDA graph.
    """

    threshold: float = 0.9
    policy: str = "threshold"
    digest: str = "channel_codes"
    key_bits: int = 2
    logical_size: int = 16
    stop_rule: str = "estimate"
    stop_window: int = 16
    group_stop: str = "mean"
    group_reduction: str = "softmax_mean"
    block_size: int = 32
    kv_bits: int = 16
    sink_blocks: int = 1
    recent_blocks: int = 1
    min_blocks: int | float | str = "auto"
    max_blocks: int | float | str | None = "auto"
    top_k: int | float | None = None
    top_p: float = 0.9
    reuse: int = 1
    reuse_refresh: float = 0.9
    min_context: int = 2048
    round_blocks: int = 8
    round_growth: float = 1.25
    gpu_memory: int | str = "auto"
    host_memory: int | str = "auto"
    pool: str = "unified"
    eviction: str = "decayed"
    fetcher: str = "kernel"
    prefetch: bool = False
    streaming_heads: tuple[tuple[int, int], ...] = ()
    streaming_sink: int = 128
    streaming_window: int = 256
    streaming_prefill_window: int = 4096
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
        self._number("reuse_refresh", 0, 1)
        for name, low in (("min_blocks", 0), ("max_blocks", 1)):
            value = getattr(self, name)
            if value == "auto":
                continue
            if not isinstance(value, float):
                if value is not None or name == "min_blocks":
                    self._integer(name, low)
            elif not 0 < value < 1:
                raise ValueError(f"{name}={value} as a share must lie in (0, 1); blocks are given as an int.")
        for name, low in (("stop_window", 1), ("sink_blocks", 0), ("recent_blocks", 0), ("min_context", 0),
                          ("round_blocks", 1), ("record_steps", 0), ("block_size", None), ("key_bits", None),
                          ("logical_size", 1), ("reuse", 1)):
            self._integer(name, low)
        if self.round_blocks not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"round_blocks={self.round_blocks} must be a power of two up to 32.")
        if self.block_size not in (4, 8, 16, 32, 64):
            raise ValueError(f"block_size={self.block_size!r} is not supported; choose 16, 32 or 64 "
                             "(4 and 8 exist for tests).")
        if type(self.kv_bits) is not int or self.kv_bits not in (16, 8, 4):
            raise ValueError(f"kv_bits={self.kv_bits!r} is not supported; choose 16 (as the model has them), 8 or 4.")
        if self.kv_bits < 16 and self.block_size < 16:
            raise ValueError(f"kv_bits={self.kv_bits} needs blocks of at least 16 tokens, got block_size={self.block_size}: every "
                             "block carries the scales of its own channels, which small ones don't pay for.")
        if self.key_bits not in (1, 2, 3, 4):
            raise ValueError(f"key_bits={self.key_bits!r} is not supported; choose 1, 2, 3 or 4.")
        if self.digest == "pages" and self.block_size % self.logical_size:
            raise ValueError(f"logical_size={self.logical_size} must divide block_size={self.block_size}: the digest 'pages' cuts "
                             "blocks into logical pages of so many tokens.")
        if self.digest == "channel_codes" and self.reuse > self.block_size:
            # A selection would then outlive several ends of blocks. At each of them the tail grows, within a unit, and a kept
            # block makes room: first the least critical one, but further on the kernels' lists are in no such order.
            raise ValueError(f"reuse={self.reuse} is more than block_size={self.block_size}: with digest='channel_codes' the "
                             "always-read blocks grow while a selection is kept, and would take the room of those that "
                             f"matter. Lower reuse to at most {self.block_size}, or choose another digest.")
        if self.max_blocks not in (None, "auto"):
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
                self.digest not in ("channel_codes", "key_bits", "key_planes"):
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
        if self.prefetch is True and self.host_bytes == 0:
            raise ValueError("prefetch=True needs a host tier to fetch from, and with these settings there is none: give "
                             "gpu_memory as a number of bytes and leave host_memory at 'auto', or give host_memory.")
        if self.prefetch is True and self.fetcher != "kernel":
            raise ValueError(f"prefetch=True is for the captured step, and fetcher={self.fetcher!r} decodes uncaptured; use "
                             "fetcher='kernel' with it.")
        if self.prefetch is True and self.reuse > 1:
            raise ValueError(f"prefetch=True with reuse={self.reuse}: the blocks of a kept selection are in the pool already, "
                             "and a prediction at every token would cost more than it brings. Leave out one of them.")
        for name in ("verify", "sparse_queries", "compile", "prefetch"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in self.dense_layers):
            raise ValueError(f"dense_layers={self.dense_layers!r} must be layer indices, 0 or more.")
        self._check_streaming()

    def _check_streaming(self) -> None:
        given = self.streaming_heads
        if not isinstance(given, (tuple, list)) or any(
                not isinstance(pair, (tuple, list)) or len(pair) != 2
                or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in pair) for pair in given):
            raise ValueError(f"streaming_heads must be pairs (layer index, KV head), got {given!r}. "
                             "HeadProfile.settings(sparsity=0.5) gives them.")
        pairs = tuple(sorted((layer, head) for layer, head in given))
        if len(set(pairs)) < len(pairs):
            twice = next(pair for pair, after in zip(pairs, pairs[1:]) if pair == after)
            raise ValueError(f"streaming_heads names {twice} twice.")
        object.__setattr__(self, "streaming_heads", pairs)
        for name, low in (("streaming_sink", 0), ("streaming_window", 1), ("streaming_prefill_window", 1)):
            self._integer(name, low)
        if not pairs:
            return
        if self.streaming_window < self.block_size:
            raise ValueError(f"streaming_window={self.streaming_window} is below a block ({self.block_size} tokens); raise it.")
        if self.streaming_prefill_window < self.streaming_window:
            raise ValueError(f"streaming_prefill_window={self.streaming_prefill_window} is below "
                             f"streaming_window={self.streaming_window}: prompts need at least what decoding sees.")
        if self.min_context > self.streaming_sink + self.streaming_prefill_window:
            raise ValueError(f"min_context={self.min_context} tokens are attended densely, and streaming heads keep only "
                             f"{self.streaming_sink + self.streaming_prefill_window} of them (streaming_sink + "
                             "streaming_prefill_window). Lower min_context or raise streaming_prefill_window.")
        if self.sparse_queries:
            raise ValueError("sparse_queries and streaming_heads don't go together: tokens of one forward see a window of their own. "
                             "Leave one of them out.")
        both = [layer for layer, _ in pairs if layer in self.dense_layers]
        if both:
            raise ValueError(f"layer {both[0]} is in dense_layers and has streaming_heads; leave one of them out.")

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

    # -- derived --------------------------------------------------------------------------------------------------------
    @property
    def bounds(self) -> tuple[int | float, int | float | None]:
        """`min_blocks` and `max_blocks`, with "auto" resolved."""
        least, most = AUTO_BOUNDS if self._auto_bounds else (0, None)
        return (least if self.min_blocks == "auto" else self.min_blocks,
                most if self.max_blocks == "auto" else self.max_blocks)

    @property
    def least_cap(self) -> int:
        """Blocks that may be read even where a share in `bounds` is less."""
        return AUTO_LEAST_CAP if self._auto_bounds else 0

    @property
    def _auto_bounds(self) -> bool:
        return all(getattr(self, name) == self.__dataclass_fields__[name].default
                   for name in ("min_blocks", "max_blocks", "threshold", "policy", "digest", "stop_rule"))

    # -- bytes ------------------------------------------------------------------------------------------------------------
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
        """"exact" (reads everything), "psa" (the default), "paper" (the paper's digest, rule and eviction) or "lserve" (4096
        tokens by logical pages, selected anew every four tokens)."""
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return cls(**PRESETS[name])

    def to_dict(self) -> dict:
        fields = dataclasses.asdict(self)
        fields["dense_layers"] = list(self.dense_layers)
        fields["streaming_heads"] = [list(pair) for pair in self.streaming_heads]
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
