"""The `hf-sparse` command: what it prints and writes, and how it fails."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

import hf_sparse
from hf_sparse import PSAConfig, patched
from hf_sparse.commands import evaluate as eval_command
from hf_sparse.commands.common import CommandError, in_a_line, parse_pair
from hf_sparse.commands.main import main
from hf_sparse.evaluation import TASKS
from tests.text_model import CONTEXT, save_text_model, text_model, text_tokenizer

SPARSE = ["--set", "min_context=0", "--set", "block_size=4", "--threshold", "0.6"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_text_model(path)
    return str(path)


# -- env ------------------------------------------------------------------------------------------------------------


def test_env_names_versions_and_the_path_taken(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^hf-sparse +{re.escape(hf_sparse.__version__)}$", text, re.M)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", text, re.M)
    assert re.search(r"^decoding runs +(PyTorch reference on cpu|Triton kernels)$", text, re.M)


def test_env_as_json(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"] == torch.__version__
    assert len(facts["devices"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(("usable", "path"), [(True, "Triton kernels"), (False, "PyTorch reference on cpu")])
def test_env_asks_the_library_which_path_is_taken(monkeypatch, capsys, usable, path):
    monkeypatch.setattr("hf_sparse.cache.backend.use_kernels", lambda *arguments: usable)
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == path


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"hf-sparse {hf_sparse.__version__}\n"


def test_help_costs_no_import_of_torch():
    code = "import sys, hf_sparse.commands.main as m; m.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "hf_sparse.commands.main", "eval", "no/such/directory"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "hf-sparse eval: error: " in done.stderr and "no/such/directory" in done.stderr
    assert "Traceback" not in done.stderr


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("block_size=16", ("block_size", 16)),
        ("min-context=0", ("min_context", 0)),
        ("top_k=0.25", ("top_k", 0.25)),
        ("max_blocks=None", ("max_blocks", None)),
        ("verify=true", ("verify", True)),
        ("gpu_memory=4GiB", ("gpu_memory", "4GiB")),
        ("dense_layers=[0, 1]", ("dense_layers", [0, 1])),
        ("digest = min_max", ("digest", "min_max")),
    ],
)
def test_pairs_are_read(pair, expected):
    assert parse_pair(pair) == expected


@pytest.mark.parametrize("pair", ["block_size", "=4", "blok_size=4", ""])
def test_pairs_that_say_nothing_are_refused(pair):
    with pytest.raises(CommandError):
        parse_pair(pair)


def test_settings_start_from_a_preset_or_a_saved_config(directory, tmp_path, capsys):
    saved = PSAConfig(threshold=0.5, min_context=0, block_size=4)
    saved.save_pretrained(tmp_path)
    for start, expected in (
        (["--preset", "paper"], PSAConfig.preset("paper").replace(min_context=0, block_size=4)),
        (["--config", str(tmp_path)], saved),
        (["--config", str(tmp_path), "--threshold", "0.7"], saved.replace(threshold=0.7)),
    ):
        out = tmp_path / "out.json"
        assert main(
            ["eval", directory, "--task", "kl", "--length", "400", "--samples", "1", "--json", str(out), *start]
            + ["--set", "min_context=0", "--set", "block_size=4"]
        ) == 0
        assert json.loads(out.read_text())["config"] == expected.to_dict()
    capsys.readouterr()


# -- generate -------------------------------------------------------------------------------------------------------

PROMPT = "A lighthouse keeper counts the ships that pass at night. " * 6


def expected_answer(prompt: str, tokens: int, **overrides) -> str:
    model, tokenizer = text_model(), text_tokenizer()
    with patched(model, PSAConfig(**overrides)):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("source", ["argument", "file", "stdin"])
def test_generate_streams_what_the_library_generates(directory, tmp_path, monkeypatch, capsys, source):
    if source == "file":
        (tmp_path / "prompt.txt").write_text(PROMPT)
    if source == "stdin":
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    given = {
        "argument": ["--prompt", PROMPT],
        "file": ["--prompt-file", str(tmp_path / "prompt.txt")],
        "stdin": ["--prompt-file", "-"],
    }[source]
    assert main(["generate", directory, *given, "--max-new-tokens", "20", *SPARSE]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip("\n") == expected_answer(PROMPT, 20, threshold=0.6, min_context=0, block_size=4).rstrip("\n")


def test_generate_prints_statistics_beside_the_answer(directory, capsys):
    arguments = ["generate", directory, "--prompt", PROMPT, "--max-new-tokens", "9", "--stats", *SPARSE]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    stats = json.loads(printed.err[printed.err.index("{") :])
    assert stats["sparse_steps"] == 8 and 0 < stats["kv_fraction"] < 1
    assert all(type(stats[name]) is int for name in ("blocks_read", "blocks_held"))
    assert "kv_fraction" not in printed.out


def test_generate_wraps_the_prompt_in_the_chat_template(directory, capsys):
    assert main(["generate", directory, "--chat", "--prompt", "Hello", "--max-new-tokens", "12"]) == 0
    expected = expected_answer("[user] Hello\n[assistant] ", 12)
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")


def test_generate_samples_with_a_seed(directory, capsys):
    answers = []
    for seed in ("1", "1", "2"):
        arguments = ["generate", directory, "--prompt", PROMPT, "--max-new-tokens", "20", "--sample", "--seed", seed]
        assert main(arguments) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


# -- eval -----------------------------------------------------------------------------------------------------------


def test_eval_prints_a_table_and_writes_everything(directory, tmp_path, capsys):
    out, lines = tmp_path / "out.json", tmp_path / "out.jsonl"
    arguments = ["eval", directory, "--task", "copy,kl,copy", "--length", "500,700", "--samples", "2", "--seed", "3"]
    arguments += ["--policy", "psa,topk@0.3", "--json", str(out), "--out", str(lines), *SPARSE]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in printed.out.splitlines() if line.startswith("| ")]
    assert rows[1:] == [[policy, task, length] for length in ("500", "700") for task in ("copy *", "kl")
                        for policy in ("dense", "psa", "topk@0.3")]
    assert "cell 24 of 24" in printed.err
    result = json.loads(out.read_text())
    assert result["model"] == "tiny" and result["dtype"] == "float32"
    assert result["versions"]["torch"] == torch.__version__
    assert [row["questions"] for row in result["rows"][:6]] == [6, 6, 6, 2, 2, 2]
    assert all(0 < row["kv_fraction"] < 1 for row in result["rows"] if row["policy"] != "dense")
    cells = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(cells) == 1 + 24 and {cell["seed"] for cell in cells[1:]} == {3, 4}
    # The same again finds everything done.
    assert main(arguments) == 0
    again = capsys.readouterr()
    assert again.out == printed.out and "cell" not in again.err
    assert main([*arguments, "--threshold", "0.7"]) == 2
    assert "threshold: 0.6 there, 0.7 now" in capsys.readouterr().err


def test_eval_by_the_caches_own_step(directory, capsys):
    arguments = ["eval", directory, "--task", "kl", "--length", "400", "--samples", "1", "--quiet", *SPARSE]
    assert main([*arguments, "--policy", "psa/rounds"]) == 0
    simulated = capsys.readouterr().out.splitlines()[-1].split("|")
    assert main([*arguments, "--policy", "psa", "--real"]) == 0
    real = capsys.readouterr().out.splitlines()[-1].split("|")
    assert [part.strip() for part in simulated[2:12]] == [part.strip() for part in real[2:12]]
    assert main([*arguments, "--policy", "psa/rounds", "--real"]) == 2
    assert "leave out 'rounds'" in capsys.readouterr().err
    assert main([*arguments, "--policy", "oracle@0.6", "--real"]) == 2
    assert "in simulation only" in capsys.readouterr().err


def test_eval_draws(directory, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("pareto.png", "map.png", "blocks.png")]
    arguments = ["eval", directory, "--task", "needles", "--length", "500", "--samples", "1", "--quiet", *SPARSE]
    assert main([*arguments, "--plot", str(paths[0]), "--map", str(paths[1]), "--blocks", str(paths[2])]) == 0
    assert "oracle@0.95" in capsys.readouterr().out
    assert main([*arguments, "--layers"]) == 0
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert "layer, psa" in table[0] and len(table) == 2 + 2 and "(head " in table[-1]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_eval_is_quiet_when_asked(directory, capsys):
    arguments = ["eval", directory, "--task", "kl", "--length", "400", "--samples", "1", "--quiet", *SPARSE]
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_eval_fails_when_decoding_was_dense(directory, capsys):
    arguments = ["eval", directory, "--task", "kl", "--length", "400", "--samples", "1"]
    assert main(arguments) == 1  # shorter than the default min_context
    printed = capsys.readouterr()
    assert printed.out == "" and "nothing was measured" in printed.err and "min_context" in printed.err


def test_eval_fails_when_everything_was_read(directory, capsys):
    arguments = ["eval", directory, "--task", "kl", "--length", "400", "--samples", "1", "--quiet", *SPARSE]
    assert main([*arguments, "--set", "min_blocks=10000"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "all blocks were read although policies may skip some" in printed.err


def test_eval_knows_the_tasks_that_there_are():
    assert eval_command.TASKS == tuple(TASKS)


# -- tune -----------------------------------------------------------------------------------------------------------


def test_tune_writes_settings_that_the_other_verbs_read(directory, tmp_path, capsys):
    arguments = ["tune", directory, "--length", "500", "--samples", "1", "--quiet", "--out", str(tmp_path / "profile")]
    assert main([*arguments, *SPARSE[:-2]]) == 0
    printed = capsys.readouterr().out
    config = PSAConfig.from_pretrained(tmp_path / "profile")
    assert config.replace(threshold=0.6) == PSAConfig(threshold=0.6, min_blocks=0, max_blocks=None, min_context=0, block_size=4)
    assert f"threshold {config.threshold:g} written" in printed
    assert [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| 0.")] == [
        "0.7", "0.75", "0.8", "0.85", "0.9", "0.95", "0.97", "0.99"]


def test_tune_writes_nothing_where_no_threshold_is_good_enough(directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_sparse.evaluation.tune.MOST_KL", 0.0)
    arguments = ["tune", directory, "--length", "500", "--samples", "1", "--quiet", "--out", str(tmp_path / "profile")]
    assert main([*arguments, *SPARSE[:-2]]) == 1
    assert "no threshold" in capsys.readouterr().err and not (tmp_path / "profile").exists()


def test_tune_looks_at_the_length_before_it_loads_the_model(directory, monkeypatch):
    monkeypatch.setattr("hf_sparse.commands.tune.load_model", lambda arguments: pytest.fail("loaded"))
    assert main(["tune", directory, "--length", "500"]) == 2


# -- bad input ------------------------------------------------------------------------------------------------------


def refusal(capsys, *arguments) -> str:
    """The line that a command ends with."""
    assert main([*arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("verb", ["generate", "eval", "tune", "heads"])
@pytest.mark.parametrize("size", [1000, 30], ids=["cut off", "cut off in the header"])
def test_damaged_weights(directory, tmp_path, capsys, verb, size):
    broken = tmp_path / "model"
    shutil.copytree(directory, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    settings = ["--prompt", "x"] if verb == "generate" else ["--set", "min_context=0"] if verb == "tune" else []
    assert "weights" in (line := refusal(capsys, verb, str(broken), *settings)) and "damaged or cut off" in line


def test_a_directory_without_a_tokenizer(directory, tmp_path, capsys):
    """Its message is whole, not the first line of several."""
    bare = tmp_path / "model"
    shutil.copytree(directory, bare, ignore=shutil.ignore_patterns("*token*", "chat_template*"))
    line = refusal(capsys, "generate", str(bare), "--prompt", "x")
    assert "the tokenizer of" in line and not line.rstrip().endswith((":", ",", "of"))


@pytest.mark.parametrize("error", [ValueError(""), OSError("one.\ntwo"), OSError("one of:\n  two\n\n  three ")], ids=repr)
def test_errors_in_a_line(error):
    assert in_a_line(error) == {"": "ValueError", "one.\ntwo": "one."}.get(str(error), "one of: two three")


@pytest.mark.parametrize("verb", ["generate", "eval", "tune", "heads"])
def test_a_tokenizer_of_more_tokens_than_the_model(directory, tmp_path, capsys, verb):
    small = tmp_path / "model"
    shutil.copytree(directory, small)
    known, config = 20, copy.deepcopy(text_model().config)
    config.vocab_size = known
    type(text_model())(config).save_pretrained(small)
    settings = {
        "generate": ["--prompt", "the sea and the land"],
        "heads": ["--length", "300"],
        "eval": ["--length", "400", "--task", "kl"],
        "tune": ["--length", "400", "--set", "min_context=0"],
    }[verb]
    assert f"the model knows tokens 0 to {known - 1}" in refusal(capsys, verb, str(small), *settings)


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_output_that_nobody_reads_any_more(directory):
    """`hf-sparse generate ... | head`: no traceback."""
    command = [sys.executable, "-m", "hf_sparse.commands.main", "generate", directory, "--prompt", "x y z", "--max-new-tokens", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 141
    assert "Traceback" not in errors and "BrokenPipeError" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "{missing}"], "no model directory"),
        (["eval", "{empty}"], "config.json"),
        (["eval", "{broken}"], "can't be loaded"),
        (["eval", "{model}", "--task", "passkey,juggling"], "'juggling'"),
        (["eval", "{model}", "--task", ","], "no task given"),
        (["eval", "{model}", "--threshold", "1.5"], "threshold"),
        (["eval", "{model}", "--set", "blok_size=16"], "blok_size"),
        (["eval", "{model}", "--set", "block_size=5"], "block_size"),
        (["eval", "{model}", "--set", "block_size"], "KEY=VALUE"),
        (["eval", "{model}", "--policy", "top_k"], "did you mean 'topk'?"),
        (["eval", "{model}", "--policy", "all"], "choose from dense, psa"),
        (["eval", "{model}", "--file", "squad:{missing}"], "longbench:PATH or ruler:PATH"),
        (["eval", "{model}", "--file", "ruler:{missing}"], "missing"),
        (["eval", "{model}", "--file", "ruler:"], "longbench:PATH or ruler:PATH"),
        (["eval", "{model}", "--out", "{empty}"], "that is a directory"),
        (["eval", "{model}", "--out", "{missing}/deeper/out.jsonl"], "no such directory"),
        (["eval", "{model}", "--out", "{broken}/config.json", "--task", "kl", "--length", "400"], "line 1"),
        (["tune", "{model}", "--set", "top_k=5", "--policy", "top_k"], "no threshold to choose"),
        (["tune", "{model}", "--set", "policy=top_k", "--set", "top_k=5"], "no threshold to choose"),
        (["tune", "{model}", "--threshold", "0.8"], "tune chooses the threshold"),
        (["tune", "{model}", "--set", "threshold=0.8"], "tune chooses the threshold"),
        (["tune", "someone/something"], "give --out"),
        (["tune", "{model}", "--length", "500,3000"], "--length 500 is below min_context=2048"),
        (["eval", "{model}", "--real", "--blocks", "blocks.png"], "--blocks shows what only a simulation knows"),
        (["eval", "{model}", "--real", "--layers"], "--layers shows what only a simulation knows"),
        (["eval", "{model}", "--preset", "paper", "--config", "{empty}"], "one of them"),
        (["eval", "{model}", "--config", "{empty}"], "psa_config.json"),
        (["eval", "{model}", "--task", "kl", "--length", str(CONTEXT)], f"context is {CONTEXT}"),
        (["eval", "{model}", "--task", "kl", "--length", "400", "--text", "{missing}"], "no text"),
        (["eval", "{model}", "--json", "{missing}/deeper/out.json"], "no such directory"),
        (["eval", "{model}", "--task", "kl", "--length", "400", "--device", "cuda:99"], "cuda:99"),
        (["generate", "{model}", "--prompt", " "], "empty"),
        (["generate", "{model}", "--prompt-file", "{missing}"], "can't be read"),
        (["generate", "{model}", "--prompt", "x y " * CONTEXT, "--max-new-tokens", "1"], f"context is {CONTEXT}"),
        (["generate", "{model}", "--prompt", "x", "--set", "gpu_memory=1KiB"], "gpu_memory"),
    ],
    ids=lambda value: " ".join(value[1:])[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_status_two(directory, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no-such-architecture"}')
    names = {"model": directory, "missing": str(tmp_path / "missing"), "empty": str(tmp_path / "empty")}
    names["broken"] = str(tmp_path / "broken")
    assert main([argument.format(**names) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if "error: " in line]
    assert len(lines) == 1 and message in lines[0], printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["juggle"],
        ["eval"],
        ["generate", "model"],
        ["generate", "model", "--prompt", "a", "--prompt-file", "b"],
        ["generate", "model", "--prompt", "a", "--max-new-tokens", "0"],
        ["eval", "model", "--samples", "many"],
        ["eval", "model", "--threshold", "high"],
        ["eval", "model", "--preset", "fastest"],
        ["eval", "model", "--length", "4096,many"],
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_arguments_that_do_not_parse_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: hf-sparse" in capsys.readouterr().err
