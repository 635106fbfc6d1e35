#!/usr/bin/env python3
"""Generate for many prompts on several processes, with a sparse cache in each, and gather the answers in order.

    accelerate launch --num_processes 2 examples/accelerate_generate.py
    accelerate launch --num_processes 8 examples/accelerate_generate.py --model DIR --prompts FILE --out answers.jsonl

Without --model a tiny random model answers character by character: nothing is downloaded, and any machine can run it.
Each line of output is a JSON object: index (of the prompt), process, answer, kv_fraction (KV blocks read / held).
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from hf_sparse import patch_model

SENTENCE = "The keeper of the lighthouse counts the ships, and writes their number into a book. "
PAD = 95                                                    # the id after those of the 95 printable characters


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    state = PartialState(cpu=not torch.cuda.is_available())
    try:
        prompts = read_prompts(args.prompts)
        model, encode, decode = load(args.model, state.device)
        patch_model(model, threshold=args.threshold, min_context=args.min_context)

        mine = list(enumerate(prompts))[state.process_index::state.num_processes]
        answers = []
        for start in range(0, len(mine), args.batch_size):
            batch = mine[start:start + args.batch_size]
            inputs = {name: value.to(state.device) for name, value in encode([text for _, text in batch]).items()}
            ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
            new = ids[:, inputs["input_ids"].shape[1]:].tolist()
            fraction = model.last_psa_cache.stats()["kv_fraction"]
            answers += [{"index": index, "process": state.process_index, "answer": decode(row),
                         "kv_fraction": fraction} for (index, _), row in zip(batch, new)]

        # Every process gets all answers; they come process by process, so put them back in the prompts' order.
        everything = sorted(gather_object(answers), key=lambda answer: answer["index"])
        if state.is_main_process:
            lines = "".join(json.dumps(answer) + "\n" for answer in everything)
            if args.out:
                args.out.write_text(lines, encoding="utf-8")
            else:
                sys.stdout.write(lines)
    finally:
        state.destroy_process_group()
    return 0


def read_prompts(path: pathlib.Path | None) -> list[str]:
    """The lines of a file, or seven of different lengths."""
    if path is None:
        return [SENTENCE * (4 + 3 * i) + f"Line {i}:" for i in range(7)]
    prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise SystemExit(f"{path} holds no prompt")
    return prompts


def load(directory: str | None, device):
    """(model, encode, decode): a model from a directory with its tokenizer, or a tiny random one."""
    if directory is None:
        return tiny_model().to(device), encode_characters, decode_characters
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto" if device.type == "cuda" else torch.float32)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return (model.to(device).eval(), lambda texts: tokenizer(texts, return_tensors="pt", padding=True),
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True))


def tiny_model():
    """The same random weights on every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=PAD + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
                         pad_token_id=PAD, bos_token_id=None, eos_token_id=None, initializer_range=0.2)
    return LlamaForCausalLM(config).eval()


def encode_characters(texts: list[str]) -> dict[str, torch.Tensor]:
    """Printable ASCII as ids [B, T], padded on the left, and their mask; any other character becomes a space."""
    rows = [[ord(c) - 32 if " " <= c <= "~" else 0 for c in text] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def decode_characters(ids: list[int]) -> str:
    return "".join(chr(i + 32) for i in ids if i != PAD)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="a causal language model (default: a tiny random one)")
    parser.add_argument("--prompts", type=pathlib.Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--threshold", type=float, default=0.9, help="of PSAConfig (default: %(default)s)")
    parser.add_argument("--min-context", type=int, default=0, help="of PSAConfig (default: %(default)s)")
    return parser.parse_args(argv)


def start_all_processes() -> None:
    """`accelerate launch --num_processes N` starts N processes only on N GPUs, and one without: start N here then."""
    if torch.cuda.is_available() or "RANK" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    import psutil
    from accelerate.commands.launch import launch_command_parser

    command = psutil.Process().parent().cmdline()
    if "launch" not in command:
        return
    asked, _ = launch_command_parser().parse_known_args(command[command.index("launch") + 1:])
    if (asked.num_processes or 1) > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                                  str(asked.num_processes), *sys.argv])


if __name__ == "__main__":
    start_all_processes()
    sys.exit(main())
