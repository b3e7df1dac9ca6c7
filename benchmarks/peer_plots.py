"""The comparison with the peers as a picture, as tables, and in sentences, all made from its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_GRAY, _BLUE, _LIGHT = "#9aa0a6", "#1a73e8", "#a8c7fa"
_LARGE = "116 KB"
_OURS = "h5loader"
_FROM_FILE = "h5loader-file"
_MARGIN = 0.05


@dataclass(frozen=True)
class Column:
    """A column of the tables.

    Attributes
    ----------
    title : str
        With its unit.
    short : str
        What sentences call it.
    keys : tuple of str
        Where a way's result has it.
    digits : int
        After the point.
    unit : str
        Behind a figure in a sentence.
    least : bool
        Less is better.
    """

    title: str
    short: str
    keys: tuple[str, ...]
    digits: int
    unit: str
    least: bool

    def value(self, way: dict[str, Any]) -> float | None:
        """The figure of a way, a median where it was repeated."""
        found: Any = way
        for key in self.keys:
            found = found[key]
            if found is None:
                return None
        return float(found["median"] if isinstance(found, dict) else found)

    def said(self, way: dict[str, Any]) -> str:
        """The figure with its unit."""
        value = self.value(way)
        return "-" if value is None else f"{value:,.{self.digits}f} {self.unit}"

    def cell(self, way: dict[str, Any]) -> str:
        """The figure, with its minimum and maximum where it was repeated."""
        value = self.value(way)
        if value is None:
            return "-"
        text = f"{value:,.{self.digits}f}"
        spread = way[self.keys[0]]
        if isinstance(spread, dict) and "min" in spread:
            text += f" ({spread['min']:,.{self.digits}f} to {spread['max']:,.{self.digits}f})"
        return text

    def better(self, way: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether a way's figure is better than another's by more than the margin."""
        one, two = self.value(way), self.value(other)
        if one is None or two is None:
            return False
        return one < two * (1 - _MARGIN) if self.least else one > two * (1 + _MARGIN)


COLUMNS = (
    Column("hot: images/s", "hot", ("hot_images_per_s",), 0, "images/s", False),
    Column("cold: images/s", "cold", ("cold_images_per_s",), 0, "images/s", False),
    Column("first batch: s", "first batch", ("first_batch_seconds",), 2, "s", True),
    Column("peak memory: MB", "peak memory", ("peak_memory_mb",), 0, "MB", True),
    Column("convert: images/s", "conversion", ("convert", "images_per_s"), 0, "images/s", False),
    Column("on disk: MB", "size on disk", ("file_mb",), 0, "MB", True),
)
_HOT = COLUMNS[0]


def _measured(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The ways that were measured, the fastest first."""
    ways = [way for way in found["ways"] if not way["skipped"]]
    return sorted(ways, key=lambda way: -float(way["hot_images_per_s"]["median"]))


def _right(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of them whose epochs gave each image once."""
    return [way for way in _measured(found) if way["verified"]]


def _best(column: Column, ways: list[dict[str, Any]]) -> dict[str, Any]:
    """The way with the best figure; one without a figure loses."""
    sign = 1 if column.least else -1

    def rank(way: dict[str, Any]) -> float:
        value = column.value(way)
        return float("inf") if value is None else sign * value

    return min(ways, key=rank)


def _name(way: dict[str, Any]) -> str:
    return f"{way['way']}, {way['parallel']}"


def message(found: dict[str, Any]) -> str:
    """What the hot figures say in one sentence; empty where there is nothing to compare."""
    right = _right(found)
    ours, peers = ([way for way in right if way["ours"] is mine] for mine in (True, False))
    if not ours or not peers:
        return ""
    mine, peer = _best(_HOT, ours), _best(_HOT, peers)
    times = mine["hot_images_per_s"]["median"] / peer["hot_images_per_s"]["median"]
    rest = f"{times:.1f} times as many as the fastest peer, {peer['way']}"
    if times < 1 + _MARGIN:
        rest = f"about as many as the fastest peer, {peer['way']}"
    if times < 1 - _MARGIN:
        rest = f"fewer than {peer['way']} ({_HOT.said(peer)})"
    copied = f"{mine['hot_of_memory_copy']['median']:.2f} of the speed of copying rows in memory"
    said = f"{mine['way']} gives {_HOT.said(mine)}, {copied}:\n{rest}"
    again = next((way for way in ours if way["key"] == _FROM_FILE), mine)
    if again is mine:
        return said
    return f"{said}; {again['hot_images_per_s']['median']:,.0f} where it reads its file in every epoch, as the peers do"


def draw_peers(result: dict[str, Any], path: Path) -> None:
    """Hot images/s of every way on the large rows, or those there are, beside the memory copy."""
    name, found = _first(result)
    ways = _measured(found)
    copies = [(f"memory copy, {label}", found["ceilings"][f"memory copy {threads}"])
              for threads, label in ((2, "2 threads"), (1, "1 thread"))]  # fmt: skip
    bars = [(label, speed, _GRAY) for label, speed in copies]
    for way in ways:
        label = _name(way) + ("" if way["verified"] else " (not each image once)")
        bars.append((label, way["hot_images_per_s"], _BLUE if way["ours"] else _LIGHT))
    figure, axes = plt.subplots(figsize=(8.4, 0.6 + 0.3 * len(bars)), layout="constrained")
    most = max(float(speed["max"]) for _, speed, _ in bars)
    for place, (_, speed, colour) in enumerate(bars):
        whiskers = [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]
        axes.barh(place, speed["median"], color=colour, xerr=whiskers, capsize=2.5, ecolor="#3c4043")
        axes.text(speed["max"] + most * 0.015, place, f"{speed['median']:,.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    for tick, (_, _, colour) in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if colour == _BLUE else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"shuffled images/s, page cache warm, {name} rows (median, minimum to maximum)", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    machine = result["machine"]
    where = f"{found['rows']:,} images, batches of {result['batch']}, {machine['processor']}, {machine['cpus']} CPUs"
    figure.suptitle(f"{message(found)}\n{where}; h5pack's ways in blue", fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"drew {path}")


def _first(result: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = _LARGE if _LARGE in result["sizes"] else next(iter(result["sizes"]))
    return name, result["sizes"][name]


def where_peers_are_better(found: dict[str, Any]) -> list[str]:
    """A line for each column in which a peer's figure is better than H5Loader's by more than the margin.

    It names those that are better than all of h5pack's ways apart from those that are better than H5Loader alone.
    """
    right = _right(found)
    ours, peers = ([way for way in right if way["ours"] is mine] for mine in (True, False))
    if not ours:
        return []
    loader = next((way for way in ours if way["key"] == _OURS), ours[0])
    lines = []
    for column in COLUMNS:
        best = _best(column, ours)
        order = sorted(peers, key=lambda way: column.value(way) or 0, reverse=not column.least)
        ahead = [way for way in order if column.better(way, loader)]
        if not ahead:
            continue
        listed = [f"{way['way']} {column.said(way)}" for way in ahead if column.better(way, best)]
        rest = [f"{way['way']} {column.said(way)}" for way in ahead if not column.better(way, best)]
        line = f"{column.short} (H5Loader: {column.said(loader)}"
        line += f"; h5pack's best, {best['way']}: {column.said(best)})" if best is not loader else ")"
        parts = [", ".join(listed)] if listed else []
        parts += [f"better than H5Loader as it comes only: {', '.join(rest)}"] if rest else []
        lines.append(f"{line}: {'; '.join(parts)}")
    return lines


def where_peers_read_faster(found: dict[str, Any]) -> str:
    """Which peers are faster, hot, than H5Loader where that reads its file in every epoch, as they do; empty if none.

    As it comes, H5Loader keeps rows in memory of its own, which no peer does, and its memory is in the other column.
    """
    right = _right(found)
    again = next((way for way in right if way["key"] == _FROM_FILE), None)
    if again is None:
        return ""
    ahead = [f"{way['way']} {_HOT.said(way)}" for way in right if not way["ours"] and _HOT.better(way, again)]
    if not ahead:
        return ""
    return f"hot, where H5Loader reads its file in every epoch ({_HOT.said(again)}): {', '.join(ahead)}"


def _notes(found: dict[str, Any]) -> list[str]:
    """What a reader must know of single ways: wrong epochs, cut ones, pages that stayed, what was left out."""
    lines = ["Conversion and peak memory were measured once, one way after another: small differences say nothing."]
    for way in _measured(found):
        if not way["verified"]:
            lines.append(f"{way['way']} did not give each image once: {way['verified_reason']}.")
    cut = [f"{way['way']} {way['hot_batches']} hot and {way['cold_batches']} cold batches" for way in _measured(found)
           if not (way["hot_whole_epochs"] and way["cold_whole_epoch"])]  # fmt: skip
    if cut:
        lines.append(f"Epochs that were cut short for time, batches read at least: {', '.join(cut)}.")
    stayed = [f"{way['way']} {way['cold_pages_found_in_cache']:,} of {way['pages']:,}" for way in _measured(found)
              if way["cold_pages_found_in_cache"]]  # fmt: skip
    if stayed:
        lines.append(f"Pages that stayed in the page cache before cold epochs: {', '.join(stayed)}.")
    lines += [f"{way['way']} was skipped: {way['skipped']}." for way in found["ways"] if way["skipped"]]
    return lines


def _heading(result: dict[str, Any], name: str, found: dict[str, Any]) -> str:
    machine = result["machine"]
    where = machine["processor"] + (" (a virtual machine)" if machine["virtual"] else "") + f", {machine['cpus']} CPUs"
    repeats = next(iter(found["ceilings"].values()))["repeats"]
    return (
        f"{name} rows, {found['rows']:,} images, {found['raw_mb']:,.0f} MB of pixels, batch {result['batch']};\n"
        f"{where}, {machine['file_system']}; medians of {repeats} interleaved repeats, minimum to maximum in brackets."
    )


def peers_table(result: dict[str, Any]) -> str:
    """Every way and every figure as Markdown tables, one a row size, and where a peer is better."""
    blocks = []
    for name, found in result["sizes"].items():
        ceilings = found["ceilings"]
        lines = [_heading(result, name, found), ""]
        lines.append(f"| way | of the copy | {' | '.join(column.title for column in COLUMNS)} |")
        lines.append("|---" * (len(COLUMNS) + 2) + "|")
        for way in _measured(found):
            label = f"**{_name(way)}**" if way["ours"] else _name(way)
            cells = " | ".join(column.cell(way) for column in COLUMNS)
            lines.append(f"| {label} | {way['hot_of_memory_copy']['median']:.2f} | {cells} |")
        copies = " and ".join(f"{ceilings[f'memory copy {n}']['median']:,.0f}" for n in (1, 2))
        straight = f"{ceilings['sequential read']['median']:,.0f}"
        lines += ["", f"The ceilings in the same turns: copying rows in memory, {copies} images/s on 1 and 2 threads;"]
        lines += [f"reading a cold file from its beginning to its end, {straight} images/s."]
        lines += _notes(found)
        again = where_peers_read_faster(found)
        better = ([again] if again else []) + where_peers_are_better(found)
        if better:
            lines += ["", f"Where a peer is better than H5Loader, by more than {_MARGIN:.0%}:", ""]
            lines += [f"- {line}." for line in better]
        elif any(way["ours"] for way in _right(found)):
            lines += ["", f"In no column is a peer better than H5Loader by more than {_MARGIN:.0%}."]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def peers_summary(result: dict[str, Any]) -> str:
    """The large rows in a short table, for a first screen, and where a peer is better than all of h5pack's ways."""
    name, found = _first(result)
    lines = [_heading(result, name, found), ""]
    lines += ["| way | hot: images/s | of a memory copy | cold: images/s | first batch | peak memory | convert |"]
    lines += ["|---" * 7 + "|"]
    for way in _right(found):
        label = f"**{way['way']}**" if way["ours"] else way["way"]
        hot, cold, first, memory, convert = (column.value(way) for column in COLUMNS[:5])
        made = "-" if convert is None else f"{convert:,.0f}/s"
        lines.append(
            f"| {label} | {hot:,.0f} | {way['hot_of_memory_copy']['median']:.2f} | {cold:,.0f} | {first:.2f} s | "
            f"{memory:,.0f} MB | {made} |"
        )
    right = _right(found)
    ours, peers = ([way for way in right if way["ours"] is mine] for mine in (True, False))
    if ours:
        parts = []
        for column in COLUMNS[:5]:
            best = _best(column, ours)
            ahead = [way for way in peers if column.better(way, best)]
            if ahead:
                parts.append(f"{column.short}: {', '.join(way['way'] for way in ahead)}")
        said = [f"than every way of h5pack, in {'; '.join(parts)}"] if parts else []
        if again := where_peers_read_faster(found):
            said.insert(0, again)
        lines += ["", f"Where a peer is better by more than {_MARGIN:.0%}: {'; '.join(said)}." if said else
                  "In none of these columns is a peer better than the best of h5pack's ways."]  # fmt: skip
    return "\n".join(lines)
