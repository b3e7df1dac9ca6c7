"""Pure functions that choose the recommendation from the measurements, with its reasons."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from h5pack.benchmark.cases import (
    HOPELESS,
    MIN_EPOCH_SECONDS,
    MIN_REPEATS,
    MIN_TURNS,
    NO_TIME,
    SHORT_EPOCH_SECONDS,
    TIE,
    BenchCase,
    CaseRepeats,
    FileVariant,
    Measurement,
    ceiling_threads,
    is_small,
)
from h5pack.benchmark.loader_settings import (
    Workload,
    cache_reason,
    epoch_text,
    measuring_reasons,
    pick_settings,
    pick_workers,
    plan_chunk_cache,
    ratio_text,
)
from h5pack.format import schema
from h5pack.format.plans import CachePlan
from h5pack.pack.options import convert_command, copy_name, lacks_labels
from h5pack.system.text import counted

_MAX_FINALISTS = 6
_NEAR = math.log(1.5)  # A variant up to this distance from the default (see `_effort`) counts as near the default.
WORTH = 1.15  # A chunk size is recommended instead of the default only if it is at least this many times as fast.
_BUSY_SPREAD = 1.5  # The machine counts as busy if speed ratios vary by more than this factor (see `_is_busy`).


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chunks and settings to use on this machine, with the reasons."""

    variant: str  # Label of the recommended `FileVariant`.
    convert: bool  # True: convert to this variant. False: keep the input file.
    chunk_rows: int | None
    compression: str
    batch_size: int  # Rows per batch for H5Loader.
    window: int  # Number of chunks that H5Loader shuffles together.
    num_threads: int  # Number of threads for H5Loader.
    num_workers: int  # Number of worker processes if a DataLoader is used instead of H5Loader.
    # Chunk cache for reading the converted file in window shuffle with h5py; None if the input file is kept.
    chunk_cache: CachePlan | None
    judged_by: str  # Page-cache state whose speeds decided: "hot" or "cold".
    images_per_s: float  # Speed measured with these settings; the batch size may have been smaller.
    images_per_s_range: tuple[float, float] = (0.0, 0.0)  # Slowest and fastest repeat.
    # Ratio of the speed to the ceiling, which is measured after each repeat: the median, the lowest and the highest.
    # None if no ceiling was measured.
    of_ceiling: tuple[float, float, float] | None = None
    ceiling_threads: int = 0  # Number of threads that measured the ceiling.
    ties: tuple[str, ...]  # Labels of this variant and of those not clearly different from it; all if not compared.
    compared: bool = True  # Whether variants were compared; False if the sample is too small, or if `hardly_matters`.
    hardly_matters: bool = False  # Whether all images are read so fast that no other variant can save much time.
    memory_images: int = 0  # Number of images that fit into half of the available memory.
    reasons: tuple[str, ...]  # Sentences that explain the recommendation.
    command: str  # Command line that converts to the variant; empty if `convert` is False.
    code: str  # Python code that reads the file with these settings.
    is_default: bool = False  # Whether `h5pack.convert` makes the variant's chunks by default.
    busy: bool = False  # Whether repeats differed too much to compare variants, as on a busy machine.
    # True: the median speed ratio of each other variant is too low for recommending that variant (see `_worth`).
    best_in_median: bool = False
    unsure: bool = False  # Whether more turns could lead to another recommendation; False if `busy`.
    # Speedup over reading the input file with h5py, one index per call. None if that was not measured, or if the input
    # file itself is recommended.
    gain: float | None = None

    @property
    def label_note(self) -> str:
        """Advice on labels if `command` packs fields, but no labels; else empty."""
        if not lacks_labels(shlex.split(self.command)):
            return ""
        return "The command packs no labels, because no dataset is named like labels; choose one with labels=NAME."


@dataclass(frozen=True)
class Findings:
    """The measurements of the sweep and of the run-off (see `bench.py`), and what is needed to judge them."""

    variants: Sequence[FileVariant]
    measurements: list[Measurement]  # The sweep. Measuring adds elements to this list and to `run_off`.
    run_off: list[Measurement]
    workload: Workload
    cache: str  # The page-cache state whose speeds decide.

    @property
    def cases(self) -> dict[BenchCase, FileVariant]:
        """The cases that compare variants, each with its variant.

        A contiguous copy is left out, because `convert` does not write contiguous files.
        """
        given = [one for one in self.variants if one.is_input or one.chunk_rows is not None]
        return {self.workload.case(one.label, self.cache): one for one in given}

    def compared(self) -> list[_Compared]:
        """Return the variants of `cases` that were measured, with their measurements."""
        cases, again = self.cases, {one.case: one for one in self.run_off}
        some = [one for one in self.measurements if one.speeds and one.case in cases]
        found = [(one, CaseRepeats.of(one, again.get(one.case))) for one in some]
        return [_Compared(repeats.stated, repeats.every, cases[one.case]) for one, repeats in found]


def missing(findings: Findings, not_packed: Sequence[str] = ()) -> list[str]:
    """Return phrases on what is missing for a recommendation. Clearly slow variants do not need all their repeats."""
    measured, cases = (*findings.measurements, *findings.run_off), findings.cases
    if cases.keys().isdisjoint(one.case for one in measured):
        return [
            "the cases by which variants are compared: H5Loader in window shuffle (orders='window', engines='direct')"
        ]
    found = {one.stated.case: one.stated for one in findings.compared()}
    failed = {one.case for one in measured if one.reason not in (None, NO_TIME)}
    best = max((one.median for one in found.values()), default=0.0)
    phrases = []
    for case, variant in cases.items():
        repeats = len(found[case].speeds) if case in found else 0
        slow = case in found and max(found[case].speeds) < HOPELESS * best
        if repeats < MIN_REPEATS and not slow and case not in failed:
            phrases.append(f"{variant.label}: only {repeats} of {MIN_REPEATS} repeats were measured")
    if not found and not phrases:
        phrases.append("H5Loader in window shuffle, which failed; the whole report, with full=True, lists the errors")
    if len(cases) < 2 and not_packed:
        phrases.append(f"variants that were not packed: {', '.join(not_packed)}")
    return phrases


def finalists(findings: Findings) -> list[BenchCase]:
    """Return the cases to measure again side by side: one for each of the fastest variants, the fastest first.

    The input file and the variant nearest to the default are always included, because all other variants are compared
    with these two.
    """
    some = findings.compared()
    packed = [one for one in some if not one.variant.is_input]
    # If two are equally near, take the first one, as `choose` does.
    nearest = min(packed, key=lambda one: _effort(one.variant, findings.workload), default=None)
    found = sorted(some, key=lambda one: -one.stated.median)
    fast = [one for one in found[:_MAX_FINALISTS] if one.stated.median >= HOPELESS * found[0].stated.median]
    return [one.stated.case for one in found if one in fast or one is nearest or one.variant.is_input]


def choose(findings: Findings) -> Recommendation | None:
    """Choose the recommendation (see `_pick_variant`) from all measurements; return None if nothing was measured."""
    found, workload = findings.compared(), findings.workload
    if not found:
        return None
    speed = _pick_variant(found, workload, compare=False).stated.median
    is_short = workload.num_images < SHORT_EPOCH_SECONDS * speed or is_small(workload.num_images, workload.row_bytes)
    hardly_matters = is_short and not workload.any_size
    small = workload.sample_rows < MIN_EPOCH_SECONDS * speed or is_small(workload.sample_rows, workload.row_bytes)
    compared = not (hardly_matters or small)
    picked = _pick_variant(found, workload, compare=compared)
    ties = [one for one in found if not compared or not (picked.is_likely_faster(one) or one.is_likely_faster(picked))]
    busy = compared and _is_busy(picked, found, workload)
    variant = picked.variant
    # If variants are not compared, do not compare settings either: the differences would be noise.
    run_off = findings.run_off if compared else ()
    used, settings_reasons = pick_settings(picked.stated, run_off, workload)
    case = replace(used.case, batch_size=workload.recommended_batch_size)
    num_workers, workers_reasons = pick_workers(picked.stated, run_off, workload)
    gain, gain_reasons = _gain(findings, picked.stated, found)
    ratios = used.of_ceiling
    return Recommendation(
        variant=variant.label,
        convert=not variant.is_input,
        chunk_rows=variant.chunk_rows,
        compression=variant.compression,
        batch_size=case.batch_size,
        window=case.window,
        num_threads=case.num_threads,
        num_workers=num_workers,
        chunk_cache=plan_chunk_cache(variant, case.window, workload),
        judged_by=findings.cache,
        images_per_s=round(used.median, 1),
        images_per_s_range=(round(min(used.speeds), 1), round(max(used.speeds), 1)),
        of_ceiling=(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None,
        ceiling_threads=ceiling_threads(used.case, workload.cpus),
        ties=tuple(one.variant.label for one in ties),
        compared=compared,
        hardly_matters=hardly_matters,
        memory_images=workload.memory_images,
        reasons=(
            *measuring_reasons(workload),
            *gain_reasons[:1],
            *(_comparison(picked, found, workload) if compared else _epochs(picked, found, workload, hardly_matters)),
            cache_reason(workload, findings.cache),
            *settings_reasons,
            *workers_reasons,
            *gain_reasons[1:],
        ),
        command="" if variant.is_input else _command(variant, workload),
        code=_code(variant, case, workload),
        is_default=workload.is_default(variant),
        busy=busy,
        best_in_median=compared and _is_best_in_median(picked, found),
        unsure=compared and not busy and not _is_best(picked, found),
        gain=gain,
    )


@dataclass(frozen=True)
class _Compared(CaseRepeats):
    """A file variant, and the measurements that compare it with others."""

    variant: FileVariant

    def is_faster(self, other: _Compared, min_turns: int = MIN_TURNS) -> bool:
        """Return whether this variant is faster than `other`: by `Measurement.is_faster`, or by a sign test.

        The sign test has a level of 1 %. It tests whether the median of a ratio is below `TIE`: the speed of `other`
        divided by the speed of this variant. The test needs at least 7 turns.
        """
        mine, others = self.beside(other)
        return mine.is_faster(others, min_turns) or _is_below(other.ratios(self, all_turns=True), TIE, 0.01)

    def is_likely_faster(self, other: _Compared) -> bool:
        """Return whether this variant is faster than `other`, or likely faster.

        It is likely faster if there are at least `MIN_REPEATS` ratios of their speeds (see `ratios`), all of them are
        above 1, and their median is above 1 / `TIE`.
        """
        ratios = self.ratios(other)
        was_faster = len(ratios) >= MIN_REPEATS and ratios[0] > 1 and TIE * statistics.median(ratios) > 1
        return was_faster or self.is_faster(other, MIN_REPEATS)


def _pick_variant(found: Sequence[_Compared], workload: Workload, *, compare: bool) -> _Compared:
    """Return the recommended variant. The *usual* variant is the one of least effort (see `_effort`).

    Without `compare`, return the usual variant. Exception: if the usual variant is the input file, and the variant
    nearest to the default is faster, return the variant nearest to the default.

    With `compare`, the first rule that applies decides:

    - If the usual variant is not near the default (see `_NEAR`), return the one of least effort among the variants that
      are not likely slower than another.
    - If the usual variant is the input file, apply these rules to the variants that are faster than the input file. If
      there are none, return the input file.
    - Otherwise, find the variants that are faster than the usual one (see `_Compared.is_faster`) and at least `WORTH`
      times as fast in the median. Return the fastest of them. If several are equally fast, return the one of least
      effort among these, so that noise does not decide. If no variant is that much faster, return the usual one.
    """

    def least_effort(some: Sequence[_Compared]) -> _Compared:
        return min(some, key=lambda one: _effort(one.variant, workload))

    usual = least_effort(found)
    if not compare:
        default = least_effort([one for one in found if not one.variant.is_input] or found)
        return default if default.is_faster(usual, MIN_REPEATS) else usual
    if _effort(usual.variant, workload)[1] > _NEAR:
        return least_effort([one for one in found if not any(other.is_likely_faster(one) for other in found)] or found)
    faster = [one for one in found if one.is_faster(usual)]
    if usual.variant.is_input:
        return _pick_variant(faster, workload, compare=True) if faster else usual
    faster = [one for one in faster if statistics.median(one.ratios(usual) or [WORTH]) >= WORTH]
    fastest = [one for one in faster if not any(other.is_faster(one) for other in faster)]
    return least_effort(fastest or faster or [usual])


def _is_busy(picked: _Compared, found: Sequence[_Compared], workload: Workload) -> bool:
    """Return whether `picked` is the variant of least effort, and speeds vary too much to say if others are faster."""
    others = [one.ratios(picked) for one in found if one is not picked and not picked.is_faster(one)]
    spread = statistics.median([ratios[-1] / ratios[0] for ratios in others if ratios] or [1.0])
    usual = min(_effort(one.variant, workload) for one in found)
    vary = spread > _BUSY_SPREAD and not _is_best(picked, found)
    return vary and _effort(picked.variant, workload) == usual


def _is_best(picked: _Compared, found: Sequence[_Compared]) -> bool:
    """Return whether sign tests show that no other variant is fast enough to be recommended instead (see `_worth`)."""
    others = [one for one in found if one is not picked and not picked.is_faster(one)]
    return all(_is_below(one.ratios(picked, all_turns=True), _worth(picked)) for one in others)


def _is_best_in_median(picked: _Compared, found: Sequence[_Compared]) -> bool:
    others = [one.ratios(picked) for one in found if one is not picked]
    return all(ratios and statistics.median(ratios) < _worth(picked) for ratios in others)


def _worth(picked: _Compared) -> float:
    """Return how many times as fast another variant must be to be recommended instead."""
    return 1 / TIE if picked.variant.is_input else WORTH


def _is_below(ratios: Sequence[float], bound: float, level: float = 0.05) -> bool:
    """Return whether the true median of ratios is below `bound`, by a one-sided sign test."""
    count, above = len(ratios), sum(ratio >= bound for ratio in ratios)
    outcomes = sum(math.comb(count, number) for number in range(above + 1))
    return outcomes <= level * 2.0**count


def _effort(variant: FileVariant, workload: Workload) -> tuple[int, float]:
    """Return a sort key: the kind of the variant, and the distance of its chunk size from the default.

    The kinds are:

    - 0: the input file, if `decodes_input` is false;
    - 1: an uncompressed variant;
    - 2: a compressed variant;
    - 3: the input file, if `decodes_input` is true.

    The distance is the absolute value of the logarithm of (rows per chunk / default rows per chunk). The distance of
    the input file is 0.
    """
    if variant.is_input or variant.chunk_rows is None:
        return 3 * workload.decodes_input, 0.0
    return 1 + (variant.compression != "none"), abs(math.log(variant.chunk_rows / max(1, workload.default_chunk_rows)))


def _name(variant: FileVariant) -> str:
    return "the input file" if variant.is_input else variant.label


def _epochs(picked: _Compared, found: Sequence[_Compared], workload: Workload, hardly_matters: bool) -> list[str]:
    """Return a list of one sentence on how long an epoch takes with each chunk size; empty if there is only one size.

    An input file that is not recommended is left out, because the sentences of `_gain` state its time.
    """
    texts, fastest, seconds = [], 1.0, workload.num_images / picked.stated.median
    for one in found:
        if one is not picked and not one.variant.is_input:
            ratios = one.ratios(picked) or (one.stated.median / picked.stated.median,)
            fastest = max(fastest, statistics.median(ratios))
            speeds = (picked.stated.median * ratio for ratio in ratios)
            texts.append(f"{one.variant.label} {epoch_text(workload.num_images, *speeds)}")
    if not texts:
        return []
    own = epoch_text(workload.num_images, *picked.stated.speeds)
    best = "the sample is too small to compare them"
    if hardly_matters:
        best = f"the fastest may save {1000 * seconds * (1 - 1 / fastest):.1f} ms an epoch, too little to matter"
        best = "none is faster" if fastest == 1 else best
    how = f"{'Epochs' if hardly_matters else 'Roughly estimated epochs'} of {counted(workload.num_images, 'image')}"
    return [f"{how}: {_name(picked.variant)} {own}; other chunks: {', '.join(texts)}; {best}."]


def _comparison(picked: _Compared, found: Sequence[_Compared], workload: Workload) -> list[str]:
    """Return sentences that compare the recommended variant with the others, by their speeds in the same turns."""
    if len(found) == 1:
        return ["There was no other variant to compare the recommended one with."]
    label = _name(picked.variant)
    slower = [one for one in found if picked.is_faster(one)]
    faster = [one for one in found if one.is_likely_faster(picked)]
    below = [one for one in found if picked.is_likely_faster(one) and one not in slower]
    equal = [one for one in found if one is not picked and one not in (*faster, *below, *slower)]
    why = _why(picked, [*faster, *equal], workload)
    worth = f"{100 * _worth(picked) - 100:.0f} % faster"
    noise = f"certainly none is {worth}, so "
    if not _is_best(picked, equal):
        noise = "that is not certain, so "
        if _is_best_in_median(picked, equal):
            noise = f"none is {worth} in the median, but {noise}"
    turns = min((len(one.ratios(picked)) for one in faster), default=0)
    chance = "not certain enough"
    if turns < MIN_TURNS and all(one.is_faster(picked, MIN_REPEATS) for one in faster):
        chance = f"there was time for {counted(turns, 'turn')}, and {MIN_TURNS} are needed"
    elif all(one.is_faster(picked) for one in faster):
        chance = f"by less than {100 * WORTH - 100:.0f} %"
    texts = []
    for begin, some, end in (
        ("Probably faster than {}", faster, f"; {chance}, so {why}"),
        ("No clear difference from {}", equal, f"; {noise}{why}"),
        ("Probably slower than {}", below, ""),
        ("Slower than {} in this run", slower, ""),
    ):
        if some:
            counts = [len(picked.ratios(one, all_turns=True)) for one in some]
            low, high = min(counts), max(counts)
            number = counted(high, "turn") if low == high else f"{low} to {counted(high, 'turn')}"
            how = f"by the ratio of speeds in {number}"
            texts.append(f"{begin.format(label)}, {how}: {_relative(some, picked, workload)}{end}.")
    return texts


def _why(picked: _Compared, others: Sequence[_Compared], workload: Workload) -> str:
    """Return why `picked` is recommended, although `others` may be as fast or faster."""
    if picked.variant.is_input:
        return "the input file is kept, which is the least work"
    if workload.is_default(picked.variant):
        return "the default is recommended"
    if all(_effort(picked.variant, workload) <= _effort(one.variant, workload) for one in others):
        return "the one nearest to the default is recommended"
    return "the one that compares best with all others is recommended"


def _relative(some: Sequence[_Compared], picked: _Compared, workload: Workload) -> str:
    """Return the speeds of variants as multiples of the picked variant's speed, the fastest first."""
    found = [(one, one.ratios(picked) or (one.stated.median / picked.stated.median,)) for one in some]
    texts = []
    for one, ratios in sorted(found, key=lambda item: -statistics.median(item[1])):
        name = one.variant.label + (" (the default)" if workload.is_default(one.variant) else "")
        texts.append(f"{name} {ratio_text(ratios)}")
        mine, others = picked.beside(one)
        if picked.is_faster(one) and not mine.is_faster(others, MIN_TURNS):
            # Only the sign test shows that the variant is slower, so state the numbers that this test uses.
            turns = one.ratios(picked, all_turns=True)
            below = sum(ratio < TIE for ratio in turns)
            texts[-1] += f", by over {100 - 100 * TIE:.0f} % in {below} of {len(turns)} turns"
    return ", ".join(texts)


def _gain(findings: Findings, picked: Measurement, compared: Sequence[_Compared]) -> tuple[float | None, list[str]]:
    """Return the speedup of `picked` over h5py reading the input file, and sentences on the input file's epochs.

    The speedup is None if it is unknown or if `picked` is the input file.
    """
    images, cache, window = findings.workload.num_images, picked.case.cache, findings.workload.window
    given = next((one for one in findings.variants if one.is_input), None)
    if given is None or given.label == picked.case.variant:
        return None, []
    read = {one.case: one for one in findings.measurements if one.speeds}
    own = next((one.stated for one in compared if one.variant is given), None)
    plain = read.get(BenchCase(given.label, "single", "default", cache, 1, window, 1))
    when = where = ""
    if cache == "hot":
        where = ", from the page cache"
        if own is not None and (cold := read.get(replace(own.case, cache="cold"))) is not None:
            how = "read from the disk" + " and decoded" * (given.compression != "none")
            when = f"{epoch_text(images, cold.median)} for a first epoch, {how}; then "
    # If H5Loader can read the input file, h5py's speed matters only if it is higher than the recommended variant's.
    shown = plain if own is None or (plain is not None and plain.median > picked.median) else None
    reasons = []
    for reader, one in ((f"H5Loader: {when}", own), (f"h5py with one index a call{where}: ", shown)):
        if one is not None:
            epochs = f"{epoch_text(images, *one.speeds)} an epoch instead of {epoch_text(images, picked.median)}"
            most = "; a training gains at most the difference" * (picked.median > one.median)
            reasons.append(f"The input file, read by {reader}{epochs}{most}.")
    return None if plain is None else round(picked.median / plain.median, 2), reasons


def _command(variant: FileVariant, workload: Workload) -> str:
    chunk_rows = None if workload.is_default(variant) else variant.chunk_rows
    options: dict[str, Any] = {**workload.options, "chunk_rows": chunk_rows, "compression": variant.compression}
    defaults = {"compression": "none", "layout": "nhwc", "mode": "rgb"}
    given = {name: value for name, value in options.items() if value not in (None, defaults.get(name))}
    return shlex.join(convert_command(workload.source, given))


def _code(variant: FileVariant, case: BenchCase, workload: Workload) -> str:
    names = "" if workload.split is None else f", split={workload.split!r}"
    if variant.is_input:
        names += "" if variant.images == schema.IMAGES else f", images={variant.images!r}"
        names += "" if variant.labels == schema.LABELS else f", labels={variant.labels!r}"
        names += f", fields={list(workload.fields)}" if workload.fields else ""
    path = variant.path if variant.is_input else copy_name(workload.source)
    is_asked = case.batch_size == workload.asked_batch_size
    few = "" if is_asked else f"  # batch_size: a quarter of the {workload.num_images:,} images"
    return (
        f"dataset = h5pack.H5Dataset({path!r}{names})\n"
        f"loader = h5pack.H5Loader(dataset, batch_size={case.batch_size}, window={case.window}, "
        f"num_threads={case.num_threads}){few}"
    )
