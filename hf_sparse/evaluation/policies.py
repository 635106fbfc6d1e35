"""Policies by name: what decides which blocks are read, in one line that can be typed and printed.

    NAME[@VALUE][/WORD ...][/FIELD=VALUE ...]

NAME: "dense"; "psa" (VALUE: threshold, with no bounds on the number of blocks but those that are given), "topk" and "topp"
(VALUE: share of the blocks or number of them; estimated mass), all three with the default digest; "oracle" (ranked by the
exact masses; VALUE: threshold); "quest", "arkvale" and "lserve", fixed budgets with the digests and page sizes of these papers
(VALUE: share of the blocks up to 1, or tokens).

WORD: a digest ("channel_codes", "key_bits", "key_planes", "cuboid_mean", "min_max", "centroid", "pages", "oracle") or a stop
rule ("estimate", "window", "nleft", "paper", "true"), and "rounds" or "cut": whether the rule is checked between rounds of
blocks, as the PyTorch reference does, or all blocks above a cut are read, as the kernels do.

FIELD: any field of PSAConfig that says how blocks are chosen, digested or stored (reuse=4, kv_bits=8,
streaming_heads=LAYER:HEAD+LAYER:HEAD), and "streaming": the share of the KV heads that stream, those that need the whole context
least, which a profile of the model knows (`with_heads`).

"psa@0.9/cuboid_mean/window", "topk@0.3/cuboid_mean", "psa/block_size=64", "oracle@0.95", "psa@0.85/reuse=4",
"lserve@4096/streaming=0.5/kv_bits=4/reuse=4", "dense/kv_bits=8".
The stop rule "true" and the digest "oracle" know what no implementation can: they are bounds, to compare with.
"""
from __future__ import annotations

import dataclasses
import difflib
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import DIGESTS, STOP_RULES, PSAConfig

PAGE_TOKENS = 64                                            # LServe (arXiv 2502.14866)
QUEST_TOKENS = 16                                           # Quest (arXiv 2406.10774)
SIMULATED_DIGESTS = ("oracle",)
RULES = (*STOP_RULES, "true")
READINGS = ("rounds", "cut")
TOKEN_LEVEL = ("channel_codes", "key_bits", "key_planes", "oracle")
FIELDS = ("threshold", "policy", "digest", "key_bits", "logical_size", "stop_rule", "stop_window", "group_stop", "group_reduction",
          "block_size", "sink_blocks", "recent_blocks", "min_blocks", "max_blocks", "top_k", "top_p", "round_blocks", "round_growth",
          "dense_layers", "reuse", "reuse_refresh", "kv_bits", "streaming_heads", "streaming_sink", "streaming_window",
          "streaming_prefill_window")

NAMES: dict[str, tuple[str | None, dict]] = {               # what VALUE sets, and the settings
    "dense": (None, {"policy": "threshold", "threshold": 1.0, "min_blocks": 0, "max_blocks": None, "reuse": 1, "kv_bits": 16,
                     "streaming_heads": ()}),
    "psa": ("threshold", {}),
    "topk": ("top_k", {"policy": "top_k"}),
    "topp": ("top_p", {"policy": "top_p"}),
    "oracle": ("threshold", {"policy": "threshold", "digest": "oracle"}),
    "quest": ("tokens", {"policy": "top_k", "digest": "min_max", "block_size": QUEST_TOKENS}),
    "arkvale": ("tokens", {"policy": "top_k", "digest": "cuboid_mean"}),
    "lserve": ("tokens", {"policy": "top_k", "digest": "pages", "block_size": PAGE_TOKENS}),
}
DEFAULT_VALUES = {"topk": 0.1, "quest": 0.1, "arkvale": 0.1, "lserve": 4096}


@dataclass(frozen=True)
class Policy:
    """One way to choose blocks.

    Args:
        name: as it was asked for; identifies the policy in results.
        config: settings of the sparse cache; where `digest` or `stop_rule` is none of the library's, the nearest.
        digest: what blocks are ranked by: a digest of the library or "oracle".
        stop_rule: a stop rule of the library, or "true" (the mass that really is left).
        reading: "rounds" or "cut".
        reading_given: whether the name says how blocks are read; else it is what the kernels do, where they can.
        streaming: share of the KV heads that stream; which these are is in the config once a profile has said it.
    """

    name: str
    config: PSAConfig
    digest: str
    stop_rule: str
    reading: str
    reading_given: bool = False
    streaming: float = 0.0

    @property
    def dense(self) -> bool:
        """Whether this is exact attention, what the others are compared with."""
        return self.reads_all and self.config.kv_bits == 16 and not self.streams

    @property
    def streams(self) -> bool:
        """Whether some KV heads stream."""
        return bool(self.streaming or self.config.streaming_heads)

    @property
    def reads_all(self) -> bool:
        """Whether KV heads that don't stream read every block."""
        config = self.config
        return config.policy == "threshold" and config.threshold == 1.0 and config.bounds[1] is None

    @property
    def real(self) -> bool:
        """Whether a PSACache can decode like this; the rest is simulated only."""
        return self.digest in DIGESTS and self.stop_rule in STOP_RULES

    @property
    def threshold(self) -> float | None:
        """The mass asked for, None for policies without such a thing."""
        return {"threshold": self.config.threshold, "top_p": self.config.top_p}.get(self.config.policy)

    def to_dict(self) -> dict:
        """JSON-ready; equal for policies that choose the same blocks, whatever they are called."""
        config = {name: value for name, value in self.config.to_dict().items() if name in FIELDS}
        config["min_blocks"], config["max_blocks"] = self.config.bounds
        out = {**config, "digest": self.digest, "stop_rule": self.stop_rule, "reading": self.reading}
        # Only where they say something, so that results from before they existed still count.
        if self.config.reuse == 1:
            del out["reuse_refresh"]
        if self.digest != "pages" or self.config.logical_size == 16:
            del out["logical_size"]
        if self.config.kv_bits == 16:
            del out["kv_bits"]
        if not self.streams:
            for name in (name for name in FIELDS if name.startswith("streaming_")):
                del out[name]
        elif self.streaming:
            out["streaming"] = self.streaming
        return out


class Profile(Protocol):
    """What knows which KV heads of a model need the whole context least."""

    def settings(self, *, sparsity: float) -> dict:
        """`streaming_heads`, (layer of the model, KV head) of this share of the KV heads; and `streaming_sink` and
        `streaming_window` that they were chosen for, where that is known."""


def with_heads(policies: Sequence[Policy], profile: Profile | None) -> list[Policy]:
    """Policies whose `streaming` share has become `streaming_heads`; the others as they are.

    Sink and window stay the policy's. Where the profile was measured with others, a warning says so.

    Raises:
        ValueError: there is such a share and no profile, it is less than one head, or it doesn't go with the other settings.
    """
    out = []
    for policy in policies:
        if policy.streaming:
            if profile is None:
                raise ValueError(f"policy {policy.name!r}: which heads stream is a matter of the model; give a profile of its heads "
                                 "(--heads FILE), or name them (streaming_heads=LAYER:HEAD+...)")
            sizes = profile.settings(sparsity=policy.streaming)
            heads = tuple(sizes.pop("streaming_heads"))
            if not heads:
                raise ValueError(f"policy {policy.name!r}: that share is less than one of the model's KV heads")
            own = {name: getattr(policy.config, name) for name in sizes}
            if own != sizes:
                warnings.warn(f"policy {policy.name!r} has {_settings(own)}, but the profile's heads were measured with "
                              f"{_settings(sizes)}: others may be better for it.", UserWarning, stacklevel=2)
            try:
                policy = dataclasses.replace(policy, config=policy.config.replace(streaming_heads=heads))
            except ValueError as error:
                raise ValueError(f"policy {policy.name!r}: {error}") from error
        out.append(policy)
    return out


def _settings(values: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def parse_policies(text: str | Sequence[str], base: PSAConfig | None = None) -> list[Policy]:
    """"psa,topk@0.1" or a sequence of names -> policies, each once.

    Raises:
        ValueError: see `parse_policy`; no policy at all.
    """
    names = text.split(",") if isinstance(text, str) else list(text)
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise ValueError(f"no policy given; choose from {', '.join(NAMES)}")
    return [parse_policy(name, base) for name in dict.fromkeys(names)]


def parse_policy(text: str, base: PSAConfig | None = None) -> Policy:
    """A policy by name; the module's docstring has the grammar.

    Args:
        base: settings to start from; None: the defaults.

    Raises:
        ValueError: an unknown name, word or field, or a value that makes no sense; the message says what is known.
    """
    head, *words = [part.strip() for part in text.split("/")]
    head, value = _value(text, head)
    if head not in NAMES:
        raise ValueError(f"policy {text!r}: there is no policy {head!r}{_closest(head, NAMES)}; choose from {', '.join(NAMES)}")
    meaning, settings = NAMES[head]
    settings, streaming, reading, rule_given = dict(settings), 0.0, None, False
    for word in words:
        word, late = _value(text, word)
        key, separator, setting = word.partition("=")
        if late is not None:
            if value is not None:
                raise ValueError(f"policy {text!r} has two values (@); give one")
            value = late
        if separator and key == "streaming":
            streaming = _share(text, key, setting)
        elif separator:
            settings[key] = _field(text, key, setting)
            rule_given |= key == "stop_rule"
        elif word in (*DIGESTS, *SIMULATED_DIGESTS):
            settings["digest"] = word
        elif word in RULES:
            settings["stop_rule"], rule_given = word, True
        elif word in READINGS:
            reading = word
        else:
            known = (*DIGESTS, *SIMULATED_DIGESTS, *RULES, *READINGS)
            raise ValueError(f"policy {text!r}: there is no digest or stop rule {word!r}{_closest(word, known)}; choose from "
                             f"{', '.join(known)}, or set a field (block_size=64)")
    if settings.get("digest") == "pages":                   # before a budget of tokens is counted in blocks
        settings.setdefault("block_size", PAGE_TOKENS)
    _set_value(text, head, meaning, settings, DEFAULT_VALUES.get(head) if value is None else value, base)
    if streaming and settings.get("streaming_heads"):
        raise ValueError(f"policy {text!r}: give streaming or streaming_heads, not both")
    return _build(text, settings, streaming, reading, rule_given, base)


def unbounded(config: PSAConfig) -> dict:
    """Settings that leave a config's bounds on the number of blocks as they are given, and none where they are "auto"."""
    found = {}
    if config.min_blocks == "auto":
        found["min_blocks"] = 0
    if config.max_blocks == "auto":
        found["max_blocks"] = None
    return found


def _build(text, settings, streaming, reading, rule_given, base) -> Policy:
    base = base or PSAConfig()
    if "threshold" in settings:                             # asked for by itself: with no bounds but those that are given
        settings = {**unbounded(base), **settings}
    digest = settings.get("digest", base.digest)
    rule = settings.get("stop_rule", base.stop_rule)
    if rule == "estimate" and not rule_given and digest not in TOKEN_LEVEL:
        rule = "window"                                     # as docs and errors of PSAConfig advise
    if rule == "estimate" and digest not in TOKEN_LEVEL and settings.get("policy", base.policy) == "threshold":
        raise ValueError(f"policy {text!r}: stop rule 'estimate' needs a digest that estimates mass token by token "
                         f"({', '.join(TOKEN_LEVEL)}), not {digest!r}; use window, nleft, paper or true")
    library = {"digest": "channel_codes" if digest == "oracle" else digest,
               "stop_rule": "window" if rule == "true" else rule}
    try:
        config = base.replace(**{**settings, **library})
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {text!r}: {error}") from error
    if rule == "true" and config.policy == "threshold":
        config = config.replace(round_blocks=1, round_growth=1.0)        # a bound, so without the coarseness of rounds
    if reading is None:
        cut = rule == "estimate" and config.policy == "threshold" or config.policy == "top_p"
        reading = "cut" if cut and digest in TOKEN_LEVEL else "rounds"
        return Policy(text, config, digest, rule, reading, streaming=streaming)
    if reading == "cut" and digest not in TOKEN_LEVEL:
        raise ValueError(f"policy {text!r}: a cut needs a digest that estimates mass token by token "
                         f"({', '.join(TOKEN_LEVEL)}), not {digest!r}")
    if reading == "cut" and config.policy == "threshold" and rule != "estimate":
        raise ValueError(f"policy {text!r}: a cut goes by estimates, stop rule {rule!r} does not; leave out 'cut'")
    return Policy(text, config, digest, rule, reading, reading_given=True, streaming=streaming)


def _value(text: str, part: str) -> tuple[str, float | int | None]:
    """"psa@0.9" -> ("psa", 0.9)."""
    name, separator, number = part.partition("@")
    if not separator:
        return name, None
    try:
        value = json.loads(number)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError
    except ValueError:
        raise ValueError(f"policy {text!r}: {number!r} after @ is not a number") from None
    return name, value


def _set_value(text, head, meaning, settings, value, base) -> None:
    if value is None:
        return
    if meaning is None:
        raise ValueError(f"policy {text!r}: {head!r} takes no value")
    if meaning != "tokens":
        if meaning == "threshold":
            settings.setdefault("policy", "threshold")      # whatever the base goes by
        settings[meaning] = value
        return
    if value <= 0:
        raise ValueError(f"policy {text!r}: the budget must be above 0: a share of the blocks up to 1, or tokens")
    size = settings.get("block_size", (base or PSAConfig()).block_size)
    settings["top_k"] = float(value) if value <= 1 else max(1, math.ceil(value / size))


def _field(text: str, key: str, setting: str):
    if key not in FIELDS:
        known = ("streaming", *FIELDS)
        raise ValueError(f"policy {text!r}: {key!r} can't be set here{_closest(key, known)}; choose from {', '.join(known)}")
    if key == "streaming_heads":
        pairs = [part.partition(":") for part in setting.split("+") if part]
        return tuple((_integer(text, key, layer), _integer(text, key, head)) for layer, _, head in pairs)
    if key == "dense_layers":
        return tuple(_integer(text, key, part) for part in setting.split("+") if part)
    kind = {field.name: str(field.type) for field in dataclasses.fields(PSAConfig)}[key]
    if kind == "str":
        return setting
    try:
        return json.loads("null" if setting.lower() == "none" else setting)
    except json.JSONDecodeError:
        raise ValueError(f"policy {text!r}: {key}={setting!r} is not a number") from None


def _share(text: str, key: str, setting: str) -> float:
    try:
        share = float(setting)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"policy {text!r}: {key} takes a share from 0 to 1, got {setting!r}")
    return share


def _integer(text: str, key: str, setting: str) -> int:
    if not setting.isdigit():
        raise ValueError(f"policy {text!r}: {key} takes whole numbers, got {setting!r}")
    return int(setting)


def _closest(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
