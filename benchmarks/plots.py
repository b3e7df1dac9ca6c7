"""Draw the docs' pictures and write their figures from the committed results: ``python -m benchmarks.plots``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.common import RESULTS

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


if __name__ == "__main__":
    main()
