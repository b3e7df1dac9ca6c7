"""Draw the docs' figures and write their tables from the committed results: ``python -m benchmarks.plots``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import tables
from benchmarks.common import RESULTS
from h5pack.benchmark.plots import draw_bench
from h5pack.benchmark.report import BenchReport

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "img"
_DARK, _GRAY, _BLUE, _LIGHT = "#3c4043", "#9aa0a6", "#1a73e8", "#a8c7fa"
_COLORS = {"shuffled": "#1a73e8", "sorted": "#d93025"}
_PACKS = {"shuffled": "pack in shuffled order", "sorted": "pack sorted by class"}
_OURS = ("H5Loader", "H5Dataset")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"drew {path}")


def _bar(axes: Any, place: float, speed: dict[str, float], color: str, text: str, at: float, font: float = 8) -> None:
    """Draw a bar to the median with whiskers from minimum to maximum, and a text at `at`."""
    low, high = speed["median"] - speed["min"], speed["max"] - speed["median"]
    axes.barh(place, speed["median"], color=color, xerr=[[low], [high]], capsize=2.5, ecolor=_DARK)
    axes.text(at, place, text, va="center", fontsize=font)


def draw_convert(result: dict[str, Any], path: Path) -> None:
    """Conversion beside its ceiling, for both decoders and both kinds of writing."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    speeds = ("ceiling_images_per_s", "convert_images_per_s")
    limit = 1.35 * max(case[name]["max"] for case in result["cases"].values() for name in speeds)
    labels: list[str] = []
    for group, decoder in enumerate(("pillow", "simplejpeg")):
        direct, buffered = result["cases"][f"{decoder} auto"], result["cases"][f"{decoder} buffered"]
        bars = [
            ("only open, read, decode", direct["ceiling_images_per_s"], _GRAY, None),
            ("h5pack convert", direct["convert_images_per_s"], _BLUE, direct["ratio_to_last_write"]),
            ("h5pack convert --io buffered", buffered["convert_images_per_s"], _LIGHT, buffered["ratio_to_last_write"]),
        ]
        for place, (label, speed, color, ratio) in enumerate(bars):
            text = f"{speed['median']:,.0f}" + (f"  ({ratio['median']:.2f} of the ceiling)" if ratio else "")
            _bar(axes, group * 4 + place, speed, color, text, speed["max"] + limit / 105)
            labels.append(f"{label}\n({'Pillow' if decoder == 'pillow' else decoder})")
    axes.set_yticks([0, 1, 2, 4, 5, 6], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("images/s to the last write, 218x178 JPEG (median, whiskers minimum to maximum)", fontsize=8)
    axes.set_xlim(0, limit)
    axes.spines[["top", "right"]].set_visible(False)
    pillow, simplejpeg = (
        result["cases"][f"{decoder} auto"]["ratio_to_last_write"]["median"] for decoder in ("pillow", "simplejpeg")
    )
    where = f"{result['workers']} workers, {result['machine']['file_system']}"
    axes.set_title(
        f"Packing {result['images']:,} images runs at {pillow:.2f} (Pillow) and {simplejpeg:.2f} (simplejpeg)\n"
        f"of the speed of decoding them and keeping nothing ({where})",
        fontsize=9,
        loc="left",
    )
    _save(figure, path)


def draw_read(result: dict[str, Any], path: Path) -> None:
    """Every reader, hot, beside the memory copy; one panel a row size."""
    figure, panels = plt.subplots(1, len(result["sizes"]), figsize=(11, 5.2), layout="constrained")
    for axes, (name, found) in zip(panels, result["sizes"].items(), strict=True):
        first = found["hot"][0]["batch"]
        cases = sorted(
            (case for case in found["hot"] if case["batch"] == first),
            key=lambda case: -float(case["images_per_s"]["median"]),
        )
        for place, case in enumerate(cases):
            speed = case["images_per_s"]
            ours = case["case"].startswith(_OURS) and "through h5py" not in case["case"]
            color = _GRAY if case["case"] == "memory copy" else _BLUE if ours else _LIGHT
            text = f"{speed['median']:,.0f}  ({case['of_memory_copy']['median']:.2f})"
            _bar(axes, place, speed, color, text, speed["max"] * 1.15, font=7)
        unit = {True: "workers", False: "threads"}
        labels = [f"{case['case']}, {case['threads']} {unit['DataLoader' in case['case']]}" for case in cases]
        axes.set_yticks(range(len(cases)), [label.replace("1 threads", "1 thread") for label in labels], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(cases[-1]["images_per_s"]["min"] / 3, cases[0]["images_per_s"]["max"] * 150)
        axes.set_xlabel("images/s (of the copy)", fontsize=8)
        axes.set_title(f"{name} rows, batch {first}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    ratios = [tables.way_of(found, "H5Loader", 2)["of_memory_copy"]["median"] for found in result["sizes"].values()]
    large, small = result["sizes"]
    figure.suptitle(
        f"On 2 threads H5Loader delivers shuffled batches at {ratios[0]:.2f} ({large} rows) and {ratios[1]:.2f} "
        f"({small} rows) of the speed of copying rows in memory",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    _save(figure, path)


def draw_peers(result: dict[str, Any], path: Path) -> None:
    """Hot images/s of every case on the large rows, or those there are, beside the memory copy."""
    name, found = tables.first_size(result)
    cases = tables.measured_cases(found)
    copies = [(f"memory copy, {label}", found["ceilings"][f"memory copy {threads}"])
              for threads, label in ((2, "2 threads"), (1, "1 thread"))]  # fmt: skip
    bars = [(label, speed, _GRAY) for label, speed in copies]
    for case in cases:
        label = tables.way_name(case) + ("" if case["verified"] else " (not each image once)")
        bars.append((label, case["hot_images_per_s"], _BLUE if case["ours"] else _LIGHT))
    figure, axes = plt.subplots(figsize=(8.4, 0.6 + 0.3 * len(bars)), layout="constrained")
    most = max(float(speed["max"]) for _, speed, _ in bars)
    for place, (_, speed, color) in enumerate(bars):
        _bar(axes, place, speed, color, f"{speed['median']:,.0f}", speed["max"] + most * 0.015)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    for tick, (_, _, color) in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if color == _BLUE else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"shuffled images/s, page cache warm, {name} rows (median, minimum to maximum)", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    machine = result["machine"]
    where = f"{found['rows']:,} images, batches of {result['batch']}, {machine['processor']}, {machine['cpus']} CPUs"
    figure.suptitle(f"{tables.peers_message(found)}\n{where}; h5pack in blue", fontsize=9, x=0.01, ha="left")
    _save(figure, path)


def _windows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [order for order in report["orders"] if order["shuffle"] == "window"]


def draw_mixing(result: dict[str, Any], path: Path) -> None:
    """Label distance against window size, for both packs, with the full shuffle as a line and its band."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    reports = result["packs"]
    report = reports["sorted"]
    expected, deviation = report["expected_distance"], tables.order_of(report, "full")["batch_deviation"]
    axes.axhspan(expected - deviation, expected + deviation, color=_GRAY, alpha=0.25, lw=0)
    axes.axhline(expected, color=_GRAY, lw=1.5, label="full shuffle (band: one standard deviation of single batches)")
    for order, found in reports.items():
        windows = [one["window"] for one in _windows(found)]
        distances = [one["label_distance"] for one in _windows(found)]
        errors = [2 * one["standard_error"] for one in _windows(found)]
        label = f"window shuffle, {_PACKS[order]}"
        axes.errorbar(windows, distances, errors, color=_COLORS[order], marker="o", ms=4, capsize=3, label=label)
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
    shuffled, by_class = (tables.excess(found, tables.asked_order(found)) for found in (reports["shuffled"], report))
    axes.set_title(
        f"With window={report['window']} a batch of {report['batch_size']} mixes labels as a full shuffle does "
        f"({tables.percent(shuffled)})\nwhere the pack is in shuffled order; where it is sorted by class, "
        f"its labels are {100 * by_class:,.0f} % further off",
        fontsize=9,
        loc="left",
    )
    _save(figure, path)


def draw_accuracy(result: dict[str, Any], path: Path) -> None:
    """Accuracy of every run, and the mean of each arm."""
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    seeds = result["seeds"]
    for place, arm in enumerate(result["arms"]):
        spots = [place + 0.24 * (seed / max(1, seeds - 1) - 0.5) for seed in range(seeds)]
        axes.plot(spots, [100 * score for score in arm["accuracy"]], "o", ms=5, color=_COLORS[arm["pack"]], alpha=0.7)
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
    _save(figure, path)


def pages() -> list[Path]:
    """The pages that may show figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def update_figures(name: str, text: str) -> None:
    """Replace the text between the marks of a set of figures, on every page that has them."""
    for page in pages():
        before, begin, rest = page.read_text().partition(f"<!-- figures: {name} -->\n")
        if begin:
            _, end, after = rest.partition("<!-- end figures -->")
            page.write_text(f"{before}{begin}{text}\n{end}{after}")
            print(f"updated {page}")


def main() -> None:
    found = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    draw_convert(found["convert"], PICTURES / "convert.png")
    draw_read(found["read"], PICTURES / "read.png")
    draw_peers(found["peers"], PICTURES / "peers.png")
    draw_bench(BenchReport.from_json(found["chunk_size"]), PICTURES / "chunk_size.png")
    draw_mixing(found["mixing"], PICTURES / "mixing.png")
    draw_accuracy(found["accuracy"], PICTURES / "accuracy.png")
    for name, text in all_tables(found).items():
        update_figures(name, text)


def all_tables(found: dict[str, Any]) -> dict[str, str]:
    """The text of every set of figures of the docs by its name, from the results by their names."""
    return {
        "cluster": tables.cluster_table(found["cluster"]),
        "cluster paper": tables.cluster_paper(found["cluster"]),
        "convert": tables.convert_table(found["convert"]),
        "crops": tables.crops_table(found["crops"]),
        "crops large": tables.crops_table(found["crops_large"]),
        "several": tables.several_table(found["several"]),
        "hot": tables.hot_table(found["read"]),
        "cold": tables.cold_table(found["read"]),
        "compressed": tables.compressed_table(found["compressed"]),
        "foreign": tables.foreign_table(found["foreign"]),
        "peers": tables.peers_table(found["peers"]),
        "normalize": tables.normalize_table(found["device"]),
        "normalize cpu": tables.normalize_table(found["device_cpu"]),
        "training": tables.training_table(found["device"]),
        "echoing": tables.echoing_table(found["echoing"]),
        "chunks hot": tables.hot_chunk_table(found["chunk_size"]),
        "chunks cold": tables.cold_chunk_table(found["chunk_size"]),
        "chunks about": tables.chunk_size_about(found["chunk_size"]),
        "run-off": tables.run_off_table(found["chunk_size"]),
        "recommendation": tables.recommendation_text(found["chunk_size"]),
        "again": tables.again_table(found["chunk_size_again"]),
        "mixing": tables.mixing_table(found["mixing"]),
        "accuracy": tables.accuracy_table(found["accuracy"]),
    }


if __name__ == "__main__":
    main()
