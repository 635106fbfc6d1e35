"""`hf-sparse generate`: stream a model's answer through a sparse cache."""
from __future__ import annotations

import argparse
import json
import pathlib
import sys

from .common import CommandError, add_config_arguments, add_model_arguments, load_model, positive, read_config


def add_parser(verbs) -> None:
    parser = verbs.add_parser("generate", help="generate text through a sparse cache, streaming")
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the prompt itself")
    source.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with the prompt; - for standard input")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--stats", action="store_true", help="print what was read, as JSON, on standard error")
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    prompt = read_prompt(args)

    import torch
    from transformers import TextStreamer

    from ..evaluation.work import check_ids
    from ..patches.model import patch_model

    model, tokenizer = load_model(args)
    inputs = encode(tokenizer, prompt, args.chat).to(model.device)
    check_length(model, inputs["input_ids"].shape[1], args.max_new_tokens)
    torch.manual_seed(args.seed)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    try:
        check_ids(model, inputs["input_ids"].flatten().tolist())
        patch_model(model, config)
        model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=args.sample, pad_token_id=pad,
                       streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    except (ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from error
    if args.stats:
        stats = model.last_psa_cache.stats()
        print(json.dumps({name: value for name, value in stats.items() if name != "layers"}, indent=2),
              file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        text = args.prompt
    elif args.prompt_file == "-":
        text = sys.stdin.read()
    else:
        try:
            text = pathlib.Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"the prompt file {args.prompt_file!r} can't be read: {error}") from error
    if not text.strip():
        raise CommandError("the prompt is empty")
    return text


def encode(tokenizer, prompt: str, chat: bool):
    """Token ids and attention mask of the prompt, [1, tokens] each."""
    if not chat:
        return tokenizer(prompt, return_tensors="pt")
    if not tokenizer.chat_template:
        raise CommandError("this model's tokenizer has no chat template; leave out --chat")
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                         tokenize=False)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)


def check_length(model, tokens: int, new: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and tokens + new > limit:
        raise CommandError(f"the prompt has {tokens} tokens and {new} more are asked for, but the model's context is "
                           f"{limit} tokens")
