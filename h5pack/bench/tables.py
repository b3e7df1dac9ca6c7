"""The tables of a bench's report, for whoever prints them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from h5pack.bench.cell import Measurement, Stored
from h5pack.bench.report import BenchReport
from h5pack.bench.swept import Swept, Variation
from h5pack.bench.wording import (
    NOT_MEASURED,
    cell_words,
    chunk_text,
    speed_text,
    spread_text,
    times_text,
)


@dataclass(frozen=True)
class Entry:
    """A place in a table.

    Attributes
    ----------
    text : str
    extra : str
        What stands smaller beside it.
    value : float or None
        Images/s, where that is what it says.
    """

    text: str
    extra: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes
    ----------
    lead : tuple of str
        What the line is about.
    entries : tuple of Entry
    mark : str
        ">": it is what is recommended; "=": it is as fast.
    """

    lead: tuple[str, ...]
    entries: tuple[Entry, ...]
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Figures in lines and columns.

    Attributes
    ----------
    title : str
    lead : tuple of str
        Heads of what the lines are about.
    groups : tuple of (str, tuple of str)
        Titles of neighbouring columns, and the heads of these.
    rows : tuple of Row
    about : str
        What the figures are.
    """

    title: str
    lead: tuple[str, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[Row, ...]
    about: str = ""


NUMBERS = ("each", "size", "batch", "window", "threads", "workers")
"""Heads of leading columns that hold numbers."""
CACHE_WORDS = {"hot": "hot (in the page cache)", "cold": "cold (dropped from the page cache)"}
_EMPTY = Entry(NOT_MEASURED)
_TELLING = (("single", "default"), ("window", "default"), ("window", "tuned"), ("window", "direct"))
"""Ways in which people read a file of their own, and ours; the other ways say the same again."""
_Columns = list[tuple[str, list[str]]]


def speed_entry(one: Measurement | None) -> Entry:
    """Median and spread of a measurement."""
    if one is None or not one.speeds:
        return _EMPTY
    return Entry(speed_text(one.median), spread_text(one.speeds), one.median)


def all_tables(report: BenchReport) -> list[Table]:
    """All tables for which there is something to show, in reading order."""
    swept = Swept(report)
    tables = [speed_table(report, swept, cache) for cache in swept.caches]
    tables.append(reads_table(report, swept))
    tables += [compression_table(report, swept, cache) for cache in swept.caches]
    tables += variation_tables(swept)
    tables.append(settings_table("other settings", swept.others, report))
    tables.append(settings_table("run-off between the fastest", report.trials, report))
    return [table for table in tables if table is not None]


def speed_table(report: BenchReport, swept: Swept, cache: str) -> Table | None:
    """Images/s of each form of chunks, for one state of the page cache."""
    forms = swept.compared()

    def entry(stored: Stored, order: str, engine: str) -> Entry:
        return speed_entry(swept.found(stored.label, order, engine, cache))

    columns = _columns(swept, forms, lambda label, order, engine: swept.found(label, order, engine, cache) is not None)
    if not columns:
        return None
    title = f"images/s, {CACHE_WORDS.get(cache, cache)}"
    return _grid(title, report, forms, columns, entry)


def reads_table(report: BenchReport, swept: Swept) -> Table | None:
    """Amplification and chunk hits, as far as they are known; a range where hot and cold differ clearly."""
    forms = swept.compared()

    def known(label: str, order: str, engine: str) -> tuple[list[float], list[float]]:
        found = [one for cache in swept.caches if (one := swept.found(label, order, engine, cache)) is not None]
        return (
            [one.amplification for one in found if one.amplification is not None],
            [100 * one.hit_rate for one in found if one.hit_rate is not None],
        )

    def entry(stored: Stored, order: str, engine: str) -> Entry:
        reads, hits = known(stored.label, order, engine)
        return Entry(_range_text(reads, ".2f", "x") or NOT_MEASURED, _range_text(hits, ".0f", "%"))

    columns = _columns(swept, forms, lambda label, order, engine: any(known(label, order, engine)))
    if not columns:
        return None
    about = "Bytes asked of the system for each byte handed out, and rows that came with another of their chunk."
    table = _grid("amplification and chunk hits", report, forms, columns, entry)
    return dataclasses.replace(table, about=about)


def _range_text(values: Sequence[float], form: str, unit: str) -> str:
    """Values that hardly differ as their mean, others as a range; nothing where there are none."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high - low <= 0.1 * high:
        low = high = sum(values) / len(values)
    texts = dict.fromkeys(f"{value:{form}}" for value in (low, high))
    return "..".join(texts) + unit


def compression_table(report: BenchReport, swept: Swept, cache: str) -> Table | None:
    """Images/s of compressed chunks beside those that are not, for one state of the page cache."""
    forms = swept.compressed()
    compressed = [stored for stored in forms if stored.compression != swept.compression]
    if not compressed:
        return None

    def entry(stored: Stored, order: str, engine: str) -> Entry:
        return speed_entry(swept.found(stored.label, order, engine, cache))

    columns = _columns(
        swept, compressed, lambda label, order, engine: swept.found(label, order, engine, cache) is not None
    )
    if not columns:
        return None
    table = _grid(f"compression: images/s, {CACHE_WORDS.get(cache, cache)}", report, forms, columns, entry)
    sizes = [f"{stored.overhead:.2f}" for stored in forms]
    rows = [dataclasses.replace(row, lead=(*row.lead, size)) for row, size in zip(table.rows, sizes, strict=True)]
    about = "Size: bytes in the file for each byte of the images."
    return dataclasses.replace(table, lead=(*table.lead, "size"), rows=tuple(rows), about=about)


def variation_tables(swept: Swept) -> list[Table]:
    """One table for each setting that was varied by itself: batch, window, threads, workers."""
    found: dict[str, list[Variation]] = {}
    for variation in swept.variations():
        found.setdefault(variation.name, []).append(variation)
    titles = {
        "batch": "rows a batch",
        "window": "chunks a window",
        "threads": "reading threads",
        "workers": "workers of a DataLoader",
    }
    tables = []
    for name, variations in found.items():
        values = sorted(
            {value for variation in variations for value in variation.values},
            key=lambda value: -1 if value is None else value,
        )
        heads = tuple("without" if value is None else f"{value:,}" for value in values)
        rows = tuple(
            Row(
                (cell_words(variation.cell),),
                tuple(speed_entry(variation.values.get(value)) for value in values),
            )
            for variation in variations
        )
        tables.append(Table(f"images/s by {titles[name]}", ("",), (("", heads),), rows))
    return tables


_SETTINGS: tuple[tuple[str, str], ...] = (
    ("stored", "chunks"),
    ("order", "order"),
    ("engine", "engine"),
    ("cache", "page cache"),
    ("batch", "batch"),
    ("window", "window"),
    ("threads", "threads"),
    ("workers", "workers"),
)


def settings_table(title: str, measurements: Sequence[Measurement], report: BenchReport) -> Table | None:
    """Measurements with all settings in which they differ, the fastest first."""
    if not measurements:
        return None
    ordered = sorted(measurements, key=lambda one: -one.median)
    cells = [one.cell for one in ordered]
    differing, common = [], []
    for name, words in _SETTINGS:
        values = [getattr(cell, name) for cell in cells]
        if name == "stored" or len(set(values)) > 1:
            differing.append((name, words))
        elif values[0] is not None:
            common.append(f"{words} {values[0]}")
    rows = tuple(
        Row(
            tuple(NOT_MEASURED if (value := getattr(cell, name)) is None else str(value) for name, _ in differing),
            (speed_entry(one),),
            _mark(cell.stored, report),
        )
        for one, cell in zip(ordered, cells, strict=True)
    )
    about = f"All with {', '.join(common)}." if common else ""
    return Table(title, tuple(words for _, words in differing), (("", ("images/s",)),), rows, about)


def loss_table(report: BenchReport) -> Table | None:
    """What a file of other making loses, in ways in which both it and what would become of it were measured."""
    swept = Swept(report)
    own = next((stored for stored in swept.forms if stored.own), None)
    other = _counterpart(report, swept)
    if own is None or other is None:
        return None
    found: dict[tuple[str, str], list[Row]] = {}
    for cache in swept.caches:
        for order in swept.orders:
            for engine in swept.engines:
                before = swept.found(own.label, order, engine, cache)
                after = swept.found(other.label, order, engine, cache)
                if before is None or after is None or not before.speeds or not after.speeds:
                    continue
                ratio = Entry(times_text(after.median / before.median) + "x")
                row = Row((cache, order, engine), (speed_entry(before), speed_entry(after), ratio))
                found.setdefault((order, engine), []).append(row)
    shown = [way for way in _TELLING if way in found] or list(found)
    rows = [row for cache in swept.caches for way in shown for row in found[way] if row.lead[0] == cache]
    if not rows:
        return None
    groups = (("images/s", (own.label, other.label)), ("", ("times",)))
    return Table("what the file loses", ("page cache", "order", "engine"), groups, tuple(rows))


def _counterpart(report: BenchReport, swept: Swept) -> Stored | None:
    """What a file of other making is compared with: what is recommended, else the fastest in the window shuffle."""
    packed = {stored.label: stored for stored in swept.compared() if not stored.own}
    chosen = report.recommendation
    if chosen is not None:
        return packed.get(chosen.stored)
    speeds = {label: swept.median(label, "window", "direct", swept.caches[0]) for label in packed if swept.caches}
    measured = {label: speed for label, speed in speeds.items() if speed is not None}
    return packed[max(measured, key=lambda label: measured[label])] if measured else None


def _columns(swept: Swept, forms: Sequence[Stored], known: Callable[[str, str, str], bool]) -> _Columns:
    """Orders, and of each the engines, of which something is known of some form."""
    columns = []
    for order in swept.orders:
        engines = [engine for engine in swept.engines if any(known(form.label, order, engine) for form in forms)]
        if engines:
            columns.append((order, engines))
    return columns


def _grid(
    title: str,
    report: BenchReport,
    forms: Sequence[Stored],
    columns: _Columns,
    entry: Callable[[Stored, str, str], Entry],
) -> Table:
    rows = []
    for stored in forms:
        entries = tuple(entry(stored, order, engine) for order, engines in columns for engine in engines)
        rows.append(Row((stored.label, chunk_text(stored)), entries, _mark(stored.label, report)))
    groups = tuple((order, tuple(engines)) for order, engines in columns)
    return Table(title, ("chunks", "each"), groups, tuple(rows))


def _mark(label: str, report: BenchReport) -> str:
    chosen = report.recommendation
    if chosen is None:
        return ""
    return ">" if chosen.stored == label else "=" if label in chosen.alike else ""
