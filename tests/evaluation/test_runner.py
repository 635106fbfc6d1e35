"""The grid: cells are measured once, kept, found again, and add up to rows."""
from __future__ import annotations

import dataclasses
import json
import time

import pytest

from hf_sparse import PSAConfig
from hf_sparse.evaluation import DenseDecodeError, grid, prefill
from hf_sparse.evaluation.cells import AnswerScore, Cell, CellFile, model_id, sample_id
from hf_sparse.evaluation.generated import FreeQuestion
from hf_sparse.evaluation.grid import run_grid
from hf_sparse.evaluation.policies import parse_policies, parse_policy
from hf_sparse.evaluation.samples import Sample
from hf_sparse.evaluation.summary import layers_table, mass_quantile, rows, rows_table
from hf_sparse.evaluation.work import check_lengths, file_work, task_work
from tests.text_model import CONTEXT, save_text_model, text_model

BASE = PSAConfig(threshold=0.6, min_context=0, block_size=8)
POLICIES = parse_policies("psa,topk@0.3,oracle@0.6", BASE)


@pytest.fixture(scope="module")
def work(haystack):
    return task_work(["copy", "kl"], [500], haystack, 2)


def go(tokenizer, work, path=None, policies=POLICIES, **options):
    model = text_model()
    cells = CellFile(path, model_id(model))
    seen = []
    finished = run_grid(model, tokenizer, work, policies, cells, progress=seen.append, **options)
    return cells, seen, finished


def without_times(cells: CellFile) -> list[Cell]:
    return [dataclasses.replace(cell, seconds=0.0) for cell in cells.cells.values()]


# -- work -----------------------------------------------------------------------------------------------------------


def test_tasks_come_in_turn(haystack):
    order = [(length, sample.task) for length, sample in task_work(["needles", "kl"], [600, 500], haystack, 8, questions=16)]
    assert order == [(500, task) for task in ["needles", *["kl"] * 4, "needles", *["kl"] * 4]] + \
        [(600, task) for task in ["needles", *["kl"] * 4, "needles", *["kl"] * 4]]


def test_depths_are_spread_over_a_tasks_contexts(haystack):
    found = [sample.questions[0].depth for _, sample in task_work(["passkey"], [500], haystack, 4)]
    assert found == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tasks=["juggling"], lengths=[500], samples=1), "no task 'juggling'"),
        (dict(tasks=[], lengths=[500], samples=1), "no task given"),
        (dict(tasks=["kl"], lengths=[0], samples=1), "length must be at least 1"),
        (dict(tasks=["kl"], lengths=[], samples=1), "length must be at least 1"),
        (dict(tasks=["kl"], lengths=[500], samples=0), "samples must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_work_that_makes_no_sense_is_refused(haystack, arguments, message):
    with pytest.raises(ValueError, match=message):
        task_work(haystack=haystack, **arguments)


def test_a_length_beyond_the_models_context_is_refused(haystack):
    with pytest.raises(ValueError, match=f"task kl at length {CONTEXT}.*at most {CONTEXT - 49}"):
        check_lengths(text_model(), task_work(["kl"], [500, CONTEXT], haystack, 1))
    check_lengths(text_model(), task_work(["kl"], [CONTEXT - 49], haystack, 1))


def test_dataset_files_are_work(tokenizer, tmp_path):
    path = tmp_path / "niah_single_1.jsonl"
    line = {"index": 0, "input": "words " * 40 + "What is the special magic number for x? It is", "outputs": ["7"], "length": 1}
    path.write_text("\n".join(json.dumps({**line, "index": i}) for i in range(3)))
    work = file_work([f"ruler:{path}"], tokenizer, [700], samples=2)
    assert [(length, sample.task, sample.seed) for length, sample in work] == [(700, "ruler/niah_single_1", 0),
                                                                             (700, "ruler/niah_single_1", 1)]
    with pytest.raises(ValueError, match="longbench:PATH or ruler:PATH"):
        file_work([str(path)], tokenizer, [700])


def test_files_of_one_task_stay_apart(tokenizer, tmp_path):
    files = []
    for folder, first in (("a", 0), ("b", 100)):
        path = tmp_path / folder / "niah_single_1.jsonl"
        path.parent.mkdir()
        lines = [{"input": f"word{first + i} " * 40 + "What is the special magic number for x? It is", "outputs": ["7"]}
                 for i in range(2)]
        path.write_text("\n".join(map(json.dumps, lines)))
        files.append(f"ruler:{path}")
    work = file_work(files, tokenizer, [700, 800])
    assert len({(length, sample.task, sample.seed) for length, sample in work}) == len(work) == 8
    assert [sample.seed for length, sample in work if length == 800] == [0, 1, 2, 3]
    work = file_work(files, tokenizer, [700], samples=3)
    assert [sample.seed for _, sample in work] == [0, 1, 2] and len({sample.context for _, sample in work}) == 3


# -- running --------------------------------------------------------------------------------------------------------


def test_every_cell_is_measured_and_told_of(tokenizer, work, tmp_path):
    cells, seen, finished = go(tokenizer, work, tmp_path / "cells.jsonl")
    assert finished
    assert list(cells.cells) == [(policy, sample.task, 500, sample.seed) for seed in (0, 1) for _, sample in work
                                 if sample.seed == seed for policy in ("dense", "psa", "topk@0.3", "oracle@0.6")]
    assert [step.done for step in seen] == list(range(16)) and {step.total for step in seen} == {16}
    assert seen[0].remaining is None and seen[-1].remaining >= 0
    for cell in cells.cells.values():
        assert cell.sample == sample_id(next(s for _, s in work if (s.task, s.seed) == (cell.task, cell.seed)))
        assert sum(cell.mass.values()) == 2 * 2 * sum(                              # layers, KV heads, tokens
            len(q.prompt) + len(q.answer) - 1 for _, s in work if (s.task, s.seed) == (cell.task, cell.seed) for q in s.questions)
        assert bool(cell.layer_blocks) == (cell.policy == "oracle@0.6")
        assert len(cell.layer_kv) == len(cell.head_mass) == 2 and all(len(heads) == 2 for heads in cell.head_mass)
        if cell.policy == "dense":
            assert cell.blocks_read == cell.blocks_held and all(value == 0.0 for a in cell.answers for value in a.kl)
        else:
            assert cell.blocks_read < cell.blocks_held and all(value > 0.0 for a in cell.answers for value in a.kl)


def test_what_was_stopped_goes_on(tokenizer, work, tmp_path):
    path = tmp_path / "cells.jsonl"
    whole, _, _ = go(tokenizer, work)
    _, seen, finished = go(tokenizer, work, path, deadline=time.monotonic())
    assert not finished and not seen

    class Stop(Exception):
        pass

    def stop(step):
        if step.done == 6:
            raise Stop

    model = text_model()
    with pytest.raises(Stop):
        run_grid(model, tokenizer, work, POLICIES, CellFile(path, model_id(model)), progress=stop)
    assert not hasattr(model, "last_psa_cache")
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 6
    # As after a power cut: the last line is not whole, and measured again.
    path.write_text("\n".join(lines)[:-20])
    cells, seen, finished = go(tokenizer, work, path)
    assert finished and len(cells.cells) == 16
    # Dense attention is run again to compare with, but counted once.
    assert [(step.done, step.policy) for step in seen[:3]] == [(5, "dense"), (5, "psa"), (6, "topk@0.3")]
    assert sorted(map(str, without_times(cells))) == sorted(map(str, without_times(whole)))
    again, seen, _ = go(tokenizer, work, path)
    assert not seen and without_times(again) == without_times(cells)


def test_a_file_is_only_changed_when_something_is_added(tmp_path):
    path, one = tmp_path / "cells.jsonl", cell("psa", [score(2)])
    two, three = dataclasses.replace(one, seed=1), dataclasses.replace(one, seed=2)
    file = CellFile(path, {})
    file.add(one)
    file.add(two)
    whole = path.read_bytes()
    # (what is there, what is read, what is there once a third is added)
    cases = [(whole, [one, two], whole), (whole[:-1], [one, two], whole), (whole[:-9], [one], whole[:-len(two.to_json()) - 1]),
             (whole.splitlines()[0], [], whole.splitlines(keepends=True)[0])]
    for before, cells, kept in cases:
        path.write_bytes(before)
        file = CellFile(path, {})
        assert list(file.cells.values()) == cells and path.read_bytes() == before
        file.add(three)
        file.add(dataclasses.replace(three, seed=3))
        assert path.read_bytes().startswith(kept + three.to_json().encode() + b"\n")
        assert list(CellFile(path, {}).cells.values())[:-1] == [*cells, three]
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="nothing but blank lines"):
        CellFile(path, {})


def test_samples_are_told_apart_by_all_that_scores():
    question = FreeQuestion("q", (1, 2), ("a",), "qa_f1", 9, ("x",), ("c",))
    sample = Sample("longbench/qasper", 0, (1, 2, 3), (question,))
    others = [dict(references=("b",)), dict(metric="rouge_l"), dict(max_new_tokens=8), dict(stop=()), dict(classes=()),
              dict(prompt=(1,)), dict(name="p")]
    ids = {sample_id(dataclasses.replace(sample, questions=(dataclasses.replace(question, **other),))) for other in others}
    assert len(ids | {sample_id(sample)}) == len(others) + 1
    assert sample_id(dataclasses.replace(sample, seed=5)) == sample_id(sample)


def test_more_policies_and_samples_are_added(tokenizer, work, haystack, tmp_path):
    path = tmp_path / "cells.jsonl"
    go(tokenizer, work, path, POLICIES[:1])
    cells, seen, _ = go(tokenizer, task_work(["kl"], [500], haystack, 3), path, parse_policies("psa,psa@0.8", BASE))
    assert len(cells.cells) == 8 + 2 + 3
    assert [step.policy for step in seen] == ["dense", "psa@0.8"] * 2 + ["dense", "psa", "psa@0.8"]


def test_other_settings_texts_and_models_are_refused(tokenizer, work, tmp_path):
    path = tmp_path / "cells.jsonl"
    go(tokenizer, work[:1], path, POLICIES[:1])
    with pytest.raises(ValueError, match=r"policy 'psa', task .*threshold: 0.6 there, 0.7 now"):
        go(tokenizer, work[:1], path, parse_policies("psa", BASE.replace(threshold=0.7)))
    length, sample = work[0]
    with pytest.raises(ValueError, match="another text"):
        go(tokenizer, [(length, dataclasses.replace(sample, context=sample.context[1:]))], path, POLICIES[:1])
    with pytest.raises(ValueError, match="was simulated"):
        go(tokenizer, work[:1], path, POLICIES[:1], simulated=False)
    with pytest.raises(ValueError, match="another model .dtype: float32 there, float16 now"):
        CellFile(path, {**model_id(text_model()), "dtype": "float16"})
    path.write_text(path.read_text().replace('"task"', '"tsk"'))
    with pytest.raises(ValueError, match="cells.jsonl, line 2"):
        go(tokenizer, work, path)


def test_models_are_told_apart_by_their_weights():
    model = text_model()
    before = model_id(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    kept = weight.data.clone()
    try:
        weight.data.mul_(1.5)
        assert model_id(model) != before
    finally:
        weight.data.copy_(kept)
    assert model_id(model) == before


def test_the_caches_own_step_finds_the_same(tokenizer, work):
    ours, _, _ = go(tokenizer, work[:2], policies=parse_policies("psa/rounds,psa@0.7/cuboid_mean,topk@0.3", BASE))
    real, _, _ = go(tokenizer, work[:2], policies=parse_policies("psa,psa@0.7/cuboid_mean,topk@0.3", BASE), simulated=False)
    assert [place[1:] for place in ours.cells] == [place[1:] for place in real.cells]
    for cell, other in zip(ours.cells.values(), real.cells.values(), strict=True):
        assert not other.simulated and cell.settings == other.settings
        assert cell.blocks_read / cell.blocks_held == pytest.approx(other.blocks_read / other.blocks_held)
        for a, b in zip(cell.answers, other.answers, strict=True):
            assert (a.right, a.agreed) == (b.right, b.agreed)
            assert a.kl == pytest.approx(b.kl, rel=1e-2, abs=1e-6) and a.loss == pytest.approx(b.loss, rel=1e-4)
    with pytest.raises(ValueError, match="'oracle@0.6' exists in simulation only"):
        go(tokenizer, work[:1], simulated=False)


def test_the_caches_own_step_says_how_it_reads(tokenizer, work, monkeypatch):
    for text in ("psa/rounds", "psa@0.7/cut"):
        with pytest.raises(ValueError, match=f"leave out '{text.split('/')[1]}', or leave out --real"):
            go(tokenizer, work[:1], policies=parse_policies(text, BASE), simulated=False)
    # Kernels that are to be expected and then don't serve.
    monkeypatch.setattr(grid, "use_kernels", lambda *args: True)
    with pytest.raises(ValueError, match="decoded by 'rounds' where 'cut' was to be expected"):
        go(tokenizer, work[:1], policies=parse_policies("psa", BASE), simulated=False)


def test_the_caches_own_step_answers_every_task_and_leaves_the_model_alone(tokenizer, haystack, monkeypatch):
    model, prefills = text_model(), []
    before = (model.config._attn_implementation, model.generate)
    monkeypatch.setattr(grid, "prefill", lambda *args: prefills.append(args) or prefill(*args))
    cells, _, _ = go(tokenizer, task_work(["passkey", "needles", "copy", "kl"], [1200], haystack, 1), policies=POLICIES[:1],
                     simulated=False)
    assert (model.config._attn_implementation, model.generate) == before
    assert len(prefills) == 3                               # copy and continuation share a context
    found = [row for row in rows(cells.cells.values()) if row.policy == "psa"]
    assert [(row.task, row.questions) for row in found] == [("passkey", 1), ("needles", 8), ("copy", 3), ("kl", 1)]
    assert all(0 < row.kv_fraction < 1 and row.kl_max >= row.kl_mean > 1e-5 for row in found)
    assert all(0 < cell.coverage < 1 for cell in cells.cells.values() if cell.policy == "psa")


@pytest.mark.parametrize("simulated", [True, False], ids=["simulated", "real"])
def test_a_dense_decode_raises_and_restores_the_model(tokenizer, work, simulated):
    model = text_model()
    before = model.config._attn_implementation
    with pytest.raises(DenseDecodeError, match="min_context=2048"):
        go(tokenizer, work[:1], policies=parse_policies("psa"), simulated=simulated)
    assert model.config._attn_implementation == before and not hasattr(model, "last_psa_cache")


@pytest.mark.parametrize("simulated", [True, False], ids=["simulated", "real"])
def test_generated_answers_are_scored(tokenizer, haystack, simulated):
    context = haystack.plain(400, 0)
    question = FreeQuestion("q", tuple(haystack.encode("\n\nWhat is it?")), ("an answer",), "qa_f1", 6)
    cells, _, _ = go(tokenizer, [(500, Sample("longbench/qasper", 0, context, (question,)))], policies=POLICIES[:1],
                     simulated=simulated)
    dense, sparse = cells.cells.values()
    assert dense.answers[0].text and dense.answers[0].score == question.score(dense.answers[0].text)
    assert sparse.blocks_read < sparse.blocks_held
    row = rows(cells.cells.values())[1]
    assert row.metric == "score" and row.low is None and row.kl_mean is None and 0 < row.kv_fraction < 1
    assert "-" in rows_table([row])


# -- rows -----------------------------------------------------------------------------------------------------------


def cell(policy: str, answers, task="needles", seed=0, mass=None, read=10.0, hbm=0.2) -> Cell:
    return Cell(policy, parse_policy(policy).to_dict(), task, 4096, seed, "x", 4000, tuple(answers), read, 100.0, hbm, 0.9,
                mass or {}, (), ())


def score(right: int, kl=(0.0,), tokens=2, agreed=2) -> AnswerScore:
    return AnswerScore("q", 0.5, tokens, right, agreed, tuple(kl), 0.5)


def test_rows_add_up():
    cells = [
        cell("dense", [score(2), score(2)], read=100.0, hbm=1.0), cell("dense", [score(2), score(1)], seed=1, read=100.0),
        cell("dense", [score(0)], seed=2),
        cell("psa", [score(2, (0.1, 0.3)), score(1, (0.0, 0.0))], mass={900: 99, 100: 1}),
        cell("psa", [score(2, (0.0, 0.0)), score(1, (0.6, 0.0))], seed=1, read=30.0, hbm=0.4, mass={800: 100}),
        cell("topk@0.1", [score(2)], seed=7),               # dense attention was not asked there
    ]  # fmt: skip
    dense, psa = rows(cells)
    assert (dense.policy, dense.questions, dense.accuracy, dense.able) == ("dense", 5, 0.6, True)
    assert (psa.samples, psa.questions, psa.metric, psa.accuracy, psa.accuracy_dense) == (2, 4, "exact", 0.5, 0.75)
    assert psa.relative == pytest.approx(2 / 3) and psa.able
    assert (psa.low, psa.high) == pytest.approx((0.0676, 0.9324), abs=1e-4)
    assert psa.kl_mean == pytest.approx(1.0 / 8) and psa.kl_worst == pytest.approx(0.3) and psa.kl_max == 0.6
    assert psa.kv_fraction == 0.2 and psa.hbm_fraction == pytest.approx(0.3)
    assert psa.mass_mean == pytest.approx((99 * 0.9005 + 0.1005 + 80.05) / 200) and psa.mass_p1 == 0.8005
    assert (psa.digest, psa.stop_rule, psa.threshold) == ("channel_codes", "estimate", 0.9)
    assert psa.loss == psa.loss_dense == 0.5


def test_copy_counts_tokens_and_kl_agreement():
    cells = [cell("dense", [score(1)], task="copy"), cell("psa", [score(1, agreed=2)], task="copy"),
             cell("dense", [score(0)], task="kl"), cell("psa", [score(0, agreed=1)], task="kl")]
    copy, kl = (row for row in rows(cells) if row.policy == "psa")
    assert (copy.metric, copy.accuracy, copy.relative) == ("tokens", 0.5, 1.0)
    assert (kl.metric, kl.accuracy, kl.accuracy_dense, kl.able) == ("agreement", 0.5, 1.0, True)


def test_tasks_that_are_beyond_the_model_are_marked():
    found = rows([cell("dense", [score(0), score(2), score(0)]), cell("topk@0.1", [score(2)] * 3)])
    assert not any(row.able for row in found)
    table = rows_table(found)
    assert table.count("needles *") == 2 and "can't do the task" in table
    assert "can't do" not in rows_table(rows([cell("dense", [score(2)])]))


def test_rows_are_json():
    (row,) = rows([cell("dense", [score(2)])])
    data = json.loads(json.dumps(row.to_dict()))
    assert data["accuracy"] == 1.0 and data["mass_p1"] is None and data["threshold"] == 1.0


def test_quantiles_of_gathered_mass():
    one = cell("psa", [score(2)], mass={100: 1, 500: 98, 999: 1})
    assert mass_quantile([one], 0.01) == 0.1005 and mass_quantile([one], 0.02) == 0.5005
    assert mass_quantile([one, cell("psa", [score(2)], mass={100: 10})], 0.05) == 0.1005
    assert mass_quantile([cell("psa", [score(2)])], 0.5) is None


def test_layers_tell_their_worst_head():
    one = dataclasses.replace(cell("psa", [score(2)]), layer_kv=(0.1, 0.3), head_mass=((0.9, 0.8), (0.7, 0.9)))
    two = dataclasses.replace(one, seed=1, layer_kv=(0.2, 0.3), head_mass=((0.9, 0.9), (0.7, 0.9)))
    lines = layers_table([one, two], "psa").splitlines()[2:]
    assert [[part.strip() for part in line.strip("|").split("|")] for line in lines] == [
        ["0", "0.150", "0.875", "0.850 (head 1)"], ["1", "0.300", "0.800", "0.700 (head 0)"]]
    with pytest.raises(ValueError, match="no simulated results"):
        layers_table([one], "topk@0.1")


# -- the benchmark --------------------------------------------------------------------------------------------------


def test_the_benchmark_writes_rows_and_goes_on(tmp_path, capsys, monkeypatch):
    pytest.importorskip("triton")                           # its version is told
    from benchmarks import fidelity

    save_text_model(tmp_path / "model")
    out = tmp_path / "results" / "fidelity.json"
    arguments = ["--model", str(tmp_path / "model"), "--name", "Tiny", "--lengths", "600", "--questions", "6", "--quiet",
                 "--tasks", "needles,copy", "--policies", "psa@0.6,topk@0.3", "--device", "cpu", "--out", str(out)]
    assert fidelity.main([*arguments, "--limit-s", "0.001"]) == 0
    assert "stopped before the end" in capsys.readouterr().out and json.loads(out.read_text())["rows"] == []
    assert fidelity.main(arguments) == 0
    assert "finished" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert [(row["model"], row["task"], row["policy"], row["questions"]) for row in data["rows"]] == [
        ("Tiny", task, policy, count) for task, count in (("needles", 8), ("copy", 6))
        for policy in ("dense", "psa@0.6", "topk@0.3")]
    wanted = {"model", "task", "length", "policy", "digest", "stop_rule", "threshold", "questions", "accuracy", "accuracy_dense",
              "low", "high", "kl_mean", "kl_worst", "kv_fraction", "hbm_fraction", "mass_p1", "run_id", "versions"}
    assert all(wanted <= set(row) for row in data["rows"]) and str(tmp_path) not in out.read_text()
    assert fidelity.main([*arguments, "--contexts", "1"]) == 0                     # nothing new; the same rows once
    again = json.loads(out.read_text())["rows"]
    assert len(again) == 6 and {row["run_id"] for row in again} == {row["run_id"] for row in data["rows"]}
    monkeypatch.setattr(fidelity, "versions", lambda: {"torch": "0.0"})
    with pytest.raises(SystemExit):
        fidelity.main(arguments)
    assert "give another --cells" in capsys.readouterr().err and json.loads(out.read_text())["rows"] == again
    monkeypatch.undo()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        fidelity.main([*arguments, "--tasks", "juggling"])
    assert "no task 'juggling'" in capsys.readouterr().err


def test_docstrings_do_where_python_has_no_documentation(monkeypatch, tokenizer):
    from benchmarks import fidelity

    def missing(path):
        raise RuntimeError

    monkeypatch.setattr(fidelity, "load_paragraphs", missing)
    found = fidelity.paragraphs(None)
    assert len(found) == len(set(found)) and sum(map(len, found)) > 160_000        # 32K tokens and more
