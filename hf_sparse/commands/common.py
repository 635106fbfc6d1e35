"""What several verbs need: settings from the command line, and a model from a directory."""
from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

from ..config import DIGESTS, POLICIES, PRESETS, PSAConfig


class CommandError(Exception):
    """Something the user can mend: printed as one line, exit status 2."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings of the sparse cache (PSAConfig)")
    group.add_argument("--preset", choices=sorted(PRESETS), help="where to start from (default: psa)")
    group.add_argument("--config", metavar="DIR", help="directory with a psa_config.json to start from")
    group.add_argument("--threshold", type=float, help="share of the attention mass to gather, in (0, 1]")
    group.add_argument("--policy", choices=POLICIES, help="what decides how many blocks are read")
    group.add_argument("--digest", choices=DIGESTS, help="what blocks are ranked by")
    group.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="pairs",
                       help="any other field, e.g. --set block_size=16 --set gpu_memory=4GiB; may be repeated")


def read_config(args: argparse.Namespace) -> PSAConfig:
    """The PSAConfig that the arguments ask for: --preset or --config, then the named options, then --set.

    Raises:
        CommandError: an unknown field, or a value that PSAConfig refuses.
    """
    if args.preset and args.config:
        raise CommandError("--preset and --config both say where to start from; give one of them")
    overrides = {name: getattr(args, name) for name in ("threshold", "policy", "digest")
                 if getattr(args, name) is not None}
    overrides.update(parse_pair(pair) for pair in args.pairs)
    try:
        base = PSAConfig.from_pretrained(args.config) if args.config else PSAConfig.build(args.preset)
        return PSAConfig.build(base, **overrides)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from error


def parse_pair(pair: str) -> tuple[str, object]:
    """`key=value` -> (key, value); values are read as JSON where they are JSON, else as text.

    Raises:
        CommandError: no `=`, or no such field.
    """
    key, separator, text = pair.partition("=")
    key = key.strip().replace("-", "_")
    if not separator or not key:
        raise CommandError(f"--set takes KEY=VALUE, got {pair!r}")
    known = {field.name for field in dataclasses.fields(PSAConfig)}
    if key not in known:
        raise CommandError(f"--set {key}: PSAConfig has no such field; it has {', '.join(sorted(known))}")
    text = text.strip()
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return key, words[text.lower()]
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def positive(text: str) -> int:
    """argparse type: an int of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory of a model in Hugging Face format, or a hub name")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"),
                        help="weights' type (default: float32 on a CPU, the model's own on a GPU)")
    parser.add_argument("--device", help="e.g. cpu, cuda, cuda:1 (default: a GPU if there is one)")


def add_context_arguments(parser: argparse.ArgumentParser, seed: int) -> None:
    """What contexts are made of, for commands that measure on them."""
    parser.add_argument("--seed", type=int, default=seed, help="of the first context; the others count up")
    parser.add_argument("--text", metavar="PATH", help="text file or directory (default: Python's documentation)")
    parser.add_argument("--prefill-chunk", type=positive, metavar="TOKENS", help="tokens a prefill forward")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def load_model(args: argparse.Namespace):
    """(model in eval mode on its device, tokenizer).

    Raises:
        CommandError: no such directory, not a model, a damaged one, or a device that is not there.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = pathlib.Path(args.model)
    # A hub name has one slash at most and is no path; anything else that is missing is a mistyped directory.
    looks_like_path = path.is_absolute() or args.model.startswith((".", "~")) or args.model.count("/") > 1
    if not path.is_dir() and (looks_like_path or path.exists()):
        raise CommandError(f"there is no model directory {args.model!r}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"{args.model!r} holds no config.json, so it is not a model in Hugging Face format")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("float32" if device.startswith("cpu") else "auto")
    what = "the tokenizer of {!r} can't be loaded"
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        what = "{!r} can't be loaded as a causal language model"
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    except SafetensorError as error:
        raise CommandError(f"the weights of {args.model!r} are damaged or cut off ({error}); get them again") from error
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"{what.format(args.model)}: {in_a_line(error)}") from error
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"device {device!r} can't be used: {str(error).splitlines()[0]}") from error


def in_a_line(error: Exception) -> str:
    """An error's first line, or all of it if that ends in the middle of a sentence."""
    lines = str(error).split("\n") if str(error).strip() else [type(error).__name__]
    first, *others = (line.strip() for line in lines if line.strip())
    return " ".join([first, *others]) if first.endswith((":", ",")) else first
