"""`BenchReport`, the result of a benchmark, as a short recommendation, as tables and as JSON."""

from __future__ import annotations

import math
import statistics
import textwrap
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from h5pack.benchmark.cases import (
    MIN_EPOCH_SECONDS,
    MIN_REPEATS,
    MIN_ROWS,
    NO_TIME,
    BenchCase,
    CaseRepeats,
    Ceiling,
    FileVariant,
    Measurement,
    SweepTable,
    is_small,
    repeats_json,
)
from h5pack.benchmark.loader_settings import epoch_text, speed_range_text
from h5pack.benchmark.recommend import WORTH, Recommendation
from h5pack.benchmark.sample import MANY_IMAGES
from h5pack.format.plans import CachePlan, plan_chunks
from h5pack.system.machine import load_text
from h5pack.system.text import counted, format_bytes, listed, printable

_WIDTH, _MAX_LINES = 100, 12  # Columns of the text, and the maximum number of lines of its reasons.
_NOISY_RATIO = 1.5
_LONG_SECONDS = 300  # A longer time budget to recommend, because with more repeats more outliers can be left out.
_Line = tuple[Measurement, list[str]]
"""A measurement, and further cells of its line in a table."""


@dataclass
class BenchReport:
    """The results of `bench`. If the benchmark is interrupted, they are the results so far, and `complete` is False."""

    source: str  #: The path, or "generated images".
    kind: str  #: "folder", "file" or "generated".
    num_images: int  #: Number of images in the dataset that the recommendation is for.
    row_shape: tuple[int, ...]
    row_bytes: int
    sample_rows: int
    budget_seconds: float
    machine: dict[str, Any]
    variants: list[FileVariant] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)  #: Results of the cases, without the run-off.
    #: Results of the run-off: the fastest variants again, then other windows and numbers of threads and workers.
    run_off: list[Measurement] = field(default_factory=list)
    faults: tuple[str, ...] = ()  #: Properties of the input file that slow down reading.
    fix: str | None = None  #: A command that fixes the faults; None without faults.
    notes: list[str] = field(default_factory=list)  #: Remarks on what was left out or assumed.
    recommendation: Recommendation | None = None  #: None if too little was measured to recommend anything.
    missing: list[str] = field(default_factory=list)  #: What else must be measured for a recommendation.
    enough_seconds: int | None = None  #: Time budget that is likely enough, if a recommendation needs a longer one.
    seconds: dict[str, float] = field(default_factory=dict)  #: Duration of each phase; "all" is the total.
    pack_images_per_s: float | None = None  #: Speed of packing; None if nothing was packed.
    load: float | None = None  #: Load average of the machine before the run; None if unknown.
    complete: bool = False
    source_images: int = 0  #: Number of images in the source, or of generated images.

    def __repr__(self) -> str:
        chosen = self.recommendation
        answer = "no recommendation" if chosen is None else f"recommended: {chosen.variant}"
        return f"<BenchReport of {self.source}: {len(self.measurements)} cases, {answer}>"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, without paths of temporary files. The keys are stable across versions."""
        return {
            "benchmark": "chunk_size",
            **asdict(self),
            "variants": [{key: value for key, value in asdict(one).items() if key != "path"} for one in self.variants],
            "ceilings": [
                {"name": one.name, "num_threads": one.num_threads, "cache": one.cache,
                 "images_per_s": repeats_json(one.speeds)} for one in self.ceilings
            ],
            "measurements": [one.to_json() for one in self.measurements],
            "run_off": [one.to_json() for one in self.run_off],
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "pack_images_per_s": None if self.pack_images_per_s is None else round(self.pack_images_per_s, 1),
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> BenchReport:
        """Make a report from the result of `to_json`; unknown top-level keys are ignored."""
        chosen = found["recommendation"]
        if chosen is not None:
            cache = None if chosen["chunk_cache"] is None else CachePlan(**chosen["chunk_cache"])
            tuples = {name: tuple(value) for name, value in chosen.items() if isinstance(value, list)}
            chosen = Recommendation(**{**chosen, **tuples, "chunk_cache": cache})
        changed = {
            "row_shape": tuple(found["row_shape"]),
            "variants": [FileVariant(path="", **one) for one in found["variants"]],
            "ceilings": [
                Ceiling(one["name"], one["num_threads"], one["cache"], tuple(one["images_per_s"]["repeats"]))
                for one in found["ceilings"]
            ],
            "measurements": [Measurement.from_json(one) for one in found["measurements"]],
            "run_off": [Measurement.from_json(one) for one in found["run_off"]],
            "faults": tuple(found["faults"]),
            "recommendation": chosen,
        }
        return cls(**{**{name: found[name] for name in cls.__dataclass_fields__ if name in found}, **changed})

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of `bench` and `to_text` that the text may recommend, such as ``seconds=60``."""
        chosen = self.recommendation
        if chosen is not None:
            given = self._more_rows, *self._longer * chosen.busy, "labels=NAME" * bool(chosen.label_note)
            return (*filter(None, given), *self._hint()[1], "full=True")
        seconds = [] if self.enough_seconds is None else [f"seconds={self.enough_seconds}"]
        return *seconds, "orders='window'", "engines='direct'", "full=True"

    def to_text(self, full: bool = False) -> str:
        """Return the answer in about 25 lines; `full` adds all reasons, tables and notes."""
        rest = [_facts(self), *_tables(self), _bullets("not measured", _unmeasured(self))] if full else []
        return "\n\n".join("\n".join(block) for block in (*_answer(self, full), *rest) if block)

    def headline(self) -> str:
        """Return the answer in one or two sentences, with the speed and the number of threads it was measured with."""
        chosen = self.recommendation
        if not self.complete and chosen is None:
            return "Interrupted before anything could be recommended."
        if chosen is None and self.enough_seconds is None:
            return "Nothing can be recommended, because the cases that decide the recommendation were not measured."
        if chosen is None:
            return f"Too little was measured to recommend anything: give seconds={self.enough_seconds} or more."
        sizes = {one.label: one.chunk_bytes for one in self.variants}
        large = f", for sets of {self._fewest_images:,} images or more" if self._fewest_images > 1 else ""
        size = f" ({format_bytes(found)}{large})" if (found := sizes.get(chosen.variant)) is not None else ""
        chunks = f"the default chunks of {chosen.variant}" if chosen.is_default else f"chunks of {chosen.variant}"
        what = f"Convert with {chunks}{size}" if chosen.convert else "Keep the input file, and read it with H5Loader"
        if chosen.is_default and chosen.chunk_rows == self.source_images < self.num_images:
            what = "Convert with the default chunks"  # Here, `chunk_rows` is limited by the number of source images.
        again = "measure again when nothing else uses the machine"
        again += f", or add {' '.join(self._longer)} to the options" if self._longer else ""
        if chosen.busy and not chosen.best_in_median:
            varies = "Speeds vary too much between repeats to say whether other chunks are faster"
            what = f"{varies}; {again}. Until then, {what[0].lower()}{what[1:]}"
        elif chosen.is_default and len(chosen.ties) > 1 and chosen.compared:
            faster = f"{100 * WORTH - 100:.0f} % faster in the median" if chosen.busy else "reliably faster"
            what = f"No chunk size is {faster}: keep the default of {chosen.variant}{size}"
            if self.kind == "file" and chosen.convert:
                what = f"Convert with {chunks}{size}; no other chunk size is {faster}"
        text = f"{what}: {speed_range_text(chosen.images_per_s, *chosen.images_per_s_range)} "
        text += f"with num_threads={chosen.num_threads}"
        if chosen.hardly_matters:
            epoch = f"an epoch of {counted(self.num_images, 'image')} takes"
            first = ", the first longer" if chosen.judged_by == "hot" else ""
            time = f"{epoch_text(self.num_images, chosen.images_per_s)}{first}"
            return f"{text}; at this speed {epoch} {time}, so other chunk sizes hardly matter."
        if not chosen.compared:
            few = f"The sample of {self.sample_rows:,} is read in {epoch_text(self.sample_rows, chosen.images_per_s)}"
            more = f"give {self._more_rows}" if self._more_rows else "there are no more images"
            return f"{text}. {few}, too short to compare chunk sizes: {more}."
        ratio = _ratio_text(chosen)
        text = f"{text}, {ratio}." if ratio else f"{text}."
        if chosen.busy and chosen.best_in_median:
            text += f" Speeds vary too much to be certain; to know more, {again}."
        return text

    @property
    def _longer(self) -> tuple[str, ...]:
        """The parameters to recommend for a more certain answer: more time, and only the cases that decide."""
        chosen, is_short = self.recommendation, 2 * self.budget_seconds <= _LONG_SECONDS
        more = f"seconds={_LONG_SECONDS if is_short else 4 * self.budget_seconds:g}"
        seconds = (more,) if is_short or (chosen is not None and chosen.busy) else ()
        if chosen is None or len({replace(one.case, variant="") for one in self.measurements}) < 2:
            return seconds
        return *seconds, "orders='window'", "engines='direct'", f"caches={chosen.judged_by!r}"

    @property
    def _more_rows(self) -> str:
        """The parameter `rows` to recommend if the sample is too small, and there are more images; else empty."""
        chosen = self.recommendation
        if chosen is None or chosen.compared or chosen.hardly_matters:
            return ""
        if self.kind == "generated":
            return f"rows={max(MIN_ROWS, math.ceil(2 * MIN_EPOCH_SECONDS * chosen.images_per_s))}"
        return f"rows={self.source_images}" if self.sample_rows < self.source_images else ""

    def _hint(self) -> tuple[str, tuple[str, ...]]:
        """Return advice on how to learn more, and the parameters that it names; both are empty without advice."""
        chosen, shape, longer = self.recommendation, self.row_shape, self._longer
        count = "N" if self.num_images == self.source_images else str(self.num_images)
        given: tuple[str, ...] = (f"num_images={count}",)
        if self._fewest_images > 1 and not self._more_rows and count == "N":
            return "Smaller sets get smaller chunks by default, which suit them; for N images, add num_images=N.", given
        if chosen is not None and chosen.unsure and longer:
            return f"For a more certain comparison, add {' '.join(longer)} to the options.", longer
        if chosen is None or chosen.compared or self._more_rows or self.kind == "generated" or len(shape) not in (2, 3):
            return "", ()
        axes = shape[1:] if len(shape) == 3 and shape[0] in (1, 3) else shape[:2]
        size, aim, few = f"size={axes[0]}x{axes[1]}", "To compare chunk sizes,", True
        if chosen.hardly_matters:
            given += (f"seconds={_LONG_SECONDS}",) * (2 * self.budget_seconds <= _LONG_SECONDS)
            if self.num_images != self.source_images:
                return "", ()
            fits = f"More than about {int(float(f'{chosen.memory_images:.2g}')):,} images may not stay in memory"
            aim = f"{fits}: to compare chunk sizes for N images,"
            is_short = self.source_images < 2 * MIN_EPOCH_SECONDS * chosen.images_per_s
            few = is_short or is_small(self.source_images, self.row_bytes)
        how = f"omit the source, which has too few images, and give {size}" if few else "give"
        return f"{aim} {how} {' '.join(given)}.", (size, *given) if few else given

    @property
    def _fewest_images(self) -> int:
        """Smallest number of images for which `h5pack.convert` makes the recommended chunks by default.

        0 if the images were not generated, or if the recommended chunks are not the default for a large dataset.
        """
        chosen, counts = self.recommendation, range(1, MANY_IMAGES + 1)
        plan = partial(plan_chunks, row_bytes=self.row_bytes, whole_pages=True)
        largest = plan(MANY_IMAGES).rows
        if self.kind != "generated" or chosen is None or not chosen.is_default or chosen.chunk_rows != largest:
            return 0
        return counts[bisect_left(counts, largest, key=lambda count: plan(count).rows)]

    def ceiling_of(self, cache: str) -> Ceiling | None:
        """Return the ceiling for a page-cache state; None if none was measured.

        If several were measured, return the one that the recommendation is compared with, or else the fastest one.
        """
        measured = [one for one in self.ceilings if one.cache == cache and one.speeds]
        chosen = self.recommendation
        if chosen is not None and chosen.ceiling_threads:
            measured = [one for one in measured if one.num_threads == chosen.ceiling_threads] or measured
        return max(measured, key=lambda one: statistics.median(one.speeds), default=None)


def _ratio_text(chosen: Recommendation) -> str:
    """Return the ratio of the recommended speed to the ceiling as text, such as "0.94 of a memory copy".

    Return an empty text if the ceiling was not measured, or if the ratio varies by more than a factor of 1.5. Except
    for cold reads of compressed files, a ratio above 1 is noise: the ceiling is not measured at the same time.
    """
    median, low, high = chosen.of_ceiling or (0.0, 0.0, math.inf)
    if high > _NOISY_RATIO * low:
        return ""
    name = "a memory copy" if chosen.judged_by == "hot" else "a sequential read"
    name += f" with {counted(chosen.ceiling_threads, 'thread')}"
    if median >= 1 and (chosen.judged_by == "hot" or chosen.compression == "none"):
        return f"as fast as {name}, within noise"
    return f"{median:.2f} of {name}"


def speed_text(speed: float) -> str:
    """Return images/s with three significant digits, such as 831, 8.31k, 83.1k or 1.52M."""
    value = float(f"{speed:.3g}")
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.3g}"


def measured_text(speeds: Sequence[float]) -> str:
    """Return the median and, with enough repeats, the largest deviation from the median, such as 83.1k ±6%.

    Without speeds, return "-".
    """
    if not speeds:
        return "-"
    median = statistics.median(speeds)
    spread = max(max(speeds) - median, median - min(speeds)) / median
    text = f" ±{100 * spread:.0f}%" if spread < 1 else " ±100%+"
    return speed_text(median) + (text if len(speeds) >= MIN_REPEATS else "")


def machine_text(machine: dict[str, Any]) -> str:
    """Return the processor, CPUs, memory and file system as text, as far as they are known."""
    processor, file_system = (printable(machine[name] or "") for name in ("processor", "file_system"))
    memory = f"{format_bytes(1e9 * machine['memory_gb'])} of memory"
    return ", ".join(filter(None, (processor, counted(machine["cpus"], "CPU"), memory, file_system)))


def _answer(report: BenchReport, full: bool) -> list[list[str]]:
    """Return blocks of lines: the answer, the command and code to use, the reasons, and what was measured."""
    shape = "x".join(map(str, report.row_shape))
    judged = f", judged for {report.num_images:,}" if report.num_images != report.source_images else ""
    about = f"{printable(report.source)}: {counted(report.source_images, 'image')}{judged}, rows of {shape} "
    about += f"({format_bytes(report.row_bytes)}), sample of {report.sample_rows:,}"
    sizes = sorted({one.chunk_rows for one in report.variants if one.chunk_rows is not None and not one.is_input})
    about += f", chunks of {listed([f'{rows:,}' for rows in sizes])} rows" if sizes else ""
    chosen, first = report.recommendation, _bullets("", [report.headline()], indent="")
    if not report.complete and chosen is not None:
        first.insert(0, "interrupted; results so far:")
    if chosen is None:
        reasons = [f"missing: {printable(text)}" for text in report.missing]
    else:
        reasons = [f"Fault of the file: {printable(text)}" for text in report.faults]
        if report.fix is not None and not chosen.convert:
            reasons.append(f"A copy without faults speeds up first epochs and other readers: {printable(report.fix)}")
        load, who = load_text(report.load), "other programs or an earlier run"
        busy = f"When bench began, the machine was busy with {who} ({load}): speeds may vary." if load else ""
        hint = report._hint()[0]
        hints = (*chosen.reasons, hint) if chosen.hardly_matters else (hint, *chosen.reasons)
        sentences = (chosen.label_note, busy, *hints)
        reasons += [printable(text) for text in sentences if text]
    typed = "" if chosen is None else f"{chosen.command}\n{chosen.code}"
    code = [f"    {line}" for line in typed.splitlines() if line]
    if not full:
        texts = [*reasons, *map(printable, report.notes)]
        lines: list[str] = []
        shown = 0
        while shown < len(texts) and len(lines) + len(wrapped := _bullets("", [texts[shown]])) <= _MAX_LINES:
            lines += wrapped
            shown += 1
        left = {"more reason": len(reasons) - shown, "more note": min(len(report.notes), len(texts) - shown)}
        more = [counted(number, what) for what, number in left.items() if number > 0]
        last = f"Shown only with full=True: {', '.join((*more, 'all figures'))}."
        return [first, code, lines, _bullets("", [about, last], indent="")]
    return [first, code, _bullets("", reasons), [about]]


def _facts(report: BenchReport) -> list[str]:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items() if name != "all")
    lines = [f"machine   {machine_text(report.machine)}"]
    lines.append(f"time      {report.seconds.get('all', 0.0):.0f} s of {report.budget_seconds:g} s ({phases})")
    lines += [f"ceiling   {one}: {measured_text(one.speeds)} images/s, {one.cache}" for one in report.ceilings]
    if report.fix is not None and report.recommendation is None:
        lines.append(f"fix       {report.fix}")
    if report.recommendation is not None and (cache := report.recommendation.chunk_cache) is not None:
        lines += _bullets("", [f"chunk cache, not measured: {cache.keywords} ({cache.reason})"], "h5py      ")
    return lines + _bullets("notes", map(printable, report.notes))


def _tables(report: BenchReport) -> list[list[str]]:
    # Leave out the run-off: it reloads the file before each repeat, so its speeds are not comparable with other cells.
    table = SweepTable(report.measurements, report.variants)
    blocks = []
    for cache in table.caches:
        rows = []
        for variant in table.variants:
            for engine in table.engines:
                found = [table.found(variant.label, order, engine, cache) for order in table.orders]
                if any(found):
                    label, chosen = variant.label, report.recommendation
                    mark = "=" if chosen is not None and chosen.compared and label in chosen.ties else " "
                    if chosen is not None and label == chosen.variant:
                        mark = ">"
                    rows.append([f"{mark} {label}", _size(variant), engine, *map(_entry, found)])
        if rows:
            title = f"images/s, page cache {cache}: median, largest deviation, and bytes read per byte delivered"
            blocks.append([title, *_aligned(["", "chunk", "engine", *table.orders], rows)])
    if blocks:
        blocks.append(_legend(report))
    run_off = "run-off: speeds, and their ratios to the speed of the recommended settings (median over the turns)"
    others: list[_Line] = [(one, []) for one in table.others]
    for title, more_heads, found_lines in (("other settings", [], others), (run_off, ["ratio"], _run_off(report))):
        lines = sorted((line for line in found_lines if line[0].speeds), key=lambda line: -line[0].median)
        if lines:
            heads = ["", "order", "engine", "cache", "batch", "window", "threads", "workers", "images/s", *more_heads]
            rows = []
            for one, more in lines:
                cells = asdict(one.case) | ({} if one.case.num_workers is None else {"engine": "DataLoader"})
                rows.append(["-" if cell is None else str(cell) for cell in cells.values()] + [_entry(one), *more])
            blocks.append([title, *_aligned(heads, rows)])
    return blocks


def _run_off(report: BenchReport) -> list[_Line]:
    """Return the lines of the run-off's table, with ratios to the recommended settings measured in the same turns."""
    sweep, chosen = {one.case: one for one in report.measurements}, report.recommendation
    repeats = {one.case: CaseRepeats.of(sweep.get(one.case), one) for one in report.run_off}
    lines: list[_Line] = []
    for one in report.run_off:
        ratios: tuple[float, ...] = ()
        if chosen is not None and chosen.compared and one.case.num_workers is None:
            best = replace(one.case, variant=chosen.variant, num_threads=chosen.num_threads, window=chosen.window)
            ratios = repeats[one.case].ratios(repeats[best]) if best in repeats else ()
        lines.append((repeats[one.case].stated, [f"{statistics.median(ratios):.2f}" if ratios else "-"]))
    return lines


def _legend(report: BenchReport) -> list[str]:
    chosen, engines = report.recommendation, {one.case.engine for one in report.measurements}
    marks = [] if chosen is None else ["> recommended"]
    if chosen is not None and chosen.compared and len(chosen.ties) > 1:
        marks.append("= no clear difference from the recommended one")
    if any(variant.compression != "none" for variant in report.variants):
        marks.append("chunk: uncompressed size x (stored bytes / uncompressed bytes, of all images)")
    readers = {
        "direct": "H5Loader, without the HDF5 library if possible; single: H5Dataset",
        "tuned": "H5Loader through the HDF5 library, with a chunk cache that suits any order; single: h5py",
        "default": "plain h5py, row by row (sequential: a batch at a time), with its default chunk cache",
    }
    return [
        *marks,
        *(f"{name}: {text}" for name, text in readers.items() if name in engines),
        "sequential: as stored; window: window shuffle; full: full shuffle; single: one random index a call",
        f"without ±: fewer than {MIN_REPEATS} repeats, which are short and may be much slower than a whole training",
        "speeds are medians of repeats, but ratios compare repeats of the same turn, so the two may differ",
    ]


def _size(variant: FileVariant) -> str:
    size = "-" if variant.chunk_bytes is None else format_bytes(variant.chunk_bytes)
    return size if variant.compression == "none" else f"{size} x {variant.overhead:.2f}"


def _entry(one: Measurement | None) -> str:
    if one is None or not one.speeds:
        return "-"
    factor = one.amplification or 0.0
    read = "" if factor < 1.05 else f", {factor:.3g}x" if factor < 100 else f", {factor:,.0f}x"
    return measured_text(one.speeds) + read


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return table lines; the first column is aligned left, the others right."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in (heads, *rows)
    ]


def _unmeasured(report: BenchReport) -> list[str]:
    """Return each reason for missing measurements once, with the number of its cases and the first of these cases."""
    reasons: dict[str, list[BenchCase]] = {}
    # Leave out the cases that there was no time for. Usually, a note states their number (see `bench.py`).
    tried = [one for one in report.measurements if one.reason != NO_TIME]
    for one in (*tried, *report.run_off):
        if one.reason is not None:
            reasons.setdefault(one.reason, []).append(one.case)
    return [
        f"{counted(len(cases), 'case')} ({cases[0]}{' and others' if len(cases) > 1 else ''}): {printable(reason)}"
        for reason, cases in reasons.items()
    ]


def _bullets(title: str, texts: Iterable[str], indent: str = "- ") -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = indent, " " * len(indent)
    lines = [line for text in texts for line in wrapper.wrap(text)]
    return [title, *lines] if lines and title else lines
