"""Plots a document: a row per metric, in it a group of servers per scenario. Needs matplotlib, which is optional."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.report import SHOWN
from loadtest.errors import UsageError

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Raises UsageError, before hours are spent, if the plot could not be drawn or written."""
    if path.suffix not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no such directory")
    if find_spec("matplotlib") is None:
        raise UsageError("drawing needs matplotlib: pip install -e '.[plot]', or leave out --plot")


def draw(document: dict[str, Any], path: Path) -> None:
    """Draws a document: bars and points are medians of the rounds, lines their ranges. Call `check_plot` before."""
    import_module("matplotlib").use("agg")
    pyplot = import_module("matplotlib.pyplot")
    sections = document["comparison"]
    names = [server["name"] for server in document["servers"] if any(server["name"] in s["servers"] for s in sections)]
    figure, rows = pyplot.subplots(
        len(SHOWN), 1, squeeze=False, figsize=(2 + 2.2 * max(2, len(sections)), 2.4 * len(SHOWN)), layout="constrained"
    )
    for axes, metric in zip(rows[:, 0], SHOWN, strict=True):
        _draw_metric(axes, metric, sections, names)
    handles, labels = rows[0, 0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)))
    figure.savefig(path)
    pyplot.close(figure)


def _draw_metric(axes: Any, metric: str, sections: list[dict[str, Any]], names: list[str]) -> None:
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        places, medians, reach = [], [], []
        for place, section in enumerate(sections):
            if (value := section["servers"].get(name, {}).get(metric)) is not None:
                median, rounds = value["median"], value["per_round"]
                places.append(place - 0.4 + (number + 0.5) * width)
                medians.append(median)
                reach.append((median - min(rounds), max(rounds) - median))
        yerr = list(zip(*reach, strict=True)) or None
        if metric.endswith(" ms"):
            axes.errorbar(places, medians, yerr, fmt="o", label=name, capsize=2)
        else:
            axes.bar(places, medians, width, label=name, yerr=yerr, capsize=2)
    if metric.endswith(" ms"):
        axes.set_yscale("log")  # peers differ by factors of ten; a bar would have no foot there
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y", alpha=0.3)
    axes.set_xlim(-0.5, max(0.5, len(sections) - 0.5))
    axes.set_xticks(range(len(sections)), [f"{section['scenario']}, {section['group']}" for section in sections])
    axes.set_ylabel(metric)
