"""The documents say what is there: examples run, links lead somewhere, tables are what code and results give."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import lserve_report, report
from docs import settings
from hf_sparse import PSACache, PSAConfig, patched
from hf_sparse.commands.main import build_parser
from hf_sparse.config import PRESETS
from hf_sparse.evaluation import default_paragraphs
from tests.models import build
from tests.text_model import VOCABULARY, text_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
}
README, GUIDE = DOCUMENTS["README.md"], DOCUMENTS["docs/guide.md"]


def blocks(text: str, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def indented(text: str) -> list[str]:
    """Lines of indented code blocks, which are shell commands here; fenced blocks are left out."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found, before = [], ""
    for line in text.splitlines():
        if line.startswith("    ") and (not before.strip() or before in found):
            found.append(line)
        before = line
    return [line.strip() for line in found]


# -- examples ------------------------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with what the README's examples name: path/to/model, a real directory, and document.txt."""
    model = build("llama", vocab_size=VOCABULARY, max_position_embeddings=8192)
    model.save_pretrained(tmp_path / "path/to/model")
    tokenizer = text_tokenizer()
    tokenizer.save_pretrained(tmp_path / "path/to/model")
    words = "\n\n".join(default_paragraphs())[:20_000]
    ids = tokenizer(words)["input_ids"][:2600]
    (tmp_path / "document.txt").write_text(tokenizer.decode(ids), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return model, tmp_path


def test_examples_of_the_readme_run_and_do_what_their_comments_say(workplace, capsys):
    reference, _ = workplace
    first, second = blocks(README, "python")
    names: dict = {}
    exec(compile(first, "README.md, first example", "exec"), names)
    stats, model, inputs = names["stats"], names["model"], names["inputs"]
    assert stats["sparse_steps"] > 20
    assert 0 < stats["kv_fraction"] < 1
    assert re.fullmatch(r"read \d+\.\d% of the KV blocks; coverage 0\.\d{3}\n", capsys.readouterr().out)
    assert names["output"].shape[1] == inputs["input_ids"].shape[1] + 32

    exec(compile(second, "README.md, second example", "exec"), names)
    cache, branch = names["cache"], names["branch"]
    assert names["first"].shape[1] == inputs["input_ids"].shape[1] + 16
    assert branch.tokens == cache.tokens == names["first"].shape[1] - 1
    assert torch.equal(names["dense"], reference.generate(**inputs, max_new_tokens=16))
    fresh = AutoModelForCausalLM.from_pretrained("path/to/model")
    assert model.config._attn_implementation == fresh.config._attn_implementation
    assert set(vars(model)) == set(vars(fresh))


def test_a_kept_cache_continues_as_the_readme_says(workplace):
    model, _ = workplace
    ids = torch.randint(3, VOCABULARY, (1, 120))
    with patched(model, threshold=1.0, min_context=0, block_size=4):
        cache = PSACache(model.config, threshold=1.0, min_context=0, block_size=4)
        kept = model.generate(ids, past_key_values=cache, max_new_tokens=6)
        longer = torch.cat([kept, torch.randint(3, VOCABULARY, (1, 9))], 1)
        again = model.generate(longer, past_key_values=cache, max_new_tokens=6)
    assert torch.equal(again, model.generate(longer, max_new_tokens=6))


def test_the_table_of_stats_names_every_key(workplace):
    model, _ = workplace
    with patched(model, min_context=0, block_size=4):
        model.generate(torch.randint(3, VOCABULARY, (1, 100)), max_new_tokens=3)
        stats = model.last_psa_cache.stats()
    table = README.split("## Read stats()")[1].split("##")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    keys = [key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)]
    assert sorted(keys) == sorted(stats)
    assert all(f"`{name}`" in table for name in stats["bytes"])
    assert {"captured_log_mass", "history", "kind"} <= set(stats["layers"][0])


# -- what documents point at ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_lead_to_files_and_headings(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name]):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{name} links to {target}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name):
    for path in re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|sh|txt|md|toml))`", DOCUMENTS[name]):
        assert any((base / path).is_file() for base in (ROOT, ROOT / "hf_sparse")), f"{name} names {path}"
    for folder in re.findall(r"`((?:hf_sparse|tests|benchmarks|docs|examples)/[\w/-]*/)`", DOCUMENTS[name]):
        assert (ROOT / folder).is_dir() or folder == "benchmarks/results/", f"{name} names {folder}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_that_are_shown_exist(name):
    text = DOCUMENTS[name]
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), f"{name} runs python -m {module}"
    for script in re.findall(r"(?:bash|accelerate launch --num_processes \d+) ([\w./-]+)", text):
        assert (ROOT / script).is_file(), f"{name} runs {script}"
    for line in indented(text) + re.findall(r"`(hf-sparse [^`]+)`", text):
        words = shlex.split(line)
        if words and words[0] == "hf-sparse" and len(words) > 2:
            build_parser().parse_args(words[1:])            # exits on an option that is not there


@pytest.mark.parametrize("script", ["tests/run.sh", "examples/run.sh", ".ci/run"])
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_shell_scripts_name_commands_of_the_readme():
    commands = indented(README)
    assert [line for line in commands if line.startswith("bash ")] == ["bash examples/run.sh", "bash tests/run.sh"]
    assert "bash tests/run.sh" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


def test_warnings_of_the_guide_are_given_by_the_library():
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("hf_sparse/**/*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)            # string literals that go on in the next line
    phrases = re.findall(r'^\| "([^"]+)" \|', GUIDE.split("## Warnings")[1], re.MULTILINE)
    assert len(phrases) >= 5
    assert [phrase for phrase in phrases if phrase not in source] == []
    assert source.count("warnings.warn(") == len(phrases)


# -- generated parts -----------------------------------------------------------------------------------------


def test_settings_of_the_guide_are_those_of_the_config():
    assert settings.main(["--check"]) == 0, "run python -m docs.settings"
    rows = re.findall(r"^\| (`.+?) \| (`.+?`) \| (.+) \|$", GUIDE, re.MULTILINE)
    documented = {}
    for names, values, _ in rows:
        documented.update(zip(re.findall(r"`(\w+)`", names), re.findall(r"`(.+?)`", values), strict=True))
    defaults = {field.name: getattr(PSAConfig(), field.name) for field in dataclasses.fields(PSAConfig)}
    assert {name: ast.literal_eval(value) for name, value in documented.items()} == defaults


def test_presets_of_the_guide_are_those_of_the_config():
    section = GUIDE.split("| preset | settings |")[1].split("\n\n")[0]
    found = {}
    for name, text in re.findall(r'^\| `"(\w+)"` \| (.+) \|$', section, re.MULTILINE):
        pairs = re.findall(r'`(\w+)=([^`]+)`', text)
        found[name] = {key: ast.literal_eval(value) for key, value in pairs}
    assert found == PRESETS


def test_performance_tables_are_what_the_results_give(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_place_of_the_family_table_is_in_the_readme():
    assert README.count("<!-- families:start -->") == README.count("<!-- families:end -->") == 1


RUN = {"ms_per_token": {"median": 8.0, "p20": 7.5, "p80": 9.0}, "batch": 1, "context": 4096, "shape": "llama"}
RESULT = {
    "versions": {"gpu": "NVIDIA X", "torch": "2.11.0"},
    "check": None,
    "rows": [
        {**RUN, "name": "psa", "run_id": "aaaa", "kv_fraction": 0.125, "captured": True, "compile_s": 20.0,
         "attention_us_per_layer": {"median": 30.0, "p20": 29.0, "p80": 31.0}, "bytes_floor_us": 15.0},
        {**RUN, "name": "free", "run_id": "bbbb", "ms_per_token": {"median": 1.0, "p20": 1.0, "p80": 1.0}},
        {**RUN, "name": "free", "run_id": "aaaa", "ms_per_token": {"median": 5.0, "p20": 5.0, "p80": 5.0}},
        {"name": "dynamic", "batch": 1, "context": 4096, "run_id": "aaaa", "error": "out of memory"},
    ],
}


def cells(table: str, path: str, run: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    (found,) = (row for row in rows if row[1] == report.PATHS.get(path, path) and row[-1] == run)
    return found


def test_report_forms_ratios_within_a_run_only():
    table = report.decode_table(RESULT)
    assert cells(table, "psa", "aaaa")[4:7] == ["8.00 (7.50-9.00)", "1.60", "12.5%"]
    assert cells(table, "free", "bbbb")[5] == "1.00"
    assert cells(report.attention_table(RESULT), "psa", "aaaa")[4:8] == ["30.0 (29.0-31.0)", "15.0", "2.00", "-"]
    lonely = copy.deepcopy(RESULT)
    del lonely["rows"][2]
    assert cells(report.decode_table(lonely), "psa", "aaaa")[5] == "-"


def test_report_takes_the_later_of_two_measurements_of_a_run():
    again = copy.deepcopy(RESULT)
    again["rows"].append({**again["rows"][2], "ms_per_token": {"median": 4.0, "p20": 4.0, "p80": 4.0}})
    assert cells(report.decode_table(again), "psa", "aaaa")[5] == "2.00"


def test_report_of_prompts_takes_the_fastest_tile_and_its_own_base():
    ms = lambda x: {"median": x, "p20": x, "p80": x}  # noqa: E731
    tile = {"queries": 64, "keys": 32, "warps": 4, "stages": 3, "descriptors": True}
    place = {"context": 512, "tflop_s": 5.0, "run_id": "aaaa"}
    rows = [{**place, "name": "dense", "ms": ms(8.0)}, {**place, "name": "layer", "streaming": "apart", "window": 9, "ms": ms(5.0),
                                                         "tile": {**tile, "keys": 64}},
            {**place, "name": "layer", "streaming": "apart", "window": 9, "tile": tile, "ms": ms(4.0)},
            {**place, "name": "chunk", "queries": 64, "ms": ms(3.0)},
            {**place, "name": "chunk_kernel", "queries": 64, "tile": tile, "ms": ms(2.0)}]
    lines = lserve_report.prompt_attention({"rows": rows}).splitlines()[2:]
    assert [line.split(" | ")[6] for line in lines] == ["1.00", "2.00", "1.00", "1.50"]
    assert lines[1].split(" | ")[7] == "64 x 32, 4 warps, 3 stages, TMA" and len(lines) == 4


def test_report_shows_what_failed():
    assert cells(report.decode_table(RESULT), "dynamic", "aaaa")[4] == "failed: out of memory"


def test_report_writes_every_section_and_notices_a_stale_document(tmp_path):
    kernels = {"versions": RESULT["versions"],
               "checks": [{"shape": [8, 2, 64], "dtype": "torch.float32", "threshold": t, "kernel": 1e-6,
                           "reference": 2e-6, "fraction_kernel": 0.5, "fraction_reference": 0.53}
                          for t in (1.0, 0.7)],
               "rows": [{"kernel": "chain", "batch": 1, "context": 8192, "run_id": "cccc", "bytes_floor_us": 4.0,
                         "us": {"median": 50.0, "p20": 49.0, "p80": 51.0}},
                        {"kernel": "rank_kernel", "batch": 1, "context": 8192, "run_id": "cccc", "us": 7.5},
                        {"kernel": "rank_kernel", "variant": {"rank_warps": 2}, "run_id": "cccc", "us": 9.0},
                        {"kernel": "rank_kernel", "variant": {"rank_warps": 8}, "run_id": "cccc", "us": "no"}]}
    for name, content in (("decode_h200.json", RESULT), ("kernels_h200.json", kernels)):
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENTS["docs/performance.md"], encoding="utf-8")
    options = ["--results", str(tmp_path), "--document", str(document)]
    assert report.main(options) == 0
    text = document.read_text(encoding="utf-8")
    assert report.NONE_YET not in text and "`python -m benchmarks.prefill_kernel` on a GPU" in text
    assert "NVIDIA X; torch 2.11.0." in text
    assert "| 1 | 8192 | 50.0 (49.0-51.0) | 7.5 | - | - | - | - | 4.0 | cccc |" in text
    assert "| float32 | 1 | - | 1.0e-06 | 2.0e-06 | 0.030 |" in text
    assert text.index("| rank | 1 | warps 2 | 9.0 |") < text.index("| rank | 1 | warps 8 | failed: no |")
    assert report.main([*options, "--check"]) == 0
    document.write_text(text.replace("7.5", "7.4"), encoding="utf-8")
    assert report.main([*options, "--check"]) == 1


def test_report_refuses_a_document_without_its_markers(tmp_path):
    document = tmp_path / "performance.md"
    document.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="decode-versions:start"):
        report.main(["--document", str(document)])


def test_report_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from benchmarks.report import main; sys.exit(main(['--check']))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


# -- the layers of docs/design.md ----------------------------------------------------------------------------

# Modules may import from their own group and from those to the right of it.
ORDER = ["commands", "evaluation", "patches", "cache", "kernels", "digests", "selection", "eviction", "compat",
         "config", "sizes"]


def imported(path: pathlib.Path) -> set[str]:
    """Groups of hf_sparse that a module imports from, wherever in the file."""
    package = list(path.relative_to(ROOT / "hf_sparse").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[:len(package) - node.level + 1]
            full = base + (node.module.split(".") if node.module else [])
            found |= {full[0]} if full else {alias.name for alias in node.names}
    return found & set(ORDER)


@pytest.mark.parametrize("group", ORDER)
def test_imports_point_downwards(group):
    files = list((ROOT / "hf_sparse" / group).rglob("*.py")) or [ROOT / "hf_sparse" / f"{group}.py"]
    upwards = {(path.name, other) for path in files for other in imported(path)
               if ORDER.index(other) < ORDER.index(group)}
    assert upwards == set()
