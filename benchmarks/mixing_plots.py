"""Pictures and tables of mixing: labels a batch against window size, and accuracy of training in four arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_GRAY, _DARK = "#9aa0a6", "#3c4043"
_COLOURS = {"shuffled": "#1a73e8", "sorted": "#d93025"}
_PACKS = {"shuffled": "pack in shuffled order", "sorted": "pack sorted by class"}


def _order(report: dict[str, Any], shuffle: str | bool, window: int | None = None) -> dict[str, Any]:
    return next(order for order in report["orders"] if order["shuffle"] == shuffle and order["window"] == window)


def _windows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [order for order in report["orders"] if order["shuffle"] == "window"]


def _asked(report: dict[str, Any]) -> dict[str, Any]:
    return _order(report, "window", report["window"])


def _excess(report: dict[str, Any], order: dict[str, Any]) -> float:
    excess: float = order["label_distance"] / report["expected_distance"] - 1
    return excess


def _percent(share: float) -> str:
    return f"{round(100 * share):+,} %"


def _finish(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"drew {path}")


def draw_mixing(result: dict[str, Any], path: Path) -> None:
    """Label distance against window size, for both packs, with the full shuffle as a line and its band."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    reports = result["packs"]
    report = reports["sorted"]
    expected, deviation = report["expected_distance"], _order(report, "full")["batch_deviation"]
    axes.axhspan(expected - deviation, expected + deviation, color=_GRAY, alpha=0.25, lw=0)
    axes.axhline(expected, color=_GRAY, lw=1.5, label="full shuffle (band: one standard deviation of single batches)")
    for order, found in reports.items():
        windows = [one["window"] for one in _windows(found)]
        distances = [one["label_distance"] for one in _windows(found)]
        errors = [2 * one["standard_error"] for one in _windows(found)]
        label = f"window shuffle, {_PACKS[order]}"
        axes.errorbar(windows, distances, errors, color=_COLOURS[order], marker="o", ms=4, capsize=3, label=label)
    axes.axvline(report["window"], color=_DARK, lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if tick > (expected - deviation) / 2]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    windows = [one["window"] for one in _windows(report)]
    axes.set_xticks(windows, [str(window) for window in windows], fontsize=8)
    axes.annotate(" default", (report["window"], 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set_xlabel(f"window, chunks shuffled together (of {report['chunks']:,} chunks)", fontsize=8)
    axes.set_ylabel("distance of a batch's labels from all labels\n(total variation; whiskers: 2 standard errors)")
    axes.yaxis.label.set_fontsize(8)
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.22), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    shuffled, by_class = (_excess(found, _asked(found)) for found in (reports["shuffled"], report))
    axes.set_title(
        f"With window={report['window']} a batch of {report['batch_size']} mixes labels as a full shuffle does "
        f"({_percent(shuffled)})\nwhere the pack is in shuffled order; where it is sorted by class, "
        f"its labels are {100 * by_class:,.0f} % further off",
        fontsize=9,
        loc="left",
    )
    _finish(figure, path)


def draw_accuracy(result: dict[str, Any], path: Path) -> None:
    """Accuracy of every run, and the mean of each arm."""
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    seeds = result["seeds"]
    for place, arm in enumerate(result["arms"]):
        spots = [place + 0.24 * (seed / max(1, seeds - 1) - 0.5) for seed in range(seeds)]
        axes.plot(spots, [100 * score for score in arm["accuracy"]], "o", ms=5, color=_COLOURS[arm["pack"]], alpha=0.7)
        axes.hlines(100 * arm["mean"], place - 0.25, place + 0.25, color=_DARK, lw=1.5)
        axes.text(place + 0.28, 100 * arm["mean"], f"{100 * arm['mean']:.1f}", va="center", fontsize=8)
    names = {"full": "full shuffle", "window": f"window={result['training']['window']}"}
    labels = [f"{names[arm['shuffle']]}\n{_PACKS[arm['pack']]}" for arm in result["arms"]]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlim(-0.5, len(labels) - 0.3)
    axes.set_ylabel(
        f"% of {result['test_images']:,} test images named rightly\n(a point a seed, line: mean)", fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)
    shuffled, by_class = (100 * gap["mean"] for gap in result["differences"][:2])
    axes.set_title(
        f"Window shuffle less full shuffle: {shuffled:+.1f} points on a pack in shuffled order,\n"
        f"{by_class:+.1f} on one sorted by class "
        f"({result['chunks']} chunks, {result['training']['epochs']} epochs, {seeds} seeds)",
        fontsize=9,
        loc="left",
    )
    _finish(figure, path)


def mixing_table(result: dict[str, Any]) -> str:
    """The figures of mixing as a Markdown table."""
    shuffled, by_class = result["packs"]["shuffled"], result["packs"]["sorted"]
    columns = ("order", "shuffled pack: distance", "to full", "sorted pack: distance", "to full", "chunks a batch")
    where = f"{by_class['rows']:,} rows of {result['classes']} classes in {by_class['chunks']} chunks"
    known = f"a full shuffle's distance is {by_class['expected_distance']:.4f}, calculated"
    lines = [
        f"{where}, batches of {by_class['batch_size']}, {by_class['epochs']} epochs;",
        f"{known}. After ±: the standard error.",
        "",
        f"| {' | '.join(columns)} |",
        "|---|---|---|---|---|---|",
    ]
    for one, other in zip(shuffled["orders"], by_class["orders"], strict=True):
        name = {"window": f"window={one['window']}", "full": "full shuffle", False: "stored order"}[one["shuffle"]]
        cells = [
            f"{order['label_distance']:.4f} ± {order['standard_error']:.4f} | {_percent(_excess(report, order))}"
            for report, order in ((shuffled, one), (by_class, other))
        ]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {one['chunks_per_batch']:.1f} |")
    enough = [report["enough_window"] or "none" for report in (shuffled, by_class)]
    lines += ["", f"Smallest window shown to be equal: {enough[0]} (shuffled pack), {enough[1]} (sorted pack)."]
    return "\n".join(lines)


def accuracy_table(result: dict[str, Any]) -> str:
    """The figures of the training runs as a Markdown table."""
    training, mixing = result["training"], result["mixing"]
    data = f"{result['train_images']:,} images of {result['classes']} classes in {result['chunks']} chunks"
    steps = f"{result['steps']} steps with batches of {training['batch']} ({training['epochs']} epochs)"
    lines = [
        f"{data} of {result['chunk_rows']} rows, tested on {result['test_images']:,} others;",
        f"a network of {result['parameters']:,} parameters, {steps}, {result['seeds']} seeds.",
        "",
        "| pack | shuffle | accuracy, mean ± standard deviation of the seeds | labels of a batch, to a full shuffle |",
        "|---|---|---|---|",
    ]
    for arm in result["arms"]:
        report = mixing[arm["pack"]]
        order = _order(report, "full") if arm["shuffle"] == "full" else _asked(report)
        name = "full" if arm["shuffle"] == "full" else f"window={training['window']}"
        lines.append(
            f"| {arm['pack']} | {name} | {100 * arm['mean']:.1f} ± {100 * arm['deviation']:.1f} % | "
            f"{_percent(_excess(report, order))} |"
        )
    lines += ["", "Seed by seed, in points, with the standard error of the mean:"]
    lines += [
        f"- {gap['of'].replace(' ', ' pack, ')} less {gap['less'].replace(' ', ' pack, ')}: {100 * gap['mean']:+.1f} ± "
        f"{100 * gap['standard_error']:.1f}"
        for gap in result["differences"]
    ]
    return "\n".join(lines)
