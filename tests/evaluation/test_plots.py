"""Pictures: what goes into them, and what is said where nothing can."""
from __future__ import annotations

import builtins
import dataclasses

import pytest

from hf_sparse.evaluation import plots
from hf_sparse.evaluation.summary import rows
from tests.evaluation.test_runner import cell, score


def test_policies_of_one_kind_share_a_line():
    assert plots.family("psa@0.9") == plots.family("psa@0.8") == plots.family("psa") == "psa"
    assert plots.family("psa@0.9/window") == "psa/window" and plots.family("psa/group_stop=min@0.7") == "psa/group_stop=min"


def test_needles_are_binned_by_depth_and_length():
    answers = [dataclasses.replace(score(right), depth=depth) for right, depth in ((2, 0.0), (1, 0.05), (2, 0.99), (2, 1.0))]
    cells = [cell("psa", answers), dataclasses.replace(cell("psa", answers[:1], seed=1), length=8192), cell("dense", answers)]
    assert plots.needle_grid(cells, "psa", "needles", 10) == {(4096, 0): (0.5, 2), (4096, 9): (1.0, 2), (8192, 0): (1.0, 1)}
    with pytest.raises(ValueError, match="policy 'topk@0.1' has not answered"):
        plots.needle_grid(cells, "topk@0.1", "needles", 10)


def test_blocks_of_layers_add_up():
    one = dataclasses.replace(cell("oracle@0.95", [score(2)]), layer_blocks=({1: 2, 4: 1}, {30: 3}))
    two = dataclasses.replace(one, seed=1, layer_blocks=({1: 1}, {49: 1}))
    layers = plots.block_histograms([one, two, cell("psa", [score(2)])], "oracle@0.95")
    assert layers == [{1: 3, 4: 1}, {30: 3, 49: 1}]
    assert [plots.quantile(layers[0], share) for share in (0.1, 0.5, 0.9)] == pytest.approx([0.03, 0.03, 0.09])
    with pytest.raises(ValueError, match="oracle@0.95"):
        plots.block_histograms([cell("psa", [score(2)])], "psa")


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [cell("dense", [score(2)], read=100.0, hbm=1.0)]
    cells += [cell(f"psa@{t}", [score(2, (0.001,))], read=100 * t - 60, hbm=t - 0.4) for t in (0.7, 0.8, 0.9)]
    oracle = cell("oracle@0.95", [score(2)])
    cells.append(dataclasses.replace(oracle, layer_blocks=({10: 5}, {20: 5})))
    plots.pareto(rows(cells), tmp_path / "pareto.png")
    plots.needle_map(cells, "psa@0.8", tmp_path / "map.png")
    plots.blocks_needed(cells, "oracle@0.95", tmp_path / "blocks.png")
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("pareto", "map", "blocks"))
    with pytest.raises(ValueError, match="nothing to plot"):
        plots.pareto(rows(cells[:1]), tmp_path / "none.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"hf-sparse\[plots\]"):
        plots.blocks_needed([dataclasses.replace(cell("oracle@0.95", [score(2)]), layer_blocks=({1: 1},))], "oracle@0.95",
                            tmp_path / "x.png")


@pytest.mark.parametrize("name", ["plot", "plot.txt", "plot.png.part"])
def test_a_file_that_no_plot_can_be_is_refused_before_anything_is_measured(name):
    pytest.importorskip("matplotlib")
    plots.check("fine.png", "fine.svg")
    with pytest.raises(ValueError, match=f"{name}: a plot can't be written there.*png"):
        plots.check("fine.png", name)
