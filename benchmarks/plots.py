"""Draw the docs' pictures and write their figures from the committed results: ``python -m benchmarks.plots``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.bench_plots import again_table, chunk_size_about, chunk_size_table, recommendation_text, trials_table
from benchmarks.common import RESULTS
from benchmarks.echoing import echoing_table
from benchmarks.mixing_plots import accuracy_table, draw_accuracy, draw_mixing, mixing_table
from benchmarks.peer_plots import draw_peers, peers_summary, peers_table
from h5pack.bench.figure import draw_bench
from h5pack.bench.report import BenchReport

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "img"
_GRAY, _BLUE, _LIGHT = "#9aa0a6", "#1a73e8", "#a8c7fa"


def draw_convert(result: dict[str, Any], path: Path) -> None:
    """Conversion beside its ceiling, for both decoders and both ways of writing."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    labels: list[str] = []
    for group, decoder in enumerate(("pillow", "simplejpeg")):
        direct, buffered = result["ways"][f"{decoder} auto"], result["ways"][f"{decoder} buffered"]
        bars = [
            ("only open, read, decode", direct["ceiling_images_per_s"], _GRAY, None),
            ("h5pack convert", direct["convert_images_per_s"], _BLUE, direct["ratio_to_last_write"]),
            ("h5pack convert --io buffered", buffered["convert_images_per_s"], _LIGHT, buffered["ratio_to_last_write"]),
        ]
        for place, (label, speed, colour, ratio) in enumerate(bars):
            height = group * 4 + place
            low, high = speed["median"] - speed["min"], speed["max"] - speed["median"]
            axes.barh(height, speed["median"], color=colour, xerr=[[low], [high]], capsize=3, ecolor="#3c4043")
            text = f"{speed['median']:,.0f}" + (f"  ({ratio['median']:.2f} of the ceiling)" if ratio else "")
            axes.text(speed["max"] + 120, height, text, va="center", fontsize=8)
            labels.append(f"{label}\n({'Pillow' if decoder == 'pillow' else decoder})")
    axes.set_yticks([0, 1, 2, 4, 5, 6], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("images/s to the last write, 178x218 JPEG (median, whiskers minimum to maximum)", fontsize=8)
    axes.set_xlim(0, 1.35 * max(way["ceiling_images_per_s"]["max"] for way in result["ways"].values()))
    axes.spines[["top", "right"]].set_visible(False)
    pillow, simplejpeg = (
        result["ways"][f"{decoder} auto"]["ratio_to_last_write"]["median"] for decoder in ("pillow", "simplejpeg")
    )
    where = f"{result['workers']} workers, {result['machine']['file_system']}"
    axes.set_title(
        f"Packing {result['images']:,} images runs at {pillow:.2f} (Pillow) and {simplejpeg:.2f} (simplejpeg)\n"
        f"of the speed of decoding them and keeping nothing ({where})",
        fontsize=9,
        loc="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"drew {path}")


def convert_table(result: dict[str, Any]) -> str:
    """The figures of conversion as a Markdown table."""
    machine = result["machine"]
    repeats = next(iter(result["ways"].values()))["write_seconds"]["repeats"]
    where = (
        machine["processor"] + (" (a virtual machine)" if machine["virtual"] else "") + f", {machine['file_system']}"
    )
    columns = (
        "decoder, way of writing",
        "only open, read, decode: images/s",
        "convert to the last write: images/s",
        "ratio",
        "tables, fsync, rename",
    )
    lines = [
        f"{result['images']:,} JPEGs of 178x218, {result['workers']} workers, {where};",
        f"medians of {repeats} interleaved repeats, minimum to maximum in brackets.",
        "",
        f"| {' | '.join(columns)} |",
        "|---|---|---|---|---|",
    ]
    for way, found in result["ways"].items():
        decoder, how = way.split()
        ceiling, speed = found["ceiling_images_per_s"], found["convert_images_per_s"]
        ratio, finish = found["ratio_to_last_write"], found["finish_seconds"]
        lines.append(
            f"| {decoder}, {'direct' if how == 'auto' else how} | {ceiling['median']:,.0f} | {speed['median']:,.0f} | "
            f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) | {finish['median']:.1f} s |"
        )
    memory = "; ".join(
        f"{part['images']:,} images: {part['parent_mb']:.0f} MB in the converting process, "
        f"{part['largest_worker_mb']:.0f} MB in its largest worker"
        for part in result["memory"]
    )
    lines += ["", f"Peak memory, {memory}."]
    return "\n".join(lines)


_OURS = ("H5Loader", "H5Dataset")


def draw_read(result: dict[str, Any], path: Path) -> None:
    """Every way of reading, hot, beside the memory copy; one panel a row size."""
    figure, panels = plt.subplots(1, len(result["sizes"]), figsize=(11, 5.2), layout="constrained")
    for axes, (name, found) in zip(panels, result["sizes"].items(), strict=True):
        first = found["hot"][0]["batch"]
        ways = sorted(
            (way for way in found["hot"] if way["batch"] == first),
            key=lambda way: -float(way["images_per_s"]["median"]),
        )
        for place, way in enumerate(ways):
            speed = way["images_per_s"]
            ours = way["way"].startswith(_OURS) and "through h5py" not in way["way"]
            colour = _GRAY if way["way"] == "memory copy" else _BLUE if ours else _LIGHT
            spread = [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]
            axes.barh(place, speed["median"], color=colour, xerr=spread, capsize=2, ecolor="#3c4043")
            text = f"{speed['median']:,.0f}  ({way['of_memory_copy']['median']:.2f})"
            axes.text(speed["max"] * 1.15, place, text, va="center", fontsize=7)
        unit = {True: "workers", False: "threads"}
        labels = [f"{way['way']}, {way['threads']} {unit['DataLoader' in way['way']]}" for way in ways]
        axes.set_yticks(range(len(ways)), [label.replace("1 threads", "1 thread") for label in labels], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(ways[-1]["images_per_s"]["min"] / 3, ways[0]["images_per_s"]["max"] * 150)
        axes.set_xlabel("images/s (of the copy)", fontsize=8)
        axes.set_title(f"{name} rows, batch {first}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    ratios = [_way(found, "H5Loader", 2)["of_memory_copy"]["median"] for found in result["sizes"].values()]
    large, small = result["sizes"]
    figure.suptitle(
        f"On 2 threads H5Loader hands out shuffled batches at {ratios[0]:.2f} ({large} rows) and {ratios[1]:.2f} "
        f"({small} rows) of the speed of copying rows in memory",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"drew {path}")


def _way(found: dict[str, Any], name: str, threads: int) -> dict[str, Any]:
    return next(way for way in found["hot"] if way["way"] == name and way["threads"] == threads)


def _cell(way: dict[str, Any] | None) -> str:
    if way is None:
        return "-"
    speed, ratio = way["images_per_s"], way["of_memory_copy"]
    return f"{speed['median']:,.0f} | {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def hot_table(result: dict[str, Any], *, every_batch: bool) -> str:
    """The figures of hot reading as a Markdown table."""
    lines = [
        "| way | threads or workers | rows | batch | images/s | of the memory copy |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in result["sizes"].items():
        first = found["hot"][0]["batch"]
        for way in found["hot"]:
            if every_batch or way["batch"] == first:
                lines.append(f"| {way['way']} | {way['threads']} | {name} | {way['batch']} | {_cell(way)} |")
    return "\n".join(lines)


def cold_table(result: dict[str, Any]) -> str:
    """The figures of cold reading as a Markdown table."""
    lines = ["| way | threads | rows | MB/s | of the sequential read |", "|---|---|---|---|---|"]
    for name, found in result["sizes"].items():
        for way in found["cold"]["ways"]:
            label, _, threads = way["way"].partition(" | ")
            speed, ratio = way["mb_per_s"], way["of_sequential"]
            lines.append(
                f"| {label} | {threads or 1} | {name} | {speed['median']:,.0f} | "
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) |"
            )
    colds = [found["cold"] for found in result["sizes"].values()]
    pages = sum(found["pages_found_in_cache"] for found in colds)
    runs = sum(way["mb_per_s"]["repeats"] for found in colds for way in found["ways"])
    epochs = ", ".join(
        f"{name} rows: {found['epoch']['chunk_misses']} visits to {found['epoch']['chunks']} chunks, amplification "
        f"{found['epoch']['amplification']:.3f}"
        for name, found in result["sizes"].items()
    )
    lines += ["", f"Pages of the file in the page cache before the {runs} runs, by mincore: {pages:,} in all."]
    lines += [f"One epoch, counted: {epochs}."]
    return "\n".join(lines)


def compressed_table(result: dict[str, Any]) -> str:
    """The figures of reading compressed chunks as a Markdown table."""
    lines = [
        "| compression | bytes, of raw | way | threads or workers | images/s | of the decoder |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in result["compressions"].items():
        stored = found["bytes_stored"] / found["bytes_raw"]
        for way in found["ways"]:
            speed, ratio = way["images_per_s"], way["of_decoder"]
            lines.append(
                f"| {name} | {stored:.2f} | {way['way']} | {way['threads']} | {speed['median']:,.0f} | "
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) |"
            )
    return "\n".join(lines)


def foreign_table(result: dict[str, Any]) -> str:
    """The figures of reading other people's files, before and after converting, as a Markdown table."""
    lines = [
        "| file | way | before: images/s | after convert: images/s | times as fast | converted at: images/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in result["files"].items():
        speeds = {(way["when"], way["way"]): way["images_per_s"] for way in found["ways"]}
        for way in dict.fromkeys(way for _, way in speeds):
            before, after = speeds["before", way], speeds["after", way]
            cells = " | ".join(
                f"{one['median']:,.0f} ({one['min']:,.0f} to {one['max']:,.0f})" for one in (before, after)
            )
            ratio = after["median"] / before["median"]
            lines.append(f"| {name} | {way} | {cells} | {ratio:.1f} | {found['convert_images_per_s']:,.0f} |")
    return "\n".join(lines)


def normalize_table(result: dict[str, Any]) -> str:
    """The figures of normalising on a device as a Markdown table."""
    size, batch = result["settings"]["size"], result["settings"]["batch"]
    lines = [
        f"On {result['device']}, batches of {batch} images of {size}x{size}:",
        "",
        "| result | augmentation | images/s | GB/s, read and written | of a copy on the device |",
        "|---|---|---|---|---|",
    ]
    for way in result["normalize"]["ways"]:
        speed, size_speed, ratio = way["images_per_s"], way["gb_per_s"], way["of_copy"]
        of_copy = "-" if ratio is None else f"{ratio['median']:.2f}"
        lines.append(
            f"| {way['precision']} | {way['augmentation']} | {speed['median']:,.0f} ({speed['min']:,.0f} to "
            f"{speed['max']:,.0f}) | {size_speed['median']:.1f} | {of_copy} |"
        )
    return "\n".join(lines)


def read_summary(result: dict[str, Any]) -> str:
    """What the README says of reading: the machine, and the ways that matter."""
    machine = result["machine"]
    where = machine["processor"] + (" (a virtual machine)" if machine["virtual"] else "") + f", {machine['cpus']} CPUs"
    repeats = result["sizes"]["3 KB"]["hot"][0]["images_per_s"]["repeats"]
    lines = [
        f"{where}; page cache warm, shuffled batches, every page of a batch looked at;",
        f"medians of {repeats} interleaved repeats, minimum to maximum in brackets.",
        "",
        "| way | threads or workers | 116 KB rows: images/s | of the copy | 3 KB rows: images/s | of the copy |",
        "|---|---|---|---|---|---|",
    ]
    names = ["memory copy", "H5Loader", "H5Loader, resident='no'", "np.memmap, fancy index", "np.memmap, DataLoader"]
    names += ["H5Dataset with collate, DataLoader", "H5Dataset, DataLoader", "one index by h5py, DataLoader"]
    names += ["H5Loader, resident='no', chunks of the recipe", "H5Loader, resident='no', guessed chunks"]
    names += ["one index by h5py, chunks of the recipe, DataLoader", "one index by h5py, guessed chunks, DataLoader"]
    large, small = (found["hot"] for found in result["sizes"].values())
    for name in names:
        for threads in (1, 2):
            cells = []
            for found in (large, small):
                first = found[0]["batch"]
                matches = (way["way"] == name and way["threads"] == threads and way["batch"] == first for way in found)
                cells.append(next((way for way, match in zip(found, matches, strict=True) if match), None))
            if any(cells):
                row = " | ".join("- | -" if cell is None else _cell(cell) for cell in cells)
                lines.append(f"| {name} | {threads} | {row} |")
    return "\n".join(lines)


def update_figures(page: Path, name: str, text: str) -> None:
    """Replace what stands between a page's marks of a set of figures."""
    before, begin, rest = page.read_text().partition(f"<!-- figures: {name} -->\n")
    _, end, after = rest.partition("<!-- end figures -->")
    page.write_text(f"{before}{begin}{text}\n{end}{after}")
    print(f"updated {page}")


def main() -> None:
    result = json.loads((RESULTS / "convert.json").read_text())
    draw_convert(result, PICTURES / "convert.png")
    update_figures(ROOT / "README.md", "convert", convert_table(result))
    result = json.loads((RESULTS / "read.json").read_text())
    draw_read(result, PICTURES / "read.png")
    update_figures(ROOT / "README.md", "read", read_summary(result))
    update_figures(ROOT / "docs" / "performance.md", "hot", hot_table(result, every_batch=True))
    update_figures(ROOT / "docs" / "performance.md", "cold", cold_table(result))
    result = json.loads((RESULTS / "compressed.json").read_text())
    update_figures(ROOT / "docs" / "performance.md", "compressed", compressed_table(result))
    result = json.loads((RESULTS / "foreign.json").read_text())
    update_figures(ROOT / "docs" / "performance.md", "foreign", foreign_table(result))
    result = json.loads((RESULTS / "device.json").read_text())
    update_figures(ROOT / "docs" / "training.md", "normalize", normalize_table(result))
    result = json.loads((RESULTS / "echoing.json").read_text())
    update_figures(ROOT / "docs" / "training.md", "echoing", echoing_table(result))
    result = json.loads((RESULTS / "peers.json").read_text())
    draw_peers(result, PICTURES / "peers.png")
    update_figures(ROOT / "README.md", "peers", peers_summary(result))
    update_figures(ROOT / "docs" / "performance.md", "peers", peers_table(result))
    result = json.loads((RESULTS / "chunk_size.json").read_text())
    draw_bench(BenchReport.from_json(result), PICTURES / "chunk_size.png")
    for cache in ("hot", "cold"):
        update_figures(ROOT / "docs" / "tuning.md", f"chunks {cache}", chunk_size_table(result, cache))
    update_figures(ROOT / "docs" / "tuning.md", "chunks about", chunk_size_about(result))
    update_figures(ROOT / "docs" / "tuning.md", "run-off", trials_table(result))
    update_figures(ROOT / "docs" / "tuning.md", "recommendation", recommendation_text(result))
    result = json.loads((RESULTS / "chunk_size_again.json").read_text())
    update_figures(ROOT / "docs" / "tuning.md", "again", again_table(result))
    result = json.loads((RESULTS / "mixing.json").read_text())
    draw_mixing(result, PICTURES / "mixing.png")
    update_figures(ROOT / "docs" / "mixing.md", "mixing", mixing_table(result))
    result = json.loads((RESULTS / "accuracy.json").read_text())
    draw_accuracy(result, PICTURES / "accuracy.png")
    update_figures(ROOT / "docs" / "mixing.md", "accuracy", accuracy_table(result))


if __name__ == "__main__":
    main()
