"""Pictures of an evaluation: what fidelity costs, where needles are lost, and how uneven attention is. Needs matplotlib."""
from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterable, Sequence

from .cells import BLOCK_BINS, Cell
from .summary import Row

LEAST_KL = 1e-6                                             # of the axis; below it there is no difference to speak of
MARKERS = "os^vDPX*<>"


def check(*paths: str) -> None:
    """Before anything is measured, see whether plots can be drawn into these files.

    Raises:
        ImportError: matplotlib is not there; says what to install.
        ValueError: a file whose name has no ending that matplotlib draws.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hf-sparse[plots]'") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    for path in paths:
        if pathlib.Path(path).suffix[1:].lower() not in kinds:
            raise ValueError(f"{path}: a plot can't be written there; give a name that ends with one of {', '.join(kinds)}")


def _figure(rows: int, columns: int, size: tuple[float, float]):
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def pareto(rows: Sequence[Row], path: str | os.PathLike) -> None:
    """Accuracy relative to dense and mean KL against KV blocks read (what would cross the bus, too) and HBM bytes read.

    A line joins the settings of one policy; tasks that the model can't do with dense attention are left out of accuracy.

    Raises:
        ImportError: there is no matplotlib. ValueError: no row but dense ones.
    """
    rows = [row for row in rows if row.kv_fraction < 1.0 or not row.policy.startswith("dense")]
    if not rows:
        raise ValueError("nothing to plot: no policy but dense attention was measured")
    lengths, tasks, families = (list(dict.fromkeys(values)) for values in (
        (row.length for row in rows), (row.task for row in rows), (family(row.policy) for row in rows)))
    figure, axes = _figure(2 * len(lengths), 2, (13, 4 * 2 * len(lengths)))
    for place, length in enumerate(lengths):
        here = [row for row in rows if row.length == length]
        for column, (field, label) in enumerate((("kv_fraction", "KV blocks read (and over the bus), share of dense"),
                                                 ("hbm_fraction", "HBM bytes read with digests, share of dense"))):
            top, bottom = axes[2 * place][column], axes[2 * place + 1][column]
            for name, task, points in _lines(here, field):
                style = dict(color=f"C{families.index(name)}", marker=MARKERS[tasks.index(task) % len(MARKERS)], markersize=5,
                             linewidth=0.8)
                able = [(x, row.relative) for x, row in points if row.able and row.relative is not None]
                if able:
                    top.plot(*zip(*able), **style)
                diverged = [(x, max(row.kl_mean, LEAST_KL)) for x, row in points if row.kl_mean is not None]
                if diverged:
                    bottom.plot(*zip(*diverged), **style)
            top.set(xscale="log", ylabel="accuracy, relative to dense", xlabel=label, title=f"{length} tokens")
            top.axhline(0.98, color="grey", linewidth=0.8, linestyle=":")
            bottom.set(xscale="log", yscale="log", ylabel="mean KL(dense || sparse), nats", xlabel=label)
            bottom.axhline(0.01, color="grey", linewidth=0.8, linestyle=":")
    _legend(figure, families, tasks)
    figure.savefig(path, dpi=120)


def _legend(figure, families: Sequence[str], tasks: Sequence[str]) -> None:
    """Colours are policies, markers are tasks."""
    from matplotlib.lines import Line2D

    entries = [Line2D([], [], color=f"C{index}", label=name) for index, name in enumerate(families)]
    entries += [Line2D([], [], color="black", linestyle="", marker=MARKERS[index % len(MARKERS)], label=name)
                for index, name in enumerate(tasks)]
    figure.legend(handles=entries, loc="outside right upper", fontsize=8)


def _lines(rows: Sequence[Row], field: str) -> list[tuple[str, str, list[tuple[float, Row]]]]:
    """(policy without its value, task, points from left to right)"""
    lines: dict[tuple[str, str], list[tuple[float, Row]]] = {}
    for row in rows:
        x = getattr(row, field)
        if x is not None and x > 0:
            lines.setdefault((family(row.policy), row.task), []).append((x, row))
    return [(*key, sorted(points, key=lambda point: point[0])) for key, points in lines.items()]


def family(policy: str) -> str:
    """"psa@0.9/window" -> "psa/window": policies that differ in their value only."""
    return "/".join(part.partition("@")[0] for part in policy.split("/"))


def needle_map(cells: Iterable[Cell], policy: str, path: str | os.PathLike, task: str = "needles", depths: int = 10) -> None:
    """Share of right answers of one policy by depth and length; places that were not asked about stay white.

    Raises:
        ImportError: there is no matplotlib. ValueError: no such cells.
    """
    grid = needle_grid(cells, policy, task, depths)
    lengths = sorted({length for length, _ in grid})
    figure, axes = _figure(1, 1, (2 + 0.9 * len(lengths), 4.5))
    axis = axes[0][0]
    values = [[grid.get((length, depth), (math.nan, 0))[0] for length in lengths] for depth in range(depths)]
    image = axis.imshow(values, cmap="RdYlGn", vmin=0.0, vmax=1.0, aspect="auto")
    for depth in range(depths):
        for column, length in enumerate(lengths):
            if (length, depth) in grid:
                share, asked = grid[length, depth]
                axis.text(column, depth, f"{share:.2f}\n({asked})", ha="center", va="center", fontsize=6)
    axis.set(xticks=range(len(lengths)), xticklabels=lengths, xlabel="context tokens", ylabel="depth of the answer",
             yticks=range(depths), yticklabels=[f"{(depth + 0.5) / depths:.2f}" for depth in range(depths)],
             title=f"{task}, {policy}")
    figure.colorbar(image, label="share of right answers")
    figure.savefig(path, dpi=120)


def needle_grid(cells: Iterable[Cell], policy: str, task: str, depths: int) -> dict[tuple[int, int], tuple[float, int]]:
    """{(length, depth bin): (share of right answers, answers)}

    Raises:
        ValueError: no cell of this policy and task has answers with a depth.
    """
    right: dict[tuple[int, int], list[bool]] = {}
    for cell in cells:
        if cell.policy == policy and cell.task == task:
            for answer in cell.answers:
                if answer.depth is not None:
                    right.setdefault((cell.length, min(int(answer.depth * depths), depths - 1)), []).append(answer.exact)
    if not right:
        raise ValueError(f"no needle map: policy {policy!r} has not answered any question of task {task!r} that has a depth")
    return {place: (sum(flags) / len(flags), len(flags)) for place, flags in right.items()}


def blocks_needed(cells: Iterable[Cell], policy: str, path: str | os.PathLike) -> None:
    """Figure 2 of the PSA paper: how many blocks hold the wanted mass, over tokens and KV heads of each layer, and over all.

    Args:
        policy: with exact ranking, such as "oracle@0.95".

    Raises:
        ImportError: there is no matplotlib. ValueError: no cells of such a policy.
    """
    layers = block_histograms(cells, policy)
    figure, axes = _figure(1, 2, (12, 4.2))
    left, right = axes[0]
    middle = [(index + 0.5) / BLOCK_BINS for index in range(BLOCK_BINS)]
    for share, style in ((0.1, ":"), (0.5, "-"), (0.9, "--")):
        left.plot(range(len(layers)), [quantile(layer, share) for layer in layers], linestyle=style, marker=".",
                  label=f"{share:.0%} of tokens and heads need at most")
    left.set(xlabel="layer", ylabel="share of the blocks", title=policy, ylim=(0, 1))
    left.legend(fontsize=7)
    total = [sum(layer.get(index, 0) for layer in layers) for index in range(BLOCK_BINS)]
    right.bar(middle, [count / max(1, sum(total)) for count in total], width=1 / BLOCK_BINS)
    right.set(xlabel="share of the blocks", ylabel="share of tokens, heads and layers", title="all layers")
    figure.savefig(path, dpi=120)


def block_histograms(cells: Iterable[Cell], policy: str) -> list[dict[int, int]]:
    """Of each layer, how often a token and KV head read which share of the blocks.

    Raises:
        ValueError: no cell of this policy has recorded it.
    """
    found = [cell for cell in cells if cell.policy == policy and cell.layer_blocks]
    if not found:
        raise ValueError(f"policy {policy!r} has no cells that record blocks by layer; measure one with exact ranking, such as "
                         "oracle@0.95")
    layers: list[dict[int, int]] = [{} for _ in found[0].layer_blocks]
    for cell in found:
        for layer, counts in zip(layers, cell.layer_blocks):
            for index, count in counts.items():
                layer[index] = layer.get(index, 0) + count
    return layers


def quantile(histogram: dict[int, int], share: float) -> float:
    """Middle of the bin below or in which `share` of the counts lie."""
    seen, total = 0, sum(histogram.values())
    for index in sorted(histogram):
        seen += histogram[index]
        if seen >= share * total:
            return (index + 0.5) / BLOCK_BINS
    return 1.0
