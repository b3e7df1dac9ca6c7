"""What a bench's report says in sentences, for whoever prints it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from h5pack.bench.cell import Cell, Measurement
from h5pack.bench.report import BenchReport, Ceiling, Recommendation
from h5pack.bench.swept import Swept
from h5pack.bench.wording import (
    ENGINE_WORDS,
    ORDER_WORDS,
    cell_words,
    measured_text,
    plain,
    size_text,
    speed_words,
    times_text,
)
from h5pack.wording import counted, listed

INTERRUPTED = "interrupted: this is what was measured until then; nothing else is known"
NO_RECOMMENDATION = "no recommendation: nothing was measured that it could rest on"
_NAMED = 4


def facts(report: BenchReport) -> list[tuple[str, str]]:
    """What was asked about, on which machine, in which time: names and values."""
    kinds = {"folder": "a folder of ", "file": "a file of ", "generated": ""}
    subject = f"{plain(report.subject)}: {kinds.get(report.kind, '')}{counted(report.images, 'image')}"
    shape = " x ".join(map(str, report.row_shape))
    found = [
        ("subject", subject),
        ("rows", f"{shape}, {size_text(report.row_bytes)} each"),
        ("sample", _sample_words(report)),
        ("machine", machine_words(report.machine)),
        ("time", _time_words(report)),
    ]
    return [*found, *(("ceiling", text) for text in map(ceiling_words, report.ceilings) if text)]


def machine_words(machine: dict[str, Any]) -> str:
    """A machine in a line, as far as it is known."""
    parts = []
    if machine.get("processor"):
        parts.append(plain(str(machine["processor"])) + (" (a virtual machine)" if machine.get("virtual") else ""))
    if machine.get("cpus"):
        parts.append(counted(int(machine["cpus"]), "CPU"))
    if machine.get("memory_gb"):
        parts.append(f"{machine['memory_gb']:g} GB of memory")
    if machine.get("file_system"):
        parts.append(plain(str(machine["file_system"])))
    return ", ".join(parts) or "unknown"


def version_words(machine: dict[str, Any]) -> str:
    """Kernel, Python and packages in a line, as far as they are known."""
    parts = [f"{name} {machine[key]}" for name, key in (("Linux", "kernel"), ("Python", "python")) if machine.get(key)]
    packages = machine.get("packages") or {}
    return plain(", ".join([*parts, *(f"{name} {version}" for name, version in packages.items() if version)]))


def ceiling_words(ceiling: Ceiling) -> str:
    """A ceiling in words; nothing where it was not measured."""
    if not ceiling.speeds:
        return ""
    threads = counted(ceiling.threads, "thread")
    return f"{ceiling.name}, {threads}, {ceiling.cache}: {measured_text(ceiling.speeds)} images/s"


def highest_ceiling(report: BenchReport, cache: str) -> Ceiling | None:
    """The highest measured ceiling of a state of the page cache; None without one."""
    measured = [one for one in report.ceilings if one.cache == cache and one.speeds]
    return max(measured, key=lambda one: statistics.median(one.speeds), default=None)


def legend(report: BenchReport, chosen_sign: str, alike_sign: str) -> list[tuple[str, str]]:
    """What the tables' names and signs mean, and what all their figures have in common: names and texts."""
    swept = Swept(report)
    if not swept.orders:
        return []
    signs = "median of the repeats; ±: the farthest of them, without ±: one repeat; -: not measured"
    if report.recommendation is not None:
        signs += f"; {chosen_sign}: recommended; {alike_sign}: as fast, within what was measured"
    if report.trials:
        signs += "; what was in the run-off, by that: before each repeat its file was loaded into the page cache anew"
    found = [("figures", signs)]
    found += [("orders", f"{name}: {ORDER_WORDS[name]}") for name in swept.orders if name in ORDER_WORDS]
    found += [("engines", f"{name}: {ENGINE_WORDS[name]}") for name in swept.engines if name in ENGINE_WORDS]
    return [*found, ("all with", common_settings(swept))]


def common_settings(swept: Swept) -> str:
    """Batch, window and threads of all figures that are not said to have others."""
    batches: dict[int, set[tuple[str, str]]] = {}
    windows: dict[int, set[tuple[str, str]]] = {}
    threads: dict[int, set[tuple[str, str]]] = {}
    for cache in swept.caches:
        for order in swept.orders:
            for engine in swept.engines:
                base = swept.base(order, engine, cache)
                if base is None:
                    continue
                threads.setdefault(base.threads, set()).add((order, engine))
                if order != "single":
                    batches.setdefault(base.batch, set()).add((order, engine))
                if order == "window":
                    windows.setdefault(base.window, set()).add((order, engine))
    parts = []
    for found, words in (
        (batches, lambda value: f"batches of {counted(value, 'row')}"),
        (windows, lambda value: f"windows of {counted(value, 'chunk')}"),
        (threads, lambda value: counted(value, "thread")),
    ):
        if found:
            parts.append(_by_value(found, words))
    return "; ".join(parts)


def _by_value(found: dict[int, set[tuple[str, str]]], words: Callable[[int], str]) -> str:
    """Values, and of all but the commonest what they are of."""
    first, *rest = sorted(found, key=lambda value: -len(found[value]))
    everything = set().union(*found.values())
    others = [f"but {words(value)} for {_pairs_words(found[value], everything)}" for value in rest]
    return ", ".join([words(first), *others])


def _pairs_words(pairs: set[tuple[str, str]], everything: set[tuple[str, str]]) -> str:
    """Orders and engines in words: one alone where all of it is meant."""
    names, left = [], set(pairs)
    for axis, known in ((0, ORDER_WORDS), (1, ENGINE_WORDS)):
        for name in dict.fromkeys([*known, *sorted(pair[axis] for pair in pairs)]):
            alike = {pair for pair in everything if pair[axis] == name}
            if alike & left and alike <= pairs:
                names.append(name)
                left -= alike
    return listed([*names, *(f"{order} {engine}" for order, engine in sorted(left))])


def unmeasured(report: BenchReport) -> list[str]:
    """Why cells have no figures: each reason once, with what it holds for."""
    reasons: dict[str, list[Cell]] = {}
    for one in (*report.measurements, *report.trials):
        if one.reason is not None or not one.speeds:
            reasons.setdefault(one.reason or "the time was over before", []).append(one.cell)
    found = [f"{_cells_words(cells, report.measurements)}: {plain(reason)}" for reason, cells in reasons.items()]
    without = [stored.label for stored in report.files if stored.chunk_rows is None]
    tuned = {one.cell.stored for one in report.measurements if one.cell.engine == "tuned"}
    if tuned and without and not tuned & set(without):
        found.append(f"{listed(without)}, tuned: without chunks there is no chunk cache")
    return found


def _cells_words(cells: Sequence[Cell], measurements: Sequence[Measurement]) -> str:
    """Cells in words: what they have in common where they are all of that kind, else their names."""
    everything = [one.cell for one in measurements]
    for names in (("cache",), ("engine",), ("order",), ("stored",), ("cache", "engine"), ("cache", "order")):
        kinds = {tuple(getattr(cell, name) for name in names) for cell in cells}
        alike = [cell for cell in everything if tuple(getattr(cell, name) for name in names) in kinds]
        if len(cells) > 1 and len(kinds) == 1 and set(alike) == set(cells):
            return f"all that is {', '.join(map(str, kinds.pop()))}"
    shown = "; ".join(cell_words(cell) for cell in cells[:_NAMED])
    left = len(cells) - _NAMED
    return shown if left <= 0 else f"{shown}; and {left} more (--json lists all)"


def advice(chosen: Recommendation) -> str:
    """What to do, in a sentence."""
    if not chosen.convert:
        text = "keep the file as it is"
    elif chosen.chunk_rows is None:
        text = f"pack it as {chosen.stored}"
    else:
        kind = "" if chosen.compression == "none" else f", compressed with {chosen.compression}"
        text = f"pack it in chunks of {counted(chosen.chunk_rows, 'row')}{kind}"
    text += f", and read it with batches of {chosen.batch:,}, a window of {counted(chosen.window, 'chunk')}"
    text += f" and {counted(chosen.threads, 'thread')}"
    return f"{text[0].upper()}{text[1:]}." if chosen.sure else f"Too little was measured to be sure. Perhaps {text}."


def recommended_facts(report: BenchReport, chosen: Recommendation) -> list[tuple[str, str]]:
    """What a recommendation's figures are: names and values."""
    measured = f"{speed_words(chosen.images_per_s)} images/s, {chosen.judged_by}"
    ceiling = highest_ceiling(report, chosen.judged_by)
    if ceiling is not None:
        threads = counted(ceiling.threads, "thread")
        measured += (
            f"; {times_text(chosen.images_per_s / statistics.median(ceiling.speeds))} of the {ceiling.name} ({threads})"
        )
    loader = f"batch_size={chosen.batch} window={chosen.window} threads={chosen.threads}"
    found = [("measured", measured), ("H5Loader", loader), ("DataLoader", f"num_workers={chosen.workers}")]
    if chosen.cache is not None:
        cache = chosen.cache
        values = f"rdcc_nbytes={cache.nbytes} rdcc_nslots={cache.nslots} rdcc_w0={cache.w0:g}"
        found.append(("h5py", f"{values} ({cache.reason})"))
    return found


def _sample_words(report: BenchReport) -> str:
    if not report.sample_rows:
        return "none yet"
    return f"{counted(report.sample_rows, 'row')}, {size_text(report.sample_rows * report.row_bytes)}"


def _time_words(report: BenchReport) -> str:
    phases = {name: seconds for name, seconds in report.seconds.items() if name != "all"}
    spent = report.seconds.get("all", sum(phases.values()))
    text = f"{spent:.0f} s of {report.budget_seconds:g} s"
    if phases:
        text += f" ({', '.join(f'{name} {seconds:.1f} s' for name, seconds in phases.items())})"
    if report.pack_images_per_s is not None:
        text += f"; packed {speed_words(report.pack_images_per_s)} images/s"
    return text


def headline(report: BenchReport) -> str:
    """What a bench says, in a sentence above its picture."""
    chosen = report.recommendation
    stopped = "" if report.complete else " (interrupted)"
    if chosen is None:
        return f"Images/s by chunk size; too little was measured to recommend one{stopped}"
    form = next((one for one in report.files if one.label == chosen.stored), None)
    size = f" ({size_text(form.chunk_bytes)})" if form is not None and form.chunk_bytes and not form.own else ""
    what = "the file as it is" if not chosen.convert else f"chunks of {chosen.stored}{size}"
    text = f"{what} give {speed_words(chosen.images_per_s)} images/s in shuffled batches on this machine"
    if not chosen.convert:
        text = text.replace(" give ", " gives ", 1)
    if not chosen.sure:
        return f"Too little was measured to be sure, but perhaps {text}{stopped}"
    own = next((one.label for one in report.files if one.own), None)
    slow = Swept(report).median(own or chosen.stored, "single", "default", chosen.judged_by)
    if slow is not None and chosen.images_per_s > 1.05 * slow:
        on = " on the file as it is" if own is not None and chosen.convert else ""
        text += f", {times_text(chosen.images_per_s / slow)} times as fast as plain h5py{on}, one index a call"
    return f"{text[0].upper()}{text[1:]}{stopped}"
