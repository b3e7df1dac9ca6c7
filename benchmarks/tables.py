"""The Markdown tables of the docs, made from the committed results."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from h5pack.benchmark.cases import CaseRepeats, FileVariant, Measurement, SweepTable
from h5pack.benchmark.loader_settings import ratio_text
from h5pack.benchmark.report import BenchReport
from h5pack.system.text import counted

_WAYS = (
    ("H5Loader, window", "window", "direct"),
    ("H5Loader, full shuffle", "full", "direct"),
    ("H5Dataset, one index", "single", "direct"),
    ("h5py tuned, window", "window", "tuned"),
    ("h5py, full shuffle", "full", "default"),
    ("h5py, one index", "single", "default"),
)


_LARGE = "116 KB"
_OURS = "h5loader"
_MARGIN = 0.05
_REPEATS = "interleaved repeats, minimum to maximum in brackets."


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows))
    return [head, "|" + "---|" * len(heads), *lines]


def _ranged(found: dict[str, float], digits: int = 0) -> str:
    """A median with minimum and maximum, such as "1,234 (1,100 to 1,300)"."""
    median, low, high = (f"{found[name]:,.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def cluster_table(result: dict[str, Any]) -> str:
    """Conversions with Dask workers on one machine, and the simulation of several, as Markdown tables."""
    machine, task = result["machine"], result["task"]
    repeats = next(iter(result["images_per_s"].values()))["repeats"]
    measured = (
        f"Measured: {result['images']:,} JPEGs of 218x178, {machine['processor']}, {machine['cpus']} CPUs, "
        f"{machine['file_system']}; images/s, medians of {repeats} {_REPEATS} "
        f"All files were {'identical' if result['identical'] else 'DIFFERENT'}."
    )
    image_us = result["worker_us_per_image"]["local, 1 workers"]["median"]
    simulated = (
        f"Simulated, for tasks of {task['rows_per_task']:,} rows that take the scheduler {task['scheduler_ms']:.1f} ms "
        f"and the coordinator {task['coordinator_ms']:.1f} ms of CPU time (measured with {task['tasks']} tasks), and "
        f"{image_us:,.0f} us of a worker for each image:"
    )
    speeds = result["images_per_s"]
    heads = [name.replace("1 workers", "1 worker") for name in speeds]
    machines = [
        (one["machines"], f"{one['images_per_s']:,}", f"{one['of_ideal']:.2f}", f"{one['scheduler_busy']:.0%}",
         f"{one['coordinator_busy']:.0%}")
        for one in result["simulation"]
    ]  # fmt: skip
    lines = [measured, "", *_table(heads, [[*map(_ranged, speeds.values())]]), "", simulated, ""]
    columns = ("machines of 16 CPUs", "images/s", "of ideal", "scheduler busy", "coordinator busy")
    return "\n".join([*lines, *_table(columns, machines)])


def cluster_paper(result: dict[str, Any]) -> str:
    """What 100 million images ask of the coordinator and the scheduler, as a Markdown table."""
    paper = result["paper"]
    rows = {
        "tasks": f"{paper['write_tasks']:,} of writing, {paper['survey_tasks']:,} of the survey",
        "messages (10 a task, by Dask's protocol)": f"{paper['messages']:,}",
        "bytes of tasks and results through the scheduler": f"{paper['gigabytes_sent']:.1f} GB",
        "CPU time of the coordinator and of the scheduler": f"{60 * paper['coordinator_cpu_hours']:.0f} and "
        f"{60 * paper['scheduler_cpu_hours']:.0f} minutes",
        "memory of the coordinator while rows are written": f"{paper['coordinator_gigabytes']:.0f} GB",
        "... when it sorts the names for their table": f"{paper['coordinator_peak_gigabytes']:.0f} GB",
        "journal": f"{1000 * paper['journal_gigabytes']:,.0f} MB",
    }
    return "\n".join(_table(("100 million images", ""), rows.items()))


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['processor']}{' (a virtual machine)' * machine['virtual']}, {machine['cpus']} CPUs"


def convert_table(result: dict[str, Any]) -> str:
    """The figures of conversion as a Markdown table."""
    where = f"{_machine(result)}, {result['machine']['file_system']}"
    repeats = next(iter(result["cases"].values()))["write_seconds"]["repeats"]
    heads = (
        "decoder, writing",
        "only open, read, decode: images/s",
        "convert to the last write: images/s",
        "ratio",
        "tables, fsync, rename",
    )
    rows = []
    for case, found in result["cases"].items():
        decoder, how = case.split()
        speeds = (f"{found[f'{name}_images_per_s']['median']:,.0f}" for name in ("ceiling", "convert"))
        finish = f"{found['finish_seconds']['median']:.1f} s"
        how = "direct" if how == "auto" else how
        rows.append((f"{decoder}, {how}", *speeds, _ranged(found["ratio_to_last_write"], 2), finish))
    memory = "; ".join(
        f"{part['images']:,} images: {part['parent_mb']:.0f} MB in the converting process, "
        f"{part['largest_worker_mb']:.0f} MB in its largest worker"
        for part in result["memory"]
    )
    lines = [
        f"{result['images']:,} JPEGs of 218x178, {result['workers']} workers, {where};",
        f"medians of {repeats} {_REPEATS}",
    ]
    return "\n".join([*lines, "", *_table(heads, rows), "", f"Peak memory, {memory}."])


def way_of(found: dict[str, Any], name: str, threads: int) -> dict[str, Any]:
    return next(case for case in found["hot"] if case["case"] == name and case["threads"] == threads)


def hot_table(result: dict[str, Any]) -> str:
    """The figures of hot reading as a Markdown table."""
    repeats = next(iter(result["sizes"].values()))["hot"][0]["images_per_s"]["repeats"]
    heads = ("reader", "threads or workers", "rows", "batch", "images/s", "of the memory copy")
    rows = [
        (case["case"], case["threads"], name, case["batch"], f"{case['images_per_s']['median']:,.0f}",
         _ranged(case["of_memory_copy"], 2))
        for name, found in result["sizes"].items()
        for case in found["hot"]
    ]  # fmt: skip
    return "\n".join([f"{_machine(result)}; medians of {repeats} {_REPEATS}", "", *_table(heads, rows)])


def cold_table(result: dict[str, Any]) -> str:
    """The figures of cold reading as a Markdown table."""
    rows = []
    for name, found in result["sizes"].items():
        for case in found["cold"]["cases"]:
            label, _, threads = case["case"].partition(" | ")
            speed, ratio = f"{case['mb_per_s']['median']:,.0f}", _ranged(case["of_sequential"], 2)
            rows.append((label, threads or 1, name, speed, ratio))
    lines = _table(("reader", "threads", "rows", "MB/s", "of the sequential read"), rows)
    colds = [found["cold"] for found in result["sizes"].values()]
    pages = sum(found["pages_found_in_cache"] for found in colds)
    runs = sum(case["mb_per_s"]["repeats"] for found in colds for case in found["cases"])
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
    heads = ("compression", "bytes, of raw", "reader", "threads or workers", "images/s", "of the decoder")
    rows = [
        (name, f"{found['bytes_stored'] / found['bytes_raw']:.2f}", case["case"], case["threads"],
         f"{case['images_per_s']['median']:,.0f}", _ranged(case["of_decoder"], 2))
        for name, found in result["compressions"].items()
        for case in found["cases"]
    ]  # fmt: skip
    return "\n".join(_table(heads, rows))


def foreign_table(result: dict[str, Any]) -> str:
    """Reading files made by other tools, before and after converting, as a Markdown table."""
    heads = (
        "file", "reader", "before: images/s", "after convert: images/s", "times as fast", "converted at: images/s"
    )  # fmt: skip
    rows = []
    for name, found in result["files"].items():
        speeds = {(case["when"], case["case"]): case["images_per_s"] for case in found["cases"]}
        for case in dict.fromkeys(case for _, case in speeds):
            before, after = speeds["before", case], speeds["after", case]
            ratio, converted = f"{after['median'] / before['median']:.1f}", f"{found['convert_images_per_s']:,.0f}"
            rows.append((name, case, _ranged(before), _ranged(after), ratio, converted))
    return "\n".join(_table(heads, rows))


def normalize_table(result: dict[str, Any]) -> str:
    """The figures of normalizing on a device as a Markdown table."""
    size, batch = result["settings"]["size"], result["settings"]["batch"]
    rows = []
    for case in result["normalize"]["cases"]:
        of_copy = "-" if case["of_copy"] is None else f"{case['of_copy']['median']:.2f}"
        speeds = _ranged(case["images_per_s"]), f"{case['gb_per_s']['median']:.1f}"
        rows.append((case["precision"], case["augmentation"], *speeds, of_copy))
    heads = ("result", "augmentation", "images/s", "GB/s, read and written", "of a copy on the device")
    first = f"On {result['device']}, batches of {batch} images of {size}x{size}:"
    return "\n".join([first, "", *_table(heads, rows)])


def training_table(result: dict[str, Any]) -> str:
    """The figures of training on a GPU, fed in several ways, as a Markdown table."""
    training = result["training"]
    batch, size, workers = (training[name] for name in ("batch", "size", "workers"))
    machine = f"{result['device']} and {result['machine']['cpus']} CPUs"
    rows = []
    for network, cases in training["networks"].items():
        for name, case in cases.items():
            cpu_seconds = case["cpu_seconds"] / (case["steps"] * batch) * 1000
            waiting, busy = f"{100 * case['stall_fraction']:.1f} %", f"{case['gpu']['mean_percent']:.0f} %"
            rows.append((network, name, f"{case['images_per_s']:,.0f}", waiting, busy, f"{cpu_seconds:.2f}"))
    first = f"{machine}, batches of {batch} images of {size}x{size}, bfloat16, {workers} workers decode the JPEG files:"
    heads = ("network", "batches", "images/s", "waiting for data", "GPU busy", "CPU seconds for 1,000 images")
    return "\n".join([first, "", *_table(heads, rows)])


def hot_chunk_table(result: dict[str, Any]) -> str:
    """Images/s of every form of chunks with a warm page cache, as a Markdown table."""
    report = BenchReport.from_json(result)
    table = SweepTable(report.measurements, report.variants, report.run_off)
    rows = [
        (_variant_text(one, report), *(_speed_cell(table.found(one.label, *names, "hot")) for _, *names in _WAYS))
        for one in _made(report)
    ]
    return "\n".join(_table(("chunks", *(name for name, _, _ in _WAYS)), rows))


def cold_chunk_table(result: dict[str, Any]) -> str:
    """Images/s of H5Loader with a cold page cache, and their ratios to the default's, as a Markdown table."""
    report = BenchReport.from_json(result["cold"])
    again = {one.case: one for one in report.run_off}
    loaders = [one for one in report.measurements if one.speeds and one.case.num_workers is None]
    found = {one.case.variant: CaseRepeats.of(one, again.get(one.case)) for one in loaders}
    chosen = None if report.recommendation is None else found[report.recommendation.variant]
    rows = []
    for variant in _made(report):
        if variant.label in found:
            one = found[variant.label]
            ratio = "-"
            if chosen is not None and one is not chosen and (ratios := one.ratios(chosen)):
                turns = len(one.ratios(chosen, all_turns=True))
                ratio = f"{ratio_text(ratios)}, {counted(turns, 'turn')}"
            rows.append((_variant_text(variant, report), _range_text(one.stated), ratio))
    return "\n".join(_table(("chunks", "images/s", "of the speed of the default"), rows))


def _made(report: BenchReport) -> list[FileVariant]:
    """Return the file variants that `convert` can make: those with chunks."""
    return [one for one in report.variants if one.chunk_rows is not None]


def _variant_text(variant: FileVariant, report: BenchReport) -> str:
    size = "" if variant.chunk_bytes is None else f", {variant.chunk_bytes / 2**20:.2g} MiB"
    chosen = report.recommendation is not None and report.recommendation.variant == variant.label
    return f"**{variant.label}**{size}" if chosen else f"{variant.label}{size}"


def _range_text(one: Measurement) -> str:
    return _ranged({"median": one.median, "min": min(one.speeds), "max": max(one.speeds)})


def _speed_cell(one: Measurement | None) -> str:
    if one is None or not one.speeds:
        return "-"
    reads = "" if one.amplification is None or one.amplification < 1.05 else f", {one.amplification:.1f}x read"
    return f"{one.median:,.0f}{reads}"


def chunk_size_about(result: dict[str, Any]) -> str:
    """The machine, the images, and the ceilings of the run, as a sentence."""
    where, report = _machine(result), BenchReport.from_json(result)
    rows = " x ".join(str(size) for size in report.row_shape)
    ceilings = "; ".join(
        f"{one.name}, {counted(one.num_threads, 'thread')}: {statistics.median(one.speeds):,.0f}"
        for one in report.ceilings
    )
    return (
        f"{where}, {result['machine']['file_system']}; {report.sample_rows:,} images of "
        f"{rows}, batches of 256, windows of 16 chunks; medians, images/s. Ceilings: {ceilings}."
    )


def run_off_table(result: dict[str, Any]) -> str:
    """The run-off: chunks, threads and workers, as a Markdown table."""
    rows = []
    for one in sorted(BenchReport.from_json(result).run_off, key=lambda one: -one.median):
        reader = f"H5Loader, {counted(one.case.num_threads, 'thread')}"
        if one.case.num_workers is not None:
            reader = f"H5Dataset in a DataLoader, {counted(one.case.num_workers, 'worker')}"
        rows.append((one.case.variant, reader, _range_text(one) if one.speeds else "-"))
    return "\n".join(_table(("chunks", "read by", "images/s"), rows))


def again_table(result: dict[str, Any]) -> str:
    """The chunk sizes of a bench, measured once more, as a Markdown table and a sentence."""
    best = result["recommended"]
    rows = [(f"**{name}**" if name == best else name, _ranged(found)) for name, found in result["images_per_s"].items()]
    last = f"{best}, as recommended: {result['of_best']:.2f} of the best."
    return "\n".join([*_table(("chunks", "images/s"), rows), "", last])


def recommendation_text(result: dict[str, Any]) -> str:
    """What the bench said in the end."""
    report = BenchReport.from_json(result)
    if report.recommendation is None:
        return "Nothing was recommended."
    reasons = (report.headline(), *report.recommendation.reasons)
    command = f"$ {report.recommendation.command}"
    return "\n".join([*(f"- {reason}" for reason in reasons), "", "```console", command, "```"])


def echoing_table(result: dict[str, Any]) -> str:
    """The arms as a table, for the docs."""
    setting = result["setting"]
    unslowed = next(arm for arm in result["arms"] if not arm["slowed"])["seconds"]["median"]
    slow = f"{setting['slowdown']:g}x slower than the step"
    heads = [
        "factor, loader",
        f"seconds to {setting['target']:.0%}",
        "beside a fast loader",
        "epochs of fresh images",
        "steps",
        "showings of a batch",
        "time spent waiting",
    ]
    rows = []
    for arm in result["arms"]:
        seconds = arm["seconds"]
        reached = sum(run["reached"] for run in arm["runs"])
        missed = "" if reached == len(arm["runs"]) else f", {reached} of {len(arm['runs'])} reached it"
        cells = [
            f"{arm['factor']}, {slow if arm['slowed'] else 'fast'}",
            _ranged(seconds, 1).replace(")", f"{missed})"),
            f"{seconds['median'] / unslowed:.1f}x",
            f"{arm['epochs']['median']:.1f}",
            f"{arm['steps']['median']:.0f}",
            f"{arm['showings']['median']:.1f}",
            f"{arm['waiting']['median']:.0%}",
        ]
        rows.append(cells)
    return "\n".join(_table(heads, rows))


def order_of(report: dict[str, Any], shuffle: str | bool, window: int | None = None) -> dict[str, Any]:
    return next(order for order in report["orders"] if order["shuffle"] == shuffle and order["window"] == window)


def asked_order(report: dict[str, Any]) -> dict[str, Any]:
    return order_of(report, "window", report["window"])


def excess(report: dict[str, Any], order: dict[str, Any]) -> float:
    excess: float = order["label_distance"] / report["expected_distance"] - 1
    return excess


def percent(share: float) -> str:
    return f"{round(100 * share):+,} %"


def mixing_table(result: dict[str, Any]) -> str:
    """The figures of mixing as a Markdown table."""
    shuffled, by_class = result["packs"]["shuffled"], result["packs"]["sorted"]
    columns = ("order", "shuffled pack: distance", "vs full", "sorted pack: distance", "vs full", "chunks a batch")
    where = f"{by_class['rows']:,} rows of {result['classes']} classes in {by_class['chunks']} chunks"
    known = f"a full shuffle's distance is {by_class['expected_distance']:.4f}, calculated"
    rows = []
    for one, other in zip(shuffled["orders"], by_class["orders"], strict=True):
        name = {"window": f"window={one['window']}", "full": "full shuffle", False: "stored order"}[one["shuffle"]]
        cells: list[str] = []
        for report, order in ((shuffled, one), (by_class, other)):
            distance = f"{order['label_distance']:.4f} ± {order['standard_error']:.4f}"
            cells += [distance, percent(excess(report, order))]
        rows.append((name, *cells, f"{one['chunks_per_batch']:.1f}"))
    enough = [report["enough_window"] or "none" for report in (shuffled, by_class)]
    lines = [
        f"{where}, batches of {by_class['batch_size']}, {by_class['epochs']} epochs;",
        f"{known}. After ±: the standard error.",
    ]
    last = f"Smallest window shown to be equal: {enough[0]} (shuffled pack), {enough[1]} (sorted pack)."
    return "\n".join([*lines, "", *_table(columns, rows), "", last])


def accuracy_table(result: dict[str, Any]) -> str:
    """The figures of the training runs as a Markdown table."""
    training, mixing = result["training"], result["mixing"]
    data = f"{result['train_images']:,} images of {result['classes']} classes in {result['chunks']} chunks"
    steps = f"{result['steps']} steps with batches of {training['batch']} ({training['epochs']} epochs)"
    lines = [
        f"{data} of {result['chunk_rows']} rows, tested on {result['test_images']:,} others;",
        f"a network of {result['parameters']:,} parameters, {steps}, {result['seeds']} seeds.",
        "",
    ]
    rows = []
    for arm in result["arms"]:
        report = mixing[arm["pack"]]
        order = order_of(report, "full") if arm["shuffle"] == "full" else asked_order(report)
        name = "full" if arm["shuffle"] == "full" else f"window={training['window']}"
        score = f"{100 * arm['mean']:.1f} ± {100 * arm['deviation']:.1f} %"
        rows.append((arm["pack"], name, score, percent(excess(report, order))))
    heads = (
        "pack", "shuffle", "accuracy, mean ± standard deviation of the seeds", "labels of a batch, to a full shuffle"
    )  # fmt: skip
    lines += [*_table(heads, rows), "", "Seed by seed, in points, with the standard error of the mean:"]
    lines += [
        f"- {gap['of'].replace(' ', ' pack, ')} less {gap['less'].replace(' ', ' pack, ')}: {100 * gap['mean']:+.1f} ± "
        f"{100 * gap['standard_error']:.1f}"
        for gap in result["differences"]
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Column:
    """A column of the tables."""

    title: str  # With its unit.
    short: str  # What sentences call it.
    keys: tuple[str, ...]  # Where a case's result has it.
    digits: int  # After the point.
    unit: str  # Behind a figure in a sentence.
    least: bool  # Less is better.

    def value(self, case: dict[str, Any]) -> float | None:
        """The figure of a case, a median where it was repeated."""
        found: Any = case
        for key in self.keys:
            found = found[key]
            if found is None:
                return None
        return float(found["median"] if isinstance(found, dict) else found)

    def said(self, case: dict[str, Any]) -> str:
        """The figure with its unit."""
        value = self.value(case)
        return "-" if value is None else f"{value:,.{self.digits}f} {self.unit}"

    def cell(self, case: dict[str, Any]) -> str:
        """The figure, with its minimum and maximum where it was repeated."""
        value, spread = self.value(case), case[self.keys[0]]
        if isinstance(spread, dict) and "min" in spread:
            return _ranged(spread, self.digits)
        return "-" if value is None else f"{value:,.{self.digits}f}"

    def better(self, case: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether a case's figure is better than another's by more than the margin."""
        one, two = self.value(case), self.value(other)
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


def measured_cases(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases that were measured, the fastest first."""
    cases = [case for case in found["cases"] if not case["skipped"]]
    return sorted(cases, key=lambda case: -float(case["hot_images_per_s"]["median"]))


def _verified(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of them whose epochs gave each image once."""
    return [case for case in measured_cases(found) if case["verified"]]


def _best(column: Column, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The case with the best figure; one without a figure loses."""
    sign = 1 if column.least else -1

    def rank(case: dict[str, Any]) -> float:
        value = column.value(case)
        return float("inf") if value is None else sign * value

    return min(cases, key=rank)


def way_name(case: dict[str, Any]) -> str:
    return f"{case['case']}, {case['parallel']}"


def peers_message(found: dict[str, Any]) -> str:
    """What the hot figures say in one sentence; empty where there is nothing to compare."""
    right = _verified(found)
    ours, peers = ([case for case in right if case["ours"] is mine] for mine in (True, False))
    if not ours or not peers:
        return ""
    mine, peer = _best(_HOT, ours), _best(_HOT, peers)
    times = mine["hot_images_per_s"]["median"] / peer["hot_images_per_s"]["median"]
    rest = f"{times:.1f} times as many as the fastest peer, {peer['case']}"
    if times < 1 + _MARGIN:
        rest = f"about as many as the fastest peer, {peer['case']}"
    if times < 1 - _MARGIN:
        rest = f"fewer than {peer['case']} ({_HOT.said(peer)})"
    copied = f"{mine['hot_of_memory_copy']['median']:.2f} of the speed of copying rows in memory"
    return f"{mine['case']} gives {_HOT.said(mine)}, {copied}:\n{rest}"


def first_size(result: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = _LARGE if _LARGE in result["sizes"] else next(iter(result["sizes"]))
    return name, result["sizes"][name]


def where_peers_are_better(found: dict[str, Any]) -> list[str]:
    """A line for each column in which a peer's figure is better than H5Loader's by more than the margin.

    It names those that are better than all of h5pack's cases apart from those that are better than H5Loader alone.
    """
    right = _verified(found)
    ours, peers = ([case for case in right if case["ours"] is mine] for mine in (True, False))
    if not ours:
        return []
    loader = next((case for case in ours if case["key"] == _OURS), ours[0])
    lines = []
    for column in COLUMNS:
        best = _best(column, ours)
        order = sorted(peers, key=lambda case: column.value(case) or 0, reverse=not column.least)
        ahead = [case for case in order if column.better(case, loader)]
        if not ahead:
            continue
        listed = [f"{case['case']} {column.said(case)}" for case in ahead if column.better(case, best)]
        rest = [f"{case['case']} {column.said(case)}" for case in ahead if not column.better(case, best)]
        line = f"{column.short} (H5Loader: {column.said(loader)}"
        line += f"; h5pack's best, {best['case']}: {column.said(best)})" if best is not loader else ")"
        parts = [", ".join(listed)] if listed else []
        parts += [f"better than H5Loader as it comes only: {', '.join(rest)}"] if rest else []
        lines.append(f"{line}: {'; '.join(parts)}")
    return lines


def _notes(found: dict[str, Any]) -> list[str]:
    """What a reader must know of single cases: wrong epochs, cut ones, pages that stayed, what was left out."""
    lines = ["Conversion and peak memory were measured once, one after another: small differences say nothing."]
    for case in measured_cases(found):
        if not case["verified"]:
            lines.append(f"{case['case']} did not give each image once: {case['verified_reason']}.")
    cut = [
        f"{case['case']} {case['hot_batches']} hot and {case['cold_batches']} cold batches"
        for case in measured_cases(found)
        if not (case["hot_whole_epochs"] and case["cold_whole_epoch"])
    ]
    if cut:
        lines.append(f"Epochs that were cut short for time, batches read at least: {', '.join(cut)}.")
    stayed = [
        f"{case['case']} {case['cold_pages_found_in_cache']:,} of {case['pages']:,}"
        for case in measured_cases(found)
        if case["cold_pages_found_in_cache"]
    ]
    if stayed:
        lines.append(f"Pages that stayed in the page cache before cold epochs: {', '.join(stayed)}.")
    lines += [f"{case['case']} was skipped: {case['skipped']}." for case in found["cases"] if case["skipped"]]
    return lines


def _heading(result: dict[str, Any], name: str, found: dict[str, Any]) -> str:
    machine, where = result["machine"], _machine(result)
    repeats = next(iter(found["ceilings"].values()))["repeats"]
    return (
        f"{name} rows, {found['rows']:,} images, {found['raw_mb']:,.0f} MB of pixels, batch {result['batch']};\n"
        f"{where}, {machine['file_system']}; medians of {repeats} {_REPEATS}"
    )


def peers_table(result: dict[str, Any]) -> str:
    """Every case and every figure as Markdown tables, one a row size, and where a peer is better."""
    blocks = []
    for name, found in result["sizes"].items():
        ceilings = found["ceilings"]
        rows = []
        for case in measured_cases(found):
            label = f"**{way_name(case)}**" if case["ours"] else way_name(case)
            of_copy = f"{case['hot_of_memory_copy']['median']:.2f}"
            rows.append((label, of_copy, *(column.cell(case) for column in COLUMNS)))
        heads = ("reader", "of the copy", *(column.title for column in COLUMNS))
        lines = [_heading(result, name, found), "", *_table(heads, rows)]
        copies = " and ".join(f"{ceilings[f'memory copy {n}']['median']:,.0f}" for n in (1, 2))
        straight = f"{ceilings['sequential read']['median']:,.0f}"
        lines += ["", f"The ceilings in the same turns: copying rows in memory, {copies} images/s on 1 and 2 threads;"]
        lines += [f"reading a cold file from its beginning to its end, {straight} images/s."]
        lines += _notes(found)
        better = where_peers_are_better(found)
        if better:
            lines += ["", f"Where a peer is better than H5Loader, by more than {_MARGIN:.0%}:", ""]
            lines += [f"- {line}." for line in better]
        elif any(case["ours"] for case in _verified(found)):
            lines += ["", f"In no column is a peer better than H5Loader by more than {_MARGIN:.0%}."]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def crops_table(result: dict[str, Any]) -> str:
    """Speeds of random crops as a Markdown table."""
    where, threads = _machine(result), result["threads"]
    names = [*threads["1"]]
    repeats, kilobytes = threads["1"][names[0]]["images_per_s"]["repeats"], f"{result['image_bytes'] / 1000:,.0f}"
    rows = []
    for name in names:
        cells: list[str] = []
        for count in ("1", "2"):
            case = threads[count][name]
            cells += [_ranged(case["images_per_s"]), f"{case['of_ceiling']['median']:.2f}"]
        peer = threads["2"][name]["of_ffcv"]
        rows.append((name, *cells, "-" if peer is None else f"{peer['median']:.2f}"))
    heads = (
        "reader", "1 thread, images/s", "of decoding alone", "2 threads, images/s", "of decoding alone", "of FFCV"
    )  # fmt: skip
    lines = [
        f"{result['images']:,} photos of up to {result['max_side']:,} pixels, {kilobytes} KB each, crops of 224x224;",
        f"{where}; medians of {repeats} {_REPEATS}",
        "",
        *_table(heads, rows),
    ]
    checked = result["checked"]
    lines += [
        "",
        f"Of {checked['crops']:,} crops of H5Loader {checked['equal']:,} equal the slow way pixel by pixel. Those with",
        f"`exact=False` differ by {checked['inexact_mean_difference']:.3f} of 255 on average.",
    ]
    return "\n".join(lines)


def several_table(result: dict[str, Any]) -> str:
    """Speeds of several packs as a Markdown table."""
    where = _machine(result)
    first = result["sizes"]["224"]
    repeats = first["loading"]["1"]["one pack"]["images_per_s"]["repeats"]
    small, sizes = result["sizes"]["32"]["rows"], ("150 KB", "3 KB")
    lines = [
        f"{result['shards']} packs beside one of the same {first['rows']:,} rows of 150 KB, and {small:,} of 3 KB;",
        f"{where}; medians of {repeats} interleaved repeats, in images/s and of the one pack.",
        "",
    ]
    rows = []
    for name in first["loading"]["1"]:
        cells = [name]
        for side, threads in itertools.product(("224", "32"), ("1", "2")):
            case = result["sizes"][side]["loading"][threads][name]
            cells += [f"{case['images_per_s']['median']:,.0f}", f"{case['of_one']['median']:.2f}"]
        rows.append(cells)
    heads = [head for size in sizes for head in (f"{size}, 1 thread", "of one", "2 threads", "of one")]
    copies = first["copying"]
    lines += [
        *_table(("H5Loader over", *heads), rows),
        "",
        f"Copying the one pack of 150 KB rows with `cp` took {copies['cp']['seconds']['median']:.1f} s, joining the 8",
        f"{copies['join']['of_cp']['median']:.1f} times as long, and appending 100 images to the one",
        f"{copies['append']['of_cp']['median']:.1f} times, with their decoding.",
    ]
    return "\n".join(lines)
