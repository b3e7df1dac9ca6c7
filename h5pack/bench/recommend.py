"""What to take, by what was measured: pure, and never surer than the figures are."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from h5pack import schema
from h5pack.bench.cell import ENOUGH_REPEATS, Cell, Measurement, Stored
from h5pack.bench.report import Recommendation
from h5pack.layout import plan_cache
from h5pack.pack.options import ConvertOptions
from h5pack.pack.plan import human_bytes
from h5pack.wording import counted

ALIKE = 0.95
"""From this part of the fastest on, a setting counts as fast as it: repeats on a quiet machine differ by as much."""
_CONTENDS = 0.6
ENOUGH_ROWS, ENOUGH_BYTES = 256, 16 * 1024 * 1024
"""A sample has either: less fits into a CPU's caches."""
_UNSURE_SPREAD = 0.4


@dataclass(frozen=True)
class Question:
    """What the recommendation is for.

    Attributes
    ----------
    source : str
        What is to be converted, as on a command line; empty for generated images.
    options : ConvertOptions
        How its images become rows.
    images, row_bytes, sample_rows : int
    row_shape : tuple of int
    default_rows : int
        Rows a chunk that a conversion takes by itself.
    memory : int
        Bytes that are available for the page cache.
    batch, window, threads : int
        Of the sweep.
    cpus : int
    copy : float or None
        Images/s of a memory copy on as many threads.
    """

    source: str
    options: ConvertOptions
    images: int
    row_bytes: int
    sample_rows: int
    row_shape: tuple[int, ...]
    default_rows: int
    memory: int
    batch: int
    window: int
    threads: int
    cpus: int
    copy: float | None = None


def decisive(question: Question, measurements: Sequence[Measurement]) -> tuple[str, str]:
    """Which page-cache state decides, "hot" or "cold", and why, as a sentence."""
    size = question.images * question.row_bytes
    sizes = f"{question.images:,} images make {human_bytes(size)}, and {human_bytes(question.memory)} of memory"
    measured = {one.cell.cache for one in measurements if one.speeds}
    fits = size <= question.memory // 2
    if fits and "hot" in measured:
        return "hot", f"Judged with the page cache warm: {sizes} are available, so the file stays there after an epoch."
    if not fits and "cold" in measured:
        return "cold", f"Judged with the page cache cold: {sizes} are available, so each epoch reads the disk."
    if not fits:
        return "hot", f"Judged with the page cache warm, though {sizes} are available: cold reads were not measured."
    return "cold", "Judged with the page cache cold, since warm reads were not measured."


def contenders(
    files: Sequence[Stored], measurements: Sequence[Measurement], question: Question, cache: str, most: int = 6
) -> list[Cell]:
    """The cells of the fastest stored forms, fastest first: those that a run-off should compare again."""
    cells = _comparable(files, measurements, question, cache)
    cells.sort(key=lambda one: -one.median)
    return [one.cell for one in cells[:most] if one.median >= _CONTENDS * cells[0].median]


def choose(
    files: Sequence[Stored], measurements: Sequence[Measurement], trials: Sequence[Measurement], question: Question
) -> Recommendation | None:
    """The recommendation; None where nothing was measured that it could rest on.

    Parameters
    ----------
    files : sequence of Stored
    measurements, trials : sequence of Measurement
        Of the sweep, and of the run-off between its fastest.
    question : Question
    """
    cache, why = decisive(question, measurements)
    stored = {one.label: one for one in files}
    swept = _comparable(files, measurements, question, cache)
    found = _pooled(swept, _comparable(files, trials, question, cache))
    if not found:
        return None
    best = max(found, key=lambda one: one.median)
    alike = [one for one in found if one.median >= ALIKE * best.median]
    picked = min(alike, key=lambda one: _distance(stored[one.cell.stored], question))
    form = stored[picked.cell.stored]
    others = [one for one in (*trials, *measurements) if one.cell.stored == form.label and one.cell.cache == cache]
    threads, threads_why = _pick_threads(others, question, picked)
    workers, workers_why = _pick_workers(others, question)
    window = _pick_window(others, question, picked)
    settled = next(
        (one for one in [picked, *others] if one.speeds and _has(one.cell, question, window, threads)), picked
    )
    doubts = _doubts([best, picked], max(len(found), len(swept)), question)
    reasons = [_about(form, picked, alike, found, question), why, *threads_why, *workers_why]
    own = next((one for one in files if one.own), None)
    compared = [*found, *swept]
    gain, gain_why = _gain(own, form, picked, measurements, compared, cache)
    if doubts:
        reasons.append(f"Not sure: {'; '.join(doubts)}.")
    # Of all images, not of the sample.
    grid = [question.images, *question.row_shape]
    chunks = [form.chunk_rows or question.images, *question.row_shape]
    plan = plan_cache(grid, chunks, 1, filtered=form.compression != "none", window=window)
    return Recommendation(
        stored=form.label,
        convert=not form.own,
        chunk_rows=form.chunk_rows,
        compression=form.compression,
        batch=question.batch,
        window=window,
        threads=threads,
        workers=workers,
        cache=None if form.chunk_rows is None or form.own else plan,
        judged_by=cache,
        images_per_s=round(settled.median, 1),
        alike=tuple(one.cell.stored for one in alike),
        sure=not doubts,
        reasons=(*reasons, *gain_why),
        command="" if form.own else _command(form, question),
        code=_code(form, question.batch, window, threads, workers),
        gain=gain,
    )


def _has(cell: Cell, question: Question, window: int, threads: int) -> bool:
    """Whether H5Loader reads in it, in the order that decides, with these settings."""
    return (cell.engine, cell.order, cell.batch, cell.window, cell.threads, cell.workers) == (
        "direct", "window", question.batch, window, threads, None,
    )  # fmt: skip


def _comparable(
    files: Sequence[Stored], measurements: Sequence[Measurement], question: Question, cache: str
) -> list[Measurement]:
    """What was measured of stored forms that may be recommended: a pack has chunks."""
    allowed = {one.label for one in files if one.own or one.chunk_rows is not None}
    return [
        one
        for one in measurements
        if one.speeds and one.cell.stored in allowed and _is_plain(one.cell, question, cache)
    ]


def _pooled(sweep: Sequence[Measurement], trials: Sequence[Measurement]) -> list[Measurement]:
    """What the run-off settled; what was not in it had lost before."""
    if not trials:
        return list(sweep)
    earlier = {one.cell: one for one in sweep}
    return [earlier.get(one.cell, Measurement(one.cell)).settled_by(one) for one in trials]


def _is_plain(cell: Cell, question: Question, cache: str) -> bool:
    """Whether nothing but the stored form differs from others."""
    return cell.cache == cache and _has(cell, question, question.window, question.threads)


def _distance(stored: Stored, question: Question) -> tuple[int, float]:
    """Least for what needs no work, and then for what a conversion gives by itself."""
    if stored.own or stored.chunk_rows is None:
        return 0, 0.0
    compressed = stored.compression != "none"
    return 1 + compressed, abs(math.log(stored.chunk_rows / max(1, question.default_rows)))


def _about(
    form: Stored, picked: Measurement, alike: Sequence[Measurement], found: Sequence[Measurement], question: Question
) -> str:
    copy = ""
    if question.copy and picked.cell.cache == "hot":
        copy = f", {picked.median / question.copy:.2f} of a memory copy"
    chunks = f"Chunks of {form.label} ({human_bytes(form.chunk_bytes or 0)})"
    form_text = "The file as it is" if form.own else chunks
    text = (
        f"{form_text}: {picked.median:,.0f} images/s in shuffled batches of {question.batch:,}{copy}, the median of "
        f"{len(picked.speeds)} runs from {min(picked.speeds):,.0f} to {max(picked.speeds):,.0f}."
    )
    others = [one.cell.stored for one in alike if one.cell.stored != form.label]
    slower = [one for one in found if one not in alike]
    if others:
        why = "this one needs no work" if form.own else "this one is nearest to what h5pack convert takes by itself"
        text += f" As fast within {100 * (1 - ALIKE):.0f} %: {', '.join(others)}; of these {why}."
    unclear = [one for one in slower if max(one.speeds) >= min(picked.speeds)]
    if unclear:
        speeds = ", ".join(f"{one.cell.stored} with {one.median:,.0f}" for one in unclear)
        text += f" Slower, but by less than runs differ: {speeds}."
    if slower:
        worst = min(slower, key=lambda one: one.median)
        text += f" The slowest of the run-off, {worst.cell.stored}, gives {worst.median:,.0f}."
    return text


def _varied(others: Sequence[Measurement], question: Question, same: Callable[[Cell], bool]) -> list[Measurement]:
    cells: dict[Cell, Measurement] = {}
    for one in others:
        cell = one.cell
        plain = cell.engine == "direct" and cell.order == "window" and cell.batch == question.batch
        if one.speeds and plain and same(cell):
            # The run-off's come first, and count.
            cells.setdefault(cell, one)
    return list(cells.values())


def _pick_threads(others: Sequence[Measurement], question: Question, picked: Measurement) -> tuple[int, list[str]]:
    found = _varied(others, question, lambda cell: cell.window == question.window and cell.workers is None)
    best = max(found, key=lambda one: one.median, default=picked)
    least = min((one for one in found if one.median >= ALIKE * best.median), key=_threads_of, default=picked)
    if len(found) < 2:
        return question.threads, []
    speeds = ", ".join(f"{one.cell.threads}: {one.median:,.0f}" for one in sorted(found, key=_threads_of))
    count = least.cell.threads
    return count, [f"{counted(count, 'reading thread')} of H5Loader; images/s by threads: {speeds}."]


def _threads_of(one: Measurement) -> int:
    return one.cell.threads


def _pick_workers(others: Sequence[Measurement], question: Question) -> tuple[int, list[str]]:
    found = _varied(others, question, lambda cell: cell.window == question.window and cell.workers is not None)
    if not found:
        return question.cpus, [
            f"{question.cpus} workers, as many as there are CPUs, for a DataLoader instead of H5Loader: not measured."
        ]
    best = max(found, key=lambda one: one.median)
    least = min((one for one in found if one.median >= ALIKE * best.median), key=_workers_of)
    speeds = ", ".join(f"{one.cell.workers}: {one.median:,.0f}" for one in sorted(found, key=_workers_of))
    count = least.cell.workers or 0
    text = f"{counted(count, 'worker')} where a DataLoader is wanted instead of H5Loader"
    return count, [f"{text}; images/s by workers: {speeds}."]


def _workers_of(one: Measurement) -> int:
    return one.cell.workers or 0


def _pick_window(others: Sequence[Measurement], question: Question, picked: Measurement) -> int:
    """The window asked for first, unless another is clearly faster."""
    found = _varied(others, question, lambda cell: cell.threads == question.threads and cell.workers is None)
    best = max(found, key=lambda one: one.median, default=picked)
    asked = next((one for one in found if one.cell.window == question.window), picked)
    return question.window if asked.median >= ALIKE * best.median else best.cell.window


def _doubts(deciding: Sequence[Measurement], compared: int, question: Question) -> list[str]:
    doubts = []
    least = min(len(one.speeds) for one in deciding)
    if least < ENOUGH_REPEATS:
        doubts.append(f"what decides was measured {counted(least, 'time')} only; give more --seconds")
    elif any(max(one.speeds) - min(one.speeds) > _UNSURE_SPREAD * one.median for one in deciding):
        doubts.append(
            f"repeats differ by more than {100 * _UNSURE_SPREAD:.0f} %; try again on a machine that does nothing else"
        )
    size = question.sample_rows * question.row_bytes
    if question.sample_rows < ENOUGH_ROWS and size < ENOUGH_BYTES:
        doubts.append(f"the sample has {question.sample_rows:,} rows only, of {human_bytes(size)}")
    if compared < 2:
        doubts.append("there was nothing to compare it with")
    return doubts


def _gain(
    own: Stored | None,
    form: Stored,
    picked: Measurement,
    measurements: Sequence[Measurement],
    compared: Sequence[Measurement],
    cache: str,
) -> tuple[float | None, list[str]]:
    """How much faster the recommended form is than the file asked about."""
    if own is None or form.own:
        return None, []
    speeds = {
        (one.cell.engine, one.cell.order): one.median
        for one in measurements
        if one.cell.stored == own.label and one.cell.cache == cache and one.speeds and one.cell.workers is None
    }
    single = speeds.get(("default", "single"))
    loader = next((one.median for one in compared if one.cell.stored == own.label), None)
    reasons = []
    if loader:
        reasons.append(
            f"The file as it is gives H5Loader {loader:,.0f} images/s, {picked.median / loader:.1f} times less."
        )
    if single:
        reasons.append(
            f"One index by plain h5py, as most people read it, gives {single:,.0f} images/s of it, "
            f"{picked.median / single:.1f} times less than H5Loader after converting."
        )
    return (round(picked.median / single, 2) if single else None), reasons


def _command(form: Stored, question: Question) -> str:
    options = question.options
    words = ["h5pack", "convert", question.source or "IMAGES", "packed.h5"]
    if form.chunk_rows is not None:
        words += ["--chunk-rows", str(form.chunk_rows)]
    if form.compression != "none":
        words += ["--compression", form.compression]
    if options.size is not None:
        words += ["--size", f"{options.size[0]}x{options.size[1]}"]
    for flag, value, usual in (("--source", options.source, (None,)), ("--images", options.images, (None, "images")),
                               ("--labels", options.labels, (None, "labels")), ("--layout", options.layout, ("nhwc",)),
                               ("--mode", options.mode, ("rgb",))):  # fmt: skip
        if value not in usual:
            words += [flag, str(value)]
    return shlex.join(words)


def _code(form: Stored, batch: int, window: int, threads: int, workers: int) -> str:
    named = ""
    if form.own:
        named += "" if form.images == schema.IMAGES else f", images={form.images!r}"
        named += "" if form.labels in (None, schema.LABELS) else f", labels={form.labels!r}"
    path = form.path if form.own else "packed.h5"
    return (
        f"dataset = h5pack.H5Dataset({path!r}{named})\n"
        f"loader = h5pack.H5Loader(dataset, {batch}, window={window}, threads={threads})\n"
        "# or, where a DataLoader is wanted:\n"
        f"sampler = h5pack.ChunkBatchSampler(dataset, {batch}, window={window})\n"
        f"loader = DataLoader(dataset, batch_sampler=sampler, num_workers={workers}, collate_fn=dataset.collate)"
    )
